# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test modes of NPU nodes that forbid vNPUs: the NPUs are published whole, and vNPUs are published as soon as the mode
allows them.

The first node has 910B3, whose vNPUs can be for containers or for virtual machines. The second has A3, whose two dies
can work as one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Recap
from tests.cluster.manifests import claim
from tests.cluster.npus import NpuCluster, npu_pod

WORLD = os.environ.get("DRA_ACCELERATORS_NPU_MODES_WORLD", "npu-modes")
LAYOUT = {"accelerator_layouts": [{"hosts": "accelerator_nodes", "layout": [{"match": {}, "mode": "dynamic"}]}]}


@pytest.fixture(scope="module")
def npus() -> Iterator[NpuCluster]:
    """Yield two nodes, all of whose NPUs are dynamic."""
    made = NpuCluster(WORLD, {**LAYOUT, "dra_driver_inventory_interval": 10})
    made.world("down")
    made.world("up", "--nodes", "2", "--silicon", "8x910B3,8xA3", timeout=3000)
    yield made
    made.world("down")


@pytest.fixture(scope="module")
def first(npus: NpuCluster) -> Recap:
    """Run the site playbook for the first time."""
    return npus.playbook("site.yml", check=False)


def set_mode(npus: NpuCluster, node: str, mode: str, value: int) -> None:
    """Set a mode of a node with npu-smi, like an administrator."""
    answer = npus.run(node, "npu-smi", "set", "-t", mode, "-d", value)
    assert "OK" in answer, answer


def is_whole(npus: NpuCluster, node: str) -> bool:
    """Return whether a node publishes only whole NPUs."""
    devices = npus.devices(node)
    return bool(devices) and not any("-vir" in name for name in devices)


@pytest.mark.parametrize(
    ("number", "mode", "forbids", "allows"), [(0, "vnpu-mode", 1, 0), (1, "multi-die-policy", 0, 1)]
)
def test_vnpus_that_a_mode_forbids_are_not_published(
    npus: NpuCluster, first: Recap, number: int, mode: str, forbids: int, allows: int
) -> None:
    assert not first.failed, first.output
    node = npus.nodes()[number]
    set_mode(npus, node, mode, allows)
    npus.wait("slices are published", lambda: npus.devices(node) and not is_whole(npus, node), timeout=150)
    published = set(npus.devices(node))
    set_mode(npus, node, mode, forbids)
    npus.wait("whole NPUs alone are published", lambda: is_whole(npus, node), timeout=150)
    # A pod with a claim for a vNPU waits in the scheduler, not on the node. A pod with a claim for a whole NPU runs.
    npus.apply(
        claim("slice", device_class="vnpu.huawei.com"),
        npu_pod("slice", "slice", node=node),
        claim("whole", device_class="npu.huawei.com"),
        npu_pod("whole", "whole", node=node),
    )
    npus.wait_running("whole")
    npus.wait("the other pod waits", lambda: "Unschedulable" in json.dumps(npus.pod("slice")["status"]))
    preflight = npus.playbook("site.yml", "--tags", "preflight", "--limit", node, check=False)
    assert not preflight.failed and f"{mode} -d {allows}" in preflight.output, preflight.output

    npus.kubectl("delete", "pod/whole", "resourceclaim/whole")
    set_mode(npus, node, mode, allows)
    npus.wait("vNPUs are published again", lambda: published.issubset(npus.devices(node)), timeout=150)
    npus.wait_running("slice")
    assert len(npus.instances(node)) == 1
    npus.kubectl("delete", "pod/slice", "resourceclaim/slice")
    npus.wait("its vNPU is deleted", lambda: not npus.instances(node))
