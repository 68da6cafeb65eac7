# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module node_info and its readers: units, kubeconfigs, tokens, and releases. No secret is returned."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.module_utils._host import node_facts
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import service_account
from ansible_collections.dra.accelerators.plugins.module_utils.core.api_connection import INSECURE_EXTENSION
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed, System

SHOWN = """\
Type=notify
Restart=always
MainPID=411
NRestarts=2
Id=dra-accelerators-driver.service
LoadState=loaded
ActiveState=active
SubState=running
FragmentPath=/etc/systemd/system/dra-accelerators-driver.service
UnitFileState=enabled
NeedDaemonReload=yes

MainPID=0
Id=nvidia-mig-manager.service
LoadState=not-found
ActiveState=inactive
UnitFileState=
NeedDaemonReload=no
"""
KUBECONFIGS = {
    "kubeadm": """\
apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: QUJD
    server: https://10.0.0.1:6443
  name: default-cluster
contexts:
- context:
    cluster: default-cluster
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
kind: Config
users:
- name: default-auth
  user:
    client-certificate: /var/lib/kubelet/pki/secret.pem
    token: secret-word
preferences: {}
""",
    "users first, with comments": """\
# secret-word in a comment stays where it is
users:
  - name: a
    user: {token: secret-word}

# between
kind: Config
"clusters":
  - {name: c, cluster: {server: "https://10.0.0.1:6443"}}
contexts: [{name: x, context: {cluster: c, user: a}}]
current-context: x
""",
    "json": json.dumps(
        {
            "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443"}}],
            "users": [{"name": "a", "user": {"token": "secret-word"}}],
            "current-context": "x",
        }
    ),
}


def test_units_are_parsed() -> None:
    units = node_facts.parse_units(SHOWN)
    driver = node_facts.unit_facts(units[node_facts.DRIVER_UNIT], f"Documentation={node_facts.MARKER}\n")
    assert driver == {
        "exists": True,
        "active": "active",
        "enabled": "enabled",
        "file": "/etc/systemd/system/dra-accelerators-driver.service",
        "managed": True,
        "need_reload": True,
        "main_pid": 411,
        "restarts": 2,
        "type": "notify",
    }
    assert not node_facts.unit_facts(units["nvidia-mig-manager.service"], None)["exists"]
    assert not node_facts.unit_facts(units[node_facts.DRIVER_UNIT], "Documentation=https://example.com\n")["managed"]


@pytest.mark.parametrize("text", KUBECONFIGS.values(), ids=KUBECONFIGS)
def test_kubeconfig_is_shown_without_users(text: str) -> None:
    shown = node_facts.public_sections(text)
    assert "secret" not in shown
    document = yaml.safe_load(shown)
    assert document["clusters"][0]["cluster"]["server"] == "https://10.0.0.1:6443"
    assert "users" not in document
    assert document["current-context"] == yaml.safe_load(text)["current-context"]


def test_kubeconfig_in_unknown_format_is_not_shown() -> None:
    assert node_facts.public_sections("{clusters: [], users: [{name: a}]}\n") == ""


def test_releases_complete_own_ones_newest_first(tmp_path: Path) -> None:
    first, second, third = (f"0.1.0-0000000{number}" for number in (1, 2, 3))
    for number, (name, whole) in enumerate({first: True, second: False, third: True, "theirs": True}.items()):
        folder = tmp_path / "opt/releases" / name
        folder.mkdir(parents=True)
        if whole:
            (folder / "cli.py").write_text("print()\n")
            (folder / "complete").write_text('{"sizes": {"cli.py": 8}}')
        os.utime(folder, (1000 + number, 1000 + number))
    (tmp_path / "opt/current").symlink_to(f"releases/{first}")
    (tmp_path / "opt/venv").symlink_to("venvs/theirs")
    found = node_facts.read_program_facts(System(str(tmp_path)), "/opt")
    assert found["release"] == first and found["environment"] == ""
    assert found["releases"] == [third, first]
    assert found["names"] == [f"releases/{name}" for name in (third, second, first)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("releases/0.1.0-00000001\nvenvs/000000000001\n", ("0.1.0-00000001", "000000000001", "")),
        (
            "releases/0.1.0-00000001\nvenvs/000000000001\n[]\n",
            ("0.1.0-00000001", "000000000001", hashlib.sha256(b"[]").hexdigest()),
        ),
        ("releases/0.1.0-00000002\nvenvs/000000000001\n[]\n", ("", "", "")),
        ("venvs/000000000001\nreleases/0.1.0-00000001\n", ("", "", "")),
        ("releases/0.1.0-00000001\n", ("", "", "")),
        ("releases/theirs\nvenvs/000000000001\n", ("", "", "")),
        ("", ("", "", "")),
    ],
)
def test_record_of_a_service_names_an_existing_release_and_environment(
    tmp_path: Path, text: str, expected: tuple[str, str, str]
) -> None:
    for name in ("releases/0.1.0-00000001", "releases/theirs", "venvs/000000000001"):
        (tmp_path / "opt" / name).mkdir(parents=True)
    (tmp_path / "opt/proven-driver").write_text(text)
    found = node_facts.read_program_facts(System(str(tmp_path)), "/opt")["proven"]
    assert found["driver"] == dict(zip(("release", "environment", "files"), expected, strict=True))
    assert found["controller"] == {"release": "", "environment": "", "files": ""}


def test_interpreter_missing_is_a_problem() -> None:
    found = node_facts.read_interpreter_facts(System(), "/nowhere/python3")
    assert found["version"] == "" and "/nowhere/python3" in found["problem"]


@pytest.mark.parametrize(
    ("folder", "hidden"), [("/root/.pyenv/versions/3.10.13", True), ("/home", True), ("/homes", False), ("/usr", False)]
)
def test_interpreter_in_home_directory_is_hidden_from_services(tmp_path: Path, folder: str, hidden: bool) -> None:
    program = tmp_path / "python3"
    answer = json.dumps({"version": "3.10.13", "identity": "3.10.13 (main)", "venv": True, "directory": folder})
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    found = node_facts.read_interpreter_facts(System(), str(program))
    assert (found["directory"], found["hidden_from_services"]) == (folder, hidden)


def test_interpreter_reports_its_directory() -> None:
    found = node_facts.read_interpreter_facts(System(), sys.executable)
    assert found["directory"] == str(Path(sys.base_prefix).resolve())


def test_layout_is_validated_without_device(run_here: Callable[..., dict[str, Any]]) -> None:
    result = run_here("node_info", {"layout": [{"match": {"indx": 0}, "mode": "whole"}], "verify_identity": False})
    assert "unknown key indx" in result["layout_problem"]
    assert not result["changed"]
    result = run_here("node_info", {"layout": [{"match": {"index": 0}, "mode": "whole"}], "verify_identity": False})
    assert result["layout_problem"] == ""


class Server:
    """An API server that knows one token."""

    def __init__(self, known: str) -> None:
        self.paths: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                server.paths.append(self.path)
                self.send_response(201 if self.headers["Authorization"] == f"Bearer {known}" else 401)
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                return

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


def token(node: str = "node-1", lifetime: int = 3000) -> str:
    claims = {
        "sub": f"system:serviceaccount:dra-accelerators:driver-{node}",
        "iat": 1000,
        "exp": 1000 + lifetime,
        "kubernetes.io": {"node": {"name": node, "uid": "u-1"}},
    }
    words = [
        base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in ({"alg": "none"}, claims)
    ]
    return ".".join([*words, "c2lnbmF0dXJl"])


def kubeconfig(server: str, word: str) -> str:
    return json.dumps(
        {
            "clusters": [{"name": "cluster", "cluster": {"server": server, "extensions": [INSECURE_EXTENSION]}}],
            "users": [{"name": "driver-node-1", "user": {"token": word}}],
        }
    )


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(token())
    threading.Thread(target=running.http.serve_forever, daemon=True).start()
    yield running
    running.http.shutdown()
    running.http.server_close()


def test_identity_accepted_by_api_server(server: Server) -> None:
    found = service_account.read_identity(kubeconfig(server.url, token()), verify=True, now=2000)
    assert server.paths == [service_account.REVIEW]
    assert found == {
        "exists": True,
        "cluster": {"server": server.url, "extensions": [INSECURE_EXTENSION]},
        "account": "system:serviceaccount:dra-accelerators:driver-node-1",
        "node": "node-1",
        "node_uid": "u-1",
        "seconds_left": 2000,
        "lifetime": 3000,
        "accepted": True,
        "problem": "",
    }
    assert token() not in json.dumps(found)


@pytest.mark.parametrize("skip", [False, True])
def test_token_is_not_sent_over_an_insecure_connection(server: Server, skip: bool) -> None:
    document = json.loads(kubeconfig(server.url, token()))
    cluster = {"server": "https://127.0.0.1:9", "insecure-skip-tls-verify": True} if skip else {"server": server.url}
    document["clusters"][0]["cluster"] = cluster
    found = service_account.read_identity(json.dumps(document), verify=True, now=2000)
    assert found["accepted"] is None and "rejected" in found["problem"] and not server.paths


def test_identity_rejected_by_api_server(server: Server) -> None:
    found = service_account.read_identity(kubeconfig(server.url, token("node-2")), verify=True, now=2000)
    assert found["accepted"] is False and "does not accept" in found["problem"]


def test_identity_unreachable_api_server_is_unknown() -> None:
    found = service_account.read_identity(kubeconfig("http://127.0.0.1:9", token()), verify=True, now=2000)
    assert found["accepted"] is None and "127.0.0.1:9" in found["problem"]


@pytest.mark.parametrize("text", [None, "", "{}", "not json", kubeconfig("http://127.0.0.1:9", "word")])
def test_identity_missing_is_reported(text: str | None) -> None:
    found = service_account.read_identity(text, verify=True)
    assert found["accepted"] is None and found["account"] == "" and found["problem"]


class Toolkit(System):
    """A host with one program of NVIDIA Container Toolkit."""

    def __init__(self, output: str) -> None:
        super().__init__("/nonexistent")
        self.output = output

    def exists(self, path: str) -> bool:
        return path == "/usr/bin/nvidia-ctk"

    def run(self, argv, timeout: float, input=None) -> Completed:  # type: ignore[no-untyped-def]  # noqa: A002
        return Completed(0, self.output, "")


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("NVIDIA Container Toolkit CLI version 1.17.4\ncommit: 9b69590c7428470a72f2ae05f826412976af1395\n", "1.17.4"),
        ("NVIDIA CDI Hook version 1.17.8-rc.1\n", "1.17.8"),
        ("unknown", ""),
    ],
)
def test_toolkit_facts_report_the_version(output: str, version: str) -> None:
    assert node_facts.toolkit_facts(Toolkit(output)) == {"toolkit": ["/usr/bin/nvidia-ctk"], "toolkit_version": version}


def test_uvm_facts_report_whether_the_module_is_loaded_or_installed(tmp_path: Path) -> None:
    system, files = System(str(tmp_path)), tmp_path / "lib/modules" / os.uname().release
    assert node_facts.uvm_facts(system) == {"uvm": ""}
    files.mkdir(parents=True)
    (files / "modules.dep").write_text(
        "updates/dkms/nvidia.ko:\nupdates/dkms/nvidia-uvm.ko.xz: updates/dkms/nvidia.ko\n"
    )
    assert node_facts.uvm_facts(system) == {"uvm": "installed"}
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/devices").write_text("Character devices:\n510 nvidia-uvm\n")
    assert node_facts.uvm_facts(system) == {"uvm": "loaded"}


def test_numa_memory_facts_list_gpus_whose_memory_is_a_numa_node(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus"
    for name in ("0009:01:00.0", "0008:01:00.0", "0000:01:00.0"):
        (folder / name).mkdir(parents=True)
        if name != "0000:01:00.0":
            (folder / name / "numa_status").write_text("Node: 2\nStatus: online\n")
    assert node_facts.numa_memory_facts(System(str(tmp_path))) == {"numa_memory": ["0008:01:00.0", "0009:01:00.0"]}


class OperatorToolkit(Toolkit):
    """A host with a toolkit and an older one of NVIDIA's GPU Operator, which the container runtime uses."""

    def exists(self, path: str) -> bool:
        return path in ("/usr/bin/nvidia-ctk", "/usr/local/nvidia/toolkit/nvidia-ctk")

    def run(self, argv, timeout: float, input=None) -> Completed:  # type: ignore[no-untyped-def]  # noqa: A002
        version = "1.9.0" if argv[0].startswith("/usr/local/") else "1.17.8"
        return Completed(0, f"NVIDIA Container Toolkit CLI version {version}\n", "")


def test_toolkit_facts_include_gpu_operator_version() -> None:
    found = node_facts.toolkit_facts(OperatorToolkit(""))
    assert found == {"toolkit": ["/usr/bin/nvidia-ctk"], "toolkit_version": "1.9.0"}
