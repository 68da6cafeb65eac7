# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the playbook repartition with Ansible on nodes with simulated boards and a model API server.

The server keeps DeviceTaintRules and publishes the current partitions of the boards. Ansible reports each task to the
server before the task begins, so a test can act at exactly that step. Roles that install services are left out of the
playbook. A debug task shows the content that they would write for the node driver.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from tests.unit.json_server import JsonHandler, JsonServer

if TYPE_CHECKING:
    from conftest import Node

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = Path(__file__).with_name("ansible_plugins")
OPERATION_TASKS = ROOT / "playbooks/tasks/repartition_operation.yml"
DRIVER = "gpu.nvidia.com"
#: The layout for the next boot, in a node's kubelet directory.
LAYOUT = "layout.json"
#: The settings for the next boot, in the same directory.
SETTINGS = "settings.json"
RULES = "/apis/resource.k8s.io/v1/devicetaintrules"
FIRST = {"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}}
SECOND = {"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}}
#: Ansible's return code after SIGKILL.
KILLED = -9
Json = dict[str, Any]


class Cluster(JsonServer):
    """The Node "a" and other nodes, the slices of their boards, and taint rules. ``writes`` has the methods of all writes, in order.

    ``at_step`` is called with each task's name before the task begins, and returns whether to kill Ansible there. While
    ``away`` is true, the server answers each request with 503.
    """

    def __init__(self, node: Node, **others: Node) -> None:
        self.nodes = {"a": node, **others}
        self.rules: dict[str, Json] = {}
        self.writes: list[str] = []
        self.away = False
        self._looking = threading.Lock()
        self.at_step: Callable[[str], bool] = lambda _task: False
        cluster = self

        class Handler(JsonHandler):
            def take(self) -> None:
                body, address = self.body(), urlsplit(self.path)
                status, answer = cluster.answer(self.command, address.path, body, address.query)
                self.answer(status, answer)

            do_GET = do_POST = do_PUT = do_DELETE = take  # noqa: N815 http.server's names

        super().__init__(Handler)

    def answer(self, method: str, path: str, body: Json | None, query: str) -> tuple[int, Json]:
        if path == "/step":
            assert body is not None
            return 200, {"kill": self.at_step(body["task"])}
        if self.away:
            return 503, {"kind": "Status", "code": 503, "reason": "ServiceUnavailable", "message": "away"}
        if path.startswith(RULES):
            return self.of_rules(method, path.removeprefix(RULES).strip("/"), body)
        if path == "/apis/resource.k8s.io":
            return 200, {"versions": [{"version": "v1"}], "preferredVersion": {"version": "v1"}}
        if path == "/apis/resource.k8s.io/v1":
            return 200, {
                "resources": [{"name": name} for name in ("devicetaintrules", "resourceclaims", "resourceslices")]
            }
        if path.endswith("/resourceslices"):
            requested = [name for name in self.nodes if f"nodeName%3D{name}" in query] or self.nodes
            return 200, {"items": [self.slice(name) for name in requested]}
        if path.startswith("/api/v1/nodes/"):
            return 200, {"metadata": {"name": path.rpartition("/")[2]}, "spec": {}, "status": {"nodeInfo": {}}}
        if path.startswith("/api/v1/namespaces/") and path.count("/") == 4:
            return 200, {"metadata": {"name": path.rpartition("/")[2]}}
        if path == "/version":
            return 200, {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
        if method == "GET" and path.rpartition("/")[2].endswith(("s", "es")):
            return 200, {"items": []}
        return 404, {"kind": "Status", "code": 404, "reason": "NotFound", "message": f"{method} {path}"}

    def of_rules(self, method: str, name: str, body: Json | None) -> tuple[int, Json]:
        if method == "GET" and not name:
            return 200, {"items": list(self.rules.values())}
        if method == "GET":
            return (200, self.rules[name]) if name in self.rules else (404, {"kind": "Status", "reason": "NotFound"})
        self.writes.append(method)
        if method == "DELETE":
            return 200, self.rules.pop(name)
        assert body is not None
        manager = {"manager": "dra.accelerators.device-drain"}
        body["metadata"] |= {"uid": "u", "resourceVersion": "1", "managedFields": [manager]}
        self.rules[body["metadata"]["name"]] = body
        return 200, body

    def slice(self, name: str = "a") -> Json:
        # Parallel nodes query at the same time, and their modules share a process.
        with self._looking:
            devices = self.nodes[name].module("accelerator_info", {"fail_without_driver": True})["devices"]
        parts = [
            {
                "name": f"gpu-{device['index']}-mig-{each['profile'].replace('.', '')}-{each['profile_id']}-{each['placement']['start']}",
                "attributes": {
                    "type": {"string": "mig"},
                    "uuid": {"string": each["uuid"]},
                    "parentUUID": {"string": device["uuid"]},
                },
            }
            for device in devices
            for each in device["partitions"]
        ]
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": parts}
        return {"metadata": {"name": f"s-{name}"}, "spec": spec}


def play(
    node: Node, cluster: Cluster, directory: Path, plays: list[Json], variables: Json
) -> subprocess.CompletedProcess[str]:
    """Run Ansible on all nodes in its own process group. A negative return code is the signal that ended it."""
    access = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (directory / "kubeconfig").write_text(yaml.safe_dump(access), encoding="utf-8")
    for each in (each for each in plays if "hosts" in each):
        # Each node loads its own library, which finds its boards.
        each["environment"] = {"LD_LIBRARY_PATH": "{{ library }}"}
    (directory / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False), encoding="utf-8")
    hosts = {
        name: {
            "ansible_connection": "local_or_away",
            "library": str(each.folder),
            "accelerator_kubelet_root": str(kubelet(directory, name)),
        }
        for name, each in cluster.nodes.items()
    }
    (directory / "inventory.yml").write_text(yaml.safe_dump({"accelerator_nodes": {"hosts": hosts}}), encoding="utf-8")
    common = {
        "ansible_python_interpreter": sys.executable,
        "accelerator_become": False,
        "accelerator_repartition_evict": True,
        "accelerator_repartition_timeout": 10,
    }
    return subprocess.run(
        [
            Path(sys.executable).with_name("ansible-playbook"),
            *("-i", directory / "inventory.yml", directory / "play.yml"),
            *("-e", json.dumps({**common, **variables})),
        ],
        env={
            **node.environment(),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(directory / "local"),
            "ANSIBLE_REMOTE_TEMP": str(directory / "remote"),
            "ANSIBLE_CALLBACK_PLUGINS": str(PLUGINS / "callback"),
            "ANSIBLE_CALLBACKS_ENABLED": "at_step",
            "ANSIBLE_CONNECTION_PLUGINS": str(PLUGINS / "connection"),
            "AT_STEP": f"{cluster.url}/step",
            "NODE_AWAY": str(away(directory)),
            "KUBECONFIG": str(directory / "kubeconfig"),
            "HOME": os.environ["HOME"],
        },
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


def kubelet(directory: Path, node: str = "a") -> Path:
    """Return the kubelet directory of a node."""
    return directory / ("kubelet" if node == "a" else f"kubelet-{node}")


def away(directory: Path) -> Path:
    """Return the file that makes the node unreachable while it exists."""
    return directory / "away"


def tasks_of(tasks: list[Json]) -> Iterator[Json]:
    """Return the tasks of blocks, at any depth."""
    for task in tasks:
        yield task
        for key in ("block", "rescue", "always"):
            yield from tasks_of(task.get(key, []))


#: Roles that write files for the next boot: the file in the node's directory, and the variable with its content.
BOOT_ROLES = {
    "dra.accelerators.nvidia_mig": (LAYOUT, "__nvidia_mig_layout"),
    "dra.accelerators.nvidia_settings": (SETTINGS, "__nvidia_settings_boot_rules"),
}


def boot_file(task: Json) -> tuple[str, str] | None:
    """Return the file for the next boot that a task writes, and the variable with the content."""
    role = task.get("ansible.builtin.include_role", {})
    return BOOT_ROLES.get(role.get("name", "")) if role.get("tasks_from") == "boot.yml" else None


def operation_tasks(directory: Path) -> str:
    """Write a file with the tasks of one operation. Boot files go to the node's directory instead of to this machine."""
    blocks = yaml.safe_load(OPERATION_TASKS.read_text(encoding="utf-8"))
    # The blocks share their defaults.
    defaults = next(each["module_defaults"] for each in blocks if "module_defaults" in each)
    defaults["dra.accelerators.nvidia_gpu"]["record"] = "{{ accelerator_kubelet_root }}/settings-nvidia.json"
    for task in tasks_of(blocks):
        # Write the role's file for the next boot to the node's directory.
        if written := boot_file(task):
            del task["ansible.builtin.include_role"]
            task["ansible.builtin.copy"] = {
                "dest": f"{{{{ accelerator_kubelet_root }}}}/{written[0]}",
                "content": f"{{{{ {written[1]} | to_json }}}}",
                "mode": "0644",
            }
    path = directory / OPERATION_TASKS.name
    path.write_text(yaml.safe_dump(blocks, sort_keys=False), encoding="utf-8")
    return str(path)


def play_operation(node: Node, cluster: Cluster, directory: Path, operation: Json) -> subprocess.CompletedProcess[str]:
    """Run the tasks of one operation."""
    tasks = [{"ansible.builtin.include_tasks": operation_tasks(directory)}]
    document = [{"hosts": "all", "gather_facts": False, "tasks": tasks}]
    variables = {
        "accelerator_operation": operation,
        "accelerator_name": "a",
        "accelerator_failed_hosts": [],
        "accelerator_api": {"kubeconfig": str(directory / "kubeconfig"), "context": ""},
    }
    return play(node, cluster, directory, document, variables)


def play_all(
    node: Node, cluster: Cluster, directory: Path, *layout: Json, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run the whole playbook for a layout, without roles.

    ``former_layouts`` has the layout of each node before the run. The default is the layout that is kept for the next
    boot.
    """
    plays = yaml.safe_load((ROOT / "playbooks/repartition.yml").read_text(encoding="utf-8"))
    plays[0]["ansible.builtin.import_playbook"] = str(ROOT / "playbooks/check_inventory.yml")
    for each in plays[1:]:
        for task in each["tasks"]:
            if task.get("ansible.builtin.include_role") == {"name": "dra.accelerators.dra_driver"}:
                del task["ansible.builtin.include_role"]
                task["ansible.builtin.debug"] = {
                    "msg": "driver layout of {{ inventory_hostname }}: {{ dra_driver_layout | to_json }}"
                }
        each["tasks"] = [task for task in each["tasks"] if "ansible.builtin.include_role" not in task]
        for task in each["tasks"]:
            # The simulated boards have no PCI bus, and this machine's own layout file does not apply to them.
            if task["name"] == "Plan what changes on each node":
                options = task["dra.accelerators.device_repartition"]
                options |= {
                    "vendor": ["nvidia"],
                    "former_layout": "{{ former_layouts[inventory_hostname] | default(kept_layout, true) }}",
                    "boot_settings": f"{{{{ lookup('ansible.builtin.file', accelerator_kubelet_root ~ '/{SETTINGS}') | from_json }}}}",
                }
            if "ansible.builtin.include_tasks" in task:
                task["ansible.builtin.include_tasks"] = operation_tasks(directory)
            if "ansible.builtin.import_tasks" in task:
                task["ansible.builtin.import_tasks"] = str(ROOT / "playbooks" / task["ansible.builtin.import_tasks"])
    for name in cluster.nodes:
        for kept in (kubelet(directory, name) / LAYOUT, kubelet(directory, name) / SETTINGS):
            if not kept.exists():
                kept.parent.mkdir(exist_ok=True)
                kept.write_text("[]", encoding="utf-8")
    variables = {
        "nvidia_mig_layout": list(layout),
        "former_layouts": {},
        "kept_layout": f"{{{{ lookup('ansible.builtin.file', accelerator_kubelet_root ~ '/{LAYOUT}') | from_json }}}}",
    }
    return play(node, cluster, directory, plays, {**variables, **more})


def planned(
    node: Node, cluster: Cluster, directory: Path, layout: Json | None = None, former: Json | None = None, **more: Any
) -> Json:
    """Return the one operation from FIRST to SECOND, or between the given layouts, with its published devices."""
    options = {
        "layout": [layout or SECOND],
        "former_layout": [former or FIRST],
        "kubelet_root": str(directory / "kubelet"),
        "vendor": ["nvidia"],
        **more,
    }
    (operation,) = node.module("device_repartition", options)["operations"]
    there = {each["name"] for each in cluster.slice()["spec"]["devices"]}
    return {**operation, "published": [name for name in operation["names"] if name in there]}


def steps() -> list[str]:
    """Return the task names of an operation on a GPU that keeps its way of publication, in order."""
    blocks = yaml.safe_load(OPERATION_TASKS.read_text(encoding="utf-8"))
    tasks = [task for block in blocks for task in block.get("block", ())]
    return [
        task["name"]
        for task in tasks
        if not {"ascend", "settings"} & set(re.findall(r"[a-z]+", str(task.get("when", ""))))
        and ("ansible.builtin.include_role" not in task or boot_file(task))
        and "ansible.builtin.set_fact" not in task
    ]
