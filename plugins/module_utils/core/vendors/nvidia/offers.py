# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The published devices of a GPU: names, attributes, capacities, and counters, as in NVIDIA's DRA driver.

The names are those of kubernetes-sigs/dra-driver-nvidia-gpu (GKP/deviceinfo.go, mig.go, partitions.go). This module has
no side effects.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from ...dra.resource_slices import MOST_ATTRIBUTES_AND_CAPACITIES
from ...model import (
    DEVICE,
    PARTITION,
    PASSTHROUGH,
    AttributeValue,
    CounterSet,
    Device,
    Offer,
    OwnedPartition,
    Partition,
    Passthrough,
    Placement,
    Profile,
    frozen,
)
from ...partitioning import capacity as partitioning_capacity

MULTIPROCESSORS = "multiprocessors"
_OF_EVERY_PCI_DEVICE = (
    "productName",
    "resource.kubernetes.io/pciBusID",
    "resource.kubernetes.io/pcieRoot",
    "resource.kubernetes.io/numaNode",
)
#: The counter of a GPU without other counters.
_WHOLE = "whole"


def whole_name(device: Device) -> str:
    """Return the published name of a whole GPU."""
    return f"gpu-{device.minor if device.name_number is None else device.name_number}"


def partition_name(device: Device, profile: str, profile_id: int, placement: Placement) -> str:
    """Return the published name of a MIG device. It is the same for an existing and a possible one."""
    spelled = profile.replace(".", "").replace("+", "-")
    return f"{whole_name(device)}-mig-{spelled}-{profile_id}-{placement.start}"


def counter_set_name(device: Device) -> str:
    """Return the name of a GPU's counter set."""
    return f"{whole_name(device)}-counter-set"


def passthrough_name(number: int) -> str:
    """Return the published name of a GPU for a virtual machine."""
    return f"gpu-vfio-{number}"


def offers(
    device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
) -> tuple[Offer, ...]:
    """Return the offers of a GPU.

    Without ``dynamic``, these are the existing partitions if MIG is on, else the whole GPU. With ``dynamic``, these are
    the whole GPU and every placement of every profile, which share one counter set. If a mode change needs a reset,
    only the offers of the current mode are returned. Existing partitions that are not ``owned`` are published
    unchanged, and offers that overlap them are left out.

    The order fits the scheduler's first fit: small partitions first, each profile from the placement that blocks the
    fewest others, and the whole GPU last. Taints are added later from the GPU's health over time (``core/health/tracker.py``).

    With ``passthrough``, each whole GPU has a second offer for a virtual machine. Both consume all of the same
    counters, so the published devices do not change when one of them is allocated.
    """
    published = _for_containers(device, dynamic, owned)
    if passthrough and device.passthrough is not None:
        return _with_sibling(device, device.passthrough, published)
    return published


def _with_sibling(device: Device, facts: Passthrough, published: tuple[Offer, ...]) -> tuple[Offer, ...]:
    whole = next((offer for offer in published if offer.kind == DEVICE), None)
    if whole is None:
        return published
    counters, consumed = counter_set_name(device), whole.consumes if whole.counter_set else counter_set(device).counters
    whole = replace(whole, counter_set=counters, consumes=consumed)
    kept = tuple(whole if offer.kind == DEVICE else offer for offer in published)
    sibling = replace(
        whole,
        name=passthrough_name(facts.number),
        kind=PASSTHROUGH,
        attributes=attributes_for_machine(device),
        capacities=frozen({"addressableMemory": facts.memory_bytes} if facts.memory_bytes else {}),
    )
    return (*kept, sibling)


def _for_containers(device: Device, dynamic: bool, owned: Collection[OwnedPartition]) -> tuple[Offer, ...]:
    partitioning = device.partitioning
    if not dynamic or not partitioning.supported or not device.profiles:
        if partitioning.supported and partitioning.enabled:
            return tuple(_existing(device, partition) for partition in device.partitions if partition.uuid)
        return (_whole(device),)
    if partitioning.needs_reset and not partitioning.enabled:
        return (_whole(device),)
    adopted = _adopted(device, owned)
    published = [_existing(device, partition) for partition in adopted if partition.uuid]
    left = counter_set(device, owned).counters
    for profile, placement in order(device.profiles):
        offer = _possible(device, profile, placement)
        if any(placement.overlaps(partition.placement) for partition in adopted):
            continue
        if all(amount <= left.get(counter, 0) for counter, amount in offer.consumes.items()):
            published.append(offer)
    if not adopted and not partitioning.needs_reset:
        published.append(_whole(device, counter_set(device).counters))
    return tuple(published)


def attributes_of(device: Device, partition: Partition | None) -> Mapping[str, AttributeValue]:
    """Return the attributes of a whole GPU, or of one of its existing MIG devices."""
    if partition is None:
        return _attributes(device, {"type": "gpu", "uuid": device.uuid, **device.whole_device_attributes})
    own = {"type": "mig", "uuid": partition.uuid, "parentUUID": device.uuid, "profile": partition.profile}
    return _attributes(device, own)


def attributes_for_machine(device: Device) -> Mapping[str, AttributeValue]:
    """Return the attributes of a GPU for a virtual machine."""
    common = {name: value for name, value in device.attributes.items() if name in _OF_EVERY_PCI_DEVICE}
    attributes: dict[str, AttributeValue] = {
        "type": "vfio",
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_DNS, device.pci_address)),
        "vendorID": f"0x{device.pci_device_id & 0xFFFF:04x}",
        "deviceID": f"0x{device.pci_device_id >> 16:04x}",
        "iommuFDEnabled": device.passthrough is not None and device.passthrough.iommufd,
        **common,
        **device.whole_device_attributes,
    }
    return MappingProxyType(attributes)


def shareable_capacities(device: Device) -> Mapping[str, int]:
    """Return the capacities of a whole GPU that claims can share: its memory, and its multiprocessors for MPS.

    The multiprocessors are those of the largest partition, so they are known only for boards with partitions.
    """
    largest = max((profile.capacities.get(MULTIPROCESSORS, 0) for profile in device.profiles), default=0)
    return {**device.capacities, **({MULTIPROCESSORS: largest} if largest else {})}


def counter_set(device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
    """Return the counter set of a GPU's dynamic offers; with ``owned``, without the capacity of partitions that are not owned."""
    totals: dict[str, int] = {
        _counter(key): total for key, total in partitioning_capacity.totals(device).items() if total
    }
    for number in range(device.memory_slices):
        totals[f"memory-slice-{number}"] = 1
    for counted in partitioning_capacity.counted_profiles(device):
        totals[_profile_counter(counted)] = counted.maximum
    if owned is not None:
        for partition in _adopted(device, owned):
            profile = device.profile(partition.profile_id)
            for counter, amount in (_consumed(device, profile, partition.placement) if profile else {}).items():
                totals[counter] = max(totals.get(counter, 0) - amount, 0)
    return CounterSet(counter_set_name(device), frozen(totals or {_WHOLE: 1}))


def order(profiles: Collection[Profile]) -> tuple[tuple[Profile, Placement], ...]:
    """Return all placements in the order in which they should be allocated.

    Profiles are ordered from small to large, plain ones before those with special engines. The placements of a profile
    are ordered by the memory slices of all other placements that they overlap.
    """
    every = [(profile, placement) for profile in profiles for placement in profile.placements]

    def spoils(placement: Placement) -> int:
        return sum(other.size for _profile, other in every if other.overlaps(placement))

    def rank(profile: Profile) -> tuple[int, int, int, int]:
        engines = sum(profile.capacities[key] for key in ("decoders", "encoders", "jpegEngines", "ofaEngines"))
        return (
            profile.size,
            profile.capacities["multiprocessors"],
            int("+" in profile.name or "-" in profile.name),
            engines,
        )

    return tuple(sorted(every, key=lambda each: (rank(each[0]), each[0].profile_id, spoils(each[1]), each[1].start)))


def _adopted(device: Device, owned: Collection[OwnedPartition]) -> tuple[Partition, ...]:
    mine = set(owned)
    return tuple(partition for partition in device.partitions if partition.key not in mine)


def _whole(device: Device, counters: Mapping[str, int] | None = None) -> Offer:
    capacities: dict[str, int] = dict(device.capacities)
    if counters is not None:
        for key in partitioning_capacity.capacity_keys(device.profiles):
            largest = max((profile.capacities[key] for profile in device.profiles), default=0)
            capacities[key] = max(capacities.get(key, 0), largest)
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
        capacities=frozen(capacities),
        counter_set=counter_set_name(device) if counters is not None else None,
        consumes=frozen(counters or {}),
    )


def _possible(device: Device, profile: Profile, placement: Placement) -> Offer:
    return Offer(
        name=partition_name(device, profile.name, profile.profile_id, placement),
        kind=PARTITION,
        device_uuid=device.uuid,
        dynamic=True,
        profile=profile.name,
        profile_id=profile.profile_id,
        placement=placement,
        partition_uuid=None,
        attributes=_attributes(device, {"type": "mig", "parentUUID": device.uuid, "profile": profile.name}),
        capacities=profile.capacities,
        counter_set=counter_set_name(device),
        consumes=_consumed(device, profile, placement),
    )


def _existing(device: Device, partition: Partition) -> Offer:
    attributes = attributes_of(device, partition)
    capacities = dict(partition.capacities)
    slices = {f"memorySlice{number}": 1 for number in partition.placement.slices}
    if len(attributes) + len(capacities) + len(slices) <= MOST_ATTRIBUTES_AND_CAPACITIES:
        capacities.update(slices)
    return Offer(
        name=partition_name(device, partition.profile, partition.profile_id, partition.placement),
        kind=PARTITION,
        device_uuid=device.uuid,
        dynamic=False,
        profile=partition.profile,
        profile_id=partition.profile_id,
        placement=partition.placement,
        partition_uuid=partition.uuid,
        attributes=attributes,
        capacities=frozen(capacities),
    )


def _attributes(device: Device, own: Mapping[str, AttributeValue]) -> Mapping[str, AttributeValue]:
    return MappingProxyType({**own, **device.attributes})


def _consumed(device: Device, profile: Profile, placement: Placement) -> Mapping[str, int]:
    consumed = {_counter(key): amount for key, amount in profile.capacities.items() if amount}
    consumed.update({f"memory-slice-{number}": 1 for number in placement.slices})
    if profile in partitioning_capacity.counted_profiles(device):
        consumed[_profile_counter(profile)] = 1
    return frozen(consumed)


def _counter(capacity: str) -> str:
    return re.sub(r"([A-Z])", lambda found: "-" + found.group(1).lower(), capacity)


def _profile_counter(profile: Profile) -> str:
    return f"profile-{profile.profile_id}"
