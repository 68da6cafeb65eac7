# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# ruff: noqa: ARG002  the protocol hands over more than a chip has use for
"""Ascend's backend: puts discovery, slices, published names and container edits behind the core's protocol."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, TypeVar

from .. import pci
from ..cdi import ContainerEdits
from ..companions import Companion, SharedDevice
from ..composed import Grouping
from ..errors import AcceleratorError, BackendUnavailable, DeviceFaulty, InUse, Unsupported, unexpected
from ..fabric import FabricPartitions
from ..labels import NO_PARTITIONS, UNKNOWN_MACHINE, MachineFacts
from ..lanes import VISIT_SECONDS, Call, Lanes
from ..looking import findings, gather
from ..model import (
    Arranged,
    AttributeValue,
    CounterSet,
    Device,
    Finding,
    Notice,
    Offer,
    OwnedPartition,
    Partition,
    Placement,
    Surroundings,
)
from ..settings import Knob
from ..system import System
from ..telemetry import Telemetry
from . import bus, faults, groups, occupancy, offers, sharing, slices, telemetry
from .chips import Chip, Chips
from .configs import CONFIG_KINDS, DEVICE_CLASSES, DEVICE_TYPES
from .dcmi import Spot
from .driver_files import CommonEdits, device_edits, runtime_device_edits, runtime_edits
from .library import Library
from .program import Program
from .readings import Source
from .vendor import FACTS, labels, resource_name
from .watch import Watch

Answer = TypeVar("Answer")

LOG = logging.getLogger(__name__)

LIBRARY = "library"  # the lane of calls about no chip; no UUID is spelled so
_STARTED_PERIOD = 0.2


@dataclass(frozen=True)
class Deadlines:
    """How many seconds calls may take until they count as not coming back.

    The first look at a chip may run npu-smi; a slice is made in a second or so; a chip that is reset takes minutes to come up.
    """

    library: float = 60.0
    look: float = 10.0
    full_look: float = 30.0
    change: float = 60.0
    reset: float = 300.0


class AscendBackend:
    """The NPUs of this machine. Safe for threads; each chip has a lane, and what concerns different chips runs side by side.

    Two chips of one card have two lanes: each call names its chip, each chip has a node of its own, nothing that the vendor says of DCMI
    asks for more, and a chip that hangs must not take its neighbour along. What chips share, the file of slices that outlive a start of
    the machine, the vendor's library locks itself. Calls about no chip have a lane of their own.

    What stays about a chip is read once and kept until it is replaced, so that looking at a chip costs a few calls of the
    library. Nothing on the way of a claim starts a program. With ``by_runtime`` Huawei's container runtime brings chips into
    containers, and the edits only name them.
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
    arranged: Arranged | None = staticmethod(occupancy.arranged)

    def __init__(
        self,
        system: System | None = None,
        deadlines: Deadlines | None = None,
        source: Source | None = None,
        by_runtime: bool = False,
    ) -> None:
        self._by_runtime = by_runtime
        self._system = system or System()
        self._deadlines = deadlines or Deadlines()
        self._given = source
        self._source: Source = source or Library(self._system)
        self._lanes = Lanes(self.vendor)
        self._chips = Chips(self._source, self._system)
        self._watch = Watch(self._source, self._system, self._chips.named)
        self._looking = threading.Lock()
        self._ill: frozenset[str] = frozenset()
        self._topology_problem = ""
        self._common_edits = CommonEdits(self._system)
        self._bus = bus.Bus(self._system)

    def is_there(self) -> bool:
        """Whether there is a chip on the PCI bus."""
        return bool(bus.chips(self._system))

    def open(self) -> None:
        """Reach the chips' library and read the driver's version. Raises BackendUnavailable with the reason."""
        try:
            self._of_library(self._open, "Opening the library of the NPUs")
        except BackendUnavailable as error:
            there = bus.describe(self._system)
            if not there:
                raise
            raise BackendUnavailable(f"{error.message.rstrip('.')}; {there}", hint=error.hint) from error

    def close(self) -> None:
        """Ask nothing more; changes that are under way are waited for."""
        self._watch.close()
        self._lanes.rest(self._deadlines.change)
        self._of_library(self._close, "Closing the library of the NPUs")
        self._lanes.close()

    @property
    def driver_version(self) -> str:
        """The version of the driver, as it spells it."""
        return self._chips.driver_version

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        """Look at all chips side by side and return each one's facts or its fault, ordered by index.

        With ``patience`` a chip that was never read, and is not back after so many seconds, is found as awaited.
        """
        with self._looking:
            spots = self._of_library(self._source.spots, "Listing the NPUs")
            indices = self._chips.indices(spots)
            unread = len(self._chips.kept()) < len(spots)
            deadline = self._deadlines.full_look if full or unread else self._deadlines.look
            begun = time.monotonic()
            looks = {
                indices[spot]: self._lanes.submit(
                    self._chips.key_at(spot),
                    partial(self._chips.look, spot, spots, full),
                    deadline,
                    doing=f"Looking at {spot}",
                )
                for spot in spots
            }
            looked = gather(
                looks, self._chips.last_at, faults.faulty, begun=begun, deadline=deadline, patience=patience
            )
            self._settle_topology()
            looked = looked.completed(self._chips.dressed, faults.faulty)
            found, gone = findings(
                looked,
                self._chips.known(),
                why_missing=self._why_missing,
                sign=faults.sign,
                names=partial(bus.unnamed, self._system),
            )
            for uuid in gone:
                self._chips.forget(uuid, taken_away=True)
            self._ill = frozenset(finding.uuid for finding in found if finding.fault is not None)
            return found

    def _settle_topology(self) -> None:
        """Work out the topology; where that fails, the chips keep the attributes that they had."""
        problem = ""
        try:
            self._chips.settle()
        except Exception as error:  # noqa: BLE001  chips are published without it
            problem = str(unexpected(error, "Working out the topology of the NPUs"))
        if problem and problem != self._topology_problem:
            LOG.error("%s", problem)
        self._topology_problem = problem

    def device(self, uuid: str) -> Device:
        """Return fresh facts of one chip. Raises NotFound, DeviceFaulty, BackendUnavailable."""
        return self.ask(uuid).result()

    def ask(self, uuid: str) -> Call[Device]:
        """Begin to read fresh facts of one chip."""
        return self._lanes.submit(
            uuid, partial(self._read, uuid), self._deadlines.look, doing=f"Reading the facts of NPU {uuid}"
        )

    def together(self, uuid: str, function: Callable[[], Answer]) -> Answer:
        """Do several things to one NPU on one visit of its lane; who is on one goes on with that."""
        if self._lanes.is_mine(uuid):
            return function()
        return self._lanes.run(uuid, function, self._deadlines.look, doing=f"Working on NPU {uuid}")

    def visit(self, uuid: str, function: Callable[[], Answer]) -> Call[Answer]:
        """Begin to do several things to one NPU on one visit of its lane, and others once it has left that."""
        return self._lanes.submit(uuid, function, VISIT_SECONDS, doing=f"Working on NPU {uuid}")

    def leave(self, uuid: str) -> None:
        """Go on off the lane with what is left of a visit."""
        self._lanes.leave(uuid)

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait until a chip tells of a fault, or somebody else makes or destroys slices, for so many seconds at most."""
        self._refuse_closed()
        return self._watch.wait(seconds)

    def surroundings(self) -> Surroundings:
        """Return the driver, and the chips that it has, as the kernel shows them."""
        return Surroundings(bus.loaded(self._system), self._bus.seen())

    def renew(self) -> None:
        """Have the library see what has come and gone."""
        with self._looking:
            self._watch.close()
            self._lanes.rest(self._deadlines.change)
            self._of_library(self._open, "Opening the library of the NPUs anew")

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Refuse: a chip has no such mode, it is partitioned while it has slices. What is so already needs nothing."""
        if self.device(uuid).partitioning.enabled != enabled:
            raise Unsupported(
                f"NPU {uuid} has no mode that could be switched: it is partitioned while it has slices",
                hint="Make slices, or destroy them.",
            )

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset chips, one after the other, and wait until they have come up."""
        for uuid in uuids:
            self._lanes.run(uuid, partial(self._reset, uuid), self._deadlines.reset, doing=f"Resetting NPU {uuid}")

    def choose_id(self, device: Device, placement: Placement, taken: Collection[int] = ()) -> int | None:
        """Return the id to make a slice at this placement with. Pure. Raises InUse when none is left."""
        return slices.choose_id(device, placement, taken)

    def create_partition(
        self, uuid: str, profile_id: int, placement: Placement, instance_id: int | None = None
    ) -> Partition:
        """Make a slice at exactly this placement, with this id; without one with the first that is free."""

        def create() -> Partition:
            now, read = self._read(uuid), partial(self._read, uuid)
            chip = self._chips.chip(uuid)
            return slices.create(self._source, self._system, chip, now, profile_id, placement, read, instance_id)

        return self._change(
            uuid,
            create,
            f"Creating a slice at {placement} on NPU {uuid}",
            late=lambda made: self._destroy(uuid, made.instance_id),
        )

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        """Destroy a slice that nobody uses."""
        self._change(uuid, partial(self._destroy, uuid, instance_id), f"Destroying slice {instance_id} of NPU {uuid}")

    def knobs(self, uuid: str, names: Collection[str]) -> Mapping[str, Knob]:
        """Return none: nothing can be set on a chip for the time of a claim."""
        return {}

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        """Refuse whatever is to be set."""
        if values:
            raise Unsupported(f"NPU {uuid} has no {', '.join(values)} that could be set")

    def telemetry(self, seconds: float, partitions: Collection[str] = ()) -> tuple[Telemetry, ...]:
        """Return what the chips and these slices tell of their present work; one that is ill or busy is left out."""
        self._refuse_closed()

        def read(chip: Chip) -> tuple[Telemetry, ...]:
            last = self._chips.last(chip.uuid)
            there = last.partitions if last is not None else ()
            named = [each for each in there if each.uuid in partitions]
            return telemetry.read(self._source, chip, named, bool(there))

        until = time.monotonic() + seconds
        calls = [
            self._lanes.submit(
                chip.uuid, partial(read, chip), self._deadlines.look, doing=f"Reading what NPU {chip.uuid} does"
            )
            for chip in self._chips.kept()
            if chip.uuid not in self._ill
        ]
        found: list[Telemetry] = []
        for call in calls:
            with contextlib.suppress(AcceleratorError):  # a look tells of its fault
                found += call.result(until)
        return tuple(found)

    def companions(self, claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
        """Return none: no program has to run for containers to share a chip. Pure."""
        return ()

    def refuse_without_companions(self) -> None:
        """Refuse nothing: no such programs are needed."""

    def companion_edits(self, companion: Companion) -> ContainerEdits:
        """Return nothing. Pure."""
        return ContainerEdits()

    def detach(self, uuid: str, action: Callable[[], None]) -> None:
        """Refuse: NPUs are given to no other driver."""
        raise Unsupported(f"NPU {uuid} cannot be passed through to a virtual machine")

    def attach(self, uuid: str, action: Callable[[], None]) -> None:
        """Refuse: NPUs are given to no other driver."""
        raise Unsupported(f"NPU {uuid} cannot be passed through to a virtual machine")

    def number_by(self, directory: str, *, writes: bool = False, is_referred: bool = True) -> None:
        """Do nothing: the index of an NPU is its physical id, which stays when others are removed."""

    def remember(self, devices: Iterable[Device]) -> None:
        """Learn nothing: no NPU is ever away."""

    def device_nodes(self, device: Device) -> tuple[str, ...]:
        """Return the node of the chip."""
        return (f"/dev/davinci{device.minor}",)

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        """Return what is published of a chip. Pure."""
        return offers.offers(device, dynamic, owned)

    def labels(
        self,
        devices: Sequence[Device],
        machine: MachineFacts = UNKNOWN_MACHINE,
        strategy: str = NO_PARTITIONS,
    ) -> Mapping[str, str]:
        """Return the labels of a Node with these chips. Pure."""
        return labels(devices)

    def resource_name(self, device: Device, profile: str | None) -> str:
        """Return what pods ask for to get a whole NPU, or a slice of a template. Pure."""
        return resource_name(device, profile)

    def parts(self, device: Device) -> Mapping[str, int]:
        """Return what of a whole chip is shared out among claims: its memory and its AI cores. Pure."""
        return sharing.parts(device)

    def counter_set(self, device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
        """Return what a chip's dynamic offers share. Pure."""
        return offers.counter_set(device, owned)

    def driver_edits(self) -> ContainerEdits:
        """Return what all chips need in a container, by what is on the disk now. Raises BackendUnavailable."""
        return runtime_edits(self._system) if self._by_runtime else self._common_edits.current()

    def settle(self, seconds: float) -> None:
        """Wait for nothing: nothing is asked beside."""

    def machine_edits(self) -> ContainerEdits:
        """Return nothing: NPUs are given to no virtual machine. Pure."""
        return ContainerEdits()

    def device_attributes(
        self, device: Device, partition: Partition | None, is_for_machine: bool = False
    ) -> Mapping[str, AttributeValue]:
        """Return what is published of a chip, or of a slice that exists. Pure."""
        return offers.attributes_of(device, partition)

    def device_edits(self, device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
        """Return what one chip or one slice needs in a container."""
        edits = runtime_device_edits if self._by_runtime else device_edits
        return edits(self._system, device, partition)

    def share_edits(self, device: Device, consumed: Mapping[str, int]) -> ContainerEdits:
        """Return what tells containers how much of a chip their claim has. Pure."""
        return sharing.edits(device, consumed)

    def _open(self) -> None:
        try:
            self._source.open()
        except BackendUnavailable:
            other = self._other_source()
            if other is None:
                raise
            LOG.warning("the library of the NPUs cannot be used; npu-smi is asked instead")
            self._source = self._chips.source = self._watch.source = other
        self._chips.begin(self._source.driver_version())
        self._watch.begin()

    def _other_source(self) -> Source | None:
        """Return the vendor's program, open, where the library cannot be; None where it cannot be used either."""
        if self._given is not None or isinstance(self._source, Program):
            return None
        program = Program(self._system)
        try:
            program.open()
        except BackendUnavailable:
            return None
        return program

    def _close(self) -> None:
        self._chips.end()
        self._source.close()
        if self._given is None and isinstance(self._source, Program):
            # The library is tried again when this is opened again.
            self._source = self._chips.source = self._watch.source = Library(self._system)

    def _refuse_closed(self) -> None:
        if not self._source.is_open:
            raise BackendUnavailable("The library of the NPUs is not open", hint="Open the backend first.")

    def _of_library(self, function: Callable[[], Answer], doing: str) -> Answer:
        """Make a call about no chip; whatever goes wrong with it is the machine's."""
        try:
            return self._lanes.run(LIBRARY, function, self._deadlines.library, doing=doing)
        except BackendUnavailable:
            raise
        except AcceleratorError as error:
            raise BackendUnavailable(error.message, hint=error.hint) from error

    def _change(
        self, uuid: str, change: Callable[[], Answer], doing: str, late: Callable[[Answer], object] | None = None
    ) -> Answer:
        def changing() -> Answer:
            with self._watch.own_change():
                return change()

        return self._lanes.run(uuid, changing, self._deadlines.change, doing=doing, late=late)

    def _destroy(self, uuid: str, slice_id: int) -> None:
        now = self._read(uuid)
        slices.destroy(self._source, self._chips.chip(uuid), now, slice_id, partial(self._read, uuid))

    def _reset(self, uuid: str) -> None:
        now, spot = self._read(uuid), self._chips.chip(uuid).spot
        if now.partitions or now.processes:
            raise InUse(
                f"{now.describe()} is in use: {', '.join(each.describe() for each in now.partitions) or 'by processes'}",
                pids=[each.pid for each in now.processes],
                hint="Destroy its slices and end what has it open.",
            )
        self._source.reset(spot)
        until = time.monotonic() + self._deadlines.reset
        while not self._has_started(spot):
            if time.monotonic() >= until:
                raise DeviceFaulty(f"{now.describe()} has not come up after its reset", code=faults.NOT_READY)
            time.sleep(_STARTED_PERIOD)
        self._chips.forget(uuid)
        self._chips.look(spot, (spot,), full=False)

    def _has_started(self, spot: Spot) -> bool:
        try:
            return self._source.is_started(spot)
        except AcceleratorError:
            return False  # it cannot be asked while it is reset

    def _read(self, uuid: str) -> Device:
        """Read what changes about a chip, on its lane."""
        self._refuse_closed()
        known = self._chips.chip(uuid)
        try:
            return self._chips.read(known.uuid)
        except BackendUnavailable:
            raise
        except AcceleratorError as error:
            raise faults.faulty(error) from error

    def _why_missing(self, device: Device) -> DeviceFaulty | None:
        """Return why a chip that was there is not found; None for one that was taken away."""
        if not self._system.exists(f"{pci.DEVICES}/{device.pci_address}"):
            return None
        return DeviceFaulty(
            f"{device.describe()} is on the PCI bus, and its driver does not know it any more",
            hint="Look at the kernel log; a reset or a restart of the machine may be needed.",
            code=faults.NPU_LOST,
        )
