# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The cached data of each GPU between two scans: fixed facts, handle, and last read values.

All functions that call NVML run on the lane of the GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, TypeVar

from ...errors import AcceleratorError, BackendUnavailable
from ...host import pci
from ...host.system import System
from ...model import UNKNOWN_ERROR, Device, Health, Partitioning
from ..device_cache import DeviceCache
from . import gpu_reader, mig_reader
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
# The codes of NVML's errors for a handle that a mode change or a reset has made invalid.
_INVALID_HANDLE_CODES = ("invalid-argument", "not-found", "gpu-not-found", UNKNOWN_ERROR)


class BoardCache(DeviceCache[BoardFacts]):
    """The known GPUs by UUID. Safe for threads.

    A GPU is detached while this driver has bound it to another kernel driver, for a virtual machine. NVML does not list
    detached GPUs, so their last read values are used.
    """

    def __init__(self, nvml: Nvml, system: System, watch: Watch) -> None:
        super().__init__()
        self._nvml = nvml
        self._system = system
        self._watch = watch
        self._driver: DriverFacts | None = None
        self._change_counts: dict[str, int | None] = {}  # the watch's count of changes when the partitions were read
        self._detached: dict[str, Device] = {}
        self._attached_by_others = 0
        self._addresses: dict[
            int, str
        ] = {}  # PCI addresses of the GPUs read in this session, by position in NVML's list
        self.numbering = Numbering(system)
        self._capabilities = Capabilities(system)

    @property
    def driver(self) -> DriverFacts:
        """The facts that all GPUs share. Raises BackendUnavailable before NVML is open."""
        if self._driver is None:
            raise BackendUnavailable("NVML is not open", hint="Open the backend first.")
        return self._driver

    def begin_session(self, driver: DriverFacts) -> None:
        """Start a session of the library."""
        self.numbering.read()
        with self._lock:
            self._driver = driver
            self._addresses.clear()
            self._capabilities = Capabilities(self._system)

    def end_session(self) -> None:
        """Delete all data that is valid for a session only. The last read values stay."""
        self.drop_handles()
        with self._lock:
            self._driver = None

    def drop_handles(self) -> None:
        """Delete every handle, because the library is closed."""
        with self._lock:
            self._capabilities = Capabilities(self._system)
            self._facts.clear()
            self._addresses.clear()
            self._change_counts.clear()

    def add_detached(self, device: Device) -> None:
        """Keep the facts of a detached GPU."""
        number = device.passthrough.number if device.passthrough is not None else None
        index = self.numbering.adopt(device.pci_address, device.index, number)
        name = self.numbering.name(
            device.pci_address, device.minor if device.name_number is None else device.name_number
        )
        with self._lock:
            self._detached[device.uuid] = self._last[device.uuid] = replace(device, index=index, name_number=name)
        self.forget(device.uuid)

    def detached_devices(self) -> dict[str, Device]:
        """Return the detached GPUs by UUID, without those that another program has attached again."""
        with self._lock:
            detached = dict(self._detached)
        attached = [
            uuid for uuid, gpu in detached.items() if pci.driver_of(self._system, gpu.pci_address) == KERNEL_DRIVER
        ]
        with self._lock:
            for uuid in attached:
                self._attached_by_others += self._detached.pop(uuid, None) is not None
            return dict(self._detached)

    def attach(self, uuid: str, bind: Callable[[], None]) -> None:
        """Call ``bind``, which binds a GPU to NVIDIA's driver. The GPU is no longer detached then."""
        bind()
        with self._lock:
            self._detached.pop(uuid, None)

    @property
    def attached_by_others(self) -> int:
        """The number of GPUs that another program has bound to NVIDIA's driver.

        NVML lists them only after it is opened again.
        """
        with self._lock:
            return self._attached_by_others

    def detached_device(self, uuid: str) -> Device | None:
        """Return the last read values of a detached GPU; None for all others."""
        with self._lock:
            is_detached = uuid in self._detached
        return self.detached_devices().get(uuid) if is_detached else None

    def indices(self, count: int, *, positions_changed: bool) -> tuple[int, ...]:
        """Return the index of each GPU in NVML's list, which has ``count`` GPUs."""
        with self._lock:
            if positions_changed:
                self._addresses.clear()
            addresses = dict(self._addresses)
            detached = [device.pci_address for device in self._detached.values()]
        return self.numbering.indices(count, addresses, detached)

    def forget(self, uuid: str, *, is_removed: bool = False) -> None:
        """Delete the handle and the cached facts of a GPU. Of a removed GPU, also delete the last read values."""
        with self._lock:
            self._facts.pop(uuid, None)
            self._change_counts.pop(uuid, None)
            if is_removed:
                self._last.pop(uuid, None)
        self._watch.forget(uuid)

    def read(self, uuid: str) -> Device:
        """Read the changing facts of a GPU. Raises NotFound, DeviceFaulty, or AcceleratorError."""
        return self._with_valid_handle(self._get(uuid), lambda: self._read_by_uuid(uuid), self._read)

    def board(self, uuid: str) -> BoardFacts:
        """Return the fixed facts of a GPU for a change. Call this right after ``read``, which validates the handle."""
        return self._get(uuid) or self._read_by_uuid(uuid)

    def read_mig_mode(self, uuid: str) -> tuple[BoardFacts, Partitioning]:
        """Return the fixed facts of a GPU and its MIG mode, both needed for a change.

        Raises NotFound, DeviceFaulty, or AcceleratorError.
        """

        def read(board: BoardFacts) -> tuple[BoardFacts, Partitioning]:
            return board, mig_reader.update_mig_mode(self._nvml, board, max_age=MODE_SECONDS)

        return self._with_valid_handle(self._get(uuid), lambda: self._read_by_uuid(uuid), read)

    @property
    def capabilities(self) -> Capabilities:
        """The device numbers of the capability nodes.

        They stay valid while NVML is open, because it keeps the kernel module loaded.
        """
        return self._capabilities

    def read_minor(self, board: BoardFacts) -> None:
        """Read the minor number of a GPU's node after a change of its MIG mode, which can change the number."""
        board.minor_mode = None
        board.minor = gpu_reader.read_minor(self._nvml, board.handle, f"Reading the minor number of GPU {board.uuid}")
        if board.last_mode is not None:
            board.minor_mode = board.last_mode[1].enabled

    def with_current_minor(self, device: Device) -> Device:
        """Return a device with the last known minor number of its node, without a call to NVML."""
        known = self._get(device.uuid) or self.last_device(device.uuid) or device
        return device if known.minor == device.minor else replace(device, minor=known.minor)

    def scan(self, position: int, index: int, *, positions_changed: bool, full: bool) -> Device:
        """Scan the GPU at a position of NVML's list, and return its facts.

        ``index`` is its probable index. The scan probes the GPU and reads its changing facts, or with ``full`` all
        facts.
        """
        with self._lock:
            address = self._addresses.get(position)
            cached = next((board for board in self._facts.values() if board.pci_address == address), None)

        def read(board: BoardFacts) -> Device:
            gpu_reader.probe(self._nvml, board.handle, board.uuid)
            if full:
                board.unsupported_queries.clear()
            health = condition.read(self._nvml, board)
            return self._read(board, None if full else self._unchanged(board.uuid), health)

        is_cache_valid = not positions_changed and not full
        return self._with_valid_handle(
            cached if is_cache_valid else None, lambda: self._read_at_position(position, index, full), read
        )

    def _with_valid_handle(
        self, cached: BoardFacts | None, read_facts: Callable[[], BoardFacts], action: Callable[[BoardFacts], Answer]
    ) -> Answer:
        """Call ``action`` with the cached facts. Without cached facts, or if their handle is invalid, read the facts first."""
        if cached is not None:
            try:
                return action(cached)
            except AcceleratorError as error:
                if error.code not in _INVALID_HANDLE_CODES:
                    raise
                self.forget(cached.uuid)
        return action(read_facts())

    def _get(self, uuid: str) -> BoardFacts | None:
        with self._lock:
            return self._facts.get(uuid)

    def _read_by_uuid(self, uuid: str) -> BoardFacts:
        return self._read_facts(self._nvml.call("nvmlDeviceGetHandleByUUID", uuid, doing=f"Finding GPU {uuid}"))

    def _read_at_position(self, position: int, index: int, full: bool) -> BoardFacts:
        handle: Any = self._nvml.call("nvmlDeviceGetHandleByIndex", position, doing=f"Finding GPU {index}")
        uuid = str(self._nvml.call("nvmlDeviceGetUUID", handle, doing=f"Reading the UUID of GPU {index}"))
        board = None if full else self._get(uuid)
        if board is None:
            board = self._read_facts(handle, index)
        else:
            board.handle = handle
        with self._lock:
            self._addresses[position] = board.pci_address
        return board

    def _read_facts(self, handle: Any, index: int | None = None) -> BoardFacts:
        """Read the fixed facts of a GPU, and store them in the cache. Without ``index``, NVML's index is preferred."""
        board = gpu_reader.read_board(self._nvml, self._system, handle, self.driver)
        board.index = self.numbering.index(board.pci_address, board.index if index is None else index)
        board.name_number = self.numbering.name(board.pci_address, board.minor)
        if board.passthrough is not None:
            board.passthrough = replace(
                board.passthrough, number=self.numbering.passthrough_number(board.pci_address, board.passthrough.number)
            )
        self._watch.forget(board.uuid)
        with self._lock:
            self._facts[board.uuid] = board
        return board

    def _read(self, board: BoardFacts, known: Device | None = None, health: Health | None = None) -> Device:
        """Read the changing facts.

        Without ``health``, the health of the last scan is kept, so that claims do not wait for it.
        """
        change_count = self._watch.change_count(board.uuid)
        if health is None:
            last = self.last_device(board.uuid)
            health = last.health if last is not None else Health()
        partitions = known.partitions if known is not None else None
        device = gpu_reader.read_device(self._nvml, self._system, board, partitions, health)
        if device.partitioning.supported and device.partitioning.enabled != board.minor_mode:
            self.read_minor(board)
            device = replace(device, minor=board.minor)
        with self._lock:
            self._last[board.uuid] = device
            if known is None:
                self._change_counts[board.uuid] = change_count
        return device

    def _unchanged(self, uuid: str) -> Device | None:
        """Return the last read values of a GPU whose partitions cannot have changed since then without an event; else None."""
        change_count = self._watch.change_count(uuid)
        with self._lock:
            last = self._last.get(uuid)
            is_current = change_count is not None and self._change_counts.get(uuid) == change_count
            return last if is_current and last is not None and last.partitioning.enabled else None
