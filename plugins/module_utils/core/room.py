# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What fits on one device together: memory slices, engines, and how many of each profile.

One definition for the counters that the scheduler sees and for the layout planner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from .model import Device, Partition, Placement, Profile

MEMORY = "memory"  # the one capacity that every vendor's partitions share out, in bytes

Place = tuple[Profile, Placement]


def capacity_keys(profiles: Collection[Profile]) -> tuple[str, ...]:
    """Return the names of what a device shares out among partitions: those of its profiles, and memory."""
    return tuple(dict.fromkeys([*(key for profile in profiles for key in profile.capacities), MEMORY]))


def totals(device: Device) -> Mapping[str, int]:
    """Return how much of each capacity a device has to share out among partitions.

    It is what the largest profile gets, or more where the driver itself says that several smaller ones, which together
    take more, fit at once, or that the device has more.
    """
    found: dict[str, int] = {}
    for key in capacity_keys(device.profiles):
        shares = [profile.capacities.get(key, 0) * max(profile.maximum, 1) for profile in device.profiles]
        told = max(device.capacities.get(key, 0), device.memory_bytes if key == MEMORY else 0)
        found[key] = max([*shares, told], default=0)
    return found


def counted_profiles(device: Device) -> tuple[Profile, ...]:
    """Return the profiles whose maximum neither their placements nor the shared engines enforce."""
    counted: list[Profile] = []
    engines = {key: total for key, total in totals(device).items() if key != MEMORY}
    for profile in device.profiles:
        if profile.maximum >= disjoint(profile.placements):
            continue
        enforced = any(profile.capacities.get(key, 0) * (profile.maximum + 1) > total for key, total in engines.items())
        if not enforced:
            counted.append(profile)
    return tuple(counted)


def disjoint(placements: Iterable[Placement]) -> int:
    """Return how many of the placements, places or numbers, can be taken at once."""
    taken: list[Placement] = []
    for placement in sorted(placements, key=lambda each: (each.end, each.start)):
        if not taken or not placement.clashes(taken[-1]):
            taken.append(placement)
    return len(taken)


def fits(device: Device, places: Sequence[Place]) -> bool:
    """Whether partitions at these places can exist together on an otherwise empty device."""
    taken = 0
    numbers: set[int] = set()
    left = dict(totals(device))
    counts: dict[int, int] = {}
    for profile, placement in places:
        covered = mask(placement)
        if taken & covered or (placement.is_number and placement.start in numbers):
            return False
        taken |= covered
        if placement.is_number:
            numbers.add(placement.start)
        counts[profile.profile_id] = counts.get(profile.profile_id, 0) + 1
        if counts[profile.profile_id] > profile.maximum:
            return False
        for key, amount in profile.capacities.items():
            left[key] -= amount
            if left[key] < 0:
                return False
    return True


def mask(placement: Placement) -> int:
    """Return the memory slices of a placement as bits; a number covers none."""
    return ((1 << placement.size) - 1) << placement.start


def in_the_way(placement: Placement, partitions: Collection[Partition]) -> list[Partition]:
    """Return the partitions that keep another one from a placement; one that may as well lie where nothing is does not."""

    def gives_way(partition: Partition) -> bool:
        others = [each.placement for each in partitions if each is not partition]
        return any(not any(place.clashes(each) for each in (placement, *others)) for place in partition.elsewhere)

    return [each for each in partitions if each.placement.clashes(placement) and not gives_way(each)]
