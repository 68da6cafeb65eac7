# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The fleet planner: its plans are the best of all, keep held devices, and their layouts lead to the planned state."""

from __future__ import annotations

from typing import Any

import board_model
import chip_model
import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._planner.optimization import solve
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.layout_plan import (
    DestroyPartition,
    plan_layout,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules, wanted_for
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner import arrangements
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.demands import InvalidDemand, read_demands
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.fleet import Fleet, InvalidFleet, read_fleet
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.plan import Plan, layouts_of, make_plan
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.problem import Problem, build
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.solution import Solution
from ansible_collections.dra.accelerators.plugins.module_utils.core.store.prepared_claims import PreparedPartition
from hypothesis import example, given
from hypothesis import strategies as st
from planner_model import Small, Wish, answers, best, smalls, wishes_for, worth_of

A30, H100 = "a30", "h100-80"
SMALL, MIDDLE, LARGE = 19, 14, 9  # profiles of an H100: 1g.10gb, 2g.20gb, 3g.40gb
SMALL_A30 = 14
A30_NAMES = ("1g.6gb", "2g.12gb", "4g.24gb")
#: Seconds that no test needs.
LONG = 600.0
Json = dict[str, Any]


def planned(fleet: Any, wanted: list[Json], moves: int = 0, **more: Any) -> tuple[Problem, Solution, Plan]:
    nodes = answers(fleet, **more) if isinstance(fleet, list) else fleet
    problem = build(read_fleet(nodes), read_demands(wanted), most_moves=moves)
    solution = solve(problem, LONG).solution
    return problem, solution, make_plan(problem, solution)


def after(plan: Plan) -> list[list[str]]:
    """Return the planned profiles of each device, sorted by name. A device without static partitions has its mode instead."""
    found = []
    for each in plan.devices:
        assert each.rule is not None
        names = [one.profile for one in each.kept] + [profile.name for profile, _place in each.created]
        found.append(sorted(names) if each.rule["mode"] == "static" else [each.rule["mode"]])
    return found


# ---- the plan


def test_plan_uses_free_partitions_before_new_ones() -> None:
    fleet = [Small(H100), Small(H100, ((SMALL, 0), (SMALL, 3)), enabled=True)]
    _problem, solution, plan = planned(fleet, [{"profile": "1g.10gb", "count": 2}])
    assert solution.served == (2,) and after(plan) == [["whole"], ["1g.10gb", "1g.10gb"]]
    assert not any(each.changed for each in plan.devices) and plan.unplaceable == () and plan.gaps == (0,)


def test_plan_deletes_unused_partitions_only_if_needed() -> None:
    fleet = [Small(H100, ((SMALL, 0), (SMALL, 1), (LARGE, 4)), frozenset({(SMALL, 1)}), enabled=True)]
    _problem, solution, plan = planned(fleet, [{"profile": "2g.20gb"}])
    (device,) = plan.devices
    assert solution.served == (1,) and plan.destroyed == 0
    assert [each.placement.start for each in device.kept] == [0, 1, 4] and device.destroyed == ()
    _problem, solution, plan = planned(fleet, [{"profile": "2g.20gb", "count": 2}])
    assert solution.served == (2,) and plan.destroyed == 1
    assert [each.profile for each in plan.devices[0].destroyed] == ["3g.40gb"]
    assert (1, SMALL) in {(each.placement.start, each.profile_id) for each in plan.devices[0].kept}


def test_plan_serves_higher_priority_first() -> None:
    wanted = [{"name": "many", "profile": "1g.10gb", "count": 7}, {"name": "one", "priority": 1}]
    _problem, solution, plan = planned([Small(H100)], wanted)
    assert solution.served == (0, 1) and after(plan) == [["whole"]]
    (lacking,) = plan.unplaceable
    assert (lacking.demand.name, lacking.count, lacking.code) == ("many", 7, "taken-by-others")
    assert "one" in lacking.message and plan.gaps == (0, 0)


def test_plan_claim_has_all_devices_on_one_node() -> None:
    fleet = [Small(A30, node=f"node-{number // 2}") for number in range(4)]
    fleet[1] = Small(A30, occupied=True, node="node-0")
    _problem, solution, plan = planned(fleet, [{"devices": 2, "count": 2}, {"profile": "1g.6gb", "count": 4}])
    assert solution.served == (1, 4)
    assert [dict(each.given) for each in plan.devices] == [
        {"1g.6gb": 4},
        {},
        {"2 × whole device": 1},
        {"2 × whole device": 1},
    ]
    (lacking,) = plan.unplaceable
    assert lacking.code == "held" and "node" not in lacking.message


def test_plan_claim_with_several_device_kinds() -> None:
    fleet = [Small(A30, node="a"), Small(A30, node="b"), Small(H100, node="b")]
    wanted = [{"name": "both", "count": 2, "parts": [{"product": "*H100*"}, {"profile": "2g.12gb", "devices": 2}]}]
    _problem, solution, plan = planned(fleet, wanted)
    assert solution.served == (1,) and after(plan) == [["whole"], ["2g.12gb", "2g.12gb"], ["whole"]]


def test_plan_memory_request_uses_smallest_sufficient_device() -> None:
    _problem, _solution, plan = planned(
        [Small(H100), Small(A30)], [{"memory": "11Gi", "count": 2, "type": "partition"}]
    )
    assert after(plan) == [["whole"], ["2g.12gb", "2g.12gb"]]
    _problem, _solution, plan = planned([Small(H100)], [{"memory": "60Gi"}])
    assert after(plan) == [["whole"]]


def test_plan_moves_claims_only_with_consent() -> None:
    held = Small(A30, ((14, 0),), frozenset({(14, 0)}), enabled=True)
    wanted = [{"name": "whole"}]
    fleet = [held, Small(A30, ((14, 2),), frozenset({(14, 2)}), enabled=True, node="node-1")]
    _problem, solution, plan = planned(fleet, wanted)
    assert (
        solution.served == (0,) and plan.unplaceable[0].code == "held" and not any(one.changed for one in plan.devices)
    )
    _problem, solution, plan = planned(fleet, wanted, moves=1)
    assert solution.served == (1,)
    (move,) = plan.moves
    assert {move.source.node, move.target.node} == {"node-0", "node-1"} and move.claim.startswith("team/claim-")
    assert [list(each.leaving) for each in plan.devices if each.device.node == move.source.node] == [[move.claim]]
    assert sorted(map(tuple, after(plan))) == [("1g.6gb", "1g.6gb"), ("whole",)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"health": {"healthy": False, "causes": ["xid-79"]}}, "it is not well: xid-79"),
        ({"partitioning": {"supported": True, "enabled": True, "pending": False}}, "a change of its mode"),
    ],
)
def test_plan_faulty_or_changing_device_is_fixed(change: Json, reason: str) -> None:
    nodes = answers([Small(A30, enabled=True)])
    nodes["node-0"]["devices"][0].update(change)
    _problem, solution, plan = planned(nodes, [{"profile": "1g.6gb"}])
    assert solution.served == (0,) and plan.devices[0].device.fixed.startswith(reason)
    assert plan.devices[0].rule is None and layouts_of(plan, {}) == []


def test_plan_manually_created_partition_fixes_its_device() -> None:
    nodes = answers([Small(A30, ((14, 0), (14, 1)), enabled=True)])
    nodes["node-0"]["devices"][0]["partitions"][0].update(uuid="", owner="foreign")
    _problem, solution, plan = planned(nodes, [{"profile": "1g.6gb", "count": 3}])
    assert "created manually" in plan.devices[0].device.fixed and not plan.devices[0].changed
    assert solution.served == (2,) or solution.served == (1,)


def test_plan_keeps_current_rules_if_possible() -> None:
    dynamic = {"mode": "dynamic", "prepared_before_binding": True}
    _problem, solution, plan = planned([Small(A30)], [{"profile": "1g.6gb", "count": 4}], rule=dynamic)
    assert solution.served == (4,) and plan.devices[0].rule == dynamic and not plan.devices[0].changed
    shared = {"mode": "whole", "shares": 4}
    _problem, solution, plan = planned([Small(A30)], [{"profile": "1g.6gb"}, {"name": "w"}], rule=shared)
    assert solution.served == (0, 0) and plan.devices[0].rule == shared
    passed = {"mode": "whole", "passthrough": True}
    _problem, solution, plan = planned([Small(A30)], [{"profile": "1g.6gb"}, {"name": "w"}], rule=passed)
    assert solution.served == (0, 1) and plan.devices[0].rule == passed
    apart = {"mode": "whole", "composed": False}
    _problem, _solution, plan = planned([Small(A30)], [{"profile": "4g.24gb"}], rule=apart)
    assert plan.devices[0].rule == {
        "mode": "static",
        "partitions": [{"profile": "4g.24gb", "placement": 0}],
        "composed": False,
    }


def test_read_fleet_merges_claims_of_cluster_and_nodes() -> None:
    nodes = answers([Small(A30), Small(A30)])
    uuids = [each["uuid"] for each in nodes["node-0"]["devices"]]
    whole = {"namespace": "team", "name": "a", "devices": [{"uuid": uuids[0], "node": "node-0"}]}
    part = {"namespace": "team", "name": "b", "devices": [{"uuid": "", "parent_uuid": uuids[1], "node": "node-0"}]}
    watching = {"namespace": "team", "name": "c", "devices": [{"uuid": uuids[1], "admin_access": True}]}
    fleet = read_fleet(nodes, [whole, part, watching])
    assert fleet.devices[0].occupants == ("team/a",) and not fleet.devices[0].fixed
    assert fleet.devices[1].fixed == "the claim team/b has a part of it that is not prepared yet"
    assert read_fleet(nodes, [watching]).claims == {}
    lost = {"namespace": "team", "name": "d", "devices": [{"uuid": "", "node": "node-0"}]}
    assert all("team/d" in each.fixed for each in read_fleet(nodes, [lost]).devices)


def npu(kind: str, physical: int = 0, slices: tuple[Any, ...] = ()) -> Json:
    from ansible_collections.dra.accelerators.plugins.module_utils._report.device_facts import device_facts

    return device_facts(chip_model.device(kind, slices, physical))


@pytest.mark.parametrize(
    ("kind", "template", "most"), [("310P", "vir02", 3), ("910A", "vir08", 4), ("910B3", "vir10_3c_32g", 2)]
)
def test_plan_partitions_npus(kind: str, template: str, most: int) -> None:
    nodes = {"n": {"devices": [npu(kind)]}}
    problem, solution, plan = planned(nodes, [{"profile": template, "count": most + 1}])
    assert solution.served == (most,) and plan.gaps == (0,)
    (entry,) = layouts_of(plan, {})
    device = problem.fleet.devices[0].device
    steps = plan_layout(device, parse_rules(entry["layout"])[0]).steps
    assert sum(type(step).__name__ == "CreatePartition" for step in steps) == most


def test_plan_unplaceable_request_names_existing_devices() -> None:
    _problem, _solution, plan = planned([Small(A30)], [{"profile": "1g.10gb", "count": 2}, {"memory": "500Gi"}])
    assert [each.code for each in plan.unplaceable] == ["no-such-device"] * 2
    assert "NVIDIA A30" in plan.unplaceable[0].message
    _problem, _solution, plan = planned([Small(A30)], [{"profile": "1g.6gb", "count": 5}])
    assert (plan.unplaceable[0].count, plan.unplaceable[0].code) == (1, "too-few-devices")


# ---- properties


def see_consistent(fleet: list[Small], problem: Problem, solution: Solution, plan: Plan, nodes: Json) -> None:
    """Assert the properties of each plan: layouts lead to it, held partitions stay or move, and the counts add up."""
    by_uuid = {rule["match"]["uuid"][0]: rule for entry in layouts_of(plan, {}) for rule in entry["layout"]}
    assert by_uuid or not fleet
    destroyed = touched = 0
    for small, each in zip(fleet_in_order(fleet, problem.fleet), plan.devices):
        device = each.device.device
        rules = parse_rules([rule for entry in layouts_of(plan, {}) for rule in entry["layout"]])
        rule = wanted_for(device, rules)
        assert rule is not None
        held = [
            PreparedPartition(names[0], device.uuid, one.uuid, one.profile_id, one.placement)
            for number, one in enumerate(device.partitions)
            for names in [each.device.holders.get(number)]
            if names
        ]
        steps = plan_layout(device, rule, prepared=held, refuse=False)
        gone = {step.partition.uuid for step in steps.steps if isinstance(step, DestroyPartition)}
        assert gone == {one.uuid for one in each.destroyed}
        assert {one.claims for one in steps.blockers if one.partition} == {
            (claim,) for claim in each.leaving if "whole" not in claim
        }
        destroyed += len(gone) - sum("whole" not in claim for claim in each.leaving)
        touched += each.changed
        if small.occupied and not each.leaving:
            assert each.rule == {"mode": "whole"} and not each.given
        # The assigned partitions exist in addition to those that claims keep.
        total = sum(each.given.values()) + sum(
            use.demand < 0 for use in solution.uses.get(plan.devices.index(each), ())
        )
        staying = len(held) - sum("whole" not in claim for claim in each.leaving)
        assert rule.mode == "whole" or total + staying <= sum(one.count for one in rule.partitions)
        assert rule.mode != "whole" or total <= 1
    moved = sum(count for amounts in solution.gone.values() for _item, count in amounts)
    assert (destroyed, touched, len(plan.moves)) == (plan.destroyed, plan.touched, moved)
    for demand, count in zip(problem.demands, solution.served):
        given = sum(each.given.get(demand.name, 0) for each in plan.devices)
        assert given == count * demand.devices <= demand.count * demand.devices


def fleet_in_order(fleet: list[Small], read: Fleet) -> list[Small]:
    return [fleet[each.device.index] for each in read.devices]


@given(
    st.lists(smalls([A30]), min_size=1, max_size=3),
    wishes_for(A30_NAMES, most_devices=2),
    st.sampled_from([0, 0, 1]),
)
def test_plan_equals_best_plan(fleet: list[Small], wishes: list[Wish], moves: int) -> None:
    nodes = answers(fleet)
    wanted = [each.document(number) for number, each in enumerate(wishes)]
    problem, solution, plan = planned(nodes, wanted, moves)
    see_consistent(fleet, problem, solution, plan, nodes)
    most = best(fleet, wishes, moves)
    assert worth_of(problem, solution, plan) == most
    assert solution.bounds == most[: len(problem.priorities)] and not any(plan.gaps)


@pytest.mark.prove
@given(
    st.lists(smalls([H100], nodes=1), min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 4), st.integers(0, 2)
)
def test_plan_of_larger_boards_is_consistent(fleet: list[Small], ones: int, twos: int, wholes: int) -> None:
    wanted = [
        {"name": "ones", "profile": "1g.10gb", "count": ones},
        {"name": "twos", "memory": "15Gi", "count": twos, "priority": 3},
        {"name": "wholes", "count": wholes},
    ]
    nodes = answers(fleet)
    problem, solution, plan = planned(nodes, wanted, 1)
    see_consistent(fleet, problem, solution, plan, nodes)
    assert planned(nodes, wanted, 1)[2] == plan


@given(st.lists(smalls([A30]), min_size=1, max_size=4), wishes_for(A30_NAMES))
@example(
    # The higher priority takes the partition that the other request needs, although a different one would serve it too.
    [Small(A30, ((SMALL_A30, 0),), enabled=True), Small(A30)],
    [Wish(1, 0, profile="1g.6gb"), Wish(1, 5, memory=5 * 2**30)],
)
def test_plan_served_without_changes_changes_nothing(fleet: list[Small], wishes: list[Wish]) -> None:
    problem, solution, plan = planned(fleet, [each.document(number) for number, each in enumerate(wishes)])
    most = best(fleet, wishes, as_it_is=True)
    assert worth_of(problem, solution, plan) >= most
    if worth_of(problem, solution, plan) == most:
        assert not any(each.changed for each in plan.devices)


@given(st.lists(smalls([A30]), min_size=1, max_size=4), wishes_for(A30_NAMES))
@example([Small(A30, enabled=True), Small(A30)], [Wish(1, 0, profile="1g.6gb"), Wish(1, 5, memory=5 * 2**30)])
def test_plan_of_previous_result_changes_nothing(fleet: list[Small], wishes: list[Wish]) -> None:
    wanted = [each.document(number) for number, each in enumerate(wishes)]
    nodes = answers(fleet)
    _problem, first, plan = planned(nodes, wanted)
    for each in plan.devices:
        (facts,) = [one for one in nodes[each.device.node]["devices"] if one["uuid"] == each.device.device.uuid]
        assert each.rule is not None
        kept = {(one.profile_id, one.placement.start): one for one in each.kept}
        made = [(profile.profile_id, place.start) for profile, place in each.created if place is not None]
        claims = {(one["profile_id"], one["placement"]["start"]): one["claims"] for one in facts["partitions"]}
        later = board_model.device(A30, facts["index"], places=(*kept, *made), enabled=each.rule["mode"] == "static")
        from ansible_collections.dra.accelerators.plugins.module_utils._report.device_facts import device_facts

        later_facts = device_facts(later)
        for one in later_facts["partitions"]:
            one.update(owner="administrator", claims=claims.get((one["profile_id"], one["placement"]["start"]), []))
        facts.update({key: later_facts[key] for key in ("partitions", "partitioning")})
    problem, second, again = planned(nodes, wanted)
    priorities = len(problem.priorities)
    assert worth_of(problem, second, again)[:priorities] == worth_of(problem, first, plan)[:priorities]
    assert not any(each.changed for each in again.devices)


# ---- refused inputs


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, "must be a list"),
        ([{"profil": "1g.10gb"}], "unknown key profil"),
        ([{"count": -1}], "key count: expected a whole number from 0"),
        ([{"count": True}], "key count"),
        ([{"devices": 0}], "key devices"),
        ([{"memory": "20 gigabytes"}], "key memory"),
        ([{"type": "half"}], "not one of any, whole, partition"),
        ([{"type": "whole", "profile": "1g.10gb"}], "a whole device has no profile"),
        ([{"priority": "high"}], "key priority"),
        ([{"name": "a"}, {"name": "a"}], "Several entries of the wanted devices have the name a"),
        ([{"parts": []}], "at least one part"),
        ([{"parts": [{"count": 1}]}], "unknown key count"),
        ([{"parts": [{}], "profile": "1g.10gb"}], "cannot be combined with parts"),
        ([7], "expected a mapping"),
        ([{"vendor": ""}], "key vendor"),
    ],
)
def test_parse_invalid_requests_are_rejected(document: Any, says: str) -> None:
    with pytest.raises(InvalidDemand, match=says):
        read_demands(document)


def test_read_fleet_invalid_inventory_is_rejected() -> None:
    with pytest.raises(InvalidFleet, match="node-9 are not the answer"):
        read_fleet({"node-9": {"devices": [{"uuid": "x"}]}})
    nodes = answers([Small(A30)])
    with pytest.raises(InvalidFleet, match="share the UUID"):
        read_fleet({**nodes, "other": nodes["node-0"]})
    nodes["node-0"]["devices"][0]["rule"] = {"mode": "sideways"}
    with pytest.raises(InvalidFleet, match="sideways"):
        read_fleet(nodes)
    assert read_fleet({"silent": {}}).devices == ()


def test_plan_too_many_arrangements_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrangements, "MOST", 10)
    with pytest.raises(AcceleratorError, match="fewer different profiles"):
        planned([Small(H100)], [{"profile": "1g.10gb"}])
