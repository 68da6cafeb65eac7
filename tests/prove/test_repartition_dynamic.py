# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A GPU under pods is published in another way: dynamic, static and whole by turns, its driver told each time, its neighbours left alone.

One node with eight H100, whose pool is watched, so that each state of it that a scheduler could see is known. First what goes wrong where the
driver is told: the silicon refuses, the driver does not take its rules, Ansible is killed. The tests go on from one to the next.
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
#: The GPU that changes.
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
#: Who has devices of the GPU while it is published in each way, and how many pods that are. Those of another way wait meanwhile.
TENANTS = {"dynamic": ("made", 2), "static": ("fixed", 1), "whole": ("entire", 1)}
BESIDE = {"beside-static": 1, "beside-dynamic": 1, "beside-whole": 1}
TELL = "Tell the driver how the device is to be published"
FOLDER = f"/run/systemd/system/{DRIVER_UNIT}.d"
#: A reload that has taken effect, and counts as failed where this file is there; the next one is well.
REFUSE = "/run/refuse-reload"
REFUSES = f"""[Service]
ExecReload=+/bin/sh -c 'test ! -e {REFUSE} || {{ rm {REFUSE}; exit 1; }}'
"""


def fleet(way: str) -> str:
    """The fleet file with the GPU published in one way."""
    layout = [{"match": {"index": TARGET}, **WAYS[way]}, *NEIGHBOURS]
    return json.dumps({"accelerator_layouts": [{"hosts": "all", "layout": layout}]})


class Pool(threading.Thread):
    """A node's pool, as a watch of its slices tells it. ``seen`` is what the scheduler could go by: each complete pool, in order, with its
    generation, what it has of the GPU that changes, and what it has of all others."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        super().__init__(daemon=True)
        self._cluster, self._node = cluster, node
        self._slices: dict[str, dict[str, Any]] = {}
        self.seen: list[tuple[int, str, str]] = []
        words = ("get", "resourceslices", "--field-selector", f"spec.nodeName={node},spec.driver={DRIVER}")
        # Watched, each event is a line.
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
        """Whether the watch has come to what the API server has now."""
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
        """See that the GPU was published as it was and as it is, that in one generation more at most, and its neighbours as ever."""
        shown = [
            (generation, sorted(one["name"] for one in json.loads(mine))) for generation, mine, _others in self.seen
        ]
        assert len(self.seen) == 2 and self.seen[0][1] != self.seen[1][1], shown
        assert self.seen[1][0] - self.seen[0][0] in (0, 1), shown
        assert self.seen[0][2] == self.seen[1][2], "what is published of other GPUs has changed"


@pytest.fixture(scope="module")
def living() -> Iterator[Cluster]:
    """A node, whose pods each have a device of one GPU alone."""
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
    # It could have the whole of a dynamic GPU: it waits until there is none.
    cluster.apply(*deployment("entire", 0, whole(TARGET)))
    yield cluster
    if not KEPT:
        cluster.world("down")


@pytest.fixture(scope="module")
def node(living: Cluster) -> str:
    """The node's name."""
    (found,) = living.nodes()
    return found


def published(cluster: Cluster, node: str) -> str:
    """In which way the GPU is published."""
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
    """The GPU is published in one way, its tenants have it, and nothing is left of an operation."""
    tenant, number = TENANTS[way]
    if way == "whole":
        cluster.kubectl("scale", "deployment/entire", "-n", "default", f"--replicas={number}")
    wait_ready(cluster, **{tenant: number, **BESIDE})
    assert published(cluster, node) == way
    made = {"dynamic": {"1g.10gb": 2}, "static": PARTITIONS, "whole": {}}[way]
    assert profiles(cluster, node, TARGET) == made
    assert not rules(cluster) and not records(cluster)


def leaves(cluster: Cluster, before: dict[str, tuple[str, int]], way: str) -> None:
    """Of the pods that there were, those on the GPU have gone and no others; the others' containers are the same."""
    gone = set(before) - set(pods(cluster))
    assert len(gone) == TENANTS[way][1] and {name.rsplit("-", 2)[0] for name in gone} == {TENANTS[way][0]}, gone
    stays = {name: each for name, each in before.items() if name not in gone}
    assert {name.rsplit("-", 2)[0] for name in stays} == set(BESIDE) and stays.items() <= containers(cluster).items()


def again(cluster: Cluster, way: str) -> None:
    """A second run changes nothing."""
    before, slices = containers(cluster), cluster.slices()
    found = repartition(cluster, fleet(way))
    assert (found.failed, found.changed) == (0, 0), found.output
    assert containers(cluster) == before and cluster.slices() == slices


def is_played(found: Recap, task: str) -> bool:
    """Whether a role that the playbook names was played, and not passed over."""
    (after,) = re.findall(rf"^TASK \[{re.escape(task)}\].*\n(.*)$", found.output, re.MULTILINE)
    return bool(after.startswith("included: "))


def undone(cluster: Cluster, node: str, found: Recap, step: str) -> None:
    """A run on the way from dynamic to static has failed at a step, and the GPU is dynamic again, for whoever wants it."""
    assert found.failed and f'"{step}" failed' in found.output, found.output
    assert "has its former layout again, and pods can come" in found.output, found.output
    is_in(cluster, node, "dynamic")
    again(cluster, "dynamic")


def test_what_the_silicon_refuses_leaves_the_gpu_dynamic(living: Cluster, node: str) -> None:
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


def test_where_the_driver_does_not_take_its_rules_it_has_the_former_ones(living: Cluster, node: str) -> None:
    """It has taken them, and fails afterwards: what is put back is the silicon and what the driver works by."""
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
    assert is_played(found, "Tell the driver how the device was published")
    undone(living, node, found, "Say what is known")


def test_a_run_that_is_killed_where_the_driver_is_told_is_gone_on_with(living: Cluster, node: str) -> None:
    before = containers(living)
    evict = json.dumps({"accelerator_repartition_evict": True})
    with Pool(living, node) as pool:
        killed_at(living, TELL, "-e", fleet("static"), "-e", evict)
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
def test_only_who_is_on_the_gpu_leaves_and_it_is_published_once(
    living: Cluster, node: str, now: str, then: str
) -> None:
    is_in(living, node, now)
    before = containers(living)
    with Pool(living, node) as pool:
        done = repartition(living, fleet(then))
    assert not done.failed, done.output
    # How a whole GPU and a static one are published is told by the silicon.
    assert is_played(done, TELL) == ("dynamic" in (now, then))
    leaves(living, before, now)
    pool.once()
    is_in(living, node, then)
    again(living, then)
