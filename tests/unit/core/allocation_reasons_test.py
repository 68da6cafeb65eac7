# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Reasons why the scheduler finds no devices on a node, and the changes that would help."""

from __future__ import annotations

from collections.abc import Sequence

from allocation_model import (
    DRIVER,
    PARTS,
    TAINT,
    Json,
    Judge,
    at,
    claim,
    counters,
    device,
    finding_for,
    holds,
    published,
    request,
    taken_by,
    wanted,
)
from dra_driver.core.allocation.changes import Change, nearest
from dra_driver.core.allocation.search import NodeSearch


def test_reasons_list_each_obstacle_with_devices_and_claims() -> None:
    devices = [
        device("a", kind="x"),
        device("b", kind="y"),
        {**device("c", kind="x"), "taints": [TAINT]},
        device("d", kind="x"),
        device("e"),
    ]
    there = at([published(*devices)], [holds("h", "d")])
    (found,) = finding_for(there, claim(request(count=2, selectors=["kind=x"]))).requests
    assert (found.wanted, found.devices, found.free, found.short) == (2, 5, 1, True)
    kinds = {one.kind: one for one in found.obstacles}
    assert {kind: one.devices for kind, one in kinds.items()} == {
        "selector": ("n/b",),
        "taint": ("n/c",),
        "claim": ("n/d",),
        "selector-error": ("n/e",),
    }
    assert kinds["claim"].claims == ("default/h",) and kinds["taint"].taints == ("worn=yes:NoSchedule",)


def test_reasons_conflicting_requests_are_explained() -> None:
    there = at([published(device("a", root="x"), device("b", root="y"))])
    agree = [{"matchAttribute": f"{DRIVER}/root"}]
    assert (
        f"agree in {DRIVER}/root; free are 1 with x, 1 with y"
        in finding_for(there, claim(request(count=2), constraints=agree)).together
    )
    one = at([published(device("a"))])
    assert "they want the same devices" in finding_for(one, claim(request("a"), request("b"))).together
    assert "3 devices; of the free ones at most 2 fit" in finding_for(at(PARTS), claim(request(count=3))).together
    # A request that alone has too few devices is reported elsewhere.
    assert finding_for(one, claim(request(count=2))).together == ""


def changes(there: NodeSearch, *claims: Json, beside: Sequence[NodeSearch] = ()) -> list[Change]:
    finding = finding_for(there, *claims)
    return nearest([(there, finding)], wanted(*claims), Judge(), everywhere=[there, *beside])


def test_changes_smallest_is_first() -> None:
    tainted = {**device("t"), "taints": [TAINT, {**TAINT, "key": "hot"}, {**TAINT, "key": "none", "effect": "None"}]}
    there = at([published(device("a"), device("b"), tainted)], [holds("g", "a"), holds("h", "b")])
    tolerate, free = changes(there, claim())
    assert (tolerate.kind, tolerate.taints) == ("tolerate", ("hot=yes:NoSchedule", "worn=yes:NoSchedule"))
    assert (free.kind, free.claims) == ("free-claims", ("default/g",))
    assert [one.claims for one in changes(there, claim(request(count=2))) if one.kind == "free-claims"] == [
        ("default/g", "default/h")
    ]
    both = [one for one in changes(there, claim(request(count=3))) if one.kind == "tolerate"]
    assert both[0].claims == ("default/g", "default/h") and both[0].taints
    (nothing,) = changes(there, claim(request(count=4)))[:1]
    assert nothing.kind in ("ask-for-less", "nothing")


def test_changes_each_makes_the_claim_fit() -> None:
    held = [holds("g", "p0"), holds("h", "p2")]
    for count in (1, 2):
        for change in changes(at(PARTS, held), claim(request(count=count))):
            if change.kind == "free-claims":
                left = [one for one in held if f"default/{one['metadata']['name']}" not in change.claims]
                assert taken_by(at(PARTS, left), claim(request(count=count))) is not None
    less = [one for one in changes(at(PARTS), claim(request(count=3))) if one.kind == "ask-for-less"]
    assert less[0].text == "ask for 2 instead of 3 in request r"


def test_changes_repartition_like_device_on_other_node() -> None:
    whole = device("w", uuid="U1", productName="P", kind="whole")
    part = device("p0", draws={"units": 1}, parentUUID="U2", productName="P", kind="part")
    model_slices = [
        {**counters(units=4), "spec": {**counters(units=4)["spec"], "nodeName": "m"}},
        published(part, {**part, "name": "p1"}, name="m-1", count=2, nodeName="m"),
    ]
    model = at(model_slices, node={"metadata": {"name": "m"}})
    wanted_claim = claim(request(count=2, selectors=["kind=part"]))
    (change,) = [
        one for one in changes(at([published(whole)]), wanted_claim, beside=[model]) if one.kind == "repartition"
    ]
    assert change.device == "n/w" and "parts like n/p0 of node m" in change.text
    other = at([published({**whole, "attributes": {**whole["attributes"], "productName": {"string": "Q"}}})])
    taken_already = at([published(whole)], [holds("h", "w")])
    # The taint on the GPU would also apply to its partitions.
    assert not [
        one
        for one in changes(at([published({**whole, "taints": [TAINT]})]), wanted_claim, beside=[model])
        if one.kind == "repartition"
    ]
    for there in (other, taken_already):
        assert not [one for one in changes(there, wanted_claim, beside=[model]) if one.kind == "repartition"]
    assert not [
        one
        for one in changes(at([published(whole)]), claim(request(count=3, selectors=["kind=part"])), beside=[model])
        if one.kind == "repartition"
    ]


def test_changes_error_needs_guard_incomplete_pool_needs_wait() -> None:
    there = at([published(device("a"), device("b", kind="x"))])
    (guard,) = changes(there, claim(request(selectors=["kind=x"])))
    assert guard.kind == "guard-attribute" and "node n has devices for it" in guard.text
    (wait,) = changes(at([published(device("a"), count=2)]), claim())
    assert wait.kind == "wait"
