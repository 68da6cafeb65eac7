# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a device could still offer when some of it is given away: questions about configurations, each answered once."""

from __future__ import annotations

from collections.abc import Sequence

from .problem import Amounts, Configuration, Problem

#: What is given away of a device by its shape's items, and which claims have left it.
Given = tuple[tuple[int, ...], Amounts]
EMPTY: Amounts = ()


class Shape:
    """Devices with the same configurations, whichever their node."""

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        self.configurations = tuple(configurations)
        self.items = tuple(sorted({item for one in configurations for item, _count in one.offers}))
        self.position = {item: at for at, item in enumerate(self.items)}
        self._offers = [tuple(dict(one.offers).get(item, 0) for item in self.items) for one in configurations]
        self._moved = [dict(one.moved) for one in configurations]
        self._fitting: dict[Given, tuple[int, ...]] = {}
        self._cost: dict[Given, tuple[int, int]] = {}
        self._room: dict[tuple[int, Given], float] = {}
        self._after: dict[tuple[Given, int], Amounts | None] = {}
        self.start: Given = ((0,) * len(self.items), EMPTY)

    def fitting(self, given: Given) -> tuple[int, ...]:
        """Return the configurations that offer what is given away, and lack no other claims than those that have left."""
        known = self._fitting.get(given)
        if known is None:
            used, gone = given[0], dict(given[1])
            known = tuple(
                number
                for number, offers in enumerate(self._offers)
                if all(have >= need for have, need in zip(offers, used))
                and all(gone.get(item, 0) >= count for item, count in self._moved[number].items())
            )
            self._fitting[given] = known
        return known

    def cost(self, given: Given) -> tuple[int, int]:
        """Return how many free partitions go at least, and whether the device is touched."""
        known = self._cost.get(given)
        if known is None:
            known = min(
                (self.configurations[each].destroyed, self.configurations[each].touched) for each in self.fitting(given)
            )
            self._cost[given] = known
        return known

    def room(self, given: Given, weights: Sequence[float], name: int) -> float:
        """Return what is left at best, in the sum of the items' weights; ``name`` tells one list of weights from another."""
        known = self._room.get((name, given))
        if known is None:
            own = [weights[item] for item in self.items]
            known = max(
                sum(weight * (have - need) for weight, have, need in zip(own, self._offers[each], given[0]))
                for each in self.fitting(given)
            )
            self._room[(name, given)] = known
        return known

    def with_item(self, given: Given, item: int) -> Given | None:
        """Return what is given away with one more of an item; None where there is no room for it, or no such item."""
        at = self.position.get(item)
        if at is None:
            return None
        used = given[0]
        more = ((*used[:at], used[at] + 1, *used[at + 1 :]), given[1])
        return more if self.fitting(more) else None

    def with_moves(self, given: Given, item: int) -> Given | None:
        """The same where claims may leave the device as well: the fewest; None where that does not help either."""
        key = (given, item)
        if key not in self._after:
            self._after[key] = self._fewest_moves(given, item)
        gone = self._after[key]
        if gone is None:
            return None
        at = self.position[item]
        used = given[0]
        return ((*used[:at], used[at] + 1, *used[at + 1 :]), gone)

    def _fewest_moves(self, given: Given, item: int) -> Amounts | None:
        at = self.position.get(item)
        if at is None:
            return None
        already = dict(given[1])
        found: list[tuple[int, Amounts]] = []
        for number, offers in enumerate(self._offers):
            need = [count + (place == at) for place, count in enumerate(given[0])]
            if all(have >= count for have, count in zip(offers, need)):
                moved = self._moved[number]
                gone = {each: max(already.get(each, 0), moved.get(each, 0)) for each in {*already, *moved}}
                found.append(
                    (sum(gone.values()), tuple(sorted((each, count) for each, count in gone.items() if count)))
                )
        return min(found)[1] if found else None

    def most(self, item: int) -> int:
        """Return how many of an item there can be at once, with all claims where they are."""
        at = self.position.get(item)
        return 0 if at is None else max((self._offers[each][at] for each in self.fitting(self.start)), default=0)

    def largest(self) -> list[Amounts]:
        """Return what configurations offer less what has to move, without those that another one offers more than; moves cost nothing here."""
        rows = sorted(
            {(one.offers, one.moved) for one in self.configurations}, key=lambda row: -sum(n for _i, n in row[0])
        )
        kept: list[tuple[dict[int, int], dict[int, int]]] = []
        for offers, moved in rows:
            less = any(
                all(have.get(item, 0) >= count for item, count in offers)
                and all(dict(moved).get(item, 0) >= count for item, count in lacking.items())
                for have, lacking in kept
            )
            if not less:
                kept.append((dict(offers), dict(moved)))
        return [
            tuple(sorted((item, have.get(item, 0) - lacking.get(item, 0)) for item in {*have, *lacking}))
            for have, lacking in kept
        ]


class Shapes:
    """The shapes of all devices of a problem, by the devices' numbers."""

    def __init__(self, problem: Problem) -> None:
        found: dict[tuple[Configuration, ...], int] = {}
        self.all: list[Shape] = []
        self.of: dict[int, int] = {}
        by_identity: dict[int, int] = {}
        for group in problem.groups:
            identity = id(group.configurations)
            if identity not in by_identity:
                if group.configurations not in found:
                    found[group.configurations] = len(self.all)
                    self.all.append(Shape(group.configurations))
                by_identity[identity] = found[group.configurations]
            for member in group.members:
                self.of[member] = by_identity[identity]
        self.counts: dict[int, int] = {}
        for number in self.of.values():
            self.counts[number] = self.counts.get(number, 0) + 1
