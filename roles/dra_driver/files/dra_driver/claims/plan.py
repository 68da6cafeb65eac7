# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Plan how to prepare or unprepare a claim, from facts alone. No access to hardware, files, or clocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.dra.opaque_config import ConfigKind
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
    interface_of,
    refuse_other_profile,
    refuse_unfitting,
    settings_for,
    shared_alike,
    sharing_for,
)
from .partitions.partition_ids import ChooseId, as_made_before, refuse_missing, with_id, with_number
from .pending_cleanups import PendingDestruction
from .store.records import ClaimRecord, ClaimReference, DeviceRecord

# A key of the store's meta table, with the device's UUID: the driver enabled partitioning on the device, and
# disables it after the last partition. The value is the boot ID.
PARTITIONING_KEY = "partitioning-enabled:"


@dataclass(frozen=True)
class Inventory:
    """The published devices of this node: its pool, the offers by name, and the devices that the driver partitions on demand.

    ``faults`` contains a description of the fault of each faulty device, by its UUID.
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
    """A partition of the driver to destroy: its device and its current instance ID."""

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
    def creates(self) -> tuple[DeviceRecord, ...]:
        """Return the devices whose partition must be created."""
        return tuple(device for device in self.record.devices if device.created and device.partition_uuid is None)

    @property
    def repartitioned(self) -> frozenset[str]:
        """Return the UUIDs of the devices whose partitions or partitioning mode change."""
        changed = [change.device_uuid for change in self.mode_changes]
        destroyed = [destruction.device_uuid for destruction in self.destructions]
        return frozenset((*changed, *destroyed, *(device.device_uuid for device in self.creates)))

    @property
    def changes_hardware(self) -> bool:
        """Return whether the plan needs more than writing a file."""
        return bool(
            self.mode_changes
            or self.destructions
            or self.creates
            or any(each.settings or each.sharing or each.passthrough or each.fabric for each in self.record.devices)
        )


@dataclass(frozen=True)
class UndoPlan:
    """How to undo a prepared or half prepared claim.

    ``mode_changes`` follow the destructions and can fail without harm: a later unprepare retries them.
    ``cleanups`` are partitions on devices that do not answer, to be destroyed when they do. ``restorations`` are settings to restore;
    a failed one stays as pending cleanup. ``returns`` are devices that virtual machines return, before all else; then
    ``fabric_partition`` is deactivated.
    """

    destructions: tuple[Destruction, ...] = ()
    mode_changes: tuple[ModeChange, ...] = ()
    restorations: tuple[Restoration, ...] = ()
    cleanups: tuple[PendingDestruction, ...] = ()
    returns: tuple[tuple[str, Handover], ...] = ()
    fabric_partition: int | None = None


def offers_of(allocation: Allocation, inventory: Inventory) -> Mapping[str, Offer]:
    """Return the offer of each allocated device by name.

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
    record of the same claim has been undone before. ``refused`` are placement numbers that devices rejected, by UUID.
    The result of ``choose_id`` is in the record before the partition is created. Raises ClaimError or InUse with the
    device and the conflict.
    """
    offers = offers_of(allocation, inventory)
    refuse_unfitting(config_kinds, [(each, offers[each.device].kind) for each in allocation.devices])
    others = [record for record in records.values() if record.uid != allocation.claim.uid]
    planned: list[DeviceRecord] = []
    modes: dict[str, ModeChange] = {}
    alike = shared_alike(config_kinds, [(each, offers[each.device]) for each in allocation.devices])
    for allocated, alongside in zip(allocation.devices, alike):
        offer = offers[allocated.device]
        configurations = configurations_of(
            config_kinds, allocated.configs, request=allocated.request, device_kind=offer.kind
        )
        refuse_other_profile(configurations, request=allocated.request, name=offer.name, profile=offer.profile)
        wanted = settings_for(configurations, request=allocated.request, admin=allocated.admin)
        sharing = sharing_for(
            configurations,
            request=allocated.request,
            admin=allocated.admin,
            consumed=allocated.consumed,
            totals=offer.capacities,
            alongside=alongside,
        )
        if sharing and offer.kind == GROUP:
            raise ClaimError(
                f"{offer.name} stands for several devices, and a configuration asks for a program that shares out one",
                hint="Leave the sharing out of the configuration, or ask for single devices.",
                code="config-refused",
            )
        if sharing and allocated.share_id:
            # Each claim has its own companion, so the device must accept several processes.
            wanted.pop(COMPUTE_MODE, None)
        entry = _entry(allocated, offer, cdi_kind=cdi_kind, claim_uid=allocation.claim.uid)
        if wanted or sharing:
            entry = entry.but(settings=wanted, sharing=sharing)
        device = devices[offer.device_uuid]
        entry = as_made_before(entry, allocated, device)
        if entry.share_id and device.unshareable is not None:
            raise ClaimError(
                f"{entry.name} of claim {allocation.claim.describe()} cannot be shared. {device.unshareable.message}",
                hint=device.unshareable.remedy,
                code="not-shareable",
            )
        if offer.dynamic and not entry.created and offer.placement is not None and offer.placement.is_number:
            held_by_others = [held for record in others for held in record.devices]
            not_taken = {place for uuid, place in refused if uuid == device.uuid}
            entry = with_number(entry, device, [*held_by_others, *planned], not_taken)
        for record in others:
            for held in record.devices:
                if _conflict(entry, held):
                    raise InUse(
                        f"Device {entry.name} of claim {allocation.claim.describe()} is still prepared for claim "
                        f"{record.describe()} (UID {record.uid}, device {held.name})",
                        claims=(record.describe(),),
                        hint="It is freed when the last pod that uses that claim has ended on this node.",
                    )
        for held in planned:
            if _conflict(entry, held):
                raise ClaimError(
                    f"Claim {allocation.claim.describe()} holds {entry.name} and {held.name}, which overlap",
                    hint="Delete the pod, so that the claim is allocated again.",
                    code="overlap",
                )
        if offer.kind == PASSTHROUGH:
            entry = _passed_through(entry, device, *interface_of(configurations))
        for uuid in () if entry.created else offer.device_uuids:
            entry, mode = _settle(entry, offer, devices[uuid], uuid in inventory.dynamic)
            if mode is not None:
                modes[uuid] = mode
        held_by_others = [held for record in others for held in record.devices]
        if entry.partition_uuid is None:
            entry = with_id(entry, device, [*held_by_others, *planned], choose_id)
        planned.append(entry)
    record = ClaimRecord(
        uid=allocation.claim.uid,
        namespace=allocation.claim.namespace,
        name=allocation.claim.name,
        state=PREPARING,
        boot_id=boot_id,
        created_at=now,
        devices=tuple(planned),
    )
    return PreparePlan(record=record, mode_changes=tuple(modes.values()), pod_claim=allocation.pod_claim)


def _entry(allocated: AllocatedDevice, offer: Offer, *, cdi_kind: str, claim_uid: str) -> DeviceRecord:
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


def _passed_through(entry: DeviceRecord, device: Device, prefers_iommufd: bool, api_device: bool) -> DeviceRecord:
    """Plan to pass a device through to a virtual machine.

    Its current kernel driver is added before the record is written.
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
    handover = Handover(device.pci_address, "", IOMMUFD if prefers_iommufd else LEGACY, api_device)
    # A daemon that keeps the device open without using it has to close it.
    settings = {**entry.settings, PERSISTENCE: False}
    return replace(entry, settings=settings, passthrough={"handover": handover.to_dict(), "facts": document_of(device)})


def _conflict(one: DeviceRecord, other: DeviceRecord) -> bool:
    if set(one.device_uuids).isdisjoint(other.device_uuids):
        return False
    if PASSTHROUGH in (one.kind, other.kind):
        return True  # monitoring access keeps the device open too
    if one.admin or other.admin:
        return False
    if one.name == other.name:
        return not (one.share_id and other.share_id and one.share_id != other.share_id)
    mine, theirs = one.placement, other.placement
    return mine is None or theirs is None or mine.clashes(theirs)


def _settle(entry: DeviceRecord, offer: Offer, device: Device, dynamic: bool) -> tuple[DeviceRecord, ModeChange | None]:
    """Check one planned device against the current hardware state, and complete its record."""
    if offer.kind != PARTITION:
        return entry, _whole(entry, device, dynamic)
    existing = partition_of(device, entry)
    if existing is not None and existing.uuid and (not offer.dynamic or entry.admin):
        return entry.but(partition_uuid=existing.uuid, instance_id=existing.instance_id), None
    if not offer.dynamic or entry.admin:
        refuse_missing(entry, device)
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
        return entry.but(created=True), None
    if not device.partitioning.supported or device.partitioning.needs_reset:
        raise ClaimError(
            f"Partitioning is off on {device.describe()} and cannot be switched on while the node is in use",
            hint="Give the device mode static or dynamic in the layout and apply it; this board needs a reset for it.",
            code="partitioning-off",
        )
    return entry.but(created=True), ModeChange(device.uuid, enabled=True)


def _whole(entry: DeviceRecord, device: Device, dynamic: bool) -> ModeChange | None:
    if not device.partitioning.enabled or entry.admin:
        return None
    if device.partitions:
        raise InUse(
            f"{entry.name} cannot be prepared as a whole device: {device.describe()} has "
            + ", ".join(partition.describe() for partition in device.partitions),
            pids=[process.pid for partition in device.partitions for process in partition.processes],
            hint="Remove the partitions, or delete the pod so that the claim is allocated elsewhere.",
        )
    if not dynamic or device.partitioning.needs_reset:
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


def partition_of(device: Device, held: DeviceRecord) -> Partition | None:
    """Return the partition of a device that a record describes; None if it does not exist."""
    return next((partition for partition in device.partitions if held.has(partition)), None)


def plan_restore(
    record: ClaimRecord,
    devices: Mapping[str, Device],
    dynamic: Collection[str],
    choose_id: ChooseId = lambda _device, _placement, _taken: None,
    *,
    gone: bool = False,
) -> PreparePlan:
    """Plan how to restore the devices of a prepared claim after a reboot or a failure.

    Returns the record to write, with the existing partitions and the partitions to create. Devices with a partition_uuid exist.
    Devices that are ``created`` and have no partition_uuid are to be created. ``gone`` is whether the partitions were created in a
    previous boot and no longer exist. Then the claim uses a partition that already exists at the same placement, and
    unpreparing the claim does not destroy this partition. Raises ClaimError or InUse.
    """
    settled: list[DeviceRecord] = []
    modes: dict[str, ModeChange] = {}
    remains: list[Destruction] = []
    for held in record.devices:
        missing = [uuid for uuid in held.device_uuids if uuid not in devices]
        if missing:
            raise ClaimError(
                f"Claim {record.describe()} holds {held.name}, and device {', '.join(missing)} is not on this node",
                hint="The device was lost or replaced. Delete the pod, so that the claim is allocated again.",
                code="device-gone",
            )
        device = devices[held.device_uuid]
        existing = partition_of(device, held) if held.kind == PARTITION else None
        if existing is not None and existing.uuid:
            created = held.created and not gone
            settled.append(
                replace(held, partition_uuid=existing.uuid, instance_id=existing.instance_id, created=created)
            )
            continue
        if existing is not None and held.created and not gone:
            # The driver was killed while it created this partition, so the partition has no UUID.
            remains.append(destruction(held.device_uuid, existing))
            left = tuple(partition for partition in device.partitions if partition is not existing)
            device = replace(device, partitions=left)
        blank = replace(held, partition_uuid=None, instance_id=None, created=False)
        offer = Offer(
            name=held.name,
            kind=held.kind,
            device_uuid=held.device_uuid,
            dynamic=held.created,
            profile=held.profile,
            profile_id=held.profile_id,
            placement=held.placement,
            partition_uuid=None,
            attributes={},
            capacities={},
        )
        entry = blank
        for each in (device, *(devices[uuid] for uuid in held.members[1:])):
            entry, mode = _settle(entry, offer, each, each.uuid in dynamic)
            if mode is not None:
                modes[each.uuid] = mode
        settled.append(with_id(entry, device, settled, choose_id))
    return PreparePlan(
        record=replace(record, devices=tuple(settled)),
        mode_changes=tuple(modes.values()),
        destructions=tuple(remains),
    )


def with_chosen_ids(record: ClaimRecord, planned: ClaimRecord) -> ClaimRecord:
    """Return a prepared claim's record with the planned changes: IDs of partitions, partitions of the layout, and the fabric partition."""
    devices = []
    for held, entry in zip(record.devices, planned.devices):
        if held.created and not entry.created:
            held = entry
        if entry.created and entry.partition_uuid is None and entry.instance_id is not None:
            held = replace(held, instance_id=entry.instance_id)
        if entry.fabric != held.fabric:
            held = replace(held, fabric=entry.fabric, settings=entry.settings)
        devices.append(held)
    return replace(record, devices=tuple(devices))


def restore_is_needed(plan: PreparePlan, record: ClaimRecord) -> bool:
    """Return whether a restore plan changes more than the boot ID."""
    return bool(plan.mode_changes or plan.destructions) or plan.record.devices != record.devices


def plan_undo(
    record: ClaimRecord,
    devices: Mapping[str, Device],
    meta: Mapping[str, str],
    faulty: Collection[str] = (),
    *,
    gone: bool = False,
) -> UndoPlan:
    """Plan how to undo a claim according to its record.

    Only partitions that the driver created according to the record are destroyed. A partition that does not exist needs no change.
    A partition with an ID that the driver did not choose has a different owner. ``gone`` is whether the driver created the
    partitions in a previous boot: they no longer exist, and a partition at the same placement has a different owner. If the driver
    enabled partitioning and no other partition remains, the plan disables it. On a ``faulty`` device the destruction stays as a
    pending cleanup.
    """
    destructions: list[Destruction] = []
    doomed: set[tuple[str, int]] = set()
    made = () if gone else tuple(held for held in record.devices if held.created)
    for held in made:
        device = devices.get(held.device_uuid)
        existing = partition_of(device, held) if device is not None else None
        if existing is not None:
            doomed.add((held.device_uuid, existing.instance_id))
            destructions.append(destruction(held.device_uuid, existing))
    modes = [
        ModeChange(uuid, enabled=False)
        for uuid in record.device_uuids
        if uuid in devices and mode_goes_off(devices[uuid], meta, doomed)
    ]
    cleanups = [
        PendingDestruction(held.device_uuid, held.key, held.instance_id)
        for held in made
        if held.key is not None and held.device_uuid in faulty
    ]
    returns = tuple((held.device_uuid, held.handover) for held in record.devices if held.handover is not None)
    return UndoPlan(
        destructions=tuple(destructions), mode_changes=tuple(modes), cleanups=tuple(cleanups), returns=returns
    )


def plan_cleanup(device: Device, cleanups: Iterable[PendingDestruction], meta: Mapping[str, str]) -> UndoPlan:
    """Plan the pending cleanup of one device that answers again. Missing partitions need no action."""
    due = [cleanup for cleanup in cleanups if cleanup.device_uuid == device.uuid]
    found = [
        each
        for each in device.partitions
        if any(each.is_the_one(cleanup.partition, cleanup.instance_id) for cleanup in due)
    ]
    doomed = {(device.uuid, partition.instance_id) for partition in found}
    off = mode_goes_off(device, meta, doomed)
    return UndoPlan(
        destructions=tuple(destruction(device.uuid, partition) for partition in found),
        mode_changes=(ModeChange(device.uuid, enabled=False),) if off else (),
    )


def mode_goes_off(device: Device, meta: Mapping[str, str], doomed: Collection[tuple[str, int]] = ()) -> bool:
    """Return whether the driver disables partitioning: it enabled it, and all remaining partitions are to be destroyed (``doomed``)."""
    left = [partition for partition in device.partitions if (device.uuid, partition.instance_id) not in doomed]
    return f"{PARTITIONING_KEY}{device.uuid}" in meta and device.partitioning.enabled and not left
