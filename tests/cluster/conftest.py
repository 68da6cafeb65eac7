# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The world that the cluster tests share: brought up once, installed once by the site playbook, taken down at the end.

``DRA_ACCELERATORS_WORLD`` names the world (default ``test``); ``DRA_ACCELERATORS_KEEP_WORLD=1`` leaves it standing for a
look around, and uses one of that name that stands already as it is, which makes a second run quick. Otherwise a world
that a killed run has left behind is taken down first: the tests begin with bare nodes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import DRIVER_UNIT, Cluster, Recap
from tests.cluster.manifests import MIXED_LAYOUT
from tests.cluster.module_calls import Module, caller
from tests.cluster.surfaces import Times

#: A fault that is put into the hardware is waited for; three times as often as by default is soon enough. The demo, and the
#: worlds of their own in `make prove`, run with the default.
#: Metrics are told to whoever asks.
OFTEN = {"dra_driver_inventory_interval": 10, "dra_driver_metrics_address": "0.0.0.0:9817"}


@pytest.fixture(scope="session")
def world_name() -> str:
    """The world's name."""
    return os.environ.get("DRA_ACCELERATORS_WORLD", "test")


@pytest.fixture(scope="session")
def world(world_name: str) -> Iterator[Cluster]:
    """Two bare Kubernetes nodes with eight H100 each; nothing of ours is installed on them."""
    cluster = Cluster(world_name, OFTEN)
    kept = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
    if not kept:
        cluster.world("down")
    cluster.world("up", "--nodes", "2", "--silicon", "8xH100", timeout=3000)
    yield cluster
    if not kept:
        cluster.world("down")


@pytest.fixture(scope="session")
def bare(world: Cluster) -> bool:
    """Whether no node had the driver before the first run; only a world that was kept has."""
    found = [world.run(node, "systemctl", "cat", DRIVER_UNIT, check=False) for node in world.nodes()]
    return not any(found)


@pytest.fixture(scope="session")
def before(world: Cluster, bare: bool) -> dict[str, str]:
    """The files of the nodes and the objects of the API before the first run; nothing of a world that was kept."""
    return world.footprint() if bare else {}


@pytest.fixture(scope="session")
def checked_run(world: Cluster, before: dict[str, str]) -> Recap:
    """The site playbook in check mode over the nodes before the first run."""
    return world.playbook("site.yml", "--check", "--diff")


@pytest.fixture(scope="session")
def first_run(world: Cluster, checked_run: Recap) -> Recap:
    """The site playbook's first run over the nodes, after a look at what they are."""
    return world.playbook("site.yml")


@pytest.fixture(scope="session")
def cluster(world: Cluster, first_run: Recap) -> Cluster:
    """The world with everything installed by the site playbook."""
    if first_run.failed:
        raise AssertionError(first_run.output)
    return world


@pytest.fixture(scope="session")
def inventory(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world's inventory, as a file."""
    path = tmp_path_factory.mktemp("inventory") / "hosts.yml"
    path.write_text(cluster.world("inventory"), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def ansible(inventory: Path) -> Module:
    """Runs one module of the collection on one host, and returns its result."""
    return caller(inventory)


@pytest.fixture(scope="session")
def times() -> Iterator[Times]:
    """Collects how long faults take to be told of, and prints one table at the end."""
    collected = Times()
    yield collected
    collected.print()


@pytest.fixture(scope="module")
def other_layout(cluster: Cluster) -> Iterator[Recap]:
    """A run that gives the second node another layout, by its tag alone.

    Meanwhile four claims share its GPU 7, virtual machines can have its GPUs 5 and 6, and pods wait for GPUs 4 and 6 before they are bound.
    """
    node = cluster.nodes()[1]
    only = ("site.yml", "--limit", node, "--tags", "layout")
    yield cluster.playbook(*only, "-e", json.dumps({"accelerator_layouts": [{"hosts": node, "layout": MIXED_LAYOUT}]}))
    back = cluster.playbook(*only)
    assert back.failed == 0, back.output
    cluster.wait("every place is offered again", lambda: len(cluster.devices(node)) == 8 * 26)


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
