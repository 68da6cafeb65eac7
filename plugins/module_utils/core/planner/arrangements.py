# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Enumerate the sets of partitions that fit on a device of one kind, for the relevant profiles.

A set is an integer whose bits are places (a profile at a placement), and a count for each profile without places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..errors import Unsupported
from ..model import Device, OwnedPartition, Placement, Profile
from ..partitioning import capacity as partitioning_capacity

#: The maximum number of sets to enumerate.
MOST = 200_000

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Arrangement:
    """One set: ``bits`` of places, and ``counts`` of all partitions by profile."""

    bits: int
    counts: Counts


class Arrangements:
    """The sets of one kind of device, for some of its profiles."""

    def __init__(self, device: Device, profile_ids: Collection[int]) -> None:
        self.profiles: tuple[Profile, ...] = tuple(
            sorted(
                (each for each in device.profiles if each.profile_id in profile_ids and each.placements),
                key=lambda each: (-each.size, each.profile_id),
            )
        )
        self._device = device
        self.places: tuple[tuple[int, Placement], ...] = tuple(
            (number, placement)
            for number, profile in enumerate(self.profiles)
            if not profile.is_numbered
            for placement in profile.placements
        )
        self._bit = {
            (self.profiles[number].profile_id, place.start, place.size): 1 << at
            for at, (number, place) in enumerate(self.places)
        }
        self._masks = [
            sum(1 << at for at, (number, _place) in enumerate(self.places) if number == profile)
            for profile in range(len(self.profiles))
        ]
        self.all: tuple[Arrangement, ...] = tuple(self._enumerate())
        by_counts: dict[Counts, list[int]] = {}
        for each in self.all:
            by_counts.setdefault(each.counts, []).append(each.bits)
        #: The sets grouped by their counts.
        self.by_counts: tuple[tuple[Counts, tuple[int, ...]], ...] = tuple(
            (counts, tuple(sets)) for counts, sets in by_counts.items()
        )

    def bit(self, key: OwnedPartition) -> int:
        """Return the bit of a partition's place; 0 if its profile has no places.

        Raises KeyError for an unknown place.
        """
        if self.profiles[self.number(key[0])].is_numbered:
            return 0
        return self._bit[key]

    def number(self, profile_id: int) -> int:
        """Return the position of a profile in ``counts``. Raises KeyError."""
        for number, profile in enumerate(self.profiles):
            if profile.profile_id == profile_id:
                return number
        raise KeyError(profile_id)

    def mask(self, number: int) -> int:
        """Return the bits of all places of a profile; 0 without places."""
        return self._masks[number]

    def starts(self, bits: int) -> Iterator[tuple[Profile, Placement]]:
        """Yield the places of some bits, sorted by start."""
        found = [self.places[at] for at in range(len(self.places)) if bits >> at & 1]
        for number, place in sorted(found, key=lambda each: (each[1].start, each[0])):
            yield self.profiles[number], place

    def _enumerate(self) -> Iterator[Arrangement]:
        limits = dict(partitioning_capacity.totals(self._device))
        numbers = max((len(each.placements) for each in self.profiles if each.is_numbered), default=0)
        found = 0
        # Each branch: the next profile, its next placement, and the resources that previous partitions use.
        stack: list[tuple[int, int, int, int, Counts, dict[str, int], int]] = [
            (0, 0, 0, 0, (0,) * len(self.profiles), limits, numbers)
        ]
        while stack:
            number, at, taken, bits, counts, left, unnumbered = stack.pop()
            if number == len(self.profiles):
                found += 1
                if found > MOST:
                    raise Unsupported(
                        f"{self._device.product} can be cut in more than {MOST} ways into {', '.join(each.name for each in self.profiles)}",
                        hint="Ask for fewer different profiles at once.",
                    )
                yield Arrangement(bits, counts)
                continue
            profile = self.profiles[number]
            stack.append((number + 1, 0, taken, bits, counts, left, unnumbered))
            if counts[number] >= profile.maximum:
                continue
            after = {key: amount - profile.capacities.get(key, 0) for key, amount in left.items()}
            if min(after.values(), default=0) < 0:
                continue
            more = (*counts[:number], counts[number] + 1, *counts[number + 1 :])
            if profile.is_numbered:
                if unnumbered:
                    stack.append((number, 0, taken, bits, more, after, unnumbered - 1))
                continue
            for place in range(at, len(profile.placements)):
                covered = partitioning_capacity.mask(profile.placements[place])
                if not taken & covered:
                    own = self._bit[
                        (profile.profile_id, profile.placements[place].start, profile.placements[place].size)
                    ]
                    stack.append((number, place + 1, taken | covered, bits | own, more, after, unnumbered))


def fewer(left: Sequence[int], right: Sequence[int]) -> bool:
    """Return whether each count on the left is at most the count on the right."""
    return all(one <= other for one, other in zip(left, right))
