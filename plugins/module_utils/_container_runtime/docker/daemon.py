# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Query Docker Engine on a node: its file, its running process, and the containers that a restart stops. Validate changes of the file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from ..._host.systemd_unit import COMMAND_SECONDS, Unit, command_line, last_output_line
from ...core.errors import AcceleratorError
from ...core.host.system import System
from ..containerd.config import Change
from ..detect import CRI_DOCKERD
from ..restore_record import Record, revert_changes
from .config import (
    Info,
    document_of,
    excludes_cdi,
    only_cdi,
    read_info,
    refuse_old,
    text_with,
    text_without,
    version_in,
)
from .runtimes import DockerError

_NAMED_CONTAINERS = 8
#: The option of dockerd for its configuration file.
_FILE = "--config-file"


class Docker(Unit):
    """One Docker Engine: its command, its daemon, its file, and its unit.

    ``stop_containers`` allows a restart to stop running containers.
    """

    name = "Docker Engine"
    options = MappingProxyType({"config-file": "config"})

    def __init__(
        self,
        system: System,
        *,
        command: str,
        daemon: str,
        config: str,
        service: str,
        timeout: float,
        stop_containers: bool = False,
    ) -> None:
        super().__init__(system, service=service, timeout=timeout)
        self.command = command
        self.daemon = self.program = daemon
        self._default_config = config
        self.stop_containers = stop_containers
        #: Whether cri-dockerd was active before the first restart of this run.
        self._cri_dockerd: bool | None = None

    @property
    def config(self) -> str:
        """Return the configuration file from the command line of the process, otherwise the default."""
        return self.path_options.get("config") or self._default_config

    def text(self) -> str | None:
        """Return the text of the configuration file, or None if it does not exist."""
        try:
            return self.system.read_text(self.config)
        except FileNotFoundError:
            return None

    # Running process

    def info(self) -> Info | None:
        """Return the info of the running Docker Engine, or None if it does not respond. Raises DockerError for an unusable response."""
        done = self.system.run([self.command, "info", "--format", "{{json .}}"], COMMAND_SECONDS)
        # Without a daemon, the command prints client data and exits with 1.
        return None if done.returncode else read_info(done.stdout)

    def version(self) -> tuple[int, ...]:
        """Return the version of the running process, otherwise of the program. Raises DockerError for a version without CDI."""
        info = self.info()
        version = (
            info.version if info else version_in(self.system.run([self.daemon, "--version"], COMMAND_SECONDS).stdout)
        )
        refuse_old(version)
        return version

    def restart_reason(self, wanted: Sequence[str], *, restart_pending: bool) -> str:
        """Return why the running process must be restarted to read the configured directories, or "".

        Raises DockerError if a restart would not help.
        """
        if not self.process()[0]:
            return f"{self.service} is not running"
        info = self.info()
        if info is None:
            return f"{self.service} does not respond"
        if info.reads(wanted):
            return ""
        if restart_pending or self.written_since_start([self.config]):
            return "the running Docker Engine does not read the CDI directories of its file yet"
        raise DockerError(
            f"The running Docker Engine reads CDI files from {', '.join(info.folders) or 'no directory'}, expected {', '.join(wanted)} from "
            f"{self.config}, and it was started after the file was written",
            hint=f"Look for --feature and --cdi-spec-dir in `systemctl cat {self.service}`; these settings take precedence. If the file was "
            "copied with an older time, restart Docker Engine.",
            code="no-proof",
        )

    # Changes

    def plan(self, wanted: Sequence[str]) -> list[Change]:
        """Return the change that makes Docker Engine read the directories. Empty if it already does. Raises DockerError."""
        version = self.version()
        before = self.text()
        info = self.info()
        if info and info.reads(wanted) and not excludes_cdi(document_of(before, self.config), wanted):
            return []
        after = text_with(before, self.config, version, wanted)
        if after == before or after is None:
            return []
        self.refuse_invalid(after)
        return [Change(self.config, before, after)]

    def plan_revert(self, record: Record) -> list[Change]:
        """Return the change that reverts this collection's changes. Raises DockerError."""
        texts = {path: self.system.read_text(path) for path in record.files if self.system.exists(path)}
        return revert_changes(record, texts, self.remove_own_changes)

    def remove_own_changes(self, text: str, previous: str | None) -> str | None:
        """Return the text of the file with this collection's changes removed, or None for an empty file."""
        return text_without(text, previous, self.config)

    def diff(self, changes: Sequence[Change]) -> dict[str, str]:
        """Return the diff of the CDI settings in Ansible's form. The rest of the file is omitted, because it can contain passwords."""
        each = changes[0] if changes else Change(self.config, None, None)
        before, after = only_cdi(each.before, each.after, self.config)
        return {"before": before, "after": after, "before_header": self.config, "after_header": self.config}

    def refuse_invalid(self, text: str) -> None:
        """Validate a text with the daemon. Raises DockerError."""
        refuse_invalid(self.system, self.daemon, self.config, text, self.service)

    # Restart

    def refuse_restart(self) -> int:
        """Return the number of containers that a restart stops. Raises DockerError if it stops any and that is not allowed."""
        info = self.info() if self.process()[0] else None
        if info is None or not info.containers or info.live_restore:
            return 0
        if self.stop_containers:
            return info.containers
        names_output = self.system.run([self.command, "ps", "--format", "{{.Names}}"], COMMAND_SECONDS).stdout.split()
        names = ", ".join(names_output[:_NAMED_CONTAINERS]) + (", …" if len(names_output) > _NAMED_CONTAINERS else "")
        raise DockerError(
            f"Docker Engine must be restarted, which would stop {info.containers} running containers ({names}), because live-restore is disabled",
            hint=f'Set "live-restore": true in {self.config} and run `systemctl reload {self.service}`, which keeps them running; or drain '
            "the node; or set container_runtime_docker_stop_containers to true. Nothing was changed.",
            code="containers-run",
        )

    def restart(self, wanted: Sequence[str] | None) -> str:
        """Restart the unit and wait until it reports the directories. Return the problem, or ""."""
        if self._cri_dockerd is None:
            self._cri_dockerd = self._serves(CRI_DOCKERD)
        return self.restart_until(lambda: self._problem(wanted))

    def _problem(self, wanted: Sequence[str] | None) -> str:
        try:
            info = self.info()
        except AcceleratorError as error:
            return str(error)
        if info is None:
            return "it does not respond."
        if self._cri_dockerd and not self._serves(CRI_DOCKERD):
            return f"{CRI_DOCKERD} was active before the restart and is not active after it."
        missing = sorted(set(wanted or ()) - set(info.folders))
        return f"it responds, but reads no CDI files from {', '.join(missing)}." if missing else ""

    def _serves(self, unit: str) -> bool:
        return self.system.run(["systemctl", "is-active", unit], COMMAND_SECONDS).stdout.strip() == "active"


def options_of(words: Sequence[str], daemon: str) -> list[str]:
    """Return the options in a process's command line without its configuration file. Empty if it is not the program ``daemon``."""
    if not words or Path(words[0]).name != Path(daemon).name:
        return []
    options: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if word == _FILE:
            next(rest, None)
        elif not word.startswith(f"{_FILE}="):
            options.append(word)
    return options


def refuse_invalid(system: System, daemon: str, path: str, text: str, service: str) -> None:
    """Validate a text with dockerd, if dockerd is installed and supports it (version 23 or newer). Raises DockerError.

    The options of the unit's process are included, because dockerd rejects a file that contradicts them.
    """
    options = options_of(command_line(system, service), daemon)
    with tempfile.TemporaryDirectory(prefix="dra-accelerators-") as folder:
        trial = Path(folder, "daemon.json")
        trial.write_text(text, encoding="utf-8")
        try:
            done = system.run([daemon, "--validate", _FILE, str(trial), *options], COMMAND_SECONDS)
        except AcceleratorError as error:
            if error.code != "command-missing":
                raise
            return
    if done.returncode and "unknown flag" not in done.stderr:
        raise DockerError(
            f"{daemon} rejects {path} with the change: {last_output_line(done)}",
            hint="Nothing was changed.",
            code="not-taken",
        )
