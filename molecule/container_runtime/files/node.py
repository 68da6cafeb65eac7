# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Gives the instance a containerd of one release and a case's files, and tells what a case has to leave as it was.

    node.py start RELEASE [CHECK]    files below /etc/containerd by name, as JSON on standard input; CHECK is a command that
                                     the unit runs before each start, and without which containerd is not started
    node.py distribution UNIT PATH   a unit that runs, and the file at PATH on standard input, as k3s and RKE2 have them
    node.py look
    node.py clear

Each prints what it sees afterwards, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAMS = {"1.7": "/usr/local/bin/containerd-1.7", "2": "/usr/local/bin/containerd"}
CONFIGURATION = Path("/etc/containerd")
UNITS = Path("/etc/systemd/system")
OURS = UNITS / "containerd.service.d"
DISTRIBUTIONS = ("k3s-agent", "k3s", "rke2-agent", "rke2-server")
RANCHER = Path("/var/lib/rancher")
#: Everything that the role may touch.
TOUCHED = (CONFIGURATION, Path("/etc/cdi"), Path("/run/cdi"), Path("/var/lib/dra-accelerators"), RANCHER)
CRICTL = ("/usr/local/bin/crictl", "--runtime-endpoint", "unix:///run/containerd/containerd.sock", "info")


def systemctl(*words, check=True):
    """Asks systemd; returns what it says."""
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"systemctl {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def files_below(tops):
    """Files and folders with mode, owner and content."""
    files = {}
    for top in tops:
        for path in sorted([top, *top.rglob("*")]) if top.exists() else []:
            facts = path.stat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
            files[str(path)] = f"{facts.st_mode:o} {facts.st_uid} {content}"
    return files


def look():
    """Files and folders with mode, owner and content; what the running containerd knows of CDI; its process."""
    done = subprocess.run(CRICTL, capture_output=True, text=True, check=False)
    known = json.loads(done.stdout)["config"] if done.returncode == 0 else {}
    return {
        "files": files_below(TOUCHED),
        # A release that does not name the switch any more has no switch: CDI is on.
        "cdi": {"on": known.get("enableCDI", True), "folders": known.get("cdiSpecDirs")} if known else None,
        "version": subprocess.run(["ctr", "version"], capture_output=True, text=True, check=False)
        .stdout.partition("Server:")[2]
        .split()[1:2],
        "pid": int(systemctl("show", "--property=MainPID", "--value", "containerd.service")),
    }


def clear():
    """Takes away what cases have left."""
    units = [f"{name}.service" for name in (*DISTRIBUTIONS, "containerd")]
    systemctl("stop", *units, check=False)
    systemctl("reset-failed", *units, check=False)
    for name in DISTRIBUTIONS:
        (UNITS / f"{name}.service").unlink(missing_ok=True)
    for path in (*TOUCHED, OURS):
        shutil.rmtree(path, ignore_errors=True)
    systemctl("daemon-reload")


def start(release, check=""):
    """Starts containerd of one release. Its state lies in memory, where it can lay file systems over each other."""
    clear()
    for name, text in json.load(sys.stdin).items():
        path = CONFIGURATION / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    OURS.mkdir()
    before = f"ExecStartPre=/bin/sh -c '{check}'\nRestart=no\n" if check else ""
    command = f"{PROGRAMS[release]} --root /run/containerd-{release}"
    (OURS / "release.conf").write_text(f"[Service]\nExecStart=\nExecStart={command}\n{before}", encoding="utf-8")
    systemctl("daemon-reload")
    systemctl("restart", "containerd.service")


def distribution(unit, path):
    """Starts a unit of that name, beside the file that its containerd would read."""
    clear()
    written = Path(path)
    written.parent.mkdir(parents=True)
    written.write_text(sys.stdin.read(), encoding="utf-8")
    (UNITS / f"{unit}.service").write_text("[Service]\nExecStart=/bin/sleep infinity\n", encoding="utf-8")
    systemctl("daemon-reload")
    systemctl("start", f"{unit}.service")


VERBS = {"start": start, "distribution": distribution, "look": lambda: None, "clear": clear}

if __name__ == "__main__":
    VERBS[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write(json.dumps(look(), sort_keys=True))
