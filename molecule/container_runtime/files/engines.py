# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Start CRI-O or Docker Engine with the files of a test case, and show its CDI settings and all files that the role can change.

    engines.py start ENGINE [CHECK]    start `crio`, `docker`, or `docker-old` with the files in its directory in /etc, by name, as
                                       JSON on standard input; the unit starts only if the command CHECK succeeds
    engines.py show ENGINE             show the state
    engines.py kill                    make the next `systemctl restart` kill its caller instead of a restart
    engines.py clear                   remove all files of the cases

Each command prints the resulting state as JSON.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tomllib
from node import TOUCHED, UNITS, files_below, systemctl
from node import clear as clear_containerd

STATE = Path("/run/molecule-engine")
PROGRAMS = Path("/opt/molecule/programs")
KILLER = Path("/usr/local/sbin/systemctl")
#: Replaces systemctl for one restart: kills the caller instead.
KILLS = """#!/bin/sh
[ "$1" != restart ] || { rm -f "$0"; kill -9 $PPID; exit 137; }
exec /usr/bin/systemctl "$@"
"""
CRIO_SOCKET = "/var/run/crio/crio.sock"


@dataclass(frozen=True)
class Engine:
    """An engine: its unit, the directory of its files, its start command, and the command that shows its settings."""

    unit: str
    directory: Path
    command: str
    query: tuple[str, ...]
    environment: str = ""


def docker(directory: str, containerd: str = "") -> Engine:
    """Return a Docker Engine with its programs in a directory, and with a separate containerd if it needs an older one."""
    return Engine(
        "docker.service",
        Path("/etc/docker"),
        f"{directory}/dockerd --data-root={STATE}/data --exec-root={STATE}/exec --bridge=none --iptables=false --userland-proxy=false",
        (f"{directory}/docker", "info", "--format", "{{json .}}"),
        f"PATH={containerd}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" if containerd else "",
    )


ENGINES = {
    "crio": Engine(
        "crio.service",
        Path("/etc/crio"),
        "/usr/local/bin/crio",
        ("/usr/local/bin/crio", "status", "--socket", CRIO_SOCKET, "config"),
    ),
    "docker": docker("/usr/local/bin"),
    "docker-old": docker("/opt/molecule/docker-old", "/opt/molecule/docker-old"),
}
#: Replacements of programs for containers. CRI-O runs no containers here.
REPLACEMENTS = {"conmon": "#!/bin/sh\necho conmon version 2.1.12\n", "pinns": "#!/bin/sh\n"}


def cdi_directories(engine):
    """Return the CDI directories that the running engine reports. None if it does not answer."""
    done = subprocess.run(engine.query, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    if engine.directory.name == "docker":
        return json.loads(done.stdout).get("CDISpecDirs")
    return tomllib.loads(done.stdout)["crio"]["runtime"]["cdi_spec_dirs"]


def show(name):
    """Return the files with mode, owner, and content, and the CDI directories and the process ID of the running engine."""
    engine = ENGINES[name]
    return {
        "files": files_below((*TOUCHED, Path("/srv/cdi"), *sorted({each.directory for each in ENGINES.values()}))),
        "directories": cdi_directories(engine),
        "pid": int(systemctl("show", "--property=MainPID", "--value", engine.unit)),
    }


def clear():
    """Remove all files of the cases."""
    for engine in ENGINES.values():
        systemctl("stop", engine.unit, check=False)
        systemctl("reset-failed", engine.unit, check=False)
        (UNITS / engine.unit).unlink(missing_ok=True)
        shutil.rmtree(engine.directory, ignore_errors=True)
    for path in (STATE, PROGRAMS):
        shutil.rmtree(path, ignore_errors=True)
    KILLER.unlink(missing_ok=True)
    clear_containerd()


def start(name, check=""):
    """Start an engine with the files of standard input. Its state is in memory, where overlay file systems work."""
    clear()
    engine = ENGINES[name]
    for path, text in {
        **{PROGRAMS / each: text for each, text in REPLACEMENTS.items()},
        **{engine.directory / each: text for each, text in json.load(sys.stdin).items()},
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.parent == PROGRAMS else 0o644)
    before = f"ExecStartPre=/bin/sh -c '{check}'\n" if check else ""
    environment = f"Environment={engine.environment}\n" if engine.environment else ""
    (UNITS / engine.unit).write_text(
        f"[Service]\nType=notify\nDelegate=yes\nRestart=no\n{environment}{before}ExecStart={engine.command}\n",
        encoding="utf-8",
    )
    systemctl("daemon-reload")
    systemctl("start", engine.unit)


def kill():
    """Make the next restart kill its caller."""
    KILLER.write_text(KILLS, encoding="utf-8")
    KILLER.chmod(0o755)


VERBS = {"start": start, "show": lambda _name: None, "clear": clear, "kill": kill}

if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    VERBS[verb](*arguments)
    sys.stdout.write(json.dumps(show(arguments[0]), sort_keys=True) if arguments else "")
