# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The solver of fleet plans: results that repeat, nodes that claims cannot use, and plans that the time limit ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._planner import optimization
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.demands import Demand, read_demands
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.fleet import read_fleet
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.plan import make_plan
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.problem import Problem, build
from hypothesis import given
from hypothesis import strategies as st
from planner_model import Small, Wish, answers, smalls, wishes_for, worth_of

A30, H100 = "a30", "h100-80"
A30_NAMES = ("1g.6gb", "2g.12gb", "4g.24gb")
LONG = 600.0


def problem_of(fleet: list[Small], wanted: list[dict[str, Any]], moves: int = 0) -> Problem:
    return build(read_fleet(answers(fleet)), read_demands(wanted), most_moves=moves)


@given(st.lists(smalls([H100], nodes=1), min_size=1, max_size=6), st.integers(0, 9), st.integers(0, 6))
def test_solve_larger_boards_proves_the_plan_and_repeats_it(fleet: list[Small], ones: int, threes: int) -> None:
    wanted = [
        {"name": "ones", "profile": "1g.10gb", "count": ones},
        {"name": "threes", "memory": "30Gi", "count": threes, "priority": 3},
        {"name": "whole"},
    ]
    problem = problem_of(fleet, wanted, 1)
    found = optimization.solve(problem, LONG)
    assert found.most_served and found.least_changed and not found.remark
    plan = make_plan(problem, found.solution)
    assert found.solution.bounds == worth_of(problem, found.solution, plan)[: len(problem.priorities)]
    assert plan == make_plan(problem, optimization.solve(problem, LONG).solution)


@given(
    st.lists(smalls([A30]), min_size=1, max_size=4),
    wishes_for(A30_NAMES, most_devices=2),
    wishes_for(A30_NAMES, most_devices=2),
    st.sampled_from([0, 0, 2]),
)
def test_solve_pinned_requests_are_planned_per_node(
    fleet: list[Small], first: list[Wish], second: list[Wish], moves: int
) -> None:
    fleet = [replace(each, node=f"node-{number % 2}") for number, each in enumerate(fleet)]
    wishes = {"node-0": first, "node-1": second}
    apart = 0
    wanted: list[Demand] = []
    for node, those in wishes.items():
        documents = [{**each.document(number), "priority": 0} for number, each in enumerate(those)]
        # No claim moves from one node to another if different pods wait.
        alone = problem_of([each for each in fleet if each.node == node], documents, 0)
        apart += sum(optimization.solve(alone, LONG).solution.served) if alone.fleet.devices else 0
        wanted += [
            replace(each, name=f"{node} {each.name}", elsewhere=frozenset({*wishes} - {node}))
            for each in read_demands(documents)
        ]
    problem = build(read_fleet(answers(fleet)), wanted, most_moves=moves)
    solution = optimization.solve(problem, LONG).solution
    plan = make_plan(problem, solution)
    for each in plan.devices:
        assert all(name.startswith(each.device.node) for name in each.given)
    for move in plan.moves:
        assert move.source.node == move.target.node or not any(each.elsewhere for each in wanted)
    if not moves:
        assert sum(solution.served) == apart


# ---- the time limit


@pytest.fixture
def short() -> Problem:
    """Return a problem with two priorities, and more claims than devices."""
    wanted = [{"profile": "1g.6gb", "count": 9, "priority": 1}, {"count": 3}]
    return problem_of([Small(A30, ((14, 0),), enabled=True), Small(A30), Small(A30)], wanted)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets, for each step, whether the time ends before a proof, and before any result."""
    run = optimization._run

    def set_steps(*steps: str) -> None:
        left: Iterator[str] = iter(steps)

        def step(columns: Any, rows: Any, costs: Any, seconds: float) -> Any:
            how = next(left, "proven")
            found = run(columns, rows, costs, LONG)
            assert seconds <= LONG / 2
            if how == "proven":
                return found
            return replace(found, values=found.values if how == "feasible" else [], bound=math.inf, proven=False)

        monkeypatch.setattr(optimization, "_run", step)

    return set_steps


def test_solve_without_proof_returns_the_plan_with_its_bound(short: Problem, ended: Callable[..., None]) -> None:
    ended("feasible")
    found = optimization.solve(short, 0.5)
    plan = make_plan(short, found.solution)
    assert not found.most_served and not found.least_changed and "0.5 s" in found.remark
    assert found.solution.served == (9, 0) and found.solution.bounds == (9, 0) and plan.gaps == (0, 0)


def test_solve_without_result_of_all_configurations_uses_fewer(ended: Callable[..., None]) -> None:
    wanted = [{"profile": "1g.6gb", "count": 9, "priority": 1}, {"count": 3}]
    fleet = [Small(A30, ((14, 0), (14, 1)), frozenset({(14, 0)}), enabled=True), Small(A30)]
    problem = problem_of(fleet, wanted, 1)
    ended("nothing", "feasible")
    without_moves = optimization.solve(problem, LONG)
    assert without_moves.solution.served == (7, 0) and not without_moves.solution.gone
    ended("nothing", "nothing", "feasible", *["nothing"] * 20)
    unchanged = optimization.solve(problem, LONG)
    assert unchanged.solution.served[0] == 1 and make_plan(problem, unchanged.solution).touched == 0
    assert unchanged.solution.bounds == (9, 3) and not unchanged.most_served
    ended(*["nothing"] * 20)
    with pytest.raises(optimization.NotSolved, match="time limit"):
        optimization.solve(problem, LONG)


def test_solve_without_result_of_a_later_priority_keeps_the_plan(short: Problem, ended: Callable[..., None]) -> None:
    ended("proven", "nothing", "nothing", "nothing", "nothing", "nothing")
    found = optimization.solve(short, 0.5)
    plan = make_plan(short, found.solution)
    assert not found.most_served and not found.least_changed and "0.5 s" in found.remark
    # Nothing is known of the second priority but how many claims it has.
    assert found.solution.served[0] == 9 and found.solution.bounds == (9, 3)
    assert plan.gaps == (0, 3 - found.solution.served[1])


def test_solve_without_proof_of_fewest_changes_is_reported(short: Problem, ended: Callable[..., None]) -> None:
    ended("proven", "proven", "nothing")
    found = optimization.solve(short, 0.5)
    assert found.most_served and not found.least_changed and found.remark


@pytest.mark.parametrize("seconds", [0, -1])
def test_solve_without_time_fails(short: Problem, seconds: float) -> None:
    with pytest.raises(optimization.NotSolved, match="time limit"):
        optimization.solve(short, seconds)
