# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a fleet gives to claims exactly as it is today. Who plans again from what came of a plan finds that plan here, and nothing to change.

Where each claim wants one device this is an assignment: who is served earlier keeps being served, and makes room for others by taking another
item that will do as well. The most claims there can be are served, from the highest priority on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from .problem import Amounts, Problem

Assigned = dict[tuple[int, int], int]  # by the numbers of a demand and of an item, how many claims of it have it


def assign(problem: Problem) -> dict[int, list[tuple[int, int]]] | None:
    """Return, by devices' numbers, the demands that get something of a device as it is, each with the item it gets: as many claims as can be.

    None where that is no assignment: claims want several devices of one node, or a device offers one thing or another.
    """
    if problem.by_node:
        return None
    offers: dict[int, Amounts] = {}
    room: dict[int, int] = {}
    for group in problem.groups:
        as_they_are = [one.offers for one in group.configurations if not (one.moved or one.destroyed or one.touched)]
        if len(as_they_are) != 1:
            return None
        for item, count in as_they_are[0]:
            room[item] = room.get(item, 0) + count * len(group.members)
        offers.update(dict.fromkeys(group.members, as_they_are[0]))
    assigned = _assign(problem, room)
    found: dict[int, list[tuple[int, int]]] = {}
    for device, amounts in sorted(offers.items()):
        for item, count in amounts:
            found.setdefault(device, []).extend(_take(assigned, item, count))
    return found


def _assign(problem: Problem, room: Mapping[int, int]) -> Assigned:
    left = dict(room)
    assigned: Assigned = {}
    for number in sorted(range(len(problem.demands)), key=lambda each: (-problem.demands[each].priority, each)):
        lacking = problem.demands[number].count
        while lacking:
            served = _serve(problem, number, lacking, assigned, left)
            if not served:
                break
            lacking -= served
    return assigned


def _serve(problem: Problem, number: int, most: int, assigned: Assigned, left: dict[int, int]) -> int:
    """Serve claims of a demand, ``most`` at most; others take other items for it where they can. Return how many were served."""
    # By demand: who would take its place with which item. The first one takes nobody's.
    before: dict[int, tuple[int, int] | None] = {number: None}
    waiting = deque([number])
    while waiting:
        demand = waiting.popleft()
        (items,) = problem.wants[demand]
        for item in items:
            if left.get(item, 0):
                return _shift(demand, item, before, most, assigned, left)
            for (other, theirs), count in assigned.items():
                if theirs == item and count and other not in before:
                    before[other] = (demand, item)
                    waiting.append(other)
    return 0


def _shift(
    demand: int,
    item: int,
    before: Mapping[int, tuple[int, int] | None],
    most: int,
    assigned: Assigned,
    left: dict[int, int],
) -> int:
    """Let a demand take an item there is room for, and each one before it the item that becomes free; return how many did."""
    steps = [(demand, item)]
    count = min(most, left[item])
    while (earlier := before[steps[-1][0]]) is not None:
        count = min(count, assigned[(steps[-1][0], earlier[1])])
        steps.append(earlier)
    left[item] -= count
    for at, step in enumerate(steps):
        assigned[step] = assigned.get(step, 0) + count
        if at + 1 < len(steps):
            assigned[(step[0], steps[at + 1][1])] -= count
    return count


def _take(assigned: Assigned, item: int, count: int) -> list[tuple[int, int]]:
    """Take up to so many claims out of those that have an item."""
    found: list[tuple[int, int]] = []
    for demand, theirs in sorted(assigned):
        if theirs == item:
            some = min(assigned[(demand, item)], count - len(found))
            assigned[(demand, item)] -= some
            found += [(demand, item)] * some
    return found
