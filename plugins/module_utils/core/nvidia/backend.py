# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA's backend: puts discovery, changes, published names and container edits behind the core's protocol."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Callable, TypeVar

from ..cdi import ContainerEdits
from ..errors import AcceleratorError, BackendUnavailable, DeviceFaulty, NotFound
from ..model import (
    UNKNOWN_ERROR,
    CounterSet,
    Device,
    Fault,
    Finding,
    Health,
    Offer,
    OwnedPartition,
    Partition,
    Placement,
)
from ..system import System
from . import discover, edits, faults, offers, partition
from .common_edits import CommonEdits
from .discover import BoardFacts, DriverFacts
from .nvml import Nvml
from .offers import DRIVER_NAME

Answer = TypeVar("Answer")

# What NVML answers for a handle that a mode change or a reset has made invalid.
_STALE = ("invalid-argument", "not-found", "gpu-not-found", UNKNOWN_ERROR)


class NvidiaBackend:
    """The GPUs of this machine. Safe for threads; changes of different GPUs run side by side.

    What stays about a board (names, profiles, placements, handle) is read once and kept until its mode changes or it is
    reset, so that looking at one GPU costs a few calls.
    """

    vendor = "nvidia"
    driver_name = DRIVER_NAME
    cdi_kind = "k8s.gpu.nvidia.com/claim"

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self._nvml = Nvml()
        self._lock = threading.Lock()
        self._driver: DriverFacts | None = None
        self._boards: dict[str, BoardFacts] = {}
        self._last: dict[str, Device] = {}
        self._device_locks: dict[str, threading.RLock] = {}
        self._common_edits = CommonEdits(self._system)

    def open(self) -> None:
        """Load NVML and read the driver's version. Raises BackendUnavailable with the reason."""
        with self._lock:
            if self._driver is not None and self._nvml.is_open:
                return
            self._nvml.open()
            self._driver = discover.read_driver(self._nvml)

    def close(self) -> None:
        """Shut NVML down and forget all handles."""
        with self._lock:
            self._boards.clear()
            self._driver = None
            self._nvml.close()

    @property
    def driver_version(self) -> str:
        """The version of the loaded driver, as it spells it."""
        return self._facts_of_driver().driver_version

    def discover(self, full: bool = False) -> tuple[Finding, ...]:
        """Look at all GPUs and return each one's facts or its fault, ordered by index."""
        count = int(self._nvml.call("nvmlDeviceGetCount", doing="Counting GPUs"))
        found: dict[str, Finding] = {}
        silent: dict[int, DeviceFaulty] = {}
        for index in range(count):
            try:
                handle = self._nvml.call("nvmlDeviceGetHandleByIndex", index, doing=f"Finding GPU {index}")
                board = self._board_of(handle, index, full)
                device = self._remember(discover.read_device(self._nvml, self._system, board))
                found[device.uuid] = Finding(index, device.describe(), device.uuid, device)
            except BackendUnavailable:
                raise
            except AcceleratorError as error:
                silent[index] = faults.faulty(error)
        findings = list(found.values())
        for device in self._missing(found):
            reason = silent.pop(device.index, None) or self._fault_of(device)
            if reason is None:
                self._last.pop(device.uuid, None)  # taken away
                continue
            ill = replace(device, processes=(), health=Health(healthy=False, causes=(reason.code,)))
            fault = Fault(reason.code, str(reason))
            findings.append(Finding(device.index, device.describe(), device.uuid, ill, fault))
        for index, reason in silent.items():
            findings.append(Finding(index, f"GPU {index}", "", None, Fault(reason.code, str(reason))))
        return tuple(sorted(findings, key=lambda finding: finding.index))

    def device(self, uuid: str) -> Device:
        """Return fresh facts of one GPU. Raises NotFound, DeviceFaulty, BackendUnavailable."""
        try:
            return self._with_board(
                uuid, lambda board: self._remember(discover.read_device(self._nvml, self._system, board))
            )
        except (BackendUnavailable, NotFound):
            raise
        except AcceleratorError as error:
            raise faults.faulty(error) from error

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Switch MIG on or off; on boards that need a reset the change stays pending."""
        with self._device_lock(uuid):
            now = self.device(uuid)
            if now.partitioning.enabled == now.partitioning.pending == enabled and now.partitioning.supported:
                return
            try:
                partition.set_mode(self._nvml, self._board(uuid), now, enabled)
            finally:
                self._forget(uuid)

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset GPUs together with nvidia-smi."""
        try:
            partition.reset(self._system, uuids)
        finally:
            for uuid in uuids:
                self._forget(uuid)

    def create_partition(self, uuid: str, profile_id: int, placement: Placement) -> Partition:
        """Create a GPU instance at exactly this placement and the compute instance that fills it."""
        with self._device_lock(uuid):
            now = self.device(uuid)
            return partition.create(self._nvml, self._board(uuid), now, profile_id, placement)

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        """Destroy a GPU instance with its compute instances."""
        with self._device_lock(uuid):
            now = self.device(uuid)
            if all(each.instance_id != instance_id for each in now.partitions):
                raise NotFound(f"GPU {uuid} has no GPU instance {instance_id}")
            partition.destroy(self._nvml, self._board(uuid), now, instance_id)

    def offers(self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = ()) -> tuple[Offer, ...]:
        """Return what is published of a GPU. Pure."""
        return offers.offers(device, dynamic, owned)

    def counter_set(self, device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
        """Return what a GPU's dynamic offers share. Pure."""
        return offers.counter_set(device, owned)

    def driver_edits(self) -> ContainerEdits:
        """Return what all GPUs need in a container, by what is on the disk now. Raises BackendUnavailable."""
        return self._common_edits.current(self.driver_version)

    def device_edits(self, device: Device, partition: Partition | None) -> ContainerEdits:
        """Return what one GPU or one MIG device needs in a container."""
        return edits.device_edits(self._system, device, partition)

    def _facts_of_driver(self) -> DriverFacts:
        if self._driver is None:
            raise BackendUnavailable("NVML is not open", hint="Open the backend first.")
        return self._driver

    def _board(self, uuid: str) -> BoardFacts:
        with self._lock:
            known = self._boards.get(uuid)
        if known is not None:
            return known
        handle: Any = self._nvml.call("nvmlDeviceGetHandleByUUID", uuid, doing=f"Finding GPU {uuid}")
        board = discover.read_board(self._nvml, self._system, handle, self._facts_of_driver())
        with self._lock:
            self._boards[uuid] = board
        return board

    def _board_of(self, handle: Any, index: int, full: bool) -> BoardFacts:
        """Return the facts of the board behind a handle: those that were kept, with the handle, or all read again."""
        uuid = str(self._nvml.call("nvmlDeviceGetUUID", handle, doing=f"Reading the UUID of GPU {index}"))
        with self._lock:
            kept = None if full else self._boards.get(uuid)
        board = replace(kept, handle=handle, index=index) if kept is not None else None
        if board is None:
            board = discover.read_board(self._nvml, self._system, handle, self._facts_of_driver())
        with self._lock:
            self._boards[uuid] = board
        return board

    def _with_board(self, uuid: str, use: Callable[[BoardFacts], Answer]) -> Answer:
        """Use a board's kept facts; if its handle has become invalid meanwhile, read them again, once."""
        with self._lock:
            kept = uuid in self._boards
        try:
            return use(self._board(uuid))
        except AcceleratorError as error:
            if not kept or error.code not in _STALE:
                raise
            self._forget(uuid)
        return use(self._board(uuid))

    def _forget(self, uuid: str) -> None:
        with self._lock:
            self._boards.pop(uuid, None)

    def _remember(self, device: Device) -> Device:
        with self._lock:
            self._last[device.uuid] = device
        return device

    def _missing(self, found: Collection[str]) -> tuple[Device, ...]:
        with self._lock:
            return tuple(device for uuid, device in self._last.items() if uuid not in found)

    def _fault_of(self, device: Device) -> DeviceFaulty | None:
        """Return why a GPU that was there is not found; None for one that was taken away."""
        try:
            handle = self._nvml.call("nvmlDeviceGetHandleByUUID", device.uuid, doing=f"Finding GPU {device.uuid}")
            self._nvml.call("nvmlDeviceGetMemoryInfo", handle, doing=f"Asking GPU {device.uuid}")
        except DeviceFaulty as error:
            return error
        except AcceleratorError:
            return None
        return None

    def _device_lock(self, uuid: str) -> threading.RLock:
        with self._lock:
            return self._device_locks.setdefault(uuid, threading.RLock())
