# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""How many claims no plan can serve more than.

Each item gets a price. Whatever the prices are, no plan serves more claims than what the fleet could earn at them, plus for each claim what its
cheapest items leave of one: the dual of the linear relaxation, with the rule that a claim's devices are of one node left out. That as many of
each higher priority are to be served as one plan does serve has a price as well. The best bound counts, and its prices say where room is scarce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .descent import minimise
from .problem import Problem
from .shapes import Shapes

#: How often the bound is evaluated, and how often more for each price.
STEPS, STEPS_EACH = 150, 10
_SURE = 1e-6
_SCALES = tuple(2.0**power for power in range(-6, 4))


@dataclass(frozen=True)
class Bound:
    """So many claims can be served at most, and the prices of items that show it."""

    most: int
    prices: tuple[float, ...]


@dataclass(frozen=True)
class _Level:
    """Demands of one priority with how many claims of each there can be at most, and how many claims one plan serves in all."""

    counts: Mapping[int, int]
    served: int


class Bounds:
    """The bounds of one problem."""

    def __init__(self, problem: Problem, shapes: Shapes) -> None:
        self.problem = problem
        self.most = [_most_claims(problem, shapes, number) for number in range(len(problem.demands))]
        self.items = sorted({item for wanted in problem.wants for items in wanted for item in items})
        position = {item: at for at, item in enumerate(self.items)}
        # By shape: how many devices have it, and what their configurations offer less what has to move, by the positions of prices.
        self.offers = [
            (
                devices,
                [
                    tuple((position[item], count) for item, count in row if item in position)
                    for row in shapes.all[number].largest()
                ],
            )
            for number, devices in shapes.counts.items()
        ]
        self.wants = [tuple(tuple(position[item] for item in items) for items in wanted) for wanted in problem.wants]

    def of(self, priority: int, served: Sequence[int]) -> Bound:
        """Return how many claims of a priority no plan exceeds that serves at least as many of each higher one as ``served`` says, by demand."""
        levels = []
        for each in self.problem.priorities:
            own = [number for number, demand in enumerate(self.problem.demands) if demand.priority == each]
            levels.append(
                _Level(
                    {number: self.most[number] for number in own if self.most[number]}, sum(served[one] for one in own)
                )
            )
            if each == priority:
                break
        target = levels[-1]
        best = float(sum(target.counts.values()))
        prices = [0.0] * len(self.problem.items)
        if best <= target.served:
            return Bound(target.served, tuple(prices))
        value, point = minimise(
            lambda point: self._at(levels, point),
            self._begin(levels),
            steps=STEPS + STEPS_EACH * (len(self.items) + len(levels)),
            enough=target.served + 1 - 2 * _SURE,
        )
        for item, price in zip(self.items, point):
            prices[item] = price
        return Bound(max(int(min(best, value) + _SURE), target.served), tuple(prices))

    def _begin(self, levels: Sequence[_Level]) -> list[float]:
        """Prices by memory, at the scale at which they bound best; a claim of a higher priority is worth its price at least."""
        memory = [max(self.problem.items[item].memory_bytes, 1) for item in self.items]
        tries = []
        for scale in _SCALES:
            prices = [scale * each / min(memory) for each in memory]
            worth = [
                max(1.0, *(self._cheapest(number, prices)[0] + _SURE for number in level.counts))
                if level.counts
                else 1.0
                for level in levels[:-1]
            ]
            tries.append([*prices, *worth])
        return min(tries, key=lambda point: self._at(levels, point)[0])

    def _cheapest(self, number: int, prices: Sequence[float]) -> tuple[float, list[tuple[int, int]]]:
        """Return what the cheapest devices for one claim cost, and how many of which items these are."""
        chosen = [
            (min(items, key=prices.__getitem__), part.devices)
            for part, items in zip(self.problem.demands[number].parts, self.wants[number])
        ]
        return sum(prices[item] * devices for item, devices in chosen), chosen

    def _at(self, levels: Sequence[_Level], point: Sequence[float]) -> tuple[float, list[float]]:
        """Return the bound at some prices, followed by the worths of a claim of each higher priority, and how it changes with each."""
        total, slope = 0.0, [0.0] * len(point)
        first = len(self.items)
        for at, level in enumerate(levels):
            is_last = at == len(levels) - 1
            value = 1.0 if is_last else point[first + at]
            taken = 0
            for number, count in level.counts.items():
                cost, chosen = self._cheapest(number, point)
                if cost < value:
                    total += count * (value - cost)
                    taken += count
                    for item, devices in chosen:
                        slope[item] -= count * devices
            if not is_last:
                total -= value * level.served
                slope[first + at] += taken - level.served
        for devices, rows in self.offers:
            earned, best = 0.0, rows[0]
            for number, row in enumerate(rows):
                value = 0.0
                for item, count in row:
                    value += point[item] * count
                if value > earned or not number:
                    earned, best = value, row
            total += devices * earned
            for item, count in best:
                slope[item] += devices * count
        return total, slope


def _most_claims(problem: Problem, shapes: Shapes, number: int) -> int:
    """Return how many claims of a demand there could be if there were no others: none where nothing will do, and of several devices by node."""
    demand = problem.demands[number]
    if not all(problem.wants[number]):
        return 0
    if demand.devices == 1 or problem.most_moves:
        return demand.count
    by_node: dict[str, list[int]] = {}
    for device, shape in shapes.of.items():
        by_node.setdefault(problem.fleet.devices[device].node, []).append(shape)
    total = 0
    for members in by_node.values():
        total += min(
            sum(_most_of(shapes, shape, wanted) for shape in members) // part.devices
            for part, wanted in zip(demand.parts, problem.wants[number])
        )
    return min(demand.count, total)


def _most_of(shapes: Shapes, shape: int, wanted: Sequence[int]) -> int:
    weights = [0.0] * (max(wanted, default=0) + 1)
    for item in wanted:
        weights[item] = 1.0
    found = shapes.all[shape]
    return max(
        (
            sum(count for item, count in found.configurations[each].offers if item < len(weights) and weights[item])
            for each in found.fitting(found.start)
        ),
        default=0,
    )
