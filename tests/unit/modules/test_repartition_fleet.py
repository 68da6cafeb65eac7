# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook repartition on several devices and nodes: the order of operations, and the operations that it skips after a failure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition.record import Record
from driver_store import claim
from repartition_world import FIRST, KILLED, Cluster, kubelet, play_all

if TYPE_CHECKING:
    from conftest import Node

Json = dict[str, Any]
#: The indexes of the GPUs that each test changes on each node, and their layouts before and after the change.
BOTH = [0, 1]
OLD: Json = {"match": {"index": BOTH}, "mode": "static", "partitions": {"1g.10gb": 2}}
NEW: Json = {"match": {"index": BOTH}, "mode": "static", "partitions": {"2g.20gb": 1}}
REFUSED = ("call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "19", "nth", "1")
DRIVER_LAYOUT_TASK = "Configure the driver's layout of the device"


@pytest.fixture
def cluster(tmp_path: Path, make_node: Callable[..., Node]) -> Iterator[Cluster]:
    """Yield the cluster of three nodes with the old layout on two GPUs each."""
    nodes = {name: make_node("8xH100", f"node-{name}") for name in "abc"}
    for name, each in nodes.items():
        (kubelet(tmp_path, name) / "plugins/gpu.nvidia.com").mkdir(parents=True)
        each.layout(OLD)
    with Cluster(nodes["a"], **{name: each for name, each in nodes.items() if name != "a"}) as server:
        yield server


def new(cluster: Cluster) -> dict[str, list[int]]:
    """Return the GPUs with the new layout by node. Assert the old layout on the others."""
    found: dict[str, list[int]] = {}
    for name, node in cluster.nodes.items():
        profiles = {gpu: Counter(each for each, _start in parts) for gpu, parts in node.partitions().items()}
        assert all(profiles[gpu] in (OLD["partitions"], NEW["partitions"]) for gpu in BOTH), profiles
        found[name] = [gpu for gpu in BOTH if profiles[gpu] == NEW["partitions"]]
    return found


def has_record_or_taint(cluster: Cluster, directory: Path) -> bool:
    """Return whether a node has a repartition record, or the cluster has a device taint rule."""
    return bool(cluster.rules) or any(
        (kubelet(directory, name) / "plugins/gpu.nvidia.com/repartition.json").exists() for name in cluster.nodes
    )


def joined_lines(text: str) -> str:
    """Return the output of Ansible on one line."""
    return " ".join(text.split())


@pytest.mark.prove
def test_failed_operation_stops_later_operations(cluster: Cluster, tmp_path: Path) -> None:
    cluster.nodes["a"].simulator("fault", "0", *REFUSED)
    done = play_all(cluster.nodes["a"], cluster, tmp_path, NEW)
    assert done.returncode not in (0, KILLED), done.stdout
    assert '"Change the layout of the GPU" failed' in done.stdout and "driver layout of" not in done.stdout, done.stdout
    assert new(cluster) == {"a": [], "b": [], "c": []} and not has_record_or_taint(cluster, tmp_path)


@pytest.mark.prove
def test_operation_fails_and_started_operations_of_the_batch_complete(cluster: Cluster, tmp_path: Path) -> None:
    cluster.nodes["a"].simulator("fault", "0", *REFUSED)
    done = play_all(cluster.nodes["a"], cluster, tmp_path, NEW, accelerator_repartition_serial=2)
    assert done.returncode not in (0, KILLED), done.stdout
    assert new(cluster) == {"a": [], "b": [0], "c": []}, done.stdout
    assert "a failed, so device 1 of b and later devices were not changed" in joined_lines(done.stdout), done.stdout
    assert not has_record_or_taint(cluster, tmp_path)
    assert "driver layout of b" not in done.stdout, (
        "the driver layout of b must not be written before all devices of b have the new layout"
    )


@pytest.mark.prove
def test_node_fails_and_its_batch_completes_but_no_later_one_starts(cluster: Cluster, tmp_path: Path) -> None:
    cluster.nodes["b"].layout({**NEW, "match": {"index": 1}})
    cluster.nodes["a"].simulator("fault", "0", *REFUSED)
    done = play_all(cluster.nodes["a"], cluster, tmp_path, NEW, accelerator_repartition_serial=2)
    assert done.returncode not in (0, KILLED), done.stdout
    assert new(cluster) == {"a": [], "b": BOTH, "c": []} and not has_record_or_taint(cluster, tmp_path), done.stdout
    assert "driver layout of b" in done.stdout and "a failed, so c and later nodes were not started" in joined_lines(
        done.stdout
    )


@pytest.mark.prove
def test_node_without_changes_does_not_stop_others(cluster: Cluster, tmp_path: Path) -> None:
    cluster.nodes["a"].layout(NEW)
    options = {"former_layouts": {"a": [NEW]}, "accelerator_repartition_serial": 2}
    done = play_all(cluster.nodes["a"], cluster, tmp_path, NEW, **options)
    assert done.returncode == 0 and "driver layout of a" not in done.stdout, done.stdout
    assert new(cluster) == {"a": BOTH, "b": BOTH, "c": BOTH} and not has_record_or_taint(cluster, tmp_path)


def planned(node: Node, directory: Path, *layout: Json, former: list[Json]) -> list[Json]:
    """Return the operations of a node. Each operation starts with the driver layout that the previous one leaves."""
    options = {"layout": list(layout), "former_layout": former, "kubelet_root": str(directory), "vendor": ["nvidia"]}
    operations: list[Json] = node.module("device_repartition", options)["operations"]
    for one, following in zip(operations, operations[1:], strict=False):
        assert one["driver_layout"] == following["driver_layout_before"]
    return operations


def indexes(operations: list[Json]) -> list[int]:
    return [each["index"] for one in operations for each in one["devices"]]


def test_operations_idle_devices_before_devices_in_use(node: Node, tmp_path: Path) -> None:
    """Operations of an earlier run are first, then idle devices, then devices in use. Each group is sorted by device."""
    state = kubelet(tmp_path) / "plugins/gpu.nvidia.com"
    state.mkdir(parents=True)
    board = node.layout(OLD)["after"][0]
    claim(state / "state.db", board["uuid"], board["partitions"][0])
    layout = [
        {"match": {"index": 0}, "mode": "static", "partitions": {"7g.80gb": 1}},
        {"match": {"index": 1}, "mode": "dynamic"},
        {"match": {"index": 2}, "mode": "static", "partitions": {"3g.40gb": 1}},
    ]
    operations = planned(node, kubelet(tmp_path), *layout, former=[OLD])
    assert indexes(operations) == [1, 2, 0] and [bool(each["claims"]) for each in operations] == [False, False, True]
    for index in (2, 0):
        begun = next(each for each in operations if each["devices"][0]["index"] == index)
        record = Record(begun["operation"], (begun["devices"][0]["uuid"],), "draining", 9e9, (), (), ())
        (state / "repartition.json").write_text(json.dumps({"version": 1, **record.to_dict()}))
        found = planned(node, kubelet(tmp_path), *layout, former=[OLD])
        assert indexes(found) == [index, *(each for each in (1, 2, 0) if each != index)]
        assert [each["resumes"] for each in found] == [True, False, False]


@pytest.mark.prove
def test_killed_run_driver_layout_is_updated_before_publication(node: Node, tmp_path: Path) -> None:
    """Ansible is killed before it updates the driver's layout. The next run updates it before it ends the operations of the earlier run."""
    state = kubelet(tmp_path) / "plugins/gpu.nvidia.com"
    state.mkdir(parents=True)
    former = [{"match": {}, "mode": "dynamic"}]
    node.layout({"match": {"index": 0}, "mode": "dynamic"})
    uuid = node.module("accelerator_info", {"fail_without_driver": True})["devices"][0]["uuid"]
    with Cluster(node) as cluster:
        cluster.at_step = lambda task: task == DRIVER_LAYOUT_TASK
        killed = play_all(node, cluster, tmp_path, FIRST, *former, former_layouts={"a": former})
        assert killed.returncode == KILLED, killed.stdout
        assert json.loads((state / "repartition.json").read_text())["step"] == "publishing"
        cluster.at_step = lambda _task: False
        done = play_all(node, cluster, tmp_path, FIRST, *former, former_layouts={"a": former})
    assert done.returncode == 0 and not (state / "repartition.json").exists(), done.stdout
    before, _task, _after = done.stdout.partition("TASK [End the operations of an earlier run]")
    (layouts,) = re.findall(r'"msg": "driver layout of a: (.*)"', before)
    assert uuid and json.loads(layouts.replace('\\"', '"'))[0] == FIRST
