# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The hands: carries out plans on hardware and CDI files. Every function blocks and is called on a thread."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable, TypeVar

from ..core import passthrough, pci
from ..core.backend_protocol import Backend
from ..core.cdi import (
    ContainerEdits,
    DeviceNode,
    build_spec,
    list_invalid_specs,
    list_specs,
    remove_spec,
    repair_hooks,
    spec_path,
    write_spec,
)
from ..core.companions import Companion
from ..core.configuration import ConfigRefused
from ..core.errors import (
    AcceleratorError,
    BackendUnavailable,
    DeviceFaulty,
    DoesNotFit,
    FabricRejected,
    InUse,
    NotFound,
    NotPermitted,
    Unsupported,
)
from ..core.fabric import FabricPartitions
from ..core.lanes import Call
from ..core.lately import Lately
from ..core.model import PARTITION, PASSTHROUGH, Device, Partition, Process
from ..core.prepared import CLAIM_ANNOTATION
from ..core.settings import Knob
from ..core.system import System
from ..core.vfio_drivers import best_driver
from ..logs import fields
from ..metrics import Metrics, NoMetrics
from .allocation import ClaimError
from .companions import Keeper
from .container_files import ContainerFiles, existing_partition, held_partition
from .debts import Debt
from .fabric import has_whole_devices, to_activate, whole_devices, with_partition
from .lists import refuse_unlistable, with_lists_joined
from .plan import Destruction, ModeChange, PreparePlan, UndoPlan
from .records import ClaimRecord, DeviceRecord
from .refusals import PartitionRefused
from .settings import Restoration, wanted_of

LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """Fresh facts of devices by UUID, and what keeps others from telling theirs; one that is not there is in neither."""

    devices: Mapping[str, Device]
    faults: Mapping[str, str]


@dataclass(frozen=True)
class Undone:
    """What became of an undo plan.

    On which devices partitioning went off, which partitions are owed now, and which knobs were set back and were not. ``rejection`` is the
    error with which the fabric manager rejected the deactivation of the claim's partition of the fabric.
    """

    switched_off: tuple[str, ...] = ()
    debts: tuple[Debt, ...] = ()
    restored: tuple[Restoration, ...] = ()
    unrestored: tuple[Restoration, ...] = ()
    rejection: FabricRejected | None = None


@dataclass(frozen=True)
class Hands:
    """One vendor's hardware, the folders of claims' files and who runs companions. ``reached`` is told each complete stage.

    ``files`` is what containers may read. For ``edits_seconds`` after a look at the disk what all devices of the vendor need in a container
    is taken to be what it was.
    """

    backend: Backend
    driver: str
    system: System
    cdi_directory: str
    files: ContainerFiles
    reached: Callable[[str], None]
    keeper: Keeper
    metrics: Metrics = field(default_factory=NoMetrics)
    edits_seconds: float = 0.0

    @functools.cached_property
    def driver_edits(self) -> Lately[ContainerEdits]:
        """What all devices of the vendor need in a container, as of a moment ago at most. Calling it raises BackendUnavailable."""
        return Lately(self._driver_edits_now, self.edits_seconds)

    def _driver_edits_now(self) -> ContainerEdits:
        return self.backend.driver_edits()

    def look_ahead(self) -> None:
        """Hold what claims need in any case against the disk. What is not there is told to the claim that needs it."""
        with contextlib.suppress(AcceleratorError):
            self.driver_edits()

    def facts(self, uuids: Iterable[str]) -> Facts:
        """Return fresh facts of the devices named. Raises BackendUnavailable."""
        return self.answers(self.ask(uuids))

    def ask(self, uuids: Iterable[str]) -> dict[str, Call[Device]]:
        """Begin to read the facts of the devices named, side by side, and return at once."""
        return {uuid: self.backend.ask(uuid) for uuid in uuids}

    def answers(self, calls: Mapping[str, Call[Device]]) -> Facts:
        """Return what was asked. Raises BackendUnavailable."""
        found: dict[str, Device] = {}
        faults: dict[str, str] = {}
        for uuid, call in calls.items():
            try:
                found[uuid] = call.result()
            except NotFound:
                continue
            except DeviceFaulty as error:
                faults[uuid] = str(error)
        return Facts(found, faults)

    def in_one_visit(self, uuids: Collection[str], steps: Callable[[], T]) -> T:
        """Take steps that change nothing but devices, and ask nothing of others; together where it is one device.

        To go to a device's thread and back costs as much as most of what is done there. Raises what the steps raise, and DeviceFaulty
        with the cause no-answer where that is the one device's, in the midst of them.
        """
        if len(uuids) != 1:
            return steps()
        return self.backend.together(next(iter(uuids)), partial(contextvars.copy_context().run, steps))

    def knobs(self, record: ClaimRecord) -> Mapping[str, Mapping[str, Knob]]:
        """Return the knobs that a claim turns, by device. Raises NotFound, DeviceFaulty, BackendUnavailable."""
        return {uuid: self.backend.knobs(uuid, tuple(values)) for uuid, values in wanted_of(record).items()}

    def companions(self, record: ClaimRecord) -> tuple[Companion, ...]:
        """Return the companions that a claim has, or will have. Raises ClaimError for what cannot be."""
        if not record.shared:
            return ()
        try:
            found = self.backend.companions(record.uid, record.shared)
            return tuple(replace(each, claim=record.describe()) for each in found)
        except ConfigRefused as error:
            raise ClaimError(
                f"Claim {record.describe()} cannot share its devices: {error.message}", hint=error.hint, code=error.code
            ) from error

    def refuse_sharing(self, record: ClaimRecord) -> None:
        """Refuse what no companion could be started for. Raises ClaimError, AcceleratorError."""
        if self.companions(record):
            self.backend.refuse_without_companions()

    def with_handovers(self, plan: PreparePlan) -> PreparePlan:
        """Return the plan with what is true at this moment of devices that are to be given to virtual machines.

        Raises Unsupported or InUse, naming what uses a device or keeps it from being given away; nothing is changed.
        """
        completed = tuple(self._with_handover(each) if each.passthrough else each for each in plan.record.devices)
        return replace(plan, record=replace(plan.record, devices=completed))

    def _with_handover(self, held: DeviceRecord) -> DeviceRecord:
        handover, device = held.handover, held.facts
        if handover is None or device is None or passthrough.is_given(self.system, handover):
            return held
        passthrough.refuse(self.system, handover.address)
        passthrough.refuse_users(self.system, self.backend.device_nodes(device), device.describe())
        passthrough.refuse_blind(self.system, device.describe())
        if not handover.former:
            interface = passthrough.wanted_interface(self.system, handover.interface == passthrough.IOMMUFD)
            former = pci.driver_of(self.system, handover.address)
            driver = best_driver(self.system, handover.address)
            handover = replace(handover, former=former, interface=interface, driver=driver)
        return replace(held, passthrough={**held.passthrough, "handover": handover.to_dict()})

    def needs_fabric_partition(self, record: ClaimRecord) -> bool:
        """Whether a claim's whole devices have to be a partition of the machine's fabric."""
        fabric = self.backend.fabric_partitions
        return fabric is not None and fabric.is_used and has_whole_devices(record)

    @property
    def fabric(self) -> FabricPartitions:
        """The partitions of the machine's fabric. Raises Unsupported if no fabric of the vendor has partitions."""
        fabric = self.backend.fabric_partitions
        if fabric is None:
            raise Unsupported(f"The devices of {self.driver} are in no fabric with partitions")
        return fabric

    def with_fabric(
        self, plan: PreparePlan, facts: Mapping[str, Device], records: Iterable[ClaimRecord]
    ) -> PreparePlan:
        """Return the plan with the partition of the machine's fabric that its whole devices are.

        ``records`` are the other claims. Raises AcceleratorError if the devices are no partition, BackendUnavailable.
        """
        number, is_active = self.fabric.find(whole_devices(plan.record, facts))
        return with_partition(plan, number, is_active, records)

    def others(self, record: ClaimRecord, devices: Mapping[str, Device]) -> Mapping[str, Device]:
        """Return facts without the processes of the claim's own companions, which are no users of its devices."""
        own = self.keeper.pids(record.uid) if record.shared else frozenset()
        return {uuid: _without(own, device) for uuid, device in devices.items()} if own else devices

    def carry_out(self, plan: PreparePlan) -> tuple[ClaimRecord, dict[str, Partition]]:
        """Do the hardware's part of a plan; return the completed record and the partitions made, by CDI name.

        On failure everything that this call made is destroyed again and the error is raised; what could not be
        destroyed is in the log, and in the record that says the claim is being prepared. Settings are left for the undoing
        of that record, which knows what was there before.
        """
        made: list[tuple[DeviceRecord, Partition]] = []
        changed: list[ModeChange] = []
        if plan.changes_hardware and not _only_for_machines(plan.record):
            # What no container can do without is missed before hardware is changed.
            refuse_unlistable(plan.record, self.driver_edits())
        try:
            self.in_one_visit(plan.repartitioned, partial(self._repartition, plan, made, changed))
            for uuid, values in wanted_of(plan.record).items():
                self.backend.set_knobs(uuid, values)
                self.reached("settings-applied")
            partition = to_activate(plan.record)
            if partition is not None and self.fabric.is_used:
                self.fabric.activate(partition)
                self.reached("fabric-activated")
            for device in plan.record.devices:
                if device.handover is not None:
                    self._give(device, device.handover)
                    self.reached("handed-over")
            partitions = {device.cdi_name: partition for device, partition in made}
            record = replace(plan.record, devices=tuple(_with(device, partitions) for device in plan.record.devices))
            for companion in self.companions(record):
                self.keeper.start(replace(companion, nodes=self._nodes(record, companion)))
                self.reached("companion-started")
        except BaseException:
            self._take_back(plan.record, made, changed)
            raise
        return record, partitions

    def _repartition(
        self, plan: PreparePlan, made: list[tuple[DeviceRecord, Partition]], changed: list[ModeChange]
    ) -> None:
        self.destroy(plan.destructions)
        for change in plan.mode_changes:
            self.backend.set_partitioning(change.device_uuid, change.enabled)
            changed.append(change)
            self.reached("partitioning-changed")
        for device in plan.creates:
            partition = self._create(device)
            made.append((device, partition))
            self.reached("partition-created")

    def write_cdi(
        self,
        record: ClaimRecord,
        facts: Mapping[str, Device],
        made: Mapping[str, Partition],
        pod_claim: str | None = None,
    ) -> None:
        """Write the claim's CDI file from its completed record, and before it what containers may read of its devices.

        A claim without devices has none. ``facts`` are from before partitions were made; ``made`` are those, by CDI name.
        ``pod_claim`` is the name that the pod gives the claim; None takes it from what was written before.
        """
        if not record.devices:
            return
        common = self.backend.machine_edits() if _only_for_machines(record) else self.driver_edits()
        refuse_unlistable(record, common)
        spec = self.cdi_spec(record, facts, made, common, self.files.write(record, facts, made, pod_claim))
        write_spec(self.system, self.cdi_path(record.uid), spec, common)
        self.reached("cdi-written")

    def cdi_spec(
        self,
        record: ClaimRecord,
        facts: Mapping[str, Device],
        made: Mapping[str, Partition],
        common: ContainerEdits,
        besides: Mapping[str, ContainerEdits],
    ) -> dict[str, Any]:
        """Return the claim's CDI file as data; ``common`` is for all devices, ``besides`` are edits that come on top, by CDI name."""
        edits: dict[str, ContainerEdits] = {}
        shared = {name: each for each in self.companions(record) for name in each.devices}
        for held in record.devices:
            if held.handover is not None:
                edits[held.cdi_name] = ContainerEdits.merge(
                    passthrough.edits(self.system, held.handover), besides.get(held.cdi_name, ContainerEdits())
                )
                continue
            each_device = [
                self.backend.device_edits(device, held_partition(held, device, made), monitoring=held.admin)
                for device in (facts[uuid] for uuid in held.device_uuids)
            ]
            edit = each_device[0] if len(each_device) == 1 else ContainerEdits.merge(*each_device)
            if held.share_id:
                shared_edits = self.backend.share_edits(facts[held.device_uuid], held.consumed)
                edit = ContainerEdits.merge(edit, shared_edits)
            if held.cdi_name in shared:
                edit = ContainerEdits.merge(edit, self.backend.companion_edits(shared[held.cdi_name]))
            if held.cdi_name in besides:
                edit = ContainerEdits.merge(edit, besides[held.cdi_name])
            edits[held.cdi_name] = edit
        return build_spec(
            self.backend.cdi_kind,
            with_lists_joined(edits),
            common=common,
            annotations={CLAIM_ANNOTATION: record.to_document()},
        )

    def undo(self, plan: UndoPlan) -> Undone:
        """Destroy what is ours, switch partitioning off where that is due, and set knobs back.

        A partition that its device does not let go of, because of a fault, is owed, and so is a rejected deactivation. Raises InUse with the pids for one
        that is in use, NotPermitted and BackendUnavailable; and whatever keeps a device from coming back from a virtual machine,
        so that its claim stands until it has.
        """
        for uuid, handover in plan.returns:
            self.backend.attach(uuid, partial(passthrough.take_back, self.system, handover))
            self.reached("taken-back")
        rejection = None
        if plan.fabric_partition is not None:
            try:
                self.fabric.deactivate(plan.fabric_partition)
                self.reached("fabric-deactivated")
            except FabricRejected as error:
                rejection = error
        debts = list(plan.debts)
        for destruction in plan.destructions:
            try:
                self.destroy([destruction])
            except (InUse, NotPermitted, BackendUnavailable):
                raise
            except AcceleratorError as error:
                LOG.warning("%s is destroyed later: %s", destruction.description, error)
                debts.append(destruction.debt)
        owing = {debt.device_uuid for debt in debts}
        switched_off = []
        for change in plan.mode_changes:
            if change.device_uuid in owing:
                continue
            try:
                self.backend.set_partitioning(change.device_uuid, change.enabled)
                self.reached("partitioning-restored")
            except AcceleratorError as error:
                LOG.warning("partitioning stays on: %s", error, extra=fields(device=change.device_uuid))
            else:
                switched_off.append(change.device_uuid)
        restored = self._restore(plan.restorations)
        left = tuple(each for each in plan.restorations if each not in restored)
        return Undone(tuple(switched_off), tuple(debts), restored, left, rejection)

    def stop_companions(self, claim_uid: str) -> None:
        """End a claim's companions; there need not be any. Raises AcceleratorError."""
        self.keeper.stop(claim_uid)
        self.reached("companions-stopped")

    def remove_cdi(self, claim_uid: str) -> None:
        """Remove a claim's CDI file and what it mounts; they need not be there."""
        remove_spec(self.system, self.cdi_path(claim_uid))
        with contextlib.suppress(OSError):  # the next start removes what is of no claim
            self.files.remove(claim_uid)
        self.reached("cdi-removed")

    def cdi_uids(self) -> tuple[str, ...]:
        """Return the UIDs of the claims that have a CDI file."""
        return list_specs(self.system, self.cdi_directory, self.backend.cdi_kind)

    def invalid_cdi_uids(self) -> tuple[str, ...]:
        """Return the UIDs of the claims whose CDI file must be written again before a container restarts with it."""
        return list_invalid_specs(self.system, self.cdi_directory, self.backend.cdi_kind)

    def repair_hooks(self) -> tuple[str, ...]:
        """Give an environment to the hooks in CDI files that have none; return the UIDs of their claims. Raises OSError."""
        return repair_hooks(self.system, self.cdi_directory, self.backend.cdi_kind)

    def cdi_path(self, claim_uid: str) -> str:
        """Return where a claim's CDI file is."""
        return spec_path(self.cdi_directory, self.backend.cdi_kind, claim_uid)

    def _give(self, held: DeviceRecord, handover: passthrough.Handover) -> None:
        device = held.facts

        def give() -> None:
            if device is not None and not passthrough.is_given(self.system, handover):
                passthrough.refuse_users(self.system, self.backend.device_nodes(device), device.describe())
                passthrough.refuse_blind(self.system, device.describe())
            passthrough.give(self.system, handover)

        self.backend.detach(held.device_uuid, give)

    def _nodes(self, record: ClaimRecord, companion: Companion) -> tuple[DeviceNode, ...]:
        """The nodes of the partitions that a companion serves. Those of whole devices come with the device's driver."""
        nodes: list[DeviceNode] = []
        for held in record.devices:
            if held.kind == PARTITION and held.cdi_name in companion.devices:
                device = self.backend.device(held.device_uuid)
                nodes += self.backend.device_edits(device, existing_partition(held, device)).device_nodes
        return tuple(nodes)

    def _restore(self, restorations: Iterable[Restoration]) -> tuple[Restoration, ...]:
        """Set knobs back, one by one, so that one that cannot be is no other's hindrance; return those that are."""
        restored = []
        for each in restorations:
            try:
                self.backend.set_knobs(each.device_uuid, {each.name: each.before})
                self.reached("settings-restored")
            except Unsupported:
                restored.append(each)  # what the device does not have was never turned
            except AcceleratorError as error:
                LOG.warning("%s is set back later: %s", each.name, error, extra=fields(device=each.device_uuid))
            else:
                restored.append(each)
        return tuple(restored)

    def _create(self, device: DeviceRecord) -> Partition:
        placement, profile_id = device.placement, device.profile_id
        if placement is None or profile_id is None:
            raise AcceleratorError(f"{device.name} has no placement, so no partition can be made for it")
        with self._counted("create", device.profile or ""):
            try:
                return self.backend.create_partition(device.device_uuid, profile_id, placement, device.instance_id)
            except DoesNotFit as error:
                raise PartitionRefused(error, device) from error

    def destroy(self, destructions: Iterable[Destruction]) -> None:
        """Destroy partitions of ours; one that is gone is. Raises InUse, NotPermitted, DeviceFaulty, BackendUnavailable."""
        for destruction in destructions:
            try:
                with self._counted("destroy", destruction.profile):
                    self.backend.destroy_partition(destruction.device_uuid, destruction.instance_id)
            except NotFound:
                LOG.info("already gone: %s", destruction.description)
            self.reached("partition-destroyed")

    @contextlib.contextmanager
    def _counted(self, change: str, profile: str) -> Iterator[None]:
        outcome = "failure"
        try:
            yield
            outcome = "success"
        finally:
            self.metrics.partition_change(change, profile, outcome)

    def _take_back(
        self, record: ClaimRecord, made: list[tuple[DeviceRecord, Partition]], changed: list[ModeChange]
    ) -> None:
        if record.shared and made:  # a companion would keep its partition in use
            try:
                self.stop_companions(record.uid)
            except AcceleratorError as error:
                LOG.warning("companions could not be ended: %s", error, extra=fields(claim=record.describe()))
        for device, partition in reversed(made):
            try:
                with self._counted("destroy", partition.profile):
                    self.backend.destroy_partition(device.device_uuid, partition.instance_id)
            except AcceleratorError:
                LOG.exception("a partition made for a claim that failed is left: %s", partition.describe())
        for change in reversed(changed):
            try:
                self.backend.set_partitioning(change.device_uuid, not change.enabled)
            except AcceleratorError as error:
                LOG.warning("partitioning could not be set back: %s", error, extra=fields(device=change.device_uuid))


def _only_for_machines(record: ClaimRecord) -> bool:
    """Whether all devices of a claim are for virtual machines, whose programs have the drivers."""
    return all(device.kind == PASSTHROUGH for device in record.devices)


def _with(device: DeviceRecord, made: Mapping[str, Partition]) -> DeviceRecord:
    partition = made.get(device.cdi_name)
    if partition is None:
        return device
    return device.but(partition_uuid=partition.uuid, instance_id=partition.instance_id)


def _without(pids: Collection[int], device: Device) -> Device:
    def others(processes: tuple[Process, ...]) -> tuple[Process, ...]:
        return tuple(process for process in processes if process.pid not in pids)

    return replace(
        device,
        processes=others(device.processes),
        partitions=tuple(replace(each, processes=others(each.processes)) for each in device.partitions),
    )
