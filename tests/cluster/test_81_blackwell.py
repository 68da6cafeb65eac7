# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test boards of the Blackwell generation: their workload profiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import claim, example, pod, settings
from tests.cluster.test_24_settings import memory_lock, shown, uuid_in

pytestmark = pytest.mark.prove

NONE = "No profiles are currently requested."


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[str]:
    """Yield the second node with B200 instead of its boards; restore H100 afterwards."""
    name = cluster.nodes()[1]
    cluster.world("up", "--nodes", "2", "--silicon", "8xH100,8xB200")
    recap = cluster.playbook("site.yml", "--limit", name)
    assert not recap.failed, recap.output
    cluster.wait("the boards are published", lambda: "gpu-7" in cluster.devices(name))
    yield name
    cluster.world("up", "--nodes", "2", "--silicon", "8xH100")
    recap = cluster.playbook("site.yml")
    assert not recap.failed, recap.output


def profiles(cluster: Cluster, node: str, uuid: str) -> list[str]:
    """Return the requested workload profiles of a GPU from the node's nvidia-smi."""
    return cluster.run(node, "nvidia-smi", "power-profiles", "-gr", "-i", uuid).strip().splitlines()


def test_workload_profiles_are_set_for_a_claim_and_removed_after_it(cluster: Cluster, node: str) -> None:
    """These boards satisfy the first alternative of the example. Its settings outlive the driver."""
    documents = example("tuned-gpu.yaml", node)
    cluster.apply(*documents)
    cluster.wait_running("tuned-gpu")
    log = cluster.wait("the output of the pod", lambda: "done" in (said := cluster.log("tuned-gpu")) and said)
    uuid = uuid_in(log)
    assert f"{uuid}, 800.00 W, Exclusive_Process, 900 MHz, 3996 MHz\n" in log
    assert "1. Max-Q\n7. LLM Training\n" in log
    assert profiles(cluster, node, uuid) == ["1. Max-Q", "7. LLM Training"]
    assert memory_lock(cluster, node, uuid) == (3996, 3996)
    pid = cluster.driver_pid(node)
    cluster.run(node, "kill", "-9", str(pid))
    cluster.wait("another process", lambda: cluster.driver_pid(node) not in (0, pid))
    cluster.wait_registered(node)
    assert profiles(cluster, node, uuid) == ["1. Max-Q", "7. LLM Training"]
    cluster.delete(*reversed(documents))
    assert profiles(cluster, node, uuid) == [NONE]
    assert shown(cluster, node, uuid)[:2] == ("1000.00 W", "Default")
    assert memory_lock(cluster, node, uuid) == (0, 0)


def test_unsupported_workload_profile_is_rejected_with_the_supported_ones(cluster: Cluster, node: str) -> None:
    wanted = claim("unheard", device_class="gpu.nvidia.com")
    wanted["spec"]["devices"]["config"] = [settings(workloadProfiles=["max-q", "mig"])]
    documents = [wanted, pod("unheard", "unheard", node=node)]
    cluster.apply(*documents)
    cluster.wait(
        "the refusal as an event",
        lambda: (
            "workloadProfiles[1] is 'mig'; expected max-p, max-q, compute, memory-bound, balanced"
            in cluster.kubectl("get", "events", "-o", "json")
        ),
    )
    cluster.delete(*reversed(documents))
