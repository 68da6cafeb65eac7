# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Repartition a live cluster: three nodes with eight H100 each, forty pods on partitions, and two changing GPUs of one
node.

A separate world. Each test starts from the state that the previous one left.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import pytest

from tests.cluster.cluster import Cluster, CommandFailed, Recap
from tests.cluster.manifests import deployment, selected, static
from tests.prove.repartitioning import (
    consistent,
    containers,
    holders,
    killed_at,
    numbered,
    pods,
    profiles,
    records,
    repartition,
    rules,
    wait_ready,
)

FIRST: dict[str, int] = {"3g.40gb": 1, "1g.10gb": 4}
SECOND: dict[str, int] = {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}
SMALL, LARGE = 30, 10
ALL = {"small": SMALL, "large": LARGE}
BEFORE: list[dict[str, Any]] = [
    {"match": {"index": [0, 1, 2, 3]}, "mode": "static", "partitions": FIRST},
    {"match": {"index": [4, 5]}, "mode": "dynamic"},
    {"match": {}, "mode": "whole"},
]


def layouts(**nodes: list[dict[str, Any]]) -> str:
    """Return the fleet file: BEFORE, preceded by rules for single nodes."""
    found = [{"hosts": name.replace("_", "-"), "layout": [*rules, *BEFORE]} for name, rules in nodes.items()]
    return json.dumps(
        {"accelerator_layouts": [*found, {"hosts": "all", "layout": BEFORE}], "dra_driver_inventory_interval": 10}
    )


def workload(name: str, profile: str, replicas: int) -> list[dict[str, Any]]:
    """Return a Deployment whose pods each use a partition of a profile."""
    return deployment(name, replicas, selected("mig.nvidia.com", static(profile)))


class Published(threading.Thread):
    """Thread that polls the published devices of some GPUs. ``seen`` lists the different sets of names of each, in
    order.
    """

    def __init__(self, cluster: Cluster, node: str, gpus: tuple[int, ...]) -> None:
        super().__init__(daemon=True)
        self._cluster, self._node = cluster, node
        self._ended = threading.Event()
        self.seen: dict[int, list[frozenset[str]]] = {gpu: [] for gpu in gpus}

    def run(self) -> None:
        while not self._ended.wait(1.0):
            try:
                names = self._cluster.devices(self._node)
            except CommandFailed:
                continue
            for gpu, seen in self.seen.items():
                mine = frozenset(name for name in names if name.startswith(f"gpu-{gpu}-"))
                if seen[-1:] != [mine]:
                    seen.append(mine)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        self.join()


@pytest.fixture(scope="module")
def living() -> Iterator[Cluster]:
    """Start three nodes with forty pods on partitions; yield the cluster."""
    name = os.environ.get("DRA_ACCELERATORS_PROVE_WORLD", "repartition")
    cluster, kept = Cluster(name), os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
    if not kept:
        cluster.world("down")
    cluster.world("up", "--nodes", "3", "--silicon", "8xH100", timeout=3000)
    first = cluster.playbook("site.yml", "-e", layouts(), check=False)
    assert not first.failed, first.output
    cluster.apply(*workload("small", "1g.10gb", SMALL), *workload("large", "3g.40gb", LARGE))
    wait_ready(cluster, **ALL)
    yield cluster
    if not kept:
        cluster.world("down")


@pytest.fixture(scope="module")
def target(living: Cluster) -> tuple[str, tuple[int, int]]:
    """Return the node with the most pods, and its two static GPUs with the most."""
    users: dict[str, Counter[int]] = {}
    for place in holders(living):
        node, gpu = numbered(place)
        users.setdefault(node, Counter())[gpu] += 1
    node = max(users, key=lambda each: users[each].total())
    first, second = [gpu for gpu, _users in users[node].most_common(2)]
    return node, (first, second)


def wanted(target: tuple[str, tuple[int, int]]) -> str:
    """Return layouts that change two GPUs of one node: one partly, the other completely."""
    node, (first, second) = target
    return layouts(
        **{
            node.replace("-", "_"): [
                {"match": {"index": first}, "mode": "static", "partitions": SECOND},
                {"match": {"index": second}, "mode": "static", "partitions": {"7g.80gb": 1}},
            ]
        }
    )


def test_plan_names_the_evicted_pods_and_changes_nothing(living: Cluster, target: tuple[str, tuple[int, int]]) -> None:
    before, slices = containers(living), living.slices()
    file = f"/tmp/repartition-plan-{living.name}.json"
    answer = repartition(living, wanted(target), "--check", "--diff", accelerator_repartition_file=file)
    assert not answer.failed and not answer.changed, answer.output
    with open(file, encoding="utf-8") as stream:
        plan = json.load(stream)
    node, gpus = target
    operations = plan["nodes"][node]["operations"]
    assert [each["devices"][0]["index"] for each in operations] == sorted(gpus)
    by_gpu = {each["devices"][0]["index"]: each for each in operations}
    assert Counter(each["profile"] for each in by_gpu[gpus[0]]["going"]) == {"1g.10gb": 2}
    assert len(by_gpu[gpus[1]]["going"]) == 5 and plan["partitions_destroyed"] == 7
    assert all(not plan["nodes"][each]["operations"] for each in living.nodes() if each != node)
    assert len(plan["evicted"]) + len(plan["staying"]) == SMALL + LARGE
    assert "are not affected" in answer.output and "2g.20gb" in answer.output
    assert containers(living) == before and living.slices() == slices and not rules(living)


def test_no_pod_is_evicted_without_consent(living: Cluster, target: tuple[str, tuple[int, int]]) -> None:
    before = containers(living)
    silent = repartition(living, wanted(target), accelerator_repartition_evict="")
    assert silent.failed and "Nothing was changed" in silent.output and "evict" in silent.output
    assert containers(living) == before and not rules(living) and not records(living)


def test_only_pods_on_removed_partitions_are_evicted(living: Cluster, target: tuple[str, tuple[int, int]]) -> None:
    node, gpus = target
    file = f"/tmp/repartition-plan-{living.name}.json"
    before, had = containers(living), holders(living)
    with Published(living, node, gpus) as published:
        done = repartition(living, wanted(target), accelerator_repartition_file=file)
    print(done.output)
    assert not done.failed, done.output
    with open(file, encoding="utf-8") as stream:
        plan = json.load(stream)
    doomed = {f"{node}/{name}" for each in plan["nodes"][node]["operations"] for name in each["published"]}
    expected = {pod for place, pod in had.items() if place in doomed}
    gone = set(before) - set(pods(living))
    print(f"evicted: {sorted(gone)}\nexpected: {sorted(expected)}")
    assert gone == expected == {each["name"] for each in plan["evicted"]} and gone
    wait_ready(living, **ALL)
    after = containers(living)
    assert {name: each for name, each in before.items() if name not in gone} == {
        name: each for name, each in after.items() if name in before
    }
    assert profiles(living, node, gpus[0]) == SECOND and profiles(living, node, gpus[1]) == {"7g.80gb": 1}
    assert not rules(living) and not records(living)
    # Only the previous and the new state: no intermediate state was published.
    assert [len(seen) for seen in published.seen.values()] == [2, 2], published.seen


def test_second_run_changes_nothing(living: Cluster, target: tuple[str, tuple[int, int]]) -> None:
    before, slices = containers(living), living.slices()
    again = repartition(living, wanted(target))
    assert (again.failed, again.changed) == (0, 0), again.output
    site = living.playbook("site.yml", "-e", wanted(target), check=False)
    assert (site.failed, site.changed) == (0, 0), site.output
    assert containers(living) == before and living.slices() == slices


# ---- interrupted and failed runs


PINNED = 3


def pinned(gpu: str) -> list[dict[str, Any]]:
    """Return pods that can run on one GPU only."""
    there = f"{static('1g.10gb')} && device.attributes['gpu.nvidia.com'].parentUUID == '{gpu}'"
    return deployment("pinned", PINNED, selected("mig.nvidia.com", there))


@pytest.fixture(scope="module")
def edge(living: Cluster, target: tuple[str, tuple[int, int]]) -> tuple[str, int]:
    """Return another node and one of its GPUs for the pinned pods, which changes between two layouts."""
    node = next(each for each in living.nodes() if each != target[0])
    gpu = 7
    done = repartition(living, between(node, gpu, FIRST), "--limit", node)
    assert not done.failed, done.output
    uuid = re.findall(r"UUID: (GPU-[0-9a-f-]+)", living.run(node, "nvidia-smi", "-L"))[gpu]
    living.apply(*pinned(uuid))
    wait_ready(living, pinned=PINNED)
    return node, gpu


def between(node: str, gpu: int, partitions: dict[str, int]) -> str:
    return layouts(**{node.replace("-", "_"): [{"match": {"index": gpu}, "mode": "static", "partitions": partitions}]})


def others(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Return the containers of all pods that use no changing device."""
    return {name: each for name, each in containers(cluster).items() if not name.startswith("pinned")}


STEPS = (
    "Block new claims on the device in the driver",
    "Drain the devices to remove",
    "Wait until the driver has unprepared the devices to remove",
    "Change the layout of the GPU",
    "Verify the layout of the GPU",
    "Record that the device is about to be published",
    "Publish the device and allow new claims in the driver",
    "Wait until the new layout is published",
    "Remove the taint of the device",
    "Configure the driver's layout of all devices",
)
OUTCOMES: list[tuple[str, str, str]] = []


@pytest.mark.parametrize("step", STEPS)
def test_a_run_that_is_killed_is_resumed_or_reverted(living: Cluster, edge: tuple[str, int], step: str) -> None:
    node, gpu = edge
    reverts = STEPS.index(step) % 2 == 1
    before = others(living)
    there, wanted_now = between(node, gpu, FIRST), between(node, gpu, SECOND)
    consistent(living, node, gpu, FIRST)
    killed_at(
        living, step, "--limit", node, "-e", wanted_now, "-e", json.dumps({"accelerator_repartition_evict": True})
    )
    left = f"{len(rules(living))} rules, {len(records(living))} records, {dict(profiles(living, node, gpu))}"
    again = repartition(living, there if reverts else wanted_now, "--limit", node)
    OUTCOMES.append((step, left, "failed" if again.failed else "reverted" if reverts else "resumed"))
    print("\n".join(f"{name}: left {rest}: {end}" for name, rest, end in OUTCOMES))
    assert not again.failed, again.output
    consistent(living, node, gpu, FIRST if reverts else SECOND)
    if not reverts:
        wait_ready(living, pinned=PINNED - 1)
        back = repartition(living, there, "--limit", node)
        assert not back.failed, back.output
        consistent(living, node, gpu, FIRST)
    wait_ready(living, pinned=PINNED)
    assert others(living) == before


def failing(living: Cluster, edge: tuple[str, int], name: str, **more: Any) -> Recap:
    """Run a change to the second layout that must fail and leave only the first layout; return the recap."""
    node, gpu = edge
    before = others(living)
    found = repartition(living, between(node, gpu, SECOND), "--limit", node, **more)
    assert found.failed, found.output
    OUTCOMES.append((name, "", "put back" if "previous layout was restored" in found.output else "not put back"))
    print("\n".join(f"{step}: {end}" for step, _left, end in OUTCOMES))
    assert others(living) == before
    return found


def test_layout_rejected_by_the_gpu_is_rolled_back(living: Cluster, edge: tuple[str, int]) -> None:
    node, gpu = edge
    living.run(
        node,
        "accelerator-simulator",
        "fault",
        gpu,
        "call",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "fail",
        "19",
        "nth",
        "1",
    )
    try:
        found = failing(living, edge, "creation is refused by silicon")
    finally:
        living.run(node, "accelerator-simulator", "clear", gpu)
    assert '"Change the layout of the GPU" failed' in found.output and "previous layout was restored" in found.output
    consistent(living, node, gpu, FIRST)
    wait_ready(living, pinned=PINNED)


def test_disruption_budget_that_blocks_eviction_is_named_and_nothing_changes(
    living: Cluster, edge: tuple[str, int]
) -> None:
    node, gpu = edge
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "pinned", "namespace": "default"},
        "spec": {"minAvailable": PINNED, "selector": {"matchLabels": {"app": "pinned"}}},
    }
    pins = {name: each for name, each in containers(living).items() if name.startswith("pinned")}
    living.apply(budget)
    try:
        found = failing(living, edge, "a disruption budget refuses", accelerator_repartition_timeout=10)
    finally:
        living.delete(budget)
    assert '"Drain the devices to remove" failed' in found.output and "disruption budget" in found.output
    consistent(living, node, gpu, FIRST)
    assert {name: each for name, each in containers(living).items() if name.startswith("pinned")} == pins


def test_run_resumes_after_a_node_outage(living: Cluster, edge: tuple[str, int]) -> None:
    node, gpu = edge
    wanted_now = between(node, gpu, SECOND)
    said = killed_at(
        living,
        "Change the layout of the GPU",
        "--limit",
        node,
        "-e",
        wanted_now,
        "-e",
        '{"accelerator_repartition_evict": true}',
    )
    assert "TASK [Drain the devices to remove]" in said
    living.world("reboot", node, "--hard")
    living.wait_registered(node, timeout=240)
    again = repartition(living, wanted_now, "--limit", node)
    OUTCOMES.append(("the node starts again in between", "", "failed" if again.failed else "resumed"))
    print("\n".join(f"{step}: {left} {end}" for step, left, end in OUTCOMES))
    assert not again.failed, again.output
    consistent(living, node, gpu, SECOND)
    wait_ready(living, pinned=PINNED - 1)


# ---- boards that change their MIG mode only with a reset


AMPERE: list[dict[str, Any]] = [
    {"match": {"index": [0, 2]}, "mode": "static", "partitions": {"1g.6gb": 4}},
    {"match": {}, "mode": "whole"},
]


def on_gpu(name: str, kind: str, attribute: str, uuid: str) -> list[dict[str, Any]]:
    """Return a Deployment of one pod on one GPU or on one of its partitions."""
    return deployment(name, 1, selected(kind, f"device.attributes['gpu.nvidia.com'].{attribute} == '{uuid}'"))


def test_change_of_mode_resets_one_gpu_of_a_linked_pair(living: Cluster) -> None:
    """Four A30, linked in pairs: GPU 1 becomes partitioned, and the pods on the other GPUs continue."""
    living.kubectl(
        "delete", "deployments,resourceclaimtemplates", "--all", "-n", "default", "--timeout=240s", timeout=300
    )
    living.wait("no claim is left", lambda: not living.get("resourceclaims", "-n", "default")["items"], 240)
    node = living.nodes()[2]
    living.replace_boards(node, "--nodes", "3", "--silicon", "8xH100,8xH100,4xA30")

    def fleet(*rules: dict[str, Any]) -> str:
        return json.dumps(
            {"accelerator_layouts": [{"hosts": node, "layout": [*rules, *AMPERE]}], "dra_driver_inventory_interval": 10}
        )

    first = living.playbook(
        "site.yml", "--limit", node, "-e", fleet(), "-e", "nvidia_mig_reset=when_needed", check=False
    )
    assert not first.failed, first.output
    uuids = re.findall(r"^GPU \d+: .*UUID: (GPU-[0-9a-f-]+)", living.run(node, "nvidia-smi", "-L"), re.MULTILINE)
    for number in range(4):
        part = number in (0, 2)
        kind, attribute = ("mig.nvidia.com", "parentUUID") if part else ("gpu.nvidia.com", "uuid")
        living.apply(*on_gpu(f"ampere-{number}", kind, attribute, uuids[number]))
    living.wait(
        "four pods run",
        lambda: len(containers(living)) == 4 and all(one for one, _restarts in containers(living).values()),
        240,
    )
    before = containers(living)
    wanted_now = fleet({"match": {"index": 1}, "mode": "static", "partitions": {"2g.12gb": 2}})
    refused = repartition(living, wanted_now, "--limit", node)
    assert refused.failed and "when_needed" in refused.output and containers(living) == before
    done = repartition(living, wanted_now, "--limit", node, nvidia_mig_reset="when_needed")
    assert not done.failed, done.output
    assert "1 (reset)" in done.output and "0+1" not in done.output
    stays = {name: each for name, each in before.items() if not name.startswith("ampere-1")}
    assert len(stays) == 3 and stays.items() <= containers(living).items()
    assert not {name for name in before if name.startswith("ampere-1")} & set(pods(living))
    assert profiles(living, node, 0) == {"1g.6gb": 4} and profiles(living, node, 1) == {"2g.12gb": 2}
    assert not rules(living) and not records(living)
    # No whole GPU is left for the pod of GPU 1.
    living.wait(
        "three pods are ready",
        lambda: (
            sum(
                living.get("deployment", f"ampere-{number}", "-n", "default")["status"].get("readyReplicas", 0)
                for number in range(4)
            )
            == 3
        ),
        240,
    )
    again = repartition(living, wanted_now, "--limit", node, nvidia_mig_reset="when_needed")
    assert (again.failed, again.changed) == (0, 0), again.output
