# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Devices from slices and claims: availability, criteria, groups of nodes, the filters, the test, and the inventory plugin."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import inventory_hosts
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import count_allocatable_together
from ansible_collections.dra.accelerators.plugins.modules import claim_info
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ansible_process import run_ansible

Json = dict[str, Any]
PLUGINS = "ansible_collections.dra.accelerators.plugins"
GIBIBYTE = 1024**3
DRIVER = "gpu.nvidia.com"
PRODUCT = "NVIDIA H100 80GB HBM3"


def filter_of(name: str) -> Any:
    return importlib.import_module(f"{PLUGINS}.filter.{name}").FilterModule().filters()[name]


ACCELERATORS, WITH, NODES_WITH = (
    filter_of(name) for name in ("accelerators", "accelerators_with", "nodes_with_accelerators")
)
HOLDING = importlib.import_module(f"{PLUGINS}.test.holding_accelerators").TestModule().tests()["holding_accelerators"]


def device(name: str, memory: str = "80Gi", **more: Any) -> Json:
    kind = "mig" if "mig" in name else "gpu"
    attributes = {"type": {"string": kind}, "productName": {"string": PRODUCT}, **more.pop("attributes", {})}
    return {"name": name, "attributes": attributes, "capacity": {"memory": {"value": memory}}, **more}


def slice_of(node: str, *devices: Json, counters: tuple[Json, ...] = (), number: int = 0, **pool: Any) -> Json:
    spec: Json = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1, **pool},
        "devices": list(devices),
    }
    if counters:
        spec["sharedCounters"] = list(counters)
    name = f"{number:05}-{node}"
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}


def claim(name: str, pool: str, *devices: str, **more: Any) -> Json:
    results = [{"request": "r", "driver": DRIVER, "pool": pool, "device": each, **more} for each in devices]
    metadata = {"name": name, "namespace": "default"}
    status = {"allocation": {"devices": {"results": results}}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "status": status}


def cut(node: str) -> list[Json]:
    """Return a GPU with seven slices: whole, three thirds that overlap only it, and seven sevenths."""

    def takes(*numbers: int) -> list[Json]:
        return [{"counterSet": "gpu-0", "counters": {f"slice-{number}": {"value": "1"} for number in numbers}}]

    every = tuple(range(6))
    parts = [device(f"gpu-0-mig-1g-{n}", "10Gi", consumesCounters=takes(n)) for n in every]
    parts += [
        device(
            f"gpu-0-mig-3g-{n}",
            "40Gi",
            consumesCounters=takes(*range(n, n + 3)),
            attributes={"profile": {"string": "3g"}},
        )
        for n in (0, 3)
    ]
    counters = {"name": "gpu-0", "counters": {f"slice-{number}": {"value": "1"} for number in every}}
    return [
        slice_of(node, counters=(counters,), resourceSliceCount=2),
        slice_of(node, device("gpu-0", consumesCounters=takes(*every)), *parts, number=1, resourceSliceCount=2),
    ]


def shared(node: str) -> Json:
    policy = {"default": "20Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}
    return slice_of(
        node,
        device(
            "gpu-0",
            allowMultipleAllocations=True,
            capacity={"memory": {"value": "80Gi", "requestPolicy": policy}, "shares": {"value": "4"}},
        ),
    )


# ---------------------------------------------------------------------- availability


def test_device_of_claim_is_not_free_but_monitored_is() -> None:
    slices = [slice_of("a", device("gpu-0"), device("gpu-1"))]
    first, second = ACCELERATORS(slices, [claim("c", "a", "gpu-0"), claim("w", "a", "gpu-1", adminAccess=True)])
    assert first["free"] == {"memory": 0} and not first["available"] and first["claims"] == ["default/c"]
    assert second["free"] == second["capacity"] == {"memory": 80 * GIBIBYTE} and second["claims"] == []
    assert first["type"] == "gpu" and first["product"] == PRODUCT and first["node"] == "a" and first["whole"]


def test_partitions_overlapping_held_ones_are_not_available() -> None:
    found = {one["name"]: one for one in ACCELERATORS(cut("a"), [claim("c", "a", "gpu-0-mig-3g-0")])}
    assert [name for name, one in found.items() if one["available"]] == [
        *(f"gpu-0-mig-1g-{n}" for n in (3, 4, 5)),
        "gpu-0-mig-3g-3",
    ]
    assert [name for name, one in found.items() if one["whole"]] == ["gpu-0"]
    assert found["gpu-0"]["draws"]["gpu-0"]["slice-0"] == {"takes": 1, "left": 0}


def test_counters_in_device_slice_belong_to_that_slice() -> None:
    """Kubernetes 1.34 has counter sets in the slices of devices: sets with the same name in two slices are independent."""
    slices = []
    for number in (0, 1):
        draw = [{"counterSet": "set", "counters": {"all": {"value": "1"}}}]
        sets = ({"name": "set", "counters": {"all": {"value": "1"}}},)
        devices = [device(f"gpu-{number}{letter}", consumesCounters=draw) for letter in "ab"]
        slices.append(slice_of("a", *devices, counters=sets, number=number, resourceSliceCount=2))
    found = ACCELERATORS(slices, [claim("c", "a", "gpu-0a")])
    assert [one["name"] for one in found if one["available"]] == ["gpu-1a", "gpu-1b"]


def test_shares_of_a_device_are_counted() -> None:
    claims = [
        claim(f"c{number}", "a", "gpu-0", shareID=str(number), consumedCapacity={"memory": "20Gi", "shares": "1"})
        for number in range(4)
    ]
    (one,) = ACCELERATORS([shared("a")], claims[:3])
    assert one["free"] == {"memory": 20 * GIBIBYTE, "shares": 1} and one["available"] and len(one["claims"]) == 3
    (full,) = ACCELERATORS([shared("a")], claims)
    assert full["free"] == {"memory": 0, "shares": 0} and not full["available"]


def test_taints_old_generations_and_incomplete_pools() -> None:
    tainted = device("gpu-1", taints=[{"key": "k", "value": "v", "effect": "NoSchedule", "timeAdded": "t"}])
    tainted_none = device("gpu-2", taints=[{"key": "k", "effect": "None"}])
    old = slice_of("a", device("gone"), number=1, generation=1)
    found = ACCELERATORS([old, slice_of("a", device("gpu-0"), tainted, tainted_none, generation=2)])
    assert [(one["name"], one["available"]) for one in found] == [("gpu-0", True), ("gpu-1", False), ("gpu-2", True)]
    assert found[1]["taints"] == [{"key": "k", "value": "v", "effect": "NoSchedule"}]
    (gap,) = ACCELERATORS([slice_of("a", device("gpu-0"), resourceSliceCount=2)])
    assert not gap["available"]


def test_older_device_format_is_read() -> None:
    old = slice_of("a")
    old["spec"]["devices"] = [{"name": "gpu-0", "basic": {"capacity": {"memory": {"value": "1Gi"}}}}]
    (one,) = ACCELERATORS([old])
    assert one["free"] == {"memory": GIBIBYTE} and one["type"] == ""


# ---------------------------------------------------------------------- properties

CLAIMS = st.lists(
    st.builds(
        lambda number, pool, name, amount: claim(
            f"c{number}",
            pool,
            name,
            **({"consumedCapacity": {"memory": f"{amount}Gi", "shares": "1"}} if pool == "s" else {}),
        ),
        st.integers(0, 9),
        st.sampled_from(["a", "b", "s"]),
        st.sampled_from(["gpu-0", "gpu-0-mig-1g-1", "gpu-0-mig-1g-5", "gpu-0-mig-3g-0", "gpu-0-mig-3g-3", "gone"]),
        st.integers(0, 30),
    ),
    max_size=8,
)
SLICES = [*cut("a"), *cut("b"), shared("s"), slice_of("c", device("gpu-0"), device("gpu-1", "24Gi"))]
CRITERIA = st.fixed_dictionaries(
    {},
    optional={
        "free": st.sampled_from(["1Gi", "20Gi", "40Gi", 0, {"memory": "10Gi", "shares": 1}]),
        "capacity": st.sampled_from(["24Gi", "80Gi"]),
        "type": st.sampled_from(["gpu", "mig", ["gpu", "mig"], "*"]),
        "node": st.sampled_from(["a", "[ab]", "s"]),
        "product": st.just("*H100*"),
        **{name: st.booleans() for name in ("available", "whole", "shared", "tainted", "held")},
    },
)


@given(CLAIMS, CLAIMS, st.randoms(use_true_random=False))
def test_property_more_claims_never_free_devices(claims: list[Json], more: list[Json], random: Any) -> None:
    before = ACCELERATORS(SLICES, claims)
    mixed = [*claims, *more]
    random.shuffle(mixed)
    for one, then in zip(before, ACCELERATORS(SLICES, mixed)):
        assert one["name"] == then["name"]
        assert all(0 <= then["free"][name] <= one["free"][name] <= one["capacity"][name] for name in one["capacity"])
        assert one["available"] or not then["available"]


@given(CLAIMS, st.permutations(SLICES))
def test_property_slice_order_has_no_effect(claims: list[Json], slices: list[Json]) -> None:
    assert ACCELERATORS(slices, claims) == ACCELERATORS(SLICES, claims)


@given(CLAIMS, CRITERIA, CRITERIA)
def test_property_criteria_filter_and_combine(claims: list[Json], one: Json, other: Json) -> None:
    found = ACCELERATORS(SLICES, claims)
    assert WITH(found) == found
    both = [each for each in WITH(found, **one) if each in WITH(found, **other)]
    assert WITH(WITH(found, **one), **other) == both
    if not set(one) & set(other):
        assert WITH(found, **one, **other) == both
    # A copy that a playbook saved as JSON gives the same result.
    assert WITH(json.loads(json.dumps(found)), **one) == WITH(found, **one)


@given(CLAIMS, CRITERIA, st.integers(0, 8))
def test_property_nodes_with_count_hold_enough_devices(claims: list[Json], criteria: Json, count: int) -> None:
    found = ACCELERATORS(SLICES, claims)
    nodes = NODES_WITH(found, count, **criteria)
    assert nodes == sorted(set(nodes)) and set(NODES_WITH(found, count + 1, **criteria)) <= set(nodes)
    for node in {each["node"] for each in found}:
        mine = [each for each in found if each["node"] == node]
        met = WITH(mine, **criteria)
        assert (node in nodes) == (bool(met) and HOLDING(mine, count, **criteria))
        assert not HOLDING(mine, len(met) + 1, **criteria)


@given(CLAIMS, st.sampled_from([{"type": "mig"}, {"type": "gpu"}, {"free": "10Gi"}, {}]))
def test_property_count_at_once_equals_first_fit(claims: list[Json], criteria: Json) -> None:
    """Compare with a first-fit allocation, claim by claim, of devices for one claim each."""
    wanted = {**criteria, "shared": False, "available": True}
    played, had = list(claims), 0
    while free := WITH(ACCELERATORS(SLICES, played), **wanted):
        played.append(claim(f"played-{had}", free[0]["pool"], free[0]["name"]))
        had += 1
    assert count_allocatable_together(WITH(ACCELERATORS(SLICES, claims), **wanted)) == had


# ---------------------------------------------------------------------- the filters and the test


def test_criteria_examples() -> None:
    found = ACCELERATORS([*cut("a"), slice_of("b", device("gpu-0"), device("gpu-1", "24Gi"))])
    assert [one["name"] for one in WITH(found, node="b", free="40Gi")] == ["gpu-0"]
    assert [one["name"] for one in WITH(found, profile="3g")] == ["gpu-0-mig-3g-0", "gpu-0-mig-3g-3"]
    assert len(WITH(found, attributes={"type": "gpu"})) == 3
    assert len(WITH(found, attributes={"gpu.nvidia.com/type": "gpu"})) == 3, "the same by its whole name"
    assert WITH(found, attributes={"example.com/type": "gpu"}) == []
    assert NODES_WITH(found, "2", type="gpu") == ["b"]
    # Six sevenths and two thirds are listed, but they are on the same GPU: at most six fit at once.
    assert HOLDING(found, 6, type="mig", free="1Gi") and not HOLDING(found, 7, type="mig", free="1Gi")
    assert HOLDING(found, 8, type="mig") and not HOLDING(found, 9, type="mig")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: WITH([], fre="1Gi"), "fre"),
        (lambda: WITH([], free="lots"), "lots"),
        (lambda: WITH([], type=3), "3"),
        (lambda: WITH([], held="maybe"), "maybe"),
        (lambda: WITH([], attributes="type"), "attributes"),
        (lambda: WITH("devices"), "devices"),
        (lambda: WITH([3], type="gpu"), "int"),
        (lambda: NODES_WITH([], "many"), "many"),
        (lambda: HOLDING({}), "list"),
        (lambda: ACCELERATORS([{"kind": "Pod"}]), "no ResourceSlice"),
        (lambda: ACCELERATORS({}), "ResourceSlices"),
        (lambda: ACCELERATORS([], 3), "ResourceClaims"),
    ],
)
def test_invalid_criteria_are_rejected(call: Any, says: str) -> None:
    with pytest.raises(AnsibleFilterError, match=says):
        call()


# ---------------------------------------------------------------------- hosts and groups


def node(name: str, **labels: str) -> Json:
    status = {
        "addresses": [{"type": "InternalIP", "address": "192.0.2.7"}, {"type": "InternalIP", "address": "2001:db8::7"}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


def test_hosts_have_variables_and_groups() -> None:
    slices = [*cut("a"), slice_of("b", device("gpu-0", taints=[{"key": "k", "effect": "NoExecute"}]))]
    found = inventory_hosts.hosts(slices, [claim("c", "a", "gpu-0-mig-3g-0")], [node("a", zone="z"), node("idle")])
    assert list(found) == ["a", "b"]
    first, second = found.values()
    assert [one["name"] for one in first["accelerators"]] == ["gpu-0"] and "draws" not in first["accelerators"][0]
    assert first["accelerator_counts"] == {"gpu": 1} and first["accelerator_available"] == {}
    assert first["accelerator_types"] == ["gpu", "mig"] and first["accelerator_profiles"] == ["3g"]
    assert first["accelerator_node"]["addresses"] == {"InternalIP": "192.0.2.7"}
    assert first["accelerator_node"]["labels"] == {"zone": "z"} and second["accelerator_node"]["ready"] == "Unknown"
    assert inventory_hosts.groups(second, "x_") == [
        "accelerators",
        f"x_driver_{DRIVER}",
        "x_type_gpu",
        f"x_product_{PRODUCT}",
        "x_tainted",
    ]
    everything = inventory_hosts.hosts(slices, which="all")["a"]
    assert len(everything["accelerators"]) == 9 and inventory_hosts.groups(everything, "")[-1] == "free"
    idle = inventory_hosts.hosts(slices, nodes=[node("idle")], without=True)["idle"]
    assert idle["accelerators"] == [] and inventory_hosts.groups(idle, "x_") == []
    assert set(everything) == set(idle) == set(first)


def test_object_lists_are_split() -> None:
    items = [{"metadata": {"name": "n"}}]
    documents = [
        None,
        {"kind": "List", "apiVersion": "v1", "items": [slice_of("a"), claim("c", "a"), {"kind": "Pod"}]},
        {"kind": "NodeList", "apiVersion": "v1", "items": items},
    ]
    slices, claims, nodes = inventory_hosts.split_objects(documents)
    assert len(slices) == len(claims) == len(nodes) == 1
    for wrong in ("text", {"spec": {}}):
        with pytest.raises(ValueError, match="found"):
            inventory_hosts.split_objects([wrong])


def inventory(directory: Path, options: Json, documents: list[Json], **environment: str) -> Json:
    """Return the output of ansible-inventory for a configuration with a file of objects."""
    (directory / "cluster.json").write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": documents}))
    given = {"plugin": "dra.accelerators.accelerators", "file": "cluster.json", **options}
    (directory / "accelerators.yml").write_text(yaml.safe_dump(given))
    done = run_ansible(
        [Path(sys.executable).with_name("ansible-inventory"), "-i", directory / "accelerators.yml", "--list"],
        env={**os.environ, "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true", "HOME": str(directory), **environment},
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    # Ansible marks values that are not templates.
    answer: Json = json.loads(done.stdout, object_hook=lambda each: each.get("__ansible_unsafe", each))
    return answer


def test_inventory_of_a_file(tmp_path: Path) -> None:
    evil = device("gpu-1", attributes={"uuid": {"string": "{{ lookup('env', 'HOME') }}"}})
    documents = [*cut("a"), slice_of("b", device("gpu-0"), evil), node("b", zone="z1"), node("idle")]
    options = {
        "address": "InternalIP",
        "nodes_without": True,
        "compose": {"largest": "accelerators | map(attribute='capacity.memory') | max"},
        "groups": {"two_free": "accelerators is dra.accelerators.holding_accelerators(2, type='gpu', free='40Gi')"},
        "keyed_groups": [{"key": "accelerator_node.labels.zone", "prefix": "zone"}],
        "cache": True,
        "cache_plugin": "ansible.builtin.jsonfile",
        "cache_connection": str(tmp_path / "cache"),
        "strict": False,
    }
    found = inventory(tmp_path, options, documents)
    assert found["accelerators"]["hosts"] == ["a", "b"]
    assert found["two_free"]["hosts"] == found["zone_z1"]["hosts"] == ["b"]
    assert found["accelerator_product_NVIDIA_H100_80GB_HBM3"]["hosts"] == ["a", "b"]
    assert found["accelerator_type_mig"]["hosts"] == ["a"]
    variables = found["_meta"]["hostvars"]
    assert variables["b"]["ansible_host"] == "192.0.2.7" and variables["b"]["largest"] == 80 * GIBIBYTE
    assert variables["b"]["accelerators"][1]["uuid"] == "{{ lookup('env', 'HOME') }}"
    assert "idle" in variables and "ansible_host" not in variables["a"]
    # The cached objects are used until they expire.
    assert inventory(tmp_path, options, []) == found
    with pytest.raises(AssertionError, match="no ResourceSlice"):
        inventory(tmp_path, {}, [{"kind": "ResourceSlice", "apiVersion": "resource.k8s.io/v1", "spec": {}}])


# ---------------------------------------------------------------------- claims and taints


def test_claims_of_unpublished_devices_and_without_devices() -> None:
    facts = claim_info.claims.claim_facts(claim("c", "a", "gone"), {}, {})
    assert not facts["devices"][0]["published"] and facts["devices"][0]["node"] == "" and facts["healthy"]
    bare = claim_info.claims.claim_facts({"metadata": {"name": "n", "namespace": "s"}}, {}, {})
    assert not bare["allocated"] and bare["devices"] == bare["nodes"] == []


TAINT = {"key": "k", "value": "v", "effect": "NoExecute"}


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "key": "k"}, True),
        ({"operator": "Exists", "key": "other"}, False),
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute"}, True),
        ({"key": "k", "value": "w"}, False),
        ({"key": "k"}, False),
        ({"key": "k", "value": "v", "effect": "NoSchedule"}, False),
        ({"operator": "Exists", "tolerationSeconds": 60}, False),
    ],
)
def test_tolerations_match_taints(toleration: Json, fits: bool) -> None:
    assert claim_info.claims.tolerates(toleration, TAINT) == fits
