# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Which chips can be published as one device: the pair of a card, a ring, a whole node. Pure.

A device that stands for several chips takes all of their counters, so that it and its members never go out together. The
API server takes a device with counters of two sets at most, and a set with 32 counters: that decides how chips have to share
sets, and which groups can be had at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..slices import MOST_COUNTERS_IN_SET

#: The most counter sets that one device takes of.
MOST_SETS_OF_A_DEVICE = 2

Group = tuple[int, ...]


@dataclass(frozen=True)
class Composition:
    """Which chips share a counter set, and which groups can be devices; all are given by their chips' physical ids."""

    sets: tuple[Group, ...]
    possible: tuple[Group, ...]
    impossible: tuple[Group, ...]

    def sets_of(self, group: Iterable[int]) -> tuple[Group, ...]:
        """Return the counter sets that a device of these chips takes of."""
        members = set(group)
        return tuple(each for each in self.sets if members & set(each))


def compose(counters: Mapping[int, int], groups: Iterable[Sequence[int]]) -> Composition:
    """Decide how chips share counter sets, so that as many groups as possible can be devices, small ones before large ones.

    ``counters`` is how many counters each chip has, by its physical id. Chips of no group keep a set of their own.
    """
    sets: list[Group] = [(chip,) for chip in sorted(counters)]
    possible: list[Group] = []
    impossible: list[Group] = []
    wanted = sorted({tuple(sorted(group)) for group in groups if len(group) > 1}, key=lambda each: (len(each), each))
    for group in wanted:
        mine = [each for each in sets if set(each) & set(group)]
        joined = _join(mine, counters)
        if joined is None:
            impossible.append(group)
            continue
        sets = [each for each in sets if each not in mine] + joined
        possible.append(group)
    return Composition(tuple(sorted(sets)), tuple(possible), tuple(impossible))


def listed_first(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return groups in the order in which they are published: a claim for few chips comes last to what is still whole.

    Groups of one size go from the end, because single chips are taken from the beginning.
    """
    return tuple(sorted(groups, key=lambda each: (len(each), [-chip for chip in each])))


def _join(sets: Sequence[Group], counters: Mapping[int, int]) -> list[Group] | None:
    """Join sets until there are so few that one device can take of all; None where they would become too large."""
    bins: list[Group] = []
    for each in sorted(sets, key=lambda group: (-_size(group, counters), group)):
        fitting = next((b for b in bins if _size(b, counters) + _size(each, counters) <= MOST_COUNTERS_IN_SET), None)
        if fitting is None:
            bins.append(each)
        else:
            bins[bins.index(fitting)] = tuple(sorted((*fitting, *each)))
    return bins if len(bins) <= MOST_SETS_OF_A_DEVICE else None


def _size(group: Group, counters: Mapping[int, int]) -> int:
    return sum(counters[chip] for chip in group)
