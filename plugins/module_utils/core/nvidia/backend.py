# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA's backend: puts discovery, changes, published names and container edits behind the core's protocol."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, TypeVar

from .. import pci
from ..cdi import ContainerEdits
from ..companions import Companion, SharedDevice
from ..composed import Grouping
from ..errors import AcceleratorError, BackendUnavailable, DeviceFaulty, NotFound
from ..labels import NO_PARTITIONS, UNKNOWN_MACHINE, MachineFacts
from ..lanes import VISIT_SECONDS, Call, Lanes
from ..looking import Looked, findings, gather
from ..model import (
    Arranged,
    AttributeValue,
    CounterSet,
    Device,
    Fault,
    Finding,
    Health,
    Notice,
    Offer,
    OwnedPartition,
    Partition,
    Partitioning,
    Placement,
    Surroundings,
)
from ..settings import Knob
from ..settings_record import record_path
from ..system import System
from ..telemetry import Telemetry
from . import discover, driver_files, edits, faults, mps, names, offers, partition, settings, telemetry
from .board_facts import BoardFacts
from .boards import Boards
from .common_edits import CommonEdits
from .configs import CONFIG_KINDS, DEVICE_CLASSES, DEVICE_TYPES
from .fabric_calls import FabricCalls
from .knobs import Knobs
from .nvml import Nvml
from .vendor import FACTS, labels, resource_name
from .watch import Watch

Answer = TypeVar("Answer")
LOG = logging.getLogger(__name__)

LIBRARY = "library"  # the lane of calls about no GPU; no UUID is spelled so


@dataclass(frozen=True)
class Deadlines:
    """How many seconds calls may take until they count as not coming back.

    The first look at a GPU may have to wake it; a change of its MIG mode may reset it. A change of its driver has all NVML
    closed and opened.
    """

    library: float = 60.0
    look: float = 10.0
    full_look: float = 30.0
    change: float = 60.0
    switch: float = 120.0
    fabric: float = 60.0


class NvidiaBackend:
    """The GPUs of this machine. Safe for threads; each GPU has a lane, and what concerns different GPUs runs side by side.

    What stays about a board (names, profiles, placements, handle) is read once and kept until it is reset or replaced, so
    that looking at a GPU costs a few calls.
    """

    facts = FACTS
    vendor = facts.word
    driver_name = facts.driver_name
    cdi_kind = facts.cdi_kind
    config_kinds = CONFIG_KINDS
    device_classes = DEVICE_CLASSES
    device_types = DEVICE_TYPES
    partitions_outlive_boot = False
    has_companions = True
    grouping: Grouping | None = None
    arranged: Arranged | None = None

    def __init__(self, system: System | None = None, deadlines: Deadlines | None = None, record: str = "") -> None:
        self._system = system or System()
        self._deadlines = deadlines or Deadlines()
        self._nvml = Nvml()
        self._knobs = Knobs(self._nvml, self._system, record or record_path(self.vendor))
        self._lanes = Lanes(self.vendor)
        self._watch = Watch(self._nvml, self._lanes)
        self._boards = Boards(self._nvml, self._system, self._watch)
        self._lock = threading.Lock()
        # Held for a look at all GPUs, and while one comes or goes: the one must not meet the other half-way.
        self._steady = threading.Lock()
        self._count: int | None = None
        self._ill: frozenset[str] = frozenset()
        self._surroundings = Surroundings((), frozenset())
        self._common_edits = CommonEdits(self._system)
        self._fabric = FabricCalls(self._system, self._lanes, self._deadlines.fabric)

    def is_there(self) -> bool:
        """Whether there is a GPU on the PCI bus, or in the driver's files."""
        return bool(names.listed(self._system) or names.gpus_on_the_bus(self._system))

    def open(self) -> None:
        """Load NVML and read the driver's version. Raises BackendUnavailable with the reason."""
        self._of_library(self._open, "Opening NVML")

    def close(self) -> None:
        """Shut NVML down and let go of all handles; changes that are under way are waited for."""
        self._watch.close()
        self._lanes.rest(self._deadlines.change)
        self._of_library(self._close, "Closing NVML")
        self._fabric.close()
        self._lanes.close()

    @property
    def driver_version(self) -> str:
        """The version of the loaded driver, as it spells it."""
        return self._boards.driver.driver_version

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        """Look at all GPUs side by side and return each one's facts or its fault, ordered by index.

        With ``patience`` a GPU that was never read, and is not back after so many seconds, is found as awaited.
        """
        self._fabric.look(self._deadlines.look)
        with self._steady:
            found = tuple(self._fabric.with_attributes(finding) for finding in self._discover(full, patience))
            self._boards.numbering.write()
            return found

    def _discover(self, full: bool, patience: float | None) -> tuple[Finding, ...]:
        count = self._of_library(
            lambda: int(self._nvml.call("nvmlDeviceGetCount", doing="Counting GPUs")), "Counting GPUs"
        )
        away = self._boards.away()
        with self._lock:
            is_other = count != self._count
            by_index = full or is_other
            self._count = count
        deadline = self._deadlines.full_look if by_index else self._deadlines.look
        begun = time.monotonic()
        looks: dict[int, Call[Device]] = {}
        for position, index in enumerate(self._boards.indices(count, is_other)):
            look = partial(self._boards.look, position, index, by_index, full)
            key = self._boards.uuid_at(index) or f"index {index}"
            looks[index] = self._lanes.submit(key, look, deadline, doing=f"Looking at GPU {index}")
        looked = gather(looks, self._last_at, faults.faulty, begun=begun, deadline=deadline, patience=patience)
        found, gone = findings(
            Looked({**looked.found, **away}, looked.silent),
            self._boards.known(),
            why_missing=self._why_missing,
            sign=faults.sign,
            names=partial(names.called, self._system),
        )
        for uuid in gone:
            self._boards.forget(uuid, taken_away=True)
        former, self._ill = self._ill, frozenset(finding.uuid for finding in found if finding.fault is not None)
        for uuid in former - self._ill:
            self._watch.forget(uuid)  # it may have refused to be listened to
        return tuple(self._on_the_bus(finding) if finding.uuid in away else finding for finding in found)

    def _on_the_bus(self, finding: Finding) -> Finding:
        """Return what is found of a GPU that another driver has: what NVML told before, unless it is gone."""
        device = finding.device
        if device is None or self._system.exists(f"{pci.DEVICES}/{device.pci_address}"):
            return finding
        lost = DeviceFaulty(
            f"{device.pci_address}, which is passed through, is not on the PCI bus any more", code=faults.GPU_LOST
        )
        ill = replace(device, health=Health((faults.sign(lost),)))
        return replace(finding, device=ill, fault=Fault(lost.code, str(lost)))

    def device(self, uuid: str) -> Device:
        """Return fresh facts of one GPU. Raises NotFound, DeviceFaulty, BackendUnavailable."""
        return self.ask(uuid).result()

    def ask(self, uuid: str) -> Call[Device]:
        """Begin to read fresh facts of one GPU."""
        return self._lanes.submit(
            uuid, partial(self._read, uuid), self._deadlines.look, doing=f"Reading the facts of GPU {uuid}"
        )

    def together(self, uuid: str, function: Callable[[], Answer]) -> Answer:
        """Do several things to one GPU on one visit of its lane; who is on one goes on with that."""
        if self._lanes.is_mine(uuid):
            return function()
        return self._lanes.run(uuid, function, self._deadlines.look, doing=f"Working on GPU {uuid}")

    def visit(self, uuid: str, function: Callable[[], Answer]) -> Call[Answer]:
        """Begin to do several things to one GPU on one visit of its lane, and others once it has left that."""
        return self._lanes.submit(uuid, function, VISIT_SECONDS, doing=f"Working on GPU {uuid}")

    def leave(self, uuid: str) -> None:
        """Go on off the lane with what is left of a visit."""
        self._lanes.leave(uuid)

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait until a GPU tells of an error or of a change of its partitioning, for so many seconds at most."""
        if not self._nvml.is_open:
            raise BackendUnavailable("NVML is not open", hint="Open the backend first.")

        def boards() -> list[BoardFacts]:
            return [board for board in self._boards.kept() if board.uuid not in self._ill]

        return self._watch.wait(boards, seconds)

    def surroundings(self) -> Surroundings:
        """Return the version and the instance of the loaded driver, and the GPUs that it has, as the kernel shows them."""
        if not self._steady.acquire(blocking=False):
            return self._surroundings  # a GPU is given away or comes back, or all are looked at
        try:
            away = frozenset(gpu.pci_address for gpu in self._boards.away().values())
            listed = names.listed(self._system)
            self._surroundings = Surroundings(names.loaded(self._system), listed | away, self._boards.returned)
            return self._surroundings
        finally:
            self._steady.release()

    def renew(self) -> None:
        """Open NVML anew: it knows the GPUs that were there when it was opened."""
        with self._steady:
            try:
                self._without_library(LIBRARY, lambda: None, "Opening NVML anew")
                self._boards.begin(discover.read_driver(self._nvml))
            except BackendUnavailable:
                raise
            except AcceleratorError as error:
                raise BackendUnavailable(error.message, hint=error.hint) from error

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Switch MIG on or off; on boards that need a reset the change stays pending."""

        def change() -> None:
            board, now = self._settled(uuid)
            if partition.set_mode(self._nvml, board, now, partial(self._read, uuid), enabled):
                self._boards.read_minor(board)
                self._set_again(uuid)

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
            self._after_loss(uuids)

    def choose_id(self, device: Device, placement: Placement, taken: Collection[int] = ()) -> int | None:
        """Return None: the driver gives GPU instances their ids. Pure."""

    def create_partition(
        self,
        uuid: str,
        profile_id: int,
        placement: Placement,
        instance_id: int | None = None,  # noqa: ARG002  the driver gives it
    ) -> Partition:
        """Create a GPU instance at exactly this placement and the compute instance that fills it."""

        def create() -> Partition:
            board, _now = self._settled(uuid)
            return partition.create(self._nvml, board, partial(self._read, uuid), profile_id, placement)

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

    def knobs(self, uuid: str, names: Collection[str]) -> Mapping[str, Knob]:
        """Return those of a GPU's knobs that are named and that it has."""

        def read() -> Mapping[str, Knob]:
            mig = self._read(uuid).partitioning.enabled
            if self._boards.is_away(uuid) is not None:
                return settings.of_none(names)
            return self._knobs.read(self._boards.board(uuid), names, mig=mig)

        return self._lanes.run(uuid, read, self._deadlines.look, doing=f"Reading the settings of GPU {uuid}")

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        """Set knobs of a GPU; None is what the node has set, and where it has set nothing what the GPU has by default."""

        def change() -> None:
            self._read(uuid)
            if self._boards.is_away(uuid) is not None and set(values) <= settings.WHILE_AWAY:
                return
            self._knobs.set(self._boards.board(uuid), values)

        self._lanes.run(uuid, change, self._deadlines.change, doing=f"Setting {', '.join(values)} of GPU {uuid}")

    def telemetry(self, seconds: float, partitions: Collection[str] = ()) -> tuple[Telemetry, ...]:
        """Return what the GPUs and these MIG devices tell of their present work; one that is ill or busy is left out."""
        if not self._nvml.is_open:
            raise BackendUnavailable("NVML is not open", hint="Open the backend first.")

        def read(board: BoardFacts) -> tuple[Telemetry, ...]:
            last = self._boards.last(board.uuid)
            there = last.partitions if last is not None else ()
            return telemetry.read(self._nvml, board, [each for each in there if each.uuid in partitions])

        until = time.monotonic() + seconds
        calls = [
            self._lanes.submit(
                board.uuid, partial(read, board), self._deadlines.look, doing=f"Reading what GPU {board.uuid} does"
            )
            for board in self._boards.kept()
            if board.uuid not in self._ill
        ]
        found: list[Telemetry] = []
        for call in calls:
            with contextlib.suppress(AcceleratorError):  # a look tells of its fault; it may be in a reset as well
                found += call.result(until)
        return tuple(found)

    def detach(self, uuid: str, action: Callable[[], None]) -> None:
        """Close NVML, which has every GPU open that it was asked about; give the GPU away; and open NVML for the others."""
        with self._steady:
            device = self._lanes.run(uuid, partial(self._read, uuid), self._deadlines.look, doing=f"Reading GPU {uuid}")
            if self._boards.is_away(uuid) is not None:
                action()
                return

            def leave() -> None:
                action()
                self._boards.send_away(device)

            self._without_library(uuid, leave, f"Giving GPU {uuid} to another driver")

    def attach(self, uuid: str, action: Callable[[], None]) -> None:
        """Take a GPU back, and verify that NVML lists it after it is opened again; if NVIDIA's driver is unloaded, only take it back."""
        with self._steady:
            if self._boards.is_away(uuid) is None:
                action()
                return
            take = partial(self._boards.welcome, uuid, action)
            try:
                self._without_library(uuid, take, f"Taking GPU {uuid} back from another driver")
            except BackendUnavailable as error:
                if self._boards.is_away(uuid) is not None or names.loaded(self._system):
                    raise
                LOG.warning("GPU %s is taken back, and NVIDIA's driver is not loaded: %s", uuid, error)
                return
        self.device(uuid)
        self._after_loss((uuid,))

    def number_by(self, directory: str, *, writes: bool = False, is_referred: bool = True) -> None:
        """Give GPUs the numbers in the driver's file in this directory; see numbering.py."""
        self._boards.numbering.use(directory, writes=writes)
        if not is_referred and not self._nvml.is_open:
            self._boards.numbering.forget()

    def remember(self, devices: Iterable[Device]) -> None:
        """Learn the facts of GPUs that another driver was given before this process began."""
        for device in devices:
            self._boards.send_away(device)

    def _without_library(self, uuid: str, action: Callable[[], None], doing: str) -> None:
        """Do something on a GPU's lane while NVML is closed. Whatever is asked of other GPUs waits until it is open again."""

        def act() -> None:
            with self._lanes.alone(uuid, self._deadlines.look):
                self._boards.let_go()
                self._nvml.close()
                try:
                    action()
                finally:
                    self._nvml.open()

        self._watch.close()
        try:
            self._lanes.run(uuid, act, self._deadlines.switch, doing=doing)
        finally:
            self._watch.begin()

    @property
    def fabric_partitions(self) -> FabricCalls:
        """The partitions of the NVSwitch fabric."""
        return self._fabric

    def device_nodes(self, device: Device) -> tuple[str, ...]:
        """Return the node of the GPU."""
        return (f"/dev/nvidia{device.minor}",)

    def companions(self, claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
        """Return the MPS daemons that let containers share these devices of a claim. Pure."""
        return mps.companions(claim_uid, devices)

    def refuse_without_companions(self) -> None:
        """Refuse where MPS is not installed."""
        mps.refuse_without_tool(self._system)

    def companion_edits(self, companion: Companion) -> ContainerEdits:
        """Return what a container needs to reach an MPS daemon. Pure."""
        return mps.edits(companion)

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        """Return what is published of a GPU. Pure."""
        return offers.offers(device, dynamic, owned, passthrough)

    def labels(
        self, devices: Sequence[Device], machine: MachineFacts = UNKNOWN_MACHINE, strategy: str = NO_PARTITIONS
    ) -> Mapping[str, str]:
        """Return the labels of a Node with these GPUs. Pure."""
        return labels(devices, machine, strategy)

    def resource_name(self, device: Device, profile: str | None) -> str:
        """Return what pods ask for to get a whole GPU, or a MIG device of a profile. Pure."""
        return resource_name(device, profile)

    def parts(self, device: Device) -> Mapping[str, int]:
        """Return what of a whole GPU is shared out among claims. Pure."""
        return offers.parts(device)

    def counter_set(self, device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
        """Return what a GPU's dynamic offers share. Pure."""
        return offers.counter_set(device, owned)

    def driver_edits(self) -> ContainerEdits:
        """Return what all GPUs need in a container, by what is on the disk now. Raises BackendUnavailable."""
        found = self._common_edits.current(self.driver_version)
        if not self._fabric.is_used:
            return found
        # Who reaches the fabric manager can activate and deactivate the partitions of others.
        kept = tuple(each for each in found.mounts if each.host_path != driver_files.FABRIC_MANAGER_SOCKET)
        return replace(found, mounts=kept)

    def settle(self, seconds: float) -> None:
        """Wait until nvidia-ctk, if it is being asked, has answered."""
        self._common_edits.settle(seconds)

    def machine_edits(self) -> ContainerEdits:
        """Return what a container of a virtual machine needs. Pure."""
        return edits.NOTHING

    def device_attributes(
        self, device: Device, partition: Partition | None, is_for_machine: bool = False
    ) -> Mapping[str, AttributeValue]:
        """Return what is published of a GPU, for a virtual machine or not, or of a MIG device that exists. Pure."""
        device = replace(device, whole_attributes=self._fabric.attributes(device))
        return offers.attributes_for_machine(device) if is_for_machine else offers.attributes_of(device, partition)

    def device_edits(self, device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
        """Return what one GPU or one MIG device needs in a container; its node is the one that it has now."""
        boards = self._boards
        present = boards.with_present_minor(device)
        return edits.device_edits(self._system, present, partition, monitoring, boards.capabilities)

    def share_edits(self, device: Device, consumed: Mapping[str, int]) -> ContainerEdits:  # noqa: ARG002  MPS sets limits
        """Return nothing. Pure."""
        return ContainerEdits()

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
        """Make a call that concerns no single GPU. Its errors are those of the node."""
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
        board, _now = self._settled(uuid)
        partition.destroy(self._nvml, board, partial(self._read, uuid), instance_id)

    def _set_again(self, uuid: str) -> None:
        """Set again what the node has set on a GPU, after what takes settings along; on its lane."""
        if self._knobs.are_noted(uuid):
            board, now = self._settled(uuid)
            self._knobs.set_again(board, mig=now.enabled)

    def _after_loss(self, uuids: Iterable[str]) -> None:
        for uuid in uuids:
            doing = f"Setting again what GPU {uuid} had"
            try:
                self._lanes.run(uuid, partial(self._set_again, uuid), self._deadlines.change, doing=doing)
            except AcceleratorError as error:  # what took the settings along is done, and looks tell of a GPU's fault
                LOG.warning("%s: %s", doing, error)

    def _read(self, uuid: str) -> Device:
        """Read what changes about a GPU, on its lane."""
        away = self._boards.is_away(uuid)
        return away if away is not None else self._told(self._boards.read, uuid)

    def _settled(self, uuid: str) -> tuple[BoardFacts, Partitioning]:
        """Return what a change of a GPU's partitioning begins with, on its lane."""
        return self._told(self._boards.settle, uuid)

    @staticmethod
    def _told(ask: Callable[[str], Answer], uuid: str) -> Answer:
        try:
            return ask(uuid)
        except (BackendUnavailable, NotFound):
            raise
        except AcceleratorError as error:
            raise faults.faulty(error) from error

    def _last_at(self, index: int) -> Device | None:
        return self._boards.last(self._boards.uuid_at(index))

    def _why_missing(self, device: Device) -> DeviceFaulty | None:
        """Return why a GPU that was there is not found; None for one that was taken away."""

        def ask() -> None:
            handle = self._nvml.call("nvmlDeviceGetHandleByUUID", device.uuid, doing=f"Finding GPU {device.uuid}")
            discover.probe(self._nvml, handle, device.uuid)

        try:
            self._lanes.run(device.uuid, ask, self._deadlines.look, doing=f"Asking GPU {device.uuid}")
        except DeviceFaulty as error:
            return error
        except AcceleratorError:
            return None
        return None
