# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Roles on hosts of two clusters: each cluster is read and written once, and a host whose leader failed does not continue.

The tasks are those of the roles. Modules return canned answers instead of connecting to a cluster or to a host.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import Played, play

ROLES = Path(__file__).resolve().parents[3] / "roles"
#: Modules that act on the controller without a cluster.
REAL = ("assert", "fail", "set_fact", "include_tasks", "debug")
KEPT = ("name", "when", "register", "loop", "loop_control", "run_once", "vars", "tags")
ACTION = """
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        return dict(self._task.args)
"""
HOSTS = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}
Task = dict[str, Any]


def canned(tasks: list[Task], answers: dict[str, Any]) -> list[Task]:
    """Return the tasks of a file with answers instead of modules. The key of an answer is the name of the registered variable or of the module."""
    found = []
    for task in tasks:
        kept = {key: task[key] for key in KEPT if key in task}
        module = next((key for key in task if key.startswith(("ansible.", "dra.", "kubernetes."))), "")
        if not module:
            kept |= {key: canned(task[key], answers) for key in ("block", "rescue") if key in task}
        elif module.removeprefix("ansible.builtin.") in REAL or module == "dra.accelerators.host_answer":
            kept[module] = task[module]
        else:
            kept["answer"] = {"changed": False, **answers.get(str(task.get("register", module)), {})}
        found.append(kept)
    return found


def run(
    directory: Path, role: str, variables: dict[str, Any], answers: dict[str, Any], *more: Task, limit: str = "all"
) -> Played:
    """Run a role on two hosts of each cluster. With one fork the hosts answer in order, and so included files run in that order."""
    copy = directory / "roles" / role
    for part in ("defaults", "vars", "templates", "files"):
        if (ROLES / role / part).exists():
            copy.mkdir(parents=True, exist_ok=True)
            (copy / part).symlink_to(ROLES / role / part)
    (copy / "tasks").mkdir()
    for path in (ROLES / role / "tasks").glob("*.yml"):
        tasks = canned(yaml.safe_load(path.read_text("utf-8")), answers)
        (copy / "tasks" / path.name).write_text(yaml.safe_dump(tasks, sort_keys=False), encoding="utf-8")
    (directory / "action_plugins").mkdir()
    (directory / "action_plugins/answer.py").write_text(ACTION, encoding="utf-8")
    hosts = {name: {"accelerator_kubeconfig": f"/{cluster}", **variables} for name, cluster in HOSTS.items()}
    include = {"name": "Run", "ansible.builtin.include_role": {"name": role}}
    return play(directory, [include, *more], hosts, "--limit", limit, "--forks", "1", group="accelerator_controllers")


def ordered(played: Played) -> list[tuple[str, str]]:
    """Return the tasks with the hosts that ran them, in order, including failed ones."""
    found: list[tuple[str, str]] = []
    task = ""
    for line in played.output.splitlines():
        task = next(iter(re.findall(r"^TASK \[(?:\S+ : )?(.*?)\] \*", line)), task)
        found += [(task, host) for host in re.findall(r"^(?:ok|changed|fatal|failed): \[(\w+)", line)]
    return found


def ran(played: Played) -> dict[str, list[str]]:
    """Return by task the hosts that ran it, sorted, including those where it failed."""
    found: dict[str, set[str]] = {}
    for task, host in ordered(played):
        found.setdefault(task, set()).add(host)
    return {name: sorted(hosts) for name, hosts in found.items()}


NODE = {
    "metadata": {"name": "{{ __dra_controller_peer | default('n') }}"},
    "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}], "conditions": []},
}
CONTROLLER: dict[str, Any] = {
    "__dra_controller_host": {
        "programs": {
            "release": "1",
            "environment": "e",
            "proven": {"controller": {"release": "1", "environment": "e"}},
        },
        "kubelet": {"cluster": "", "kubeconfig": ""},
    },
    "__dra_controller_nodes": {"resources": [NODE]},
    "__dra_controller_namespace_query": {"resources": [{}]},
    "__dra_controller_planes": {"resources": [{}]},
    "__dra_controller_authority": {"ca_bundle": "Q0E="},
    "__dra_controller_configured": {"resources": []},
    "__dra_controller_stat": {"stat": {"exists": False}},
    "__dra_controller_token": {"token": "t"},
    "__dra_controller_running": {"stdout_lines": []},
    "__dra_controller_found": {"stdout_lines": []},
    "__dra_controller_removed": {},
    "ansible.builtin.getent": {"ansible_facts": {"getent_passwd": {"dra-controller": None}}},
    "__dra_controller_webhooks": {"objects": [{"kind": "ValidatingWebhookConfiguration"}]},
    "__dra_controller_deleted": {"objects": [{"kind": "ClusterRole"}]},
    "__dra_controller_after_deletion": {"objects": []},
}
SERVICE = {"dra_controller_api_server": "https://10.0.0.9:6443", "dra_controller_flow_control": False}
#: The tasks that read or write objects of the cluster, by state and form.
WRITES = {
    "service": [
        "Query the controller's namespace",
        "Read the default audiences of tokens",
        "Write the controller's rights",
        "Query the objects to delete",
        "Delete the objects",
        "Create or renew the CA of the webhook",
        "Write the webhook configuration",
        "Wait until all pods are deleted",
    ],
    "deployment": [
        "Get the control-plane nodes",
        "Write the controller's rights",
        "Write the Deployment",
        "Write the webhook configuration",
        "Verify that the webhook rejects an invalid configuration",
        "Verify that one of the pods holds the Lease",
    ],
    "absent": [
        "Query the controller's webhook configuration",
        "Query the objects to delete",
        "Delete the objects",
        "Read the objects again",
    ],
}


def controller(form: str) -> dict[str, Any]:
    """Return the variables of a host for one of ``WRITES``."""
    if form == "absent":
        return {**SERVICE, "dra_controller_state": "absent"}
    if form == "service":
        return SERVICE
    return {**SERVICE, "dra_controller_deploy_as": form, "dra_controller_image": "i", "dra_controller_pod_nodes": []}


@pytest.mark.prove
@pytest.mark.parametrize("form", list(WRITES))
def test_controller_of_each_cluster_is_written_once(tmp_path: Path, form: str) -> None:
    played = run(tmp_path, "dra_controller", controller(form), CONTROLLER)
    assert played.status == 0, played.output
    found = ran(played)
    assert {name: found.get(name) for name in WRITES[form]} == {name: ["a1", "b1"] for name in WRITES[form]}, (
        played.output
    )


@pytest.mark.prove
@pytest.mark.parametrize(
    ("form", "register", "never"),
    [
        ("service", "__dra_controller_authority", "Run the controller"),
        ("service", "__dra_controller_webhook_result", "Wait until all pods are deleted"),
        ("deployment", "__dra_controller_namespace_query", "Find the controller's units"),
    ],
)
def test_controllers_whose_leader_failed_do_not_continue(tmp_path: Path, form: str, register: str, never: str) -> None:
    """The leader fails: its cluster's service is not stopped, and the Deployment is not removed. The other cluster is complete."""
    failed = {"failed": "{{ inventory_hostname == 'a1' }}", "msg": "no way"}
    answers = {**CONTROLLER, register: {**CONTROLLER.get(register, {}), **failed}}
    played = run(tmp_path, "dra_controller", controller(form), answers)
    assert set(played.failed) == {"a1", "a2"}, played.output
    assert "before it wrote" in played.failed["a2"]["msg"]
    assert set(ran(played)[never]) <= {"b1", "b2"}, played.output


@pytest.mark.prove
def test_controllers_are_restarted_one_by_one_until_one_is_not_ready(tmp_path: Path) -> None:
    """Controllers restart one by one until one is not ready: the running one continues. The other cluster is complete."""
    failed = {"failed": "{{ inventory_hostname == 'a1' }}", "msg": "no way"}
    played = run(tmp_path, "dra_controller", SERVICE, {**CONTROLLER, "__dra_controller_ready": failed})
    assert set(played.failed) == {"a1", "a2"}, played.output
    assert "the controller of a1 did not become ready" in played.failed["a2"]["msg"]
    steps = ("Run the controller", "Wait until the controller is ready")
    assert [each for each in ordered(played) if each[0] in steps] == [
        (step, host) for host in ("a1", "b1", "b2") for step in steps
    ], played.output
    found = ran(played)
    assert (
        found["Write the unit, the configuration, and the identity"]
        == found["Run the controller"]
        == ["a1", "b1", "b2"]
    )
    assert found["Write the webhook configuration"] == ["b1"], played.output


@pytest.mark.prove
def test_removal_of_some_controllers_removes_their_webhooks_alone(tmp_path: Path) -> None:
    """The shared objects stay in the cluster with a host outside of the run."""
    webhooks = [
        {"name": f"{name}.controller.dra.accelerators"}
        for name in ("{{ inventory_hostname[0] }}1.example.com", "a1-example-com", "a2.example.com", "pods")
    ]
    answers = {
        **CONTROLLER,
        "__dra_controller_webhooks": {"objects": [{"webhooks": webhooks}]},
        "__dra_controller_narrowed": {
            "names": "{{ __dra_controller_remaining_webhooks | map(attribute='name') | list }}"
        },
    }
    words = "[__dra_controller_was_last, (__dra_controller_narrowed | default({})).names | default([])]"
    shown = {"ansible.builtin.debug": {"msg": f"{{{{ {words} | to_json | b64encode }}}}"}}
    variables = {**controller("absent"), "accelerator_node_name": "{{ inventory_hostname }}.example.com"}
    played = run(tmp_path, "dra_controller", variables, answers, shown, limit="a1,b1,b2")
    assert played.status == 0, played.output
    stays = [f"{name}.controller.dra.accelerators" for name in ("a1-example-com", "a2.example.com", "pods")]
    assert played.messages == {"a1": [False, stays], "b1": [True, []], "b2": [True, []]}, played.output
    found = ran(played)
    assert found["Delete the objects"] == ["b1"], played.output
    assert found["Remove the unit, the configuration, and the identity"] == ["a1", "b1", "b2"]


@pytest.mark.prove
def test_controller_leader_that_fails_before_it_writes_is_replaced(tmp_path: Path) -> None:
    removed = {**CONTROLLER["__dra_controller_host"], "failed": "{{ inventory_hostname == 'a1' }}", "msg": "no way"}
    played = run(tmp_path, "dra_controller", SERVICE, {**CONTROLLER, "__dra_controller_host": removed})
    assert set(played.failed) == {"a1"}, played.output
    found = ran(played)
    assert {name: found.get(name) for name in WRITES["service"]} == {name: ["a2", "b1"] for name in WRITES["service"]}


def test_dashboards_of_each_cluster_are_written_once(tmp_path: Path) -> None:
    answers = {"__monitoring_kinds": {"resources": []}, "__monitoring_written": {}}
    played = run(tmp_path, "monitoring", {"monitoring_objects": True}, answers)
    assert played.status == 0, played.output
    assert ran(played)["Write or remove the dashboard and the rules"] == ["a1", "b1"], played.output


@pytest.mark.parametrize("state", ["prepared", "absent"])
def test_migration_writes_the_classes_of_each_cluster_once(tmp_path: Path, state: str) -> None:
    plan = {"__device_plugin_migration_plan": {"steps": ["write"], "blocked_by": [], "up_to_date": False, "kind": ""}}
    played = run(tmp_path, "device_plugin_migration", {"device_plugin_migration_state": state}, plan)
    assert played.status == 0, played.output
    found = ran(played)
    assert found["Determine the changes"] == ["a1", "b1"], played.output
    assert found["Create the classes" if state == "prepared" else "Remove the cluster objects"] == ["a1", "b1"]


def test_migration_gives_each_host_the_report_of_its_cluster(tmp_path: Path) -> None:
    names = ("resources", "nodes")
    lists = ("pods", "workloads", "quotas", "limit_ranges", "plugins", "leftovers")
    report = {
        **{name: {} for name in names},
        **{name: [] for name in lists},
        "counts": {"pods": 0, "by_plugin": 0, "by_claims": 0},
        "blocked": ["{{ accelerator_kubeconfig }}"],
    }
    words = {"msg": "{{ device_plugin_migration_found.blocked | to_json | b64encode }}"}
    answers = {"__device_plugin_migration_query": report, "__device_plugin_migration_report": report}
    played = run(tmp_path, "device_plugin_migration", {}, answers, {"ansible.builtin.debug": words})
    assert played.status == 0, played.output
    assert played.messages == {"a1": ["/a"], "a2": ["/a"], "b1": ["/b"], "b2": ["/b"]}
    assert ran(played)["Query the effects of a migration"] == ["a1", "b1"], played.output
