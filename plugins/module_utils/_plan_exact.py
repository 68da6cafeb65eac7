# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The best plan there is, found by HiGHS as an integer program, and the choice between that and the core's own search.

How many devices of a group become which of their configurations, how many claims of each demand are served on which node, and by which items,
are whole numbers. What is worth most is found in turns: the claims of the highest priority, then of the next, then the fewest moves, the fewest
partitions that go, the fewest devices that are touched, and the smallest items that will do; each turn keeps what the ones before have reached.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from time import monotonic
from typing import Any

from .core.errors import AcceleratorError
from .core.planner.problem import Problem
from .core.planner.search import MOVED, Solution, Use, search
from .core.planner.shapes import Shapes

try:
    import highspy  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    HAS_HIGHS = False
    HIGHS_IMPORT_ERROR = traceback.format_exc()
else:
    HAS_HIGHS = True
    HIGHS_IMPORT_ERROR = ""

PACKAGE = "highspy"
AUTO, EXACT, HEURISTIC = "auto", "exact", "heuristic"
SOLVERS = (AUTO, EXACT, HEURISTIC)
#: More whole numbers than this are not tried where nobody has asked for the exact solver by name.
MOST_COLUMNS = 20_000
#: Whole numbers come back as floating-point ones.
_NEAR = 1e-5
Row = tuple[float, float, dict[int, float]]


class NoSolver(AcceleratorError):
    """The package that solves integer programs is not there."""

    default_code = "missing-package"


class NotSolved(AcceleratorError):
    """The time was over before the solver had any plan."""

    default_code = "time-limit"


@dataclass(frozen=True)
class Solved:
    """A solution, who has found it, and whether no plan serves more claims, or serves as many with less change."""

    solution: Solution
    solver: str
    most_served: bool
    least_changed: bool
    remark: str = ""


def solve(problem: Problem, solver: str, seconds: float) -> Solved:
    """Find a plan; ``seconds`` is how long the exact solver has. Raises NoSolver, NotSolved."""
    if solver == EXACT and not HAS_HIGHS:
        raise NoSolver(
            f"The exact solver was asked for, and the Python package {PACKAGE} cannot be imported",
            hint=f"Install it where this runs (pip install {PACKAGE}), or set solver to {AUTO} or {HEURISTIC}.",
        )
    if solver == EXACT:
        return Program(problem).solve(seconds)
    found = _searched(problem)
    if solver == HEURISTIC or (found.most_served and found.least_changed):
        return found
    if not HAS_HIGHS:
        return replace(found, remark=f"the Python package {PACKAGE}, which finds the best plan, cannot be imported")
    program = Program(problem)
    if len(program.columns) > MOST_COLUMNS:
        return replace(
            found, remark=f"the fleet is too large for the exact solver ({len(program.columns)} whole numbers)"
        )
    try:
        exact = program.solve(seconds)
    except NotSolved as error:
        return replace(found, remark=error.message)
    if exact.solution.worth(problem) > found.solution.worth(problem) or exact.least_changed:
        return exact
    return replace(found, remark=exact.remark)


def _searched(problem: Problem) -> Solved:
    solution = search(problem)
    reached = solution.worth(problem)[: len(problem.priorities)]
    most = reached == tuple(solution.bounds)
    return Solved(solution, HEURISTIC, most, most and not (solution.moves or solution.destroyed or solution.touched))


@dataclass
class Program:
    """The integer program of a problem. ``columns`` are the upper limits of its whole numbers, ``rows`` what holds between them."""

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
        self.rows += [(0, float("inf"), supply) for _place, supply in sorted(offers.items())]

    def _wants(self, offers: Mapping[tuple[int, str], dict[int, float]]) -> None:
        """Each claim has all its devices from what one node offers; what is given is taken off what is offered."""
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
        """Find the best plan, or what is found of it in time. Raises NotSolved where that is none."""
        until = monotonic() + seconds
        rows, values, bounds, proven = list(self.rows), [], [], True
        most_served, remark = True, ""
        goals = self._goals()
        for at, (costs, most) in enumerate(goals):
            is_served = at < len(self.problem.priorities)
            if not costs:
                bounds += [0] if is_served else []
                continue
            found = _run(self.columns, rows, costs, max(until - monotonic(), 0.0))
            if found.values:
                values = found.values
            if not values:
                raise NotSolved(
                    f"The exact solver found no plan in {seconds:g} seconds",
                    hint="Give it more time, or ask fewer kinds of it.",
                )
            reached = sum(cost * values[column] for column, cost in costs.items())
            # The goals that count what is to be least are negative, so that each turn looks for the most.
            rows.append((ceil(reached - _NEAR), float("inf"), costs))
            if at == len(goals) - 1:
                break  # which of the items that will do is a matter of taste
            proven = proven and found.proven
            if is_served:
                bounds.append(round(reached) if found.proven else min(floor(found.bound + _NEAR), most))
                most_served = proven
            if not found.proven:
                remark = f"the exact solver's {seconds:g} seconds were over"
        if not values:  # nothing is wanted that any device could be, and nothing can be saved
            values = _run(self.columns, rows, {}, seconds).values
        return Solved(self._solution(values, tuple(bounds)), EXACT, most_served, proven, remark)

    def _goals(self) -> list[tuple[dict[int, float], int]]:
        """What is worth most, one after the other, each with what it cannot exceed."""
        goals = []
        for priority in self.problem.priorities:
            own = {number for number, each in enumerate(self.problem.demands) if each.priority == priority}
            most = sum(self.problem.demands[number].count for number in own)
            goals.append(({at: 1.0 for (number, _node), at in self._served.items() if number in own}, most))
        goals += [(self._costs(name), 0) for name in ("moves", "destroyed", "touched")]
        # At last the smallest of the items that will do.
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
        shapes = Shapes(self.problem)
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
        destroyed = touched = 0
        for device, number in shapes.of.items():
            shape = shapes.all[number]
            used = [0] * len(shape.items)
            for use in uses.get(device, ()):
                used[shape.position[use.item]] += 1
            cost = shape.cost((tuple(used), gone.get(device, ())))
            destroyed, touched = destroyed + cost[0], touched + cost[1]
        return Solution(
            {device: tuple(those) for device, those in sorted(uses.items())},
            gone,
            tuple(served),
            sum(count for amounts in gone.values() for _item, count in amounts),
            destroyed,
            touched,
            bounds,
        )


def _quiet_solver() -> Any:
    """A solver. It writes who it is to the standard output before it can be told not to, and that belongs to the module's answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call, unused-ignore]
        solver.setOptionValue("output_flag", False)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
    return solver


@dataclass(frozen=True)
class _Found:
    values: list[int]
    bound: float
    proven: bool


def _run(columns: Sequence[int], rows: Sequence[Row], costs: Mapping[int, float], seconds: float) -> _Found:
    """Find the whole numbers that are worth most. The same program gives the same ones, as long as there is time.

    The solver is not told where to begin: HiGHS 1.16 gives a beginning back as the best where its own simplification had made more of it.
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
    there = proven or info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = [round(each) for each in solver.getSolution().col_value] if there else []
    return _Found(values, info.mip_dual_bound, proven)
