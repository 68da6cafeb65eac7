# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Plan a layout for pending pods and apply it under running pods. Then repair a partition that was destroyed by hand,
after a failed attempt, and change ECC of one GPU, which must be drained for it.

One node with eight H100 also runs the controller. Each test starts from the state that the previous one left.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster, Recap
from tests.cluster.manifests import claim, deployment, pod, selected, static
from tests.cluster.test_45_controller import ASK, CHOSEN
from tests.prove.repartitioning import (
    DONE,
    UNDONE,
    containers,
    holders,
    last_event_version,
    node_events,
    numbered,
    pods,
    profiles,
    reasons,
    records,
    repartition,
    repartition_events,
    rules,
    wait_ready,
)

WORLD = os.environ.get("DRA_ACCELERATORS_PLAN_WORLD", "planned")
KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
DRIVER, CONTROLLER = "dra-accelerators-driver", "dra-accelerators-controller"
ANNOTATION = "dra.accelerators/layout-differs"
LAYOUT: list[dict[str, Any]] = [
    {"match": {"index": [0, 1]}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}},
    {"match": {}, "mode": "whole"},
]
#: Five of the eight small partitions and five of the six whole GPUs are in use. A free GPU has room for three MIDDLE
#: partitions at most, so the fourth replaces two small ones next to running pods.
RUNNING = {"small": 5, "large": 2, "whole": 5}
MIDDLE = 4
ASKS = {
    "small": selected("mig.nvidia.com", static("1g.10gb")),
    "large": selected("mig.nvidia.com", static("3g.40gb")),
    "whole": {"deviceClassName": "gpu.nvidia.com"},
    "middle": selected("mig.nvidia.com", static("2g.20gb")),
}
HUGE = "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('140Gi')) >= 0"


@pytest.fixture(scope="module")
def living() -> Iterator[Cluster]:
    """Start a node with running and pending pods and the controller; yield its cluster."""
    often = {"dra_driver_inventory_interval": 10, "dra_driver_full_inventory_interval": 20}
    cluster = Cluster(WORLD, {"accelerator_layouts": [{"hosts": "all", "layout": LAYOUT}], **often})
    if not KEPT:
        cluster.world("down")
    cluster.world("up", "--nodes", "1", "--silicon", "8xH100", timeout=3000)
    for name, more in (("site.yml", {}), ("controller.yml", CHOSEN)):
        inventory = cluster.inventory(controllers=True)
        done = cluster.playbook(name, "-e", json.dumps(more), inventory=inventory, check=False)
        assert not done.failed, done.output
    for name, number in RUNNING.items():
        cluster.apply(*deployment(name, number, ASKS[name]))
        wait_ready(cluster, **{name: number})
    cluster.apply(*deployment("middle", MIDDLE, ASKS["middle"]))
    cluster.apply(claim("huge", device_class="gpu.nvidia.com", expression=HUGE), pod("huge", "huge"))
    for name, number in (("middle", MIDDLE), ("huge", 1)):
        cluster.wait(f"{name} waits", lambda name=name, number=number: waiting(cluster)[name] == number)
    yield cluster
    if not KEPT:
        cluster.world("down")


@pytest.fixture(scope="module")
def node(living: Cluster) -> str:
    """Return the node's name."""
    (found,) = living.nodes()
    return found


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the plan file."""
    return tmp_path_factory.mktemp("plan") / "layouts.yml"


def waiting(cluster: Cluster) -> Counter[str]:
    """Return the number of pods without a node by name, from the scheduler's conditions."""
    return Counter(
        name.partition("-")[0]
        for name, each in pods(cluster).items()
        if any(one.get("reason") == "Unschedulable" for one in each["status"].get("conditions", ()))
    )


def by_plan(cluster: Cluster, layouts: Path, *arguments: str, **more: Any) -> Recap:
    """Run the repartition playbook with the file that the plan wrote."""
    return repartition(cluster, "{}", "-e", f"@{layouts}", *arguments, **more)


def settled(cluster: Cluster, layouts: Path, *arguments: str, **more: Any) -> None:
    """Assert that no operation is pending and that a second run changes nothing."""
    before, slices = containers(cluster), cluster.slices()
    assert not rules(cluster) and not records(cluster)
    again = by_plan(cluster, layouts, *arguments, **more)
    assert (again.failed, again.changed) == (0, 0), again.output
    assert containers(cluster) == before and cluster.slices() == slices


def test_plan_for_pending_claims_is_written(living: Cluster, node: str, layouts: Path) -> None:
    before, slices = containers(living), living.slices()
    words = {"accelerator_plan_pending_for": "0s", "accelerator_plan_file": str(layouts)}
    shown = living.playbook("plan.yml", "-e", json.dumps(words), check=False)
    assert not shown.failed and not shown.changed and not layouts.exists(), shown.output
    done = living.playbook("plan.yml", "-e", json.dumps({**words, "accelerator_plan_write": True}), check=False)
    assert not done.failed and done.changed == 1, done.output
    assert "1 without a place" in done.output and "140Gi" in done.output, done.output
    again = living.playbook("plan.yml", "-e", json.dumps({**words, "accelerator_plan_write": True}), check=False)
    assert (again.failed, again.changed) == (0, 0), again.output
    (entry,) = yaml.safe_load(layouts.read_text())["accelerator_layouts"]
    cut = Counter(
        each["profile"]
        for rule in entry["layout"]
        for _uuid in rule["match"]["uuid"]
        for each in rule.get("partitions", ())
    )
    assert entry["hosts"] == node and cut == {"2g.20gb": MIDDLE, "3g.40gb": 2, "1g.10gb": 6}, entry
    assert containers(living) == before and living.slices() == slices


def test_check_mode_shows_the_steps_and_changes_nothing(living: Cluster, node: str, layouts: Path) -> None:
    before, slices, file = containers(living), living.slices(), layouts.with_name("steps.json")
    shown = by_plan(living, layouts, "--check", "--diff", accelerator_repartition_file=str(file))
    assert not shown.failed and not shown.changed and "2g.20gb" in shown.output, shown.output
    plan = json.loads(file.read_text())
    assert len(plan["nodes"][node]["operations"]) == 2 and plan["evicted"] == [], plan
    assert len(plan["staying"]) == sum(RUNNING.values())
    assert containers(living) == before and living.slices() == slices and not rules(living)
    assert repartition_events(living, node) == {}


def test_applied_plan_pending_pods_start_and_running_pods_stay(living: Cluster, node: str, layouts: Path) -> None:
    before, had = containers(living), holders(living)
    done = by_plan(living, layouts)
    assert not done.failed and done.changed, done.output
    wait_ready(living, middle=MIDDLE, **RUNNING)
    assert before.items() <= containers(living).items(), "a running pod was evicted, or its container was restarted"
    assert had.items() <= holders(living).items() and waiting(living) == {"huge": 1}
    new = Counter(numbered(place)[1] for place, user in holders(living).items() if user.startswith("middle"))
    assert sorted(new.values()) == [1, 3], new
    assert all(profiles(living, node, gpu)["2g.20gb"] == number for gpu, number in new.items())
    steps = repartition_events(living, node)
    assert [reasons(each) for each in steps.values()] == [DONE] * 2, steps
    settled(living, layouts)
    site = living.playbook("site.yml", "-e", f"@{layouts}", check=False)
    assert (site.failed, site.changed) == (0, 0), site.output


# ---- a partition destroyed by hand


def noted(cluster: Cluster, node: str) -> dict[str, Any]:
    """Return the slices' annotations about devices that differ from the layout, by UUID."""
    found = [(each["metadata"].get("annotations") or {}).get(ANNOTATION) for each in cluster.slices(node)]
    return {uuid: answer for text in filter(None, found) for uuid, answer in json.loads(text).items()}


def drifting(cluster: Cluster, node: str) -> float:
    """Return the controller's metric of devices that differ from their layout."""
    said = cluster.run(node, "python3", "-c", ASK)
    return float(
        re.findall(r'^dra_accelerators_controller_drift\{kind="layout-differs"\} (\S+)$', said, re.MULTILINE)[0]
    )


def uuid_of(cluster: Cluster, node: str, gpu: int) -> str:
    return re.findall(rf"^GPU {gpu}: .*UUID: (GPU-[0-9a-f-]+)", cluster.run(node, "nvidia-smi", "-L"), re.MULTILINE)[0]


@pytest.fixture(scope="module")
def last_event(living: Cluster, node: str) -> int:
    """Return the node's last Event before a partition is destroyed.

    Earlier Events can report differences: the driver receives new rules after the devices have changed. It tolerates
    the interval of a full inventory, a few seconds here, which a busy host can exceed.
    """
    return last_event_version(living, node)


@pytest.fixture(scope="module")
def destroyed(living: Cluster, node: str, last_event: int) -> tuple[int, int]:
    """Destroy a free small partition of a GPU whose other partitions are in use; return the GPU's index and the
    placement.
    """
    names = (name for name in sorted(living.devices(node)) if "-mig-1g10gb-" in name)
    name = next(each for each in names if f"{node}/{each}" not in holders(living))
    gpu, start = numbered(f"{node}/{name}")[1], int(name.rpartition("-")[2])
    (number,) = re.findall(
        rf"^\|\s+{gpu}\s+MIG 1g\.10gb\s+\d+\s+(\d+)\s+{start}:1",
        living.run(node, "nvidia-smi", "mig", "-lgi"),
        re.MULTILINE,
    )
    assert noted(living, node) == {} and drifting(living, node) == 0
    living.shell(node, f"nvidia-smi mig -i {gpu} -dci -gi {number} && nvidia-smi mig -i {gpu} -dgi -gi {number}")
    return gpu, start


def test_partition_destroyed_by_hand_is_reported_by_driver_controller_and_report(
    living: Cluster, node: str, last_event: int, destroyed: tuple[int, int], layouts: Path
) -> None:
    gpu, start = destroyed
    missing, uuid = f"1g.10gb at {start}", uuid_of(living, node, gpu)
    living.wait("the slice has the record", lambda: noted(living, node), timeout=120)
    (note,) = noted(living, node).items()
    assert note[0] == uuid and note[1]["steps"] == [f"+ {missing}"] and note[1]["index"] == gpu, note

    def differing(component: str) -> list[str]:
        return [
            text for reason, text in node_events(living, node, component, after=last_event) if reason == "LayoutDiffers"
        ]

    (text,) = living.wait("the Event of the driver", lambda: differing(DRIVER))
    assert f"missing: {missing}" in text and "repartition" in text
    (text,) = living.wait("the Event of the controller", lambda: differing(CONTROLLER))
    assert "layout" in text
    living.wait("the controller counts it", lambda: drifting(living, node) == 1)
    report = layouts.with_name("report.json")
    words = {"accelerator_report_file": str(layouts.with_name("report.md")), "accelerator_report_data": str(report)}
    done = living.playbook("report.yml", "-e", f"@{layouts}", "-e", json.dumps(words), check=False)
    assert not done.failed, done.output
    picture = json.loads(report.read_text())
    (drawn,) = picture["nodes"]
    assert picture["totals"]["drift"] == 1
    assert {each["uuid"]: each["drift"]["steps"] for each in drawn["devices"] if each["drift"]} == {
        uuid: [f"+ {missing}"]
    }


def test_layout_rejected_by_the_gpu_is_reported_by_step_and_rolled_back(
    living: Cluster, node: str, destroyed: tuple[int, int], layouts: Path
) -> None:
    gpu, _start = destroyed
    before, partitions, known = containers(living), profiles(living, node, gpu), repartition_events(living, node)
    call = ("call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "19", "nth", "1")
    living.run(node, "accelerator-simulator", "fault", gpu, *call)
    try:
        failed = by_plan(living, layouts)
    finally:
        living.run(node, "accelerator-simulator", "clear", gpu)
    assert failed.failed and "previous layout was restored" in failed.output, failed.output
    assert containers(living) == before and profiles(living, node, gpu) == partitions
    assert not rules(living) and not records(living) and noted(living, node)
    new = living.wait("the Event of the last step", lambda: since(living, node, known, UNDONE[-1]))
    assert reasons(new) == UNDONE, new
    assert all('"Change the layout of the GPU" failed: ' in text for _reason, text in new[2:]), new


def since(cluster: Cluster, node: str, known: dict[str, list[tuple[str, str]]], last: str) -> list[tuple[str, str]]:
    """Return the new step Events of the one operation that has any, as soon as the last is ``last``."""
    now = repartition_events(cluster, node)
    (new,) = [each[len(known.get(name, ())) :] for name, each in now.items() if each != known.get(name)] or [[]]
    return new if last in reasons(new) else []


def test_next_run_recreates_the_partition_and_the_layout_agrees(
    living: Cluster, node: str, last_event: int, destroyed: tuple[int, int], layouts: Path
) -> None:
    gpu, _start = destroyed
    before, partitions, known = containers(living), profiles(living, node, gpu), repartition_events(living, node)
    done = by_plan(living, layouts)
    assert not done.failed, done.output
    assert containers(living) == before, "a pod was affected although none used the partition"
    assert profiles(living, node, gpu) - partitions == {"1g.10gb": 1}
    new = living.wait("the Event of the last step", lambda: since(living, node, known, DONE[-1]))
    assert reasons(new) == DONE, new
    living.wait("the record is deleted", lambda: not noted(living, node))
    living.wait(
        "the Event of the driver", lambda: "LayoutAgrees" in reasons(node_events(living, node, after=last_event))
    )
    living.wait(
        "the Event of the controller",
        lambda: "DriftEnded" in reasons(node_events(living, node, CONTROLLER, after=last_event)),
    )
    living.wait("the controller counts it no more", lambda: drifting(living, node) == 0)
    settled(living, layouts)


# ---- a setting that needs a drained GPU


def test_ecc_changes_on_a_drained_gpu_and_its_pods_run_again(
    living: Cluster, node: str, destroyed: tuple[int, int], layouts: Path
) -> None:
    gpu, _start = destroyed
    before, had, partitions = containers(living), holders(living), profiles(living, node, gpu)
    there = {user for place, user in had.items() if numbered(place)[1] == gpu}
    settings = {
        "accelerator_nvidia_settings_enabled": True,
        "nvidia_settings_rules": [{"match": {"index": gpu}, "ecc": False}],
        "nvidia_settings_reset": "when_needed",
    }
    words, file = ("-e", json.dumps(settings)), layouts.with_name("ecc.json")
    assert there and ecc(living, node) == ["Enabled"] * 8
    shown = by_plan(living, layouts, "--check", "--diff", *words, accelerator_repartition_file=str(file))
    assert not shown.failed and ecc(living, node) == ["Enabled"] * 8, shown.output
    assert {each["name"] for each in json.loads(file.read_text())["evicted"]} == there
    done = by_plan(living, layouts, *words)
    assert not done.failed, done.output
    assert ecc(living, node) == ["Disabled" if index == gpu else "Enabled" for index in range(8)]
    assert set(before) - set(pods(living)) == there
    wait_ready(living, middle=MIDDLE, **RUNNING)
    stays = {name: each for name, each in before.items() if name not in there}
    assert stays.items() <= containers(living).items() and profiles(living, node, gpu) == partitions
    settled(living, layouts, *words)


def ecc(cluster: Cluster, node: str) -> list[str]:
    """Return the ECC mode of each GPU."""
    return cluster.run(node, "nvidia-smi", "--query-gpu=ecc.mode.current", "--format=csv,noheader").split()
