# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The world that the cluster tests share: started once, installed once by the site playbook, removed at the end.

``DRA_ACCELERATORS_WORLD`` names the world (default ``test``). ``DRA_ACCELERATORS_KEEP_WORLD=1`` keeps it for
inspection and reuses an existing world of that name, so that a second run is quick. Otherwise a world of a killed run
is removed first, so that the tests begin with bare nodes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.acting import acting_controller
from tests.cluster.cluster import DRIVER_UNIT, Cluster, Recap
from tests.cluster.manifests import MIXED_LAYOUT
from tests.cluster.module_calls import Module, caller
from tests.cluster.surfaces import Times

#: Scan three times as often as by default, to shorten the wait for injected faults. The demo and the separate worlds
#: of `make prove` use the default. Metrics are served on all addresses.
OFTEN = {"dra_driver_inventory_interval": 10, "dra_driver_metrics_address": "0.0.0.0:9817"}


@pytest.fixture(scope="session")
def world_name() -> str:
    """Return the world's name."""
    return os.environ.get("DRA_ACCELERATORS_WORLD", "test")


@pytest.fixture(scope="session")
def world(world_name: str) -> Iterator[Cluster]:
    """Yield two bare Kubernetes nodes with eight H100 each, without any of our software."""
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
    """Return whether no node had the driver before the first run. Only nodes of a kept world can have it."""
    found = [world.run(node, "systemctl", "cat", DRIVER_UNIT, check=False) for node in world.nodes()]
    return not any(found)


@pytest.fixture(scope="session")
def before(world: Cluster, bare: bool) -> dict[str, str]:
    """Return the nodes' files and the API objects before the first run; empty for a kept world."""
    return world.footprint() if bare else {}


@pytest.fixture(scope="session")
def checked_run(world: Cluster, before: dict[str, str]) -> Recap:
    """Run the site playbook in check mode before the first run."""
    return world.playbook("site.yml", "--check", "--diff")


@pytest.fixture(scope="session")
def first_run(world: Cluster, checked_run: Recap) -> Recap:
    """Run the site playbook for the first time, after the run in check mode."""
    return world.playbook("site.yml")


@pytest.fixture(scope="session")
def cluster(world: Cluster, first_run: Recap) -> Cluster:
    """Return the world with everything installed by the site playbook."""
    if first_run.failed:
        raise AssertionError(first_run.output)
    return world


@pytest.fixture(scope="session")
def inventory(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the world's inventory file."""
    path = tmp_path_factory.mktemp("inventory") / "hosts.yml"
    path.write_text(cluster.world("inventory"), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def ansible(inventory: Path) -> Module:
    """Return a function that runs one module of the collection on one host and returns its result."""
    return caller(inventory)


@pytest.fixture(scope="session")
def times() -> Iterator[Times]:
    """Collect the times until faults are reported; print one table at the end."""
    collected = Times()
    yield collected
    collected.print()


@pytest.fixture(scope="module")
def controller(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a controller that lists for the nodes which claims to prepare before pods are bound."""
    with acting_controller(cluster, tmp_path_factory.mktemp("controller")):
        yield


@pytest.fixture(scope="module")
def other_layout(cluster: Cluster, controller: None) -> Iterator[Recap]:
    """Apply another layout to the second node with its tag only; yield the recap and restore the layout.

    During this time four claims share its GPU 7, virtual machines can use its GPUs 5 and 6, and pods for GPUs 4 and 6
    wait for binding conditions.
    """
    node = cluster.nodes()[1]
    only = ("site.yml", "--limit", node, "--tags", "layout")
    yield cluster.playbook(*only, "-e", json.dumps({"accelerator_layouts": [{"hosts": node, "layout": MIXED_LAYOUT}]}))
    back = cluster.playbook(*only)
    assert back.failed == 0, back.output
    cluster.wait("every placement is published again", lambda: len(cluster.devices(node)) == 8 * 26)


@pytest.fixture()
def clean(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the installed world; afterwards delete the test's pods and claims, and assert that the nodes are
    unchanged.
    """
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
