# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run playbooks on the hosts of one or two simulated clusters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.unit.ansible_process import PYTHON, run_ansible
from tests.unit.json_server import JsonHandler, JsonServer

ROOT = Path(__file__).resolve().parents[3]
Json = dict[str, Any]
#: A module that returns its option ``answer``.
ANSWER_MODULE = """
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"answer": {"type": "dict"}}, supports_check_mode=True)
module.exit_json(**module.params["answer"])
"""


class ClusterServer(JsonServer):
    """The lists of an API server: Nodes, and claims whose devices pods of a node use."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = list(nodes)
        self.claims: list[Json] = []
        self.lists: dict[str, list[Json]] = {}
        self.paths: list[str] = []
        #: The number of reads of a claim by name before it is deleted.
        self.reads_before_deletion = 0
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                server.paths.append(path)
                kind, _slash, name = path.rpartition("/")
                if path == "/apis/resource.k8s.io":
                    self.answer(200, {"versions": [{"version": "v1"}]})
                elif kind == "/api/v1/nodes":
                    found = {"metadata": {"name": name, "uid": name}, "spec": {}, "status": {}}
                    self.answer(
                        *((200, found) if name in server.nodes else (404, {"kind": "Status", "reason": "NotFound"}))
                    )
                elif kind == "/api/v1/namespaces":
                    self.answer(200, {"metadata": {"name": name}})
                elif kind.endswith("/resourceclaims"):
                    server.reads_before_deletion -= 1
                    if server.reads_before_deletion < 0:
                        server.claims = [each for each in server.claims if each["metadata"]["name"] != name]
                    found_claims = [each for each in server.claims if each["metadata"]["name"] == name]
                    self.answer(
                        *((200, found_claims[0]) if found_claims else (404, {"kind": "Status", "reason": "NotFound"}))
                    )
                else:
                    self.answer(
                        200, {"items": server.claims if name == "resourceclaims" else server.lists.get(name, [])}
                    )

            def do_DELETE(self) -> None:
                server.lists.clear()
                self.answer(200, {})

        super().__init__(Handler)

    def use(self, node: str, driver: str = "gpu.nvidia.com") -> None:
        """Add a claim of a pod that uses a device of a node."""
        result = {"request": "r", "driver": driver, "pool": node, "device": "gpu-0"}
        status = {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": f"pod-on-{node}"}],
        }
        metadata = {"namespace": "default", "name": f"claim-on-{node}"}
        self.claims.append({"metadata": metadata, "spec": {}, "status": status})

    def kubeconfig(self, path: Path) -> str:
        access = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(access), encoding="utf-8")
        return str(path)


def run_playbook(directory: Path, playbook: Path, groups: Json, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}), encoding="utf-8")
    return run_ansible(
        [
            *(Path(sys.executable).with_name("ansible-playbook"), "-i", directory / "hosts.yml", playbook),
            *("-e", json.dumps({"accelerator_become": False}), *arguments),
        ],
        env={
            **os.environ,
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(directory / "local"),
            "ANSIBLE_REMOTE_TEMP": str(directory / "remote"),
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            "ANSIBLE_LIBRARY": str(directory / "library"),
        },
    )


def group(names: list[str], **variables: Any) -> Json:
    hosts: Json = {name: {} for name in names}
    common = {"ansible_connection": "local", "ansible_python_interpreter": str(PYTHON)}
    return {"hosts": hosts, "vars": {**common, **variables}}


def two_clusters(directory: Path, clusters: tuple[ClusterServer, ClusterServer]) -> Json:
    """Return the hosts a1 and a2 of the first cluster, and b1 and b2 of the second."""
    first, second = (server.kubeconfig(directory / f"kubeconfig-{name}") for name, server in zip("ab", clusters))
    children = {
        "first": group(["a1", "a2"], accelerator_kubeconfig=first),
        "second": group(["b1", "b2"], accelerator_kubeconfig=second),
    }
    return {"accelerator_nodes": {"children": children}}


def failures(output: str) -> dict[str, str]:
    return dict(re.findall(r"^fatal: \[(\w+)[^\]]*\]: FAILED! => (.*)$", output, re.MULTILINE))
