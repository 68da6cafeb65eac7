# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The report's messages, the meaning of the eviction option, and no change by the playbook before its query."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play

from tests.unit.ansible_process import run_ansible

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
            "managed": False,
            "nodes": ["a"],
            "way": "affinity",
            "label": "",
            "owner": "",
        },
        {"namespace": "k", "name": "ours", "managed": True, "nodes": ["a"], "way": "none", "label": "", "owner": ""},
    ],
    "nodes": {"a": {"done": False, "steps": [{"text": "first"}, {"text": "second"}]}, "b": {"done": True, "steps": []}},
    "leftovers": ["a taint"],
    "blocked": ["another device plugin"],
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
    "blocked by: another device plugin",
]
EXPRESSION = (
    "{{ {'lines': __device_plugin_migration_lines, 'evicts': __device_plugin_migration_evicts | bool,"
    " 'accepts': __device_plugin_migration_accepts} | to_json | b64encode }}"
)


def test_report_and_eviction_option_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    common = {"device_plugin_migration_accept": ["replicas"], "__device_plugin_migration_report": FOUND}
    words = {"asked": "", "yes": True, "no": False, "text": "true"}
    hosts = {name: {**common, "device_plugin_migration_evict": word} for name, word in words.items()}
    tasks = [{"include_vars": {"file": str(ROLE / "vars/main.yml")}}, {"debug": {"msg": EXPRESSION}}]
    played = play(tmp_path, tasks, hosts)
    assert played.status == 0, played.output
    assert played.messages["asked"]["lines"] == LINES
    assert {name: (each["evicts"], each["accepts"]) for name, each in played.messages.items()} == {
        "asked": (False, ["replicas"]),
        "yes": (True, ["replicas"]),
        "no": (False, ["replicas", "no-consent"]),
        "text": (True, ["replicas"]),
    }


GOES = {"steps": ["first", "second"], "blocked_by": ["default/p", "default/q"], "kind": "own", "up_to_date": False}
SETTLED = {"steps": [], "blocked_by": [], "kind": "foreign", "up_to_date": True}
SOCKET = "/var/lib/kubelet/device-plugins/nvidia-gpu.sock"
#: By host: the state, the result of the earlier query, and the message.
SAID: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "goes": ("drained", GOES, ["first", "second", "blocked by the pods default/p, default/q"]),
    "returns": ("in_service", {**GOES, "steps": ["first"], "blocked_by": []}, ["first", "no pods block the change"]),
    "there": ("in_service", SETTLED, []),
    "socket": ("drained", SETTLED, [f"remove {SOCKET}"]),
    "not-its-state": ("in_service", SETTLED, []),
}


def test_plan_lists_changes_and_blocking_pods(tmp_path: Path) -> None:
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
        "{{ {'said': __device_plugin_migration_messages, 'sockets': __device_plugin_migration_leaves_sockets | bool}"
        " | to_json | b64encode }}"
    )
    tasks = [{"include_vars": {"file": str(ROLE / "vars/main.yml")}}, {"debug": {"msg": expression}}]
    played = play(tmp_path, tasks, hosts)
    assert played.status == 0, played.output
    assert {name: played.messages[name]["said"] for name in SAID} == {
        name: output for name, (_s, _p, output) in SAID.items()
    }
    assert {name for name, each in played.messages.items() if each["sockets"]} == {"there", "socket", "not-its-state"}


@pytest.mark.parametrize("state", ["prepared", "drained", "in_service", "absent"])
def test_plan_precedes_the_run_and_the_run_is_skipped_without_changes(state: str) -> None:
    (whole,) = yaml.safe_load((ROLE / f"tasks/{state}.yml").read_text("utf-8"))
    determine, *others = whole["block"]
    module = "dra.accelerators.device_plugin_migration"
    assert determine["name"] == "Determine the changes" and determine["check_mode"] and not determine["changed_when"]
    (run,) = (each for each in others if module in each)
    assert run[module] == determine[module] == {"state": state}
    assert run["when"] == f"not {determine['register']}.up_to_date" and "check_mode" not in run
    output = next(number for number, each in enumerate(others) if "ansible.builtin.debug" in each)
    assert output < others.index(run)


def test_each_state_has_its_tasks() -> None:
    specs = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text("utf-8"))["argument_specs"]["main"]["options"]
    states = specs["device_plugin_migration_state"]["choices"]
    assert sorted(f"{state}.yml" for state in [*states, "main"]) == sorted(
        each.name for each in (ROLE / "tasks").iterdir()
    )


def test_node_is_drained_first_and_returned_last() -> None:
    """Both roles run only in the migration playbook: a run of ``site`` alone skips them."""
    plays = yaml.safe_load((ROOT / "playbooks/site.yml").read_text("utf-8"))
    (tasks,) = (each["tasks"] for each in plays if each["name"] == "Prepare the nodes")
    states = [(task.get("vars") or {}).get("device_plugin_migration_state") for task in tasks]
    names = [str((task.get("ansible.builtin.include_role") or {}).get("name")) for task in tasks]
    drained, returned = states.index("drained"), states.index("in_service")
    assert drained < names.index("dra.accelerators.preflight") < names.index("dra.accelerators.dra_driver") < returned
    assert all("accelerator_migration" in tasks[number]["when"] for number in (drained, returned))


def test_playbook_queries_everything_before_any_change() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/device_plugin_migration.yml").read_text("utf-8"))
    names = [task["name"] for task in plays[1]["tasks"]]
    assert names[-1] == "Create a DeviceClass for each extended resource that pods request"
    assert names.index("Fail if the migration is blocked") < names.index(
        "Reject a fleet file that contradicts the migration"
    )
    assert plays[2]["vars"]["accelerator_migration"]


@pytest.mark.parametrize("way", ["site", "driver", "none"])
def test_the_first_host_of_the_inventory_can_be_outside_the_group(tmp_path: Path, way: str) -> None:
    """The import of ``site`` starts with a check on all hosts. Its other plays run only for nodes with the way ``site``."""
    plays = yaml.safe_load((ROOT / "playbooks/device_plugin_migration.yml").read_text("utf-8"))
    (moves,) = (each for each in plays if each.get("ansible.builtin.import_playbook") == "site.yml")
    check = {"ansible.builtin.import_playbook": str(ROOT / "playbooks/check_inventory.yml")}
    run = {"ansible.builtin.debug": {"msg": "moves {{ inventory_hostname }}"}}
    nodes = {"hosts": "accelerator_nodes", "gather_facts": False}
    found = {**nodes, "tasks": [{"ansible.builtin.set_fact": {"accelerator_migration_method": way}}]}
    (tmp_path / "site.yml").write_text(yaml.safe_dump([check, {**nodes, "tasks": [run]}]), encoding="utf-8")
    (tmp_path / "play.yml").write_text(yaml.safe_dump([found, moves]), encoding="utf-8")
    hosts = {"all": {"hosts": {"bastion": {}}, "children": {"accelerator_nodes": {"hosts": {"a": {}, "b": {}}}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(hosts), encoding="utf-8")
    done = run_ansible(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", tmp_path / "hosts.yml", tmp_path / "play.yml"],
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: [bastion]" in done.stdout
    assert [f"moves {host}" in done.stdout for host in "ab"] == [way == "site"] * 2, done.stdout


def nodes_of_reports(directory: Path, number: int, hosts: dict[str, dict[str, object]]) -> dict[str, list[str]]:
    """Return by host the nodes of its report, in a play of the playbook."""
    plays = yaml.safe_load((ROOT / "playbooks/device_plugin_migration.yml").read_text("utf-8"))
    play_of = plays[number]
    report = next(
        position
        for position, task in enumerate(play_of["tasks"])
        if "device_plugin_migration_nodes" in task.get("vars", {})
    )
    kept = [task for task in play_of["tasks"][:report] if "ansible.builtin.set_fact" in task]
    if number == 4:
        kept = [task for task in plays[1]["tasks"] if "each node's name" in task["name"]] + kept
    reported = "{{ {'nodes': device_plugin_migration_nodes} | to_json | b64encode }}"
    tell = {"ansible.builtin.debug": {"msg": reported}, "vars": play_of["tasks"][report]["vars"]}
    played = play(directory, [{"vars": play_of["vars"], "block": [*kept, tell]}], hosts)
    assert played.status == 0, played.output
    return {host: each["nodes"] for host, each in played.messages.items()}


@pytest.mark.parametrize("number", [1, 4])
def test_variables_of_the_other_hosts_are_read_once_for_each_cluster(tmp_path: Path, number: int) -> None:
    """Each evaluation of a host's cluster writes a line to a file: it is evaluated once per host."""
    hosts: dict[str, dict[str, object]] = {
        name: {
            "accelerator_kubeconfig": "{{ lookup('ansible.builtin.pipe', 'echo x >> "
            + str(tmp_path / "read")
            + "; echo "
            f"/{name[0]}') }}}}",
            "accelerator_node_name": f"node-{name}",
        }
        for name in ("a1", "a2", "a3", "b1", "b2", "b3")
    }
    reported = nodes_of_reports(tmp_path, number, hosts)
    assert reported["a1"] == ["node-a1", "node-a2", "node-a3"]
    assert reported["b1"] == ["node-b1", "node-b2", "node-b3"]
    assert len((tmp_path / "read").read_text().splitlines()) == len(hosts)


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("option", ["kubeconfig", "context"])
def test_hosts_with_different_options_of_the_role_are_in_different_clusters(
    tmp_path: Path, option: str, number: int
) -> None:
    common = {"accelerator_kubeconfig": "/k", "accelerator_kubeconfig_context": "c"}
    hosts: dict[str, dict[str, object]] = {"a": {**common}, "b": {**common}, "c": {**common}}
    hosts["b"] |= {f"device_plugin_migration_{option}": "other", "device_plugin_migration_node_name": "node-b"}
    assert nodes_of_reports(tmp_path, number, hosts) == {"a": ["a", "c"], "b": ["node-b"], "c": []}
