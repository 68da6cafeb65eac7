# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Change an NPU node under pods: one NPU gets other vNPUs, then all get another driver, and only the affected pods are
evicted.

The driver packages are simulated (tests/packages). Each test starts from the state that the previous one left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Recap
from tests.cluster.manifests import deployment, pod, selected
from tests.cluster.npus import NpuCluster, npu_pod
from tests.prove.gpu_host import published_version
from tests.prove.repartitioning import (
    DONE,
    containers,
    holders,
    numbered,
    pods,
    reasons,
    records,
    repartition,
    repartition_events,
    rules,
    wait_ready,
)
from tests.prove.test_npu_runtime import DRIVER, NEWER_DRIVER, boot_id, digest, installed_driver, package

WORLD = os.environ.get("DRA_ACCELERATORS_NPU_REPARTITION_WORLD", "npu-repartition")
KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
#: A package that needs a reboot, after which the simulator still reports its previous driver version.
NOT_TAKEN = "25.6.0"
BEFORE: list[dict[str, Any]] = [
    {"match": {"index": [0, 1]}, "mode": "static", "partitions": {"vir04": 1, "vir02": 1}},
    {"match": {}, "mode": "whole"},
]
#: Two halves of NPUs, one quarter on either NPU, and whole NPUs. Eighths do not exist yet.
RUNNING = {"half": 2, "quarter": 1, "whole": 2}
EIGHTHS = 2


def a_slice(template: str) -> dict[str, Any]:
    """Return a request for a vNPU of the layout."""
    own = "device.attributes['npu.huawei.com']"
    return selected("vnpu.huawei.com", f"{own}.template == '{template}' && has({own}.uuid)")


ASKS = {
    "half": a_slice("vir04"),
    "quarter": a_slice("vir02"),
    "eighth": a_slice("vir01"),
    "whole": {"deviceClassName": "npu.huawei.com"},
}


def workload(name: str, replicas: int) -> list[dict[str, Any]]:
    """Return a Deployment whose pods print their npu-smi output."""
    (container,) = npu_pod(name, name)["spec"]["containers"]
    return deployment(name, replicas, ASKS[name], command=container["command"], env=container["env"])


@pytest.fixture(scope="module")
def living() -> Iterator[NpuCluster]:
    """Start a node with eight NPUs and pods on some of them; yield the cluster."""
    layouts = [{"hosts": "all", "layout": BEFORE}]
    cluster = NpuCluster(WORLD, {"accelerator_layouts": layouts, "dra_driver_inventory_interval": 10})
    if not KEPT:
        cluster.world("down")
    cluster.world("up", "--nodes", "1", "--silicon", "8x310P-Pro", timeout=3000)
    first = cluster.playbook("site.yml", check=False)
    assert not first.failed, first.output
    for name, number in (*RUNNING.items(), ("eighth", EIGHTHS)):
        cluster.apply(*workload(name, number))
    wait_ready(cluster, **RUNNING)
    assert not any(name.startswith("eighth") for name in containers(cluster))
    yield cluster
    if not KEPT:
        cluster.world("down")


@pytest.fixture(scope="module")
def node(living: NpuCluster) -> str:
    """Return the node's name."""
    (found,) = living.nodes()
    return found


@pytest.fixture(scope="module")
def target(living: NpuCluster) -> int:
    """Return the NPU whose quarter is in use."""
    (found,) = (numbered(place)[1] for place, user in holders(living).items() if user.startswith("quarter"))
    return found


def eighths(target: int) -> dict[str, Any]:
    """Return the fleet with another layout: on one NPU the half stays, and two eighths replace the quarter."""
    rule = {"match": {"index": target}, "mode": "static", "partitions": {"vir04": 1, "vir01": EIGHTHS}}
    return {"accelerator_layouts": [{"hosts": "all", "layout": [rule, *BEFORE]}]}


def templates(living: NpuCluster, node: str) -> dict[int, list[str]]:
    """Return the templates of the vNPUs by NPU."""
    shown = living.slices_of(node)
    return {npu: sorted(each["template"] for each in slices) for npu, slices in shown.items() if slices}


def test_plan_names_the_evicted_pod_and_changes_nothing(
    living: NpuCluster, node: str, target: int, tmp_path: Path
) -> None:
    before, slices, file = containers(living), living.slices(), tmp_path / "steps.json"
    words = ("--check", "--diff")
    answer = repartition(living, json.dumps(eighths(target)), *words, accelerator_repartition_file=str(file))
    assert not answer.failed and not answer.changed and "vir01" in answer.output, answer.output
    plan = json.loads(file.read_text())
    (operation,) = plan["nodes"][node]["operations"]
    assert [each["index"] for each in operation["devices"]] == [target]
    assert [each["profile"] for each in operation["going"]] == ["vir02"]
    assert [each["name"].partition("-")[0] for each in plan["evicted"]] == ["quarter"]
    assert containers(living) == before and living.slices() == slices and not rules(living)


def test_only_the_pod_on_the_removed_vnpu_is_evicted(living: NpuCluster, node: str, target: int) -> None:
    before, other = containers(living), 1 - target
    done = repartition(living, json.dumps(eighths(target)))
    assert not done.failed, done.output
    wait_ready(living, eighth=EIGHTHS, **RUNNING)
    after = containers(living)
    gone = set(before) - set(pods(living))
    assert [name.partition("-")[0] for name in gone] == ["quarter"]
    assert {name: each for name, each in before.items() if name not in gone}.items() <= after.items()
    assert templates(living, node) == {target: ["vir01"] * EIGHTHS + ["vir04"], other: ["vir02", "vir04"]}
    on = {user.partition("-")[0]: numbered(place)[1] for place, user in holders(living).items()}
    assert (on["eighth"], on["quarter"]) == (target, other)
    for name in after:
        if name.startswith("eighth"):
            assert living.shown_to(name) == ["310Pvir01"]
    assert not rules(living) and not records(living)
    assert [reasons(each) for each in repartition_events(living, node).values()] == [DONE]


def test_second_run_changes_nothing(living: NpuCluster, target: int) -> None:
    before, slices = containers(living), living.slices()
    # From now on this is the fleet's layout.
    living.variables = {**living.variables, **eighths(target)}
    for again in (repartition(living), living.playbook("site.yml", check=False)):
        assert (again.failed, again.changed) == (0, 0), again.output
    assert containers(living) == before and living.slices() == slices


# ---- another driver


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the vendor's packages on the controller: one that takes effect at once, and one that does not even after
    a reboot.
    """
    folder = tmp_path_factory.mktemp("packages")
    return {
        NEWER_DRIVER: package(folder, "driver", NEWER_DRIVER, EFFECT="It takes effect immediately."),
        NOT_TAKEN: package(folder, "driver", NOT_TAKEN),
    }


def upgrade(living: NpuCluster, path: Path, *words: str, **more: Any) -> Recap:
    """Run the playbook with the driver of a package."""
    said = {
        "accelerator_ascend_driver_enabled": True,
        "ascend_driver_package": str(path),
        "ascend_driver_checksums": {path.name: digest(path)},
        "ascend_driver_accept_eula": True,
        "ascend_driver_reboot": True,
        "ascend_driver_reboot_command": "systemctl reboot",
        # The kernel is the test host's, without headers here.
        "ascend_driver_build": False,
        "accelerator_upgrade_timeout": 300,
        **more,
    }
    return living.playbook("upgrade.yml", "-e", json.dumps(said), *words, check=False)


@pytest.fixture(scope="module")
def beside(living: NpuCluster) -> str:
    """Run a pod without an NPU."""
    living.apply(pod("beside"))
    living.wait_running("beside")
    return "beside"


def returned(living: NpuCluster, before: dict[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Wait until all pods with claims have ready replacements; return the containers."""
    wait_ready(living, eighth=EIGHTHS, **RUNNING)
    found = containers(living)
    assert set(found) & set(before) <= {"beside"} and len(found) == len(before), (before, found)
    return found


def test_driver_change_without_consent_names_the_pods_before_any_step(
    living: NpuCluster, node: str, beside: str, packages: dict[str, Path]
) -> None:
    before = containers(living)
    answer = upgrade(living, packages[NEWER_DRIVER], "--check", "--diff")
    assert not answer.failed and NEWER_DRIVER in answer.output, answer.output
    having = set(before) - {beside}
    assert all(f"pod default/{name} is evicted" in answer.output for name in having), answer.output
    assert f"pod default/{beside} is" not in answer.output
    silent = upgrade(living, packages[NEWER_DRIVER])
    assert silent.failed and "Nothing was changed" in silent.output, silent.output
    assert containers(living) == before and installed_driver(living, node) == DRIVER and not rules(living)


def test_driver_is_changed_on_drained_npus_and_the_pods_run_again(
    living: NpuCluster, node: str, beside: str, packages: dict[str, Path]
) -> None:
    before, cut, boot = containers(living), templates(living, node), boot_id(living, node)
    assert published_version(living, node) - {""} == {DRIVER}
    done = upgrade(living, packages[NEWER_DRIVER], accelerator_upgrade_evict=True)
    assert not done.failed, done.output
    assert installed_driver(living, node) == NEWER_DRIVER and boot_id(living, node) == boot
    assert published_version(living, node) - {""} == {NEWER_DRIVER}, (
        "the taint is removed only after the new version is published"
    )
    assert not rules(living)
    after = returned(living, before)
    assert after[beside] == before[beside], "a pod without an NPU was affected"
    assert templates(living, node) == cut
    again = upgrade(living, packages[NEWER_DRIVER], accelerator_upgrade_evict=True)
    assert (again.failed, again.changed) == (0, 0), again.output
    assert containers(living) == after


def test_driver_missing_after_the_reboot_is_rolled_back(
    living: NpuCluster, node: str, beside: str, packages: dict[str, Path]
) -> None:
    before, cut, boot = containers(living), templates(living, node), boot_id(living, node)
    words: dict[str, Any] = {"accelerator_upgrade_evict": True, "accelerator_upgrade_timeout": 90}
    failed = upgrade(living, packages[NOT_TAKEN], **words)
    assert failed.failed and f"Restored the driver {NEWER_DRIVER}" in failed.output, failed.output
    assert boot_id(living, node) != boot and installed_driver(living, node) == NEWER_DRIVER
    living.wait_registered(node)
    living.wait(
        "the previous driver version is published", lambda: published_version(living, node) - {""} == {NEWER_DRIVER}
    )
    assert not rules(living)
    living.delete(pod(beside))
    returned(living, {name: each for name, each in before.items() if name != beside})
    assert templates(living, node) == cut
