# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What one host of a cluster writes and removes for all hosts of the cluster in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from playing import Played, play

ROLE = Path(__file__).resolve().parents[3] / "roles/dra_driver"
Task = dict[str, Any]


def run(folder: Path, hosts: dict[str, dict[str, Any]], *tasks: Task) -> Played:
    """Run tasks over hosts with the variables of the role, after it has chosen the host for each cluster."""
    (folder / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    first: list[Task] = [
        {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")},
        {"ansible.builtin.include_tasks": str(ROLE / "tasks/leaders.yml")},
    ]
    played = play(folder, [*first, *tasks], {name: {**defaults, **each} for name, each in hosts.items()})
    assert played.status == 0, played.output
    return played


def told(expression: str) -> Task:
    return {"ansible.builtin.debug": {"msg": "{{ " + expression + " | to_json | b64encode }}"}}


def test_removal_includes_the_slices_of_the_drivers_of_all_hosts(tmp_path: Path) -> None:
    drivers = {"a1": "gpu.nvidia.com", "a2": "npu.huawei.com"}
    slices = {
        node: {"slices": [{"ours": True, "driver": name, "object": node} for name in (driver, "gpu.example.com")]}
        for node, driver in drivers.items()
    }
    hosts = {
        node: {"dra_driver_node_name": node, "dra_driver_names": [driver], "__dra_driver_left": {"nodes": slices}}
        for node, driver in drivers.items()
    }
    assert run(tmp_path, hosts, told("__dra_driver_absent_slices")).told["a1"] == ["a1", "a2"]
