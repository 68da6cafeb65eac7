# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A failed step of a rollback stops no other step, and the last message names each failed step and the cause of the rollback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import Played, play, tasks_of_file

ROLES = Path(__file__).resolve().parents[3] / "roles"
CAUSE = "the new one does not start"
SYSTEMCTL = """#!/bin/sh
echo "$*" >> {directory}/asked
case $* in
show*) printf 'LoadState=loaded\\nActiveState=active\\nUnitFileState=enabled\\n' ;;
*reload*) ;;
*) echo 'systemctl is broken' >&2; exit 1 ;;
esac
"""


def rollback(directory: Path, role: str, name: str, **variables: Any) -> Played:
    """Run a task file of a role after a failed task, with a systemctl that starts nothing. Tasks are repeated three times without pauses."""
    programs = directory / "programs"
    programs.mkdir()
    (programs / "systemctl").write_text(SYSTEMCTL.format(directory=directory))
    (programs / "systemctl").chmod(0o755)
    tasks = tasks_of_file(ROLES / role / "tasks" / name)
    for task in [part for each in tasks for part in (each, *each.get("block", ()))]:
        task.update({"delay": 0, "retries": 3} if "delay" in task else {})
    block = {"block": [{"name": "Start it", "ansible.builtin.fail": {"msg": CAUSE}}], "rescue": tasks}
    values = {**yaml.safe_load((ROLES / role / "vars/main.yml").read_text("utf-8")), **variables}
    return play(directory, [block], {"node": values}, path=programs)


def message(played: Played) -> list[str]:
    """Return the lines of the last message."""
    found = played.failed["node"]["msg"]
    return list(found) if isinstance(found, list) else [str(found)]


def driver_variables(directory: Path) -> dict[str, Any]:
    """Return the variables of a node whose files cannot be restored, because one of their directories is a file. It has no kubeconfig."""
    etc = directory / "etc"
    etc.mkdir()
    (etc / "kubeconfig").write_text("new")
    (etc / "kubeconfig.previous").write_text("previous")
    units = {name: {"managed": True} for name in ("dra-accelerators-driver.service", "dra-accelerators-dcmi.service")}
    return {
        "dra_driver_kubeconfig": str(directory / "no-kubeconfig"),
        "dra_driver_context": "",
        "dra_driver_node_name": "node",
        "dra_driver_node_info": "",
        "dra_driver_pod_namespace": "pods",
        "dra_driver_publish_timeout": 2,
        "dra_driver_root": str(directory / "opt"),
        "dra_driver_interpreter": "python3",
        "dra_driver_kubelet_root": str(directory / "kubelet"),
        "__dra_driver_configuration": str(etc),
        "__dra_driver_saved": {"rc": 0},
        "__dra_driver_host": {"units": units, "programs": {"proven": {"driver": {"release": "a", "environment": "e"}}}},
        "__dra_driver_release": "b",
        "__dra_driver_previous": True,
        "__dra_driver_pod_previous": True,
        "__dra_driver_previous_release": "a",
        "__dra_driver_previous_links": [],
        "__dra_driver_previous_files": [{"path": str(etc / "kubeconfig/unit"), "content": "x"}],
        "__dra_driver_written": {"previous": [{"path": str(etc / "kubeconfig/unit"), "content": "x"}]},
        "__dra_driver_previous_fingerprint": "a",
        "__dra_driver_has_dcmi": True,
        "__dra_driver_ahead": True,
        "__dra_driver_node_objects": [{"kind": "ClusterRole", "metadata": {"name": "dra-accelerators-driver-node"}}],
        "__dra_driver_node_labels": {},
        "__dra_driver_node_names": [],
        "__dra_driver_revision": "r",
        "__dra_driver_image": "i",
    }


def test_driver_rollback_runs_each_step_and_names_each_failure(tmp_path: Path) -> None:
    played = rollback(tmp_path, "dra_driver", "rollback.yml", **driver_variables(tmp_path))
    first, result, *problems = message(played)
    assert CAUSE in first and result == "The rollback to release a is incomplete. These steps failed:", played.output
    expected = {
        "Read the record of the driver that was last ready": "proven-driver",
        "Restore release, environment, units, and configuration": "etc/kubeconfig is not a directory",
        "Restore the DCMI helper": "systemctl is broken",
        "Start the previous driver": "",
        "Allow the previous driver to watch claims": "no-kubeconfig",
    }
    named = dict(problem.split(": ", 1) for problem in problems[: len(expected)])
    assert set(named) == set(expected), played.output
    assert all(text in named[step] for step, text in expected.items()), named
    assert (tmp_path / "etc/kubeconfig").read_text() == "previous"


def test_pod_rollback_runs_each_step_and_names_each_failure(tmp_path: Path) -> None:
    played = rollback(tmp_path, "dra_driver", "rollback_pod.yml", **driver_variables(tmp_path))
    first, cause, result, *problems = message(played)
    assert "the driver pod of revision r (i)" in first and CAUSE in cause, played.output
    assert result == "The rollback to the previous driver is incomplete. These steps failed:"
    assert sorted(problem.partition(":")[0] for problem in problems) == [
        "Read the new pod",
        "Read the record of the driver that was last ready",
        "Restore release, environment, units, and configuration",
        "Restore the DCMI helper",
        "Restore the labels of the Node",
        "Wait for the end of the new pod",
        "Wait until the previous driver is ready",
    ]


@pytest.fixture
def address() -> Iterator[str]:
    """Yield the address of a controller that is ready at the third request."""
    statuses = [503, 503]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop() if statuses else 200)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def controller_variables(directory: Path, address: str) -> dict[str, Any]:
    (directory / "file").touch()
    return {
        "dra_controller_ready_timeout": 3,
        "dra_controller_address": address,
        "__dra_controller_was_running": True,
        "__dra_controller_driver_needs_programs": False,
        "__dra_controller_host": {"programs": {"proven": {"controller": {"release": "", "environment": ""}}}},
        "__dra_controller_files": [],
        "__dra_controller_previous_files": [{"path": str(directory / "file/unit"), "content": "x"}],
    }


def test_controller_rollback_runs_each_step_and_names_each_failure(tmp_path: Path) -> None:
    played = rollback(tmp_path, "dra_controller", "rollback.yml", **controller_variables(tmp_path, "127.0.0.1:1"))
    (text,) = message(played)
    assert CAUSE in text and "The rollback is incomplete" in text and "runs again" not in text, played.output
    steps = ("Restore programs, unit", "systemctl is broken", "Wait until the previous controller is ready: ")
    assert [step for step in steps if step not in text] == []


def test_rollback_waits_for_the_previous_controller(tmp_path: Path, address: str) -> None:
    variables = {**controller_variables(tmp_path, address), "__dra_controller_unit": "show.service"}
    variables["__dra_controller_previous_files"] = [{"path": str(tmp_path / "unit"), "content": "x"}]
    (text,) = message(rollback(tmp_path, "dra_controller", "rollback.yml", **variables))
    assert "Wait until" not in text, text
