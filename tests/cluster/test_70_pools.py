# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the module resource_slices as a user runs it, on the real API server: pools are created, changed, and deleted,
and the scheduler allocates their devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import claim, pod
from tests.cluster.module_calls import Module, Result

SLICES_DRIVER = "fpga.example.com"


@pytest.fixture
def publish(world: Cluster, ansible: Module, tmp_path: Path) -> Iterator[Module]:
    kubeconfig = world.world("kubeconfig").strip()

    def run(*, check: bool = False, **options: Any) -> Result:
        common = {"kubeconfig": kubeconfig, "driver": SLICES_DRIVER, "pool": "shelf-1"}
        return ansible("localhost", "resource_slices", {**common, **options}, check=check)

    yield run
    left = [each for pool in ("shelf-1", "shelf-2") for each in pool_slices(world, pool)]
    if left:
        world.kubectl("delete", "resourceslices", *(each["metadata"]["name"] for each in left))


def pool_slices(cluster: Cluster, pool: str = "shelf-1") -> list[Result]:
    found = [
        each
        for each in cluster.get("resourceslices")["items"]
        if each["spec"]["driver"] == SLICES_DRIVER and each["spec"]["pool"]["name"] == pool
    ]
    return sorted(found, key=lambda each: str(each["metadata"]["name"]))


def fpgas(count: int) -> list[Result]:
    return [
        {
            "name": f"fpga-{number}",
            "attributes": {"model": "VX-2", "lanes": 8, "ready": True, "firmware": {"version": "2.4.1"}},
            "capacity": {"memory": "16Gi"},
        }
        for number in range(count)
    ]


def test_pool_is_created_changed_and_deleted(world: Cluster, publish: Module) -> None:
    said = publish(check=True, all_nodes=True, devices=fpgas(2))
    assert said["changed"]
    assert pool_slices(world) == []
    done = publish(all_nodes=True, devices=fpgas(2))
    assert [step["verb"] for step in done["steps"]] == ["create"]
    (kept,) = pool_slices(world)
    assert kept["spec"]["allNodes"] is True
    assert [device["name"] for device in kept["spec"]["devices"]] == ["fpga-0", "fpga-1"]

    again = publish(all_nodes=True, devices=fpgas(2))
    assert again["changed"] is False
    assert pool_slices(world) == [kept], "the slices were written again"

    changed = fpgas(2)
    changed[1]["capacity"]["memory"] = "32Gi"
    assert [step["verb"] for step in publish(all_nodes=True, devices=changed)["steps"]] == ["update"]
    (kept,) = pool_slices(world)
    assert kept["spec"]["pool"]["generation"] == 1

    more = publish(all_nodes=True, devices=fpgas(300))
    assert more["pool"] == {"driver": SLICES_DRIVER, "name": "shelf-1", "generation": 2, "slices": 3, "devices": 300}
    assert [len(each["spec"]["devices"]) for each in pool_slices(world)] == [128, 128, 44]
    assert publish(all_nodes=True, devices=fpgas(300))["changed"] is False

    assert len(publish(state="absent")["steps"]) == 3
    assert pool_slices(world) == []
    assert publish(state="absent")["changed"] is False


COUNTERS: Result = {
    "shared_counters": [{"name": "board-0", "counters": {"regions": 4}}],
    "devices": [
        {"name": name, "consumes_counters": [{"counter_set": "board-0", "counters": {"regions": regions}}]}
        for name, regions in (("half-0", 2), ("half-1", 2), ("whole", 4))
    ],
}


def test_counters_taints_and_a_node_selector(world: Cluster, publish: Module) -> None:
    terms = [{"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}]
    options = {**COUNTERS, "pool": "shelf-2", "node_selector": {"nodeSelectorTerms": terms}}
    options["devices"] = [*options["devices"]]
    options["devices"][2] = {
        **options["devices"][2],
        "taints": [{"key": "example.com/worn", "value": "yes", "effect": "NoSchedule"}],
    }
    done = publish(**options)
    assert done["dropped_fields"] == [], "every gate is on"
    counters, devices = pool_slices(world, "shelf-2")
    assert counters["spec"]["sharedCounters"][0]["counters"] == {"regions": {"value": "4"}}
    assert devices["spec"]["devices"][2]["taints"][0]["timeAdded"], "the server adds the time"
    assert publish(**options)["changed"] is False


def test_rejected_pool_changes_nothing(world: Cluster, publish: Module) -> None:
    publish(all_nodes=True, devices=fpgas(2))
    before = pool_slices(world)
    wrong = fpgas(200)
    wrong[199]["taints"] = [{"key": "not a label", "effect": "NoSchedule"}]
    for check in (True, False):
        refused = publish(check=check, all_nodes=True, devices=wrong)
        assert refused["failed"]
        assert refused["status"] == 422
        assert "taints" in refused["msg"]
    misspelt = publish(all_nodes=True, devices=[{**fpgas(1)[0], "capasity": {}}])
    assert misspelt["failed"]
    assert "capasity" in misspelt["msg"]
    assert pool_slices(world) == before


def test_pool_of_a_node_is_rejected(cluster: Cluster, publish: Module) -> None:
    name = cluster.nodes()[0]
    before = cluster.slices(name)
    for options in ({"node_name": name}, {"state": "absent"}):
        refused = publish(driver="gpu.nvidia.com", pool=name, **options)
        assert refused["failed"]
        assert refused["error_code"] == "foreign-pool"
        assert f"Node {name}" in refused["msg"]
    assert [each["metadata"]["uid"] for each in cluster.slices(name)] == [each["metadata"]["uid"] for each in before]


def test_foreign_pool_is_replaced_only_with_force(world: Cluster, publish: Module) -> None:
    spec = {
        "driver": SLICES_DRIVER,
        "allNodes": True,
        "pool": {"name": "shelf-1", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "theirs"}],
    }
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "theirs"},
        "spec": spec,
    }
    world.apply(document)
    refused = publish(all_nodes=True, devices=fpgas(1))
    assert refused["error_code"] == "foreign-pool"
    assert publish(all_nodes=True, devices=fpgas(1), force=True)["changed"]
    (kept,) = pool_slices(world)
    assert [device["name"] for device in kept["spec"]["devices"]] == ["fpga-0"]


def test_a_published_device_is_allocated(world: Cluster, publish: Module) -> None:
    """The scheduler allocates a device of the pool to a pod, in the order of the devices."""
    publish(all_nodes=True, devices=fpgas(3))
    selector = f"device.driver == '{SLICES_DRIVER}' && device.capacity['{SLICES_DRIVER}'].memory.isGreaterThan(quantity('8Gi'))"
    device_class = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "fpga.example.com"},
        "spec": {"selectors": [{"cel": {"expression": selector}}]},
    }
    documents = (device_class, claim("board", device_class="fpga.example.com"), pod("user", "board"))
    world.apply(*documents)
    try:
        allocation = world.wait(
            "the claim has a device",
            lambda: world.get("resourceclaim", "board").get("status", {}).get("allocation"),
        )
        assert allocation["devices"]["results"][0]["device"] == "fpga-0"
    finally:
        world.delete(*reversed(documents))
