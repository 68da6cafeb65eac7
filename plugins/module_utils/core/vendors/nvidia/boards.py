# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The cached data of each GPU between two scans: fixed facts, handle, and last read values.

All functions that call NVML run on the lane of the GPU.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Callable, TypeVar

from ...errors import AcceleratorError, BackendUnavailable
from ...host import pci
from ...host.system import System
from ...model import UNKNOWN_ERROR, Device, Health, Partitioning
from . import discover
from .board_facts import BoardFacts, DriverFacts
from .container.container_edits import Capabilities
from .health import condition
from .health.watch import Watch
from .numbering import Numbering
from .nvml import Nvml

Answer = TypeVar("Answer")

KERNEL_DRIVER = "nvidia"  # the name of NVIDIA's kernel driver

# How long, in seconds, a read MIG mode is valid for a change. The change follows a read of the GPU, or another change,
# in the same turn of its lane. If another program changed the mode in that time, the change itself is rejected.
MODE_SECONDS = 0.01
# The NVML errors for a handle that a mode change or a reset has made invalid.
_STALE = ("invalid-argument", "not-found", "gpu-not-found", UNKNOWN_ERROR)


class Boards:
    """The known GPUs by UUID. Safe for threads."""

    def __init__(self, nvml: Nvml, system: System, watch: Watch) -> None:
        self._nvml = nvml
        self._system = system
        self._watch = watch
        self._lock = threading.Lock()
        self._driver: DriverFacts | None = None
        self._kept: dict[str, BoardFacts] = {}
        self._last: dict[str, Device] = {}
        self._read_at: dict[str, int | None] = {}  # the watch's state when the partitions were read
        self._away: dict[str, Device] = {}  # GPUs that this driver has bound to another kernel driver
        self._returned = 0
        self._places: dict[int, str] = {}  # PCI addresses of the GPUs read in this session, by position in NVML's list
        self.numbering = Numbering(system)
        self._capabilities = Capabilities(system)

    @property
    def driver(self) -> DriverFacts:
        """The facts that all GPUs share. Raises BackendUnavailable before NVML is open."""
        if self._driver is None:
            raise BackendUnavailable("NVML is not open", hint="Open the backend first.")
        return self._driver

    def begin(self, driver: DriverFacts) -> None:
        """Start a session of the library."""
        self.numbering.read()
        with self._lock:
            self._driver = driver
            self._places.clear()
            self._capabilities = Capabilities(self._system)

    def end(self) -> None:
        """Delete all data that is valid for a session only, such as handles. The last read values stay."""
        with self._lock:
            self._driver = None
            self._capabilities = Capabilities(self._system)
            self._kept.clear()
            self._places.clear()
            self._read_at.clear()

    def let_go(self) -> None:
        """Delete every handle, because the library is closed for a moment."""
        with self._lock:
            self._capabilities = Capabilities(self._system)
            self._kept.clear()
            self._places.clear()
            self._read_at.clear()

    def kept(self) -> tuple[BoardFacts, ...]:
        """Return the cached facts, ordered by index."""
        with self._lock:
            return tuple(sorted(self._kept.values(), key=lambda board: board.index))

    def known(self) -> tuple[Device, ...]:
        """Return the last read values of each GPU."""
        with self._lock:
            return tuple(self._last.values())

    def last(self, uuid: str) -> Device | None:
        """Return the last read values of a GPU; None for an unknown GPU."""
        with self._lock:
            return self._last.get(uuid)

    def uuid_at(self, index: int) -> str:
        """Return the UUID of the GPU that last had this index; "" if no GPU had it."""
        with self._lock:
            return next((device.uuid for device in self._last.values() if device.index == index), "")

    def send_away(self, device: Device) -> None:
        """Keep the facts of a GPU that NVML no longer lists, because it is bound to another driver."""
        number = device.passthrough.number if device.passthrough is not None else None
        index = self.numbering.learn(device.pci_address, device.index, number)
        name = self.numbering.name(
            device.pci_address, device.minor if device.name_number is None else device.name_number
        )
        with self._lock:
            self._away[device.uuid] = self._last[device.uuid] = replace(device, index=index, name_number=name)
        self.forget(device.uuid)

    def away(self) -> dict[str, Device]:
        """Return the GPUs that this driver has bound to another kernel driver and that sysfs still shows there."""
        with self._lock:
            sent = dict(self._away)
        back = [uuid for uuid, gpu in sent.items() if pci.driver_of(self._system, gpu.pci_address) == KERNEL_DRIVER]
        with self._lock:
            for uuid in back:
                self._returned += self._away.pop(uuid, None) is not None
            return dict(self._away)

    def welcome(self, uuid: str, action: Callable[[], None]) -> None:
        """Call ``action``, which binds a GPU to NVIDIA's driver, and mark it as attached by this driver."""
        action()
        with self._lock:
            self._away.pop(uuid, None)

    @property
    def returned(self) -> int:
        """The number of GPUs that another program has bound to NVIDIA's driver.

        NVML lists them only after it is opened again.
        """
        with self._lock:
            return self._returned

    def is_away(self, uuid: str) -> Device | None:
        """Return the last read values of a GPU that this driver has bound to another kernel driver; None for all others."""
        with self._lock:
            sent = uuid in self._away
        return self.away().get(uuid) if sent else None

    def indices(self, count: int, anew: bool) -> tuple[int, ...]:
        """Return the index of each GPU in NVML's list. If the list differs from the previous scan (second argument), drop the cache."""
        with self._lock:
            if anew:
                self._places.clear()
            places = dict(self._places)
            away = [device.pci_address for device in self._away.values()]
        return self.numbering.indices(count, places, away)

    def forget(self, uuid: str, taken_away: bool = False) -> None:
        """Delete the handle and the cached facts of a GPU; with ``taken_away`` also its last read values."""
        with self._lock:
            self._kept.pop(uuid, None)
            self._read_at.pop(uuid, None)
            if taken_away:
                self._last.pop(uuid, None)
        self._watch.forget(uuid)

    def read(self, uuid: str) -> Device:
        """Read the changing facts of a GPU. Raises NotFound, DeviceFaulty, or AcceleratorError."""
        return self._use(self._get(uuid), lambda: self._find(uuid), self._read)

    def board(self, uuid: str) -> BoardFacts:
        """Return the fixed facts of a GPU for a change. Call this right after ``read``, which validates the handle."""
        return self._get(uuid) or self._find(uuid)

    def settle(self, uuid: str) -> tuple[BoardFacts, Partitioning]:
        """Return the fixed facts of a GPU and its MIG mode, both needed for a change.

        Raises NotFound, DeviceFaulty, or AcceleratorError.
        """

        def ask(board: BoardFacts) -> tuple[BoardFacts, Partitioning]:
            return board, discover.settle(self._nvml, board, MODE_SECONDS)

        return self._use(self._get(uuid), lambda: self._find(uuid), ask)

    @property
    def capabilities(self) -> Capabilities:
        """The device numbers of the capability nodes.

        They stay valid while NVML is open, because it keeps the kernel module loaded.
        """
        return self._capabilities

    def read_minor(self, board: BoardFacts) -> None:
        """Read the minor number of a GPU's node after a change of its MIG mode, which can change the number."""
        board.minor_mode = None
        board.minor = discover.read_minor(self._nvml, board.handle, f"Reading the minor number of GPU {board.uuid}")
        if board.last_mode is not None:
            board.minor_mode = board.last_mode[1].enabled

    def with_present_minor(self, device: Device) -> Device:
        """Return a device with the last known minor number of its node, without a call to NVML."""
        seen = self._get(device.uuid) or self.last(device.uuid) or device
        return device if seen.minor == device.minor else replace(device, minor=seen.minor)

    def scan(self, position: int, index: int, by_index: bool, full: bool) -> Device:
        """Scan the GPU at a position of NVML's list, and return its facts.

        ``index`` is its probable index. The scan probes the GPU and reads its changing facts, or with ``full`` all
        facts. ``by_index`` means that positions may have changed since the last scan.
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
        """Call ``action`` with the cached facts. If their handle is invalid, call it once more with new facts."""
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
        board.name_number = self.numbering.name(board.pci_address, board.minor)
        if board.passthrough is not None:
            board.passthrough = replace(
                board.passthrough, number=self.numbering.machine(board.pci_address, board.passthrough.number)
            )
        self._watch.forget(board.uuid)
        with self._lock:
            self._kept[board.uuid] = board
        return board

    def _read(self, board: BoardFacts, known: Device | None = None, health: Health | None = None) -> Device:
        """Read the changing facts.

        Without ``health``, the health of the last scan is kept, so that claims do not wait for it.
        """
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
        """Return the last read values of a GPU whose partitions cannot have changed since then without an event; else None."""
        state = self._watch.state_of(uuid)
        with self._lock:
            last = self._last.get(uuid)
            if state is None or last is None or not last.partitioning.enabled or self._read_at.get(uuid) != state:
                return None
            return last
