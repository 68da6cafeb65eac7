# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Jobs on nodes of one super-pod: the members, the selected nodes, and the requests of their claims and pods."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from dra_driver.core.domains import Member, Span, choose, members
from dra_driver.core.vendors.ascend import preference, super_pod
from dra_driver.core.vendors.ascend.attributes import ChipFacts, SuperPod, attributes
from dra_driver.core.vendors.ascend.families import FAMILIES
from dra_driver.core.vendors.ascend.topology import Chip, Place
from dra_driver.core.vendors.ascend.vendor import FACTS
from dra_driver.core.vendors.vendor_facts import Fabric
from hypothesis import given
from hypothesis import strategies as st

DRIVER = FACTS.driver_name
assert FACTS.fabric is not None
FABRIC: Fabric = FACTS.fabric
MEMBERS = st.lists(
    st.builds(
        Member,
        node=st.integers(0, 40).map("node{:02d}".format),
        domain=st.integers(0, 2),
        free=st.integers(0, 4),
        server=st.none() | st.integers(0, 47),
        rack=st.none() | st.integers(0, 2),
    ),
    max_size=9,
    unique_by=lambda each: each.node,
)


def device(name: str, found: dict[str, Any], kind: str = "npu") -> dict[str, Any]:
    typed = {key: {"int" if isinstance(value, int) else "string": value} for key, value in found.items()}
    return {"name": name, "attributes": {**typed, "type": {"string": kind}}}


def published(
    node: str, devices: Sequence[dict[str, Any]], generation: int = 1, driver: str = DRIVER
) -> dict[str, Any]:
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    return {"spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": list(devices)}}


def chip(number: int, pod: SuperPod | None) -> dict[str, Any]:
    """Return the published attributes of a die, without irrelevant versions and names."""
    facts = ChipFacts(FAMILIES[0xD803], Chip(number, number // 2, number % 2), "NPU-" + "1" * 40, super_pod=pod)
    return device(f"npu-{number}", dict(attributes(facts, "n", Place((number,), (number,)))))


def test_members_have_super_pod_and_free_chips() -> None:
    here = [chip(number, SuperPod(7, 3, number)) for number in range(4)]
    slices = [
        published("a", here[:2]),
        published("a", here[2:]),
        published("alone", [chip(0, None)]),
        published("torn", [chip(0, SuperPod(1, 0)), chip(1, SuperPod(2, 0))]),
        published("other", here, driver="gpu.nvidia.com"),
        # An older generation, and a vNPU, which does not count as a chip.
        published("b", [chip(0, SuperPod(9, 1))], generation=1),
        published(
            "b",
            [chip(number, SuperPod(7, 4, number)) for number in range(2)]
            + [device("npu-0-vir06", {"superPodID": 7}, "vnpu")],
            generation=2,
        ),
        published("b", [chip(5, SuperPod(9, 1))], generation=1),
    ]
    taken = [(DRIVER, "a", "npu-2"), (DRIVER, "b", "npu-0-vir06"), ("gpu.nvidia.com", "a", "npu-1")]
    assert members(slices, DRIVER, FABRIC, taken) == (Member("a", 7, 3, 3), Member("b", 7, 2, 4))


def test_members_attributes_with_domain_prefix() -> None:
    qualified = {f"{DRIVER}/superPodID": 7, f"{DRIVER}/rackID": 2}
    assert members([published("n", [device("npu-0", qualified)])], DRIVER, FABRIC) == (Member("n", 7, 1, None, 2),)


@given(MEMBERS, st.integers(1, 4), st.integers(1, 3))
def test_choose_finds_nodes_if_enough_exist(known: list[Member], nodes: int, devices: int) -> None:
    possible = [
        chosen
        for chosen in combinations(known, nodes)
        if len({each.domain for each in chosen}) == 1 and all(each.free >= devices for each in chosen)
    ]
    found = choose(known, nodes, devices)
    assert (found is None) == (not possible)
    if found is None:
        return
    assert len(set(found.nodes)) == nodes and found.members in {
        tuple(sorted(each, key=lambda one: (one.server is None, one.server or 0, one.node))) for each in possible
    }
    # No domain has a solution with fewer racks.
    assert found.racks == min(len({each.rack for each in chosen}) for chosen in possible)
    assert found == choose(list(reversed(known)), nodes, devices)


@given(MEMBERS, st.integers(1, 3))
def test_choose_single_node_keeps_room_for_large_jobs(known: list[Member], devices: int) -> None:
    """One node with one device: the domain has the fewest nodes among those that could serve it, so room stays for larger jobs."""
    flat = [Member(each.node, each.domain, each.free, each.server) for each in known]
    found = choose(flat, 1, devices)
    room = {domain: sum(each.free >= devices for each in flat if each.domain == domain) for domain in range(3)}
    if found is not None:
        assert room[int(found.domain)] == min(count for count in room.values() if count)
        there = [each.free for each in flat if each.domain == found.domain and each.free >= devices]
        assert found.members[0].free == min(there)


def test_choose_without_nodes_or_devices_is_rejected() -> None:
    for nodes, devices in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one node"):
            choose([Member("n", 1, 1)], nodes, devices)


def test_choose_ranks_by_server_with_fewest_racks() -> None:
    known = [
        Member("d", 7, 16, 30, rack=1),
        Member("c", 7, 16, 20, rack=1),
        Member("b", 7, 16, 10, rack=0),
        Member("e", 7, 16, 5, rack=2),
        Member("f", 7, 4, 0, rack=2),
    ]
    found = choose(known, 2, 16)
    assert found is not None and found.nodes == ("c", "d") and found.racks == 1
    found = choose(known, 3, 16)
    assert found is not None and found.racks == 2 and found.nodes == ("b", "c", "d")
    assert choose(known, 5, 16) is None


def test_super_pod_job_claim_spec_and_affinity() -> None:
    span = Span(7, (Member("a", 7, 16, 3), Member("b", 7, 16, 4)), 16)
    spec = super_pod.claim_spec(span)["devices"]
    (request,) = spec["requests"]
    assert [each["name"] for each in request["firstAvailable"]] == [each.name for each in preference.alternatives(16)]
    for each in request["firstAvailable"]:
        assert each["count"] == 16 and each["selectors"][-1]["cel"]["expression"] == (
            "'superPodID' in device.attributes['npu.huawei.com'] && device.attributes['npu.huawei.com'].superPodID == 7"
        )
    terms = super_pod.node_affinity(span)["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [term["matchFields"][0]["values"] for term in terms] == [["a"], ["b"]]
    assert all(
        [(each["key"], each["values"]) for each in term["matchExpressions"]]
        == [("huawei.com/topotree.superpodid", ["7"]), ("huawei.com/topotree.serverid", ["3", "4"])]
        for term in terms
    )
    # An unknown server is not requested.
    (term,) = super_pod.node_affinity(Span(7, (Member("a", 7, 16),), 16))[
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert [each["key"] for each in term["matchExpressions"]] == ["huawei.com/topotree.superpodid"]
