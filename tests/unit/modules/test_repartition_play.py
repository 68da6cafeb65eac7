# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One operation of the playbook repartition, played by Ansible on simulated boards: to its end, and back from each step that fails.

What stands in for the API server keeps DeviceTaintRules, and publishes the partitions that the boards have at that moment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.unit.json_server import JsonHandler, JsonServer

if TYPE_CHECKING:
    from conftest import Node

ROOT = Path(__file__).resolve().parents[3]
DRIVER = "gpu.nvidia.com"
RULES = "/apis/resource.k8s.io/v1/devicetaintrules"
FIRST = {"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}}
SECOND = {"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}}
Json = dict[str, Any]


class Cluster(JsonServer):
    """A Node, the slices of its boards, and taint rules. ``writes`` are the methods of all writes, in order."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.rules: dict[str, Json] = {}
        self.writes: list[str] = []
        cluster = self

        class Handler(JsonHandler):
            def take(self) -> None:
                body, path = self.body(), urlsplit(self.path).path
                status, answer = cluster.answer(self.command, path, body)
                self.answer(status, answer)

            do_GET = do_POST = do_PUT = do_DELETE = take  # noqa: N815 http.server's names

        super().__init__(Handler)

    def answer(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        if path.startswith(RULES):
            return self.of_rules(method, path.removeprefix(RULES).strip("/"), body)
        if path == "/apis/resource.k8s.io":
            return 200, {"versions": [{"version": "v1"}], "preferredVersion": {"version": "v1"}}
        if path == "/apis/resource.k8s.io/v1":
            return 200, {
                "resources": [{"name": name} for name in ("devicetaintrules", "resourceclaims", "resourceslices")]
            }
        if path.endswith("/resourceslices"):
            return 200, {"items": [self.slice()]}
        if path == "/api/v1/nodes/a":
            return 200, {"metadata": {"name": "a"}, "spec": {}, "status": {"nodeInfo": {}}}
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

    def slice(self) -> Json:
        devices = self.node.module("accelerator_info", {"fail_without_driver": True})["devices"]
        parts = [
            {
                "name": f"gpu-{device['index']}-mig-{each['profile'].replace('.', '')}-{each['profile_id']}-{each['placement']['start']}",
                "attributes": {"type": {"string": "mig"}, "uuid": {"string": each["uuid"]}},
            }
            for device in devices
            for each in device["partitions"]
        ]
        pool = {"name": "a", "generation": 1, "resourceSliceCount": 1}
        return {"metadata": {"name": "s"}, "spec": {"driver": DRIVER, "nodeName": "a", "pool": pool, "devices": parts}}


@pytest.fixture
def cluster(node: Node) -> Iterator[Cluster]:
    with Cluster(node) as server:
        yield server


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "kubelet/plugins/gpu.nvidia.com"
    folder.mkdir(parents=True)
    return folder


def play(node: Node, cluster: Cluster, folder: Path, operation: Json) -> subprocess.CompletedProcess[str]:
    """Play the tasks of one operation."""
    access = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(access), encoding="utf-8")
    tasks = [{"ansible.builtin.include_tasks": str(ROOT / "playbooks/tasks/repartition_operation.yml")}]
    document = [{"hosts": "all", "gather_facts": False, "tasks": tasks}]
    (folder / "play.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
    variables = {
        "ansible_python_interpreter": sys.executable,
        "accelerator_operation": operation,
        "accelerator_name": "a",
        "accelerator_kubeconfig_used": str(folder / "kubeconfig"),
        "accelerator_kubelet_root": str(folder / "kubelet"),
        "accelerator_repartition_evict": True,
        "accelerator_repartition_timeout": 20,
    }
    return subprocess.run(
        [
            *(
                Path(sys.executable).with_name("ansible-playbook"),
                "-i",
                "localhost,",
                "-c",
                "local",
                folder / "play.yml",
            ),
            *("-e", json.dumps(variables)),
        ],
        env={
            **node.environment(),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
            "HOME": os.environ["HOME"],
        },
        capture_output=True,
        text=True,
        check=False,
    )


def planned(node: Node, cluster: Cluster, folder: Path) -> Json:
    options = {
        "layout": [SECOND],
        "former_layout": [FIRST],
        "kubelet_root": str(folder / "kubelet"),
        "vendor": ["nvidia"],
    }
    (operation,) = node.module("device_repartition", options)["operations"]
    there = {each["name"] for each in cluster.slice()["spec"]["devices"]}
    return {**operation, "published": [name for name in operation["names"] if name in there]}


def test_an_operation_comes_to_its_end(node: Node, cluster: Cluster, tmp_path: Path, state: Path) -> None:
    node.layout(FIRST)
    operation = planned(node, cluster, tmp_path)
    assert len(operation["published"]) == 2
    done = play(node, cluster, tmp_path, operation)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(profile for profile, _start in node.partitions()[0]) == ["1g.10gb"] * 2 + ["2g.20gb", "3g.40gb"]
    assert not cluster.rules and cluster.writes == ["POST", "POST", "DELETE", "DELETE"]
    assert not (state / "repartition.json").exists()


def test_what_fails_is_put_back_and_named(node: Node, cluster: Cluster, tmp_path: Path, state: Path) -> None:
    node.layout(FIRST)
    before = node.partitions()[0]
    operation = planned(node, cluster, tmp_path)
    node.simulator("fault", "0", "call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "19", "nth", "1")
    done = play(node, cluster, tmp_path, operation)
    assert done.returncode != 0
    assert "Change the layout of the GPU" in done.stdout and "has its former layout again" in done.stdout, done.stdout
    assert node.partitions()[0] == before
    assert not cluster.rules and not (state / "repartition.json").exists()
