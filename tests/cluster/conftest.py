# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The world that the cluster tests share: brought up once, installed once by the site playbook, taken down at the end.

``DRA_ACCELERATORS_WORLD`` names the world (default ``test``); ``DRA_ACCELERATORS_KEEP_WORLD=1`` leaves it standing for a
look around. A world of that name that stands already is used as it is, which makes a second run quick.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, Recap


@pytest.fixture(scope="session")
def world() -> Iterator[Cluster]:
    """Two bare Kubernetes nodes with eight H100 each; nothing of ours is installed on them."""
    cluster = Cluster(os.environ.get("DRA_ACCELERATORS_WORLD", "test"))
    cluster.world("up", "--nodes", "2", "--silicon", "8xH100", timeout=3000)
    yield cluster
    if os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") != "1":
        cluster.world("down")


@pytest.fixture(scope="session")
def first_run(world: Cluster) -> Recap:
    """The site playbook's first run over the bare nodes."""
    return world.playbook("site.yml")


@pytest.fixture(scope="session")
def cluster(world: Cluster, first_run: Recap) -> Cluster:
    """The world with everything installed by the site playbook."""
    if first_run.failed:
        raise AssertionError(first_run.output)
    return world


@pytest.fixture()
def clean(cluster: Cluster) -> Iterator[Cluster]:
    """The installed world; afterwards no pod and no claim of the test is left, and the nodes are as they were."""
    nodes = cluster.nodes()
    before = {node: sorted(cluster.instances(node)) for node in nodes}
    yield cluster
    cluster.kubectl(
        "delete", "pods,resourceclaims,resourceclaimtemplates", "--all", "-n", "default", "--timeout=240s", timeout=300
    )
    for node in nodes:
        cluster.wait(
            f"no instance and no CDI file left on {node}",
            lambda node=node: sorted(cluster.instances(node)) == before[node] and not cluster.cdi_files(node),
            timeout=90,
        )
