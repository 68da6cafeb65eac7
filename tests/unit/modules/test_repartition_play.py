# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run one operation of the playbook repartition with Ansible on simulated boards, to its end and back from failing steps.

For each possible fault at each step, see test_repartition_faults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition.progress import StartedStep, parse
from repartition_world import (
    DRIVER,
    FIRST,
    KILLED,
    LAYOUT,
    SECOND,
    SETTINGS,
    Cluster,
    Json,
    planned,
    play_all,
    play_operation,
)

if TYPE_CHECKING:
    from conftest import Node


@pytest.fixture
def cluster(node: Node) -> Iterator[Cluster]:
    with Cluster(node) as server:
        yield server


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "kubelet/plugins/gpu.nvidia.com"
    directory.mkdir(parents=True)
    return directory


def started_steps(state: Path) -> tuple[StartedStep, ...]:
    """Return the steps that the node driver reports as Events."""
    return parse((state / "repartition-steps.json").read_text())


def test_operation_completes(node: Node, cluster: Cluster, tmp_path: Path, state: Path) -> None:
    node.layout(FIRST)
    operation = planned(node, cluster, tmp_path)
    assert len(operation["published"]) == 2
    done = play_operation(node, cluster, tmp_path, operation)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(profile for profile, _start in node.partitions()[0]) == ["1g.10gb"] * 2 + ["2g.20gb", "3g.40gb"]
    assert not cluster.rules and cluster.writes == ["POST", "POST", "DELETE", "DELETE"]
    assert not (state / "repartition.json").exists()
    assert [each.step for each in started_steps(state)] == ["draining", "applying", "publishing", "released"]


@pytest.mark.prove
def test_reboot_between_operations_restores_the_layout_of_each_device(
    node: Node, cluster: Cluster, tmp_path: Path, state: Path
) -> None:
    """Ansible is killed before the second of two operations: after a reboot the first GPU has the new layout, the second the previous one."""

    def on(index: int, rule: Json) -> Json:
        return {**rule, "match": {"index": index}}

    former = [on(0, FIRST), on(1, FIRST)]
    node.layout(*former)
    file = tmp_path / "kubelet" / LAYOUT
    file.write_text(json.dumps(former), encoding="utf-8")
    holds: list[str] = []

    def second(task: str) -> bool:
        holds.extend([task] * (task == "Block new claims on the device in the driver"))
        return len(holds) == 2

    cluster.at_step = second
    assert play_all(node, cluster, tmp_path, on(0, SECOND), on(1, SECOND)).returncode == KILLED
    between = node.partitions()
    assert between[0] != between[1] and not (state / "repartition.json").exists()
    # The reboot: no partition survives it, and the layout unit applies the saved layout.
    node.reboot()
    node.layout(*json.loads(file.read_text(encoding="utf-8")))
    assert node.partitions() == between


class Occupied(Cluster):
    """A cluster in which a claim holds one of the partitions to delete, and does not release it."""

    device = ""

    def answer(self, method: str, path: str, body: Json | None, query: str) -> tuple[int, Json]:
        if path.endswith("/resourceclaims"):
            name = {"name": "kept", "namespace": "default", "uid": "u"}
            result = {"request": "device", "driver": DRIVER, "pool": "a", "device": self.device}
            status = {"allocation": {"devices": {"results": [result]}}}
            return 200, {"items": [{"metadata": name, "spec": {}, "status": status}]}
        return super().answer(method, path, body, query)


@pytest.mark.prove
def test_operation_pending_claim_is_named(node: Node, tmp_path: Path, state: Path) -> None:
    node.layout(FIRST)
    with Occupied(node) as cluster:
        operation = planned(node, cluster, tmp_path)
        cluster.device = operation["published"][0]
        done = play_operation(node, cluster, tmp_path, operation)
    assert done.returncode != 0 and not cluster.rules and not (state / "repartition.json").exists(), done.stdout
    _before, _line, message = done.stdout.partition('device 0: "Drain the devices to remove" failed: ')
    assert "claim default/kept" in message and "the device is available" in message, done.stdout
    assert "The taint stays" not in message, message


@pytest.mark.prove
def test_operation_failure_is_rolled_back_and_named(node: Node, cluster: Cluster, tmp_path: Path, state: Path) -> None:
    node.layout(FIRST)
    before = node.partitions()[0]
    operation = planned(node, cluster, tmp_path)
    node.simulator("fault", "0", "call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "19", "nth", "1")
    done = play_operation(node, cluster, tmp_path, operation)
    assert done.returncode != 0
    assert "Change the layout of the GPU" in done.stdout and "previous layout was restored" in done.stdout, done.stdout
    assert node.partitions()[0] == before
    assert not cluster.rules and not (state / "repartition.json").exists()
    assert [each.step for each in started_steps(state)] == ["draining", "applying", "reverting", "failed"]
    assert all(each.reason.startswith('"Change the layout of the GPU" failed: ') for each in started_steps(state)[2:])


@pytest.mark.prove
def test_operation_without_api_server_names_step_and_next_run_completes(
    node: Node, cluster: Cluster, tmp_path: Path, state: Path
) -> None:
    node.layout(FIRST)

    def stop_server(task: str) -> bool:
        cluster.away |= task == "Remove the taint of the device"
        return False

    cluster.at_step = stop_server
    done = play_all(node, cluster, tmp_path, SECOND)
    assert done.returncode != 0
    assert '"Remove the taint of the device" failed' in done.stdout, done.stdout
    assert len(cluster.rules) == 2 and not (state / "repartition.json").exists()
    cluster.away, cluster.at_step = False, lambda _task: False
    again = play_all(node, cluster, tmp_path, SECOND)
    assert again.returncode == 0, again.stdout
    assert not cluster.rules and "lifted when this one is done" in again.stdout


@pytest.mark.prove
def test_plan_output_is_applied(node: Node, cluster: Cluster, tmp_path: Path, state: Path) -> None:
    """Play a plan as plan.yml does: new partitions are added to the existing ones, on the planned GPUs only."""
    node.layout(FIRST)
    before, file = node.partitions()[0], tmp_path / "layouts.yml"
    answer = node.module("accelerator_report", {"layout": [FIRST], "vendor": ["nvidia"]})["ansible_facts"]
    options = {
        "nodes": {"a": answer["accelerator_report"]},
        "wanted": [{"name": "half", "profile": "3g.40gb", "count": 4}],
        "hosts": {"a": "a"},
        "cluster": False,
        "dest": str(file),
    }
    plan = node.module("fleet_plan", options)["plan"]
    assert [(each["name"], each["served"]) for each in plan["wanted"]] == [("half", 4)], plan
    layouts = yaml.safe_load(file.read_text(encoding="utf-8"))
    done = play_all(node, cluster, tmp_path, FIRST, **layouts)
    assert done.returncode == 0, done.stdout + done.stderr
    large = sum(profile == "3g.40gb" for parts in node.partitions().values() for profile, _start in parts)
    assert large == 4 and not cluster.rules and not (state / "repartition.json").exists()
    assert node.partitions()[0] == before, "three unpartitioned GPUs are enough"
    assert [each.step for each in started_steps(state)][-1] == "released"


@pytest.mark.prove
def test_killed_run_is_resumed(node: Node, cluster: Cluster, tmp_path: Path, state: Path) -> None:
    node.layout(FIRST)
    cluster.at_step = lambda task: task == "Verify the layout of the GPU"
    assert play_all(node, cluster, tmp_path, SECOND).returncode == KILLED
    assert len(cluster.rules) == 2
    assert json.loads((state / "repartition.json").read_text())["step"] == "applying"
    cluster.at_step = lambda _task: False
    # The silicon has the desired layout: the operation only has to be closed.
    again = play_all(node, cluster, tmp_path, SECOND)
    assert again.returncode == 0, again.stdout
    assert not cluster.rules and not (state / "repartition.json").exists()


def ecc(node: Node, index: int) -> bool:
    return bool(node.module("nvidia_gpu", {"settings": [{"match": {"index": index}}]})["devices"][0]["before"]["ecc"])


ECC_OFF = {
    "settings": [{"match": {"index": 0}, "ecc": False, "power_limit": 500}],
    "settings_reset": "when_needed",
}


@pytest.mark.prove
def test_reboot_between_operations_keeps_the_settings_of_each_device(
    node: Node, cluster: Cluster, tmp_path: Path, state: Path
) -> None:
    """Ansible is killed before the second of two operations: after a reboot ECC of the first GPU is as desired, of the second as before."""

    def on(index: int) -> Json:
        return {**FIRST, "match": {"index": index}}

    node.layout(on(0), on(1))
    before = {"match": {}, "ecc": True, "power_limit": 500}
    file = tmp_path / "kubelet" / SETTINGS
    file.write_text(json.dumps([before]), encoding="utf-8")
    options = {"exclusive": True, "reset": "never", "record": str(tmp_path / "kubelet/settings-nvidia.json")}
    options["state_path"] = str(state / "state.db")
    node.module("nvidia_gpu", {**options, "settings": [before]})
    holds: list[str] = []

    def second(task: str) -> bool:
        holds.extend([task] * (task == "Block new claims on the device in the driver"))
        return len(holds) == 2

    cluster.at_step = second
    desired = {"match": {}, "ecc": False, "power_limit": 400}
    variables = {
        "accelerator_nvidia_settings_enabled": True,
        "nvidia_settings_rules": [desired],
        "nvidia_settings_reset": "when_needed",
    }
    done = play_all(node, cluster, tmp_path, on(0), on(1), **variables)
    assert done.returncode == KILLED, done.stdout
    assert [ecc(node, 0), ecc(node, 1)] == [False, True]
    node.reboot()
    # The unit applies the saved settings.
    applied = node.module("nvidia_gpu", {**options, "settings": json.loads(file.read_text(encoding="utf-8"))})
    devices = [each for each in applied["devices"] if each["index"] < 2]
    assert not any(each["reset_required"] for each in devices), devices
    assert [(each["after"]["ecc"], each["after"]["power_limit"]) for each in devices] == [(False, 400), (True, 500)]


@pytest.mark.prove
def test_operation_ecc_change_drains_resets_and_restores_layout(
    node: Node, cluster: Cluster, tmp_path: Path, state: Path
) -> None:
    before = node.layout(FIRST)["after"][0]["partitions"]
    operation = planned(node, cluster, tmp_path, FIRST, FIRST, **ECC_OFF)
    assert operation["resets"] and len(operation["published"]) == 5 and ecc(node, 0) and ecc(node, 1)
    done = play_operation(node, cluster, tmp_path, operation)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not ecc(node, 0) and ecc(node, 1)
    assert node.partitions()[0] == sorted((each["profile"], each["placement"]["start"]) for each in before)
    assert not cluster.rules and not (state / "repartition.json").exists()
    options = {"layout": [FIRST], "former_layout": [FIRST], "kubelet_root": str(tmp_path / "kubelet"), **ECC_OFF}
    assert node.module("device_repartition", {**options, "vendor": ["nvidia"]})["operations"] == []


@pytest.mark.prove
def test_operation_layout_failure_after_ecc_restores_both(
    node: Node, cluster: Cluster, tmp_path: Path, state: Path
) -> None:
    node.layout(FIRST)
    before = node.partitions()[0]
    operation = planned(node, cluster, tmp_path, SECOND, FIRST, **ECC_OFF)
    node.simulator("fault", "0", "call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "19", "nth", "1")
    done = play_operation(node, cluster, tmp_path, operation)
    assert done.returncode != 0 and "previous layout was restored" in done.stdout, done.stdout
    assert ecc(node, 0) and node.partitions()[0] == before
    assert not cluster.rules and not (state / "repartition.json").exists()
