# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a claim with administrator access: it sees every device next to their users, and neither allocates nor changes
any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, CommandFailed
from tests.cluster.manifests import claim, dynamic, example, pod

NAMESPACE = "watchers"
LABEL = "resource.kubernetes.io/admin-access"
LIST_INSTANCES = ("nvidia-smi", "mig", "-lgi")


@pytest.fixture()
def namespace(clean: Cluster) -> Iterator[Cluster]:
    """Create the example on the second node; delete its namespace afterwards."""
    documents = example("admin-access.yaml", clean.nodes()[1])
    clean.apply(*documents)
    yield clean
    clean.delete(documents[0])


def test_monitoring_pod_sees_every_gpu_and_blocks_none(namespace: Cluster) -> None:
    """It is created first, because the scheduler subtracts counters for it while they last
    (kubernetes/kubernetes#140729).
    """
    cluster, node = namespace, namespace.nodes()[1]
    cluster.wait_running("watch", namespace=NAMESPACE)
    log = cluster.wait("the watcher's list", lambda: cluster.log("watch", NAMESPACE))
    published = [each for each in cluster.devices(node).values() if each["attributes"]["type"]["string"] == "gpu"]
    seen = set(re.findall(r"^GPU \d+: .*UUID: (GPU-[0-9a-f-]+)", log, re.MULTILINE))
    assert len(seen) == 8 and seen == {each["attributes"]["uuid"]["string"] for each in published}
    assert cluster.instances(node) == []
    # Other claims get the same GPUs, whole and partitioned.
    whole = [claim("whole", device_class="gpu.nvidia.com"), pod("whole", "whole", node=node)]
    part = [claim("part", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("part", "part", node=node)]
    cluster.apply(*whole, *part)
    cluster.wait_running("whole", "part")
    # The watcher can list partitions, which the user of one cannot.
    assert "1g.10gb" in cluster.kubectl("exec", "watch", "-n", NAMESPACE, "--", *LIST_INSTANCES)
    empty = cluster.kubectl("exec", "part", "--", *LIST_INSTANCES)
    assert "Placement" in empty and "1g.10gb" not in empty, empty
    # The partition is destroyed with its pod while the watcher runs, and another one is created.
    cluster.kubectl("exec", "watch", "-n", NAMESPACE, "--", "sh", "-c", "nvidia-smi -L -l 1 >/tmp/seen 2>&1 &")
    cluster.delete(*reversed(part))
    assert cluster.instances(node) == []
    cluster.apply(*part)
    cluster.wait_running("part")
    assert len(cluster.instances(node)) == 1
    cluster.delete(*reversed(part), *reversed(whole))
    assert cluster.pod("watch", NAMESPACE)["status"]["phase"] == "Running"
    assert list(cluster.recorded(node).values()) == ["prepared"] and len(cluster.cdi_files(node)) == 1


def test_admin_access_needs_a_namespace_with_the_label(clean: Cluster) -> None:
    _space, wanted, _user = example("admin-access.yaml")
    wanted["metadata"]["namespace"] = "default"
    with pytest.raises(CommandFailed, match=LABEL):
        clean.apply(wanted)
