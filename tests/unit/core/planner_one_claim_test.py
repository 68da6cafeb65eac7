# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of one claim on one node, without a solver: as good as the best of all plans, and its tie-breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._planner.optimization import solve
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import Unsupported
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.demands import Demand, read_demands
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.fleet import read_fleet
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.one_claim import place_claim
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.plan import make_plan
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.problem import Problem, build
from hypothesis import given
from hypothesis import strategies as st
from planner_model import Small, Wish, answers, best, smalls, wishes_for, worth_of

A30, H100 = "a30", "h100-80"
A30_NAMES = ("1g.6gb", "2g.12gb", "4g.24gb")
SMALL, LARGE = 19, 9  # profiles of an H100: 1g.10gb, 3g.40gb
LONG = 600.0


def problem_of(fleet: list[Small], *parts: dict[str, Any]) -> Problem:
    return build(read_fleet(answers(fleet)), read_demands([{"name": "claim", "parts": [*parts]}]))


def changed(problem: Problem) -> list[tuple[int, list[str]]]:
    """Return the indexes of the changed devices, with the profiles of their new partitions."""
    solution = place_claim(problem)
    assert solution is not None
    return [
        (each.device.device.index, sorted(profile.name for profile, _place in each.created))
        for each in make_plan(problem, solution).devices
        if each.changed
    ]


@given(st.lists(smalls([A30], nodes=1), min_size=1, max_size=3), wishes_for(A30_NAMES), st.integers(1, 4))
def test_place_claim_equals_best_plan(fleet: list[Small], wishes: list[Wish], devices: int) -> None:
    wish = replace(wishes[0], count=1, devices=devices)
    problem = build(read_fleet(answers(fleet)), read_demands([wish.document(0)]))
    solution, most = place_claim(problem), best(fleet, [wish])
    if solution is None:
        assert most[0] == 0
    else:
        assert worth_of(problem, solution, make_plan(problem, solution)) == most


@given(
    st.lists(smalls([A30, H100], nodes=1), min_size=1, max_size=5),
    st.lists(
        st.fixed_dictionaries(
            {"devices": st.integers(1, 3), "type": st.just("any"), "memory": st.sampled_from(["5Gi", "15Gi", "30Gi"])},
            optional={"product": st.sampled_from(["*A30*", "*H100*"])},
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_place_claim_with_several_parts_equals_solver(fleet: list[Small], parts: list[Any]) -> None:
    problem = problem_of(fleet, *parts)
    solution, solved = place_claim(problem), solve(problem, LONG).solution
    if solution is None:
        assert solved.served == (0,)
    else:
        own, other = (worth_of(problem, each, make_plan(problem, each)) for each in (solution, solved))
        assert own == other
        for number, part in enumerate(parts):
            uses = [use.item for those in solution.uses.values() for use in those if use.part == number]
            assert len(uses) == part["devices"] and set(uses) <= set(problem.wants[0][number])


def test_place_claim_uses_the_first_of_equal_devices() -> None:
    assert changed(problem_of([Small(A30)] * 3, {"profile": "1g.6gb"})) == [(0, ["1g.6gb"])]


def test_place_claim_keeps_whole_devices_and_uses_smallest_partition() -> None:
    held = Small(H100, ((LARGE, 0),), frozenset({(LARGE, 0)}), enabled=True)
    assert changed(problem_of([Small(H100), held], {"memory": "5Gi", "type": "partition"})) == [(1, ["1g.10gb"])]


def test_place_claim_keeps_existing_partitions() -> None:
    free = Small(H100, ((SMALL, 0), (LARGE, 4)), frozenset({(SMALL, 0)}), enabled=True)
    assert changed(problem_of([free], {"profile": "2g.20gb"})) == [(0, ["2g.20gb"])]
    problem = problem_of([free], {"profile": "3g.40gb", "devices": 2})
    assert place_claim(problem) is None


def test_place_claim_without_devices_needs_nothing() -> None:
    problem = build(read_fleet(answers([Small(A30)])), [Demand("claim", 1, ())])
    solution = place_claim(problem)
    assert solution is not None and not solution.uses


def test_place_claim_with_too_many_kinds_is_rejected() -> None:
    parts = [{"memory": f"{memory}Gi", "type": "any", "devices": 8} for memory in (1, 8, 15, 30, 70)]
    with pytest.raises(Unsupported, match="fewer different devices"):
        place_claim(problem_of([Small(H100)], *parts))
