# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test the removal of everything, claims first. These are the last tests of the directory, because nothing is left
afterwards.
"""

from __future__ import annotations

import json

import pytest

from tests.cluster.cluster import DRIVER, DRIVER_UNIT, PLUGIN_DIRECTORY, Cluster
from tests.cluster.manifests import claim, dynamic, pod
from tests.cluster.shown_secrets import check_no_secret
from tests.cluster.token_requests import token_of


@pytest.mark.prove
def test_removal_with_diff_and_verbosity_shows_no_token(cluster: Cluster) -> None:
    tokens = [token_of(cluster, node) for node in cluster.nodes()]
    looked = cluster.playbook("remove.yml", "--check", "--diff", "-vvv")
    assert looked.failed == 0 and "/etc/dra-accelerators/kubeconfig" in looked.output
    check_no_secret(looked.output, *tokens)


def test_removal_refuses_while_a_pod_uses_a_claim(cluster: Cluster) -> None:
    first, node = cluster.nodes()
    cluster.apply(
        claim("held", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("held", "held", node=node)
    )
    cluster.wait_running("held")
    refused = cluster.playbook("remove.yml", "--limit", node, check=False)
    assert refused.failed > 0
    assert "held" in refused.output, "the refusal names the pod or its claim"
    cluster.wait_registered(node)
    assert not cluster.get("node", node)["spec"].get("unschedulable")
    assert "dra-accelerators/cordoned" not in cluster.get("node", node)["metadata"].get("annotations", {})
    cluster.wait_registered(first)


@pytest.mark.prove
def test_forced_removal_with_a_reset_leaves_nothing_and_its_second_run_changes_nothing(
    cluster: Cluster,
) -> None:
    first, node = cluster.nodes()
    assert cluster.instances(first), "the layout has static partitions"
    removed = cluster.playbook(
        *("remove.yml", "-e", "accelerator_remove_force=true", "-e", "accelerator_remove_reset_layout=true")
    )
    assert removed.failed == 0, removed.output
    assert "held" not in cluster.kubectl("get", "pods", "-o", "name")
    cluster.kubectl("delete", "resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    assert cluster.slices() == []
    for each in (first, node):
        assert cluster.instances(each) == []
        assert "Enabled" not in cluster.run(each, "nvidia-smi", "--query-gpu=mig.mode.current", "--format=csv,noheader")
        left = cluster.shell(
            each,
            f"ls -d /opt/dra-accelerators /etc/dra-accelerators {PLUGIN_DIRECTORY} /etc/systemd/system/{DRIVER_UNIT} 2>/dev/null || true",
        )
        assert left.strip() == "", left
        assert cluster.cdi_files(each) == []
    again = cluster.playbook("remove.yml")
    assert again.failed == 0 and again.changed == 0, again.output


@pytest.mark.prove
def test_removal_keeps_another_driver_of_the_same_name(cluster: Cluster) -> None:
    node = cluster.nodes()[0]
    cluster.shell(node, f"mkdir -p {PLUGIN_DIRECTORY} && echo '{{}}' > {PLUGIN_DIRECTORY}/checkpoint.json")
    foreign = [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": "foreign"},
            "spec": {
                "driver": DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0"}],
            },
        },
        {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": DRIVER}, "spec": {}},
    ]
    cluster.apply(*foreign)
    try:
        removed = cluster.playbook("remove.yml")
        assert removed.failed == 0 and removed.changed == 0, removed.output
        assert cluster.shell(node, f"ls {PLUGIN_DIRECTORY}").split() == ["checkpoint.json"]
        names = {item["metadata"]["name"] for item in cluster.get("resourceslices,deviceclasses")["items"]}
        assert {"foreign", DRIVER} <= names, json.dumps(sorted(names))
    finally:
        cluster.delete(*foreign)
        cluster.shell(node, f"rm -r {PLUGIN_DIRECTORY}")
