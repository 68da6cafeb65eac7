# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Find the optimal fleet plan with HiGHS, as an integer program.

The integer variables are: the number of devices of a group in each configuration, the number of served claims by
demand and node, and the number of assigned items. The goals are optimized in order: the claims of the highest
priority, the claims of the next priorities, the fewest moves, the fewest deleted partitions, the fewest changed
devices, and the smallest sufficient items. Each step keeps the results of the steps before it, and has half of the
time that is left.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf
from time import monotonic
from typing import Any

from ..core.errors import AcceleratorError
from ..core.planner.problem import Problem
from ..core.planner.solution import MOVED, Solution, Use

try:
    import highspy  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    HAS_HIGHS = False
    HIGHS_IMPORT_ERROR = traceback.format_exc()
else:
    HAS_HIGHS = True
    HIGHS_IMPORT_ERROR = ""

PACKAGE = "highspy"
#: The tolerance for integer values, which the solver returns as floating-point numbers.
_NEAR = 1e-5
Row = tuple[float, float, dict[int, float]]


class NotSolved(AcceleratorError):
    """HiGHS found no plan within the time limit."""

    default_code = "time-limit"


@dataclass(frozen=True)
class Solved:
    """A solution, and whether it is optimal.

    ``most_served``: no plan serves more claims. ``least_changed``: no plan serves as many claims with fewer changes.
    ``remark`` is the reason if this is not proven.
    """

    solution: Solution
    most_served: bool
    least_changed: bool
    remark: str = ""


def solve(problem: Problem, seconds: float) -> Solved:
    """Return the optimal plan, or the best plan within the time limit in ``seconds``. Raises NotSolved without any plan."""
    return Program(problem).solve(seconds)


@dataclass
class Program:
    """The integer program of a problem. ``columns`` are the upper limits of its variables, ``rows`` are its constraints."""

    problem: Problem
    columns: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._become: dict[tuple[int, int], int] = {}  # group, configuration
        self._served: dict[tuple[int, str], int] = {}  # demand, node
        self._given: dict[tuple[int, int, int, str], int] = {}  # demand, part, item, node
        self._arrive: dict[tuple[int, str], int] = {}  # item, node
        offers: dict[tuple[int, str], dict[int, float]] = {}
        leave: dict[int, dict[int, float]] = {}
        for number, group in enumerate(self.problem.groups):
            chosen = {}
            for which, one in enumerate(group.configurations):
                at = self._become[number, which] = self._column(len(group.members))
                chosen[at] = 1.0
                for item, count in one.offers:
                    offers.setdefault((item, group.node), {})[at] = float(count)
                for item, count in one.moved:
                    leave.setdefault(item, {})[at] = float(count)
            self.rows.append((len(group.members), len(group.members), chosen))
        self._wants(offers)
        for item, gone in sorted(leave.items()):
            balance = dict(gone)
            for (offered, node), supply in sorted(offers.items()):
                if offered == item:
                    at = self._arrive[item, node] = self._column(self.problem.most_moves)
                    balance[at] = -1.0
                    supply[at] = -1.0
            self.rows.append((0, 0, balance))
        if leave:
            together: dict[int, float] = {}
            for gone in leave.values():
                for at, number_of in gone.items():
                    together[at] = together.get(at, 0.0) + number_of
            self.rows.append((0, self.problem.most_moves, together))
        self.rows += [(0, inf, supply) for _place, supply in sorted(offers.items())]

    def _wants(self, offers: Mapping[tuple[int, str], dict[int, float]]) -> None:
        """Add the constraints of the demands: one node supplies all devices of a claim, and assigned items reduce its supply."""
        nodes = sorted({group.node for group in self.problem.groups})
        for number, demand in enumerate(self.problem.demands):
            own: dict[int, float] = {}
            for node in nodes:
                places = [[item for item in items if (item, node) in offers] for items in self.problem.wants[number]]
                if not all(places):
                    continue
                served = self._served[number, node] = self._column(demand.count)
                own[served] = 1.0
                for part, items in enumerate(places):
                    devices = demand.parts[part].devices
                    balance = {served: -float(devices)}
                    for item in items:
                        at = self._given[number, part, item, node] = self._column(demand.count * devices)
                        balance[at] = 1.0
                        offers[item, node][at] = -1.0
                    self.rows.append((0, 0, balance))
            if own:
                self.rows.append((0, demand.count, own))

    def _column(self, most: int) -> int:
        self.columns.append(most)
        return len(self.columns) - 1

    def solve(self, seconds: float) -> Solved:
        """Return the optimal plan, or the best plan within the time limit in ``seconds``. Raises NotSolved without any plan."""
        until = monotonic() + seconds
        rows, proven, most_served, remark = list(self.rows), True, True, ""
        values: list[int] = []
        bounds: list[int] = []
        goals = self._goals()
        for at, (costs, most) in enumerate(goals):
            is_served = at < len(self.problem.priorities)
            if not costs:
                bounds += [0] if is_served else []
                continue
            found = self._step(rows, costs, until)
            values = max(found.values, values, key=lambda each: _value(costs, each))
            # A smaller problem gives a plan sooner: without moves, and without any change.
            for name in ("moves", "touched"):
                unused = self._costs(name)
                if unused and is_served and not found.proven and (name == "moves" or not values):
                    smaller = self._step(rows, costs, until, unused)
                    values = max(values, smaller.values, key=lambda each: _value(costs, each))
            if not values:
                raise NotSolved(
                    f"HiGHS found no plan within the time limit of {seconds:g} s",
                    hint="Increase time_limit, or plan for fewer different requests or nodes at once.",
                )
            reached = _value(costs, values)
            # Values to minimize have negative costs, so that each step maximizes.
            rows.append((ceil(reached - _NEAR), inf, costs))
            if at == len(goals) - 1:
                break  # the last goal is only a preference among equal plans
            proven = proven and found.proven
            if is_served:
                bounds.append(round(reached) if found.proven else floor(min(found.bound + _NEAR, most)))
                most_served = proven
            if not found.proven:
                remark = f"the time limit of {seconds:g} s is over"
        if not values:  # no device can serve any demand, and there is nothing to minimize
            values = _run(self.columns, rows, {}, seconds).values
        return Solved(self._solution(values, tuple(bounds)), most_served, proven, remark)

    def _step(
        self, rows: Sequence[Row], costs: Mapping[int, float], until: float, unused: Collection[int] = ()
    ) -> _Found:
        """Return the best values for one goal, with half of the time that is left. The ``unused`` variables are 0."""
        seconds = (until - monotonic()) / 2
        columns = [0 if at in unused else most for at, most in enumerate(self.columns)]
        return _run(columns, rows, costs, seconds) if seconds > 0 else _Found([], inf, False)

    def _goals(self) -> list[tuple[dict[int, float], int]]:
        """Return the goals in order of importance: the costs by variable, and the upper bound of the value."""
        goals = []
        for priority in self.problem.priorities:
            own = {number for number, each in enumerate(self.problem.demands) if each.priority == priority}
            most = sum(self.problem.demands[number].count for number in own)
            goals.append(({at: 1.0 for (number, _node), at in self._served.items() if number in own}, most))
        goals += [(self._costs(name), 0) for name in ("moves", "destroyed", "touched")]
        # The last goal: the smallest sufficient items.
        sizes = {
            at: -float(self.problem.wants[number][part].index(item))
            for (number, part, item, _node), at in self._given.items()
        }
        return [*goals, (sizes, 0)]

    def _costs(self, name: str) -> dict[int, float]:
        found = {}
        for (group, which), at in self._become.items():
            cost = getattr(self.problem.groups[group].configurations[which], name)
            if cost:
                found[at] = -float(cost)
        return found

    def _solution(self, values: Sequence[int], bounds: tuple[int, ...]) -> Solution:
        stock: dict[tuple[int, str], list[int]] = {}
        gone: dict[int, Any] = {}
        for number, group in enumerate(self.problem.groups):
            members = iter(group.members)
            for which, one in enumerate(group.configurations):
                for _device in range(values[self._become[number, which]]):
                    device = next(members)
                    if one.moved:
                        gone[device] = one.moved
                    for item, count in one.offers:
                        stock.setdefault((item, group.node), []).extend([device] * count)
        uses: dict[int, list[Use]] = {}
        for (demand, part, item, node), at in self._given.items():
            for _one in range(values[at]):
                uses.setdefault(stock[item, node].pop(0), []).append(Use(demand, part, item))
        for (item, node), at in self._arrive.items():
            for _one in range(values[at]):
                uses.setdefault(stock[item, node].pop(0), []).append(Use(MOVED, 0, item))
        served = [0] * len(self.problem.demands)
        for (number, _node), at in self._served.items():
            served[number] += values[at]
        return Solution({device: tuple(those) for device, those in sorted(uses.items())}, gone, tuple(served), bounds)


def _quiet_solver() -> Any:
    """Return a solver without output. HiGHS prints a banner before its output can be disabled, and stdout is the module's result."""
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    null_device = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null_device, 1)
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call, unused-ignore]
        solver.setOptionValue("output_flag", False)
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)
        os.close(null_device)
    return solver


def _value(costs: Mapping[int, float], values: Sequence[int]) -> float:
    """Return the value of a goal; without a plan, minus infinity."""
    return sum(cost * values[column] for column, cost in costs.items()) if values else -inf


@dataclass(frozen=True)
class _Found:
    values: list[int]
    bound: float
    proven: bool


def _run(columns: Sequence[int], rows: Sequence[Row], costs: Mapping[int, float], seconds: float) -> _Found:
    """Find the best integer values. The result is deterministic unless the time limit ends the search.

    The solver gets no start solution: HiGHS 1.16 can return the start solution as the optimum after its presolve has
    improved it.
    """
    solver = _quiet_solver()
    for name, value in (
        ("threads", 1),
        ("random_seed", 0),
        ("mip_rel_gap", 0.0),
        ("time_limit", seconds),
    ):
        solver.setOptionValue(name, value)
    for at, most in enumerate(columns):
        solver.addVar(0.0, float(most))
        solver.changeColIntegrality(at, highspy.HighsVarType.kInteger)
    for at, cost in costs.items():
        solver.changeColCost(at, cost)
    for lower, upper, factors in rows:
        solver.addRow(
            float(lower), min(float(upper), highspy.kHighsInf), len(factors), list(factors), list(factors.values())
        )
    solver.changeObjectiveSense(highspy.ObjSense.kMaximize)
    solver.run()
    info = solver.getInfo()
    proven = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    is_feasible = proven or info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = [round(each) for each in solver.getSolution().col_value] if is_feasible else []
    return _Found(values, info.mip_dual_bound, proven)
