# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# ruff: noqa: ARG002  the protocol has arguments that a chip does not need
"""Ascend's implementation of the backend protocol: discovery, vNPUs, published devices, and container edits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...discovery.scan import findings, gather
from ...dra.composite_devices import Grouping
from ...dra.node_labels import NO_PARTITIONS, UNKNOWN_MACHINE, MachineFacts
from ...errors import AcceleratorError, BackendUnavailable, DeviceFaulty, InUse, Unsupported, unexpected
from ...host import pci
from ...host.cdi import ContainerEdits
from ...host.system import System
from ...model import (
    AttributeValue,
    CounterSet,
    Device,
    Finding,
    Notice,
    Offer,
    OfferArranger,
    OwnedPartition,
    Partition,
    Placement,
    Surroundings,
    healthy_devices,
)
from ...telemetry import Telemetry
from ..fabric_partitions import FabricPartitions
from ..lane_backend import Deadlines, LaneBackend
from . import bus, groups, occupancy, offers, recovery, sharing, slices, telemetry
from .chips import Chip, Chips
from .configs import CONFIG_KINDS, DEVICE_CLASSES, DEVICE_TYPES
from .dcmi.dcmi import Spot
from .dcmi.dcmi_source import Library
from .dcmi.helper import Helper
from .dcmi.messages import SOCKET
from .driver_files import CommonEdits, device_edits, runtime_device_edits, runtime_edits
from .health import faults
from .health.watch import Watch
from .npu_smi.npu_smi_source import Program
from .readings import Source
from .vendor import FACTS, labels, resource_name

Answer = TypeVar("Answer")

LOG = logging.getLogger(__name__)

_STARTED_PERIOD = 0.2
#: Seconds. The vendor's programs wait for this time after a reset before they rescan the chip.
RESET_SECONDS = 3.0


@dataclass(frozen=True)
class AscendDeadlines(Deadlines):
    """The deadlines of calls in seconds.

    The first scan of a chip can run npu-smi. The creation of a vNPU takes about 1 s. A chip takes minutes to start
    after a reset.
    """

    reset: float = 300.0


class AscendBackend(LaneBackend):
    """The NPUs of this host. Safe for threads. Each chip has a lane, so calls to different chips run in parallel.

    Two chips of one card have two lanes: each call names its chip, each chip has its own device node, and the
    documentation of DCMI requires no more. A chip that hangs must not block its neighbor. The vendor's library locks
    the only shared resource of chips, the file of vNPUs that outlive a reboot. Calls that concern no chip have a
    separate lane.

    The fixed facts of a chip are read once and cached until it is replaced, so that a scan of a chip needs few calls.
    No call of a claim starts a program. With ``by_runtime``, Huawei's container runtime adds chips to containers, and
    the edits only name them. With ``network_tools``, containers get the tool of the network ports.
    """

    facts = FACTS
    vendor = facts.word
    driver_name = facts.driver_name
    cdi_kind = facts.cdi_kind
    config_kinds = CONFIG_KINDS
    device_classes = DEVICE_CLASSES
    device_types = DEVICE_TYPES
    partitions_outlive_boot = True
    grouping: Grouping | None = groups
    fabric_partitions: FabricPartitions | None = None
    has_companions = False
    arranged: OfferArranger | None = staticmethod(occupancy.arranged)
    _deadlines: AscendDeadlines

    def __init__(
        self,
        system: System | None = None,
        deadlines: AscendDeadlines | None = None,
        source: Source | None = None,
        by_runtime: bool = False,
        network_tools: bool = False,
    ) -> None:
        super().__init__(deadlines or AscendDeadlines(), "NPU")
        self._by_runtime = by_runtime
        self._system = system or System()
        self._fixed_source = source
        self._source: Source = source or Library(self._system)
        self._chips = Chips(self._source, self._system)
        self._watch = Watch(self._source, self._system, self._chips.uuid_of_logic_id)
        self._scan_lock = threading.Lock()
        self._topology_problem = ""
        self._common_edits = CommonEdits(self._system, network_tools=network_tools)
        self._bus = bus.Bus(self._system)

    def has_devices(self) -> bool:
        """Return whether the kernel shows a chip."""
        return bool(bus.chips(self._system))

    def open(self) -> None:
        """Open the library of the chips and read the driver's version. Raises BackendUnavailable with the reason."""
        try:
            self._run_for_library(self._open, "Opening the library of the NPUs")
        except BackendUnavailable as error:
            on_bus = bus.describe(self._system)
            if not on_bus:
                raise
            raise BackendUnavailable(f"{error.message.rstrip('.')}; {on_bus}", hint=error.hint) from error

    def close(self) -> None:
        """Wait for changes in progress, then close the library."""
        self._watch.close()
        self._lanes.rest(self._deadlines.change)
        self._run_for_library(self._close, "Closing the library of the NPUs")
        self._lanes.close()

    @property
    def driver_version(self) -> str:
        """The version of the driver, in the driver's spelling."""
        return self._chips.driver_version

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        """Scan all chips in parallel and return the facts or the fault of each, ordered by index.

        With ``patience``, a chip without known facts that has not answered after that many seconds is reported as
        awaited.
        """
        with self._scan_lock:
            spots = self._run_for_library(self._source.spots, "Listing the NPUs")
            indices = self._chips.indices(spots)
            unread = len(self._chips.cached_facts()) < len(spots)
            deadline = self._deadlines.full_scan if full or unread else self._deadlines.scan
            begun = time.monotonic()
            calls = {
                indices[spot]: self._lanes.submit(
                    self._chips.lane_of(spot),
                    partial(self._chips.scan, spot, spots, full),
                    deadline,
                    doing=f"Scanning {spot}",
                )
                for spot in spots
            }
            scan = gather(
                calls, self._chips.last_device_at, faults.as_fault, begun=begun, deadline=deadline, patience=patience
            )
            self._update_topology()
            scan = scan.completed(self._chips.with_topology, faults.as_fault)
            found, removed = findings(
                scan,
                self._chips.last_devices(),
                why_missing=self._why_missing,
                sign=faults.sign,
                names=partial(bus.name_unread_chips, self._system),
            )
            for uuid in removed:
                self._chips.forget(uuid, is_removed=True)
            self._faulty = frozenset(finding.uuid for finding in found if finding.fault is not None)
            return found

    def _update_topology(self) -> None:
        """Compute the topology. After a failure, which is logged, the chips keep their attributes."""
        problem = ""
        try:
            self._chips.update_topology()
        except Exception as error:  # noqa: BLE001  chips are published without it
            problem = str(unexpected(error, "Computing the topology of the NPUs"))
        if problem and problem != self._topology_problem:
            LOG.error("%s", problem)
        self._topology_problem = problem

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait up to ``seconds`` for a fault event, or for vNPU changes by other programs, and return the events."""
        self._refuse_closed()
        return self._watch.wait(seconds)

    def surroundings(self) -> Surroundings:
        """Return the driver and its chips, from the kernel's files."""
        return Surroundings(bus.driver_instance(self._system), self._bus.chips_with_drivers())

    def reopen(self) -> None:
        """Open the library again, so that it finds added and removed chips."""
        with self._scan_lock:
            self._watch.close()
            self._lanes.rest(self._deadlines.change)
            self._run_for_library(self._open, "Reopening the library of the NPUs")

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Raise Unsupported if a change is requested.

        A chip has no such mode; it counts as partitioned while it has vNPUs.
        """
        if self.device(uuid).partitioning.enabled != enabled:
            raise Unsupported(
                f"NPU {uuid} has no mode that could be switched: it is partitioned while it has slices",
                hint="Make slices, or destroy them.",
            )

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset chips, each with all chips that the driver resets together with it, and wait until they have started.

        Raises InUse, before any reset, if such a chip is not in ``uuids`` or is in use.
        """
        units = list(dict.fromkeys(self._chips.reset_unit(uuid) for uuid in uuids))
        for unit in units:
            others = [each for each in unit if each not in uuids]
            if others:
                raise InUse(
                    f"A reset of NPU {', '.join(each for each in unit if each in uuids)} also resets {', '.join(others)}",
                    hint="Reset them together, while nothing uses any of them.",
                )
            for device in map(self.device, unit):
                _refuse_used(device)
        for unit in units:
            self._lanes.run(
                unit[0], partial(self._reset, unit), self._deadlines.reset, doing=f"Resetting NPU {', '.join(unit)}"
            )
            for uuid in unit:
                self._lanes.run(
                    uuid, partial(self._read_after_reset, uuid), self._deadlines.full_scan, doing=f"Reading NPU {uuid}"
                )

    def choose_id(self, device: Device, placement: Placement, taken: Collection[int] = ()) -> int | None:
        """Return the ID for a new vNPU at this placement. Raises InUse if no ID is free."""
        return slices.choose_id(device, placement, taken)

    def telemetry(self, seconds: float, partitions: Collection[str] = ()) -> tuple[Telemetry, ...]:
        """Return the telemetry of the chips and of these vNPUs (UUIDs). Chips that are faulty or busy are left out."""

        def read(chip: Chip) -> tuple[Telemetry, ...]:
            last = self._chips.last_device(chip.uuid)
            existing = last.partitions if last is not None else ()
            requested = [each for each in existing if each.uuid in partitions]
            return telemetry.read(self._source, chip, requested, is_partitioned=bool(existing))

        return self._gather_telemetry(seconds, self._chips.cached_facts(), read)

    def device_nodes(self, device: Device) -> tuple[str, ...]:
        """Return the path of the chip's device node."""
        return (f"/dev/davinci{device.minor}",)

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        """Return the offers of a chip."""
        return offers.offers(device, dynamic, owned)

    def labels(
        self,
        devices: Sequence[Device],
        machine: MachineFacts = UNKNOWN_MACHINE,
        strategy: str = NO_PARTITIONS,
    ) -> Mapping[str, str]:
        """Return the Node labels for these chips."""
        return labels(devices)

    def resource_name(self, device: Device, profile: str | None) -> str:
        """Return the extended resource name of a whole NPU, or of a vNPU with this template."""
        return resource_name(device, profile)

    def parts(self, device: Device) -> Mapping[str, int]:
        """Return the capacities of a whole chip that claims can share: its memory and its AI cores."""
        return sharing.shareable_capacities(device)

    def counter_set(self, device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
        """Return the counter set of a chip's dynamic offers."""
        return offers.counter_set(device, owned)

    def describe_unrestored(self) -> str:
        """Return the vNPUs that the driver's script has not created yet after a boot; or "" if it has created all."""
        return recovery.describe_unrestored(self._system, lambda: healthy_devices(self.discover()))

    def driver_edits(self) -> ContainerEdits:
        """Return the container edits that all chips share, for the files that exist now. Raises BackendUnavailable."""
        return runtime_edits(self._system) if self._by_runtime else self._common_edits.current()

    def device_attributes(
        self, device: Device, partition: Partition | None, is_for_machine: bool = False
    ) -> Mapping[str, AttributeValue]:
        """Return the attributes of a chip, or of an existing vNPU."""
        return offers.attributes_of(device, partition)

    def device_edits(self, device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
        """Return the container edits of one chip or one vNPU."""
        edits = runtime_device_edits if self._by_runtime else device_edits
        return edits(self._system, device, partition)

    def share_edits(self, device: Device, consumed: Mapping[str, int]) -> ContainerEdits:
        """Return the edits that show containers the share of a chip that their claim has."""
        return sharing.edits(device, consumed)

    def _open(self) -> None:
        if self._fixed_source is None and not self._source.is_open:
            # The helper opens the library on the host. Without one this process opens it, if it runs on the host
            # itself.
            self._use(Helper(self._system) if self._system.exists(SOCKET) else Library(self._system))
        try:
            self._source.open()
        except BackendUnavailable:
            other = self._other_source()
            if other is None:
                raise
            LOG.warning("the library of the NPUs cannot be used; npu-smi is used instead")
            self._use(other)
        self._chips.begin_session(self._source.driver_version())
        self._watch.begin()

    def _other_source(self) -> Source | None:
        """Return npu-smi as an open source if the library cannot be opened; None if npu-smi cannot be used either."""
        if self._fixed_source is not None or not isinstance(self._source, Library):
            return None
        program = Program(self._system)
        try:
            program.open()
        except BackendUnavailable:
            return None
        return program

    def _use(self, source: Source) -> None:
        self._source = self._chips.source = self._watch.source = source

    def _close(self) -> None:
        self._chips.end_session()
        self._source.close()

    def _refuse_closed(self) -> None:
        if not self._source.is_open:
            raise BackendUnavailable("The library of the NPUs is not open", hint="Open the backend first.")

    def _own_change(self, uuid: str) -> AbstractContextManager[object]:
        return self._watch.own_change()

    def _create(self, uuid: str, profile_id: int, placement: Placement, instance_id: int | None) -> Partition:
        """Create a vNPU with this ID, or with the first free ID."""
        now, read = self._read(uuid), partial(self._read, uuid)
        chip = self._chips.chip(uuid)
        return slices.create(self._source, self._system, chip, now, profile_id, placement, read, instance_id)

    def _destroy(self, uuid: str, instance_id: int) -> None:
        now = self._read(uuid)
        slices.destroy(self._source, self._chips.chip(uuid), now, instance_id, partial(self._read, uuid))

    def _reset(self, unit: Sequence[str]) -> None:
        """Reset a unit through its first chip, on that chip's lane."""
        _refuse_used(self._read(unit[0]))
        spots = [self._chips.chip(uuid).spot for uuid in unit]
        until = time.monotonic() + self._deadlines.reset
        self._source.reset(spots[0])
        time.sleep(RESET_SECONDS)
        with contextlib.suppress(AcceleratorError):  # the start of the chips is checked below
            self._source.rescan(spots[0])
        for uuid, spot in zip(unit, spots):
            while not self._has_started(spot):
                if time.monotonic() >= until:
                    raise DeviceFaulty(f"NPU {uuid} has not started after its reset", code=faults.NOT_READY)
                time.sleep(_STARTED_PERIOD)

    def _read_after_reset(self, uuid: str) -> None:
        """Read all facts of a chip again, on its lane."""
        spot = self._chips.chip(uuid).spot
        spots = tuple(sorted(chip.spot for chip in self._chips.cached_facts()))
        self._chips.forget(uuid)
        self._chips.scan(spot, spots, full=False)

    def _has_started(self, spot: Spot) -> bool:
        try:
            return self._source.is_started(spot)
        except AcceleratorError:
            return False  # it does not answer during the reset

    def _read(self, uuid: str) -> Device:
        """Read the changing facts of a chip, on its lane."""
        self._refuse_closed()
        self._chips.chip(uuid)  # raises NotFound
        try:
            return self._chips.read(uuid)
        except BackendUnavailable:
            raise
        except AcceleratorError as error:
            raise faults.as_fault(error) from error

    def _why_missing(self, device: Device) -> DeviceFaulty | None:
        """Return why a known chip is missing; None for a chip that was removed or replaced."""
        location = device.pci_address or device.minor
        others = (chip.identity for chip in self._chips.cached_facts() if chip.uuid != device.uuid)
        if location in [each.pci_address or each.physical_id for each in others]:
            return None
        node = f"{pci.DEVICES}/{device.pci_address}" if device.pci_address else f"/dev/davinci{device.minor}"
        if not self._system.exists(node):
            return None
        return DeviceFaulty(
            f"{device.describe()} is on the {'PCI' if device.pci_address else 'unified'} bus, and its driver does not know it any more",
            hint="Check the kernel log; a reset or a restart of the machine may be needed.",
            code=faults.NPU_LOST,
        )


def _refuse_used(device: Device) -> None:
    """Raise InUse for a chip with vNPUs or processes, which must not be reset."""
    if device.partitions or device.processes:
        raise InUse(
            f"{device.describe()} is in use: {', '.join(each.describe() for each in device.partitions) or 'by processes'}",
            pids=[each.pid for each in device.processes],
            hint="Destroy its slices and end the processes that use it.",
        )
