# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A replacement for systemd: it reads the units of the claims' companions and runs their commands.

It is `systemctl` and `journalctl` on the node in namespaces. It supports the driver's commands and the options of these
units: Requires, Type, Environment, EnvironmentFile, Exec*, and RemainAfterExit. It does not support confinement and the
restart of an ended program. The cluster tests use the real systemd for both. It uses only the standard library, because
it starts often.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

UNITS = Path("/etc/systemd/system")
STATE = Path("/run/service-manager")
SECONDS = 20.0


class Unit:
    """One instance of a template: its lines, and its state directory."""

    def __init__(self, name: str) -> None:
        self.name = name
        prefix, _at, rest = name.partition("@")
        self.instance = rest.removesuffix(".service")
        self.path = UNITS / f"{prefix}@.service"
        self.folder = STATE / name

    def lines(self, key: str) -> list[str]:
        found = [line.partition("=")[2] for line in self.path.read_text().splitlines() if line.partition("=")[0] == key]
        return [value.replace("%i", self.instance).replace("%%", "%").replace("$$", "$") for value in found]

    def pid(self) -> int:
        """Return the main process, or 0 without a running one."""
        try:
            pid = int((self.folder / "pid").read_text())
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            return 0
        return 0 if state in "ZX" else pid

    def active(self) -> bool:
        return self.pid() > 0 or (self.folder / "remains").exists()

    def environment(self) -> dict[str, str]:
        found = {**os.environ, **dict(line.split("=", 1) for line in self.lines("Environment"))}
        for file in self.lines("EnvironmentFile"):
            for line in Path(file).read_text().splitlines():
                name, _equals, value = line.partition("=")
                found[name] = value.strip('"')
        return found

    def words(self) -> list[str]:
        """Return the command. A variable that is a whole argument becomes zero or more arguments."""
        environment = self.environment()
        return [
            word
            for each in self.lines("ExecStart")[0].split()
            for word in (environment.get(each[1:], "").split() if each.startswith("$") else [each])
        ]

    def run(self, key: str) -> bool:
        """Run the lines of one key in order. Return whether all succeeded."""
        for line in self.lines(key):
            may_fail = line.startswith("-")
            with (self.folder / "log").open("ab") as log:
                done = subprocess.run(
                    ["/bin/sh", "-c", line.removeprefix("-")],
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    check=False,
                )
            if done.returncode and not may_fail:
                return False
        return True


def start(name: str) -> bool:
    """Start a unit after its required units."""
    unit = Unit(name)
    if unit.active():
        return True
    if not all(start(required) for required in unit.lines("Requires")):
        return False
    unit.folder.mkdir(parents=True, exist_ok=True)
    if "yes" in unit.lines("RemainAfterExit"):
        if not unit.run("ExecStart"):
            return False
        (unit.folder / "remains").touch()
        return True
    with (unit.folder / "log").open("ab") as log:
        process = subprocess.Popen(
            unit.words(),
            env=unit.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (unit.folder / "pid").write_text(str(process.pid))
    if unit.run("ExecStartPost"):
        return True
    stop(name)
    return False


def stop(name: str) -> None:
    """Stop a unit, and then the units that only it required."""
    unit = Unit(name)
    pid = unit.pid()
    if pid:
        unit.run("ExecStop")
        deadline = time.monotonic() + SECONDS
        while unit.pid() and time.monotonic() < deadline:
            time.sleep(0.01)
        # Its child processes are in its session.
        for process in Path("/proc").glob("[0-9]*"):
            try:
                session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
                if session == pid:
                    os.kill(int(process.name), signal.SIGKILL)
            except (OSError, ValueError):
                continue
    elif (unit.folder / "remains").exists():
        unit.run("ExecStop")
        unit.run("ExecStopPost")
    for each in ("pid", "remains", "log"):
        (unit.folder / each).unlink(missing_ok=True)
    unit.folder.rmdir()


def known(pattern: str) -> list[str]:
    """Return the started units that were not stopped. Units that require others are first."""
    names = [path.name for path in STATE.iterdir() if fnmatch.fnmatchcase(path.name, pattern)]
    return sorted(names, key=lambda name: (not Unit(name).lines("Requires"), name))


def main(program: str, words: list[str]) -> int:
    """Run a systemctl or journalctl command."""
    STATE.mkdir(exist_ok=True)
    arguments = [word for word in words if not word.startswith("-")]
    if program == "journalctl":
        unit = Unit(next(word.partition("=")[2] for word in words if word.startswith("--unit=")))
        log = unit.folder / "log"
        print("\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else "")
        return 0
    verb, *names = arguments
    if verb == "is-active":
        return 0 if all(Unit(name).active() for name in names) else 3
    with (STATE.parent / "service-manager.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if verb == "start":
            return 0 if all(start(name) for name in names) else 1
        if verb == "reload":
            return 0 if all(Unit(name).active() and Unit(name).run("ExecReload") for name in names) else 1
        found = [name for pattern in names for name in known(pattern)]
        if verb == "stop":
            for name in found:
                stop(name)
        elif verb == "list-units":
            for name in found:
                print(f"{name} loaded {'active running' if Unit(name).active() else 'failed failed'} -")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
