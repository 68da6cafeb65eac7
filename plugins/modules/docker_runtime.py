#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: docker_runtime
version_added: 0.1.0
short_description: Have Docker offer a further runtime
description:
  - Adds a runtime to Docker's configuration file. All other keys stay, in their order, and so does the default runtime.
  - Docker is told to read the file again, and has to show the runtime, or to show it no more. It is not restarted, and containers go on. If
    it does not, the file is put back.
  - A file that was written and not read yet, as by a run that was cut short, is read by the next run.
notes:
  - Needs root on the node. A file that is not indented is written with indentation.
  - Docker forgets runtimes only by a file that has a word on them. Where the last one goes, the file has an empty C(runtimes) for a moment.
  - Containers that run by a runtime that goes run on, until they are stopped. Docker does not start them again.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details:
      - What the file says of runtimes; nothing else of it is shown.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  name:
    description: The runtime's name.
    type: str
    required: true
  state:
    description:
      - Whether Docker is to offer the runtime.
      - V(absent) takes back what V(present) has changed. A file that nobody has changed since is afterwards what it was before, byte for
        byte. A runtime of that name that this module has not added stays.
    type: str
    choices: [present, absent]
    default: present
  program:
    description: The runtime's program; required for V(present).
    type: path
  arguments:
    description: What the program is told besides.
    type: list
    elements: str
    default: []
  config:
    description: Docker's configuration file.
    type: path
    default: /etc/docker/daemon.json
  service:
    description: The systemd unit that runs Docker. Where it is not running, only the file is written.
    type: str
    default: docker.service
  command:
    description: Docker's command line.
    type: str
    default: docker
  daemon:
    description: Docker's daemon, which tries the file where it is of release 23 or newer.
    type: str
    default: dockerd
  timeout:
    description: How many seconds Docker may take to read its file.
    type: int
    default: 30
  records:
    description: Folder on the node in which is written what was changed.
    type: path
    default: /var/lib/dra-accelerators
"""

EXAMPLES = r"""
- name: Have Docker offer crun
  dra.accelerators.docker_runtime:
    name: crun
    program: /usr/bin/crun

- name: Take it back
  dra.accelerators.docker_runtime:
    name: crun
    state: absent
"""

RETURN = r"""
file:
  description: Docker's configuration file, if it was written or removed, or would be in check mode; else empty.
  returned: success
  type: str
  sample: /etc/docker/daemon.json
reloaded:
  description: Whether Docker was told to read its file again, or would be in check mode.
  returned: success
  type: bool
  sample: true
settled:
  description: Whether there is nothing to do for this module, so that after a look in check mode no real run is needed.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: not-taken
"""

import json
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._docker import (
    RUNTIMES,
    DockerError,
    Record,
    entry,
    fingerprint,
    forgetting,
    known_runtimes,
    read,
    read_record,
    text_before,
    text_with,
)
from ansible_collections.dra.accelerators.plugins.module_utils._docker_daemon import Docker as DockerEngine
from ansible_collections.dra.accelerators.plugins.module_utils._docker_daemon import refuse_invalid
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

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
    """The node's Docker: its file, and what its process knows."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.system = System()
        places = {name: params[name] for name in ("command", "daemon", "config", "service", "timeout")}
        self.path = DockerEngine(self.system, **places).config
        self.record_path = f"{params['records']}/docker-{params['name']}.json"

    def text(self, path: str) -> str | None:
        """Return a file's text, or None where there is none."""
        try:
            return self.system.read_text(path)
        except FileNotFoundError:
            return None

    def write(self, path: str, text: str | None, mode: int) -> None:
        """Write a file as a whole with the mode that it has, or remove it. A symbolic link stays, and its target is written or removed."""
        path = self.system.real_path(path)
        if text is None:
            self.system.remove(path)
            return
        there = self.system.exists(path)
        self.system.write_atomic(path, text.encode(), mode=Path(path).stat().st_mode & 0o777 if there else mode)

    def is_active(self) -> bool:
        """Whether Docker is running."""
        done = self.system.run(["systemctl", "is-active", self.params["service"]], COMMAND_SECONDS)
        return done.stdout.strip() in ("active", "reloading")

    def knows(self) -> str | None:
        """Return the runtime's program as the running Docker knows it; None where it knows no such runtime. Raises DockerError."""
        done = self.system.run([self.params["command"], "info", "--format", "{{json .Runtimes}}"], COMMAND_SECONDS)
        if done.returncode:
            raise DockerError(
                f"`{self.params['command']} info` ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            )
        return known_runtimes(done.stdout).get(self.params["name"])

    def refuse_invalid(self, text: str) -> None:
        """Have the daemon try a text, where it can. Raises DockerError."""
        refuse_invalid(self.system, self.params["daemon"], self.path, text, self.params["service"])

    def put(self, text: str | None) -> None:
        """Have the file say this."""
        if self.text(self.path) != text:
            self.write(self.path, text, 0o644)

    def take(self, text: str | None, wanted: str | None) -> str:
        """Write the file, and have Docker know the runtime by this program, or not at all; returns what is wrong, or ""."""
        interim = forgetting(text, self.path) if wanted is None else None
        if interim is None:
            self.put(text)
            return self.reload(wanted)
        # A run that is killed in between is made up for by the next one, which finds the file as this one has left it.
        self.write(self.record_path, Record(text, fingerprint(interim)).to_text(), 0o600)
        self.put(interim)
        problem = self.reload(wanted)
        self.put(text)
        return problem

    def reload(self, wanted: str | None) -> str:
        """Have Docker read its file, and wait until it knows the runtime by this program, or not at all; returns what is wrong, or ""."""
        done = self.system.run(["systemctl", "reload", self.params["service"]], COMMAND_SECONDS)
        if done.returncode:
            return (
                f"systemctl reload {self.params['service']} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            )
        until = time.monotonic() + self.params["timeout"]
        while True:
            try:
                found = self.knows()
                problem = (
                    "" if found == wanted else f"it knows {found or 'no such runtime'}, expected {wanted or 'none'}"
                )
            except DockerError as error:
                problem = str(error)
            if not problem or time.monotonic() >= until:
                return problem
            time.sleep(PAUSE_SECONDS)


def carry_out(
    docker: Docker, before: str | None, after: str | None, programs: tuple[str | None, str | None], *, reloads: bool
) -> None:
    """Write the file and have it read; it is put back where Docker does not work by it. Raises DockerError.

    ``programs`` are the runtime's before and after.
    """
    if not reloads:
        docker.put(after)
        return
    problem = docker.take(after, programs[1])
    if not problem:
        return
    if after != before:
        docker.take(before, programs[0])
    raise DockerError(
        f"Docker does not work by {docker.path}: {problem}. "
        + ("The file was put back" if after != before else "It was not changed"),
        hint=f"Look at what `journalctl --unit {docker.params['service']}` says.",
        code="not-taken",
    )


def program_of(text: str | None, path: str, name: str) -> str | None:
    """Return a runtime's program by the file; None where the file has no such runtime."""
    there = read(text, path).get(RUNTIMES, {}).get(name)
    return there.get("path") if isinstance(there, dict) else None


def shown(text: str | None, path: str) -> str:
    """Return what a text says of runtimes: all else of the file may hold passwords."""
    runtimes = read(text, path).get(RUNTIMES)
    return json.dumps({RUNTIMES: runtimes}, indent=4) + "\n" if runtimes else ""


def work(module: AnsibleModule) -> dict[str, Any]:
    """Bring the runtime or take it away; returns the module's result. Raises AcceleratorError."""
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
    ours = wanted is not None or record is not None
    programs = program_of(before, docker.path, params["name"]), program_of(after, docker.path, params["name"])
    reloads = active and ours and (after != before or docker.knows() != programs[1])
    changed = after != before or reloads or (wanted is None and record is not None)
    if changed and not module.check_mode:
        if after is not None and after != before:
            docker.refuse_invalid(after)
            if wanted is not None:
                # Before the file: what is ours is known also of a run that is killed.
                origin = before
                if record is not None and before is not None:
                    origin = text_before(before, docker.path, params["name"], record)
                docker.write(docker.record_path, Record(origin, fingerprint(after)).to_text(), 0o600)
        try:
            carry_out(docker, before, after, programs, reloads=reloads)
        except DockerError:
            docker.write(docker.record_path, record.to_text() if record else None, 0o600)
            raise
        if wanted is None:
            docker.write(docker.record_path, None, 0o600)
    return {
        "changed": changed,
        "settled": not changed,
        "file": docker.path if after != before else "",
        "reloaded": reloads,
        "diff": {
            "before": shown(before, docker.path),
            "after": shown(after, docker.path),
            "before_header": docker.path,
            "after_header": docker.path,
        },
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
