# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the scheduler finds on a node, why it finds nothing, and what would have to change. The real scheduler judges the same in tests/oracles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from dra_driver.core.allocation import search
from dra_driver.core.allocation.capacity import lacking, taken
from dra_driver.core.allocation.changes import Change, nearest
from dra_driver.core.allocation.explanation import Cluster, Explainer, explain
from dra_driver.core.allocation.nodes import selects, tolerates, why_not_asked
from dra_driver.core.allocation.objects import (
    Device,
    Malformed,
    NotJudged,
    SelectorFailed,
    WantedClaim,
    held_by,
    wanted_claim,
)
from dra_driver.core.allocation.pools import Inventory
from dra_driver.core.allocation.reasons import NodeFinding, look
from dra_driver.core.allocation.search import Aborted, NodeSearch, TooManyAttempts, compatible
from dra_driver.core.allocation.text import lines, text
from hypothesis import given
from hypothesis import strategies as st

Json = dict[str, Any]
DRIVER = "dev.example.com"
ANY = {"metadata": {"name": "any"}, "spec": {}}
NODE = {"metadata": {"name": "n", "labels": {"zone": "a"}}}
TAINT = {"key": "worn", "value": "yes", "effect": "NoSchedule"}


class Judge:
    """Expressions are ``attribute=value``; one without the attribute has an error, and ``?`` is not judged."""

    def matches(self, expression: str, device: Device) -> bool:
        if expression == "?":
            raise NotJudged("it is not judged")
        name, _equal, value = expression.partition("=")
        found = device.attribute(f"{DRIVER}/{name}")
        if found is None:
            raise SelectorFailed(
                f"selector {expression!r}: no such key: {name}", hint="Guard it.", reason=f"no such key: {name}"
            )
        return str(next(iter(found.values()))) == value

    def value(self, expression: str, device: Device) -> Json:
        return {"string": f"{expression} {device.name[-1]}"}


def device(name: str, *, draws: Json | None = None, memory: str = "8Gi", **attributes: Any) -> Json:
    made: Json = {"name": name, "capacity": {"memory": {"value": memory}}}
    made["attributes"] = {key: {"int" if isinstance(one, int) else "string": one} for key, one in attributes.items()}
    if draws:
        made["consumesCounters"] = [
            {"counterSet": "set", "counters": {key: {"value": str(one)} for key, one in draws.items()}}
        ]
    return made


def published(
    *devices: Json, name: str = "n-0", count: int = 1, generation: int = 1, pool: str = "n", **more: Any
) -> Json:
    spec = {
        "driver": DRIVER,
        "nodeName": "n",
        "pool": {"name": pool, "generation": generation, "resourceSliceCount": count},
    }
    spec.update({"devices": list(devices)}, **more)
    return {"metadata": {"name": name}, "spec": {key: one for key, one in spec.items() if one is not None}}


def counters(**amounts: int) -> Json:
    sets = [{"name": "set", "counters": {key: {"value": str(one)} for key, one in amounts.items()}}]
    return published(name="n-counters", count=2, devices=None, sharedCounters=sets)


def request(name: str = "r", **more: Any) -> Json:
    selectors = [{"cel": {"expression": one}} for one in more.pop("selectors", ())]
    return {"name": name, "exactly": {"deviceClassName": "any", "selectors": selectors, **more}}


def claim(*requests: Json, constraints: Sequence[Json] = (), name: str = "c", **more: Any) -> Json:
    spec = {"devices": {"requests": list(requests or (request(),)), "constraints": list(constraints)}}
    return {"kind": "ResourceClaim", "metadata": {"name": name, "namespace": "default"}, "spec": spec, **more}


def holds(name: str, *devices: str, **result: Any) -> Json:
    results = [{"request": "r", "driver": DRIVER, "pool": "n", "device": each, **result} for each in devices]
    return claim(name=name, status={"allocation": {"devices": {"results": results}}})


def at(
    slices: Sequence[Json], held: Sequence[Json] = (), rules: Sequence[Json] = (), node: Json | None = None
) -> NodeSearch:
    where = node or NODE
    return NodeSearch(where, Inventory(slices, rules).pools(where), held_by(held), Judge())


def wanted(*claims: Json) -> list[WantedClaim]:
    return [wanted_claim(each, {"any": ANY}) for each in claims]


def taken_by(there: NodeSearch, *claims: Json) -> list[str] | None:
    found = there.find(wanted(*claims))
    return None if found is None else [each.device.name for each in found]


# ---------------------------------------------------------------------- pools


def test_of_a_pool_the_newest_generation_counts_and_half_of_it_gives_nothing() -> None:
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
    # Another node's slice of a newer generation puts this node's out of date.
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
def test_an_invalid_pool_gives_nothing_and_says_why(slices: list[Json], words: str) -> None:
    there = at(slices)
    assert there.devices() == [] and there.pools[0].invalid == words
    assert f"pool dev.example.com/n is invalid: {words}" in look(there, wanted(claim())).pools


def test_devices_of_other_nodes_and_those_that_say_it_themselves() -> None:
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


def test_pools_are_taken_in_order_and_those_with_binding_conditions_last() -> None:
    waits = {**device("w"), "bindingConditions": ["up"], "bindingFailureConditions": ["down"]}
    slices = [
        published(waits, pool="a"),
        published(device("2"), pool="b", name="b-1", count=2),
        published(device("1"), pool="b", name="b-0", count=2),
    ]
    assert [one.name for one in at(slices).devices()] == ["1", "2", "w"]


def test_rules_taint_what_they_select() -> None:
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


# ---------------------------------------------------------------------- the search

PARTS = [
    counters(units=4),
    published(*(device(f"p{number}", draws={"units": size}) for number, size in enumerate((2, 2, 1, 3))), count=2),
]


def test_counters_are_kept_and_those_that_claims_have_are_gone() -> None:
    assert taken_by(at(PARTS), claim(request(count=2))) == ["p0", "p1"]
    assert taken_by(at(PARTS), claim(request(count=3))) is None
    assert taken_by(at(PARTS, [holds("h", "p2")]), claim(request("a"), request("b"))) is None
    assert taken_by(at(PARTS, [holds("h", "p2")]), claim()) == ["p0"]
    # Whoever watches as an administrator holds nothing.
    assert taken_by(at(PARTS, [holds("h", "p0", adminAccess=True)]), claim(request(count=2))) == ["p0", "p1"]


def test_up_to_1_34_counters_lie_beside_their_devices() -> None:
    together = {
        **PARTS[1]["spec"],
        "sharedCounters": PARTS[0]["spec"]["sharedCounters"],
        "pool": {"name": "n", "resourceSliceCount": 1},
    }
    there = at([{"metadata": {"name": "s"}, "spec": together}])
    assert taken_by(there, claim(request(count=2))) == ["p0", "p1"] and taken_by(there, claim(request(count=3))) is None


def test_constraints_turn_the_search_back() -> None:
    slices = [
        published(device("a", root="x"), device("b", root="y", numa=1), device("c", root="y", numa=2), device("d"))
    ]
    name = f"{DRIVER}/root"
    agree = claim(request(count=2), constraints=[{"matchAttribute": name}])
    assert taken_by(at(slices), agree) == ["b", "c"]
    differ = claim(request(count=2), constraints=[{"distinctAttribute": name}])
    assert taken_by(at(slices), differ) == ["a", "b"]
    both = claim(request(count=2), constraints=[{"matchAttribute": name}, {"distinctAttribute": f"{DRIVER}/numa"}])
    assert taken_by(at(slices), both) == ["b", "c"]
    some = claim(request("one"), request("two"), constraints=[{"matchAttribute": name, "requests": ["two"]}])
    assert taken_by(at(slices), some) == ["a", "b"]
    # A list agrees with what has any of its values.
    listed = device("e")
    listed["attributes"]["root"] = {"strings": ["x", "z"]}
    assert taken_by(at([published(device("a", root="x"), device("b", root="y"), listed)]), agree) == ["a", "e"]
    derived = claim(
        request(count=2, derivedAttributes=[{"name": "a.example.com/b", "expression": "same"}]),
        constraints=[{"matchAttribute": "a.example.com/b"}],
    )
    assert taken_by(at([published(device("a1"), device("b2"), device("c1"))]), derived) == ["a1", "c1"]


def test_alternatives_are_tried_in_their_order() -> None:
    first = {
        "name": "r",
        "firstAvailable": [
            {"name": "big", "deviceClassName": "any", "count": 3},
            {"name": "small", "deviceClassName": "any"},
        ],
    }
    found = at([published(device("a"), device("b"))]).find(wanted(claim(first)))
    assert found is not None and [(one.request, one.device.name) for one in found] == [("r/small", "a")]
    constrained = claim(first, request("s"), constraints=[{"matchAttribute": f"{DRIVER}/root", "requests": ["r", "s"]}])
    assert taken_by(
        at([published(device("a", root="x"), device("b", root="y"), device("c", root="y"))]), constrained
    ) == ["b", "c"]


def test_all_devices_or_none() -> None:
    slices = [published(device("a", kind="x"), device("b", kind="x"), device("c", kind="y"))]
    every = claim(request(allocationMode="All", selectors=["kind=x"]))
    assert taken_by(at(slices), every) == ["a", "b"]
    assert taken_by(at(slices, [holds("h", "b")]), every) is None
    assert taken_by(at(slices), claim(request(allocationMode="All", selectors=["kind=z"]))) is None
    assert taken_by(
        at(slices, [holds("h", "b")]), claim(request(allocationMode="All", adminAccess=True, selectors=["kind=x"]))
    ) == ["a", "b"]
    with pytest.raises(Aborted, match=r"cannot add device dev\.example\.com/n/c because a claim constraint"):
        taken_by(at(slices), claim(request(allocationMode="All"), constraints=[{"matchAttribute": f"{DRIVER}/kind"}]))


def test_an_error_counts_from_the_device_on_that_has_it() -> None:
    slices = [published(device("a", kind="x"), device("b"))]
    asked = request(selectors=["kind=x"])
    assert taken_by(at(slices), claim(asked)) == ["a"]
    with pytest.raises(Aborted, match="no such key: kind"):
        taken_by(at(slices, [holds("h", "a")]), claim(asked))
    # What somebody has is not looked at.
    assert taken_by(at(slices, [holds("h", "b")]), claim(request(count=2, selectors=["kind=x"]))) is None
    with pytest.raises(Aborted):
        taken_by(at(slices, [holds("h", "b")]), claim(request(allocationMode="All", selectors=["kind=x"])))
    with pytest.raises(NotJudged):
        taken_by(at(slices), claim(request(selectors=["?"])))


def test_shares_of_a_device() -> None:
    policy = {"default": "2Gi", "validRange": {"min": "2Gi", "step": "2Gi", "max": "6Gi"}}
    shared = {
        **device("a"),
        "allowMultipleAllocations": True,
        "capacity": {"memory": {"value": "8Gi", "requestPolicy": policy}},
    }
    slices = [published(shared)]
    half = [holds("h", "a", shareID="1", consumedCapacity={"memory": "4Gi"})]
    found = at(slices, half).find(wanted(claim(request("a"), request("b"))))
    assert found is not None and [int(one.consumed["memory"]) >> 30 for one in found] == [2, 2]
    assert taken_by(at(slices, half), claim(request("a"), request("b"), request("c"))) is None
    assert taken_by(at(slices, half), claim(request(capacity={"requests": {"memory": "3Gi"}}))) == ["a"]
    assert taken_by(at(slices, half), claim(request(capacity={"requests": {"memory": "5Gi"}}))) is None
    assert taken_by(at(slices), claim(request(capacity={"requests": {"memory": "7Gi"}}))) is None
    assert taken_by(at(slices), claim(request(capacity={"requests": {"cores": "1"}}))) is None
    assert taken_by(at([published(device("b"))]), claim(request(capacity={"requests": {"memory": "8Gi"}}))) == ["b"]


@pytest.mark.parametrize(
    ("asked", "policy", "amount"),
    [
        (None, {}, 8),
        (None, {"default": "2"}, 2),
        (3, {"default": "2", "validValues": ["2", "4"]}, 4),
        (5, {"default": "2", "validValues": ["2", "4"]}, None),
        (1, {"default": "2", "validRange": {"min": "2"}}, 2),
        (3, {"default": "2", "validRange": {"min": "2", "step": "2"}}, 4),
        (Fraction(1, 2), {"default": "1", "validRange": {"min": "250m", "step": "250m"}}, Fraction(1, 2)),
        (5, {"default": "2", "validRange": {"min": "2", "step": "2", "max": "4"}}, None),
    ],
)
def test_what_a_request_takes(asked: Any, policy: Json, amount: Any) -> None:
    one = Device(DRIVER, "n", {"name": "a", "capacity": {"cores": {"value": "8", "requestPolicy": policy}}})
    found = taken({} if asked is None else {"cores": Fraction(asked)}, one)
    assert found == (None if amount is None else {"cores": amount})
    if found is not None:
        assert lacking(found, one, {}) is None and lacking(found, one, {"cores": Fraction(8)}) is not None


def test_compatibility_groups_and_operations_without_a_driver() -> None:
    a, b, none = frozenset("a"), frozenset("b"), frozenset[str]()
    assert compatible(a, []) and compatible(a, [a | b, a]) and compatible(none, [none, none])
    assert not compatible(b, [a | b, a]) and not compatible(none, [a]) and not compatible(a, [none])
    grouped = [device("p0", draws={"units": 1}), device("p1", draws={"units": 1})]
    grouped[0]["consumesCounters"][0]["compatibilityGroups"] = ["a"]
    slices = [counters(units=4), published(*grouped, count=2)]
    assert taken_by(at(slices), claim(request(count=2))) is None
    assert taken_by(at(slices, [holds("h", "p0")]), claim()) is None
    (obstacle,) = [
        one
        for one in look(at(slices, [holds("h", "p0")]), wanted(claim())).requests[0].obstacles
        if one.kind == "compatibility"
    ]
    assert obstacle.claims == ("default/h",)
    alone = [published(device("a"), skipNodeOperations=["*"])]
    assert taken_by(at(alone), claim()) is None
    able = {**NODE, "status": {"declaredFeatures": [search.OPTIONAL_OPERATIONS]}}
    assert taken_by(at(alone, node=able), claim()) == ["a"]


def test_a_search_ends() -> None:
    many = [counters(units=10), published(*(device(f"p{number}", draws={"units": 1}) for number in range(40)), count=2)]
    with pytest.raises(TooManyAttempts):
        at(many).find(wanted(claim(request(count=11))), attempts=2000)
    with pytest.raises(Aborted, match="number of requested devices 33 exceeds the claim limit of 32"):
        taken_by(at(many), claim(request(count=33)))


@given(st.data())
def test_what_the_search_finds_is_there_whenever_anything_is(data: st.DataObject) -> None:
    """Against every choice of devices, tried one by one."""
    total = data.draw(st.integers(1, 6))
    devices = [
        device(f"p{number}", draws={"units": data.draw(st.integers(1, 3))}, root=data.draw(st.sampled_from("xy")))
        for number in range(data.draw(st.integers(1, 5)))
    ]
    held = [one["name"] for one in devices if data.draw(st.booleans()) and data.draw(st.booleans())]
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    agree = data.draw(st.booleans())
    constraints = [{"matchAttribute": f"{DRIVER}/root"}] if agree else []
    there = at([counters(units=total), published(*devices, count=2)], [holds("h", *held)] if held else [])
    found = taken_by(
        there,
        claim(*(request(f"r{number}", count=count) for number, count in enumerate(counts)), constraints=constraints),
    )

    def units(names: Sequence[str]) -> int:
        sizes = {one["name"]: int(one["consumesCounters"][0]["counters"]["units"]["value"]) for one in devices}
        return sum(sizes[name] for name in names)

    def holds_good(names: Sequence[str]) -> bool:
        roots = {one["attributes"]["root"]["string"] for one in devices if one["name"] in names}
        return len(set(names)) == len(names) and units(names) + units(held) <= total and (not agree or len(roots) == 1)

    free = [one["name"] for one in devices if one["name"] not in held]
    possible = any(holds_good(names) for names in itertools.combinations(free, sum(counts)))
    assert (found is not None) == possible
    assert found is None or holds_good(found)


# ---------------------------------------------------------------------- why


def told(there: NodeSearch, *claims: Json) -> NodeFinding:
    return look(there, wanted(*claims))


def test_each_obstacle_is_told_with_its_devices_and_claims() -> None:
    devices = [
        device("a", kind="x"),
        device("b", kind="y"),
        {**device("c", kind="x"), "taints": [TAINT]},
        device("d", kind="x"),
        device("e"),
    ]
    there = at([published(*devices)], [holds("h", "d")])
    (found,) = told(there, claim(request(count=2, selectors=["kind=x"]))).requests
    assert (found.wanted, found.devices, found.free, found.short) == (2, 5, 1, True)
    kinds = {one.kind: one for one in found.obstacles}
    assert {kind: one.devices for kind, one in kinds.items()} == {
        "selector": ("n/b",),
        "taint": ("n/c",),
        "claim": ("n/d",),
        "selector-error": ("n/e",),
    }
    assert kinds["claim"].claims == ("default/h",) and kinds["taint"].taints == ("worn=yes:NoSchedule",)


def test_what_requests_cannot_have_together() -> None:
    there = at([published(device("a", root="x"), device("b", root="y"))])
    agree = [{"matchAttribute": f"{DRIVER}/root"}]
    assert (
        f"agree in {DRIVER}/root; free are 1 with x, 1 with y"
        in told(there, claim(request(count=2), constraints=agree)).together
    )
    one = at([published(device("a"))])
    assert "they want the same devices" in told(one, claim(request("a"), request("b"))).together
    assert "3 devices; of those that are free 2 at a time" in told(at(PARTS), claim(request(count=3))).together
    # Where a request has too few devices for itself, that is told already.
    assert told(one, claim(request(count=2))).together == ""


def changes(there: NodeSearch, *claims: Json, beside: Sequence[NodeSearch] = ()) -> list[Change]:
    finding = told(there, *claims)
    return nearest([(there, finding)], wanted(*claims), Judge(), everywhere=[there, *beside])


def test_the_nearest_change_is_the_smallest_one() -> None:
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


def test_every_change_that_is_named_does_what_it_says() -> None:
    held = [holds("g", "p0"), holds("h", "p2")]
    for count in (1, 2):
        for change in changes(at(PARTS, held), claim(request(count=count))):
            if change.kind == "free-claims":
                left = [one for one in held if f"default/{one['metadata']['name']}" not in change.claims]
                assert taken_by(at(PARTS, left), claim(request(count=count))) is not None
    less = [one for one in changes(at(PARTS), claim(request(count=3))) if one.kind == "ask-for-less"]
    assert less[0].text == "ask for 2 instead of 3 in request r"


def test_a_device_is_cut_as_one_of_its_product_is_elsewhere() -> None:
    whole = device("w", uuid="U1", productName="P", kind="whole")
    part = device("p0", draws={"units": 1}, parentUUID="U2", productName="P", kind="part")
    model_slices = [
        {**counters(units=4), "spec": {**counters(units=4)["spec"], "nodeName": "m"}},
        published(part, {**part, "name": "p1"}, name="m-1", count=2, nodeName="m"),
    ]
    model = at(model_slices, node={"metadata": {"name": "m"}})
    asked = claim(request(count=2, selectors=["kind=part"]))
    (change,) = [one for one in changes(at([published(whole)]), asked, beside=[model]) if one.kind == "repartition"]
    assert change.device == "n/w" and "parts like n/p0 of node m" in change.text
    other = at([published({**whole, "attributes": {**whole["attributes"], "productName": {"string": "Q"}}})])
    taken_already = at([published(whole)], [holds("h", "w")])
    # Its parts would be tainted as it is.
    assert not [
        one
        for one in changes(at([published({**whole, "taints": [TAINT]})]), asked, beside=[model])
        if one.kind == "repartition"
    ]
    for there in (other, taken_already):
        assert not [one for one in changes(there, asked, beside=[model]) if one.kind == "repartition"]
    assert not [
        one
        for one in changes(at([published(whole)]), claim(request(count=3, selectors=["kind=part"])), beside=[model])
        if one.kind == "repartition"
    ]


def test_an_error_is_guarded_and_an_update_is_waited_for() -> None:
    there = at([published(device("a"), device("b", kind="x"))])
    (guard,) = changes(there, claim(request(selectors=["kind=x"])))
    assert guard.kind == "guard-attribute" and "node n has devices for it" in guard.text
    (wait,) = changes(at([published(device("a"), count=2)]), claim())
    assert wait.kind == "wait"


# ---------------------------------------------------------------------- pods and claims


def cluster(*, claims: Sequence[Json] = (), pods: Sequence[Json] = (), **more: Any) -> Cluster:
    kept: Json = {"slices": [published(device("a"), device("b"))], "classes": [ANY], "nodes": [NODE], **more}
    return Cluster(claims=claims, pods=pods, **kept)


def pod(*claims: str, name: str = "p", **spec: Any) -> Json:
    references = [{"name": each, "resourceClaimName": each} for each in claims]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"resourceClaims": references, **spec},
    }


def test_a_pod_has_all_its_claims_on_one_node() -> None:
    both = [claim(name="c"), claim(name="d")]
    (found,) = explain(cluster(claims=both, pods=[pod("c", "d")]), Judge())
    assert found.verdict == "fits" and [one["device"] for one in found.to_dict()["nodes"][0]["devices"]] == ["a", "b"]
    (short,) = explain(cluster(claims=[*both, holds("h", "a")], pods=[pod("c", "d")]), Judge())
    assert short.verdict == "no" and "they want the same devices" in short.nodes[0].together
    # One of them has its devices on another node.
    where = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}]}
    there = holds("c", "a")
    there["status"]["allocation"]["nodeSelector"] = where
    (bound,) = explain(cluster(claims=[there, both[1]], pods=[pod("c", "d")]), Judge())
    assert bound.verdict == "no" and bound.nodes[0].verdict == "not-asked"
    assert "claim default/c has n/a" in bound.nodes[0].message and "no node is asked" in bound.remarks[0]
    (ready,) = explain(cluster(claims=[holds("c", "a")], pods=[pod("c")]), Judge())
    assert ready.verdict == "fits"


def test_what_is_missing_before_any_node_is_asked() -> None:
    gone = claim(name="c")
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    full = holds("f", "a")
    full["status"]["reservedFor"] = [{"uid": str(number)} for number in range(256)]
    gated = pod("nobody", "c", "f", schedulingGates=[{"name": "g"}])
    gated["spec"]["resourceClaims"].append({"name": "t", "resourceClaimTemplateName": "missing"})
    strange = claim(name="s")
    strange["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "other"
    found, other = explain(cluster(claims=[gone, full, strange], pods=[gated]), Judge())
    assert (found.verdict, other.verdict) == ("blocked", "blocked")
    words = " ".join(found.blockers)
    for word in (
        "default/nobody does not exist",
        "missing does not exist",
        "gates g",
        "being deleted",
        "used by 256 pods",
    ):
        assert word in words
    assert "DeviceClass other, which does not exist; there are any" in other.blockers[0]
    with pytest.raises(Malformed, match="ResourceClaim c: its requests cannot be read"):
        explain(cluster(claims=[claim({"name": "r", "exactly": {}})]), Judge())


def test_a_claim_that_will_be_made_from_a_template() -> None:
    template = {"metadata": {"name": "t", "namespace": "default"}, "spec": {"spec": claim(request(count=3))["spec"]}}
    wants = pod()
    wants["spec"]["resourceClaims"] = [{"name": "it", "resourceClaimTemplateName": "t"}]
    (found,) = explain(cluster(pods=[wants], templates=[template]), Judge())
    assert found.verdict == "no" and found.claims == ("default/p-it",)
    wants["status"] = {"resourceClaimStatuses": [{"name": "it", "resourceClaimName": "made"}]}
    (made,) = explain(cluster(pods=[wants], claims=[claim(name="made")], templates=[template]), Judge())
    assert made.verdict == "fits" and made.claims == ("default/made",)
    wants["status"] = {"resourceClaimStatuses": [{"name": "it"}]}
    (none,) = explain(cluster(pods=[wants], templates=[template]), Judge())
    assert none.claims == ()


def test_a_claim_alone_and_a_cluster_with_nothing_in_it() -> None:
    explainer = Explainer(cluster(claims=[holds("h", "a")]), Judge())
    allocated = explainer.claim(holds("h", "a"))
    assert (allocated.verdict, allocated.remarks) == ("allocated", ("claim default/h has n/a",))
    fits = explainer.claim(claim())
    assert fits.verdict == "fits" and "no pod waits for it" in fits.remarks[0]
    empty = Explainer(Cluster(classes=[ANY]), Judge()).claim(claim())
    assert (
        empty.verdict == "no"
        and empty.remarks[:2][0] == "there are no nodes"
        and "no driver publishes" in empty.remarks[1]
    )
    unknown = Explainer(cluster(), Judge()).claim(claim(request(selectors=["?"])))
    assert unknown.verdict == "unknown" and "it cannot be told" in lines(unknown)[0]


def test_an_error_on_one_node_is_one_of_the_pod_wherever_it_could_go() -> None:
    nodes = [NODE, {"metadata": {"name": "m", "labels": {}}}]
    slices = [published(device("a")), published(device("b", kind="x"), name="m", pool="m", nodeName="m")]
    asks = claim(request(selectors=["kind=x"]))
    (found,) = explain(cluster(claims=[asks], pods=[pod("c")], nodes=nodes, slices=slices), Judge())
    assert found.verdict == "error" and found.changes[0].kind == "guard-attribute"
    assert "node m would have devices for it: r: m/b." in text([found])
    (elsewhere,) = explain(
        cluster(claims=[asks], pods=[pod("c", nodeName="m")], nodes=nodes, slices=slices),
        Judge(),
        pods=[pod("c", nodeName="m")],
    )
    assert elsewhere.verdict == "fits"


def test_of_many_nodes_the_nearest_are_told_and_a_sum() -> None:
    nodes = [{"metadata": {"name": f"n{number}", "labels": {}}} for number in range(20)]
    slices = [
        published(device("a", kind="x"), name=f"s{number}", pool=f"n{number}", nodeName=f"n{number}")
        for number in range(20)
    ]
    held = [holds(f"h{number}", "a") for number in range(20)]
    for number, each in enumerate(held):
        each["status"]["allocation"]["devices"]["results"][0]["pool"] = f"n{number}"
    (found,) = explain(cluster(claims=[claim(), *held], nodes=nodes, slices=slices), Judge(), claims=[claim()])
    said = lines(found, most_nodes=2)
    assert (
        "  over 20 nodes:" in said
        and "      20 held by claims" in said
        and "  18 more nodes have some of these devices." in said
    )
    assert sum(line.startswith("  node ") for line in said) == 2 and found.changes[0].claims == ("default/h0",)


# ---------------------------------------------------------------------- nodes


@pytest.mark.parametrize(
    ("spec", "node", "words"),
    [
        ({"nodeName": "m"}, {}, "the pod is for node m"),
        ({}, {"unschedulable": True}, "the node is cordoned"),
        (
            {"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]},
            {"unschedulable": True},
            "",
        ),
        ({}, {"taints": [TAINT]}, "does not tolerate the node's taint worn=yes:NoSchedule"),
        ({}, {"taints": [{**TAINT, "effect": "PreferNoSchedule"}]}, ""),
        ({"nodeSelector": {"zone": "b"}}, {}, "the pod's nodeSelector wants zone=b"),
        ({"nodeSelector": {"zone": "a"}}, {}, ""),
    ],
)
def test_which_nodes_are_asked(spec: Json, node: Json, words: str) -> None:
    found = why_not_asked({"spec": spec}, {**NODE, "spec": node})
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize(
    ("requirement", "holds_good"),
    [
        ({"key": "zone", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "other", "operator": "NotIn", "values": ["a"]}, True),
        ({"key": "zone", "operator": "Exists"}, True),
        ({"key": "zone", "operator": "DoesNotExist"}, False),
        ({"key": "size", "operator": "Gt", "values": ["4"]}, True),
        ({"key": "size", "operator": "Lt", "values": ["4"]}, False),
        ({"key": "zone", "operator": "Gt", "values": ["4"]}, False),
    ],
)
def test_node_selectors(requirement: Json, holds_good: bool) -> None:
    node = {"metadata": {"name": "n", "labels": {"zone": "a", "size": "8"}}}
    selector = {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}
    assert selects(selector, node) == holds_good
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}
    assert bool(why_not_asked({"spec": {"affinity": affinity}}, node)) != holds_good
    assert not selects({"nodeSelectorTerms": [{}]}, node)


@pytest.mark.parametrize(
    ("toleration", "does"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "worn", "operator": "Exists"}, True),
        ({"key": "worn", "value": "yes"}, True),
        ({"key": "worn", "value": "no"}, False),
        ({"key": "hot", "operator": "Exists"}, False),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "worn", "operator": "Other"}, False),
    ],
)
def test_tolerations(toleration: Json, does: bool) -> None:
    assert tolerates(toleration, TAINT) == does
