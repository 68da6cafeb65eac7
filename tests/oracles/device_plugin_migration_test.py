# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Migrate a node from a device plugin to claims and back with a real API server, which validates every write. The test
acts as kubelet and controllers.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dra.accelerators.plugins.module_utils._migration import node_plan as nodes
from ansible_collections.dra.accelerators.plugins.module_utils._migration import node_run as running
from cluster_modules_test import DRA, Server

Json = dict[str, Any]
NODE, SPACE = "plugged-1", "moves"
GPU = "nvidia.com/gpu"
#: Every form of a resource name. The API server validates the expressions of their classes.
NAMES = (
    GPU,
    "nvidia.com/mig-1g.10gb",
    "nvidia.com/mig-1g.10gb.me",
    "huawei.com/Ascend910",
    "huawei.com/Ascend310P-4c.3cpu.ndvpp",
)
PODS, SETS = f"/api/v1/namespaces/{SPACE}/pods", f"/apis/apps/v1/namespaces/{SPACE}/daemonsets"
BUDGETS = f"/apis/policy/v1/namespaces/{SPACE}/poddisruptionbudgets"
FOLDER = [{"name": "plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}]
Run = Callable[..., Json]


class Machine:
    """The actions of kubelet and controllers, run each time the module waits."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.allows = False

    def pods(self) -> list[Json]:
        found: list[Json] = self.server.request("GET", PODS)["items"]
        return found

    def names(self) -> list[str]:
        return sorted(each["metadata"]["name"] for each in self.pods())

    def node(self) -> Json:
        return self.server.request("GET", f"/api/v1/nodes/{NODE}")

    def offer(self, number: int) -> None:
        item = self.node()
        item["status"]["capacity"] = {GPU: "8", "pods": "100"}
        item["status"]["allocatable"] = {GPU: str(number), "pods": "100"}
        self.server.request("PUT", f"/api/v1/nodes/{NODE}/status", item)

    def end(self, name: str) -> None:
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        self.server.request("DELETE", f"{PODS}/{name}", options)

    def work(self, _seconds: float = 0.0) -> None:
        for each in self.pods():
            if each["metadata"].get("deletionTimestamp"):
                self.end(each["metadata"]["name"])
        if not self.allows:
            # The disruption controller updates its budget.
            budget = self.server.request("GET", f"{BUDGETS}/budget")
            budget["status"] = {
                "observedGeneration": 1,
                "disruptionsAllowed": 1,
                "currentHealthy": 1,
                "desiredHealthy": 0,
                "expectedPods": 1,
            }
            self.server.request("PUT", f"{BUDGETS}/budget/status", budget)
            self.allows = True
        item, there = self.node(), "plugin-1" in self.names()
        kept_off = nodes.excludes(self.server.request("GET", f"{SETS}/plugin")["spec"]["template"]["spec"])
        kept_off = kept_off and item["metadata"]["labels"].get(nodes.KEPT_OFF) == nodes.OFF
        if there and kept_off:
            self.end("plugin-1")
            self.offer(0)
        elif not there and not kept_off and not item["spec"].get("taints"):
            make_pod(self.server, "plugin-1", owner="DaemonSet/plugin", volumes=FOLDER)
            self.offer(8)


def make_pod(
    server: Server, name: str, resources: Json | None = None, *, owner: str = "ReplicaSet/web", **spec: Any
) -> Json:
    kind, _slash, its_name = owner.partition("/")
    reference = {"apiVersion": "apps/v1", "kind": kind, "name": its_name, "uid": f"uid-{its_name}", "controller": True}
    limits = {key: str(value) for key, value in (resources or {}).items()}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": SPACE, "labels": {"app": "web"}, "ownerReferences": [reference]},
        "spec": {
            "nodeName": NODE,
            "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "i", "resources": {"limits": limits}}],
            **spec,
        },
    }
    made = server.request("POST", PODS, body)
    made["status"] = {**made["status"], "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return server.request("PUT", f"{PODS}/{name}/status", made)


@pytest.fixture(scope="module")
def machine(administrator: Path) -> Machine:
    """Create a node with another device plugin, a pod with a GPU from it, one without, and a budget."""
    server = Server(administrator)
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    server.request("POST", f"/api/v1/namespaces/{SPACE}/serviceaccounts", {"metadata": {"name": "default"}})
    server.request("POST", "/api/v1/nodes", {"metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}})
    template = {"containers": [{"name": "main", "image": "i"}], "volumes": FOLDER}
    labels = {"app": "plugin"}
    server.request(
        "POST",
        SETS,
        {
            "metadata": {"name": "plugin"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": template},
            },
        },
    )
    server.request(
        "POST",
        BUDGETS,
        {"metadata": {"name": "budget"}, "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}}},
    )
    found = Machine(server)
    found.offer(8)
    make_pod(server, "plugin-1", owner="DaemonSet/plugin", volumes=FOLDER)
    make_pod(server, "training", dict.fromkeys(NAMES, 1))
    make_pod(server, "bystander")
    # A kubelet would remove it; here no component does.
    item = found.node()
    item["spec"]["taints"] = []
    server.request("PUT", f"/api/v1/nodes/{NODE}", item)
    return found


@pytest.fixture
def module(machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a module against the server. While it waits, the other components act."""
    monkeypatch.setattr(running.time, "sleep", machine.work)

    def run(name: str, options: Json, *, check: bool = False) -> Json:
        given = {"kubeconfig": str(machine.server.kubeconfig), **options, "_ansible_check_mode": check}
        found = importlib.import_module(f"ansible_collections.dra.accelerators.plugins.modules.{name}")
        with patch_module_args(given), pytest.raises(SystemExit):
            found.main()
        answer: Json = json.loads(capsys.readouterr().out)
        return answer

    return run


def moved(module: Run, state: str, direction: str, *, check: bool = False) -> Json:
    options = {
        "state": state,
        "node": NODE,
        "direction": direction,
        "plugins": [f"{SPACE}/plugin"],
        "evict": True,
        "timeout": 60,
    }
    found = module("device_plugin_migration", options, check=check)
    assert "failed" not in found, found["msg"]
    return found


def taint_values(machine: Machine) -> list[str]:
    return [each["value"] for each in machine.node()["spec"].get("taints") or () if each["key"] == nodes.TAINT]


def test_migration_report(module: Run) -> None:
    reported = module("device_plugin_migration_info", {"nodes": [NODE]})
    assert reported["gate"] == {"kept": True, "problem": ""} and [each["name"] for each in reported["pods"]] == [
        "training"
    ]
    assert [each["name"] for each in reported["plugins"]] == ["plugin"] and len(reported["blocked"]) == 2
    assert (
        reported["nodes"][NODE]["kind"] == "foreign" and reported["resources"][GPU]["device_class"] == "gpu.nvidia.com"
    )


def test_api_server_accepts_every_class(module: Run, machine: Machine) -> None:
    dry = module("device_plugin_migration", {"state": "prepared"}, check=True)
    made = module("device_plugin_migration", {"state": "prepared"})
    assert dry["steps"] == made["steps"] and len(made["steps"]) == len(NAMES), made
    items = machine.server.request("GET", f"{DRA}/deviceclasses")["items"]
    assert {each["spec"].get("extendedResourceName") for each in items} >= set(NAMES)
    assert not module("device_plugin_migration", {"state": "prepared"})["changed"]


def test_migration_to_claims(module: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moved(module, "drained", "forward", check=True)["evicted"] == [f"{SPACE}/training"]
    done = moved(module, "drained", "forward")
    assert machine.allows, "the first eviction was refused: the budget was not known yet"
    assert done["evicted"] == [f"{SPACE}/training"] and machine.names() == ["bystander"]
    assert taint_values(machine) == ["forward"]
    spec = {
        "driver": "gpu.nvidia.com",
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu-0"}],
    }
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": NODE}, "spec": spec}
    machine.server.request("POST", f"{DRA}/resourceslices", body)
    # An older cluster removes a resource of quantity 0 from the Node.
    monkeypatch.setattr(running, "minor_version", lambda _api: 34)
    monkeypatch.setattr(running, "QUIET_SECONDS", 0.0)
    assert moved(module, "in_service", "forward")["steps"] == [
        f"removed {GPU} from the status of Node {NODE}",
        f"removed the taint dra.accelerators/migration from Node {NODE}",
    ]
    status = machine.node()["status"]
    assert (
        status["capacity"] == {"pods": "100"}
        and status["allocatable"] == {"pods": "100"}
        and taint_values(machine) == []
    )
    assert not moved(module, "drained", "forward")["changed"] and not moved(module, "in_service", "forward")["changed"]


def test_migration_to_the_device_plugin(module: Run, machine: Machine) -> None:
    assert moved(module, "drained", "back")["evicted"] == []
    machine.server.request("DELETE", f"{DRA}/resourceslices/{NODE}", {})
    moved(module, "in_service", "back")
    assert machine.names() == ["bystander", "plugin-1"] and taint_values(machine) == []
    metadata = machine.node()["metadata"]
    assert nodes.KEPT_OFF not in metadata["labels"] and nodes.RECORD not in metadata.get("annotations", {})
    assert not machine.server.request("GET", f"{SETS}/plugin")["spec"]["template"]["spec"].get("affinity")
    assert not moved(module, "drained", "back")["changed"] and not moved(module, "in_service", "back")["changed"]


def test_cluster_wide_objects_are_deleted(module: Run, machine: Machine) -> None:
    others = machine.server.request("GET", f"{DRA}/resourceslices")["items"]
    for each in others:
        machine.server.request("DELETE", f"{DRA}/resourceslices/{each['metadata']['name']}", {})
    gone = module("device_plugin_migration", {"state": "absent"})["steps"]
    assert sorted(gone) == [
        "removed DeviceClass ascend310p-4c.3cpu.ndvpp.huawei.com",
        "removed DeviceClass mig-1g.10gb.me.nvidia.com",
        "removed DeviceClass mig-1g.10gb.nvidia.com",
    ]
    assert not module("device_plugin_migration", {"state": "absent"})["changed"]
