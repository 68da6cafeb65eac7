# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA's implementation of the backend protocol: discovery, events, published devices, and container edits.

The base classes in ``nvml_session.py`` and ``gpu_changes.py`` open NVML and change GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...discovery.device_workers import Call
from ...discovery.scan import DeviceScan, findings, gather
from ...dra.composite_devices import Grouping
from ...dra.node_labels import NO_PARTITIONS, UNKNOWN_MACHINE, MachineFacts
from ...errors import AcceleratorError, DeviceFaulty
from ...host import pci
from ...host.cdi import ContainerEdits
from ...host.companions import Companion, SharedDevice
from ...model import (
    AttributeValue,
    CounterSet,
    Device,
    Fault,
    Finding,
    Health,
    Notice,
    Offer,
    OfferArranger,
    OwnedPartition,
    Partition,
    Surroundings,
)
from ...telemetry import Telemetry
from . import gpu_reader, mps, offers, sysfs, telemetry
from .board_facts import BoardFacts
from .configs import CONFIG_KINDS, DEVICE_CLASSES, DEVICE_TYPES
from .container import container_edits, driver_files
from .fabric.fabric_calls import FabricCalls
from .gpu_changes import GpuChanges
from .health import faults
from .vendor import FACTS, labels, resource_name


class NvidiaBackend(GpuChanges):
    """The GPUs of this host. Safe for threads.

    The fixed facts of a board (names, profiles, placements, handle) are read once and cached until the GPU is reset or
    replaced, so that a scan of a GPU needs few calls.
    """

    vendor = FACTS.word
    driver_name = FACTS.driver_name
    cdi_kind = FACTS.cdi_kind
    config_kinds = CONFIG_KINDS
    device_classes = DEVICE_CLASSES
    device_types = DEVICE_TYPES
    partitions_outlive_boot = False
    has_companions = True
    grouping: Grouping | None = None
    arranged: OfferArranger | None = None
    _surroundings = Surroundings((), frozenset())

    def has_devices(self) -> bool:
        """Return whether a GPU is on the PCI bus or in the driver's files."""
        return bool(sysfs.bound_gpus(self._system) or sysfs.gpus_on_the_bus(self._system))

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        """Scan all GPUs in parallel and return the facts or the fault of each, ordered by index.

        With ``patience``, a GPU without known facts that has not answered after that many seconds is reported as
        awaited.
        """
        self._fabric.refresh(self._deadlines.scan)
        with self._scan_lock:
            found = tuple(self._fabric.with_attributes(finding) for finding in self._scan(full, patience))
            self._boards.numbering.write()
            return found

    def _scan(self, full: bool, patience: float | None) -> tuple[Finding, ...]:
        count = self._run_for_library(
            lambda: int(self._nvml.call("nvmlDeviceGetCount", doing="Counting GPUs")), "Counting GPUs"
        )
        detached = self._boards.detached_devices()
        with self._lock:
            positions_changed = count != self._gpu_count
            self._gpu_count = count
        deadline = self._deadlines.full_scan if full or positions_changed else self._deadlines.scan
        begun = time.monotonic()
        calls: dict[int, Call[Device]] = {}
        for position, index in enumerate(self._boards.indices(count, positions_changed=positions_changed)):
            scan_board = partial(self._boards.scan, position, index, positions_changed=positions_changed, full=full)
            last = self._boards.last_device_at(index)
            lane = last.uuid if last is not None else f"index {index}"
            calls[index] = self._lanes.submit(lane, scan_board, deadline, doing=f"Scanning GPU {index}")
        scan = gather(
            calls, self._boards.last_device_at, faults.as_fault, begun=begun, deadline=deadline, patience=patience
        )
        found, removed = findings(
            DeviceScan({**scan.found, **detached}, scan.unread),
            self._boards.last_devices(),
            why_missing=self._why_missing,
            sign=faults.sign,
            names=partial(sysfs.name_unread_gpus, self._system),
        )
        for uuid in removed:
            self._boards.forget(uuid, is_removed=True)
        former, self._faulty = self._faulty, frozenset(finding.uuid for finding in found if finding.fault is not None)
        for uuid in former - self._faulty:
            self._watch.forget(uuid)  # its registration for events may have failed
        return tuple(self._check_bus(finding) if finding.uuid in detached else finding for finding in found)

    def _check_bus(self, finding: Finding) -> Finding:
        """Return the finding of a detached GPU, with a fault if it is not on the PCI bus any more."""
        device = finding.device
        if device is None or self._system.exists(f"{pci.DEVICES}/{device.pci_address}"):
            return finding
        lost = DeviceFaulty(
            f"{device.pci_address}, which is passed through, is not on the PCI bus any more", code=faults.GPU_LOST
        )
        device = replace(device, health=Health((faults.sign(lost),)))
        return replace(finding, device=device, fault=Fault(lost.code, str(lost)))

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait up to ``seconds`` for an error or a change of partitioning that a GPU reports, and return the events."""
        self._refuse_closed()

        def boards() -> list[BoardFacts]:
            return [board for board in self._boards.cached_facts() if board.uuid not in self._faulty]

        return self._watch.wait(boards, seconds)

    def surroundings(self) -> Surroundings:
        """Return version and instance of the loaded driver, and its GPUs, from the kernel's files."""
        if not self._scan_lock.acquire(blocking=False):
            return self._surroundings  # a GPU is being detached or attached, or a scan is running
        try:
            detached = frozenset(gpu.pci_address for gpu in self._boards.detached_devices().values())
            self._surroundings = Surroundings(
                sysfs.driver_instance(self._system),
                sysfs.bound_gpus(self._system) | detached,
                self._boards.attached_by_others,
            )
            return self._surroundings
        finally:
            self._scan_lock.release()

    def telemetry(self, seconds: float, partitions: Collection[str] = ()) -> tuple[Telemetry, ...]:
        """Return the telemetry of the GPUs and of these MIG devices (UUIDs). GPUs that are faulty or busy are left out."""

        def read(board: BoardFacts) -> tuple[Telemetry, ...]:
            last = self._boards.last_device(board.uuid)
            existing = last.partitions if last is not None else ()
            return telemetry.read(self._nvml, board, [each for each in existing if each.uuid in partitions])

        return self._gather_telemetry(seconds, self._boards.cached_facts(), read)

    @property
    def fabric_partitions(self) -> FabricCalls:
        """The partitions of the NVSwitch fabric."""
        return self._fabric

    def companions(self, claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
        """Return the MPS daemons for the shared devices of a claim."""
        return mps.companions(claim_uid, devices)

    def refuse_without_companions(self) -> None:
        """Raise AcceleratorError if MPS is not installed."""
        mps.refuse_without_tool(self._system)

    def companion_edits(self, companion: Companion) -> ContainerEdits:
        """Return the container edits for an MPS daemon."""
        return mps.edits(companion)

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        """Return the offers of a GPU, with the fabric mode at the last scan."""
        return self._fabric.with_taints(device, offers.offers(device, dynamic, owned, passthrough))

    def labels(
        self, devices: Sequence[Device], machine: MachineFacts = UNKNOWN_MACHINE, strategy: str = NO_PARTITIONS
    ) -> Mapping[str, str]:
        """Return the Node labels for these GPUs."""
        return labels(devices, machine, strategy)

    def resource_name(self, device: Device, profile: str | None) -> str:
        """Return the extended resource name of a whole GPU, or of a MIG device with this profile."""
        return resource_name(device, profile)

    def parts(self, device: Device) -> Mapping[str, int]:
        """Return the capacities of a whole GPU that claims can share."""
        return offers.shareable_capacities(device)

    def counter_set(self, device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
        """Return the counter set of a GPU's dynamic offers."""
        return offers.counter_set(device, owned)

    def describe_unrestored(self) -> str:
        """Return "", because NVIDIA's driver restores no MIG device after a boot."""
        return ""

    def driver_edits(self) -> ContainerEdits:
        """Return the container edits that all GPUs share, for the files that exist now. Raises BackendUnavailable."""
        found = self._common_edits.current(self.driver_version)
        if not self._fabric.is_used:
            return found
        # A client of the fabric manager could activate and deactivate all partitions.
        kept = tuple(each for each in found.mounts if each.host_path != driver_files.FABRIC_MANAGER_SOCKET)
        return replace(found, mounts=kept)

    def settle(self, seconds: float) -> None:
        """Wait up to ``seconds`` until a running nvidia-ctk has answered."""
        self._common_edits.settle(seconds)

    def machine_edits(self) -> ContainerEdits:
        """Return the container edits for the container of a virtual machine."""
        return container_edits.NOTHING

    def device_attributes(
        self, device: Device, partition: Partition | None, is_for_machine: bool = False
    ) -> Mapping[str, AttributeValue]:
        """Return the attributes of a GPU, for a virtual machine or not, or of an existing MIG device."""
        device = replace(device, whole_device_attributes=self._fabric.attributes(device))
        return offers.attributes_for_machine(device) if is_for_machine else offers.attributes_of(device, partition)

    def device_edits(self, device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
        """Return the container edits of one GPU or one MIG device, with its current device node."""
        boards = self._boards
        device = boards.with_current_minor(device)
        return container_edits.device_edits(self._system, device, partition, boards.capabilities, monitoring=monitoring)

    def _why_missing(self, device: Device) -> DeviceFaulty | None:
        """Return why a known GPU is missing; None for a GPU that was removed."""

        def probe() -> None:
            handle = self._nvml.call("nvmlDeviceGetHandleByUUID", device.uuid, doing=f"Finding GPU {device.uuid}")
            gpu_reader.probe(self._nvml, handle, device.uuid)

        try:
            self._lanes.run(device.uuid, probe, self._deadlines.scan, doing=f"Querying GPU {device.uuid}")
        except DeviceFaulty as error:
            return error
        except AcceleratorError:
            return None
        return None
