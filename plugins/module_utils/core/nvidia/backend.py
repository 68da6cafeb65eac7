# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA's backend: puts discovery, changes, published names and container edits behind the core's protocol."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Callable, TypeVar

from ..cdi import ContainerEdits
from ..errors import AcceleratorError, BackendUnavailable, DeviceFaulty, NotFound
from ..lanes import Call, DeviceBusy, Lanes
from ..model import (
    AWAITED,
    NO_ANSWER,
    CounterSet,
    Device,
    Fault,
    Finding,
    Health,
    Notice,
    Offer,
    OwnedPartition,
    Partition,
    Placement,
)
from ..system import System
from . import discover, edits, faults, names, offers, partition
from .boards import Boards
from .common_edits import CommonEdits
from .configs import CONFIG_KINDS
from .nvml import Nvml
from .offers import DRIVER_NAME
from .watch import Watch

Answer = TypeVar("Answer")

LIBRARY = "library"  # the lane of calls about no GPU; no UUID is spelled so


@dataclass(frozen=True)
class Deadlines:
    """How many seconds calls may take until they count as not coming back.

    The first look at a GPU may have to wake it; a change of its MIG mode may reset it.
    """

    library: float = 60.0
    look: float = 10.0
    full_look: float = 30.0
    change: float = 60.0


class NvidiaBackend:
    """The GPUs of this machine. Safe for threads; each GPU has a lane, and what concerns different GPUs runs side by side.

    What stays about a board (names, profiles, placements, handle) is read once and kept until it is reset or replaced, so
    that looking at a GPU costs a few calls.
    """

    vendor = "nvidia"
    driver_name = DRIVER_NAME
    cdi_kind = "k8s.gpu.nvidia.com/claim"
    config_kinds = CONFIG_KINDS

    def __init__(self, system: System | None = None, deadlines: Deadlines | None = None) -> None:
        self._system = system or System()
        self._deadlines = deadlines or Deadlines()
        self._nvml = Nvml()
        self._lanes = Lanes(self.vendor)
        self._watch = Watch(self._nvml, self._lanes)
        self._boards = Boards(self._nvml, self._system, self._watch)
        self._lock = threading.Lock()
        self._count: int | None = None
        self._ill: frozenset[str] = frozenset()
        self._common_edits = CommonEdits(self._system)

    def open(self) -> None:
        """Load NVML and read the driver's version. Raises BackendUnavailable with the reason."""
        self._of_library(self._open, "Opening NVML")

    def close(self) -> None:
        """Shut NVML down and let go of all handles; changes that are under way are waited for."""
        self._watch.close()
        self._lanes.rest(self._deadlines.change)
        self._of_library(self._close, "Closing NVML")
        self._lanes.close()

    @property
    def driver_version(self) -> str:
        """The version of the loaded driver, as it spells it."""
        return self._boards.driver.driver_version

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        """Look at all GPUs side by side and return each one's facts or its fault, ordered by index.

        With ``patience`` a GPU that was never read, and is not back after so many seconds, is found as awaited.
        """
        count = self._of_library(
            lambda: int(self._nvml.call("nvmlDeviceGetCount", doing="Counting GPUs")), "Counting GPUs"
        )
        with self._lock:
            by_index = full or count != self._count
            self._count = count
        deadline = self._deadlines.full_look if by_index else self._deadlines.look
        begun = time.monotonic()
        looks: dict[int, Call[Device]] = {}
        for index in range(count):
            look = partial(self._boards.look, index, by_index, full)
            key = self._boards.uuid_at(index) or f"index {index}"
            looks[index] = self._lanes.submit(key, look, deadline, doing=f"Looking at GPU {index}")
        found: dict[str, Device] = {}
        silent: dict[int, DeviceFaulty] = {}
        unavailable: list[BackendUnavailable] = []
        for index, call in looks.items():
            patient = deadline if patience is None or self._boards.uuid_at(index) else min(patience, deadline)
            try:
                device = self._answer(index, call, begun + patient)
                found[device.uuid] = device
            except DeviceBusy as error:
                silent[index] = DeviceFaulty(
                    error.message, hint=error.hint, code=AWAITED if patient < deadline else NO_ANSWER
                )
            except AcceleratorError as error:
                if isinstance(error, BackendUnavailable):
                    unavailable.append(error)
                silent[index] = faults.faulty(error)
        if unavailable and len(unavailable) == count:
            raise unavailable[0]
        return self._findings(found, silent)

    def device(self, uuid: str) -> Device:
        """Return fresh facts of one GPU. Raises NotFound, DeviceFaulty, BackendUnavailable."""
        return self._lanes.run(
            uuid, partial(self._read, uuid), self._deadlines.look, doing=f"Reading the facts of GPU {uuid}"
        )

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait until a GPU tells of an error or of a change of its partitioning, for so many seconds at most."""
        if not self._nvml.is_open:
            raise BackendUnavailable("NVML is not open", hint="Open the backend first.")
        boards = [board for board in self._boards.kept() if board.uuid not in self._ill]
        return self._watch.wait(boards, seconds)

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Switch MIG on or off; on boards that need a reset the change stays pending."""

        def change() -> None:
            now = self._read(uuid)
            if now.partitioning.enabled == now.partitioning.pending == enabled and now.partitioning.supported:
                return
            partition.set_mode(self._nvml, self._boards.board(uuid), now, enabled)

        self._change(uuid, change, f"Switching MIG {'on' if enabled else 'off'} on GPU {uuid}")

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset GPUs together with nvidia-smi. NVML is closed meanwhile: no GPU is reset that any process has open."""
        with contextlib.ExitStack() as changes:
            for uuid in uuids:
                changes.enter_context(self._watch.own_change(uuid))
            self.close()
            try:
                partition.reset(self._system, uuids)
            finally:
                for uuid in uuids:
                    self._boards.forget(uuid)
                self.open()

    def create_partition(self, uuid: str, profile_id: int, placement: Placement) -> Partition:
        """Create a GPU instance at exactly this placement and the compute instance that fills it."""

        def create() -> Partition:
            now = self._read(uuid)
            return partition.create(self._nvml, self._boards.board(uuid), now, profile_id, placement)

        return self._change(
            uuid,
            create,
            f"Creating a partition at {placement} on GPU {uuid}",
            late=lambda made: self._destroy(uuid, made.instance_id),
        )

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        """Destroy a GPU instance with its compute instances."""
        self._change(
            uuid, partial(self._destroy, uuid, instance_id), f"Destroying GPU instance {instance_id} of GPU {uuid}"
        )

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

    def _open(self) -> None:
        self._nvml.open()
        self._boards.begin(discover.read_driver(self._nvml))
        self._watch.begin()

    def _close(self) -> None:
        self._boards.end()
        with self._lock:
            self._count = None
        self._nvml.close()

    def _of_library(self, function: Callable[[], Answer], doing: str) -> Answer:
        """Make a call about no GPU; whatever goes wrong with it is the machine's."""
        try:
            return self._lanes.run(LIBRARY, function, self._deadlines.library, doing=doing)
        except BackendUnavailable:
            raise
        except AcceleratorError as error:
            raise BackendUnavailable(error.message, hint=error.hint) from error

    def _change(
        self,
        uuid: str,
        change: Callable[[], Answer],
        doing: str,
        late: Callable[[Answer], object] | None = None,
    ) -> Answer:
        def changing() -> Answer:
            with self._watch.own_change(uuid):
                return change()

        return self._lanes.run(uuid, changing, self._deadlines.change, doing=doing, late=late)

    def _destroy(self, uuid: str, instance_id: int) -> None:
        now = self._read(uuid)
        if all(each.instance_id != instance_id for each in now.partitions):
            raise NotFound(f"GPU {uuid} has no GPU instance {instance_id}")
        partition.destroy(self._nvml, self._boards.board(uuid), now, instance_id)

    def _read(self, uuid: str) -> Device:
        """Read what changes about a GPU, on its lane."""
        try:
            return self._boards.read(uuid)
        except (BackendUnavailable, NotFound):
            raise
        except AcceleratorError as error:
            raise faults.faulty(error) from error

    def _answer(self, index: int, call: Call[Device], until: float) -> Device:
        """Return what a look tells; of a GPU that is being changed, what the look before told."""
        try:
            return call.result(until)
        except DeviceBusy:
            last = self._boards.last(self._boards.uuid_at(index))
            if last is None:
                raise
            return last

    def _findings(self, found: dict[str, Device], silent: dict[int, DeviceFaulty]) -> tuple[Finding, ...]:
        """Put together what a look found, what it met with a fault, and what was there before and is not now."""
        findings = [Finding(device.index, device.describe(), device.uuid, device) for device in found.values()]
        for device in self._boards.known():
            if device.uuid in found:
                continue
            reason = silent.pop(device.index, None) or self._why_missing(device)
            if reason is not None and reason.code == AWAITED:  # it came back at this very moment
                findings.append(Finding(device.index, device.describe(), device.uuid, device))
                continue
            if reason is None:
                self._boards.forget(device.uuid, taken_away=True)
                continue
            ill = replace(device, processes=(), health=Health(healthy=False, causes=(reason.code,)))
            findings.append(Finding(device.index, device.describe(), device.uuid, ill, Fault(reason.code, str(reason))))
        addresses = {finding.device.pci_address for finding in findings if finding.device is not None}
        by_kernel = names.unnamed(self._system, addresses, list(silent)) if silent else {}
        for index, error in silent.items():
            gpu = by_kernel.get(index)
            name, uuid = (gpu.describe(index), gpu.uuid) if gpu is not None else (f"GPU {index}", "")
            findings.append(Finding(index, name, uuid, None, Fault(error.code, str(error))))
        self._ill = frozenset(finding.uuid for finding in findings if finding.fault is not None)
        return tuple(sorted(findings, key=lambda finding: finding.index))

    def _why_missing(self, device: Device) -> DeviceFaulty | None:
        """Return why a GPU that was there is not found; None for one that was taken away."""

        def ask() -> None:
            handle = self._nvml.call("nvmlDeviceGetHandleByUUID", device.uuid, doing=f"Finding GPU {device.uuid}")
            self._nvml.call("nvmlDeviceGetMemoryInfo", handle, doing=f"Asking GPU {device.uuid}")

        try:
            self._lanes.run(device.uuid, ask, self._deadlines.look, doing=f"Asking GPU {device.uuid}")
        except DeviceFaulty as error:
            return error
        except AcceleratorError:
            return None
        return None
