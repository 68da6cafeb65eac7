# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert a solution to a plan: layout rules, changes, moves, and the unserved claims with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..model import Device, Partition, Placement, Profile
from ..partitioning import capacity as partitioning_capacity
from ..partitioning.rules import DYNAMIC, STATIC, WHOLE
from .arrangements import Arrangement, Arrangements, fewer
from .demands import Demand
from .fleet import FleetDevice
from .problem import Problem, State, against
from .solution import MOVED, Solution, Use

Json = dict[str, Any]


@dataclass(frozen=True)
class DevicePlan:
    """The plan of one device.

    ``rule`` is the device's layout rule, without ``match``; None if the device does not change and has no known rule.
    ``created`` are profiles with their placements. ``given`` is the number of devices here for each demand.
    """

    device: FleetDevice
    rule: Json | None
    kept: tuple[Partition, ...] = ()
    destroyed: tuple[Partition, ...] = ()
    created: tuple[tuple[Profile, Placement | None], ...] = ()
    leaving: tuple[str, ...] = ()
    switched: bool = False
    given: Mapping[str, int] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Return whether the device changes."""
        return bool(self.destroyed or self.created or self.switched)

    @property
    def unused_destroyed(self) -> int:
        """Return the number of deleted partitions without a holder."""
        held = {self.device.device.partitions[number].uuid for number in self.device.holders}
        return sum(each.uuid not in held for each in self.destroyed)


@dataclass(frozen=True)
class Move:
    """An existing claim that moves to another device."""

    claim: str
    source: FleetDevice
    target: FleetDevice
    item: str


@dataclass(frozen=True)
class Unplaceable:
    """A number of unserved claims of a demand, with a stable code and a message for the reason."""

    demand: Demand
    count: int
    code: str
    message: str


@dataclass(frozen=True)
class Plan:
    """The plan of a fleet.

    ``bounds`` are those of Solution. ``gaps`` are the differences between them and the served claims, by priority from
    the highest.
    """

    devices: tuple[DevicePlan, ...]
    moves: tuple[Move, ...]
    unplaceable: tuple[Unplaceable, ...]
    served: Mapping[str, int]
    bounds: tuple[int, ...]
    gaps: tuple[int, ...]

    @property
    def destroyed(self) -> int:
        """Return the number of deleted partitions without a holder."""
        return sum(each.unused_destroyed for each in self.devices)

    @property
    def touched(self) -> int:
        """Return the number of changed devices."""
        return sum(each.changed for each in self.devices)


def make_plan(problem: Problem, solution: Solution) -> Plan:
    """Return the plan of each device, in the order of the fleet."""
    devices: list[DevicePlan] = []
    leaving: dict[int, list[tuple[str, FleetDevice]]] = {}
    arriving: dict[int, list[FleetDevice]] = {}
    for number, device in enumerate(problem.fleet.devices):
        uses = solution.uses.get(number, ())
        made, gone = _DevicePlanner(problem, number, uses, dict(solution.gone.get(number, ()))).plan()
        devices.append(made)
        for item, claim in gone:
            leaving.setdefault(item, []).append((claim, device))
        for use in uses:
            if use.demand == MOVED:
                arriving.setdefault(use.item, []).append(device)
    moves = [
        Move(claim, source, target, problem.items[item].describe())
        for item, claims in sorted(leaving.items())
        for (claim, source), target in zip(claims, arriving.get(item, ()))
    ]
    gaps = []
    for priority, most in zip(problem.priorities, solution.bounds):
        reached = [count for count, demand in zip(solution.served, problem.demands) if demand.priority == priority]
        gaps.append(most - sum(reached))
    return Plan(
        tuple(devices),
        tuple(moves),
        tuple(_unplaceable(problem, solution)),
        {demand.name: count for demand, count in zip(problem.demands, solution.served)},
        solution.bounds,
        tuple(gaps),
    )


class _DevicePlanner:
    """Choose the placements on one device: fewest deleted partitions, then the most space left for large partitions."""

    def __init__(self, problem: Problem, number: int, uses: Sequence[Use], gone: Mapping[int, int]) -> None:
        self.problem = problem
        self.one = problem.fleet.devices[number]
        self.device: Device = self.one.device
        self.uses = uses
        self.gone = dict(gone)
        self.arrangements: Arrangements = problem.kinds[number]

    def plan(self) -> tuple[DevicePlan, list[tuple[int, str]]]:
        given: dict[str, int] = {}
        for use in self.uses:
            name = self.problem.demands[use.demand].name if use.demand != MOVED else ""
            given[name] = given.get(name, 0) + 1
        given.pop("", None)
        one = self.one
        if one.fixed or one.has_particular_rule:
            kept = tuple(each for each in self.device.partitions if each.uuid)
            return DevicePlan(one, dict(one.rule) if one.rule else None, kept, given=given), []
        whole = any(self.problem.items[use.item].profile is None for use in self.uses)
        leaving: list[tuple[int, str]] = []
        if one.occupants and self.gone:
            leaving = [(next(iter(self.gone)), one.occupants[0])]
        if whole:
            leaving += [(self._item(each), one.holders[number][0]) for number, each in self._held()]
            return self._as_whole(given, leaving), leaving
        if (one.occupants and not leaving) or (not self.uses and not self.device.partitions):
            return DevicePlan(one, self._rule(self._mode_today(), ()), given=given), leaving
        chosen = self._choose()
        return self._as_cut(chosen, given, leaving), leaving

    def _item(self, partition: Partition) -> int:
        return next(
            item.number
            for item in self.problem.items
            if self.problem.is_of(item, self.one)
            and item.profile is not None
            and item.profile.profile_id == partition.profile_id
        )

    def _held(self) -> list[tuple[int, Partition]]:
        return [(number, each) for number, each in enumerate(self.device.partitions) if number in self.one.holders]

    def _mode_today(self) -> str:
        if self.one.is_dynamic:
            return DYNAMIC
        return STATIC if self.device.partitioning.enabled else WHOLE

    def _as_whole(self, given: Mapping[str, int], leaving: Sequence[tuple[int, str]]) -> DevicePlan:
        mode = DYNAMIC if self.one.is_dynamic else WHOLE
        return DevicePlan(
            self.one,
            self._rule(mode, ()),
            destroyed=tuple(self.device.partitions),
            leaving=tuple(claim for _item, claim in leaving),
            switched=mode == WHOLE and self.device.partitioning.enabled,
            given=given,
        )

    def _needed(self) -> list[int]:
        needed = [0] * len(self.arrangements.profiles)
        for use in self.uses:
            profile = self.problem.items[use.item].profile
            if profile is not None:
                needed[self.arrangements.number(profile.profile_id)] += 1
        return needed

    def _state(self) -> tuple[State, list[int]]:
        """Return the pinned, movable, and unused partitions, and the number of movable partitions of each profile."""
        may_go = [0] * len(self.arrangements.profiles)
        for item, count in self.gone.items():
            profile = self.problem.items[item].profile
            if profile is not None:
                may_go[self.arrangements.number(profile.profile_id)] += count
        bits = [0, 0, 0]
        counts = [[0] * len(may_go) for _which in bits]
        for number, partition in enumerate(self.device.partitions):
            position = self.arrangements.number(partition.profile_id)
            held = number in self.one.holders
            which = 2 if not held else 1 if may_go[position] and self._may_move(number) else 0
            bits[which] |= self.arrangements.bit(partition.key)
            counts[which][position] += 1
        pinned, movable, free = (tuple(each) for each in counts)
        return State(bits[0], bits[1], bits[2], pinned, movable, free), may_go

    def _may_move(self, number: int) -> bool:
        names = self.one.holders[number]
        return len(names) == 1 and self.problem.fleet.claims.get(names[0]) == 1 and "/" in names[0]

    def _choose(self) -> Arrangement:
        state, may_go = self._state()
        needed = self._needed()
        least = [own + more for own, more in zip(state.pinned_counts, needed)]
        best: tuple[int, int, int] | None = None
        tied: list[Arrangement] = []
        for counts, sets in self.arrangements.by_counts:
            if not fewer(least, counts):
                continue
            for bits in sets:
                if bits & state.pinned != state.pinned:
                    continue
                each = Arrangement(bits, counts)
                offered, lacking, destroyed, new = against(self.arrangements, each, state, self.one.is_dynamic)
                cost = (sum(lacking), destroyed, new)
                if (best is None or cost <= best) and fewer(needed, offered) and fewer(lacking, may_go):
                    tied = [*tied, each] if cost == best else [each]
                    best = cost
        if not tied:
            raise AssertionError(f"{self.one.describe()} has less room than the plan assigns")
        return min(tied, key=lambda each: (-self._room_left(each), each.bits))

    def _room_left(self, one: Arrangement) -> int:
        taken = 0
        for at, (_number, place) in enumerate(self.arrangements.places):
            if one.bits >> at & 1:
                taken |= partitioning_capacity.mask(place)
        return sum(
            place.size**2
            for profile in self.device.profiles
            for place in profile.placements
            if not partitioning_capacity.mask(place) & taken
        )

    def _as_cut(self, chosen: Arrangement, given: Mapping[str, int], leaving: list[tuple[int, str]]) -> DevicePlan:
        left = list(chosen.counts)
        kept: list[Partition] = []
        # Partitions in use before unused ones, if only some of a profile stay.
        for number, partition in sorted(
            enumerate(self.device.partitions), key=lambda each: (each[0] not in self.one.holders, each[0])
        ):
            position = self.arrangements.number(partition.profile_id)
            bit = self.arrangements.bit(partition.key)
            free = number not in self.one.holders
            if (bit & chosen.bits or not bit) and left[position] and not (self.one.is_dynamic and free):
                kept.append(partition)
                left[position] -= 1
            elif not free:
                leaving.append((self._item(partition), self.one.holders[number][0]))
        kept.sort(key=lambda each: each.placement)
        keys = {each.key for each in kept}
        made: list[tuple[Profile, Placement | None]] = [
            (profile, place)
            for profile, place in self.arrangements.starts(chosen.bits)
            if (profile.profile_id, place.start, place.size) not in keys
        ]
        for profile, count in zip(self.arrangements.profiles, left):
            if profile.is_numbered:
                made += [(profile, None)] * count
        if self.one.is_dynamic:
            mode, made = DYNAMIC, []
        else:
            mode = STATIC
        wanted = [(each.profile, each.placement.start if each.placement.size else None) for each in kept]
        wanted += [(profile.name, place.start if place is not None else None) for profile, place in made]
        destroyed = tuple(each for each in self.device.partitions if each not in kept)
        return DevicePlan(
            self.one,
            self._rule(mode, wanted),
            tuple(kept),
            destroyed,
            tuple(made),
            tuple(claim for _item, claim in leaving),
            mode == STATIC and not self.device.partitioning.enabled,
            given,
        )

    def _rule(self, mode: str, wanted: Sequence[tuple[str, int | None]]) -> Json:
        before = dict(self.one.rule or {})
        if mode == DYNAMIC:
            return before
        rule: Json = {"mode": mode}
        if mode == STATIC:
            placed = [{"profile": name, "placement": start} for name, start in wanted if start is not None]
            numbered = [name for name, start in wanted if start is None]
            counted = [{"profile": name, "count": numbered.count(name)} for name in dict.fromkeys(numbered)]
            rule["partitions"] = [*sorted(placed, key=lambda each: (each["placement"], each["profile"])), *counted]
        if before.get("composed") is False:
            rule["composed"] = False
        return rule


def layouts_of(plan: Plan, hosts: Mapping[str, str]) -> list[Json]:
    """Return one entry per node with ``hosts`` and ``layout``, in the form for the playbooks.

    Similar devices share a rule. ``hosts`` maps nodes to their names in the inventory, if they differ.
    """
    found: dict[str, list[tuple[str, Json, list[str]]]] = {}
    for each in plan.devices:
        rules = found.setdefault(each.device.node, [])
        if each.rule is None:
            continue
        same = next((one for one in rules if one[:2] == (each.device.device.vendor, each.rule)), None)
        if same is None:
            rules.append((each.device.device.vendor, each.rule, [each.device.device.uuid]))
        else:
            same[2].append(each.device.device.uuid)
    return [
        {
            "hosts": hosts.get(node, node),
            "layout": [{"match": {"vendor": vendor, "uuid": uuids}, **rule} for vendor, rule, uuids in rules],
        }
        for node, rules in found.items()
        if rules
    ]


def _unplaceable(problem: Problem, solution: Solution) -> list[Unplaceable]:
    found = []
    for number, demand in enumerate(problem.demands):
        lacking = demand.count - solution.served[number]
        if lacking:
            found.append(Unplaceable(demand, lacking, *_reason(problem, solution, number)))
    return found


def _reason(problem: Problem, solution: Solution, number: int) -> tuple[str, str]:
    demand = problem.demands[number]
    for part, items in zip(demand.parts, problem.wants[number]):
        if not items:
            devices = [each for each in problem.fleet.devices if each.node not in demand.elsewhere]
            there = sorted({each.device.product for each in devices})
            which = "the nodes that its pod may go to" if demand.elsewhere else "the fleet"
            return (
                "no-such-device",
                f"No device of {which} is or can be cut into a {part.describe()}; there are {', '.join(there) or 'no devices'}",
            )
    now, ever, fixed = (
        _room_alone(problem, number, held=True),
        _room_alone(problem, number, held=False),
        _fixed(problem),
    )
    besides = f" {fixed} devices are not changed." if fixed else ""
    if now >= demand.count:
        others = [
            each.name
            for at, each in enumerate(problem.demands)
            if at != number and solution.served[at] and each.priority >= demand.priority
        ]
        with_whom = f": {', '.join(others)}" if others else ""
        return (
            "taken-by-others",
            f"There would be room for {now} of them, but others that are wanted as much or more take it{with_whom}.{besides}",
        )
    if ever > now:
        return (
            "held",
            f"There is room for {now} of them with the present claims, and for {ever} on the same devices without those claims.{besides}",
        )
    where = " on nodes, of which one has to have all its devices" if demand.devices > 1 else ""
    who = "What its pod may go to of the fleet" if demand.elsewhere else "The fleet"
    return ("too-few-devices", f"{who} has room for {ever} of them{where}, and for no more.{besides}")


def _fixed(problem: Problem) -> int:
    return sum(bool(each.fixed) for each in problem.fleet.devices)


def _room_alone(problem: Problem, number: int, *, held: bool) -> int:
    """Return how many claims of a demand would fit without other demands.

    Without ``held`` the result ignores existing allocations on devices that are not fixed.
    """
    demand = problem.demands[number]
    by_node: dict[str, list[list[int]]] = {}
    for group in problem.groups:
        for member in group.members:
            counts = []
            for items in problem.wants[number]:
                if held:
                    fitting = [one for one in group.configurations if not one.moved]
                    counts.append(
                        max((sum(n for item, n in one.offers if item in items) for one in fitting), default=0)
                    )
                else:
                    counts.append(_most_when_empty(problem, member, items))
            by_node.setdefault(problem.fleet.devices[member].node, []).append(counts)
    total = 0
    for members in by_node.values():
        total += min(sum(counts[at] for counts in members) // part.devices for at, part in enumerate(demand.parts))
    return total


def _most_when_empty(problem: Problem, member: int, items: Sequence[int]) -> int:
    one = problem.fleet.devices[member]
    if one.fixed or one.has_particular_rule:
        return 0
    kind = problem.kinds[member]
    mine = [each for each in (problem.items[item] for item in items) if problem.is_of(each, one)]
    wanted = {each.profile.profile_id for each in mine if each.profile is not None}
    positions = [at for at, profile in enumerate(kind.profiles) if profile.profile_id in wanted]
    cut = max((sum(each.counts[at] for at in positions) for each in kind.all), default=0) if positions else 0
    return max(cut, int(any(each.profile is None for each in mine)))
