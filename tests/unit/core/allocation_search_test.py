# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The scheduler's search on a node. tests/oracles compares it with the real scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from allocation_model import (
    DRIVER,
    NODE,
    PARTS,
    Json,
    at,
    claim,
    counters,
    device,
    holds,
    published,
    request,
    taken_by,
    wanted,
)
from dra_driver.core.allocation import search
from dra_driver.core.allocation.capacity import lacking, taken
from dra_driver.core.allocation.objects import Device, NotJudged
from dra_driver.core.allocation.reasons import evaluate_node
from dra_driver.core.allocation.search import Aborted, TooManyAttempts, compatible
from hypothesis import given
from hypothesis import strategies as st


def test_search_counters_of_held_devices_are_consumed() -> None:
    assert taken_by(at(PARTS), claim(request(count=2))) == ["p0", "p1"]
    assert taken_by(at(PARTS), claim(request(count=3))) is None
    assert taken_by(at(PARTS, [holds("h", "p2")]), claim(request("a"), request("b"))) is None
    assert taken_by(at(PARTS, [holds("h", "p2")]), claim()) == ["p0"]
    # Administrator access does not hold a device.
    assert taken_by(at(PARTS, [holds("h", "p0", adminAccess=True)]), claim(request(count=2))) == ["p0", "p1"]


def test_search_counters_until_1_34_belong_to_one_slice() -> None:
    together = {
        **PARTS[1]["spec"],
        "sharedCounters": PARTS[0]["spec"]["sharedCounters"],
        "pool": {"name": "n", "resourceSliceCount": 1},
    }
    there = at([{"metadata": {"name": "s"}, "spec": together}])
    assert taken_by(there, claim(request(count=2))) == ["p0", "p1"] and taken_by(there, claim(request(count=3))) is None


def test_search_constraints_cause_backtracking() -> None:
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
    # A list matches a value if it contains that value.
    listed = device("e")
    listed["attributes"]["root"] = {"strings": ["x", "z"]}
    assert taken_by(at([published(device("a", root="x"), device("b", root="y"), listed)]), agree) == ["a", "e"]
    derived = claim(
        request(count=2, derivedAttributes=[{"name": "a.example.com/b", "expression": "same"}]),
        constraints=[{"matchAttribute": "a.example.com/b"}],
    )
    assert taken_by(at([published(device("a1"), device("b2"), device("c1"))]), derived) == ["a1", "c1"]


def test_search_alternatives_in_order() -> None:
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


def test_search_all_mode_allocates_all_devices_or_none() -> None:
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


def test_search_selector_error_aborts_only_if_evaluated() -> None:
    slices = [published(device("a", kind="x"), device("b"))]
    requested = request(selectors=["kind=x"])
    assert taken_by(at(slices), claim(requested)) == ["a"]
    with pytest.raises(Aborted, match="no such key: kind"):
        taken_by(at(slices, [holds("h", "a")]), claim(requested))
    # Held devices are not evaluated.
    assert taken_by(at(slices, [holds("h", "b")]), claim(request(count=2, selectors=["kind=x"]))) is None
    with pytest.raises(Aborted):
        taken_by(at(slices, [holds("h", "b")]), claim(request(allocationMode="All", selectors=["kind=x"])))
    with pytest.raises(NotJudged):
        taken_by(at(slices), claim(request(selectors=["?"])))


def test_search_shares_until_capacity_is_consumed() -> None:
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
    ("requested", "policy", "amount"),
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
def test_taken_rounds_by_request_policy(requested: Any, policy: Json, amount: Any) -> None:
    one = Device(DRIVER, "n", {"name": "a", "capacity": {"cores": {"value": "8", "requestPolicy": policy}}})
    found = taken({} if requested is None else {"cores": Fraction(requested)}, one)
    assert found == (None if amount is None else {"cores": amount})
    if found is not None:
        assert lacking(found, one, {}) is None and lacking(found, one, {"cores": Fraction(8)}) is not None


def test_search_compatibility_groups_without_driver() -> None:
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
        for one in evaluate_node(at(slices, [holds("h", "p0")]), wanted(claim())).requests[0].obstacles
        if one.kind == "compatibility"
    ]
    assert obstacle.claims == ("default/h",)
    alone = [published(device("a"), skipNodeOperations=["*"])]
    assert taken_by(at(alone), claim()) is None
    able = {**NODE, "status": {"declaredFeatures": [search.OPTIONAL_OPERATIONS]}}
    assert taken_by(at(alone, node=able), claim()) == ["a"]


def test_search_attempts_and_request_size_are_limited() -> None:
    many = [counters(units=10), published(*(device(f"p{number}", draws={"units": 1}) for number in range(40)), count=2)]
    with pytest.raises(TooManyAttempts):
        at(many).find(wanted(claim(request(count=11))), attempts=2000)
    with pytest.raises(Aborted, match="number of requested devices 33 exceeds the claim limit of 32"):
        taken_by(at(many), claim(request(count=33)))


@given(st.data())
def test_search_result_agrees_with_brute_force(data: st.DataObject) -> None:
    """Compare the search with all possible choices of devices."""
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
