# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Upgrade the driver of two NPU nodes with pods on NPUs and vNPUs, with the upgrade playbook: one node after the
other, and pods move between them.

A node that does not return after its reboot stops the run before the next node. A run with a corrected package
completes both. The driver packages are simulated (tests/packages). Each test starts from the state that the previous
one left.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.cluster.cluster import CommandFailed, Recap
from tests.cluster.npus import NpuCluster
from tests.prove.repartitioning import containers, holders, numbered, pods, rules, wait_ready
from tests.prove.test_gpu_host import published_version
from tests.prove.test_npu_repartition import NOT_TAKEN, templates, upgrade, workload
from tests.prove.test_npu_runtime import DRIVER, NEWER_DRIVER, boot_id, installed_driver, package

WORLD = os.environ.get("DRA_ACCELERATORS_NPU_UPGRADE_WORLD", "npu-upgrade")
KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
#: Replaces the package that does not take effect.
MENDED = "25.6.1"
#: A half and a quarter on each node, and whole NPUs.
LAYOUT: list[dict[str, Any]] = [
    {"match": {"index": 0}, "mode": "static", "partitions": {"vir04": 1, "vir02": 1}},
    {"match": {}, "mode": "whole"},
]
#: One node has room for all of them.
RUNNING = {"half": 1, "quarter": 1, "whole": 3}
NODE_LABEL = "dra.accelerators/node"
EVICTED: dict[str, Any] = {"accelerator_upgrade_evict": True}


@pytest.fixture(scope="module")
def fleet() -> Iterator[NpuCluster]:
    """Start two nodes with eight NPUs each and pods: a half and two whole NPUs of the first, a quarter and one whole
    NPU of the second.
    """
    layouts = [{"hosts": "all", "layout": LAYOUT}]
    cluster = NpuCluster(WORLD, {"accelerator_layouts": layouts, "dra_driver_inventory_interval": 10})
    if not KEPT:
        cluster.world("down")
    cluster.world("up", "--nodes", "2", "--silicon", "8x310P-Pro", timeout=3000)
    first = cluster.playbook("site.yml", check=False)
    assert not first.failed, first.output
    one, other = cluster.nodes()
    with only_on(cluster, one):
        for name, number in (("half", 1), ("whole", 2)):
            cluster.apply(*workload(name, number))
        wait_ready(cluster, half=1, whole=2)
    with only_on(cluster, other):
        cluster.apply(*workload("quarter", 1), *workload("whole", RUNNING["whole"]))
        wait_ready(cluster, **RUNNING)
    yield cluster
    if not KEPT:
        cluster.world("down")


@contextlib.contextmanager
def only_on(cluster: NpuCluster, node: str) -> Iterator[None]:
    """Allow new pods on this node only."""
    others = [name for name in cluster.nodes() if name != node]
    for name in others:
        cluster.kubectl("cordon", name)
    try:
        yield
    finally:
        for name in others:
            cluster.kubectl("uncordon", name)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the vendor's packages on the controller: two that take effect at once, and one that does not even after a
    reboot.
    """
    folder = tmp_path_factory.mktemp("packages")
    at_once = {"EFFECT": "It takes effect immediately."}
    return {
        NEWER_DRIVER: package(folder, "driver", NEWER_DRIVER, **at_once),
        NOT_TAKEN: package(folder, "driver", NOT_TAKEN),
        MENDED: package(folder, "driver", MENDED, **at_once),
    }


def places(fleet: NpuCluster) -> dict[str, Counter[str]]:
    """Return by node how many pods of each Deployment use its NPUs."""
    found: dict[str, Counter[str]] = {name: Counter() for name in fleet.nodes()}
    for place, user in holders(fleet).items():
        found[numbered(place)[0]][user.partition("-")[0]] += 1
    return found


class Drained(threading.Thread):
    """Thread that polls the drained nodes. ``seen`` lists the sets of drained nodes in order."""

    def __init__(self, cluster: NpuCluster) -> None:
        super().__init__()
        self.seen: list[set[str]] = []
        self._cluster, self._end = cluster, threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_of_the_error: object) -> None:
        self._end.set()
        self.join(timeout=60)

    def run(self) -> None:
        while not self._end.wait(0.3):
            with contextlib.suppress(CommandFailed):
                items = self._cluster.get("devicetaintrules")["items"]
                now = {each["metadata"]["labels"][NODE_LABEL] for each in items}
                if now != (self.seen or [set()])[-1]:
                    self.seen.append(now)


def followed(fleet: NpuCluster, path: Path, **more: Any) -> tuple[Recap, list[set[str]]]:
    """Run the playbook; return the recap and the sets of drained nodes."""
    with Drained(fleet) as drained:
        done = upgrade(fleet, path, **EVICTED, **more)
    return done, drained.seen


def verify_nothing_left_behind(fleet: NpuCluster) -> None:
    """Assert that a run left nothing behind: all pods run, and the vNPUs are those of the layout."""
    wait_ready(fleet, **RUNNING)
    assert not rules(fleet)
    for node in fleet.nodes():
        assert templates(fleet, node) == {0: ["vir02", "vir04"]}
    assert sum(places(fleet).values(), Counter()) == RUNNING


def test_plan_without_consent_names_the_pods_of_both_nodes_and_evicts_none(
    fleet: NpuCluster, packages: dict[str, Path]
) -> None:
    before = containers(fleet)
    answer = upgrade(fleet, packages[NEWER_DRIVER], "--check", "--diff")
    assert not answer.failed and all(f"pod default/{name} is evicted" in answer.output for name in before), (
        answer.output
    )
    silent = upgrade(fleet, packages[NEWER_DRIVER])
    assert silent.failed and "Nothing was changed" in silent.output, silent.output
    assert containers(fleet) == before and len(before) == sum(RUNNING.values()) and not rules(fleet)
    assert [installed_driver(fleet, node) for node in fleet.nodes()] == [DRIVER] * 2


def test_nodes_are_upgraded_in_sequence_and_pods_move_to_the_other_node(
    fleet: NpuCluster, packages: dict[str, Path]
) -> None:
    one, other = fleet.nodes()
    assert places(fleet) == {one: Counter(half=1, whole=2), other: Counter(quarter=1, whole=1)}
    boots = [boot_id(fleet, node) for node in fleet.nodes()]
    done, drained = followed(fleet, packages[NEWER_DRIVER])
    assert not done.failed, done.output
    assert f"Starting: {one}. Not started yet: {other}" in done.output, done.output
    assert drained == [{one}, set(), {other}, set()][: len(drained)] and len(drained) >= 3, drained
    verify_nothing_left_behind(fleet)
    # All pods of the first node moved to the second, and then all pods to the first.
    assert places(fleet) == {one: Counter(RUNNING), other: Counter()}
    for node in fleet.nodes():
        assert installed_driver(fleet, node) == NEWER_DRIVER and published_version(fleet, node) - {""} == {NEWER_DRIVER}
    assert [boot_id(fleet, node) for node in fleet.nodes()] == boots
    before = containers(fleet)
    again, drained = followed(fleet, packages[NEWER_DRIVER])
    assert (again.failed, again.changed) == (0, 0) and drained == [], again.output
    assert containers(fleet) == before


def test_driver_missing_after_the_reboot_ends_the_run_before_the_next_node(
    fleet: NpuCluster, packages: dict[str, Path]
) -> None:
    one, other = fleet.nodes()
    with only_on(fleet, other):
        # Two of them already run on the other node.
        mine = sorted(user for user in holders(fleet).values() if user.startswith(("half", "whole")))[:2]
        fleet.kubectl("delete", "pod", *mine, "-n", "default", "--timeout=120s")
        wait_ready(fleet, **RUNNING)
    assert places(fleet)[other].total() == 2
    before, had = containers(fleet), holders(fleet)
    stay = {user for place, user in had.items() if numbered(place)[0] == other}
    boots = {node: boot_id(fleet, node) for node in fleet.nodes()}
    failed, drained = followed(fleet, packages[NOT_TAKEN], accelerator_upgrade_timeout=90)
    assert failed.failed and f"Restored the driver {NEWER_DRIVER}" in failed.output, failed.output
    assert f"Not started: {other}" in failed.output and drained in ([{one}], [{one}, set()]), failed.output
    assert {node for node in boots if boot_id(fleet, node) != boots[node]} == {one}
    fleet.wait_registered(one)
    fleet.wait(
        "the previous driver version is published", lambda: published_version(fleet, one) - {""} == {NEWER_DRIVER}
    )
    verify_nothing_left_behind(fleet)
    assert [installed_driver(fleet, node) for node in fleet.nodes()] == [NEWER_DRIVER] * 2
    # Pods on the node that was not upgraded were not evicted, and the others run there too.
    assert {name: before[name] for name in stay}.items() <= containers(fleet).items()
    assert set(before) & set(pods(fleet)) == stay and places(fleet)[other] == RUNNING


def test_next_run_finishes_both_nodes(fleet: NpuCluster, packages: dict[str, Path]) -> None:
    one, other = fleet.nodes()
    before = containers(fleet)
    done, drained = followed(fleet, packages[MENDED])
    assert not done.failed, done.output
    assert drained == [{one}, set(), {other}, set()][: len(drained)] and len(drained) >= 3, drained
    verify_nothing_left_behind(fleet)
    assert places(fleet) == {one: Counter(RUNNING), other: Counter()} and not set(before) & set(pods(fleet))
    for node in fleet.nodes():
        assert installed_driver(fleet, node) == MENDED and published_version(fleet, node) - {""} == {MENDED}
    again, drained = followed(fleet, packages[MENDED])
    assert (again.failed, again.changed) == (0, 0) and drained == [], again.output
