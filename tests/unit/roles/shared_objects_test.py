# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What one host of a cluster writes and removes for all hosts of the cluster in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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


REMOVAL = "Remove disabled FlowSchemas and priority levels"


@pytest.mark.parametrize("file", ["present.yml", "pod.yml"])
@pytest.mark.parametrize(
    ("hosts", "removed"),
    [
        ({"a1": ("a", True), "a2": ("a", False)}, set()),
        ({"a1": ("a", False), "a2": ("a", True)}, set()),
        ({"a1": ("a", False), "a2": ("a", False), "b1": ("b", True)}, {"a1"}),
        ({"a1": ("a", False), "b1": ("b", False), "b2": ("b", False)}, {"a1", "b1"}),
    ],
)
def test_flow_schemas_are_removed_where_no_host_of_the_cluster_wants_them(
    tmp_path: Path, file: str, hosts: dict[str, tuple[str, bool]], removed: set[str]
) -> None:
    """Once for each cluster, and a run writes them or removes them."""
    (remove,) = yaml.safe_load((ROLE / "tasks/no_flow_control.yml").read_text("utf-8"))
    del remove["kubernetes.core.k8s"]
    shown = {**remove, "ansible.builtin.debug": {"msg": "removes {{ inventory_hostname }}"}}
    (tmp_path / "remove.yml").write_text(yaml.safe_dump([shown]), encoding="utf-8")
    tasks = yaml.safe_load((ROLE / "tasks" / file).read_text("utf-8"))
    (call,) = (each for each in tasks if each["name"] == REMOVAL)
    call = {**call, "ansible.builtin.include_tasks": str(tmp_path / "remove.yml")}
    flows = "selectattr('kind', 'equalto', 'FlowSchema') | list | length"
    variables: dict[str, dict[str, Any]] = {
        name: {
            "accelerator_kubeconfig": cluster,
            "dra_driver_kubeconfig": cluster,
            "dra_driver_node_name": name,
            "dra_driver_flow_control": wanted,
            "__dra_driver_token_defaults": {"audiences": ["api"]},
        }
        for name, (cluster, wanted) in hosts.items()
    }
    played = run(tmp_path, variables, call, told(f"[__dra_driver_leads, __dra_driver_shared_objects | {flows}]"))
    assert {name for name in hosts if f"removes {name}" in played.output} == removed, played.output
    leaders = {name: bool(written) for name, (leads, written) in played.told.items() if leads}
    assert {name for name, written in leaders.items() if not written} == removed
