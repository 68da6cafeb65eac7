# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Execute plans on the hardware and on CDI files. Every function blocks, so it is called on a thread."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable, TypeVar

from ..core.discovery.device_workers import Call
from ..core.dra.opaque_config import ConfigRefused
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
from ..core.host import passthrough, pci
from ..core.host.cdi import (
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
from ..core.host.companions import Companion, device_of, device_owners
from ..core.host.system import System
from ..core.host.vfio_drivers import best_driver
from ..core.model import PARTITION, PASSTHROUGH, Device, Partition, Process
from ..core.settings.knobs import PERSISTENCE, Knob
from ..core.store.prepared_claims import CLAIM_ANNOTATION
from ..core.ttl_cache import TtlCache
from ..core.vendors.fabric_partitions import FabricPartitions
from ..core.vendors.protocol import Backend
from ..logs import fields
from ..metrics import Metrics, NoMetrics
from .allocation import ClaimError
from .claim_fabric import has_whole_devices, to_activate, whole_devices, with_partition
from .companion_services import CompanionServices
from .configs import Restoration, wanted_of
from .container_files import ContainerFiles, existing_partition, held_partition, refuse_unlistable, with_lists_joined
from .pending_cleanups import PendingDestruction
from .plan import Destruction, ModeChange, PreparePlan, UndoPlan
from .refusals import PartitionRefused
from .store.records import ClaimRecord, DeviceRecord

LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """Fresh facts of devices by UUID, and the faults of devices that do not answer.

    A device that does not exist is in neither.
    """

    devices: Mapping[str, Device]
    faults: Mapping[str, str]


@dataclass(frozen=True)
class UndoResult:
    """The result of an undo plan.

    It contains the devices on which partitioning was disabled, the new pending cleanups, and the settings that were
    restored or not. ``rejection`` is the error with which the fabric manager rejected the deactivation of the claim's
    partition of the fabric.
    """

    switched_off: tuple[str, ...] = ()
    cleanups: tuple[PendingDestruction, ...] = ()
    restored: tuple[Restoration, ...] = ()
    unrestored: tuple[Restoration, ...] = ()
    rejection: FabricRejected | None = None


@dataclass(frozen=True)
class HardwareExecutor:
    """Access to one vendor's hardware, to the directories of claims' files, and to the manager of companions.

    ``report_stage`` is called with each completed stage. ``files`` are the files that containers can read. The container
    edits that all devices of the vendor share are cached for ``edits_seconds``.
    """

    backend: Backend
    driver: str
    system: System
    cdi_directory: str
    files: ContainerFiles
    report_stage: Callable[[str], None]
    companion_services: CompanionServices
    metrics: Metrics = field(default_factory=NoMetrics)
    edits_seconds: float = 0.0

    @functools.cached_property
    def driver_edits(self) -> TtlCache[ContainerEdits]:
        """Return the container edits common to all devices of the vendor, cached for ``edits_seconds``.

        The call raises BackendUnavailable.
        """
        return TtlCache(self._driver_edits_now, self.edits_seconds)

    def _driver_edits_now(self) -> ContainerEdits:
        return self.backend.driver_edits()

    def fill_edits_cache(self) -> None:
        """Read the edits that every claim needs, to fill the cache.

        An error is reported to the claim that needs them.
        """
        with contextlib.suppress(AcceleratorError):
            self.driver_edits()

    def facts(self, uuids: Iterable[str]) -> Facts:
        """Return fresh facts of these devices. Raises BackendUnavailable."""
        return self.answers(self.ask(uuids))

    def ask(self, uuids: Iterable[str]) -> dict[str, Call[Device]]:
        """Start to read the facts of these devices in parallel, and return at once."""
        return {uuid: self.backend.ask(uuid) for uuid in uuids}

    def answers(self, calls: Mapping[str, Call[Device]]) -> Facts:
        """Return the facts from started reads. Raises BackendUnavailable."""
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

    def on_device_thread(self, uuids: Collection[str], steps: Callable[[], T]) -> T:
        """Run steps that only change devices. For a single device, they run together on that device's thread.

        A change to a device's thread and back costs as much as most of the steps. Raises the errors of the steps, and
        DeviceFaulty with the cause no-answer if the single device stops answering during the steps.
        """
        if len(uuids) != 1:
            return steps()
        return self.backend.together(next(iter(uuids)), partial(contextvars.copy_context().run, steps))

    def knobs(self, record: ClaimRecord) -> Mapping[str, Mapping[str, Knob]]:
        """Return the settings that a claim changes, by device. Raises NotFound, DeviceFaulty, BackendUnavailable."""
        return {uuid: self.backend.knobs(uuid, tuple(values)) for uuid, values in wanted_of(record).items()}

    def companions(self, record: ClaimRecord) -> tuple[Companion, ...]:
        """Return the companions of a claim, running or not. Raises ClaimError for an invalid configuration."""
        if not record.shared:
            return ()
        try:
            found = self.backend.companions(record.uid, record.shared)
            return tuple(each if device_of(each.owner) else replace(each, claim=record.describe()) for each in found)
        except ConfigRefused as error:
            raise ClaimError(
                f"Claim {record.describe()} cannot share its devices: {error.message}", hint=error.hint, code=error.code
            ) from error

    def refuse_sharing(self, record: ClaimRecord) -> None:
        """Refuse a claim whose companions could not start. Raises ClaimError, AcceleratorError."""
        if self.companions(record):
            self.backend.refuse_without_companions()

    def with_handovers(self, plan: PreparePlan) -> PreparePlan:
        """Return the plan with the current state of the devices that are passed through to virtual machines.

        Raises Unsupported or InUse, with the user of a device or the reason why it cannot be passed through. Changes
        nothing.
        """
        completed = tuple(self._with_handover(each) if each.passthrough else each for each in plan.record.devices)
        return replace(plan, record=replace(plan.record, devices=completed))

    def _with_handover(self, held: DeviceRecord) -> DeviceRecord:
        handover, device = held.handover, held.facts
        if handover is None or device is None or passthrough.is_given(self.system, handover):
            return held
        passthrough.refuse(self.system, handover.address)
        # The daemon closes the device when the claim's settings are applied.
        closing = self.backend.facts.persistence_daemon if held.settings.get(PERSISTENCE) is False else ""
        passthrough.refuse_users(self.system, self.backend.device_nodes(device), device.describe(), but=closing)
        passthrough.refuse_blind(self.system, device.describe())
        if not handover.former:
            interface = passthrough.wanted_interface(self.system, handover.interface == passthrough.IOMMUFD)
            former = pci.driver_of(self.system, handover.address)
            driver = best_driver(self.system, handover.address)
            handover = replace(handover, former=former, interface=interface, driver=driver)
        return replace(held, passthrough={**held.passthrough, "handover": handover.to_dict()})

    def needs_fabric_partition(self, record: ClaimRecord) -> bool:
        """Return whether a claim's whole devices must be a partition of the fabric."""
        fabric = self.backend.fabric_partitions
        return fabric is not None and fabric.is_used and has_whole_devices(record)

    @property
    def fabric(self) -> FabricPartitions:
        """Return the partitions of the fabric. Raises Unsupported if no fabric of the vendor has partitions."""
        fabric = self.backend.fabric_partitions
        if fabric is None:
            raise Unsupported(f"The devices of {self.driver} are in no fabric with partitions")
        return fabric

    def with_fabric(
        self, plan: PreparePlan, facts: Mapping[str, Device], records: Iterable[ClaimRecord]
    ) -> PreparePlan:
        """Return the plan with the fabric partition that consists of its whole devices.

        ``records`` are the other claims. Raises AcceleratorError if the devices are no partition, BackendUnavailable.
        """
        number, is_active = self.fabric.find(whole_devices(plan.record, facts))
        return with_partition(plan, number, is_active, records)

    def others(self, record: ClaimRecord, devices: Mapping[str, Device]) -> Mapping[str, Device]:
        """Return facts without the processes of the claim's own companions, because these are not users of its devices."""
        owners = (record.uid, *device_owners(record.shared)) if record.shared else ()
        own = frozenset(pid for owner in owners for pid in self.companion_services.pids(owner))
        return {uuid: _without(own, device) for uuid, device in devices.items()} if own else devices

    def carry_out(self, plan: PreparePlan) -> tuple[ClaimRecord, dict[str, Partition]]:
        """Execute the hardware part of a plan. Return the completed record and the created partitions, by CDI name.

        After an error, everything that this call created is destroyed again, and the error is raised. The log names
        partitions that could not be destroyed, and the claim's record still has them. Settings are restored when that
        record is undone, because it has the previous values.
        """
        made: list[tuple[DeviceRecord, Partition]] = []
        changed: list[ModeChange] = []
        if plan.changes_hardware and not _only_for_machines(plan.record):
            # Report missing files of the driver before the hardware is changed.
            refuse_unlistable(plan.record, self.driver_edits())
        try:
            self.on_device_thread(plan.repartitioned, partial(self._repartition, plan, made, changed))
            for uuid, values in wanted_of(plan.record).items():
                self.backend.set_knobs(uuid, values)
                self.report_stage("settings-applied")
            partition = to_activate(plan.record)
            if partition is not None and self.fabric.is_used:
                self.fabric.activate(partition)
                self.report_stage("fabric-activated")
            for device in plan.record.devices:
                if device.handover is not None:
                    self._give(device, device.handover)
                    self.report_stage("handed-over")
            partitions = {device.cdi_name: partition for device, partition in made}
            record = replace(plan.record, devices=tuple(_with(device, partitions) for device in plan.record.devices))
            for companion in self.companions(record):
                self.companion_services.start(replace(companion, nodes=self._nodes(record, companion)))
                self.report_stage("companion-started")
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
            self.report_stage("partitioning-changed")
        for device in plan.creates:
            partition = self._create(device)
            made.append((device, partition))
            self.report_stage("partition-created")

    def write_cdi(
        self,
        record: ClaimRecord,
        facts: Mapping[str, Device],
        made: Mapping[str, Partition],
        pod_claim: str | None = None,
    ) -> None:
        """Write the claim's CDI file from its completed record. Before that, write the files that containers can read.

        A claim without devices has no file. ``facts`` are from before partitions were created; ``made`` are the created
        ones, by CDI name. ``pod_claim`` is the pod's name for the claim. With None, it is taken from the existing file.
        """
        if not record.devices:
            return
        common = self.backend.machine_edits() if _only_for_machines(record) else self.driver_edits()
        refuse_unlistable(record, common)
        spec = self.cdi_spec(record, facts, made, common, self.files.write(record, facts, made, pod_claim))
        write_spec(self.system, self.cdi_path(record.uid), spec, common)
        self.report_stage("cdi-written")

    def cdi_spec(
        self,
        record: ClaimRecord,
        facts: Mapping[str, Device],
        made: Mapping[str, Partition],
        common: ContainerEdits,
        besides: Mapping[str, ContainerEdits],
    ) -> dict[str, Any]:
        """Return the content of the claim's CDI file.

        ``common`` are the edits for all devices. ``besides`` are additional edits, by CDI name.
        """
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

    def undo(self, plan: UndoPlan) -> UndoResult:
        """Destroy the driver's partitions, disable partitioning where planned, and restore settings.

        If a fault prevents the destruction of a partition, it becomes a pending cleanup, and so does a rejected
        deactivation. Raises InUse with the PIDs for a partition in use, NotPermitted, and BackendUnavailable. Errors
        that prevent the return of a device from a virtual machine are raised too, so that its claim stays until the
        device is back.
        """
        for uuid, handover in plan.returns:
            self.backend.attach(uuid, partial(passthrough.take_back, self.system, handover))
            self.report_stage("taken-back")
        rejection = None
        if plan.fabric_partition is not None:
            try:
                self.fabric.deactivate(plan.fabric_partition)
                self.report_stage("fabric-deactivated")
            except FabricRejected as error:
                rejection = error
        cleanups = list(plan.cleanups)
        for destruction in plan.destructions:
            try:
                self.destroy([destruction])
            except (InUse, NotPermitted, BackendUnavailable):
                raise
            except AcceleratorError as error:
                LOG.warning("%s is destroyed later: %s", destruction.description, error)
                cleanups.append(destruction.cleanup)
        waiting = {cleanup.device_uuid for cleanup in cleanups}
        switched_off = []
        for change in plan.mode_changes:
            if change.device_uuid in waiting:
                continue
            try:
                self.backend.set_partitioning(change.device_uuid, change.enabled)
                self.report_stage("partitioning-restored")
            except AcceleratorError as error:
                LOG.warning("partitioning stays on: %s", error, extra=fields(device=change.device_uuid))
            else:
                switched_off.append(change.device_uuid)
        restored = self._restore(plan.restorations)
        left = tuple(each for each in plan.restorations if each not in restored)
        return UndoResult(tuple(switched_off), tuple(cleanups), restored, left, rejection)

    def stop_companions(self, claim_uid: str) -> None:
        """Stop a claim's companions, if it has any. Raises AcceleratorError."""
        self.companion_services.stop(claim_uid)
        self.report_stage("companions-stopped")

    def stop_unused(self, record: ClaimRecord, records: Iterable[ClaimRecord]) -> None:
        """Stop the companions that a claim shares with other claims, unless one of ``records`` uses them.

        Raises AcceleratorError.
        """
        mine = device_owners(record.shared)
        used = {owner for each in records if mine and each.uid != record.uid for owner in device_owners(each.shared)}
        for owner in sorted(mine - used):
            self.stop_companions(owner)

    def remove_cdi(self, claim_uid: str) -> None:
        """Remove a claim's CDI file and the files that it mounts, if they exist."""
        remove_spec(self.system, self.cdi_path(claim_uid))
        with contextlib.suppress(OSError):  # the next start removes files without a claim
            self.files.remove(claim_uid)
        self.report_stage("cdi-removed")

    def cdi_uids(self) -> tuple[str, ...]:
        """Return the UIDs of the claims that have a CDI file."""
        return list_specs(self.system, self.cdi_directory, self.backend.cdi_kind)

    def invalid_cdi_uids(self) -> tuple[str, ...]:
        """Return the UIDs of the claims whose CDI file must be written again before a container restarts with it."""
        return list_invalid_specs(self.system, self.cdi_directory, self.backend.cdi_kind)

    def repair_hooks(self) -> tuple[str, ...]:
        """Add an environment to the hooks without one in CDI files. Return the UIDs of their claims. Raises OSError."""
        return repair_hooks(self.system, self.cdi_directory, self.backend.cdi_kind)

    def cdi_path(self, claim_uid: str) -> str:
        """Return the path of a claim's CDI file."""
        return spec_path(self.cdi_directory, self.backend.cdi_kind, claim_uid)

    def _give(self, held: DeviceRecord, handover: passthrough.Handover) -> None:
        device = held.facts
        if (
            device is not None
            and held.settings.get(PERSISTENCE) is False
            and not passthrough.is_given(self.system, handover)
        ):
            # This wait is here, because the vendor's library is closed for all devices during the handover of one.
            paths = self.backend.device_nodes(device)
            passthrough.refuse_users(self.system, paths, device.describe(), seconds=passthrough.FREE_SECONDS)

        def give() -> None:
            if device is not None and not passthrough.is_given(self.system, handover):
                passthrough.refuse_users(self.system, self.backend.device_nodes(device), device.describe())
                passthrough.refuse_blind(self.system, device.describe())
            passthrough.give(self.system, handover)

        self.backend.detach(held.device_uuid, give)

    def _nodes(self, record: ClaimRecord, companion: Companion) -> tuple[DeviceNode, ...]:
        """Return the device nodes of the partitions that a companion serves.

        Nodes of whole devices come with the device's driver.
        """
        nodes: list[DeviceNode] = []
        for held in record.devices:
            if held.kind == PARTITION and held.cdi_name in companion.devices:
                device = self.backend.device(held.device_uuid)
                nodes += self.backend.device_edits(device, existing_partition(held, device)).device_nodes
        return tuple(nodes)

    def _restore(self, restorations: Iterable[Restoration]) -> tuple[Restoration, ...]:
        """Restore settings one by one, so that one failure does not affect the others. Return the restored ones."""
        restored = []
        for each in restorations:
            try:
                self.backend.set_knobs(each.device_uuid, {each.name: each.before})
                self.report_stage("settings-restored")
            except Unsupported:
                restored.append(each)  # a setting that the device does not have was never changed
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
        """Destroy partitions of the driver. A missing one counts as destroyed.

        Raises InUse, NotPermitted, DeviceFaulty, BackendUnavailable.
        """
        for destruction in destructions:
            try:
                with self._counted("destroy", destruction.profile):
                    self.backend.destroy_partition(destruction.device_uuid, destruction.instance_id)
            except NotFound:
                LOG.info("already gone: %s", destruction.description)
            self.report_stage("partition-destroyed")

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
        if record.shared and made:  # else a companion keeps its partition in use
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
    """Return whether all devices of a claim are for virtual machines, which have their own drivers."""
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
