# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the report says to people, what the word on evictions means, and that the playbook touches nothing before it has looked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "roles/device_plugin_migration"
POD = {"namespace": "default", "name": "p", "problems": [{"text": "It is a static pod."}]}
FOUND: dict[str, Any] = {
    "counts": {"pods": 1, "by_plugin": 1, "by_claims": 0},
    "resources": {"nvidia.com/gpu": {"becomes": "the same"}},
    "pods": [POD, {**POD, "name": "fine", "problems": []}],
    "workloads": [
        {"kind": "Job", "namespace": "n", "name": "j", "resources": {"nvidia.com/gpu": 2, "x/y": 1}, "problems": []}
    ],
    "quotas": [
        {"namespace": "n", "name": "q", "entries": [{"entry": "e", "used": "1", "hard": "2", "becomes": "stays"}]}
    ],
    "limit_ranges": [{"namespace": "n", "name": "l", "resources": ["nvidia.com/gpu"], "becomes": "stays"}],
    "plugins": [
        {
            "namespace": "k",
            "name": "theirs",
            "ours": False,
            "nodes": ["a"],
            "way": "affinity",
            "label": "",
            "owner": "",
        },
        {"namespace": "k", "name": "ours", "ours": True, "nodes": ["a"], "way": "none", "label": "", "owner": ""},
    ],
    "nodes": {"a": {"done": False, "steps": [{"text": "first"}, {"text": "second"}]}, "b": {"done": True, "steps": []}},
    "leftovers": ["a taint"],
    "blocked": ["somebody"],
}
LINES = [
    "1 pods ask for resources of device plugins; 1 have them from one, 0 by claims.",
    "nvidia.com/gpu becomes: the same",
    "pod default/p: It is a static pod.",
    "Job n/j (2 nvidia.com/gpu, 1 x/y): goes on unchanged",
    "ResourceQuota n/q, e (1 of 2): stays",
    "LimitRange n/l (nvidia.com/gpu): stays",
    "DaemonSet k/theirs serves device plugins on 1 nodes; it is kept off a node by its affinity",
    "node a 1. first",
    "node a 2. second",
    "node b: nothing to do",
    "left over: a taint",
    "in the way: somebody",
]
EXPRESSION = (
    "{{ {'lines': __device_plugin_migration_lines, 'evicts': __device_plugin_migration_evicts | bool,"
    " 'accepts': __device_plugin_migration_accepts} | to_json | b64encode }}"
)


def test_the_report_and_the_word_on_evictions(tmp_path: Path) -> None:
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    common = {"device_plugin_migration_accept": ["replicas"], "__device_plugin_migration_report": FOUND}
    words = {"asked": "", "yes": True, "no": False, "text": "true"}
    hosts = {name: {**common, "device_plugin_migration_evict": word} for name, word in words.items()}
    tasks = [{"include_vars": {"file": str(ROLE / "vars/main.yml")}}, {"debug": {"msg": EXPRESSION}}]
    played = play(tmp_path, tasks, hosts)
    assert played.status == 0, played.output
    assert played.told["asked"]["lines"] == LINES
    assert {name: (each["evicts"], each["accepts"]) for name, each in played.told.items()} == {
        "asked": (False, ["replicas"]),
        "yes": (True, ["replicas"]),
        "no": (False, ["replicas", "no-consent"]),
        "text": (True, ["replicas"]),
    }


GOES = {"steps": ["first", "second"], "in_the_way": ["default/p", "default/q"], "kind": "own", "settled": False}
SETTLED = {"steps": [], "in_the_way": [], "kind": "foreign", "settled": True}
SOCKET = "/var/lib/kubelet/device-plugins/nvidia-gpu.sock"
#: By host: the state, what the look before has found of it, and what is said.
SAID: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "goes": ("closed", GOES, ["first", "second", "in the way are the pods default/p, default/q"]),
    "opens": ("open", {**GOES, "steps": ["first"], "in_the_way": []}, ["first", "in the way is nobody"]),
    "there": ("open", SETTLED, []),
    "socket": ("closed", SETTLED, [f"remove {SOCKET}"]),
    "not-its-state": ("open", SETTLED, []),
}


def test_what_would_change_and_who_is_in_the_way(tmp_path: Path) -> None:
    hosts: dict[str, dict[str, Any]] = {
        name: {
            "device_plugin_migration_state": state,
            "device_plugin_migration_direction": "forward",
            "__device_plugin_migration_plan": plan,
        }
        for name, (state, plan, _said) in SAID.items()
    }
    for name in ("socket", "not-its-state"):
        hosts[name]["__device_plugin_migration_leftovers"] = {"removed": [SOCKET]}
    hosts["back"] = {**hosts["there"], "device_plugin_migration_direction": "back"}
    expression = (
        "{{ {'said': __device_plugin_migration_words, 'sockets': __device_plugin_migration_leaves_sockets | bool}"
        " | to_json | b64encode }}"
    )
    tasks = [{"include_vars": {"file": str(ROLE / "vars/main.yml")}}, {"debug": {"msg": expression}}]
    played = play(tmp_path, tasks, hosts)
    assert played.status == 0, played.output
    assert {name: played.told[name]["said"] for name in SAID} == {name: said for name, (_s, _p, said) in SAID.items()}
    assert {name for name, each in played.told.items() if each["sockets"]} == {"there", "socket", "not-its-state"}


@pytest.mark.parametrize("state", ["prepared", "closed", "open", "absent"])
def test_what_would_change_comes_first_and_the_run_is_left_out_where_nothing_would(state: str) -> None:
    (whole,) = yaml.safe_load((ROLE / f"tasks/{state}.yml").read_text("utf-8"))
    look, *others = whole["block"]
    module = "dra.accelerators.device_plugin_migration"
    assert look["name"] == "See what would change" and look["check_mode"] and not look["changed_when"]
    (run,) = (each for each in others if module in each)
    assert run[module] == look[module] == {"state": state}
    assert run["when"] == f"not {look['register']}.settled" and "check_mode" not in run
    said = next(number for number, each in enumerate(others) if "ansible.builtin.debug" in each)
    assert said < others.index(run)


def test_each_state_has_its_tasks() -> None:
    specs = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text("utf-8"))["argument_specs"]["main"]["options"]
    states = specs["device_plugin_migration_state"]["choices"]
    assert sorted(f"{state}.yml" for state in [*states, "main"]) == sorted(
        each.name for each in (ROLE / "tasks").iterdir()
    )


def test_a_node_is_closed_before_and_opened_after_everything_else() -> None:
    """And only where the playbook of the move says so: a run of ``site`` by itself passes over both."""
    plays = yaml.safe_load((ROOT / "playbooks/site.yml").read_text("utf-8"))
    (tasks,) = (each["tasks"] for each in plays if each["name"] == "Prepare the nodes")
    states = [(task.get("vars") or {}).get("device_plugin_migration_state") for task in tasks]
    names = [str((task.get("ansible.builtin.include_role") or {}).get("name")) for task in tasks]
    closed, opened = states.index("closed"), states.index("open")
    assert closed < names.index("dra.accelerators.preflight") < names.index("dra.accelerators.dra_driver") < opened
    assert all("accelerator_migration" in tasks[number]["when"] for number in (closed, opened))


def test_everything_is_looked_at_before_anything_is_touched() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/device_plugin_migration.yml").read_text("utf-8"))
    looking = [task["name"] for task in plays[1]["tasks"]]
    assert looking[-1] == "Have a DeviceClass for each resource that pods ask for"
    assert looking.index("Refuse while something is in the way") < looking.index(
        "Refuse what the fleet file contradicts"
    )
    assert plays[2]["vars"]["accelerator_migration"]


@pytest.mark.parametrize("way", ["site", "driver", "none"])
def test_the_first_host_of_the_inventory_can_be_outside_the_group(tmp_path: Path, way: str) -> None:
    """The import of ``site`` starts with a check on all hosts; its other plays run where the way of the nodes is ``site``."""
    plays = yaml.safe_load((ROOT / "playbooks/device_plugin_migration.yml").read_text("utf-8"))
    (moves,) = (each for each in plays if each.get("ansible.builtin.import_playbook") == "site.yml")
    check = {"ansible.builtin.import_playbook": str(ROOT / "playbooks/check_inventory.yml")}
    run = {"ansible.builtin.debug": {"msg": "moves {{ inventory_hostname }}"}}
    nodes = {"hosts": "accelerator_nodes", "gather_facts": False}
    found = {**nodes, "tasks": [{"ansible.builtin.set_fact": {"accelerator_way": way}}]}
    (tmp_path / "site.yml").write_text(yaml.safe_dump([check, {**nodes, "tasks": [run]}]), encoding="utf-8")
    (tmp_path / "play.yml").write_text(yaml.safe_dump([found, moves]), encoding="utf-8")
    hosts = {"all": {"hosts": {"bastion": {}}, "children": {"accelerator_nodes": {"hosts": {"a": {}, "b": {}}}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(hosts), encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", tmp_path / "hosts.yml", tmp_path / "play.yml"],
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: [bastion]" in done.stdout
    assert [f"moves {host}" in done.stdout for host in "ab"] == [way == "site"] * 2, done.stdout
