# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Cleanup after deleted nodes: the removed objects, and the objects that are never removed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from dra_driver.controller import facts
from dra_driver.controller.cleanup.cleanup_plan import (
    ABSENT,
    DEALLOCATE,
    DELETE_RULE,
    DELETE_SLICE,
    LIFT_RULE,
    OUT_OF_SERVICE,
    POD_ALIVE,
    POD_FINISHED,
    POD_GONE,
    RELEASE,
    ClusterView,
    SeenDrain,
    abandoned_drain_actions,
    absences,
    gone_nodes,
    next_gone,
    observe_drains,
    plan,
    pods_to_read,
)
from dra_driver.controller.facts import (
    ClaimFacts,
    Consumer,
    NodeFacts,
    RuleFacts,
    SliceFacts,
    claim_facts,
    node_facts,
    pinned_node,
    rule_facts,
    slice_facts,
)
from hypothesis import given
from hypothesis import strategies as st

DRAIN = Path(__file__).resolve().parents[3] / "plugins/module_utils/_drain/drain_plan.py"

OURS, THEIRS = "gpu.example.com", "other.example.com"
DRIVERS = (OURS,)
NODES = ("a", "b", "c")

some_nodes = st.builds(NodeFacts, st.sampled_from(NODES), st.just("uid"), st.booleans(), st.booleans())
some_slices = st.builds(
    SliceFacts,
    st.sampled_from("stuv"),
    st.just("uid"),
    st.sampled_from((OURS, THEIRS)),
    st.sampled_from((*NODES, "")),
    st.sampled_from(NODES),
    st.integers(0, 3),
    st.integers(1, 3),
    st.booleans(),
)
some_consumers = st.builds(
    Consumer, st.sampled_from(("pods", "podgroups")), st.sampled_from("pq"), st.sampled_from("12")
)
some_claims = st.builds(
    ClaimFacts,
    st.just("team"),
    st.sampled_from("wxyz"),
    st.just("uid"),
    st.sampled_from((*NODES, "")),
    st.sampled_from(((), (OURS,), (THEIRS,), (OURS, THEIRS))),
    st.lists(some_consumers, max_size=2).map(tuple),
    st.sampled_from(((), ("dra.accelerators/held",), ("somebody.example.com/held",))),
    st.booleans(),
    st.booleans(),
)
some_rules = st.builds(RuleFacts, st.sampled_from("rk"), st.just("uid"), st.sampled_from(NODES))
some_pods = st.dictionaries(
    st.tuples(st.just("team"), st.sampled_from("pq"), st.sampled_from("12")),
    st.sampled_from((POD_GONE, POD_FINISHED, POD_ALIVE)),
)


@st.composite
def views(draw: Any) -> ClusterView:
    nodes = {node.name: node for node in draw(st.lists(some_nodes, max_size=3))}
    return ClusterView(nodes, draw(st.lists(some_slices)), draw(st.lists(some_claims)), draw(st.lists(some_rules)))


@given(view=views(), since=st.dictionaries(st.sampled_from(NODES), st.floats(0, 200)), pods=some_pods)
def test_plan_keeps_objects_of_returning_nodes_and_claims_in_use(
    view: ClusterView, since: dict[str, float], pods: dict[Any, str]
) -> None:
    removed = gone_nodes(view, since, now=200.0, grace=100.0)
    for name, why in removed.items():
        node = view.nodes.get(name)
        if node is None:
            assert why == ABSENT and since[name] <= 100.0
        else:
            assert why == OUT_OF_SERVICE and node.out_of_service and not node.ready
    requested = pods_to_read(view, removed, DRIVERS)
    for action in plan(view, removed, pods, DRIVERS):
        assert action.node in removed and action.why
        if action.verb == DELETE_SLICE:
            assert any(
                one.name == action.name and one.driver == OURS and one.node == action.node and one.is_managed
                for one in view.slices
            )
        elif action.verb == DELETE_RULE:
            assert removed[action.node] == ABSENT
        else:
            claims = [one for one in view.claims if (one.name, one.node) == (action.name, action.node)]
            free = [
                one
                for one in claims
                if OURS in one.drivers
                and all(
                    consumer.resource == "pods"
                    and pods.get(("team", consumer.name, consumer.uid)) in (POD_GONE, POD_FINISHED)
                    for consumer in one.consumers
                )
            ]
            assert free, "a pod could use it"
            assert all(
                ("team", consumer.name, consumer.uid) in requested for claim in free for consumer in claim.consumers
            )


@given(view=views(), pods=some_pods)
def test_plan_removes_all_own_objects_of_an_absent_node(view: ClusterView, pods: dict[Any, str]) -> None:
    removed = {"a": ABSENT} if "a" not in view.nodes else {}
    planned = {(action.verb, action.name) for action in plan(view, removed, pods, DRIVERS)}
    for one in view.slices:
        if one.node in removed and one.driver == OURS and one.is_managed:
            assert (DELETE_SLICE, one.name) in planned
    for rule in view.rules:
        assert ((DELETE_RULE, rule.name) in planned) >= (rule.node in removed)
    for claim in view.claims:
        if claim.node in removed and OURS in claim.drivers and not claim.consumers:
            assert (DEALLOCATE, claim.name) in planned
            assert ((RELEASE, claim.name) in planned) >= (claim.finalizers == ("dra.accelerators/held",))


def test_absence_counts_from_its_detection_and_restarts_after_a_return() -> None:
    slices = [SliceFacts("s", "u", OURS, "a", "a", 1, 1, True)]
    away, back = ClusterView({}, slices), ClusterView({"a": NodeFacts("a", "u", True, False)}, slices)
    since = absences({}, away, DRIVERS, 10.0)
    assert gone_nodes(away, since, now=109.0, grace=100.0) == {}
    since = absences(since, back, DRIVERS, 109.5)
    since = absences(since, away, DRIVERS, 110.0)
    assert gone_nodes(away, since, now=209.0, grace=100.0) == {}
    assert next_gone(since, now=209.0, grace=100.0) == 1.0
    assert gone_nodes(away, since, now=210.0, grace=100.0) == {"a": ABSENT}
    assert next_gone(since, now=210.0, grace=100.0) == math.inf, "it is not waited for any more"


@pytest.mark.parametrize(
    ("ready", "tainted", "removed"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_out_of_service_taint_counts_only_if_the_node_is_not_ready(ready: bool, tainted: bool, removed: bool) -> None:
    view = ClusterView({"a": NodeFacts("a", "u", ready, tainted)})
    assert bool(gone_nodes(view, {}, now=0.0, grace=1.0)) == removed


def test_plan_stops_new_allocations_before_it_releases_claims() -> None:
    view = ClusterView(
        {},
        [SliceFacts("s", "u", OURS, "a", "a", 1, 1, True)],
        [ClaimFacts("team", "c", "u", "a", (OURS,), (), ("dra.accelerators/held",), True, False)],
        [RuleFacts("r", "u", "a")],
    )
    assert [action.verb for action in plan(view, {"a": ABSENT}, {}, DRIVERS)] == [
        *(DELETE_SLICE, DELETE_RULE, RELEASE, DEALLOCATE)
    ]


def test_facts_are_read_from_objects() -> None:
    node = {
        "metadata": {"name": "a", "uid": "n"},
        "spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]},
        "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
    }
    assert node_facts(node) == NodeFacts("a", "n", False, True)
    node["metadata"]["labels"] = {"dra.accelerators/kubelet-interface": "device-plugin"}
    assert node_facts(node) == NodeFacts("a", "n", False, True, uses_device_plugin=True)
    assert node_facts(
        {"metadata": {"name": "b"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    ).ready
    item = {
        "metadata": {"name": "s", "uid": "u", "managedFields": [{"manager": "dra-accelerators-driver"}]},
        "spec": {
            "driver": OURS,
            "nodeName": "a",
            "pool": {"name": "a", "generation": 4, "resourceSliceCount": 2},
            "devices": [{"name": "d"}],
        },
    }
    assert slice_facts(item) == SliceFacts("s", "u", OURS, "a", "a", 4, 2, True)
    assert not slice_facts({**item, "metadata": {"name": "s", "managedFields": [{"manager": "another"}]}}).is_managed
    selector = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}]}
    claim = {
        "metadata": {
            "namespace": "team",
            "name": "c",
            "uid": "u",
            "finalizers": ["resource.kubernetes.io/delete-protection"],
        },
        "status": {
            "allocation": {"devices": {"results": [{"driver": OURS}, {"driver": THEIRS}]}, "nodeSelector": selector},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "1"}],
        },
    }
    facts = claim_facts(claim)
    assert (facts.node, facts.drivers, facts.consumers) == ("a", (OURS, THEIRS), (Consumer("pods", "p", "1"),))
    assert claim_facts({"metadata": {"name": "c"}}).allocated is False
    ours = {"app.kubernetes.io/managed-by": "dra-accelerators", "dra.accelerators/node": "a"}
    assert rule_facts({"metadata": {"name": "r", "uid": "u", "labels": ours}}) == RuleFacts("r", "u", "a")
    assert rule_facts({"metadata": {"name": "r", "uid": "u", "labels": {"dra.accelerators/node": "a"}}}) is None
    assert rule_facts(drain_rule("r", "u")) == RuleFacts("r", "u", "a", "monday", "09:00")
    assert rule_facts(drain_rule("r", "u", manager="kubectl")) is None, "of another manager, for any label"


@pytest.mark.parametrize(
    "selector",
    [
        None,
        {"nodeSelectorTerms": []},
        {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a", "b"]}]}]},
        {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["a"]}]}]},
        {
            "nodeSelectorTerms": [
                {
                    "matchExpressions": [{"key": "zone", "operator": "In", "values": ["z"]}],
                    "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}],
                }
            ]
        },
    ],
)
def test_pinned_node_of_a_selector_for_several_nodes_is_empty(selector: Any) -> None:
    assert pinned_node(selector) == ""


def drain_rule(name: str, uid: str, *, manager: str = "dra.accelerators.device-drain") -> dict[str, Any]:
    """Return a rule as the module device_drain writes it, for a node whose name is too long for a label."""
    metadata = {
        "name": name,
        "uid": uid,
        "resourceVersion": "1",
        "labels": {"app.kubernetes.io/managed-by": "dra-accelerators", "dra.accelerators/drain": "monday"},
        "annotations": {"dra.accelerators/drain-node": "a", "dra.accelerators/drain-renewed": "09:00"},
        "managedFields": [{"manager": manager, "operation": "Update"}],
    }
    return {"metadata": metadata, "spec": {"deviceSelector": {"pool": "a"}}}


def test_drain_names_agree_with_the_module() -> None:
    """Controller and module are different programs, so their names have to agree."""
    found = re.findall(
        r"^(?:MANAGER|OPERATION_LABEL|SINCE, FOR_NODE|RENEWED)\b.* = (.*)$", DRAIN.read_text(), re.MULTILINE
    )
    assert [each.strip('"') for each in ", ".join(found).split(", ")][:2] == [facts.DRAIN_MANAGER, facts.DRAIN_LABEL]
    assert f'"{facts.DRAIN_NODE}"' in ", ".join(found)
    assert f'"{facts.DRAIN_RENEWED}"' in found


def test_left_drains_need_the_whole_time_in_this_process() -> None:
    drained, marked = RuleFacts("d", "u1", "a", "monday"), RuleFacts("m", "u2", "a")
    view = ClusterView({"a": NodeFacts("a", "n", True, False)}, rules=[drained, marked])
    seen = observe_drains({}, view, 100.0)
    assert seen == {"u1": SeenDrain(100.0, "")}, "a rule of another kind was written to stay"
    assert observe_drains(seen, view, 200.0) == seen
    assert observe_drains(seen, ClusterView({}), 200.0) == {}, "a drain that was away in between restarts its time"
    assert abandoned_drain_actions(view, seen, now=159.0, lasting=60.0) == []
    (action,) = abandoned_drain_actions(view, seen, now=160.0, lasting=60.0)
    assert (action.verb, action.name, action.uid, action.node) == (LIFT_RULE, "d", "u1", "a")
    assert abandoned_drain_actions(view, seen, now=1e9, lasting=0) == [], "0 is never"


def test_left_drains_exclude_a_renewed_drain() -> None:
    def view(sign: str) -> ClusterView:
        return ClusterView({"a": NodeFacts("a", "n", True, False)}, rules=[RuleFacts("d", "u1", "a", "monday", sign)])

    seen = observe_drains({}, view("09:00"), 100.0)
    later = observe_drains(seen, view("09:50"), 150.0)
    assert later == {"u1": SeenDrain(150.0, "09:50")}
    assert abandoned_drain_actions(view("09:50"), later, now=160.0, lasting=60.0) == []
    (action,) = abandoned_drain_actions(view("09:50"), later, now=210.0, lasting=60.0)
    assert action.renewed == "09:50", "what the API server must still say when the rule is lifted"
