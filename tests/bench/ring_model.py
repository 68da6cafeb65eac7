# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Claims for several chips on nodes with rings, at random moments for random times: how many rings stay whole.

Three ways to choose are compared: what the scheduler makes of a claim's alternatives and constraints, the table by which
Volcano's plugin for such nodes chooses its ring, and the first chips by their index. Time is counted in arrivals.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

CHIPS = 8
RINGS = (frozenset(range(4)), frozenset(range(4, 8)))
#: One ring is asked for half of the time, and mostly by small claims.
SIZES = (1, 1, 1, 2, 2, 4)

Chosen = tuple[int, tuple[int, ...]]  # how good the node is for the claim, 0 the best; and the chips
Choice = Callable[[int, Collection[int]], "Chosen | None"]


@dataclass(frozen=True)
class Outcome:
    """What came of a trace: whole free rings on average over time, claims served, and claims whose chips lie in two rings."""

    whole: float
    served: int
    split: int


def allocate(spec: Mapping[str, Any], free: Mapping[int, Mapping[str, Any]]) -> tuple[str, tuple[int, ...]] | None:
    """What the scheduler does on one node: the first alternative for which there are devices, the first that satisfy it.

    ``free`` are the attributes of the devices by their numbers, which is the order in which they are published.
    """
    (request,) = spec["devices"]["requests"]
    for wish in request.get("firstAvailable") or [{"name": "", **request["exactly"]}]:
        full = f"{request['name']}/{wish['name']}"
        shared = [each["matchAttribute"] for each in spec["devices"].get("constraints", ()) if full in each["requests"]]
        for chosen in combinations(sorted(free), wish["count"]):
            values = [[free[each].get(name.partition("/")[2]) for each in chosen] for name in shared]
            if all(None not in each and len(set(each)) == 1 for each in values):
                return wish["name"], chosen
    return None


def by_claim(specs: Mapping[int, Mapping[str, Any]], chips: Mapping[int, Mapping[str, Any]]) -> Choice:
    """Choose as the scheduler does with these claims; a node where an earlier alternative fits is better."""

    def choose(count: int, free: Collection[int]) -> Chosen | None:
        found = allocate(specs[count], {each: chips[each] for each in free})
        if found is None:
            return None
        (request,) = specs[count]["devices"]["requests"]
        ranks = [each["name"] for each in request.get("firstAvailable", [{"name": ""}])]
        return ranks.index(found[0]), found[1]

    return choose


def by_ring(count: int, free: Collection[int]) -> Chosen | None:
    """Choose as Volcano's plugin does: the ring that is left the least useful; a claim that no ring can serve waits."""
    for rank, wanted in enumerate({1: (1, 3, 2, 4), 2: (2, 4, 3), 4: (4,)}[count]):
        for ring in RINGS:
            here = sorted(ring & set(free))
            if len(here) == wanted:
                return rank, tuple(here[:count])
    return None


def by_index(count: int, free: Collection[int]) -> Chosen | None:
    """Choose the first chips, wherever they are."""
    return (0, tuple(sorted(free)[:count])) if len(free) >= count else None


def play(choose: Choice, *, nodes: int, load: float, seed: int, claims: int) -> Outcome:
    """Play a trace; the same seed gives the same claims. ``load`` is the part of all chips that would be used if all got in."""
    chance = random.Random(seed)
    staying = load * CHIPS * nodes / (sum(SIZES) / len(SIZES))
    free = [set(range(CHIPS)) for _node in range(nodes)]
    leaving: list[tuple[float, int, int, tuple[int, ...]]] = []
    now = last = whole = 0.0
    served = split = 0
    for number in range(claims):
        now += chance.expovariate(1.0)
        count, leaves = chance.choice(SIZES), now + chance.expovariate(1 / staying)
        while leaving and leaving[0][0] <= now:
            moment, _number, node, chips = heapq.heappop(leaving)
            whole, last = whole + (moment - last) * _whole(free), moment
            free[node].update(chips)
        whole, last = whole + (now - last) * _whole(free), now
        found = [(each[0], node, each[1]) for node in range(nodes) if (each := choose(count, free[node])) is not None]
        if found:
            _rank, node, chips = min(found)
            free[node] -= set(chips)
            heapq.heappush(leaving, (leaves, number, node, chips))
            served += 1
            split += not any(ring.issuperset(chips) for ring in RINGS)
    return Outcome(whole / now, served, split)


def total(outcomes: Sequence[Outcome]) -> Outcome:
    """Add up the outcomes of several traces."""
    return Outcome(sum(o.whole for o in outcomes), sum(o.served for o in outcomes), sum(o.split for o in outcomes))


def _whole(free: Sequence[Collection[int]]) -> int:
    return sum(ring.issubset(each) for each in free for ring in RINGS)
