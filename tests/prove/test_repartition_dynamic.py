# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Change how a GPU under pods is published: dynamic, static, and whole in turn. The driver is reconfigured each time,
and other GPUs do not change.

One node has eight H100. The test watches its pool, so that it knows each state that a scheduler could see. The first
tests cover failures of the driver's reconfiguration: the GPU rejects a partition, the driver does not reload its
rules, Ansible is killed. Each test starts from the state that the previous one left.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import pytest

from tests.cluster.cluster import DRIVER, DRIVER_UNIT, Cluster, Recap
from tests.cluster.manifests import deployment, dynamic, selected, static
from tests.prove.repartitioning import (
    containers,
    killed_at,
    pods,
    profiles,
    records,
    repartition,
    rules,
    wait_ready,
)

WORLD = os.environ.get("DRA_ACCELERATORS_DYNAMIC_WORLD", "dynamic")
KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
#: Index of the GPU that changes.
TARGET = 0
PARTITIONS: dict[str, int] = {"3g.40gb": 1, "1g.10gb": 4}
WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {"mode": "dynamic"},
    "static": {"mode": "static", "partitions": PARTITIONS},
    "whole": {"mode": "whole"},
}
NEIGHBOURS: list[dict[str, Any]] = [
    {"match": {"index": 1}, "mode": "static", "partitions": {"1g.10gb": 2}},
    {"match": {"index": 2}, "mode": "dynamic"},
    {"match": {}, "mode": "whole"},
]
#: Deployment that uses devices of the GPU in each mode, and its number of pods. Deployments of the other modes are
#: pending.
TENANTS = {"dynamic": ("made", 2), "static": ("fixed", 1), "whole": ("entire", 1)}
BESIDE = {"beside-static": 1, "beside-dynamic": 1, "beside-whole": 1}
DRIVER_LAYOUT_TASK = "Configure the driver's layout of the device"
FOLDER = f"/run/systemd/system/{DRIVER_UNIT}.d"
#: A reload that takes effect but counts as failed if this file exists. The next one succeeds.
REFUSE = "/run/refuse-reload"
REFUSES = f"""[Service]
ExecReload=+/bin/sh -c 'test ! -e {REFUSE} || {{ rm {REFUSE}; exit 1; }}'
"""


def fleet(way: str) -> str:
    """Return the fleet file with the GPU published in one mode."""
    layout = [{"match": {"index": TARGET}, **WAYS[way]}, *NEIGHBOURS]
    return json.dumps({"accelerator_layouts": [{"hosts": "all", "layout": layout}]})


class Pool(threading.Thread):
    """A node's pool as a watch of its slices reports it.

    ``seen`` lists each complete pool in order, as a scheduler could see it: its generation, its devices of the GPU
    that changes, and its devices of all other GPUs.
    """

    def __init__(self, cluster: Cluster, node: str) -> None:
        super().__init__(daemon=True)
        self._cluster, self._node = cluster, node
        self._slices: dict[str, dict[str, Any]] = {}
        self.seen: list[tuple[int, str, str]] = []
        words = ("get", "resourceslices", "--field-selector", f"spec.nodeName={node},spec.driver={DRIVER}")
        # With ``--watch`` each event is one line.
        self._process = subprocess.Popen(
            [*cluster._command("kubectl"), *words, "--watch", "--output-watch-events", "-o", "json"],
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self._take(event["type"], event["object"])

    def _take(self, kind: str, item: dict[str, Any]) -> None:
        slices = {name: each for name, each in self._slices.items() if name != item["metadata"]["name"]}
        if kind != "DELETED":
            slices[item["metadata"]["name"]] = item
        self._slices = slices
        newest = max((each["spec"]["pool"]["generation"] for each in slices.values()), default=0)
        current = [each["spec"] for each in slices.values() if each["spec"]["pool"]["generation"] == newest]
        if not current or any(each["pool"]["resourceSliceCount"] != len(current) for each in current):
            return
        mine, others = [], []
        for each in (one for spec in current for one in spec.get("devices", ())):
            (mine if re.match(rf"gpu-{TARGET}(-|$)", each["name"]) else others).append(each)
        view = (newest, *(json.dumps(sorted(part, key=lambda one: one["name"])) for part in (mine, others)))
        if self.seen[-1:] != [view]:
            self.seen.append(view)

    def _is_there(self) -> bool:
        """Return whether the watch has received the API server's current slices."""
        there = {
            each["metadata"]["name"]: each["metadata"]["resourceVersion"] for each in self._cluster.slices(self._node)
        }
        return bool(there) and there == {
            name: each["metadata"]["resourceVersion"] for name, each in self._slices.items()
        }

    def __enter__(self) -> Self:
        self.start()
        self._cluster.wait("the watch has begun", self._is_there)
        return self

    def __exit__(self, *_exception: object) -> None:
        try:
            self._cluster.wait("the watch has come to its end", self._is_there)
        finally:
            self._process.terminate()
            self._process.wait()
            self.join()

    def once(self) -> None:
        """Assert that the GPU was published in two states only, at most one generation apart, and that other GPUs did
        not change.
        """
        shown = [
            (generation, sorted(one["name"] for one in json.loads(mine))) for generation, mine, _others in self.seen
        ]
        assert len(self.seen) == 2 and self.seen[0][1] != self.seen[1][1], shown
        assert self.seen[1][0] - self.seen[0][0] in (0, 1), shown
        assert self.seen[0][2] == self.seen[1][2], "the published devices of other GPUs have changed"


@pytest.fixture(scope="module")
def living() -> Iterator[Cluster]:
    """Start a node whose pods each use one device of a single GPU; yield its cluster."""
    cluster = Cluster(WORLD, {"dra_driver_inventory_interval": 10})
    if not KEPT:
        cluster.world("down")
    cluster.world("up", "--nodes", "1", "--silicon", "8xH100", timeout=3000)
    (node,) = cluster.nodes()
    first = cluster.playbook("site.yml", "-e", fleet("dynamic"), check=False)
    assert not first.failed, first.output
    gpus = re.findall(r"^GPU \d+: .*UUID: (GPU-[0-9a-f-]+)", cluster.run(node, "nvidia-smi", "-L"), re.MULTILINE)

    def asks(gpu: int, partition: str) -> dict[str, Any]:
        return selected(
            "mig.nvidia.com", f"{partition} && device.attributes['gpu.nvidia.com'].parentUUID == '{gpus[gpu]}'"
        )

    def whole(gpu: int) -> dict[str, Any]:
        return selected("gpu.nvidia.com", f"device.attributes['gpu.nvidia.com'].uuid == '{gpus[gpu]}'")

    for name, number, exactly in (
        ("made", 2, asks(TARGET, dynamic("1g.10gb"))),
        ("fixed", 1, asks(TARGET, static("1g.10gb"))),
        ("beside-static", 1, asks(1, static("1g.10gb"))),
        ("beside-dynamic", 1, asks(2, dynamic("2g.20gb"))),
        ("beside-whole", 1, whole(3)),
    ):
        cluster.apply(*deployment(name, number, exactly))
    wait_ready(cluster, **{"made": 2, **BESIDE})
    # This deployment could use the whole dynamic GPU, so it has no replicas until the GPU is published whole.
    cluster.apply(*deployment("entire", 0, whole(TARGET)))
    yield cluster
    if not KEPT:
        cluster.world("down")


@pytest.fixture(scope="module")
def node(living: Cluster) -> str:
    """Return the node's name."""
    (found,) = living.nodes()
    return found


def published(cluster: Cluster, node: str) -> str:
    """Return the mode in which the GPU is published."""
    mine = {name: each for name, each in cluster.devices(node).items() if re.match(rf"gpu-{TARGET}(-|$)", name)}
    if set(mine) == {f"gpu-{TARGET}"}:
        return "whole"
    parts = [each["attributes"] for each in mine.values() if each["attributes"]["type"]["string"] == "mig"]
    if all("uuid" in each for each in parts) and len(parts) == len(mine):
        assert Counter(each["profile"]["string"] for each in parts) == PARTITIONS
        return "static"
    assert not any("uuid" in each for each in parts) and len(parts) > sum(PARTITIONS.values()), sorted(mine)
    return "dynamic"


def is_in(cluster: Cluster, node: str, way: str) -> None:
    """Assert that the GPU is published in one mode, its pods use it, and no operation is pending."""
    tenant, number = TENANTS[way]
    if way == "whole":
        cluster.kubectl("scale", "deployment/entire", "-n", "default", f"--replicas={number}")
    wait_ready(cluster, **{tenant: number, **BESIDE})
    assert published(cluster, node) == way
    made = {"dynamic": {"1g.10gb": 2}, "static": PARTITIONS, "whole": {}}[way]
    assert profiles(cluster, node, TARGET) == made
    assert not rules(cluster) and not records(cluster)


def leaves(cluster: Cluster, before: dict[str, tuple[str, int]], way: str) -> None:
    """Assert that only the pods on the GPU were evicted, and that the containers of the others are the same."""
    gone = set(before) - set(pods(cluster))
    assert len(gone) == TENANTS[way][1] and {name.rsplit("-", 2)[0] for name in gone} == {TENANTS[way][0]}, gone
    stays = {name: each for name, each in before.items() if name not in gone}
    assert {name.rsplit("-", 2)[0] for name in stays} == set(BESIDE) and stays.items() <= containers(cluster).items()


def again(cluster: Cluster, way: str) -> None:
    """Assert that a second run changes nothing."""
    before, slices = containers(cluster), cluster.slices()
    found = repartition(cluster, fleet(way))
    assert (found.failed, found.changed) == (0, 0), found.output
    assert containers(cluster) == before and cluster.slices() == slices


def is_played(found: Recap, task: str) -> bool:
    """Return whether a role that the playbook includes was run and not skipped."""
    (after,) = re.findall(rf"^TASK \[{re.escape(task)}\].*\n(.*)$", found.output, re.MULTILINE)
    return bool(after.startswith("included: "))


def undone(cluster: Cluster, node: str, found: Recap, step: str) -> None:
    """Assert that a change from dynamic to static failed at a step and that the GPU is dynamic and available again."""
    assert found.failed and f'"{step}" failed' in found.output, found.output
    assert "previous layout was restored, and the device is available" in found.output, found.output
    is_in(cluster, node, "dynamic")
    again(cluster, "dynamic")


def test_layout_rejected_by_the_gpu_leaves_it_dynamic(living: Cluster, node: str) -> None:
    is_in(living, node, "dynamic")
    before = containers(living)
    call = ("call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "19", "nth", "1")
    living.run(node, "accelerator-simulator", "fault", TARGET, *call)
    try:
        found = repartition(living, fleet("static"))
    finally:
        living.run(node, "accelerator-simulator", "clear", TARGET)
    leaves(living, before, "dynamic")
    undone(living, node, found, "Change the layout of the GPU")


def test_driver_that_fails_with_new_rules_gets_the_previous_ones(living: Cluster, node: str) -> None:
    """The driver loads the rules and fails afterwards. The run restores the partitions and the driver's rules."""
    before = containers(living)
    living.run(node, "mkdir", "-p", FOLDER)
    living.run(node, "tee", f"{FOLDER}/refuse.conf", text=REFUSES)
    living.run(node, "systemctl", "daemon-reload")
    living.run(node, "touch", REFUSE)
    try:
        found = repartition(living, fleet("static"))
        assert not living.shell(node, f"ls {REFUSE} 2>/dev/null || true"), "nothing was refused"
    finally:
        living.run(node, "rm", "-rf", FOLDER, REFUSE)
        living.run(node, "systemctl", "daemon-reload")
    leaves(living, before, "dynamic")
    assert is_played(found, "Restore the driver's previous layout of the device")
    undone(living, node, found, "Report the failure")


def test_run_killed_at_the_driver_configuration_is_resumed(living: Cluster, node: str) -> None:
    before = containers(living)
    evict = json.dumps({"accelerator_repartition_evict": True})
    with Pool(living, node) as pool:
        killed_at(living, DRIVER_LAYOUT_TASK, "-e", fleet("static"), "-e", evict)
        assert profiles(living, node, TARGET) == PARTITIONS and published(living, node) == "dynamic"
        assert rules(living) and records(living) == [node]
        done = repartition(living, fleet("static"))
        assert not done.failed, done.output
    leaves(living, before, "dynamic")
    pool.once()
    is_in(living, node, "static")
    again(living, "static")


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("static", "dynamic"),
        ("dynamic", "static"),
        ("static", "dynamic"),
        ("dynamic", "whole"),
        ("whole", "static"),
    ],
)
def test_only_pods_on_the_gpu_are_evicted_and_it_is_published_once(
    living: Cluster, node: str, now: str, then: str
) -> None:
    is_in(living, node, now)
    before = containers(living)
    with Pool(living, node) as pool:
        done = repartition(living, fleet(then))
    assert not done.failed, done.output
    # The driver reads whole and static GPUs from the hardware, so only dynamic ones need new rules.
    assert is_played(done, DRIVER_LAYOUT_TASK) == ("dynamic" in (now, then))
    leaves(living, before, now)
    pool.once()
    is_in(living, node, then)
    again(living, then)
