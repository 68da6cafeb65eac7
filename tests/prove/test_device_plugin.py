# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a node with a device plugin instead of claims, with a real kubelet: the devices in pods, faults, restarts, and
a change to claims and back.

A separate world with one node. Each test starts from the state that the previous one left.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER_UNIT, PLUGIN_DIRECTORY, Cluster, Recap
from tests.cluster.manifests import claim, example, pod

LAYOUT: list[dict[str, Any]] = [
    {"match": {"index": 0}, "mode": "static", "partitions": {"1g.10gb": 4}},
    {"match": {}, "mode": "whole"},
]
GPUS, PARTITIONS = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
FOLDER = "/var/lib/kubelet/device-plugins"
CALL = "nvmlDeviceGetMemoryInfo"


def site(cluster: Cluster, interface: str, *arguments: str) -> Recap:
    """Run the site playbook with one kubelet interface for all nodes."""
    variables = {
        "accelerator_layouts": [{"hosts": "all", "layout": LAYOUT}],
        "dra_driver_kubelet_interface": interface,
        "dra_driver_inventory_interval": 10,
    }
    return cluster.playbook("site.yml", "-e", json.dumps(variables), *arguments, check=False)


def offered(cluster: Cluster, what: str = "allocatable") -> dict[str, int]:
    """Return the quantities of our resources in the Node's status."""
    (node,) = cluster.get("nodes")["items"]
    found = node["status"].get(what, {})
    return {name: int(number) for name, number in found.items() if name.startswith("nvidia.com/")}


def seen(cluster: Cluster, name: str) -> list[str]:
    """Return the UUIDs of the GPUs and MIG devices that NVML shows in a pod."""
    log = cluster.wait("the pod's list", lambda: cluster.log(name))
    return re.findall(r"UUID: ((?:GPU|MIG)-[0-9a-f-]+)", log)


@pytest.fixture(scope="module")
def plugged() -> Iterator[Cluster]:
    """Yield a node with the device plugin from its first run on."""
    cluster, kept = Cluster("plugin"), os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
    if not kept:
        cluster.world("down")
    cluster.world("up", "--nodes", "1", "--silicon", "8xH100", timeout=3000)
    yield cluster
    if not kept:
        cluster.world("down")


def test_site_installs_the_device_plugin_and_second_run_changes_nothing(plugged: Cluster) -> None:
    recap = site(plugged, "device-plugin")
    assert not recap.failed, recap.output
    plugged.wait("the kubelet offers them", lambda: offered(plugged) == {GPUS: 7, PARTITIONS: 4})
    assert plugged.slices() == []
    again = site(plugged, "device-plugin")
    assert (again.failed, again.changed) == (0, 0), again.output


def test_pod_that_requests_one_gpu_sees_exactly_one(plugged: Cluster) -> None:
    (node,) = plugged.nodes()
    plugged.apply(*example("extended-resource.yaml", node), *example("device-plugin.yaml", node))
    plugged.wait_running("extended-resource", "two-gpus", "one-partition")
    one, two, part = (seen(plugged, name) for name in ("extended-resource", "two-gpus", "one-partition"))
    assert [each[:4] for each in one] == ["GPU-"] and len({*one, *two}) == 3, (one, two)
    assert [each for each in part if each.startswith("MIG-")] == part[-1:], part
    assert plugged.get("resourceclaims")["items"] == [], "there is a claim"
    # The kubelet's checkpoint contains the device IDs, which are NVML's UUIDs.
    answer = plugged.run(node, "cat", f"{FOLDER}/kubelet_internal_checkpoint")
    assert all(uuid in answer for uuid in (*one, *two, part[-1]))


def test_faulty_gpu_is_not_offered_until_it_recovers(plugged: Cluster) -> None:
    (node,) = plugged.nodes()
    plugged.run(node, "accelerator-simulator", "fault", "7", "call", CALL, "fail", "999")
    try:
        plugged.wait("one GPU less is offered", lambda: offered(plugged)[GPUS] == 6)
        assert offered(plugged, "capacity")[GPUS] == 7
    finally:
        plugged.run(node, "accelerator-simulator", "clear")
    plugged.wait("the GPU is offered again", lambda: offered(plugged)[GPUS] == 7)


def test_restarts_of_kubelet_and_driver_affect_no_pod(plugged: Cluster) -> None:
    (node,) = plugged.nodes()
    for unit in ("kubelet.service", DRIVER_UNIT):
        plugged.run(node, "systemctl", "restart", unit)
        plugged.wait(f"offered after a restart of {unit}", lambda: offered(plugged) == {GPUS: 7, PARTITIONS: 4})
        plugged.wait("the status is good", lambda: plugged.status(node)["ready"])
        plugged.wait_running("extended-resource", "two-gpus", "one-partition")
        restarts = [
            status["restartCount"]
            for name in ("extended-resource", "two-gpus", "one-partition")
            for status in plugged.pod(name)["status"]["containerStatuses"]
        ]
        assert restarts == [0, 0, 0]


def test_change_to_claims_publishes_nothing_before_the_last_pod_ends(plugged: Cluster) -> None:
    (node,) = plugged.nodes()
    plugged.kubectl("delete", "pod", "two-gpus", "one-partition")
    # The run waits for the published devices, and reports what prevents them.
    refused = site(plugged, "dra", "-e", "dra_driver_publish_timeout=30")
    assert refused.failed == 1 and "default/extended-resource" in refused.output, refused.output
    assert plugged.slices() == [] or not plugged.devices(node)
    plugged.kubectl("delete", "pod", "extended-resource")
    recap = site(plugged, "dra")
    assert not recap.failed, recap.output
    plugged.wait("eleven devices", lambda: len(plugged.devices(node)) == 11)
    plugged.wait("the plugin's resources are removed or zero", lambda: not any(offered(plugged).values()))
    assert plugged.run(node, "sh", "-c", f"ls {FOLDER} | grep ^dra- || true").split() == []


def test_change_to_device_plugin_keeps_a_claim_until_its_end(plugged: Cluster) -> None:
    (node,) = plugged.nodes()
    documents = [claim("held", device_class="gpu.nvidia.com"), pod("held", "held", node=node)]
    plugged.apply(*documents)
    plugged.wait_running("held")
    (uuid,) = seen(plugged, "held")
    recap = site(plugged, "device-plugin")
    assert not recap.failed, recap.output
    plugged.wait("all GPUs except that of the claim", lambda: offered(plugged).get(GPUS) == 6)
    assert plugged.slices() == []
    answer = plugged.run(node, "cat", "/var/run/cdi/k8s.gpu.nvidia.com-device_plugin.json")
    assert uuid not in answer
    plugged.delete(*reversed(documents))  # the claim stays as long as its pod
    plugged.wait("the GPU of the claim too", lambda: offered(plugged).get(GPUS) == 7)
    plugged.wait(
        "nothing is served for claims",
        lambda: not plugged.shell(node, f"ls {PLUGIN_DIRECTORY}/dra.sock || true").strip(),
    )


def test_removal_leaves_nothing_of_the_device_plugin(plugged: Cluster) -> None:
    (node,) = plugged.nodes()
    recap = plugged.playbook("remove.yml", check=False)
    assert not recap.failed, recap.output
    assert (
        plugged.shell(node, f"ls {FOLDER} /var/run/cdi 2>/dev/null | grep -E '^dra-|device_plugin' || true").split()
        == []
    )
