# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""A daemon as a systemd unit: its state and start time, restarts, and the last lines of its journal."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from ..core.errors import AcceleratorError
from ..core.host.system import Completed, System
from .secret_masking import mask_secrets

COMMAND_SECONDS = 30.0
_PAUSE_SECONDS = 0.5
#: An error that lasts this long after the restart is not one of the start.
_ERROR_SECONDS = 5.0
_LOG_LINES = 12


class Unit:
    """One unit that runs a daemon. ``timeout`` is how many seconds the daemon may take until it serves again.

    ``program`` is the daemon's command. ``options`` are the options of its command line that change its files and sockets: each spelling
    without dashes, and the name under which ``path_options`` has its value.
    """

    program = ""
    options: Mapping[str, str] = MappingProxyType({})

    def __init__(self, system: System, *, service: str, timeout: float) -> None:
        self.system = system
        self.service = service
        self.timeout = timeout

    @cached_property
    def path_options(self) -> dict[str, str]:
        """The paths that the command line of the unit's daemon names, by the names in ``options``; they have priority over all others."""
        if not self.system.finds("systemctl"):
            return {}
        words, directory = program_command_line(self.system, self.service, posixpath.basename(self.program))
        found = option_values(words, self.options)
        return {name: posixpath.join(directory, value) for name, value in found.items() if value}

    def process(self) -> tuple[bool, float]:
        """Return whether the unit is active, and when its process began, in seconds since 1970 (0: not known)."""
        shown = self.system.run(
            ["systemctl", "show", "--property=ActiveState,MainPID", self.service], COMMAND_SECONDS
        ).stdout
        values = dict(line.partition("=")[::2] for line in shown.splitlines())
        return values.get("ActiveState") == "active", self._start_time(values.get("MainPID", "0"))

    def identity(self) -> str:
        """Return the boot ID, the PID, and the start of the unit's main process in clock ticks since the boot; "" without a process."""
        shown = self.system.run(["systemctl", "show", "--property=MainPID", "--value", self.service], COMMAND_SECONDS)
        pid = shown.stdout.strip()
        ticks = self._start_ticks(pid)
        return f"{self.system.boot_id()} {pid} {ticks}" if ticks else ""

    def _start_ticks(self, pid: str) -> int:
        try:
            return int(self.system.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19])
        except (OSError, IndexError, ValueError):
            return 0

    def _start_time(self, pid: str) -> float:
        ticks = self._start_ticks(pid)
        try:
            up = float(self.system.read_text("/proc/uptime").split()[0])
        except (OSError, IndexError, ValueError):
            return 0.0
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0

    def written_since_start(self, paths: Iterable[str]) -> str:
        """Return the first of these files and directories that is newer than the unit's process, or "" if none is known to be newer."""
        began = self.process()[1]
        for path in paths:
            try:
                written = self.system.path(path).stat().st_mtime
            except FileNotFoundError:
                continue
            if began and written > began:
                return path
        return ""

    def restart_until(self, problem: Callable[[], str]) -> str:
        """Restart the unit and wait until ``problem`` returns "". Return the remaining problem, or "".

        An AcceleratorError of ``problem`` ends the wait only if it lasts.
        """
        self.system.run(["systemctl", "reset-failed", self.service], COMMAND_SECONDS)
        deadline = time.monotonic() + self.timeout
        try:
            done = self.system.run(["systemctl", "restart", self.service], self.timeout)
        except AcceleratorError as error:
            return str(error)
        if done.returncode:
            return f"{last_output_line(done)} {self.journal()}".strip()
        self.__dict__.pop("path_options", None)  # the new process can have another command line
        errors_since: float | None = None
        while True:
            try:
                wrong = f"{self.service} is not active." if not self.process()[0] else problem()
                errors_since = None
            except AcceleratorError as error:
                # A start that overwrites the files can leave them empty or outdated for a moment.
                wrong = str(error)
                errors_since = time.monotonic() if errors_since is None else errors_since
            now = time.monotonic()
            if not wrong or now >= deadline or (errors_since is not None and now - errors_since >= _ERROR_SECONDS):
                return f"{wrong} {self.journal()}".strip() if wrong else ""
            time.sleep(_PAUSE_SECONDS)

    def journal(self) -> str:
        """Return the last lines of the unit's journal as a sentence, with secrets masked; empty where they cannot be read."""
        words = ["journalctl", "--unit", self.service, "--lines", str(_LOG_LINES), "--output", "cat", "--no-pager"]
        try:
            lines = mask_secrets(self.system.run(words, COMMAND_SECONDS).stdout).splitlines()
        except AcceleratorError:
            return ""
        return "It said: " + " | ".join(line.strip()[:300] for line in lines if line.strip())


def command_line(system: System, service: str) -> list[str]:
    """Return the command line of a unit's process, the program first. Empty if the unit does not run."""
    pid = system.run(["systemctl", "show", "--property=MainPID", "--value", service], COMMAND_SECONDS).stdout.strip()
    try:
        return system.read_text(f"/proc/{int(pid)}/cmdline").split("\0")[:-1]
    except (OSError, ValueError):
        return []


def program_command_line(system: System, service: str, program: str) -> tuple[list[str], str]:
    """Return the command line of a program that a unit runs, and its working directory.

    The program is the unit's main process or a child of it, as the containerd of k3s is. Where it does not run, the unit's ExecStart counts.
    No words are returned where neither is the program.
    """
    shown = system.run(["systemctl", "show", "--property=MainPID,ExecStart", service], COMMAND_SECONDS).stdout
    values = dict(line.partition("=")[::2] for line in shown.splitlines())
    main = values.get("MainPID", "0")
    processes = [main, *_children(system, main)] if main != "0" else []
    for pid in processes:
        with suppress(OSError):
            words = system.read_text(f"/proc/{pid}/cmdline").split("\0")[:-1]
            if words and Path(words[0]).name == program:
                return words, str(system.path(f"/proc/{pid}/cwd").readlink())
    started = re.search(r"argv\[\]=(.*?) ; ", values.get("ExecStart", ""))
    words = started[1].split() if started and not processes else []
    return (words, "/") if words and Path(words[0]).name == program else ([], "/")


def option_values(words: Sequence[str], options: Mapping[str, str]) -> dict[str, str]:
    """Return the values of options in a command line; ``options`` has the returned name of each spelling."""
    found: dict[str, str] = {}
    rest = iter(words[1:])
    for word in rest:
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in options:
            found[options[name]] = value if equals else next(rest, "")
    return found


def _children(system: System, parent: str) -> list[str]:
    found = []
    for pid in system.list_directory("/proc"):
        with suppress(OSError, IndexError):
            if pid.isdecimal() and system.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[1] == parent:
                found.append(pid)
    return found


def last_output_line(done: Completed) -> str:
    """Return the last line of a command's output, with secrets masked: a parser can quote the line of the file that it refuses."""
    lines = [line.strip() for line in mask_secrets(done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1][:500] if lines else f"it ended with {done.returncode} and said nothing"
