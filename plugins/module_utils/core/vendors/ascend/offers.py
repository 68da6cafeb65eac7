# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The published devices of a chip: names, attributes, capacities, and counters.

The attributes ``deviceType`` and ``physicId`` are those of Huawei's DRA driver. All others are defined by this
collection. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from ...model import (
    DEVICE,
    PARTITION,
    AttributeValue,
    CounterSet,
    Device,
    Offer,
    OwnedPartition,
    Partition,
    Placement,
    Profile,
    frozen,
)
from ...partitioning import capacity as partitioning_capacity
from .families import is_paired
from .names import countable_name, counter_set_name, group_of, number_of, partition_name, whole_name
from .templates import counter, published, rank

#: The counter of a chip without other counters.
_WHOLE = "whole"


def offers(device: Device, dynamic: bool, owned: Collection[OwnedPartition] = ()) -> tuple[Offer, ...]:
    """Return the offers of a chip.

    Without ``dynamic``, these are the existing vNPUs if there are any, else the whole chip. With ``dynamic``, these are
    the whole chip and every possible vNPU, which share one counter set. Existing vNPUs that are not ``owned`` are
    published unchanged, and offers that no longer fit are left out. The order fits the scheduler's first fit.

    Chips that share a card with another one are not partitioned for claims: the dynamic mode offers them as whole
    chips, or their existing vNPUs. The same applies while the host's modes prevent vNPUs.
    """
    if not dynamic or not device.partitioning.supported or device.partitioning.blocked or not device.profiles:
        existing = tuple(_existing(device, partition) for partition in device.partitions if partition.uuid)
        return existing if device.partitions else (_whole(device),)
    adopted = _adopted(device, owned)
    found = [_existing(device, partition) for partition in adopted if partition.uuid]
    is_cut = not is_paired(device.pci_device_id, device.pci_subsystem_id)
    if is_cut and all(_consumed_by(device, partition) is not None for partition in adopted):
        left = counter_set(device, owned).counters
        found += [_possible(device, profile, place) for profile, place in _free(device, adopted, left)]
    if not adopted:
        found.append(_whole(device, counter_set(device).counters))
    return tuple(found)


def attributes_of(device: Device, partition: Partition | None) -> Mapping[str, AttributeValue]:
    """Return the attributes of a whole chip, or of one of its existing vNPUs."""
    if partition is None:
        return MappingProxyType({**device.attributes, "type": "npu", "uuid": device.uuid})
    own: dict[str, AttributeValue] = {"uuid": partition.uuid, "vnpuID": partition.instance_id}
    return MappingProxyType({**_of_slice(device, partition.profile, partition.placement), **own})


def counter_set(device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
    """Return the counter set of a chip's dynamic offers; with ``owned``, without the resources of vNPUs that are not owned."""
    totals: dict[str, int] = {
        counter(key): total for key, total in partitioning_capacity.totals(device).items() if total
    }
    for number in range(device.memory_slices):
        totals[_place_counter(number)] = 1
    for partition in _adopted(device, owned) if owned is not None else ():
        for name, amount in (_consumed_by(device, partition) or {}).items():
            totals[name] = max(totals.get(name, 0) - amount, 0)
    return CounterSet(counter_set_name(device), frozen(totals or {_WHOLE: 1}))


def _free(device: Device, adopted: Collection[Partition], left: Mapping[str, int]) -> list[tuple[Profile, Placement]]:
    """Return the vNPUs that can be created in addition to the adopted ones, in the order in which they should be allocated.

    Each fits alone. Of a profile with numbers there are as many as an empty chip can have: a claim may use the last
    of them, and its resources are counted only while it is published. Profiles are ordered from small to large. vNPUs
    with one core go upward from the first place, so that two consecutive ones share a vGroup. All others go downward
    from the last place, so that the two kinds meet late.
    """
    numbers = {number_of(partition.instance_id) for partition in adopted}
    found: list[tuple[Profile, Placement]] = []
    for profile in sorted(device.profiles, key=rank):
        if profile.is_numbered:
            places = list(profile.placements[: profile.maximum])
        else:
            places = sorted(profile.placements, reverse=profile.size > 1)
            places = [place for place in places if place.start not in numbers]
        found += [(profile, place) for place in places if _fits(_consumed(profile, place), left)]
    return found


def _fits(consumed: Mapping[str, int], left: Mapping[str, int]) -> bool:
    return all(amount <= left.get(name, 0) for name, amount in consumed.items())


def _adopted(device: Device, owned: Collection[OwnedPartition]) -> tuple[Partition, ...]:
    mine = set(owned)
    return tuple(partition for partition in device.partitions if partition.key not in mine)


def _whole(device: Device, counters: Mapping[str, int] | None = None) -> Offer:
    return Offer(
        name=whole_name(device),
        kind=DEVICE,
        device_uuid=device.uuid,
        dynamic=False,
        profile=None,
        profile_id=None,
        placement=None,
        partition_uuid=None,
        attributes=attributes_of(device, None),
        capacities=published(device.capacities),
        counter_set=counter_set_name(device) if counters is not None else None,
        consumes=frozen(counters or {}),
    )


def _possible(device: Device, profile: Profile, placement: Placement) -> Offer:
    return Offer(
        name=(countable_name if placement.is_number else partition_name)(device, profile.name, placement.start),
        kind=PARTITION,
        device_uuid=device.uuid,
        dynamic=True,
        profile=profile.name,
        profile_id=profile.profile_id,
        placement=placement,
        partition_uuid=None,
        attributes=_of_slice(device, profile.name, placement),
        capacities=published(profile.capacities),
        counter_set=counter_set_name(device),
        consumes=_consumed(profile, placement),
    )


def _existing(device: Device, partition: Partition) -> Offer:
    return Offer(
        name=partition_name(device, partition.profile, partition.placement.start),
        kind=PARTITION,
        device_uuid=device.uuid,
        dynamic=False,
        profile=partition.profile,
        profile_id=partition.profile_id,
        placement=partition.placement,
        partition_uuid=partition.uuid,
        attributes=attributes_of(device, partition),
        capacities=published(partition.capacities),
    )


def _of_slice(device: Device, template: str, placement: Placement) -> Mapping[str, AttributeValue]:
    own: dict[str, AttributeValue] = {"type": "vnpu", "parentUUID": device.uuid, "template": template}
    group = group_of(placement)
    if group is not None:
        own["vGroup"] = group
    return MappingProxyType({**device.attributes, **own})


def _consumed(profile: Profile, placement: Placement) -> Mapping[str, int]:
    consumed = {counter(key): amount for key, amount in profile.capacities.items() if amount}
    consumed.update({_place_counter(number): 1 for number in placement.slices})
    return frozen(consumed)


def _consumed_by(device: Device, partition: Partition) -> Mapping[str, int] | None:
    """Return the counters that an existing vNPU consumes; None if the chip does not report its template."""
    profile = device.profile(partition.profile_id)
    return _consumed(profile, partition.placement) if profile is not None else None


def _place_counter(number: int) -> str:
    return f"place-{number}"
