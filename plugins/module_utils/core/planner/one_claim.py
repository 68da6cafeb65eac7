# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find devices for one claim on one node with the fewest changes. No side effects.

The explanation of pending claims uses it, which must work without HiGHS. Claims that have devices keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import sub
from typing import Any

from ..errors import Unsupported
from .problem import Amounts, Group, Problem
from .solution import Solution, Use

#: The maximum number of combinations of devices that a claim still needs.
MOST = 5_000

Counts = tuple[int, ...]
Items = tuple[int, ...]
#: The number of deleted partitions, whether the device changes, the sum of the items' positions in their lists, and
#: whether a free whole device is partitioned.
Cost = tuple[int, int, int, int]


def place_claim(problem: Problem) -> Solution | None:
    """Return the solution that serves the problem's only claim at the lowest cost; None if no solution serves it.

    Raises Unsupported if the claim requests too many different devices.
    """
    (demand,), (wanted,) = problem.demands, problem.wants
    needed: dict[Items, list[int]] = {}
    for number, (part, items) in enumerate(zip(demand.parts, wanted)):
        needed.setdefault(items, []).extend([number] * part.devices)
    start = tuple(map(len, needed.values()))
    if prod(count + 1 for count in start) > MOST:
        raise Unsupported(
            f"The claim requests {demand.devices} devices of {len(start)} kinds at once, which is too much to plan",
            hint="Request fewer different devices in one claim.",
        )
    # For each number of devices that are still needed: the lowest cost, and the uses as a linked list.
    best: dict[Counts, tuple[Cost, Any]] = {start: ((0, 0, 0, 0), None)}
    for group in problem.groups:
        options = _options(problem, group, tuple(needed), start)
        for device in group.members:
            after: dict[Counts, tuple[Cost, Any]] = {}
            # Of equal devices the first one is used, because the smallest counts come first.
            for left, (cost, uses) in sorted(best.items(), key=lambda each: each[0]):
                for counts, (own, way) in options.items():
                    rest = tuple(map(sub, left, counts))
                    total = (cost[0] + own[0], cost[1] + own[1], cost[2] + own[2], cost[3] + own[3])
                    if min(rest, default=0) >= 0 and (rest not in after or total < after[rest][0]):
                        after[rest] = total, (device, way, uses)
            best = after
    if (0,) * len(start) not in best:
        return None
    _cost, chosen = best[(0,) * len(start)]
    parts = list(needed.values())
    found: dict[int, tuple[Use, ...]] = {}
    while chosen is not None:
        device, way, chosen = chosen
        found[device] = tuple(Use(0, parts[at].pop(), item) for at, items in enumerate(way) for item in items)
    return Solution({device: uses for device, uses in sorted(found.items()) if uses}, {}, (1,), (1,))


def _options(
    problem: Problem, group: Group, lists: Sequence[Items], most: Counts
) -> dict[Counts, tuple[Cost, tuple[Items, ...]]]:
    """Return the cheapest use of a device of a group, with its items by list, for each number of items by list."""
    wanted = {item for items in lists for item in items}
    costs: dict[Amounts, tuple[int, int]] = {}
    has_whole = False
    for one in group.configurations:
        if one.moved:
            continue
        has_whole = has_whole or any(problem.items[item].profile is None for item, _count in one.offers)
        offers = tuple((item, count) for item, count in one.offers if item in wanted)
        costs[offers] = min(costs.get(offers, (one.destroyed, one.touched)), (one.destroyed, one.touched))
    best: dict[Counts, tuple[Cost, tuple[Items, ...]]] = {}
    for offers, cost in costs.items():
        for way in _ways(offers, lists, most):
            ranks = sum(lists[at].index(item) for at, items in enumerate(way) for item in items)
            is_cut = any(problem.items[item].profile is not None for items in way for item in items)
            option = (*cost, ranks, int(has_whole and is_cut)), way
            counts = tuple(map(len, way))
            best[counts] = min(best.get(counts, option), option)
    return best


def _ways(offers: Amounts, lists: Sequence[Items], most: Counts) -> list[tuple[Items, ...]]:
    """Return all ways to use some of the offered items for the lists that contain them, up to ``most`` by list."""
    ways: list[tuple[Items, ...]] = [((),) * len(lists)]
    for item, count in offers:
        found = [(way, count) for way in ways]
        for at, items in enumerate(lists):
            if item in items:
                found = [
                    ((*way[:at], way[at] + (item,) * some, *way[at + 1 :]), left - some)
                    for way, left in found
                    for some in range(min(left, most[at] - len(way[at])) + 1)
                ]
        ways = [way for way, _left in found]
    return ways
