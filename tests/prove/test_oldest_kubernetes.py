# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test the oldest Kubernetes that the README supports, with its default feature gates: whole GPUs and static layouts.

Its API server drops counters and taints, so dynamic partitions are rejected with the name of the gate.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import ROOT, Cluster, Recap
from tests.cluster.manifests import claim, pod, static
from tests.prove.pods import make_base_image, the_pod, variables

STATIC = {"3g.40gb": 1, "1g.10gb": 4}
LAYOUT: list[dict[str, Any]] = [
    {"match": {"index": 0}, "mode": "static", "partitions": STATIC},
    {"match": {}, "mode": "whole"},
]
DYNAMIC: list[dict[str, Any]] = [{"match": {}, "mode": "dynamic"}]


@pytest.fixture(scope="module")
def oldest() -> Iterator[Cluster]:
    """Yield one bare node of the oldest release."""
    made = Cluster("oldest")
    made.world("down")
    made.world("up", "--nodes", "1", "--silicon", "8xH100", "--release", "oldest", timeout=3000)
    yield made
    made.world("down")


def site(cluster: Cluster, layout: list[dict[str, Any]], *arguments: str, **more: Any) -> Recap:
    """Run the site playbook with one layout for all nodes."""
    variables = {"accelerator_layouts": [{"hosts": "accelerator_nodes", "layout": layout}], **more}
    return cluster.playbook("site.yml", "-e", json.dumps(variables), *arguments, check=False)


def test_world_has_the_oldest_supported_release_with_default_gates(oldest: Cluster) -> None:
    (node,) = oldest.nodes()
    said = oldest.get("node", node)["status"]["nodeInfo"]["kubeletVersion"]
    promised = re.search(
        r"^\| Kubernetes \| (\d+\.\d+) or newer", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    assert promised and said.startswith(f"v{promised[1]}."), said
    gates = oldest.kubectl("get", "--raw=/metrics")
    assert 'kubernetes_feature_enabled{name="DRAPartitionableDevices",stage="ALPHA"} 0' in gates


def test_dynamic_partitions_are_rejected_with_the_name_of_the_gate(oldest: Cluster) -> None:
    recap = site(oldest, DYNAMIC)
    assert recap.failed == 1, recap.output
    assert "DRAPartitionableDevices" in recap.output


def test_site_publishes_and_second_run_changes_nothing(oldest: Cluster) -> None:
    recap = site(oldest, LAYOUT)
    assert not recap.failed, recap.output
    (node,) = oldest.nodes()
    oldest.wait("twelve devices", lambda: len(oldest.devices(node)) == 12)
    kinds = Counter(device["attributes"]["type"]["string"] for device in oldest.devices(node).values())
    assert kinds == {"gpu": 7, "mig": 5}
    again = site(oldest, LAYOUT)
    assert (again.failed, again.changed) == (0, 0), again.output


def check_claims(cluster: Cluster) -> None:
    """Start a pod with a whole GPU and one with a partition, and delete both."""
    (node,) = cluster.nodes()
    wanted = {"whole": ("gpu.nvidia.com", None), "partition": ("mig.nvidia.com", static("3g.40gb"))}
    for name, (kind, expression) in wanted.items():
        cluster.apply(claim(name, device_class=kind, expression=expression), pod(name, name, node=node))
    cluster.wait_running(*wanted)
    seen = {name: cluster.wait("the pod's list", lambda name=name: cluster.log(name)) for name in wanted}
    assert seen["whole"].count("GPU 0") == 1 and "MIG " not in seen["whole"], seen
    assert "MIG 3g.40gb" in seen["partition"], seen
    cluster.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    cluster.wait("no CDI file left", lambda: not cluster.cdi_files(node))
    assert len(cluster.instances(node)) == 5


def test_pods_claim_all_devices_and_release_them(oldest: Cluster) -> None:
    check_claims(oldest)


def test_removal_deletes_everything(oldest: Cluster) -> None:
    recap = oldest.playbook("remove.yml")
    assert not recap.failed, recap.output
    oldest.wait("no slice left", lambda: not oldest.slices(), timeout=90)


def test_daemonset_publishes_serves_claims_and_is_removed(oldest: Cluster) -> None:
    form = variables(make_base_image(oldest))
    recap = site(oldest, LAYOUT, **form)
    assert not recap.failed, recap.output
    assert the_pod(oldest)["spec"]["nodeName"] == oldest.nodes()[0]
    oldest.wait("twelve devices", lambda: len(oldest.devices(oldest.nodes()[0])) == 12)
    check_claims(oldest)
    recap = oldest.playbook("remove.yml", "-e", json.dumps(form))
    assert not recap.failed, recap.output
    oldest.wait("no slice left", lambda: not oldest.slices(), timeout=90)
