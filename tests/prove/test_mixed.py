# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a node with GPUs and NPUs under the mixed fleet: one driver process, two driver names, and each pod sees its
claimed device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import EXAMPLES, Cluster, Recap
from tests.cluster.npus import NpuCluster

FLEET = EXAMPLES / "ascend/mixed-fleet.yml"
WORLD = os.environ.get("DRA_ACCELERATORS_MIXED_WORLD", "mixed")
#: Each example with its pod, and a text in the single device line that the pod's program lists.
SEEN = {
    "whole-gpu-by-memory.yaml": ("whole-gpu", "GPU 0: "),
    "static-mig.yaml": ("static-3g-40gb", "MIG 3g.40gb"),
    "ascend/whole-npu.yaml": ("whole-npu", " 310P3 "),
    "ascend/static-vnpu.yaml": ("static-vir04", " 310Pvir04 "),
}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Cluster, NpuCluster]]:
    """Yield one bare node with devices of two vendors, once for each vendor."""
    gpus, npus = Cluster(WORLD), NpuCluster(WORLD)
    gpus.fleet = npus.fleet = FLEET
    gpus.world("down")
    gpus.world("up", "--nodes", "1", "--silicon", "2xH100-2x310P", timeout=3000)
    yield gpus, npus
    gpus.world("down")


@pytest.fixture(scope="module")
def first(both: tuple[Cluster, NpuCluster]) -> Recap:
    """Run the site playbook for the first time."""
    return both[0].playbook("site.yml")


def test_playbook_creates_both_layouts_and_second_run_changes_nothing(
    both: tuple[Cluster, NpuCluster], first: Recap
) -> None:
    assert not first.failed, first.output
    gpus, npus = both
    (node,) = gpus.nodes()
    assert len(gpus.instances(node)) == 5 and len(npus.instances(node)) == 2
    again = gpus.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output


def test_pods_of_both_vendors_run_on_one_node(both: tuple[Cluster, NpuCluster], first: Recap) -> None:
    assert not first.failed
    gpus, npus = both
    (node,) = gpus.nodes()
    before = [*gpus.instances(node), *npus.instances(node)]
    for example in SEEN:
        gpus.apply(EXAMPLES / example)
    gpus.wait_running(*(pod for pod, _shows in SEEN.values()))
    for pod, shows in SEEN.values():
        log = gpus.wait(f"{pod} printing its devices", lambda pod=pod: gpus.log(pod), timeout=60)
        assert sum(shows in line for line in log.splitlines()) == 1, (pod, log)
    for example in SEEN:
        gpus.delete(EXAMPLES / example)
    gpus.wait("no CDI file is left", lambda: not gpus.cdi_files(node) and not npus.cdi_files(node))
    assert [*gpus.instances(node), *npus.instances(node)] == before
