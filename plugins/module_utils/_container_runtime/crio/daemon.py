# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Query CRI-O on a node: its files, its effective settings, and the settings of its running process."""

from __future__ import annotations

import http.client
import os
import posixpath
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ..._host.systemd_unit import COMMAND_SECONDS, Unit, last_output_line
from ...core.errors import AcceleratorError
from ...core.host.system import Completed, System
from ..containerd.config import Change, File, differences, shorten_differences
from ..containerd.plan import changes_diff
from ..restore_record import Record, revert_changes
from .config import CrioError, Settings, candidates, read_settings, refuse_old, remove_own_changes, with_changes

_ANSWER_SECONDS = 10.0


class Crio(Unit):
    """One CRI-O instance: its command, its unit, and the default paths of its main file and drop-in directory."""

    name = "CRI-O"
    options = MappingProxyType({"config": "config", "c": "config", "config-dir": "drop_ins", "d": "drop_ins"})

    def __init__(
        self, system: System, *, command: str, config: str, drop_ins: str, service: str, timeout: float
    ) -> None:
        super().__init__(system, service=service, timeout=timeout)
        self.command = self.program = command
        self._default_config = config
        self._default_drop_ins = drop_ins

    @property
    def config(self) -> str:
        """Return the main file from the command line of the process, otherwise the default."""
        return self.path_options.get("config") or self._default_config

    @property
    def drop_ins(self) -> str:
        """Return the drop-in directory from the command line of the process, otherwise the default."""
        return (self.path_options.get("drop_ins") or self._default_drop_ins).rstrip("/")

    # Files and effective settings

    def read(self, path: str) -> File | None:
        """Return a file, or None if it does not exist."""
        try:
            return File(path, self.system.read_text(path))
        except FileNotFoundError:
            return None

    def files(self) -> list[File]:
        """Return every file below the drop-in directory, in the order in which CRI-O reads them."""
        return [found for path in self._paths(self.drop_ins) if (found := self.read(path)) is not None]

    def _paths(self, folder: str) -> list[str]:
        paths: list[str] = []
        for name in self.system.list_directory(folder):
            path = posixpath.join(folder, name)
            is_folder = self.system.path(path).is_dir() and not self.system.is_link(path)
            paths += self._paths(path) if is_folder else [path]
        return paths

    def settings(self) -> Settings:
        """Return the settings that CRI-O reads from its files. Raises CrioError if it rejects them."""
        refuse_old(self.system.run([self.command, "--version"], COMMAND_SECONDS).stdout, self.command)
        # CRI-O starts without a main file, but its `config` command fails if the given file does not exist.
        done = self._config(self.config if self.system.exists(self.config) else "/dev/null", self.drop_ins)
        if done.returncode:
            raise CrioError(
                f"CRI-O rejects its current configuration {self.config} and {self.drop_ins}: {last_output_line(done)}",
                hint=f"Fix this file, and verify it with `{self.command} config`. Nothing was changed.",
                code="configuration-refused",
            )
        return read_settings(done.stdout, f"the output of `{self.command} config`")

    def settings_after(self, changes: Sequence[Change]) -> Settings | None:
        """Return the settings of CRI-O after the changes, from copies of its files. Return None if CRI-O rejects them."""
        text, texts = with_changes(self.read(self.config), self.files(), changes)
        with tempfile.TemporaryDirectory(prefix="dra-accelerators-") as top:
            main, folder = Path(top, "crio.conf"), Path(top, "crio.conf.d")
            main.write_text(text, encoding="utf-8")
            folder.mkdir()
            for path, content in texts.items():
                trial = folder / posixpath.relpath(path, self.drop_ins)
                trial.parent.mkdir(parents=True, exist_ok=True)
                trial.write_text(content, encoding="utf-8")
            done = self._config(str(main), str(folder))
        return None if done.returncode else read_settings(done.stdout, f"the output of `{self.command} config`")

    def _config(self, config: str, drop_ins: str) -> Completed:
        words = [self.command, "--config", config, "--config-dir", drop_ins, "config"]
        return self.system.run(words, COMMAND_SECONDS)

    # Changes

    def plan(self, wanted: Sequence[str]) -> list[Change]:
        """Return the change that makes CRI-O read the directories and changes nothing else. Empty if it already does. Raises CrioError."""
        settings = self.settings()
        if settings.reads(wanted):
            return []
        undisturbed = self._baseline(settings)
        rejected = []
        for each in candidates(settings, self.read(self.config), self.files(), self.drop_ins, wanted):
            if each.problem:
                rejected.append(each.problem)
                continue
            after = self.settings_after([each])
            other = [] if after is None else list(differences(undisturbed.rest, after.rest))
            if after is not None and not other and after.reads(wanted):
                return [each]
            why = (
                "CRI-O rejects the file"
                if after is None
                else shorten_differences(other) or "the directories of another file would take precedence"
            )
            rejected.append(f"{each.path}: {why}")
        raise CrioError(
            f"No change of one file makes CRI-O read {' and '.join(wanted)}: {'; '.join(rejected)}",
            hint=f"Set cdi_spec_dirs in [crio.runtime] manually, so that `{self.command} config` shows it. Nothing was changed.",
            code="no-safe-change",
        )

    def plan_revert(self, record: Record) -> list[Change]:
        """Return the changes that revert this collection's changes, and verify that they affect only CDI. Raises CrioError."""
        texts = {path: found.text for path in record.files if (found := self.read(path)) is not None}
        changes = revert_changes(record, texts, self.remove_own_changes)
        if changes and self.system.finds(self.command):
            undisturbed = self._baseline(self.settings())
            after = self.settings_after(changes)
            other = ["CRI-O rejects the files"] if after is None else list(differences(undisturbed.rest, after.rest))
            if other:
                raise CrioError(
                    f"Reverting the change of {', '.join(each.path for each in changes)} would change more than CDI: {shorten_differences(other)}",
                    hint="Remove cdi_spec_dirs from these files manually. Nothing was changed.",
                    code="no-safe-change",
                )
        return changes

    def remove_own_changes(self, text: str, previous: str | None) -> str | None:
        """Return the text of a CRI-O file with this collection's changes removed, or None for an empty file."""
        return remove_own_changes(self.config, text, previous)

    def diff(self, changes: Sequence[Change]) -> dict[str, str]:
        """Return the diff of the changes in Ansible's form: only the lines that change, because others can hold registry passwords."""
        return changes_diff(changes)

    def _baseline(self, settings: Settings) -> Settings:
        found = self.settings_after([])
        other = ["it refuses them"] if found is None else list(differences(settings.rest, found.rest))
        if found is None or other:
            raise CrioError(
                f"CRI-O returns other settings for copies of {self.config} and {self.drop_ins} ({shorten_differences(other)}), so a change "
                "cannot be verified before it is applied",
                hint="Set cdi_spec_dirs in [crio.runtime] manually.",
                code="no-trial",
            )
        return found

    # Running process

    def running(self) -> Settings | None:
        """Return the settings of the running CRI-O from its socket, or None if it does not respond."""
        try:
            address = self.settings().socket
            return read_settings(get(address, "/config"), "the response of the running CRI-O")
        except (OSError, http.client.HTTPException, AcceleratorError):
            return None

    def restart_reason(self, wanted: Sequence[str], *, restart_pending: bool) -> str:
        """Return why the running process must be restarted to read the configured directories, or "".

        Raises CrioError if a restart would not help.
        """
        if not self.process()[0]:
            return f"{self.service} is not running"
        known = self.running()
        if known is None:
            return f"{self.service} does not respond on its socket"
        if known.reads(wanted):
            return ""
        paths = [self.config, self.drop_ins, *(each.path for each in self.files())]
        if restart_pending or self.written_since_start(paths):
            return "the running CRI-O has not loaded the cdi_spec_dirs of its files"
        raise CrioError(
            f"The running CRI-O reads CDI files from {', '.join(known.folders) or 'no directory'}, expected {', '.join(wanted)} from its files, "
            "and it was started after they were written",
            hint=f"Look for --cdi-spec-dirs or CONTAINER_CDI_SPEC_DIRS in `systemctl cat {self.service}` and the files that it names; these "
            "settings take precedence. If a file was copied with an older time, restart CRI-O.",
            code="no-proof",
        )

    def refuse_restart(self) -> int:
        """Return 0, because a restart of CRI-O stops no containers."""
        return 0

    def restart(self, wanted: Sequence[str] | None) -> str:
        """Restart the unit and wait until it responds with these directories. Return the problem, or ""."""
        return self.restart_until(lambda: self._problem(wanted))

    def _problem(self, wanted: Sequence[str] | None) -> str:
        known = self.running()
        if known is None:
            return "it does not respond on its socket."
        expected = set(self.settings().folders if wanted is None else wanted)
        missing = sorted(expected - set(known.folders))
        return f"it responds, but does not read {', '.join(missing)}." if missing else ""


class _Connection(http.client.HTTPConnection):
    def __init__(self, address: str) -> None:
        super().__init__("localhost", timeout=_ANSWER_SECONDS)
        self.address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_ANSWER_SECONDS)
        self.sock.connect(self.address)


def get(address: str, path: str, headers: Mapping[str, str] | None = None) -> str:
    """Return the response to GET on a Unix socket. Raises OSError and HTTPException."""
    connection = _Connection(os.fspath(address).removeprefix("unix://"))
    try:
        connection.request("GET", path, headers=dict(headers or {}))
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise http.client.HTTPException(f"{path} was answered with {response.status}")
    return text
