# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test boards of the Ampere generation: the MIG mode changes only with a reset, which needs consent and the fabric
manager, and outlives a reboot.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import claim, dynamic, pod, static

pytestmark = pytest.mark.prove

STATIC = {"3g.20gb": 1, "1g.5gb": 4}
LAYOUT = [
    {"match": {"index": 0}, "mode": "static", "partitions": STATIC},
    {"match": {"index": 1}, "mode": "whole"},
    {"match": {}, "mode": "dynamic"},
]
CONFIGURATION = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
SOCKET = "/run/nvidia-fabricmanager/socket"
MIG_MODES = ("nvidia-smi", "--query-gpu=mig.mode.current", "--format=csv,noheader")


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[str]:
    """Yield the second node with A100 of 40 GB instead of its boards; restore H100 afterwards."""
    name = cluster.nodes()[1]
    cluster.replace_boards(name, "--nodes", "2", "--silicon", "8xH100,8xA100-40")
    yield name
    cluster.shell(name, f"systemctl stop nvidia-fabricmanager; rm -rf $(dirname {CONFIGURATION}) {SOCKET}", check=False)
    cluster.replace_boards(name, "--nodes", "2", "--silicon", "8xH100")
    recap = cluster.playbook("site.yml")
    assert not recap.failed, recap.output


def site(cluster: Cluster, node: str, **more: Any) -> Any:
    """Run the site playbook on this node with the layout for its boards."""
    variables = {"accelerator_layouts": [{"hosts": node, "layout": LAYOUT}], **more}
    return cluster.playbook("site.yml", "--limit", node, "-e", json.dumps(variables), check=False)


def profiles(cluster: Cluster, node: str) -> Counter[str]:
    """Return the number of the node's partitions by profile."""
    return Counter(line.split()[1] for line in cluster.instances(node))


def test_required_reset_without_consent_is_reported_and_not_done(cluster: Cluster, node: str) -> None:
    recap = site(cluster, node)
    assert recap.failed == 1, recap.output
    assert "when_needed" in recap.output
    assert set(cluster.run(node, *MIG_MODES).split()) == {"Disabled"}


def test_reset_without_the_fabric_manager_is_refused(cluster: Cluster, node: str) -> None:
    recap = site(cluster, node, nvidia_mig_reset="when_needed")
    assert recap.failed == 1 and "systemctl start nvidia-fabricmanager" in recap.output, recap.output
    assert set(cluster.run(node, *MIG_MODES).split()) == {"Disabled"}
    # In its mode for bare metal.
    cluster.shell(
        node,
        f"mkdir -p $(dirname {CONFIGURATION}) && printf 'FABRIC_MODE=0\\nFM_CMD_UNIX_SOCKET_PATH={SOCKET}\\n' > {CONFIGURATION} && "
        "systemd-run --unit=nvidia-fabricmanager --collect accelerator-simulator fabric-manager",
    )
    cluster.wait(
        "the fabric manager listens", lambda: cluster.shell(node, f"test -S {SOCKET} && echo yes", check=False)
    )


def test_layout_with_consent_is_created_and_persistent(cluster: Cluster, node: str) -> None:
    recap = site(cluster, node, nvidia_mig_reset="when_needed")
    assert not recap.failed, recap.output
    assert cluster.run(node, *MIG_MODES).split() == ["Enabled", "Disabled", *["Enabled"] * 6]
    assert profiles(cluster, node) == STATIC
    again = site(cluster, node, nvidia_mig_reset="when_needed")
    assert (again.failed, again.changed) == (0, 0), again.output


def test_pods_with_partitions_run_again_after_a_reboot(cluster: Cluster, node: str) -> None:
    names = ("ampere-static", "ampere-dynamic", "ampere-whole")
    wanted = {"mig.nvidia.com": (static("3g.20gb"), dynamic("1g.5gb")), "gpu.nvidia.com": (None,)}
    requests = [(kind, expression) for kind, expressions in wanted.items() for expression in expressions]
    for name, (kind, expression) in zip(names, requests):
        cluster.apply(
            claim(name, device_class=kind, expression=expression), pod(name, name, node=node, restart="Always")
        )
    cluster.wait_running(*names)
    assert profiles(cluster, node) == {"3g.20gb": 1, "1g.5gb": 5}
    seen = {name: cluster.wait("the pod's list", lambda name=name: cluster.log(name)) for name in names}
    assert "MIG 3g.20gb" in seen["ampere-static"] and "MIG 1g.5gb" in seen["ampere-dynamic"], seen
    assert all(log.count("GPU 0") == 1 and "GPU 1" not in log for log in seen.values()), seen
    assert "MIG" not in seen["ampere-whole"].replace("MIG-", "")

    cluster.world("reboot", node)
    cluster.wait_registered(node, timeout=180)

    def restarted() -> bool:
        statuses = [cluster.pod(name)["status"]["containerStatuses"][0] for name in names]
        return all(status["restartCount"] >= 1 and "running" in status["state"] for status in statuses)

    cluster.wait("the pods run again", restarted, timeout=300)
    assert profiles(cluster, node) == {"3g.20gb": 1, "1g.5gb": 5}
    cluster.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    cluster.wait("only the static layout is left", lambda: profiles(cluster, node) == STATIC, timeout=60)
    assert cluster.cdi_files(node) == []
    # The layout determines the mode, not the claims: no board is reset for a pod.
    assert cluster.run(node, *MIG_MODES).split() == ["Enabled", "Disabled", *["Enabled"] * 6]
