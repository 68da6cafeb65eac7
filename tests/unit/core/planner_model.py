# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Small fleets for tests of the planner, as nodes report them, and the best plan for a fleet from a full search.

The search shares no code with the planner. It uses the board descriptions, device by device and claim by claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import board_model
from board_model import Place, all_states, board, device
from hypothesis import strategies as st

Json = dict[str, Any]
WHOLE = (-1, -1)
Vector = tuple[int, ...]


@dataclass(frozen=True)
class Small:
    """One device: board, partitions, held partitions, whether a claim holds the whole device, whether it is partitioned, and its node."""

    board: str
    places: tuple[Place, ...] = ()
    held: frozenset[Place] = frozenset()
    occupied: bool = False
    enabled: bool = False
    node: str = "node-0"


@dataclass(frozen=True)
class Wish:
    """Requested claims: how many, and for each the number of devices on one node, the profile, or the memory in bytes. Default: whole."""

    count: int
    priority: int = 0
    profile: str = ""
    memory: int = 0
    devices: int = 1

    def document(self, number: int) -> Json:
        found: Json = {
            "name": f"wish-{number}",
            "count": self.count,
            "priority": self.priority,
            "devices": self.devices,
        }
        if self.profile:
            found["profile"] = self.profile
        if self.memory:
            found["memory"] = str(self.memory)
        return found

    def takes(self, name: str, profile_id: int) -> bool:
        """Return whether a partition or the whole board (-1) satisfies the request."""
        entry = board(name)
        if profile_id == WHOLE[0]:
            return not self.profile and entry["memory"]["total_mib"] * board_model.MIB >= self.memory
        known = next(each for each in entry["mig"]["profiles"] if each["id"] == profile_id)
        if self.profile:
            return bool(known["name"] == self.profile)
        return self.memory > 0 and known["memory_mib"] * board_model.MIB >= self.memory


def answers(fleet: Sequence[Small], *, rule: Json | None = None) -> dict[str, Json]:
    """Return the fleet in the form that the module accelerator_report returns."""
    from ansible_collections.dra.accelerators.plugins.module_utils._report.device_facts import device_facts

    nodes: dict[str, Json] = {}
    for number, small in enumerate(fleet):
        made = device(small.board, number, places=small.places, enabled=small.enabled)
        facts = device_facts(made)
        kind = {key: facts.pop(key) for key in ("profiles", "memory_slices", "capacities")}
        partitions_by_placement = sorted(small.places, key=lambda place: place[1])
        for place, partition in zip(partitions_by_placement, facts["partitions"]):
            claims = [f"team/claim-{number}-{place[0]}-{place[1]}"] if place in small.held else []
            partition.update(owner="administrator", claims=claims)
        facts["claims"] = [each for one in facts["partitions"] for each in one["claims"]]
        facts["claims"] += [f"team/whole-{number}"] if small.occupied else []
        node = nodes.setdefault(small.node, {"devices": [], "kinds": {}})
        node["kinds"][small.board] = kind
        node["devices"].append({**facts, "kind": small.board, "rule": rule})
    return nodes


def best(fleet: Sequence[Small], wishes: Sequence[Wish], most_moves: int = 0, *, as_it_is: bool = False) -> Vector:
    """Return the value of the best plan: served claims by priority (highest first), then the negative counts of moves,
    deleted partitions, and touched devices.

    With ``as_it_is`` return the best plan that changes nothing.
    """
    priorities = sorted({each.priority for each in wishes}, reverse=True)
    found: Vector | None = None
    known: dict[Any, Vector | None] = {}
    options = [list(_options(each, fleet, wishes, most_moves)) for each in fleet]
    if as_it_is:
        options = [[one for one in each if not any(one[1:])] for each in options]
    for chosen in product(*options):
        moved = sum(len(each[1]) for each in chosen)
        if moved > most_moves:
            continue
        offered: Counter[tuple[str, str, int]] = Counter()
        homeless: Counter[tuple[str, int]] = Counter()
        for small, (offers, lacking, _gone, _touched) in zip(fleet, chosen):
            offered.update((small.node, small.board, each) for each in offers)
            homeless.update((small.board, each) for each in lacking)
        key = (frozenset(offered.items()), frozenset(homeless.items()))
        if key not in known:
            known[key] = _serve(offered, homeless, wishes, priorities)
        served = known[key]
        if served is not None:
            worth = (*served, -moved, -sum(each[2] for each in chosen), -sum(each[3] for each in chosen))
            found = max(found, worth) if found is not None else worth
    assert found is not None, "the unchanged fleet is a plan"
    return found


def _options(
    small: Small, fleet: Sequence[Small], wishes: Sequence[Wish], most_moves: int
) -> Iterator[tuple[Vector, Vector, int, int]]:
    """Yield the options of a board: offered profiles, profiles of claims that have to move, deleted partitions, and whether it is touched."""
    # Held partitions of other boards can move here.
    there_are = {profile for each in fleet if each.board == small.board for profile, _start in each.places}
    relevant = there_are | {
        each["id"]
        for each in board(small.board)["mig"]["profiles"]
        if any(one.takes(small.board, each["id"]) for one in wishes)
    }
    if small.occupied:
        yield (), (), 0, 0
        if not most_moves:
            return
    lost: tuple[int, ...] = (WHOLE[0],) if small.occupied else ()
    free = set(small.places) - small.held
    best: dict[tuple[Vector, Vector], tuple[int, int]] = {}
    for state in all_states(small.board):
        if not {profile for profile, _start in state} <= relevant:
            continue
        there = set(state)
        lacking = small.held - there
        if len(lacking) > most_moves:
            continue
        gone, new = len(free - there), len(there - set(small.places))
        key = (
            tuple(sorted(profile for profile, _start in there - small.held)),
            (*lost, *sorted(profile for profile, _start in lacking)),
        )
        cost = (gone, int(bool(gone or new or lacking)))
        best[key] = min(best.get(key, cost), cost)
    # A device without a layout change keeps its claim: no layout could move it.
    if len(small.held) <= most_moves and not small.occupied:
        key = ((WHOLE[0],), tuple(sorted(profile for profile, _start in small.held)))
        cost = (len(free), int(small.enabled or bool(small.places)))
        best[key] = min(best.get(key, cost), cost)
    for (offers, lacking_now), (gone, touched) in best.items():
        yield offers, lacking_now, gone, touched


def _serve(
    offered: Counter[tuple[str, str, int]],
    homeless: Counter[tuple[str, int]],
    wishes: Sequence[Wish],
    priorities: Sequence[int],
) -> Vector | None:
    """Return the maximum served claims after each moving claim gets the same profile again. Return None if one of them cannot."""
    kinds = sorted(offered)
    claims = [each for each in sorted(wishes, key=lambda one: -one.priority) for _one in range(each.count)]
    nodes = sorted({node for node, _board, _profile in kinds})

    @cache
    def moved(waiting: tuple[tuple[str, int], ...], left: tuple[int, ...]) -> Vector | None:
        if not waiting:
            return served(0, left)
        found = [
            moved(waiting[1:], _less(left, at))
            for at, (_node, name, profile) in enumerate(kinds)
            if (name, profile) == waiting[0] and left[at]
        ]
        return max((each for each in found if each is not None), default=None)

    @cache
    def served(number: int, left: tuple[int, ...]) -> Vector:
        if number == len(claims):
            return (0,) * len(priorities)
        wish = claims[number]
        # If a claim is not served, later equal claims are not served either.
        after = number + 1
        while after < len(claims) and claims[after] == wish:
            after += 1
        most = served(after, left)
        at = priorities.index(wish.priority)
        for node in nodes:
            for more in ways(wish, node, wish.devices, left):
                rest = served(number + 1, more)
                most = max(most, (*rest[:at], rest[at] + 1, *rest[at + 1 :]))
        return most

    def ways(wish: Wish, node: str, devices: int, left: tuple[int, ...]) -> set[tuple[int, ...]]:
        if not devices:
            return {left}
        return {
            way
            for at, (where, name, profile) in enumerate(kinds)
            if where == node and left[at] and wish.takes(name, profile)
            for way in ways(wish, node, devices - 1, _less(left, at))
        }

    return moved(tuple(sorted(homeless.elements())), tuple(offered[each] for each in kinds))


def worth_of(problem: Any, solution: Any, plan: Any) -> Vector:
    """Return the value of a plan of the product in the form of ``best``."""
    by_priority = dict.fromkeys(problem.priorities, 0)
    for count, demand in zip(solution.served, problem.demands):
        by_priority[demand.priority] += count
    return (*by_priority.values(), -len(plan.moves), -plan.destroyed, -plan.touched)


def _less(left: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*left[:at], left[at] - 1, *left[at + 1 :])


# ---- random fleets


def smalls(boards: Sequence[str], nodes: int = 2) -> st.SearchStrategy[Small]:
    """Draw devices of some boards in reachable states."""

    @st.composite
    def one(draw: st.DrawFn) -> Small:
        name = draw(st.sampled_from(list(boards)))
        node = f"node-{draw(st.integers(0, nodes - 1))}"
        if draw(st.booleans()):
            return Small(name, occupied=draw(st.booleans()), node=node)
        places = draw(st.sampled_from(all_states(name)))
        held = frozenset(place for place in places if draw(st.booleans()))
        return Small(name, places, held, enabled=True, node=node)

    return one()


def wishes_for(names: Sequence[str], *, most_devices: int = 1) -> st.SearchStrategy[list[Wish]]:
    """Draw up to three requests for profiles with these names, for memory, or for whole devices."""
    kinds = st.one_of(
        st.sampled_from(list(names)).map(lambda name: {"profile": name}),
        st.sampled_from([5, 11, 20]).map(lambda gigabytes: {"memory": gigabytes * 1024**3}),
        st.integers(1, most_devices).map(lambda devices: {"devices": devices}),
    )
    one = st.builds(
        lambda count, priority, kind: Wish(count, priority, **kind),
        st.integers(1, 3),
        st.sampled_from([0, 0, 5]),
        kinds,
    )
    return st.lists(one, min_size=1, max_size=3)
