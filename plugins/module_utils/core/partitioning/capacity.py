# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Determine which partitions fit on one device together: memory slices, engines, and the maximum of each profile.

The counters of the scheduler and the layout planner use the same definitions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..model import Device, Partition, Placement, Profile

MEMORY = "memory"  # the one capacity that the partitions of every vendor use, in bytes

#: A partition to create: its profile and its placement.
Place = tuple[Profile, Placement]


def capacity_keys(profiles: Collection[Profile]) -> tuple[str, ...]:
    """Return the names of the capacities that partitions divide: those of the device's profiles, and memory."""
    return tuple(dict.fromkeys([*(key for profile in profiles for key in profile.capacities), MEMORY]))


def totals(device: Device) -> Mapping[str, int]:
    """Return the total of each capacity that partitions of a device can use.

    This is the largest of these amounts: the amount of ``maximum`` partitions of each profile, and the amount that the
    device itself reports.
    """
    found: dict[str, int] = {}
    for key in capacity_keys(device.profiles):
        shares = [profile.capacities.get(key, 0) * max(profile.maximum, 1) for profile in device.profiles]
        capacity = max(device.capacities.get(key, 0), device.memory_bytes if key == MEMORY else 0)
        found[key] = max([*shares, capacity], default=0)
    return found


def counted_profiles(device: Device) -> tuple[Profile, ...]:
    """Return the profiles whose maximum is enforced neither by their placements nor by the shared engines."""
    engines = {key: total for key, total in totals(device).items() if key != MEMORY}

    def exceeds_engines(profile: Profile, count: int) -> bool:
        return any(profile.capacities.get(key, 0) * count > total for key, total in engines.items())

    return tuple(
        profile
        for profile in device.profiles
        if profile.maximum < count_disjoint(profile.placements) and not exceeds_engines(profile, profile.maximum + 1)
    )


def count_disjoint(placements: Iterable[Placement]) -> int:
    """Return the maximum number of these placements (positions or numbers) that can be used together."""
    taken: list[Placement] = []
    for placement in sorted(placements, key=lambda each: (each.end, each.start)):
        if not taken or not placement.conflicts_with(taken[-1]):
            taken.append(placement)
    return len(taken)


def fits(device: Device, places: Sequence[Place]) -> bool:
    """Return whether partitions at these places can exist together on an otherwise empty device."""
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
    """Return the memory slices of a placement as a bit mask; 0 for a number."""
    return ((1 << placement.size) - 1) << placement.start


def overlapping(placement: Placement, partitions: Collection[Partition]) -> list[Partition]:
    """Return the partitions that block a placement. A partition with an equivalent free placement does not block it."""

    def has_free_equivalent(partition: Partition) -> bool:
        used = [placement, *(each.placement for each in partitions if each is not partition)]
        return any(not any(place.conflicts_with(each) for each in used) for place in partition.equivalent_placements)

    return [each for each in partitions if each.placement.conflicts_with(placement) and not has_free_equivalent(each)]
