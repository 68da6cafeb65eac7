# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role dra_controller restores the previous controller of a host if the new one does not become ready."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playing import Played, play

SYSTEMCTL = """#!/bin/sh
echo "$*" >> {directory}/asked
case $* in
*MainPID*) echo {process} ;;
show*) printf 'LoadState=loaded\\nActiveState=active\\nUnitFileState=enabled\\n' ;;
esac
"""

NOT_RECORDED = {name: {"release": "", "environment": ""} for name in ("driver", "controller")}


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a controller that is ready with the configuration "previous" or "good", in the current release's directory."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_ready = (tmp_path / "etc/controller.yaml").read_text() in ("previous", "good")
            self.send_response(200 if is_ready else 503)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def run(directory: Path, address: str, configuration: str, *, process: int, token: str = "") -> Played:
    """Change the configuration, the link to the current release, and the kubeconfig of the controller of a host."""
    programs, etc = directory / "programs", directory / "etc"
    for each in (programs, etc / "controller"):
        each.mkdir(parents=True)
    (programs / "systemctl").write_text(SYSTEMCTL.format(directory=directory, process=process))
    (programs / "systemctl").chmod(0o755)
    (etc / "controller.yaml").write_text("previous")
    (etc / "controller/kubeconfig").write_text("{}")
    (directory / "current").symlink_to("releases/new")
    include = {
        "ansible.builtin.include_role": {"name": "dra.accelerators.dra_controller", "tasks_from": "restart"},
        "vars": {
            "__dra_controller_broken": [],
            "__dra_controller_files": [{"path": str(etc / "controller.yaml"), "content": configuration}],
            "__dra_controller_kubeconfig_file": {
                "path": str(etc / "controller/kubeconfig"),
                "secret_content": '{"a": 1}',
            },
            "__dra_controller_configuration": str(etc),
            "__dra_controller_fingerprint": "new",
        },
    }
    previous = [{"path": str(directory / "current"), "state": "link", "target": "releases/previous"}]
    facts = {
        "__dra_controller_host_record": {},
        "__dra_controller_host": {"programs": {"release": "", "environment": "", "proven": NOT_RECORDED}},
        "__dra_controller_stat": {"stat": {"exists": True}},
        "__dra_controller_slurped": {"content": base64.b64encode(b"{}").decode()},
        "__dra_controller_token": {"token": token},
        "__python_environment_links": {"previous": previous},
    }
    variables = {"dra_controller_address": address, "dra_controller_ready_timeout": 1, **facts}
    return play(directory, [include], {"node": variables}, path=programs)


def found(directory: Path) -> tuple[str, str, str]:
    """Return the configuration, the target of the link, and the kubeconfig."""
    etc = directory / "etc"
    return (
        (etc / "controller.yaml").read_text(),
        str((directory / "current").readlink()),
        (etc / "controller/kubeconfig").read_text(),
    )


def test_controller_that_becomes_ready_is_kept(tmp_path: Path, address: str) -> None:
    played = run(tmp_path, address, "good", process=os.getpid())
    assert played.status == 0 and found(tmp_path) == ("good", "releases/new", '{"a": 1}'), played.output


def test_controller_that_does_not_become_ready_is_rolled_back(tmp_path: Path, address: str) -> None:
    played = run(tmp_path, address, "bad", process=os.getpid())
    assert found(tmp_path) == ("previous", "releases/previous", "{}"), played.output
    assert "The previous controller runs again and is ready." in played.failed["node"]["msg"]
    requested = (tmp_path / "asked").read_text().splitlines()
    assert [line for line in requested if line.startswith("restart")] == [
        "restart dra-accelerators-controller.service"
    ] * 2


def test_rollback_keeps_a_new_token_that_replaces_an_old_one(tmp_path: Path, address: str) -> None:
    run(tmp_path, address, "bad", process=os.getpid(), token="new")
    assert found(tmp_path) == ("previous", "releases/previous", '{"a": 1}')


def test_first_controller_of_a_host_is_not_rolled_back(tmp_path: Path, address: str) -> None:
    played = run(tmp_path, address, "bad", process=0)
    assert "No controller ran before" in played.failed["node"]["msg"], played.output
    assert found(tmp_path) == ("bad", "releases/new", '{"a": 1}')
