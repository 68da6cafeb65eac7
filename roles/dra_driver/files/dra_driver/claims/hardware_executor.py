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
from ..core.host import device_users, passthrough, pci
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
from ..metrics import Metrics
from .allocation import ClaimError
from .claim_fabric import has_whole_devices, to_activate, whole_devices, with_partition
from .companion_services import CompanionServices
from .configs import Restoration, settings_by_uuid
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

    ``partitioning_disabled`` are the UUIDs of the devices on which partitioning was disabled. ``cleanups`` are new pending
    cleanups. ``restored`` and ``unrestored`` are the planned restorations that succeeded and failed. ``rejection`` is the
    error with which the fabric manager rejected the deactivation of the claim's fabric partition.
    """

    partitioning_disabled: tuple[str, ...] = ()
    cleanups: tuple[PendingDestruction, ...] = ()
    restored: tuple[Restoration, ...] = ()
    unrestored: tuple[Restoration, ...] = ()
    rejection: FabricRejected | None = None


@dataclass(frozen=True)
class HardwareExecutor:
    """Executes plans with one vendor's hardware, the claims' files, and the manager of companions.

    A companion is a program of the vendor that lets the containers of a claim share a device. ``report_stage`` is called
    with each completed stage. ``files`` are the files that containers can read. The container edits that all devices of the
    vendor share are cached for ``edits_seconds``.
    """

    backend: Backend
    driver: str
    system: System
    cdi_directory: str
    files: ContainerFiles
    report_stage: Callable[[str], None]
    companion_services: CompanionServices
    metrics: Metrics = field(default_factory=Metrics)
    edits_seconds: float = 0.0

    @functools.cached_property
    def driver_edits(self) -> TtlCache[ContainerEdits]:
        """Return the cache of the container edits that all devices of the vendor share. A call of it raises BackendUnavailable."""
        return TtlCache(lambda: self.backend.driver_edits(), self.edits_seconds)

    def fill_edits_cache(self) -> None:
        """Read the edits that every claim needs, to fill the cache.

        An error is reported to the claim that needs them.
        """
        with contextlib.suppress(AcceleratorError):
            self.driver_edits()

    def facts(self, uuids: Iterable[str]) -> Facts:
        """Return fresh facts of these devices. Raises BackendUnavailable."""
        return self.collect_facts(self.start_reads(uuids))

    def start_reads(self, uuids: Iterable[str]) -> dict[str, Call[Device]]:
        """Start to read the facts of these devices in parallel, and return at once."""
        return {uuid: self.backend.ask(uuid) for uuid in uuids}

    def collect_facts(self, calls: Mapping[str, Call[Device]]) -> Facts:
        """Wait for started reads, and return their facts. Raises BackendUnavailable."""
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

        This saves switches between threads, which cost as much as most steps. Raises the errors of the steps, and
        DeviceFaulty with the cause no-answer if the single device stops answering during the steps.
        """
        if len(uuids) != 1:
            return steps()
        return self.backend.run_on_device(next(iter(uuids)), partial(contextvars.copy_context().run, steps))

    def knobs(self, record: ClaimRecord) -> Mapping[str, Mapping[str, Knob]]:
        """Return the settings that a claim changes, by device. Raises NotFound, DeviceFaulty, BackendUnavailable."""
        return {uuid: self.backend.knobs(uuid, tuple(values)) for uuid, values in settings_by_uuid(record).items()}

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

    def refuse_unstartable_companions(self, record: ClaimRecord) -> None:
        """Refuse a claim whose companions could not start. Raises ClaimError, AcceleratorError."""
        if self.companions(record):
            self.backend.refuse_without_companions()

    def with_handovers(self, plan: PreparePlan) -> PreparePlan:
        """Return the plan with the current state of the devices that are passed through to virtual machines.

        This changes nothing on the devices. Raises Unsupported or InUse, with the reason or with the user of a device.
        """
        completed = tuple(self._with_handover(each) if each.passthrough else each for each in plan.record.devices)
        return replace(plan, record=replace(plan.record, devices=completed))

    def _with_handover(self, device_record: DeviceRecord) -> DeviceRecord:
        handover, device = device_record.handover, device_record.facts
        if handover is None or device is None or passthrough.is_bound_to_vfio(self.system, handover):
            return device_record
        passthrough.require_passthrough(self.system, handover.address)
        # The daemon closes the device when the claim's settings are applied.
        closing = self.backend.facts.persistence_daemon if device_record.settings.get(PERSISTENCE) is False else ""
        device_users.require_unused(
            self.system, self.backend.device_nodes(device), device.describe(), ignored_name=closing
        )
        device_users.require_visible_users(self.system, device.describe())
        if not handover.former:
            interface = passthrough.choose_interface(self.system, handover.interface == passthrough.IOMMUFD)
            former = pci.driver_of(self.system, handover.address)
            driver = best_driver(self.system, handover.address)
            handover = replace(handover, former=former, interface=interface, driver=driver)
        return replace(device_record, passthrough={**device_record.passthrough, "handover": handover.to_dict()})

    def needs_fabric_partition(self, record: ClaimRecord) -> bool:
        """Return whether a claim's whole devices must be a partition of the fabric."""
        fabric = self.backend.fabric_partitions
        return fabric is not None and fabric.is_used and has_whole_devices(record)

    @property
    def fabric(self) -> FabricPartitions:
        """Return the access to the fabric's partitions. Raises Unsupported if no fabric of the vendor has partitions."""
        fabric = self.backend.fabric_partitions
        if fabric is None:
            raise Unsupported(f"The devices of {self.driver} are in no fabric with partitions")
        return fabric

    def with_fabric(
        self, plan: PreparePlan, facts: Mapping[str, Device], records: Iterable[ClaimRecord]
    ) -> PreparePlan:
        """Return the plan with the fabric partition that consists of its whole devices.

        ``records`` are the other claims. Raises AcceleratorError if the devices are not exactly one partition, and
        BackendUnavailable.
        """
        number, is_active = self.fabric.find(whole_devices(plan.record, facts))
        return with_partition(plan, number, is_active, records)

    def without_own_companions(self, record: ClaimRecord, devices: Mapping[str, Device]) -> Mapping[str, Device]:
        """Return facts without the processes of the claim's own companions, because these are not users of its devices."""
        owners = (record.uid, *device_owners(record.shared)) if record.shared else ()
        own = frozenset(pid for owner in owners for pid in self.companion_services.pids(owner))
        return {uuid: _without_processes(own, device) for uuid, device in devices.items()} if own else devices

    def execute(self, plan: PreparePlan) -> tuple[ClaimRecord, dict[str, Partition]]:
        """Execute the hardware part of a plan. Return the completed record, and the created partitions by CDI name.

        After an error, the created partitions are destroyed, and the error is raised. Partitions that cannot be destroyed
        are logged, and stay in the claim's record. Settings are restored when the claim is undone.
        """
        created: list[tuple[DeviceRecord, Partition]] = []
        changed_modes: list[ModeChange] = []
        if plan.changes_hardware and not _is_only_passthrough(plan.record):
            # Report missing files of the driver before the hardware is changed.
            refuse_unlistable(plan.record, self.driver_edits())
        try:
            self.on_device_thread(plan.repartitioned_uuids, partial(self._repartition, plan, created, changed_modes))
            for uuid, values in settings_by_uuid(plan.record).items():
                self.backend.set_knobs(uuid, values)
                self.report_stage("settings-applied")
            partition = to_activate(plan.record)
            if partition is not None and self.fabric.is_used:
                self.fabric.activate(partition)
                self.report_stage("fabric-activated")
            for device in plan.record.devices:
                if device.handover is not None:
                    self._hand_to_machine(device, device.handover)
                    self.report_stage("handed-over")
            partitions = {device.cdi_name: partition for device, partition in created}
            record = replace(
                plan.record,
                devices=tuple(_with_created_partition(device, partitions) for device in plan.record.devices),
            )
            for companion in self.companions(record):
                self.companion_services.start(replace(companion, nodes=self._nodes(record, companion)))
                self.report_stage("companion-started")
        except BaseException:
            self._revert(plan.record, created, changed_modes)
            raise
        return record, partitions

    def _repartition(
        self, plan: PreparePlan, created: list[tuple[DeviceRecord, Partition]], changed_modes: list[ModeChange]
    ) -> None:
        """Change the partitions of a plan's devices. Add each success to ``created`` or ``changed_modes``."""
        self.destroy(plan.destructions)
        for change in plan.mode_changes:
            self.backend.set_partitioning(change.device_uuid, change.enabled)
            changed_modes.append(change)
            self.report_stage("partitioning-changed")
        for device in plan.partitions_to_create:
            partition = self._create(device)
            created.append((device, partition))
            self.report_stage("partition-created")

    def write_cdi(
        self,
        record: ClaimRecord,
        facts: Mapping[str, Device],
        created: Mapping[str, Partition],
        pod_claim: str | None = None,
    ) -> None:
        """Write the claim's CDI file from its completed record. Before that, write the files that containers can read.

        A claim without devices has no file. ``facts`` are the facts of the devices before ``created`` partitions (by CDI name)
        were created. ``pod_claim`` is the pod's name for the claim. With None, the name in the existing file is kept.
        """
        if not record.devices:
            return
        common = self.backend.machine_edits() if _is_only_passthrough(record) else self.driver_edits()
        refuse_unlistable(record, common)
        spec = self.cdi_spec(record, facts, created, common, self.files.write(record, facts, created, pod_claim))
        write_spec(self.system, self.cdi_path(record.uid), spec, common)
        self.report_stage("cdi-written")

    def cdi_spec(
        self,
        record: ClaimRecord,
        facts: Mapping[str, Device],
        created: Mapping[str, Partition],
        common: ContainerEdits,
        additional: Mapping[str, ContainerEdits],
    ) -> dict[str, Any]:
        """Return the content of the claim's CDI file.

        ``common`` are the edits for all devices. ``additional`` are edits of single devices, by CDI name.
        """
        edits: dict[str, ContainerEdits] = {}
        companions = {name: each for each in self.companions(record) for name in each.devices}
        for device_record in record.devices:
            if device_record.handover is not None:
                edits[device_record.cdi_name] = ContainerEdits.merge(
                    passthrough.container_edits(self.system, device_record.handover),
                    additional.get(device_record.cdi_name, ContainerEdits()),
                )
                continue
            each_device = [
                self.backend.device_edits(
                    device, held_partition(device_record, device, created), monitoring=device_record.admin
                )
                for device in (facts[uuid] for uuid in device_record.device_uuids)
            ]
            edit = each_device[0] if len(each_device) == 1 else ContainerEdits.merge(*each_device)
            if device_record.share_id:
                shared_edits = self.backend.share_edits(facts[device_record.device_uuid], device_record.consumed)
                edit = ContainerEdits.merge(edit, shared_edits)
            if device_record.cdi_name in companions:
                edit = ContainerEdits.merge(edit, self.backend.companion_edits(companions[device_record.cdi_name]))
            if device_record.cdi_name in additional:
                edit = ContainerEdits.merge(edit, additional[device_record.cdi_name])
            edits[device_record.cdi_name] = edit
        return build_spec(
            self.backend.cdi_kind,
            with_lists_joined(edits),
            common=common,
            annotations={CLAIM_ANNOTATION: record.document},
        )

    def undo(self, plan: UndoPlan) -> UndoResult:
        """Destroy the driver's partitions, disable partitioning where planned, and restore settings.

        A partition that cannot be destroyed because of a fault becomes a pending cleanup. Raises InUse with the PIDs for a
        partition in use, NotPermitted, and BackendUnavailable. An error during the return of a device from a virtual
        machine is raised too, so that its claim stays until the device is back.
        """
        for uuid, handover in plan.returns:
            self.backend.attach(uuid, partial(passthrough.restore_driver, self.system, handover))
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
        uuids_with_cleanup = {cleanup.device_uuid for cleanup in cleanups}
        partitioning_disabled = []
        for change in plan.mode_changes:
            if change.device_uuid in uuids_with_cleanup:
                continue
            try:
                self.backend.set_partitioning(change.device_uuid, change.enabled)
                self.report_stage("partitioning-restored")
            except AcceleratorError as error:
                LOG.warning("partitioning stays on: %s", error, extra=fields(device=change.device_uuid))
            else:
                partitioning_disabled.append(change.device_uuid)
        restored = self._restore(plan.restorations)
        unrestored = tuple(each for each in plan.restorations if each not in restored)
        return UndoResult(tuple(partitioning_disabled), tuple(cleanups), restored, unrestored, rejection)

    def stop_companions(self, claim_uid: str) -> None:
        """Stop a claim's companions, if it has any. Raises AcceleratorError."""
        self.companion_services.stop(claim_uid)
        self.report_stage("companions-stopped")

    def stop_unused_shared_companions(self, record: ClaimRecord, records: Iterable[ClaimRecord]) -> None:
        """Stop the companions that a claim shares with other claims, unless one of ``records`` uses them.

        Raises AcceleratorError.
        """
        own = device_owners(record.shared)
        used = {owner for each in records if own and each.uid != record.uid for owner in device_owners(each.shared)}
        for owner in sorted(own - used):
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

    def _hand_to_machine(self, device_record: DeviceRecord, handover: passthrough.Handover) -> None:
        """Pass a device through to a virtual machine, unless this was done before. Raises AcceleratorError."""
        device = device_record.facts
        if (
            device is not None
            and device_record.settings.get(PERSISTENCE) is False
            and not passthrough.is_bound_to_vfio(self.system, handover)
        ):
            # Wait before the handover, during which the vendor's library is closed for all devices.
            paths = self.backend.device_nodes(device)
            device_users.require_unused(self.system, paths, device.describe(), seconds=device_users.FREE_SECONDS)

        def give() -> None:
            if device is not None and not passthrough.is_bound_to_vfio(self.system, handover):
                device_users.require_unused(self.system, self.backend.device_nodes(device), device.describe())
                device_users.require_visible_users(self.system, device.describe())
            passthrough.bind_to_vfio(self.system, handover)

        self.backend.detach(device_record.device_uuid, give)

    def _nodes(self, record: ClaimRecord, companion: Companion) -> tuple[DeviceNode, ...]:
        """Return the device nodes of the partitions that a companion serves.

        Nodes of whole devices come with the device's driver.
        """
        nodes: list[DeviceNode] = []
        for device_record in record.devices:
            if device_record.kind == PARTITION and device_record.cdi_name in companion.devices:
                device = self.backend.device(device_record.device_uuid)
                nodes += self.backend.device_edits(device, existing_partition(device_record, device)).device_nodes
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
        with self._count_partition_change("create", device.profile or ""):
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
                with self._count_partition_change("destroy", destruction.profile):
                    self.backend.destroy_partition(destruction.device_uuid, destruction.instance_id)
            except NotFound:
                LOG.info("already gone: %s", destruction.description)
            self.report_stage("partition-destroyed")

    @contextlib.contextmanager
    def _count_partition_change(self, change: str, profile: str) -> Iterator[None]:
        """Report the outcome of the change inside this context as a metric."""
        outcome = "failure"
        try:
            yield
            outcome = "success"
        finally:
            self.metrics.partition_change(change, profile, outcome)

    def _revert(
        self, record: ClaimRecord, created: list[tuple[DeviceRecord, Partition]], changed_modes: list[ModeChange]
    ) -> None:
        """Destroy the created partitions and revert the changed modes, after a failed execution. Errors are logged."""
        if record.shared and created:  # a running companion would keep its partition in use
            try:
                self.stop_companions(record.uid)
            except AcceleratorError as error:
                LOG.warning("companions could not be ended: %s", error, extra=fields(claim=record.describe()))
        for device, partition in reversed(created):
            try:
                with self._count_partition_change("destroy", partition.profile):
                    self.backend.destroy_partition(device.device_uuid, partition.instance_id)
            except AcceleratorError:
                LOG.exception("a partition made for a claim that failed is left: %s", partition.describe())
        for change in reversed(changed_modes):
            try:
                self.backend.set_partitioning(change.device_uuid, not change.enabled)
            except AcceleratorError as error:
                LOG.warning("partitioning could not be set back: %s", error, extra=fields(device=change.device_uuid))


def _is_only_passthrough(record: ClaimRecord) -> bool:
    """Return whether all devices of a claim are for virtual machines, which have their own drivers."""
    return all(device.kind == PASSTHROUGH for device in record.devices)


def _with_created_partition(device: DeviceRecord, created: Mapping[str, Partition]) -> DeviceRecord:
    partition = created.get(device.cdi_name)
    if partition is None:
        return device
    return device.with_changes(partition_uuid=partition.uuid, instance_id=partition.instance_id)


def _without_processes(pids: Collection[int], device: Device) -> Device:
    """Return the facts of a device without these processes."""

    def others(processes: tuple[Process, ...]) -> tuple[Process, ...]:
        return tuple(process for process in processes if process.pid not in pids)

    return replace(
        device,
        processes=others(device.processes),
        partitions=tuple(replace(each, processes=others(each.processes)) for each in device.partitions),
    )
