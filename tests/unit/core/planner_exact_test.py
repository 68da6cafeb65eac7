# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The exact solver against trying everything, and the choice between it and the core's own search."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_model import Small, Wish, answers, best, smalls, wishes_for

UTILS = "ansible_collections.dra.accelerators.plugins.module_utils"
exact = importlib.import_module(f"{UTILS}._plan_exact")
problems, plans = (importlib.import_module(f"{UTILS}.core.planner.{name}") for name in ("problem", "plan"))
fleets, demands = (importlib.import_module(f"{UTILS}.core.planner.{name}") for name in ("fleet", "demands"))
A30, H100 = "a30", "h100-80"
A30_NAMES = ("1g.6gb", "2g.12gb", "4g.24gb")
LONG = 600.0


def problem_of(fleet: list[Small], wanted: list[dict[str, Any]], moves: int = 0) -> Any:
    return problems.build(fleets.read_fleet(answers(fleet)), demands.read_demands(wanted), most_moves=moves)


@given(
    st.lists(smalls([A30]), min_size=1, max_size=3),
    wishes_for(A30_NAMES, most_devices=2),
    st.sampled_from([0, 0, 1]),
)
def test_the_exact_solver_finds_what_trying_everything_finds(
    fleet: list[Small], wishes: list[Wish], moves: int
) -> None:
    problem = problem_of(fleet, [each.document(number) for number, each in enumerate(wishes)], moves)
    found = exact.solve(problem, "exact", LONG)
    most = best(fleet, wishes, moves)
    assert found.solution.worth(problem) == most and found.most_served and found.least_changed
    assert tuple(found.solution.bounds) == most[: len(problem.priorities)]
    # The layouts can be made of it, and what is searched for stays within what it says of itself.
    plan = plans.make_plan(problem, found.solution)
    assert sum(each.changed for each in plan.devices) == found.solution.touched
    assert len(plan.moves) == found.solution.moves
    searched = exact.solve(problem, "heuristic", LONG)
    assert searched.solution.worth(problem) <= most
    assert not searched.most_served or searched.solution.worth(problem)[: len(found.solution.bounds)] == tuple(
        found.solution.bounds
    )
    assert exact.solve(problem, "auto", LONG).solution.worth(problem) == most


@given(st.lists(smalls([H100], nodes=1), min_size=1, max_size=6), st.integers(0, 9), st.integers(0, 6))
def test_the_exact_solver_is_never_worse_on_larger_boards(fleet: list[Small], ones: int, threes: int) -> None:
    wanted = [
        {"name": "ones", "profile": "1g.10gb", "count": ones},
        {"name": "threes", "memory": "30Gi", "count": threes, "priority": 3},
        {"name": "whole"},
    ]
    problem = problem_of(fleet, wanted, 1)
    found, searched = exact.solve(problem, "exact", LONG), exact.solve(problem, "heuristic", LONG)
    assert found.solution.worth(problem) >= searched.solution.worth(problem)
    assert all(most >= reached for most, reached in zip(searched.solution.bounds, found.solution.worth(problem)))
    assert plans.make_plan(problem, found.solution) == plans.make_plan(
        problem, exact.solve(problem, "exact", LONG).solution
    )


@given(
    st.lists(smalls([A30]), min_size=1, max_size=4),
    wishes_for(A30_NAMES, most_devices=2),
    wishes_for(A30_NAMES, most_devices=2),
    st.sampled_from([0, 0, 2]),
)
def test_what_may_not_go_to_other_nodes_is_planned_as_if_its_node_were_alone(
    fleet: list[Small], first: list[Wish], second: list[Wish], moves: int
) -> None:
    fleet = [replace(each, node=f"node-{number % 2}") for number, each in enumerate(fleet)]
    wishes = {"node-0": first, "node-1": second}
    apart = 0
    wanted: list[Any] = []
    for node, those in wishes.items():
        documents = [{**each.document(number), "priority": 0} for number, each in enumerate(those)]
        # No claim moves from one node to another where different pods wait.
        alone = problem_of([each for each in fleet if each.node == node], documents, 0)
        apart += sum(exact.solve(alone, "exact", LONG).solution.served) if alone.fleet.devices else 0
        wanted += [
            replace(each, name=f"{node} {each.name}", elsewhere=frozenset({*wishes} - {node}))
            for each in demands.read_demands(documents)
        ]
    problem = problems.build(fleets.read_fleet(answers(fleet)), wanted, most_moves=moves)
    for solver in ("exact", "heuristic"):
        solution = exact.solve(problem, solver, LONG).solution
        plan = plans.make_plan(problem, solution)
        for each in plan.devices:
            assert all(name.startswith(each.device.node) for name in each.given)
        for move in plan.moves:
            assert move.source.node == move.target.node or not any(each.elsewhere for each in wanted)
        if solver == "exact" and not moves:
            assert sum(solution.served) == apart


def test_without_the_package_the_search_is_used_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "HAS_HIGHS", False)
    wanted = [{"profile": "2g.12gb"}]
    problem = problem_of([Small(A30, ((14, 0), (14, 1)), enabled=True)], [*wanted, {"profile": "4g.24gb"}])
    found = exact.solve(problem, "auto", LONG)
    assert found.solver == "heuristic" and "highspy" in found.remark
    with pytest.raises(exact.NoSolver, match="pip install highspy"):
        exact.solve(problem, "exact", LONG)


def test_no_time_and_too_many_numbers_leave_it_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of([Small(A30)] * 3, [{"profile": "1g.6gb", "count": 2}, {"count": 3}])
    monkeypatch.setattr(exact, "MOST_COLUMNS", 3)
    assert "too large" in exact.solve(problem, "auto", LONG).remark
    monkeypatch.undo()
    monkeypatch.setattr(exact, "_run", lambda *_arguments: exact._Found([], float("inf"), False), raising=True)
    assert "no plan in" in exact.solve(problem, "auto", 0.5).remark
    with pytest.raises(exact.NotSolved):
        exact.solve(problem, "exact", 0.5)
