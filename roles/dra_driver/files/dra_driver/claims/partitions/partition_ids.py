# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the existing partition of a claim, and choose number and ID of a partition to create. No side effects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Callable, NoReturn, Optional

from ...core.errors import InUse
from ...core.model import PARTITION, Device, Placement
from ..allocation import AllocatedDevice, ClaimError
from ..store.records import DeviceRecord

#: Chooses the ID for a new partition at a placement of a device, different from reserved IDs (see core/vendors/registry.py).
ChooseId = Callable[[Device, Placement, Collection[int]], Optional[int]]


def with_existing_partition(entry: DeviceRecord, allocated: AllocatedDevice, device: Device) -> DeviceRecord:
    """Return the entry with the partition that was created for the claim before its record was lost, if it still exists."""
    if entry.kind != PARTITION or entry.admin or not allocated.created_partition:
        return entry
    for partition in device.partitions:
        if partition.uuid == allocated.created_partition and partition.profile_id == entry.profile_id:
            return replace(
                entry,
                placement_start=partition.placement.start,
                placement_size=partition.placement.size,
                partition_uuid=partition.uuid,
                instance_id=partition.instance_id,
                created=True,
            )
    return entry


def with_partition_number(
    entry: DeviceRecord, device: Device, records: Sequence[DeviceRecord], refused: Collection[Placement] = ()
) -> DeviceRecord:
    """Assign the lowest free number to a partition to create, if the published device does not name its placement.

    ``records`` are the devices of all claims. ``refused`` are numbers that the device has rejected. A claim with
    administrator access gets the number of the partition that it monitors. Raises ClaimError, InUse.
    """
    on_device = [each for each in records if each.device_uuid == device.uuid and each.kind == PARTITION]
    if entry.admin:
        made = next((each for each in on_device if each.name == entry.name and each.created), None)
        if made is None:
            raise_partition_missing(entry, device)
        return replace(entry, placement_start=made.placement_start)
    profile = device.profile(entry.profile_id) if entry.profile_id is not None else None
    if profile is None:
        raise ClaimError(
            f"{device.describe()} no longer knows the profile {entry.profile} of {entry.name}",
            hint="Delete the pod, so that the claim is allocated again.",
            code="device-gone",
        )
    taken = {each.placement for each in on_device} | {each.placement for each in device.partitions}
    free = [each for each in profile.placements if each not in taken and each not in refused]
    if not free:
        there = ", ".join(partition.describe() for partition in device.partitions) or "none"
        raise InUse(
            f"No number is left for {entry.name} on {device.describe()}: partitions and other claims have all "
            f"{len(profile.placements)}; partitions on it: {there}",
            hint="Remove partitions that this driver did not make, or delete the pod so that the claim is allocated elsewhere.",
        )
    return entry.with_changes(placement_start=min(free).start)


def with_chosen_id(
    entry: DeviceRecord, device: Device, records: Iterable[DeviceRecord], choose_id: ChooseId
) -> DeviceRecord:
    """Assign an ID to a partition to create, if ``choose_id`` chooses one. Raises InUse."""
    if not entry.created or entry.placement is None:
        return entry
    recorded_ids = [each.instance_id for each in records if each.device_uuid == device.uuid and each.kind == PARTITION]
    taken = [each for each in recorded_ids if each is not None]
    chosen = choose_id(device, entry.placement, taken)
    return entry if chosen is None else entry.with_changes(instance_id=chosen)


def raise_partition_missing(entry: DeviceRecord, device: Device) -> NoReturn:
    """Raise ClaimError for a partition that must exist and does not."""
    raise ClaimError(
        f"Partition {entry.name} does not exist on {device.describe()}",
        hint="Apply the node's layout again. An administrator's claim reaches partitions that exist, it makes none.",
        code="partition-gone",
    )
