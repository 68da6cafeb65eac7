# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Gives the instance a CRI-O or a Docker Engine with a case's files, and tells what it says of CDI and what the role may touch.

    engines.py start ENGINE [CHECK]    ENGINE is `crio`, `docker` or `docker-old`; its files below its folder in /etc, by name, as JSON on
                                       standard input; CHECK is a command that its unit runs before each start, and without which it is not started
    engines.py look ENGINE
    engines.py kill                    the next `systemctl restart` kills who has called it, instead of restarting anything
    engines.py clear

Each prints what it sees afterwards, as JSON.
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
#: In front of systemctl, once: whoever wanted a restart is gone before it.
KILLS = """#!/bin/sh
[ "$1" != restart ] || { rm -f "$0"; kill -9 $PPID; exit 137; }
exec /usr/bin/systemctl "$@"
"""
CRIO_SOCKET = "/var/run/crio/crio.sock"


@dataclass(frozen=True)
class Engine:
    """One engine: its unit, the folder of its files, how it is started, and what it is asked."""

    unit: str
    folder: Path
    command: str
    asked: tuple[str, ...]
    environment: str = ""


def docker(folder: str, containerd: str = "") -> Engine:
    """A Docker Engine whose programs lie in a folder, with a containerd of its own where it needs an older one."""
    return Engine(
        "docker.service",
        Path("/etc/docker"),
        f"{folder}/dockerd --data-root={STATE}/data --exec-root={STATE}/exec --bridge=none --iptables=false --userland-proxy=false",
        (f"{folder}/docker", "info", "--format", "{{json .}}"),
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
#: conmon and pinns serve containers, of which CRI-O runs none here.
STAND_INS = {"conmon": "#!/bin/sh\necho conmon version 2.1.12\n", "pinns": "#!/bin/sh\n"}


def folders(engine):
    """The folders that the running engine reads CDI files from, by its own word; None where it does not answer."""
    done = subprocess.run(engine.asked, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    if engine.folder.name == "docker":
        return json.loads(done.stdout).get("CDISpecDirs")
    return tomllib.loads(done.stdout)["crio"]["runtime"]["cdi_spec_dirs"]


def look(name):
    """Files with mode, owner and content; what the running engine knows of CDI; its process."""
    engine = ENGINES[name]
    return {
        "files": files_below((*TOUCHED, Path("/srv/cdi"), *sorted({each.folder for each in ENGINES.values()}))),
        "folders": folders(engine),
        "pid": int(systemctl("show", "--property=MainPID", "--value", engine.unit)),
    }


def clear():
    """Take away what cases have left."""
    for engine in ENGINES.values():
        systemctl("stop", engine.unit, check=False)
        systemctl("reset-failed", engine.unit, check=False)
        (UNITS / engine.unit).unlink(missing_ok=True)
        shutil.rmtree(engine.folder, ignore_errors=True)
    for path in (STATE, PROGRAMS):
        shutil.rmtree(path, ignore_errors=True)
    KILLER.unlink(missing_ok=True)
    clear_containerd()


def start(name, check=""):
    """Start an engine with these files. Its state lies in memory, where it can lay file systems over each other."""
    clear()
    engine = ENGINES[name]
    for path, text in {
        **{PROGRAMS / each: text for each, text in STAND_INS.items()},
        **{engine.folder / each: text for each, text in json.load(sys.stdin).items()},
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
    """Have the next restart be one that kills."""
    KILLER.write_text(KILLS, encoding="utf-8")
    KILLER.chmod(0o755)


VERBS = {"start": start, "look": lambda _name: None, "clear": clear, "kill": kill}

if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    VERBS[verb](*words)
    sys.stdout.write(json.dumps(look(words[0]), sort_keys=True) if words else "")
