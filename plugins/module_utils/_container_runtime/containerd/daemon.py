# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Query containerd on a node: its files, its effective settings, and the settings of its running process. Restart it."""

from __future__ import annotations

import fnmatch
import json
import os
import posixpath
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ..._host.systemd_unit import COMMAND_SECONDS, Unit, last_output_line
from ...core.errors import AcceleratorError
from ...core.host.system import Completed, System
from ..toml_edit import set_values
from .config import Change, File, Settings, drop_in_folder, patterns, read_dump


class ContainerdError(AcceleratorError):
    """containerd rejects its settings, or does not run with them."""

    default_code = "containerd"


class Daemon(Unit):
    """One containerd: its command, its main file, and its unit.

    ``config`` is the main file of a process without ``--config``. ``advice`` is the manual change that is needed if
    another program rewrites the main file at each start, so that a change of it would be lost.
    """

    options = MappingProxyType({"config": "config", "c": "config", "address": "address", "a": "address"})

    def __init__(
        self, system: System, *, command: str, config: str, service: str, timeout: float, advice: str = ""
    ) -> None:
        super().__init__(system, service=service, timeout=timeout)
        self.command = self.program = command
        self.advice = advice
        self._default_config = config

    @property
    def generated(self) -> bool:
        """Return whether another program rewrites the main file at each start."""
        return bool(self.advice)

    @property
    def config(self) -> str:
        """Return the main file from the command line of the process, otherwise the default."""
        return self.path_options.get("config") or self._default_config

    # Files and effective settings

    def read(self, path: str) -> File | None:
        """Return a file, or None if it does not exist."""
        try:
            return File(path, self.system.read_text(path))
        except FileNotFoundError:
            return None

    def settings(self) -> Settings:
        """Return the settings that containerd reads from its files. Raises ContainerdError if it rejects them."""
        # containerd starts with defaults without a main file, but its dump fails if the given file does not exist.
        done = self._dump(self.config if self.system.exists(self.config) else "/dev/null")
        if done.returncode:
            raise ContainerdError(
                f"containerd rejects its current configuration {self.config}: {last_output_line(done)}",
                hint=f"Fix this file, and verify it with `{self.command} --config {self.config} config dump`. "
                "Nothing was changed.",
                code="configuration-refused",
            )
        settings = read_dump(done.stdout)
        # The dump contains the address from the files. The command-line option has priority.
        return replace(settings, address=self.path_options.get("address") or settings.address)

    def imported(self) -> list[File]:
        """Return the files that the main file imports, in the order in which they are read."""
        found: dict[str, File] = {}
        for pattern in patterns(self.read(self.config), self.config):
            folder, name = posixpath.split(pattern)
            directories = sorted(map(str, Path("/").glob(folder.lstrip("/")))) if "*" in folder else [folder]
            for each in directories:
                for entry in self.system.list_directory(each):
                    path = posixpath.join(each, entry)
                    file = self.read(path) if fnmatch.fnmatchcase(entry, name) and path != self.config else None
                    if file is not None:
                        found.setdefault(path, file)
        return list(found.values())

    def drop_in_folder(self, preferred: str) -> str | None:
        """Return the directory for a drop-in file, or None if containerd reads no such directory."""
        return drop_in_folder(patterns(self.read(self.config), self.config), preferred)

    def settings_after(
        self, settings: Settings, imported: Sequence[File], changes: Sequence[Change]
    ) -> Settings | None:
        """Return the settings of containerd after the changes, from copies of its files. Return None if it rejects them."""
        texts = {each.path: each.text for each in imported}
        main = self.read(self.config)
        text = main.text if main else None
        for each in changes:
            if each.path == self.config:
                text = each.after
            elif each.after is None:
                texts.pop(each.path, None)
            else:
                texts = _with_file(texts, each.path, each.after)
        if text is None:
            text = f"version = {min(max(settings.version, 2), 3)}\n"
        with tempfile.TemporaryDirectory(prefix="dra-accelerators-") as folder:
            copies = []
            for number, content in enumerate(texts.values()):
                copy = Path(folder, f"{number:03}.toml")
                copy.write_text(content, encoding="utf-8")
                copies.append(str(copy))
            trial = Path(folder, "config.toml")
            trial.write_text(set_values(text, (), {"imports": copies}, self.config), encoding="utf-8")
            done = self._dump(str(trial))
        return None if done.returncode else read_dump(done.stdout)

    def _dump(self, config: str) -> Completed:
        return self.system.run([self.command, "--config", config, "config", "dump"], COMMAND_SECONDS)

    # Running process

    def answer(self, settings: Settings) -> tuple[bool, frozenset[str]] | None:
        """Return whether the running containerd has CDI enabled, and its directories. Return None if it cannot be queried."""
        program = shutil.which("crictl", path=self._search_path())
        if program is None or not settings.address:
            return None
        try:
            done = self.system.run(
                [program, "--runtime-endpoint", f"unix://{settings.address}", "--timeout", "10s", "info"],
                COMMAND_SECONDS,
            )
            known = json.loads(done.stdout).get("config") or {} if not done.returncode else {}
        except (AcceleratorError, ValueError):
            return None
        if "cdiSpecDirs" not in known:
            return None
        return bool(known.get("enableCDI", True)), frozenset(known["cdiSpecDirs"] or ())

    def restart_reason(self, settings: Settings, files: Sequence[str], *, restart_pending: bool = False) -> str:
        """Return why the running process must be restarted to use the settings of its files, or "".

        The response of the process has priority. Without one, files that are newer than the process count. Raises
        ContainerdError if a restart would not help: the settings of the process differ from its files, and the files
        are older. ``restart_pending``: an earlier run ended before its restart.
        """
        if not self.process()[0]:
            return f"{self.service} is not running"
        answer = self.answer(settings)
        if answer is not None:
            enabled, directories = answer
            if enabled == settings.enabled and directories == set(settings.folders):
                return ""
            if self.generated or restart_pending or self.written_since_start(files):
                return "the running containerd has not loaded the CDI settings of its files"
            raise ContainerdError(
                f"The running containerd of {self.service} has CDI {'enabled' if enabled else 'disabled'} and reads "
                f"{', '.join(sorted(directories))}. {self.config} and its imported files set CDI {'enabled' if settings.enabled else 'disabled'} "
                f"and {', '.join(settings.folders)}, and are older than the process",
                hint=f"Check `systemctl cat {self.service}` for a wrapper, a mount, or an ExecStartPre line that passes a different file to containerd. "
                "If a file was copied with an older time, restart containerd.",
                code="no-proof",
            )
        # A main file that is rewritten at each start is always newer than the process.
        path = self.written_since_start(each for each in files if not (self.generated and each == self.config))
        return f"{path} was written after {self.service} was started" if path else ""

    def restart(self, settings: Settings) -> str:
        """Restart the unit and wait until it serves the kubelet. Return the problem, or ""."""
        return self.restart_until(lambda: self._problem(settings))

    def _problem(self, expected: Settings) -> str:
        # The start can have rewritten the files.
        settings = self.settings()
        if (settings.enabled, set(settings.folders)) != (expected.enabled, set(expected.folders)):
            raise ContainerdError(
                f"The start of {self.service} has written {self.config} again, with other CDI settings than before the restart",
                hint=self.advice
                or f"Find the program that writes this file with `systemctl cat {self.service}`, and change its source file",
                code="rewritten",
            )
        answer = self.answer(settings)
        if answer is not None:
            known = answer == (settings.enabled, frozenset(settings.folders))
            return "" if known else "it responds, but does not have the CDI settings of its files."
        program = shutil.which("ctr", path=self._search_path())
        if program is None or not settings.address:
            return ""
        try:
            done = self.system.run([program, "--address", settings.address, "plugins", "ls"], COMMAND_SECONDS)
        except AcceleratorError as error:
            return str(error)
        rows = [line.split() for line in done.stdout.splitlines()]
        states = [row[-1] for row in rows if len(row) >= 4 and row[:2] == ["io.containerd.grpc.v1", "cri"]]
        return (
            "" if states == ["ok"] else f"its plugin for the kubelet is not loaded ({', '.join(states) or 'unknown'})."
        )

    def unverified_warning(self) -> str:
        """Return the warning for a containerd whose CDI settings cannot be queried."""
        return (
            f"Not verified: the files of {self.service} enable CDI, but the running containerd did not report its CDI settings. crictl is not "
            f"installed, or received no response on {self.settings().address or 'an unknown socket'}. Install crictl and run this again."
        )

    def _search_path(self) -> str:
        found = shutil.which(self.command)
        return os.pathsep.join([*([posixpath.dirname(found)] if found else []), os.environ.get("PATH", os.defpath)])


def _with_file(texts: dict[str, str], path: str, text: str) -> dict[str, str]:
    """Return the files with one changed, or with a new one at its position in the read order of its directory."""
    if path in texts:
        return {**texts, path: text}
    folder = posixpath.dirname(path)
    later = [each for each in texts if posixpath.dirname(each) == folder and each > path]
    if not later:
        last = max(
            (number for number, each in enumerate(texts) if posixpath.dirname(each) == folder), default=len(texts) - 1
        )
        items = list(texts.items())
        return dict([*items[: last + 1], (path, text), *items[last + 1 :]])
    found: dict[str, str] = {}
    for each, content in texts.items():
        if each == later[0]:
            found[path] = text
        found[each] = content
    return found
