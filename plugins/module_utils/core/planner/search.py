# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Finds a plan for fleets of any size: the highest priority first, and each claim where it takes the least from those that follow.

Of each priority several orders and preferences are tried, and the best outcome counts. Where not everything is served, prices of items (see
``bounds``) say where room is scarce, and the search goes on with them. What claims hold moves only where something is short.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .bounds import Bounds
from .problem import Amounts, Problem
from .shapes import Given, Shapes
from .unchanged import assign

#: Stands for the number of a demand where a claim that was moved gets its new place.
MOVED = -1
#: How many nodes are tried for one claim that claims would have to move for.
_TRIES = 48
#: How often some devices are emptied and filled anew at most, and how often for each of them; where nodes matter, for each node.
_ROUNDS, _ROUNDS_EACH = 1500, 20
#: Of the largest thing that a device can be, the share in steps of which lost room counts: less than a sixteenth, the smallest partition there is.
_GRAIN = 0.06

Key = tuple[float, ...]
State = tuple[int, Given]  # a shape, and what is given away of it


@dataclass(frozen=True)
class Use:
    """What a claim gets of a device: the numbers of the demand (MOVED for a claim of today), of its part, and of the item."""

    demand: int
    part: int
    item: int


@dataclass(frozen=True)
class Solution:
    """What each device gives, by its number; which claims leave it, by item; and how many claims of each demand are served.

    ``bounds`` are, for each priority from the highest on, how many claims of it are served at most by any plan that serves at least as many of
    each higher one.
    """

    uses: Mapping[int, tuple[Use, ...]]
    gone: Mapping[int, Amounts]
    served: tuple[int, ...]
    moves: int
    destroyed: int
    touched: int
    bounds: tuple[int, ...] = ()

    def worth(self, problem: Problem) -> tuple[int, ...]:
        """Return what plans are compared by, the larger the better: claims served from the highest priority on, then the fewest moves."""
        by_priority = [
            sum(count for count, demand in zip(self.served, problem.demands) if demand.priority == priority)
            for priority in problem.priorities
        ]
        return (*by_priority, -self.moves, -self.destroyed, -self.touched)


def search(problem: Problem, *, rounds: int = 2) -> Solution:
    """Find a plan. The same problem gives the same plan.

    With prices that a bound has shown, the search is done again, ``rounds`` times at most.
    """
    shapes = Shapes(problem)
    start = Filling(problem, shapes)
    best = _best(start, None)
    if any(best.cost()):
        uses = assign(problem)
        if uses is not None:
            best = max(best, start.with_uses(uses), key=Filling.worth)
    limits = Bounds(problem, shapes)
    bounds = [limits.of(priority, best.served) for priority in problem.priorities]
    for _round in range(rounds):
        short = [each for each, count in zip(bounds, best.by_priority()) if each.most > count and any(each.prices)]
        if not short:
            break
        # The prices of the lowest priority that is short know of all higher ones.
        other = _best(start, short[-1].prices)
        if other.worth() <= best.worth():
            break
        best = other
        bounds = [limits.of(priority, best.served) for priority in problem.priorities]
    if any(each.most > count for each, count in zip(bounds, best.by_priority())) or any(best.cost()[1:]):
        best.improve(_ROUNDS)
        bounds = [limits.of(priority, best.served) for priority in problem.priorities]
    return best.solution(tuple(each.most for each in bounds))


def _best(start: Filling, prices: Sequence[float] | None) -> Filling:
    """Try preferences and orders over all priorities; return the filling that is worth most."""
    best: Filling | None = None
    for keep in (True, False):
        for small_first in (False, True):
            found = start.copy(keep, prices)
            for priority in start.problem.priorities:
                for number in found.ordered(priority, small_first):
                    found.place_all(number)
                if start.problem.most_moves:
                    found.make_room(priority)
            if best is None or found.worth() > best.worth():
                best = found
    return best or start


@dataclass
class _Change:
    """What was so of a device before, to go back to it."""

    device: int
    given: Given
    uses: int


class Filling:
    """Devices that are filled with claims, one after the other."""

    def __init__(self, problem: Problem, shapes: Shapes) -> None:
        self.problem = problem
        self.shapes = shapes
        self.given: dict[int, Given] = {device: shapes.all[shape].start for device, shape in shapes.of.items()}
        self.uses: dict[int, list[Use]] = {}
        self.served = [0] * len(problem.demands)
        self.memory = [item.memory_bytes / 2**20 for item in problem.items]
        self.prices: Sequence[float] = [0.0] * len(problem.items)
        self.name = 0
        self.keep = True
        self.nodes: dict[str, list[int]] = {}
        for device in sorted(self.given):
            self.nodes.setdefault(problem.fleet.devices[device].node, []).append(device)
        self._keys: dict[tuple[State, int, bool], tuple[Key, Given] | None] = {}
        self._of_nodes: dict[tuple[int, bool, tuple[State, ...]], Key | None] = {}
        self._names: dict[tuple[float, ...], int] = {}

    def copy(self, keep: bool, prices: Sequence[float] | None) -> Filling:
        """Return one that goes on from here. With ``keep`` what is there today counts for more than the room that is left."""
        other = Filling.__new__(Filling)
        other.__dict__.update(self.__dict__)
        other.given = dict(self.given)
        other.uses = {device: list(uses) for device, uses in self.uses.items()}
        other.served = list(self.served)
        other.keep = keep
        other.__dict__.update(_keys={}, _of_nodes={})
        other.prices = tuple(prices) if prices is not None else (0.0,) * len(self.problem.items)
        other.name = self._names.setdefault(other.prices, len(self._names) + 1)
        return other

    def with_uses(self, given: Mapping[int, Sequence[tuple[int, int]]]) -> Filling:
        """Return one that goes on from here, with demands that get items of devices: there is room for them, and each claim is for one device."""
        other = self.copy(True, None)
        for device, pairs in given.items():
            for number, item in pairs:
                after = other.shapes.all[other.shapes.of[device]].with_item(other.given[device], item)
                if after is None:
                    raise AssertionError(f"device {device} was given more than it has room for")
                other.given[device] = after
                other.uses.setdefault(device, []).append(Use(number, 0, item))
                other.served[number] += 1
        return other

    # ---- what it is worth

    def by_priority(self) -> tuple[int, ...]:
        """Return how many claims are served, from the highest priority on."""
        found = dict.fromkeys(self.problem.priorities, 0)
        for count, demand in zip(self.served, self.problem.demands):
            found[demand.priority] += count
        return tuple(found.values())

    def cost(self) -> tuple[int, int, int]:
        """Return how many claims move, how many free partitions go, and how many devices are touched."""
        moves = sum(count for _used, gone in self.given.values() for _item, count in gone)
        costs = [self.shapes.all[self.shapes.of[device]].cost(given) for device, given in self.given.items()]
        return moves, sum(each[0] for each in costs), sum(each[1] for each in costs)

    def worth(self) -> tuple[int, ...]:
        """Return what fillings are compared by, the larger the better."""
        return (*self.by_priority(), *(-each for each in self.cost()))

    def solution(self, bounds: tuple[int, ...]) -> Solution:
        """Return what was found."""
        gone = {device: given[1] for device, given in self.given.items() if given[1]}
        uses = {device: tuple(uses) for device, uses in sorted(self.uses.items()) if uses}
        return Solution(uses, gone, tuple(self.served), *self.cost(), bounds)

    def ordered(self, priority: int, small_first: bool) -> list[int]:
        """Return the demands of a priority: those that take the least first, or the most."""

        def size(number: int) -> tuple[float, float]:
            wanted = self.problem.wants[number]
            if not all(wanted):
                return (0.0, 0.0)
            parts = list(zip(self.problem.demands[number].parts, wanted))
            priced, plain = (
                sum(part.devices * min(weights[item] for item in items) for part, items in parts)
                for weights in (self.prices, self.memory)
            )
            return (round(priced, 6), plain)

        own = [number for number, demand in enumerate(self.problem.demands) if demand.priority == priority]
        sign = 1 if small_first else -1
        return sorted(own, key=lambda number: (*(sign * each for each in size(number)), number))

    # ---- placing

    def place_all(self, number: int) -> None:
        """Serve as many claims of a demand as there is room for."""
        if not all(self.problem.wants[number]):
            return
        if self.problem.by_node:
            self._place_by_node(number)
        else:
            self._place_anywhere(number)

    def _place_anywhere(self, number: int) -> None:
        """Claims for one device each, wherever it is: devices in the same state are interchangeable."""
        (items,) = self.problem.wants[number]
        buckets: dict[State, list[int]] = {}
        for device in sorted(self.given, reverse=True):
            buckets.setdefault((self.shapes.of[device], self.given[device]), []).append(device)
        heap: list[tuple[Key, State, int]] = []
        for state in buckets:
            self._push(heap, state, items)
        while heap and self.served[number] < self.problem.demands[number].count:
            _key, state, item = heap[0]
            bucket = buckets.get(state)
            if not bucket:
                heapq.heappop(heap)
                continue
            device = bucket.pop()
            found = self._key(state, item)
            if found is None:  # what is pushed has room; a type checker cannot know
                continue
            self.given[device] = found[1]
            self.uses.setdefault(device, []).append(Use(number, 0, item))
            self.served[number] += 1
            after = (state[0], found[1])
            if after not in buckets:
                buckets[after] = []
                self._push(heap, after, items)
            elif not buckets[after]:
                self._push(heap, after, items)
            buckets[after].append(device)

    def _push(self, heap: list[tuple[Key, State, int]], state: State, items: Sequence[int]) -> None:
        best = self._best_item(state, items)
        if best is not None:
            heapq.heappush(heap, (best[0], state, best[1]))

    def _best_item(self, state: State, items: Sequence[int]) -> tuple[Key, int, Given] | None:
        best: tuple[Key, int, Given] | None = None
        for rank, item in enumerate(items):
            found = self._key(state, item)
            if found is not None:
                key = (*found[0][:-1], rank, found[0][-1])
                if best is None or key < best[0]:
                    best = (key, item, found[1])
        return best

    def _key(self, state: State, item: int) -> tuple[Key, Given] | None:
        """Return how dear it is to give an item of a device away, the lower the better, and the device after it; None where it has none."""
        known = self._keys.get((state, item, self.keep))
        if known is None and (state, item, self.keep) not in self._keys:
            shape, given = self.shapes.all[state[0]], state[1]
            after = shape.with_item(given, item)
            known = None if after is None else (self._cost_of(state[0], given, after, item), after)
            self._keys[(state, item, self.keep)] = known
        return known

    def _cost_of(self, number: int, given: Given, after: Given, item: int) -> Key:
        shape = self.shapes.all[number]
        old, new = shape.cost(given), shape.cost(after)
        priced = (
            shape.room(given, self.prices, self.name) - shape.room(after, self.prices, self.name) - self.prices[item]
        )
        left = shape.room(after, self.memory, 0)
        wasted = shape.room(given, self.memory, 0) - left - self.memory[item]
        # A whole device has a little more memory than all its partitions: such a difference is no room that is lost.
        grain = _GRAIN * max((self.memory[each] for each in shape.items), default=1.0)
        spoils = (round(max(priced, 0.0), 6), round(wasted / grain))
        goes = (new[0] - old[0], new[1] - old[1])
        return (*goes, *spoils, left) if self.keep else (*spoils, *goes, left)

    def _place_by_node(self, number: int) -> None:
        heap: list[tuple[Key, str]] = []
        for node in self.nodes:
            key = self._key_of_node(number, node)
            if key is not None:
                heap.append((key, node))
        heapq.heapify(heap)
        while heap and self.served[number] < self.problem.demands[number].count:
            _key, node = heapq.heappop(heap)
            changes: list[_Change] = []
            if self._put(number, self.nodes[node], changes, moving=False) is None:
                self._undo(changes)
                continue
            self.served[number] += 1
            key = self._key_of_node(number, node)
            if key is not None:
                heapq.heappush(heap, (key, node))

    def _key_of_node(self, number: int, node: str) -> Key | None:
        """Return how dear one claim is on a node; nodes with devices in the same states are alike."""
        states = tuple(sorted((self.shapes.of[device], self.given[device]) for device in self.nodes[node]))
        if (number, self.keep, states) not in self._of_nodes:
            changes: list[_Change] = []
            self._of_nodes[(number, self.keep, states)] = self._put(number, self.nodes[node], changes, moving=False)
            self._undo(changes)
        return self._of_nodes[(number, self.keep, states)]

    def _put(self, number: int, devices: Sequence[int], changes: list[_Change], *, moving: bool) -> Key | None:
        """Give one claim its devices on a node; return how dear that was, None where there is no room (what was done is in ``changes``)."""
        total: Key = ()
        parts = list(zip(self.problem.demands[number].parts, self.problem.wants[number]))
        # Those with the least choice first.
        for place, (part, items) in sorted(enumerate(parts), key=lambda each: (len(each[1][1]), each[0])):
            for _device in range(part.devices):
                best: tuple[Key, int, int, Given] | None = None
                for device in devices:
                    found = self._offer(device, items, moving)
                    if found is not None and (best is None or (found[0], device) < (best[0], best[1])):
                        best = (found[0], device, found[1], found[2])
                if best is None:
                    return None
                key, device, item, after = best
                self._set(device, after, Use(number, place, item), changes)
                total = tuple(one + other for one, other in zip(total, key)) if total else key
        # Of nodes that are equally good the fullest, so that others stay whole.
        left = sum(self.shapes.all[self.shapes.of[one]].room(self.given[one], self.memory, 0) for one in devices)
        return (*total[:-1], left, total[-1])

    def _offer(self, device: int, items: Sequence[int], moving: bool) -> tuple[Key, int, Given] | None:
        state = (self.shapes.of[device], self.given[device])
        best = self._best_item(state, items)
        if not moving:
            return best
        if best is not None:
            return ((0.0, *best[0]), best[1], best[2])
        shape = self.shapes.all[state[0]]
        for rank, item in enumerate(items):
            after = shape.with_moves(state[1], item)
            if after is not None:
                more = sum(count for _item, count in after[1]) - sum(count for _item, count in state[1][1])
                key = (float(more), *(0.0,) * 4, float(rank), 0.0)
                if best is None or key < best[0]:
                    best = (key, item, after)
        return best

    def _set(self, device: int, after: Given, use: Use, changes: list[_Change]) -> None:
        uses = self.uses.setdefault(device, [])
        changes.append(_Change(device, self.given[device], len(uses)))
        self.given[device] = after
        uses.append(use)

    def _undo(self, changes: list[_Change]) -> None:
        for change in reversed(changes):
            self.given[change.device] = change.given
            del self.uses[change.device][change.uses :]

    # ---- filling anew

    def improve(self, rounds: int) -> None:
        """Empty a few devices, fill them anew in another order, and keep that where it is worth no less. The same again gives the same."""
        chance = random.Random(0)  # noqa: S311 nothing here is a secret
        movable = {
            device
            for device, given in self.given.items()
            if not given[1] and self.shapes.all[self.shapes.of[device]].items
        }
        movable -= {device for device, uses in self.uses.items() if any(use.demand == MOVED for use in uses)}
        if self.problem.by_node:
            units = [devices for devices in self.nodes.values() if movable.issuperset(devices)]
        else:
            units = [[device] for device in sorted(movable)]
        if not units:
            return
        prices, keep, name = self.prices, self.keep, self.name
        for _round in range(min(rounds // (4 if self.problem.by_node else 1), _ROUNDS_EACH * len(units))):
            few = chance.sample(units, min(len(units), chance.randint(1, 3 if self.problem.by_node else 6)))
            # Preferences change, and what is dear changes with them.
            self.keep = chance.random() < 0.5
            self._refill([device for unit in few for device in unit], chance)
        self.prices, self.keep, self.name = prices, keep, name

    def _refill(self, devices: list[int], chance: random.Random) -> None:
        before_given = {device: self.given[device] for device in devices}
        before_uses = {device: self.uses.get(device, []) for device in devices}
        before_served = list(self.served)
        before = self._worth_of(devices)
        for device in devices:
            for use in before_uses[device]:
                self.served[use.demand] -= 1 if self.problem.demands[use.demand].devices == 1 else 0
            self.given[device] = self.shapes.all[self.shapes.of[device]].start
            self.uses[device] = []
        for number, count in self._claims_of(before_uses).items():
            self.served[number] -= count
        changes: list[_Change] = []
        nodes: dict[str, list[int]] = {}
        for device in devices:
            nodes.setdefault(self.problem.fleet.devices[device].node if self.problem.by_node else "", []).append(device)
        for priority in self.problem.priorities:
            order = self.ordered(priority, chance.random() < 0.5)
            if chance.random() < 0.5:
                chance.shuffle(order)
            for number in order:
                if all(self.problem.wants[number]):
                    self._fill(number, list(nodes.values()), changes)
        if self._worth_of(devices) < before:
            self.given.update(before_given)
            self.uses.update(before_uses)
            self.served = before_served

    def _claims_of(self, uses: Mapping[int, Sequence[Use]]) -> dict[int, int]:
        """How many claims for several devices lie on some devices, whose nodes are among them whole."""
        parts: dict[int, int] = {}
        for each in uses.values():
            for use in each:
                if self.problem.demands[use.demand].devices > 1:
                    parts[use.demand] = parts.get(use.demand, 0) + 1
        return {number: count // self.problem.demands[number].devices for number, count in parts.items()}

    def _fill(self, number: int, places: Sequence[Sequence[int]], changes: list[_Change]) -> None:
        while self.served[number] < self.problem.demands[number].count:
            if len(places) == 1:
                tried: list[_Change] = []
                if self._put(number, places[0], tried, moving=False) is None:
                    self._undo(tried)
                    return
                self.served[number] += 1
                changes += tried
                continue
            best: tuple[Key, int] | None = None
            for at, devices in enumerate(places):
                tried = []
                key = self._put(number, devices, tried, moving=False)
                self._undo(tried)
                if key is not None and (best is None or (key, at) < best):
                    best = (key, at)
            if best is None:
                return
            self._put(number, places[best[1]], changes, moving=False)
            self.served[number] += 1

    def _worth_of(self, devices: Sequence[int]) -> tuple[int, ...]:
        costs = [self.shapes.all[self.shapes.of[device]].cost(self.given[device]) for device in devices]
        return (*self.by_priority(), -sum(each[0] for each in costs), -sum(each[1] for each in costs))

    # ---- moving claims

    def make_room(self, priority: int) -> None:
        """Move claims of today out of the way of those that are short, as long as each gets another place and the moves suffice."""
        own = [number for number, demand in enumerate(self.problem.demands) if demand.priority == priority]
        for number in sorted(own, key=lambda each: (self.problem.demands[each].devices, each)):
            while self.served[number] < self.problem.demands[number].count and all(self.problem.wants[number]):
                if not self._make_room_once(number):
                    break

    def _make_room_once(self, number: int) -> bool:
        made = self.cost()[0]
        tries: list[tuple[Key, str]] = []
        for node in self.nodes:
            changes: list[_Change] = []
            key = self._put(number, self.nodes[node], changes, moving=True)
            self._undo(changes)
            if key is not None and made + key[0] <= self.problem.most_moves:
                tries.append((key, node))
        for _key, node in heapq.nsmallest(_TRIES, tries):
            changes = []
            if self._put(number, self.nodes[node], changes, moving=True) is not None and self._settle(changes):
                self.served[number] += 1
                return True
            self._undo(changes)
        return False

    def _settle(self, changes: list[_Change]) -> bool:
        """Give the claims that have left devices by some changes another place each."""
        before: dict[int, Given] = {}
        for change in changes:
            before.setdefault(change.device, change.given)
        homeless: list[int] = []
        for device, given in before.items():
            old = dict(given[1])
            for item, count in self.given[device][1]:
                homeless += [item] * (count - old.get(item, 0))
        for item in sorted(homeless, key=lambda each: -self.memory[each]):
            best: tuple[Key, int, Given] | None = None
            for device in self.given:
                found = self._key((self.shapes.of[device], self.given[device]), item)
                if found is not None and (best is None or (found[0], device) < (best[0], best[1])):
                    best = (found[0], device, found[1])
            if best is None:
                return False
            self._set(best[1], best[2], Use(MOVED, 0, item), changes)
        return True
