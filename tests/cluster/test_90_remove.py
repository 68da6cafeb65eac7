# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Everything is taken away again, claims first; the last test of the folder, because nothing is left after it."""

from __future__ import annotations

from tests.cluster.cluster import DRIVER_UNIT, Cluster
from tests.cluster.manifests import claim, dynamic, pod


def test_removal_refuses_while_a_pod_uses_a_claim(cluster: Cluster) -> None:
    node = cluster.nodes()[1]
    cluster.apply(
        claim("held", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("held", "held", node=node)
    )
    cluster.wait_running("held")
    refused = cluster.playbook("remove.yml", check=False)
    assert refused.failed > 0
    assert "held" in refused.output, "the refusal names the pod or its claim"
    cluster.wait_registered(node)
    cluster.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)


def test_removal_leaves_nothing_and_its_second_run_changes_nothing(cluster: Cluster) -> None:
    removed = cluster.playbook("remove.yml")
    assert removed.failed == 0, removed.output
    cluster.wait("no slice left", lambda: not cluster.slices(), timeout=90)
    for node in cluster.nodes():
        left = cluster.shell(
            node,
            f"ls -d /opt/dra-accelerators /etc/dra-accelerators /var/lib/kubelet/plugins/gpu.nvidia.com /etc/systemd/system/{DRIVER_UNIT} 2>/dev/null || true",
        )
        assert left.strip() == "", left
        assert cluster.cdi_files(node) == []
    assert "dra-accelerators" not in cluster.kubectl(
        "get", "clusterroles,clusterrolebindings,validatingadmissionpolicies,namespaces", "-o", "name"
    )
    again = cluster.playbook("remove.yml")
    assert again.failed == 0 and again.changed == 0, again.output
