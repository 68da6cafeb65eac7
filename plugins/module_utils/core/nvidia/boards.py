# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What is kept of each GPU between two looks: facts that stay, the handle, and what was read last.

Whatever asks NVML here is called on the lane of the GPU that it asks about.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Callable, TypeVar

from .. import pci
from ..errors import AcceleratorError, BackendUnavailable
from ..model import UNKNOWN_ERROR, Device, Health, Partitioning
from ..system import System
from . import condition, discover
from .board_facts import BoardFacts, DriverFacts
from .edits import Capabilities
from .numbering import Numbering
from .nvml import Nvml
from .watch import Watch

Answer = TypeVar("Answer")

KERNEL_DRIVER = "nvidia"  # the name under which the kernel knows NVIDIA's own

# How long a GPU's MIG mode counts as read, for a change: it follows on a look at the GPU, or on another change, on one visit of its lane, and
# the change itself is refused where somebody else has been quicker than that.
MODE_SECONDS = 0.01
# What NVML answers for a handle that a mode change or a reset has made invalid.
_STALE = ("invalid-argument", "not-found", "gpu-not-found", UNKNOWN_ERROR)


class Boards:
    """The GPUs that were met, by UUID. Safe for threads."""

    def __init__(self, nvml: Nvml, system: System, watch: Watch) -> None:
        self._nvml = nvml
        self._system = system
        self._watch = watch
        self._lock = threading.Lock()
        self._driver: DriverFacts | None = None
        self._kept: dict[str, BoardFacts] = {}
        self._last: dict[str, Device] = {}
        self._read_at: dict[str, int | None] = {}  # what the watch said when the partitions were read
        self._away: dict[str, Device] = {}  # those that another driver has, for us
        self._returned = 0
        self._places: dict[
            int, str
        ] = {}  # PCI addresses by the position in NVML's list, of the GPUs met in this session
        self.numbering = Numbering(system)
        self._capabilities = Capabilities(system)

    @property
    def driver(self) -> DriverFacts:
        """What holds for all GPUs. Raises BackendUnavailable before it is known."""
        if self._driver is None:
            raise BackendUnavailable("NVML is not open", hint="Open the backend first.")
        return self._driver

    def begin(self, driver: DriverFacts) -> None:
        """Begin a session with the library."""
        self.numbering.read()
        with self._lock:
            self._driver = driver
            self._places.clear()
            self._capabilities = Capabilities(self._system)

    def end(self) -> None:
        """Forget all that holds for a session: every handle. What was read last is kept."""
        with self._lock:
            self._driver = None
            self._capabilities = Capabilities(self._system)
            self._kept.clear()
            self._places.clear()
            self._read_at.clear()

    def let_go(self) -> None:
        """Forget every handle, because the library is closed for a moment."""
        with self._lock:
            self._capabilities = Capabilities(self._system)
            self._kept.clear()
            self._places.clear()
            self._read_at.clear()

    def kept(self) -> tuple[BoardFacts, ...]:
        """Return the facts that are kept, in the order of their indices."""
        with self._lock:
            return tuple(sorted(self._kept.values(), key=lambda board: board.index))

    def known(self) -> tuple[Device, ...]:
        """Return what was read last of each GPU."""
        with self._lock:
            return tuple(self._last.values())

    def last(self, uuid: str) -> Device | None:
        """Return what was read last of a GPU; None for one that was never met."""
        with self._lock:
            return self._last.get(uuid)

    def uuid_at(self, index: int) -> str:
        """Return the UUID of the GPU that had this index last; empty where none had."""
        with self._lock:
            return next((device.uuid for device in self._last.values() if device.index == index), "")

    def send_away(self, device: Device) -> None:
        """Remember a GPU that NVML does not know any more, because another driver has it."""
        number = device.passthrough.number if device.passthrough is not None else None
        index = self.numbering.learn(device.pci_address, device.index, number)
        with self._lock:
            self._away[device.uuid] = self._last[device.uuid] = replace(device, index=index)
        self.forget(device.uuid)

    def away(self) -> dict[str, Device]:
        """Return the GPUs that another driver than NVIDIA's has for us, by what sysfs says at this moment."""
        with self._lock:
            sent = dict(self._away)
        back = [uuid for uuid, gpu in sent.items() if pci.driver_of(self._system, gpu.pci_address) == KERNEL_DRIVER]
        with self._lock:
            for uuid in back:
                self._returned += self._away.pop(uuid, None) is not None
            return dict(self._away)

    def welcome(self, uuid: str, action: Callable[[], None]) -> None:
        """Have a GPU taken back, and know that it was us: NVML is opened anew for it."""
        action()
        with self._lock:
            self._away.pop(uuid, None)

    @property
    def returned(self) -> int:
        """How many GPUs somebody else has given back to NVIDIA's driver, which NVML does not know until it is opened anew."""
        with self._lock:
            return self._returned

    def is_away(self, uuid: str) -> Device | None:
        """Return what was read last of a GPU that another driver has for us; None for all others."""
        with self._lock:
            sent = uuid in self._away
        return self.away().get(uuid) if sent else None

    def indices(self, count: int, anew: bool) -> tuple[int, ...]:
        """Return the index of each GPU of NVML's list; with ``anew`` the list differs from the previous scan."""
        with self._lock:
            if anew:
                self._places.clear()
            places = dict(self._places)
            away = [device.pci_address for device in self._away.values()]
        return self.numbering.indices(count, places, away)

    def forget(self, uuid: str, taken_away: bool = False) -> None:
        """Forget a handle and the facts behind it; for a GPU that was taken away everything."""
        with self._lock:
            self._kept.pop(uuid, None)
            self._read_at.pop(uuid, None)
            if taken_away:
                self._last.pop(uuid, None)
        self._watch.forget(uuid)

    def read(self, uuid: str) -> Device:
        """Read what changes about a GPU. Raises NotFound, DeviceFaulty, AcceleratorError."""
        return self._use(self._get(uuid), lambda: self._find(uuid), self._read)

    def board(self, uuid: str) -> BoardFacts:
        """Return the facts of a GPU that stay, for a change of it; right after ``read``, whose handle was good."""
        return self._get(uuid) or self._find(uuid)

    def settle(self, uuid: str) -> tuple[BoardFacts, Partitioning]:
        """Return the facts of a GPU that stay, for a change of it, and its MIG mode: what a change cannot do without.

        Raises NotFound, DeviceFaulty, AcceleratorError.
        """

        def ask(board: BoardFacts) -> tuple[BoardFacts, Partitioning]:
            return board, discover.settle(self._nvml, board, MODE_SECONDS)

        return self._use(self._get(uuid), lambda: self._find(uuid), ask)

    @property
    def capabilities(self) -> Capabilities:
        """The numbers of the capabilities' nodes. The kernel module that has them stays as long as NVML has it open."""
        return self._capabilities

    def read_minor(self, board: BoardFacts) -> None:
        """Read the minor number of a GPU's node, after a change of its MIG mode, which can move it."""
        board.minor_mode = None
        board.minor = discover.read_minor(self._nvml, board.handle, f"Reading the minor number of GPU {board.uuid}")
        if board.mode_told is not None:
            board.minor_mode = board.mode_told[1].enabled

    def with_present_minor(self, device: Device) -> Device:
        """Return facts of a GPU with the minor number that its node was seen to have last. Asks nothing."""
        board = self._get(device.uuid)
        return device if board is None or board.minor == device.minor else replace(device, minor=board.minor)

    def look(self, position: int, index: int, by_index: bool, full: bool) -> Device:
        """Look at the GPU at this position of NVML's list, which probably has this index: ask it something, and read what changes, or with ``full`` everything.

        ``by_index`` is for when the indices may be those of other GPUs than they were.
        """
        with self._lock:
            address = self._places.get(position)
            kept = next((board for board in self._kept.values() if board.pci_address == address), None)

        def ask(board: BoardFacts) -> Device:
            discover.probe(self._nvml, board.handle, board.uuid)
            if full:
                board.unanswered.clear()
            health = condition.read(self._nvml, board)
            return self._read(board, None if full else self._unchanged(board.uuid), health)

        return self._use(None if by_index or full else kept, lambda: self._meet(position, index, full), ask)

    def _use(
        self, kept: BoardFacts | None, find: Callable[[], BoardFacts], action: Callable[[BoardFacts], Answer]
    ) -> Answer:
        """Do something with kept facts; if their handle has become invalid meanwhile, with new ones, once."""
        if kept is not None:
            try:
                return action(kept)
            except AcceleratorError as error:
                if error.code not in _STALE:
                    raise
                self.forget(kept.uuid)
        return action(find())

    def _get(self, uuid: str) -> BoardFacts | None:
        with self._lock:
            return self._kept.get(uuid)

    def _find(self, uuid: str) -> BoardFacts:
        return self._keep(self._nvml.call("nvmlDeviceGetHandleByUUID", uuid, doing=f"Finding GPU {uuid}"))

    def _meet(self, position: int, index: int, full: bool) -> BoardFacts:
        handle: Any = self._nvml.call("nvmlDeviceGetHandleByIndex", position, doing=f"Finding GPU {index}")
        uuid = str(self._nvml.call("nvmlDeviceGetUUID", handle, doing=f"Reading the UUID of GPU {index}"))
        kept = None if full else self._get(uuid)
        if kept is None:
            kept = self._keep(handle, index)
        else:
            kept.handle = handle
        with self._lock:
            self._places[position] = kept.pci_address
        return kept

    def _keep(self, handle: Any, index: int | None = None) -> BoardFacts:
        board = discover.read_board(self._nvml, self._system, handle, self.driver)
        board.index = self.numbering.index(board.pci_address, board.index if index is None else index)
        if board.passthrough is not None:
            board.passthrough = replace(
                board.passthrough, number=self.numbering.machine(board.pci_address, board.passthrough.number)
            )
        self._watch.forget(board.uuid)
        with self._lock:
            self._kept[board.uuid] = board
        return board

    def _read(self, board: BoardFacts, known: Device | None = None, health: Health | None = None) -> Device:
        """Read what changes. Its condition is what the look found that read it last: claims do not wait for that."""
        state = self._watch.state_of(board.uuid)
        former = self.last(board.uuid)
        if health is None:
            health = former.health if former is not None else Health()
        partitions = known.partitions if known is not None else None
        device = discover.read_device(self._nvml, self._system, board, partitions, health)
        if device.partitioning.supported and device.partitioning.enabled != board.minor_mode:
            self.read_minor(board)
            device = replace(device, minor=board.minor)
        with self._lock:
            self._last[board.uuid] = device
            if known is None:
                self._read_at[board.uuid] = state
        return device

    def _unchanged(self, uuid: str) -> Device | None:
        """Return what was read last of a GPU whose partitions nobody can have changed since without its being told."""
        state = self._watch.state_of(uuid)
        with self._lock:
            last = self._last.get(uuid)
            if state is None or last is None or not last.partitioning.enabled or self._read_at.get(uuid) != state:
                return None
            return last
