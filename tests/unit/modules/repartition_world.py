# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes with simulated boards and what stands in for their API server, on which Ansible plays the playbook repartition.

The server keeps DeviceTaintRules, publishes the partitions that the boards have at that moment, and is told by Ansible of each task
before it begins, so that a test can do something at exactly that step. Roles, which install services, are left out of the playbook; what it
would tell the node driver is shown instead.
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
RULES = "/apis/resource.k8s.io/v1/devicetaintrules"
FIRST = {"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}}
SECOND = {"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}}
#: What Ansible says when it was killed by the signal.
KILLED = -9
Json = dict[str, Any]


class Cluster(JsonServer):
    """The Node "a" and others, the slices of their boards, and taint rules. ``writes`` are the methods of all writes, in order.

    ``at_step`` is called with each task's name before the task begins, and returns whether Ansible is to be killed there. While it is
    ``away`` the server answers nothing but 503.
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
            asked = [name for name in self.nodes if f"nodeName%3D{name}" in query] or self.nodes
            return 200, {"items": [self.slice(name) for name in asked]}
        if path.startswith("/api/v1/nodes/"):
            return 200, {"metadata": {"name": path.rpartition("/")[2]}, "spec": {}, "status": {"nodeInfo": {}}}
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
        # Nodes that are worked on at the same time ask at the same time, and their modules share a process.
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
    node: Node, cluster: Cluster, folder: Path, plays: list[Json], variables: Json
) -> subprocess.CompletedProcess[str]:
    """Have Ansible play on all nodes, in a group of processes of its own; a signal that ends it is a negative return code."""
    access = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(access), encoding="utf-8")
    for each in (each for each in plays if "hosts" in each):
        # Each node has a library of its own, which finds its boards.
        each["environment"] = {"LD_LIBRARY_PATH": "{{ library }}"}
    (folder / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False), encoding="utf-8")
    hosts = {
        name: {
            "ansible_connection": "local_or_away",
            "library": str(each.folder),
            "accelerator_kubelet_root": str(kubelet(folder, name)),
        }
        for name, each in cluster.nodes.items()
    }
    (folder / "inventory.yml").write_text(yaml.safe_dump({"accelerator_nodes": {"hosts": hosts}}), encoding="utf-8")
    common = {
        "ansible_python_interpreter": sys.executable,
        "accelerator_become": False,
        "accelerator_repartition_evict": True,
        "accelerator_repartition_timeout": 10,
    }
    return subprocess.run(
        [
            Path(sys.executable).with_name("ansible-playbook"),
            *("-i", folder / "inventory.yml", folder / "play.yml"),
            *("-e", json.dumps({**common, **variables})),
        ],
        env={
            **node.environment(),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
            "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
            "ANSIBLE_CALLBACK_PLUGINS": str(PLUGINS / "callback"),
            "ANSIBLE_CALLBACKS_ENABLED": "at_step",
            "ANSIBLE_CONNECTION_PLUGINS": str(PLUGINS / "connection"),
            "AT_STEP": f"{cluster.url}/step",
            "NODE_AWAY": str(away(folder)),
            "KUBECONFIG": str(folder / "kubeconfig"),
            "HOME": os.environ["HOME"],
        },
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


def kubelet(folder: Path, node: str = "a") -> Path:
    """The folder of a node's kubelet."""
    return folder / ("kubelet" if node == "a" else f"kubelet-{node}")


def away(folder: Path) -> Path:
    """The file that makes the node unreachable while it exists."""
    return folder / "away"


def tasks_of(tasks: list[Json]) -> Iterator[Json]:
    """Return the tasks of blocks, at any depth."""
    for task in tasks:
        yield task
        for key in ("block", "rescue", "always"):
            yield from tasks_of(task.get(key, []))


def is_boot_role(task: Json) -> bool:
    """Return whether a task writes the layout of the GPUs for the next boot."""
    return task.get("ansible.builtin.include_role") == {"name": "dra.accelerators.nvidia_mig", "tasks_from": "boot.yml"}


def operation_tasks(folder: Path) -> str:
    """A file with the tasks of one operation, as they are, but that what is set is noted in the node's own folder and not on this machine."""
    blocks = yaml.safe_load(OPERATION_TASKS.read_text(encoding="utf-8"))
    # The blocks share their defaults.
    defaults = next(each["module_defaults"] for each in blocks if "module_defaults" in each)
    defaults["dra.accelerators.nvidia_gpu"]["record"] = "{{ accelerator_kubelet_root }}/settings-nvidia.json"
    for task in tasks_of(blocks):
        # What the role writes for the next boot is written to the node's own directory.
        if is_boot_role(task):
            del task["ansible.builtin.include_role"]
            task["ansible.builtin.copy"] = {
                "dest": f"{{{{ accelerator_kubelet_root }}}}/{LAYOUT}",
                "content": "{{ __nvidia_mig_layout | to_json }}",
                "mode": "0644",
            }
    path = folder / OPERATION_TASKS.name
    path.write_text(yaml.safe_dump(blocks, sort_keys=False), encoding="utf-8")
    return str(path)


def play_operation(node: Node, cluster: Cluster, folder: Path, operation: Json) -> subprocess.CompletedProcess[str]:
    """Play the tasks of one operation."""
    tasks = [{"ansible.builtin.include_tasks": operation_tasks(folder)}]
    document = [{"hosts": "all", "gather_facts": False, "tasks": tasks}]
    variables = {
        "accelerator_operation": operation,
        "accelerator_name": "a",
        "accelerator_fallen": [],
        "accelerator_kubeconfig_used": str(folder / "kubeconfig"),
    }
    return play(node, cluster, folder, document, variables)


def play_all(
    node: Node, cluster: Cluster, folder: Path, *layout: Json, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Play the whole playbook for a layout, without roles.

    ``former_layouts`` are the layouts of the nodes before the run, by node; by default the one that is kept for the next boot.
    """
    plays = yaml.safe_load((ROOT / "playbooks/repartition.yml").read_text(encoding="utf-8"))
    plays[0]["ansible.builtin.import_playbook"] = str(ROOT / "playbooks/check_inventory.yml")
    for each in plays[1:]:
        for task in each["tasks"]:
            if task.get("ansible.builtin.include_role") == {"name": "dra.accelerators.dra_driver"}:
                del task["ansible.builtin.include_role"]
                task["ansible.builtin.debug"] = {
                    "msg": "told {{ inventory_hostname }}: {{ dra_driver_layout | to_json }}"
                }
        each["tasks"] = [task for task in each["tasks"] if "ansible.builtin.include_role" not in task]
        for task in each["tasks"]:
            # There is no PCI bus on which the simulated boards would show, and the layout of this machine is none of theirs.
            if task["name"] == "Plan what changes on each node":
                options = task["dra.accelerators.device_repartition"]
                options |= {
                    "vendor": ["nvidia"],
                    "former_layout": "{{ former_layouts[inventory_hostname] | default(kept_layout, true) }}",
                }
            if "ansible.builtin.include_tasks" in task:
                task["ansible.builtin.include_tasks"] = operation_tasks(folder)
    for name in cluster.nodes:
        kept = kubelet(folder, name) / LAYOUT
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            kept.write_text("[]", encoding="utf-8")
    variables = {
        "nvidia_mig_layout": list(layout),
        "former_layouts": {},
        "kept_layout": f"{{{{ lookup('ansible.builtin.file', accelerator_kubelet_root ~ '/{LAYOUT}') | from_json }}}}",
    }
    return play(node, cluster, folder, plays, {**variables, **more})


def planned(
    node: Node, cluster: Cluster, folder: Path, layout: Json | None = None, former: Json | None = None, **more: Any
) -> Json:
    """Return the one operation that leads from FIRST to SECOND, or to other layouts, with what is published of it."""
    options = {
        "layout": [layout or SECOND],
        "former_layout": [former or FIRST],
        "kubelet_root": str(folder / "kubelet"),
        "vendor": ["nvidia"],
        **more,
    }
    (operation,) = node.module("device_repartition", options)["operations"]
    there = {each["name"] for each in cluster.slice()["spec"]["devices"]}
    return {**operation, "published": [name for name in operation["names"] if name in there]}


def steps() -> list[str]:
    """The steps of an operation on a GPU whose kind of publication stays, in order, by their tasks' names."""
    blocks = yaml.safe_load(OPERATION_TASKS.read_text(encoding="utf-8"))
    tasks = [task for block in blocks for task in block.get("block", ())]
    return [
        task["name"]
        for task in tasks
        if not {"ascend", "settings"} & set(re.findall(r"[a-z]+", str(task.get("when", ""))))
        and ("ansible.builtin.include_role" not in task or is_boot_role(task))
        and "ansible.builtin.set_fact" not in task
    ]
