# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test nodes by their devices: the inventory and the playbook of the examples, on a cluster whose scheduler allocates
a GPU.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from tests.cluster.cluster import EXAMPLES, Cluster, execute
from tests.cluster.manifests import claim, pod

Free = dict[str, list[str]]


def ansible(cluster: Cluster, *words: object) -> Any:
    """Return the JSON output of an Ansible program with the inventory of the examples, which reads the cluster and no
    node.
    """
    environment = {
        **os.environ,
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true",
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        "KUBECONFIG": cluster.world("kubeconfig").strip(),
    }
    program, *rest = words
    return json.loads(execute([program, "--inventory", EXAMPLES / "accelerators.yml", *rest], env=environment).stdout)


def found_devices(cluster: Cluster) -> tuple[Free, list[str], list[str]]:
    """Return the output of the examples' playbook: free GPUs by node, nodes with four of them, and devices in use."""
    plays = ansible(cluster, "ansible-playbook", EXAMPLES / "find-accelerators.yml")["plays"]
    by_node, _taints = (task["hosts"] for task in plays[0]["tasks"])
    roomy, held = (task["hosts"]["localhost"] for task in plays[1]["tasks"])
    free = {node: sorted(result["msg"]) for node, result in by_node.items()}
    return free, roomy["msg"], [each["msg"] for each in held.get("results", ())]


def whole_gpus(cluster: Cluster, node: str) -> list[str]:
    """Return the published whole GPUs of a node, free or not."""
    return sorted(name for name in cluster.devices(node) if re.fullmatch(r"gpu-\d+", name))


@pytest.mark.usefixtures("clean")
def test_gpu_is_free_until_a_claim_uses_it(cluster: Cluster) -> None:
    nodes = cluster.nodes()
    free, roomy, held = found_devices(cluster)
    assert free == {node: whole_gpus(cluster, node) for node in nodes}
    assert roomy == [node for node in nodes if len(free[node]) >= 4] != []
    assert held == []

    cluster.apply(claim("one", device_class="gpu.nvidia.com"), pod("worker", "one"))
    cluster.wait_running("worker")
    (given,) = cluster.get("resourceclaim", "one")["status"]["allocation"]["devices"]["results"]
    node, device = given["pool"], given["device"]
    left, _roomy, held = found_devices(cluster)
    assert left == {**free, node: [each for each in free[node] if each != device]} != free
    assert held == [f"{node} {device}: default/one"]


@pytest.mark.usefixtures("clean")
def test_inventory_groups_follow_the_free_devices(cluster: Cluster) -> None:
    nodes = cluster.nodes()
    groups = ansible(cluster, "ansible-inventory", "--list")
    for name in ("accelerators", "accelerator_driver_gpu_nvidia_com", "accelerator_free", "two_free_gpus", "idle"):
        assert groups[name]["hosts"] == nodes, name

    cluster.apply(claim("one", device_class="gpu.nvidia.com"), pod("worker", "one"))
    cluster.wait_running("worker")
    (given,) = cluster.get("resourceclaim", "one")["status"]["allocation"]["devices"]["results"]
    groups = ansible(cluster, "ansible-inventory", "--list")
    assert groups["two_free_gpus"]["hosts"] == nodes
    assert groups["idle"]["hosts"] == [node for node in nodes if node != given["pool"]]
