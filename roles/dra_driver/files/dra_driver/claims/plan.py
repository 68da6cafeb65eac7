# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Plan how to prepare or unprepare a claim, from facts alone. No access to hardware, files, or clocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.dra.opaque_config import ConfigKind, Configuration
from ..core.errors import InUse
from ..core.host.passthrough import IOMMUFD, LEGACY, Handover
from ..core.model import GROUP, PARTITION, PASSTHROUGH, Device, Offer, OwnedPartition, Partition, Placement
from ..core.partitioning.capacity import overlapping
from ..core.settings.knobs import COMPUTE_MODE, PERSISTENCE
from ..core.store.device_facts import document_of
from ..core.store.prepared_claims import PREPARING
from .allocation import AllocatedDevice, Allocation, ClaimError
from .configs import (
    Restoration,
    configurations_of,
    passthrough_interface,
    refuse_other_profile,
    refuse_unsuitable_configs,
    settings_for,
    sharing_for,
    uuids_by_sharing_config,
)
from .partitions.partition_ids import (
    ChooseId,
    raise_partition_missing,
    with_chosen_id,
    with_existing_partition,
    with_partition_number,
)
from .pending_cleanups import PendingDestruction
from .store.records import ClaimRecord, ClaimReference, DeviceRecord

# A key of the store's meta table, with the device's UUID: the driver enabled partitioning on the device, and
# disables it after the last partition. The value is the boot ID.
PARTITIONING_KEY = "partitioning-enabled:"


@dataclass(frozen=True)
class Inventory:
    """The published devices of this node.

    ``offers`` are the published devices by name. ``dynamic`` are the UUIDs of the devices that the driver partitions on
    demand. ``faults`` contains a description of the fault of each faulty device, by its UUID.
    """

    pool: str
    offers: Mapping[str, Offer]
    dynamic: frozenset[str]
    faults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModeChange:
    """Enable or disable partitioning on one device."""

    device_uuid: str
    enabled: bool


@dataclass(frozen=True)
class Destruction:
    """A partition of the driver to destroy. ``instance_id`` is its current ID on the device."""

    device_uuid: str
    instance_id: int
    description: str
    partition: OwnedPartition
    profile: str = ""

    @property
    def cleanup(self) -> PendingDestruction:
        """Return the pending cleanup if the partition cannot be destroyed now."""
        return PendingDestruction(self.device_uuid, self.partition, self.instance_id)


@dataclass(frozen=True)
class PreparePlan:
    """How to prepare one claim.

    ``record`` is written first. Then leftover partitions are destroyed, partitioning modes are changed, partitions are
    created, and the record's settings are applied. ``pod_claim`` is the pod's name for the claim, if it was read from
    the API server.
    """

    record: ClaimRecord
    mode_changes: tuple[ModeChange, ...] = ()
    destructions: tuple[Destruction, ...] = ()
    pod_claim: str | None = None

    @property
    def partitions_to_create(self) -> tuple[DeviceRecord, ...]:
        """Return the devices whose partition must be created."""
        return tuple(device for device in self.record.devices if device.created and device.partition_uuid is None)

    @property
    def repartitioned_uuids(self) -> frozenset[str]:
        """Return the UUIDs of the devices whose partitions or partitioning mode change."""
        changed = [change.device_uuid for change in self.mode_changes]
        destroyed = [destruction.device_uuid for destruction in self.destructions]
        return frozenset((*changed, *destroyed, *(device.device_uuid for device in self.partitions_to_create)))

    @property
    def changes_hardware(self) -> bool:
        """Return whether the plan needs more than writing a file."""
        return bool(
            self.mode_changes
            or self.destructions
            or self.partitions_to_create
            or any(each.settings or each.sharing or each.passthrough or each.fabric for each in self.record.devices)
        )


@dataclass(frozen=True)
class UndoPlan:
    """How to undo a prepared or half prepared claim.

    The steps are executed in this order: virtual machines give back the devices in ``returns`` (UUID and handover),
    ``fabric_partition`` is deactivated, ``destructions`` and ``mode_changes`` are executed, and ``restorations`` restore
    settings. A failed mode change has no effect on the claim: a later unprepare retries it. A failed restoration becomes
    a pending cleanup. ``cleanups`` are the partitions of devices that do not answer, to be destroyed later.
    """

    destructions: tuple[Destruction, ...] = ()
    mode_changes: tuple[ModeChange, ...] = ()
    restorations: tuple[Restoration, ...] = ()
    cleanups: tuple[PendingDestruction, ...] = ()
    returns: tuple[tuple[str, Handover], ...] = ()
    fabric_partition: int | None = None


def offers_by_device(allocation: Allocation, inventory: Inventory) -> Mapping[str, Offer]:
    """Return the offer of each allocated device, by the device's name.

    Raises ClaimError for a device that this node does not have.
    """
    found = {}
    for device in allocation.devices:
        if device.pool != inventory.pool:
            raise ClaimError(
                f"Claim {allocation.claim.describe()} holds device {device.device} of pool {device.pool}; this node's "
                f"pool is {inventory.pool}",
                hint="The pod belongs on the node that publishes that pool.",
                code="foreign-pool",
            )
        offer = inventory.offers.get(device.device)
        if offer is None:
            raise ClaimError(
                f"Claim {allocation.claim.describe()} holds device {device.device}, which this node no longer has",
                hint="It was lost, or removed by a layout change, after scheduling. Delete the pod, so that the "
                "claim is allocated again.",
                code="device-gone",
            )
        found[device.device] = offer
    return found


def refuse_faulty(claim: ClaimReference, uuids: Iterable[str], faults: Mapping[str, str]) -> None:
    """Raise ClaimError if a device of a claim is faulty, with the devices and their faults."""
    found = [f"device {uuid} is faulty ({faults[uuid]})" for uuid in sorted(uuids) if uuid in faults]
    if found:
        raise ClaimError(
            f"Claim {claim.describe()} cannot be prepared: {'; '.join(found)}",
            hint="Repair the device, or delete the pod so that the claim is allocated elsewhere. Other devices of the "
            "node remain available.",
            code="device-faulty",
        )


def plan_prepare(
    allocation: Allocation,
    inventory: Inventory,
    devices: Mapping[str, Device],
    records: Mapping[str, ClaimRecord],
    *,
    config_kinds: Sequence[ConfigKind],
    cdi_kind: str,
    boot_id: str,
    now: float,
    refused: Collection[tuple[str, Placement]] = (),
    choose_id: ChooseId = lambda _device, _placement, _taken: None,
) -> PreparePlan:
    """Plan how to prepare a claim.

    ``devices`` are fresh facts of the physical devices by UUID. ``records`` are all claims in the store; an incomplete
    record of the same claim has been undone before. ``refused`` are the placements that devices rejected, with the UUID
    of the device. ``choose_id`` chooses the IDs of new partitions. Raises ClaimError or InUse with the device and the
    conflict.
    """
    offers = offers_by_device(allocation, inventory)
    claim = allocation.claim
    refuse_unsuitable_configs(config_kinds, [(each, offers[each.device].kind) for each in allocation.devices])
    other_claims = [record for record in records.values() if record.uid != claim.uid]
    records_of_others = [device_record for record in other_claims for device_record in record.devices]
    planned: list[DeviceRecord] = []
    mode_changes: dict[str, ModeChange] = {}
    same_sharing = uuids_by_sharing_config(config_kinds, [(each, offers[each.device]) for each in allocation.devices])
    for allocated, peer_uuids in zip(allocation.devices, same_sharing):
        offer = offers[allocated.device]
        device = devices[offer.device_uuid]
        configurations = configurations_of(
            config_kinds, allocated.configs, request=allocated.request, device_kind=offer.kind
        )
        entry = _new_record(allocated, offer, cdi_kind=cdi_kind, claim_uid=claim.uid)
        entry = _with_configurations(entry, allocated, offer, configurations, peer_uuids)
        entry = with_existing_partition(entry, allocated, device)
        if entry.share_id and device.sharing_obstacle is not None:
            raise ClaimError(
                f"{entry.name} of claim {claim.describe()} cannot be shared. {device.sharing_obstacle.message}",
                hint=device.sharing_obstacle.remedy,
                code="not-shareable",
            )
        if offer.dynamic and not entry.created and offer.placement is not None and offer.placement.is_number:
            refused_here = {place for uuid, place in refused if uuid == device.uuid}
            entry = with_partition_number(entry, device, [*records_of_others, *planned], refused_here)
        _refuse_conflicts(entry, claim, other_claims, planned)
        if offer.kind == PASSTHROUGH:
            prefers_iommufd, needs_device_node = passthrough_interface(configurations)
            entry = _with_passthrough(
                entry, device, prefers_iommufd=prefers_iommufd, needs_device_node=needs_device_node
            )
        for uuid in () if entry.created else offer.device_uuids:
            entry, mode_change = _complete_record(
                entry, devices[uuid], is_dynamic_offer=offer.dynamic, is_dynamic_device=uuid in inventory.dynamic
            )
            if mode_change is not None:
                mode_changes[uuid] = mode_change
        if entry.partition_uuid is None:
            entry = with_chosen_id(entry, device, [*records_of_others, *planned], choose_id)
        planned.append(entry)
    record = ClaimRecord(
        uid=claim.uid,
        namespace=claim.namespace,
        name=claim.name,
        state=PREPARING,
        boot_id=boot_id,
        created_at=now,
        devices=tuple(planned),
    )
    return PreparePlan(record=record, mode_changes=tuple(mode_changes.values()), pod_claim=allocation.pod_claim)


def _with_configurations(
    entry: DeviceRecord,
    allocated: AllocatedDevice,
    offer: Offer,
    configurations: Sequence[Configuration],
    peer_uuids: Sequence[str],
) -> DeviceRecord:
    """Return a new record with the settings and the sharing that the claim's configurations request.

    ``peer_uuids`` are the UUIDs of all devices with the same sharing configuration.
    """
    request, admin = allocated.request, allocated.admin
    refuse_other_profile(configurations, request=request, name=offer.name, profile=offer.profile)
    settings = settings_for(configurations, request=request, admin=admin)
    sharing = sharing_for(
        configurations,
        request=request,
        admin=admin,
        consumed=allocated.consumed,
        totals=offer.capacities,
        peer_uuids=peer_uuids,
    )
    if sharing and offer.kind == GROUP:
        raise ClaimError(
            f"{offer.name} stands for several devices, and a configuration asks for a program that shares out one",
            hint="Leave the sharing out of the configuration, or ask for single devices.",
            code="config-refused",
        )
    if sharing and allocated.share_id:
        # Each claim has its own companion, so the device must accept several processes.
        settings.pop(COMPUTE_MODE, None)
    return entry.with_changes(settings=settings, sharing=sharing) if settings or sharing else entry


def _refuse_conflicts(
    entry: DeviceRecord,
    claim: ClaimReference,
    other_claims: Iterable[ClaimRecord],
    planned: Iterable[DeviceRecord],
) -> None:
    """Refuse a device that another claim, or an earlier device of this claim, uses exclusively."""
    for record in other_claims:
        for device_record in record.devices:
            if _are_in_conflict(entry, device_record):
                raise InUse(
                    f"Device {entry.name} of claim {claim.describe()} is still prepared for claim "
                    f"{record.describe()} (UID {record.uid}, device {device_record.name})",
                    claims=(record.describe(),),
                    hint="It is freed when the last pod that uses that claim has ended on this node.",
                )
    for device_record in planned:
        if _are_in_conflict(entry, device_record):
            raise ClaimError(
                f"Claim {claim.describe()} holds {entry.name} and {device_record.name}, which overlap",
                hint="Delete the pod, so that the claim is allocated again.",
                code="overlap",
            )


def _new_record(allocated: AllocatedDevice, offer: Offer, *, cdi_kind: str, claim_uid: str) -> DeviceRecord:
    return DeviceRecord(
        request=allocated.request,
        pool=allocated.pool,
        name=allocated.device,
        device_uuid=offer.device_uuid,
        kind=offer.kind,
        profile=offer.profile,
        profile_id=offer.profile_id,
        placement_start=offer.placement.start if offer.placement else None,
        placement_size=offer.placement.size if offer.placement else None,
        partition_uuid=offer.partition_uuid,
        share_id=allocated.share_id,
        admin=allocated.admin,
        # A claim may have several shares of one device.
        cdi_id=f"{cdi_kind}={claim_uid}-{offer.name}" + (f"-{allocated.share_id[:8]}" if allocated.share_id else ""),
        consumed=allocated.consumed,
        members=offer.members,
    )


def _with_passthrough(
    entry: DeviceRecord, device: Device, *, prefers_iommufd: bool, needs_device_node: bool
) -> DeviceRecord:
    """Return the record of a device that is passed through to a virtual machine.

    The executor adds the device's current kernel driver later, before the record is written.
    """
    if entry.admin:
        raise ClaimError(
            f"{entry.name} is for a virtual machine, and a claim with administrator's access changes nothing on a device",
            hint="Leave adminAccess out, or ask for the devices that containers use.",
        )
    if device.processes:
        raise InUse(
            f"{entry.name} cannot be passed through: {device.describe()} is in use by {', '.join(map(str, device.processes))}",
            pids=[process.pid for process in device.processes],
            hint="End these processes.",
        )
    handover = Handover(device.pci_address, "", IOMMUFD if prefers_iommufd else LEGACY, needs_device_node)
    # A daemon that keeps the device open without using it has to close it.
    settings = {**entry.settings, PERSISTENCE: False}
    return replace(entry, settings=settings, passthrough={"handover": handover.to_dict(), "facts": document_of(device)})


def _are_in_conflict(one: DeviceRecord, other: DeviceRecord) -> bool:
    """Return whether two devices of claims cannot be in use at the same time."""
    if set(one.device_uuids).isdisjoint(other.device_uuids):
        return False
    if PASSTHROUGH in (one.kind, other.kind):
        return True  # monitoring access keeps the device open too
    if one.admin or other.admin:
        return False
    if one.name == other.name:
        return not (one.share_id and other.share_id and one.share_id != other.share_id)
    mine, theirs = one.placement, other.placement
    return mine is None or theirs is None or mine.conflicts_with(theirs)


def _complete_record(
    entry: DeviceRecord, device: Device, *, is_dynamic_offer: bool, is_dynamic_device: bool
) -> tuple[DeviceRecord, ModeChange | None]:
    """Check a planned device against the current state of its hardware.

    Return the record with its existing partition, or as one to create, and the required change of the partitioning mode.
    ``is_dynamic_offer`` is whether the partition is created on demand. ``is_dynamic_device`` is whether the driver may
    change the partitioning mode of the device.
    """
    if entry.kind != PARTITION:
        return entry, _check_whole_device(entry, device, is_dynamic=is_dynamic_device)
    existing = partition_of(device, entry)
    if existing is not None and existing.uuid and (not is_dynamic_offer or entry.admin):
        return entry.with_changes(partition_uuid=existing.uuid, instance_id=existing.instance_id), None
    if not is_dynamic_offer or entry.admin:
        raise_partition_missing(entry, device)
    blockers = overlapping(entry.placement, device.partitions) if entry.placement is not None else []
    blocker = next(iter(blockers), None)
    if blocker is not None:
        raise InUse(
            f"The place of {entry.name} on {device.describe()} is taken by {blocker.describe()}, which this driver did "
            "not make",
            pids=[process.pid for process in blocker.processes],
            hint="Remove it, or delete the pod so that the claim is allocated elsewhere.",
        )
    if device.partitioning.enabled or not device.partitioning.has_mode:
        return entry.with_changes(created=True), None
    if not device.partitioning.supported or device.partitioning.needs_reset:
        raise ClaimError(
            f"Partitioning is off on {device.describe()} and cannot be switched on while the node is in use",
            hint="Give the device mode static or dynamic in the layout and apply it; this board needs a reset for it.",
            code="partitioning-off",
        )
    return entry.with_changes(created=True), ModeChange(device.uuid, enabled=True)


def _check_whole_device(entry: DeviceRecord, device: Device, *, is_dynamic: bool) -> ModeChange | None:
    """Return the change that makes the whole device usable; None if partitioning is disabled. Refuse a partitioned device."""
    if not device.partitioning.enabled or entry.admin:
        return None
    if device.partitions:
        raise InUse(
            f"{entry.name} cannot be prepared as a whole device: {device.describe()} has "
            + ", ".join(partition.describe() for partition in device.partitions),
            pids=[process.pid for partition in device.partitions for process in partition.processes],
            hint="Remove the partitions, or delete the pod so that the claim is allocated elsewhere.",
        )
    if not is_dynamic or device.partitioning.needs_reset:
        raise ClaimError(
            f"{entry.name} cannot be prepared as a whole device: partitioning is on for {device.describe()}",
            hint="Set the device's mode to whole in the layout and apply it.",
            code="partitioning-on",
        )
    return ModeChange(device.uuid, enabled=False)


def destruction(device_uuid: str, partition: Partition) -> Destruction:
    """Return the action that destroys an existing partition."""
    text = f"{partition.describe()} on {device_uuid}"
    return Destruction(device_uuid, partition.instance_id, text, partition.key, partition.profile)


def partition_of(device: Device, device_record: DeviceRecord) -> Partition | None:
    """Return the partition of a device that a record describes; None if it does not exist."""
    return next((partition for partition in device.partitions if device_record.describes(partition)), None)


def plan_restore(
    record: ClaimRecord,
    devices: Mapping[str, Device],
    dynamic: Collection[str],
    choose_id: ChooseId = lambda _device, _placement, _taken: None,
    *,
    is_from_previous_boot: bool = False,
) -> PreparePlan:
    """Plan how to restore the devices of a prepared claim after a reboot or a failure.

    The plan's record contains the existing partitions and the partitions to create. ``dynamic`` are the UUIDs of the devices that
    the driver partitions on demand. If the record ``is_from_previous_boot``, the driver's partitions no longer exist. Then the claim
    uses an existing partition at the same placement, and unpreparing the claim does not destroy it. Raises ClaimError or InUse.
    """
    restored: list[DeviceRecord] = []
    mode_changes: dict[str, ModeChange] = {}
    leftovers: list[Destruction] = []
    for device_record in record.devices:
        missing = [uuid for uuid in device_record.device_uuids if uuid not in devices]
        if missing:
            raise ClaimError(
                f"Claim {record.describe()} holds {device_record.name}, and device {', '.join(missing)} is not on this node",
                hint="The device was lost or replaced. Delete the pod, so that the claim is allocated again.",
                code="device-gone",
            )
        device = devices[device_record.device_uuid]
        existing = partition_of(device, device_record) if device_record.kind == PARTITION else None
        if existing is not None and existing.uuid:
            created = device_record.created and not is_from_previous_boot
            restored.append(
                replace(device_record, partition_uuid=existing.uuid, instance_id=existing.instance_id, created=created)
            )
            continue
        if existing is not None and device_record.created and not is_from_previous_boot:
            # The driver was killed while it created this partition, so the partition has no UUID.
            leftovers.append(destruction(device_record.device_uuid, existing))
            others = tuple(partition for partition in device.partitions if partition is not existing)
            device = replace(device, partitions=others)
        entry = replace(device_record, partition_uuid=None, instance_id=None, created=False)
        for each in (device, *(devices[uuid] for uuid in device_record.members[1:])):
            entry, mode_change = _complete_record(
                entry, each, is_dynamic_offer=device_record.created, is_dynamic_device=each.uuid in dynamic
            )
            if mode_change is not None:
                mode_changes[each.uuid] = mode_change
        restored.append(with_chosen_id(entry, device, restored, choose_id))
    return PreparePlan(
        record=replace(record, devices=tuple(restored)),
        mode_changes=tuple(mode_changes.values()),
        destructions=tuple(leftovers),
    )


def with_chosen_ids(record: ClaimRecord, planned: ClaimRecord) -> ClaimRecord:
    """Return a prepared claim's record with the planned changes: IDs of partitions, partitions of the layout, and the fabric partition."""
    devices = []
    for device_record, entry in zip(record.devices, planned.devices):
        if device_record.created and not entry.created:
            device_record = entry
        if entry.created and entry.partition_uuid is None and entry.instance_id is not None:
            device_record = replace(device_record, instance_id=entry.instance_id)
        if entry.fabric != device_record.fabric:
            device_record = replace(device_record, fabric=entry.fabric, settings=entry.settings)
        devices.append(device_record)
    return replace(record, devices=tuple(devices))


def restore_changes_devices(plan: PreparePlan, record: ClaimRecord) -> bool:
    """Return whether a restore plan changes more than the boot ID."""
    return bool(plan.mode_changes or plan.destructions) or plan.record.devices != record.devices


def plan_undo(
    record: ClaimRecord,
    devices: Mapping[str, Device],
    meta: Mapping[str, str],
    faulty: Collection[str] = (),
    *,
    is_from_previous_boot: bool = False,
) -> UndoPlan:
    """Plan how to undo a claim according to its record.

    Only partitions that the driver created according to the record are destroyed. A partition with an ID that the driver did not
    choose has a different owner. If the record ``is_from_previous_boot``, the driver's partitions no longer exist, and a partition
    at the same placement has a different owner. If the driver enabled partitioning and no other partition remains, the plan
    disables it. ``meta`` are the entries of the store's meta table. On a ``faulty`` device (UUIDs) the destruction stays as a
    pending cleanup.
    """
    destructions: list[Destruction] = []
    to_destroy: set[tuple[str, int]] = set()
    created = (
        ()
        if is_from_previous_boot
        else tuple(device_record for device_record in record.devices if device_record.created)
    )
    for device_record in created:
        device = devices.get(device_record.device_uuid)
        existing = partition_of(device, device_record) if device is not None else None
        if existing is not None:
            to_destroy.add((device_record.device_uuid, existing.instance_id))
            destructions.append(destruction(device_record.device_uuid, existing))
    modes = [
        ModeChange(uuid, enabled=False)
        for uuid in record.device_uuids
        if uuid in devices and must_disable_partitioning(devices[uuid], meta, to_destroy)
    ]
    cleanups = [
        PendingDestruction(device_record.device_uuid, device_record.key, device_record.instance_id)
        for device_record in created
        if device_record.key is not None and device_record.device_uuid in faulty
    ]
    returns = tuple(
        (device_record.device_uuid, device_record.handover)
        for device_record in record.devices
        if device_record.handover is not None
    )
    return UndoPlan(
        destructions=tuple(destructions), mode_changes=tuple(modes), cleanups=tuple(cleanups), returns=returns
    )


def plan_cleanup(device: Device, cleanups: Iterable[PendingDestruction], meta: Mapping[str, str]) -> UndoPlan:
    """Plan the pending cleanup of one device that answers again. Missing partitions need no action."""
    due = [cleanup for cleanup in cleanups if cleanup.device_uuid == device.uuid]
    found = [
        each
        for each in device.partitions
        if any(each.matches_record(cleanup.partition, cleanup.instance_id) for cleanup in due)
    ]
    to_destroy = {(device.uuid, partition.instance_id) for partition in found}
    off = must_disable_partitioning(device, meta, to_destroy)
    return UndoPlan(
        destructions=tuple(destruction(device.uuid, partition) for partition in found),
        mode_changes=(ModeChange(device.uuid, enabled=False),) if off else (),
    )


def must_disable_partitioning(
    device: Device, meta: Mapping[str, str], to_destroy: Collection[tuple[str, int]] = ()
) -> bool:
    """Return whether the driver has enabled partitioning on a device, and no partition remains on it.

    ``to_destroy`` are the partitions that do not remain, by the device's UUID and the instance ID.
    """
    remaining = [partition for partition in device.partitions if (device.uuid, partition.instance_id) not in to_destroy]
    return f"{PARTITIONING_KEY}{device.uuid}" in meta and device.partitioning.enabled and not remaining
