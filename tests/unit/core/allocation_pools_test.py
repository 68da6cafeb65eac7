# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The devices of a node in the published pools."""

from __future__ import annotations

import pytest
from allocation_model import TAINT, Json, at, claim, counters, device, published, request, taken_by, wanted
from dra_driver.core.allocation.reasons import evaluate_node
from dra_driver.core.allocation.search import Aborted


def test_pool_uses_newest_complete_generation_only() -> None:
    old, new = published(device("a")), published(device("b"), name="n-1", generation=2)
    assert [one.name for one in at([old, new]).devices()] == ["b"]
    half = published(device("b"), name="n-1", generation=2, count=2)
    (pool,) = at([old, half]).pools
    assert not pool.usable and pool.incomplete == "1 of 2 slices of generation 2 are there"
    assert taken_by(at([old, half]), claim()) is None
    with pytest.raises(
        Aborted, match=r"asks for all devices, but resource pool dev\.example\.com/n is currently being updated"
    ):
        taken_by(at([half]), claim(request(allocationMode="All")))
    # A slice of another node with a newer generation makes this node's slices outdated.
    elsewhere = published(device("c"), name="m", generation=3, nodeName="m")
    assert (
        at(
            [{**old, "spec": {**old["spec"], "pool": {**old["spec"]["pool"], "resourceSliceCount": 2}}}, elsewhere]
        ).pools
        == ()
    )


@pytest.mark.parametrize(
    ("slices", "words"),
    [
        ([published(device("a"), device("a"))], "device a is there twice"),
        ([published(device("a", draws={"units": 1}))], "device a draws on counters of set that are not there"),
        (
            [counters(units=1), published(device("a", draws={"other": 1}), count=2)],
            "device a draws on counters of set that are not there",
        ),
    ],
)
def test_pool_invalid_is_excluded_with_reason(slices: list[Json], words: str) -> None:
    there = at(slices)
    assert there.devices() == [] and there.pools[0].invalid == words
    assert f"pool dev.example.com/n is invalid: {words}" in evaluate_node(there, wanted(claim())).pools


def test_pool_per_device_node_selection() -> None:
    zone = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}
    reached = published(device("net"), pool="net", nodeName=None, nodeSelector=zone)
    own = [
        {**device("here"), "nodeName": "n"},
        {**device("there"), "nodeName": "m"},
        {**device("all"), "allNodes": True},
    ]
    each = published(*own, pool="own", nodeName=None, perDeviceNodeSelection=True)
    assert [one.name for one in at([reached, each]).devices()] == ["net", "here", "there", "all"]
    assert taken_by(at([reached, each]), claim(request(count=3))) == ["net", "here", "all"]
    assert at([reached], node={"metadata": {"name": "n"}}).devices() == []


def test_pool_order_binding_conditions_last() -> None:
    waits = {**device("w"), "bindingConditions": ["up"], "bindingFailureConditions": ["down"]}
    slices = [
        published(waits, pool="a"),
        published(device("2"), pool="b", name="b-1", count=2),
        published(device("1"), pool="b", name="b-0", count=2),
    ]
    assert [one.name for one in at(slices).devices()] == ["1", "2", "w"]


def test_taint_rules_taint_selected_devices() -> None:
    def rule(**selector: str) -> Json:
        return {"metadata": {"name": "r"}, "spec": {"deviceSelector": selector, "taint": TAINT}}

    slices = [published(device("a"), device("b"))]
    assert taken_by(at(slices, rules=[rule(device="a")]), claim()) == ["b"]
    assert taken_by(at(slices, rules=[rule(pool="n")]), claim()) is None
    assert taken_by(at(slices, rules=[rule()]), claim()) is None
    assert taken_by(at(slices, rules=[{"metadata": {"name": "r"}, "spec": {"taint": TAINT}}]), claim()) is None
    assert taken_by(at(slices, rules=[rule(pool="m"), rule(driver="other")]), claim()) == ["a"]
    tolerant = claim(request(tolerations=[{"key": "worn", "operator": "Equal", "value": "yes"}]))
    assert taken_by(at(slices, rules=[rule()]), tolerant) == ["a"]
