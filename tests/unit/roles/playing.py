# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run tasks of a role on hosts that are all this machine, as the user of the tests."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.unit.ansible_process import PYTHON, run_ansible


@dataclass(frozen=True)
class Played:
    """The end of a run: its exit status, its output, and by host the result of each failed task."""

    status: int
    output: str

    @property
    def failed(self) -> dict[str, dict[str, Any]]:
        """Return the result of the last failed task of each host."""
        found = re.findall(r"^fatal: \[([^\s\]]+)[^\]]*\]: FAILED! => (\{.*\})$", self.output, re.MULTILINE)
        return {host: json.loads(result) for host, result in found}

    @property
    def messages(self) -> dict[str, Any]:
        """Return the value of each host's task ``debug`` whose ``msg`` is an expression with ``| to_json | b64encode``."""
        lines = re.findall(r'^ok: \[([^\s\]]+)[^\]]*\] => \{\s+"msg": "([A-Za-z0-9+/=]*)"', self.output, re.MULTILINE)
        return {host: json.loads(base64.b64decode(text)) for host, text in lines}


def tasks_of_file(path: Path) -> list[dict[str, Any]]:
    """Return the tasks of a file, so that a play in another directory can include the files that they include."""
    tasks: list[dict[str, Any]] = yaml.safe_load(path.read_text("utf-8"))
    waiting = list(tasks)
    while waiting:
        task = waiting.pop()
        waiting += [*task.get("block", ()), *task.get("rescue", ()), *task.get("always", ())]
        if "ansible.builtin.include_tasks" in task:
            task["ansible.builtin.include_tasks"] = str(path.parent / task["ansible.builtin.include_tasks"])
    return tasks


def play(
    directory: Path,
    tasks: Sequence[Mapping[str, Any]],
    hosts: Mapping[str, Mapping[str, Any]],
    *arguments: str,
    group: str = "accelerator_nodes",
    path: Path | None = None,
    imported_with: Mapping[str, Any] | None = None,
    serial: int | None = None,
) -> Played:
    """Run tasks on hosts, each with its variables.

    ``path`` is a directory of programs that precede all others. With ``imported_with``, a playbook imports the tasks
    with these variables. ``serial`` is the number of hosts in a batch.
    """
    common = {"ansible_connection": "local", "ansible_python_interpreter": str(PYTHON)}
    inventory = {group: {"hosts": {name: {**common, **variables} for name, variables in hosts.items()}}}
    (directory / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    batches = {} if serial is None else {"serial": serial}
    document = [{"hosts": group, "gather_facts": False, **batches, "tasks": list(tasks)}]
    (directory / "play.yml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    playbook = directory / "play.yml"
    if imported_with is not None:
        playbook = directory / "importing.yml"
        importing = [{"ansible.builtin.import_playbook": "play.yml", "vars": dict(imported_with)}]
        playbook.write_text(yaml.safe_dump(importing), encoding="utf-8")
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(directory / "local")}
    environment |= {"ANSIBLE_REMOTE_TEMP": str(directory / "remote"), "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    done = run_ansible(
        [
            Path(sys.executable).with_name("ansible-playbook"),
            "-i",
            directory / "hosts.yml",
            *arguments,
            playbook,
        ],
        env=environment,
    )
    return Played(done.returncode, done.stdout + done.stderr)
