# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The layout of a node in the site playbook: that of the fleet file, or those of the vendors' roles, each for its own devices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play

SITE = Path(__file__).resolve().parents[3] / "playbooks/site.yml"
TOLD = "{{ {'layout': accelerator_node_layout, 'vendors': accelerator_vendors_of_node, 'runtimes': runtimes} | to_json | b64encode }}"
MIG: list[dict[str, Any]] = [{"match": {}, "mode": "dynamic"}]
NPUS: list[dict[str, Any]] = [{"match": {"index": 0}, "mode": "static", "partitions": {"vir02": 1}}]
FLEET = [{"hosts": "named", "layout": [{"match": {}, "mode": "whole"}]}]
BOTH = {"accelerator_vendors": ["nvidia", "ascend"]}
RUNTIMES = {"accelerator_ascend_runtime_enabled": True, "accelerator_nvidia_container_toolkit_enabled": True}
HOSTS: dict[str, dict[str, Any]] = {
    "bare": {"has": {}},
    "gpus": {"has": {"nvidia": ["0"]}, "nvidia_mig_layout": MIG, **BOTH, **RUNTIMES},
    "npus": {"has": {"ascend": ["1"]}, "ascend_vnpu_layout": NPUS, **BOTH, **RUNTIMES},
    "mixed": {"has": {"nvidia": ["0"], "ascend": ["1"]}, "nvidia_mig_layout": MIG, "ascend_vnpu_layout": NPUS, **BOTH},
    "named": {
        "has": {"ascend": ["1"]},
        "accelerator_container_runtime_enabled": False,
        "nvidia_mig_layout": MIG,
        "accelerator_layouts": FLEET,
    },
}
OF_NPUS = [{"match": {"index": 0, "vendor": "ascend"}, "mode": "static", "partitions": {"vir02": 1}}]


def test_layout_of_a_node_and_its_vendors(tmp_path: Path) -> None:
    _check, read, prepare, *_others = yaml.safe_load(SITE.read_text("utf-8"))
    names = ("accelerator_vendors_of_fleet", "accelerator_vendors_of_node")
    told_of = {name: prepare["vars"][name] for name in names}
    find = read["tasks"][-2:]
    (runtimes,) = (task["loop"] for task in prepare["tasks"] if "container_runtime" in str(task.get("loop")))
    told_of["runtimes"] = runtimes
    tell = {"ansible.builtin.debug": {"msg": TOLD}, "vars": told_of}
    hosts = {name: {"accelerator_node": {"devices": each["has"]}, **each} for name, each in HOSTS.items()}
    played = play(tmp_path, [*find, tell], hosts)
    assert set(played.messages) == set(HOSTS), played.output
    assert {name: each["layout"] for name, each in played.messages.items()} == {
        "bare": [],
        "gpus": MIG,
        "npus": OF_NPUS,
        # A rule for all devices of one vendor does not apply to the other vendor's.
        "mixed": OF_NPUS + MIG,
        "named": FLEET[0]["layout"],
    }
    assert {name: each["vendors"] for name, each in played.messages.items()} == {
        "bare": ["nvidia"],
        "gpus": ["nvidia"],
        "npus": ["ascend"],
        "mixed": ["nvidia", "ascend"],
        "named": ["nvidia"],
    }
    # The vendor's own runtime is installed only on request, and only on nodes that can use it.
    assert {name: each["runtimes"] for name, each in played.messages.items()} == {
        "bare": ["container_runtime"],
        "gpus": ["container_runtime", "nvidia_container_toolkit"],
        "npus": ["container_runtime", "ascend_runtime"],
        "mixed": ["container_runtime"],
        "named": [],
    }


@pytest.mark.parametrize("playbook", ["site", "repartition", "tasks/query_nodes"])
def test_layouts_of_a_playbook_that_imports_it_are_used(tmp_path: Path, playbook: str) -> None:
    """``hostvars`` has no variables of ``import_playbook``: the layouts of the importing playbook are used nevertheless."""
    plays = yaml.safe_load((SITE.parent / f"{playbook}.yml").read_text("utf-8"))
    tasks = [task for each in plays for task in each.get("tasks", [each])]
    (first,) = (
        number for number, task in enumerate(tasks) if task["name"] == "Find each node's entry in the fleet file"
    )
    tell = {"ansible.builtin.debug": {"msg": "{{ {'layout': accelerator_node_layout} | to_json | b64encode }}"}}
    variables = {"accelerator_layouts": [{"hosts": "a", "layout": MIG}, *FLEET]}
    hosts: dict[str, dict[str, Any]] = {"a": {}, "named": {"accelerator_layouts": []}, "other": {}}
    played = play(tmp_path, [*tasks[first : first + 2], tell], hosts, imported_with=variables)
    found = {name: each["layout"] for name, each in played.messages.items()}
    assert found == {"a": MIG, "named": FLEET[0]["layout"], "other": []}, played.output


def test_removal_removes_the_vendors_runtime_before_it_restores_settings() -> None:
    plays = yaml.safe_load(SITE.with_name("remove.yml").read_text("utf-8"))
    loops = re.findall(r"'loop': \"(.*?)\", 'loop_control'", str(plays))
    (loop,) = (each for each in loops if "container_runtime" in each)
    assert loop.index("ascend_runtime'") < loop.index("'container_runtime'")
    assert loop.index("'nvidia_container_toolkit'") < loop.index("'container_runtime'")
    (drivers,) = (each for each in loops if "nvidia_driver" in each)
    assert drivers.index("'nvidia_fabric_manager'") < drivers.index("'nvidia_driver'"), (
        "what needs the driver goes first"
    )


def test_node_is_queried_again_only_after_a_driver_change(tmp_path: Path) -> None:
    """The facts from before the driver installation stay valid if no driver changed, so the node is queried only after a change."""
    _check, _read, prepare, *_others = yaml.safe_load(SITE.read_text("utf-8"))
    (again,) = (task for task in prepare["tasks"] if task.get("register") == "accelerator_node_asked_again")
    assert again["when"] == "accelerator_drivers_changed | bool"
    quiet = {"steps": [], "reboot_required": False}
    skipped = {"changed": False, "skipped": True}
    done, answer = {"changed": True}, {"devices": {"nvidia": ["1"]}}
    requested = {"accelerator_node_asked": {"devices": {}}}
    hosts: dict[str, dict[str, Any]] = {
        "no-role": {},
        "quiet": {
            "__nvidia_driver_plan": quiet,
            "__nvidia_driver_result": skipped,
            "__nvidia_fabric_manager_plan": quiet,
            "accelerator_node_asked_again": skipped,
        },
        "exchanged": {
            "__nvidia_driver_plan": quiet,
            "__nvidia_driver_result": done,
            "accelerator_node_asked_again": answer,
        },
        "restarted": {
            "__nvidia_driver_plan": {"steps": [], "reboot_required": True},
            "__nvidia_driver_result": skipped,
        },
        "foreseen": {"__ascend_driver_plan": {"steps": ["install"], "reboot_required": False}},
        "fabric": {"__nvidia_fabric_manager_plan": quiet, "__nvidia_fabric_manager_result": done},
    }
    names = ("accelerator_node", "accelerator_driver_plans", "accelerator_drivers_changed")
    told_of = {name: prepare["vars"][name] for name in names}
    expression = (
        "{{ {'again': accelerator_drivers_changed | bool, 'has': accelerator_node.devices} | to_json | b64encode }}"
    )
    tell = {"ansible.builtin.debug": {"msg": expression}, "vars": told_of}
    played = play(tmp_path, [tell], {name: {**requested, **each} for name, each in hosts.items()})
    assert set(played.messages) == set(hosts), played.output
    assert {name for name, each in played.messages.items() if each["again"]} == {
        "exchanged",
        "restarted",
        "foreseen",
        "fabric",
    }
    assert played.messages["exchanged"]["has"] == answer["devices"] and played.messages["quiet"]["has"] == {}
