#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: docker_runtime
version_added: 0.1.0
short_description: Add or remove a Docker runtime
description:
  - Adds a runtime to Docker's configuration file, or removes it. The module keeps all other keys, their order, and the default runtime.
  - The module reloads Docker, and verifies with C(docker info) that Docker uses the change. It does not restart Docker. Containers keep running.
    If the verification fails, the module restores the file.
  - If an interrupted run has written the file without a reload, the next run reloads Docker.
notes:
  - Requires root on the node. The module writes the file with indentation, also if it was not indented before.
  - Docker updates its runtimes only if the file has the key C(runtimes). When the module removes the last runtime, it temporarily writes an
    empty C(runtimes).
  - Containers of a removed runtime keep running until they are stopped. Docker cannot start them again.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details:
      - The diff contains only the runtimes of the file.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  name:
    description: The name of the runtime.
    type: str
    required: true
  state:
    description:
      - V(present) adds the runtime, and V(absent) removes it.
      - V(absent) reverts the change of V(present). If the file was not edited in between, the module restores its previous content, byte for
        byte. It does not remove a runtime that it did not add.
    type: str
    choices: [present, absent]
    default: present
  program:
    description: The path of the runtime's program. Required for O(state=present).
    type: path
  arguments:
    description: The arguments of the program.
    type: list
    elements: str
    default: []
  config:
    description: The path of Docker's configuration file.
    type: path
    default: /etc/docker/daemon.json
  service:
    description: The systemd unit of Docker. If the unit is not running, the module only writes the file.
    type: str
    default: docker.service
  command:
    description: The name or path of the Docker client.
    type: str
    default: docker
  daemon:
    description: The name or path of the Docker daemon. Release 23 or later validates the file before the module writes it.
    type: str
    default: dockerd
  timeout:
    description: The maximum wait until Docker uses the change, in seconds.
    type: int
    default: 30
  records:
    description: The directory on the node for the records of changes.
    type: path
    default: /var/lib/dra-accelerators
"""

EXAMPLES = r"""
- name: Add the runtime crun to Docker
  dra.accelerators.docker_runtime:
    name: crun
    program: /usr/bin/crun

- name: Remove the runtime crun from Docker
  dra.accelerators.docker_runtime:
    name: crun
    state: absent
"""

RETURN = r"""
file:
  description: The path of the configuration file if the module writes or deletes it, in check mode too. Otherwise empty.
  returned: success
  type: str
  sample: /etc/docker/daemon.json
reloaded:
  description: Whether the module reloads Docker, in check mode too.
  returned: success
  type: bool
  sample: true
up_to_date:
  description: Whether there is nothing to change. If it is true in check mode, a run without check mode is not necessary.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: not-taken
"""

import json
import time
from functools import partial
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker.daemon import (
    Docker as DockerEngine,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker.daemon import refuse_invalid
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker.runtimes import (
    RUNTIMES,
    DockerError,
    Record,
    entry,
    fingerprint,
    known_runtimes,
    read,
    read_record,
    text_before,
    text_with,
    text_without_runtimes,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.file_restore import (
    call_for_problem,
    describe_not_restored,
    describe_restored_state,
    restore_all,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.single_run import run_alone
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

COMMAND_SECONDS = 30.0
PAUSE_SECONDS = 0.2
CONSTRAINTS: dict[str, Any] = {"required_if": [("state", "present", ["program"])]}


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "name": {"type": "str", "required": True},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "program": {"type": "path"},
        "arguments": {"type": "list", "elements": "str", "default": []},
        "config": {"type": "path", "default": "/etc/docker/daemon.json"},
        "service": {"type": "str", "default": "docker.service"},
        "command": {"type": "str", "default": "docker"},
        "daemon": {"type": "str", "default": "dockerd"},
        "timeout": {"type": "int", "default": 30},
        "records": {"type": "path", "default": "/var/lib/dra-accelerators"},
    }


class Docker:
    """The node's Docker: its configuration file, and its running daemon."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.system = System()
        options = {name: params[name] for name in ("command", "daemon", "config", "service", "timeout")}
        self.path = DockerEngine(self.system, **options).config
        self.record_path = f"{params['records']}/docker-{params['name']}.json"

    def text(self, path: str) -> str | None:
        """Return the text of a file, or None if it does not exist."""
        try:
            return self.system.read_text(path)
        except FileNotFoundError:
            return None

    def is_active(self) -> bool:
        """Return whether Docker is running."""
        done = self.system.run(["systemctl", "is-active", self.params["service"]], COMMAND_SECONDS)
        return done.stdout.strip() in ("active", "reloading")

    def running_program(self) -> str | None:
        """Return the program of the runtime in the running Docker, or None without this runtime. Raises DockerError."""
        done = self.system.run([self.params["command"], "info", "--format", "{{json .Runtimes}}"], COMMAND_SECONDS)
        if done.returncode:
            raise DockerError(
                f"`{self.params['command']} info` ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            )
        return known_runtimes(done.stdout).get(self.params["name"])

    def refuse_invalid(self, text: str) -> None:
        """Validate a configuration with dockerd, if its version supports that. Raises DockerError."""
        refuse_invalid(self.system, self.params["daemon"], self.path, text, self.params["service"])

    def write_file(self, text: str | None) -> None:
        """Write the configuration file if it differs."""
        if self.text(self.path) != text:
            self.system.replace_text(self.path, text)

    def write_record(self, record: Record | None) -> None:
        """Write the record, or remove it. Raises OSError."""
        self.system.replace_text(self.record_path, record.to_text() if record else None, mode=0o600)

    def restore_record(self, before: str | None, record: Record | None) -> str:
        """Restore the record if the file has its previous text, and return the problem, or "".

        For any other text the next run needs the new record.
        """

        def restore() -> None:
            if self.text(self.path) == before:
                self.write_record(record)

        return describe_not_restored(restore_all([(self.record_path, restore)]))

    def write_and_reload(self, text: str | None, wanted: str | None) -> str:
        """Write the file, and wait until Docker uses this program for the runtime, or none. Return the problem, or ""."""
        interim = text_without_runtimes(text, self.path) if wanted is None else None
        if interim is None:
            self.write_file(text)
            return self.reload(wanted)
        # If this run is killed here, the next run finds the interim file by its record.
        self.write_record(Record(text, fingerprint(interim), fingerprint(self.text(self.path) or "")))
        self.write_file(interim)
        problem = self.reload(wanted)
        self.write_file(text)
        return problem

    def reload(self, wanted: str | None) -> str:
        """Reload Docker, and wait until it uses this program for the runtime, or none. Return the problem, or ""."""
        done = self.system.run(["systemctl", "reload", self.params["service"]], COMMAND_SECONDS)
        if done.returncode:
            return (
                f"systemctl reload {self.params['service']} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            )
        until = time.monotonic() + self.params["timeout"]
        while True:
            try:
                found = self.running_program()
                problem = (
                    ""
                    if found == wanted
                    else f"the running Docker uses the program {found or 'none'}, expected {wanted or 'none'}"
                )
            except DockerError as error:
                problem = str(error)
            if not problem or time.monotonic() >= until:
                return problem
            time.sleep(PAUSE_SECONDS)


def apply_file(
    docker: Docker, before: str | None, after: str | None, programs: tuple[str | None, str | None], *, reloads: bool
) -> None:
    """Write the file and reload Docker. If that fails, restore the file. Raises DockerError.

    ``programs`` are the runtime's program before and after the change.
    """
    if not reloads:
        docker.write_file(after)
        return
    problem = call_for_problem(partial(docker.write_and_reload, after, programs[1]))
    if not problem:
        return
    state = "It was not changed"
    if after != before:
        reload_problems: list[str] = []
        problems = restore_all(
            [(docker.path, lambda: reload_problems.append(docker.write_and_reload(before, programs[0])))]
        )
        if problems:  # a step before the write or the reload can have failed
            problems = restore_all([(docker.path, partial(docker.write_file, before))])
            reload_problems.append(call_for_problem(partial(docker.reload, programs[0])))
        state = describe_restored_state(problems, "".join(reload_problems))
    raise DockerError(
        f"Docker does not use {docker.path}: {problem}. {state}",
        hint=f"Check the output of `journalctl --unit {docker.params['service']}`.",
        code="not-taken",
    )


def program_of(text: str | None, path: str, name: str) -> str | None:
    """Return a runtime's program in the file, or None if the file does not have the runtime."""
    runtime = read(text, path).get(RUNTIMES, {}).get(name)
    return runtime.get("path") if isinstance(runtime, dict) else None


def shown_runtimes(text: str | None, path: str) -> str:
    """Return only the runtimes of the file, because its other content can have passwords."""
    runtimes = read(text, path).get(RUNTIMES)
    return json.dumps({RUNTIMES: runtimes}, indent=4) + "\n" if runtimes else ""


def work(module: AnsibleModule) -> dict[str, Any]:
    """Add or remove the runtime, and return the module's result. Raises AcceleratorError."""
    params = module.params
    docker = Docker(params)
    before = docker.text(docker.path)
    record = read_record(docker.text(docker.record_path), docker.record_path)
    wanted = entry(params["program"], params["arguments"]) if params["state"] == "present" else None
    after = before
    if wanted is not None:
        after = text_with(before, docker.path, params["name"], wanted)
    elif record is not None and before is not None:
        after = text_before(before, docker.path, params["name"], record)
    active = docker.is_active()
    is_managed = wanted is not None or record is not None
    programs = program_of(before, docker.path, params["name"]), program_of(after, docker.path, params["name"])
    reloads = active and is_managed and (after != before or docker.running_program() != programs[1])
    changed = after != before or reloads or (wanted is None and record is not None)
    if changed and not module.check_mode:
        if after is not None and after != before:
            docker.refuse_invalid(after)
            if wanted is not None:
                # Write the record before the file, so that it exists even if this run is killed.
                origin = before
                if record is not None and before is not None:
                    origin = text_before(before, docker.path, params["name"], record)
                docker.write_record(Record(origin, fingerprint(after), fingerprint(before or "")))
        try:
            apply_file(docker, before, after, programs, reloads=reloads)
        except (AcceleratorError, OSError):
            problem = docker.restore_record(before, record)
            if problem:
                module.warn(problem)
            raise
        if wanted is None:
            docker.write_record(None)
    return {
        "changed": changed,
        "up_to_date": not changed,
        "file": docker.path if after != before else "",
        "reloaded": reloads,
        "diff": {
            "before": shown_runtimes(before, docker.path),
            "after": shown_runtimes(after, docker.path),
            "before_header": docker.path,
            "after_header": docker.path,
        },
    }


def main() -> None:
    """Entry point."""
    run_alone(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work, System())


if __name__ == "__main__":
    main()
