# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Start containerd with the files of a test case, and show its state and all files that the role can change.

    node.py start RELEASE [CHECK]    start a release with the files in /etc/containerd, by name, as JSON on standard input; the
                                     unit starts only if the command CHECK succeeds
    node.py distribution UNIT PATH   start a unit like k3s or RKE2, and write standard input to its file PATH
    node.py show                     show the state
    node.py clear                    remove all files of the cases

Each command prints the resulting state as JSON.
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
DROP_INS = UNITS / "containerd.service.d"
DISTRIBUTIONS = ("k3s-agent", "k3s", "rke2-agent", "rke2-server")
RANCHER = Path("/var/lib/rancher")
#: The path of a distribution's own containerd below RANCHER. The role asks this program for the settings.
BUNDLED = {"k3s": "k3s/data/current/bin/containerd", "rke2": "rke2/bin/containerd"}
#: All paths that the role can change.
TOUCHED = (CONFIGURATION, Path("/etc/cdi"), Path("/run/cdi"), Path("/var/lib/dra-accelerators"), RANCHER)
CRICTL = ("/usr/local/bin/crictl", "--runtime-endpoint", "unix:///run/containerd/containerd.sock", "info")


def systemctl(*arguments, check=True):
    """Run systemctl and return its output. End the program if it fails."""
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"systemctl {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def files_below(tops):
    """Return files and directories with mode, owner, and content."""
    files = {}
    for top in tops:
        for path in sorted([top, *top.rglob("*")]) if top.exists() else []:
            facts = path.stat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
            files[str(path)] = f"{facts.st_mode:o} {facts.st_uid} {content}"
    return files


def show():
    """Return files with mode, owner, and content, and the CDI settings and the process ID of the running containerd."""
    done = subprocess.run(CRICTL, capture_output=True, text=True, check=False)
    known = json.loads(done.stdout)["config"] if done.returncode == 0 else {}
    return {
        "files": files_below(TOUCHED),
        # A release without this option always has CDI enabled.
        "cdi": {"on": known.get("enableCDI", True), "directories": known.get("cdiSpecDirs")} if known else None,
        "version": subprocess.run(["ctr", "version"], capture_output=True, text=True, check=False)
        .stdout.partition("Server:")[2]
        .split()[1:2],
        "pid": int(systemctl("show", "--property=MainPID", "--value", "containerd.service")),
    }


def clear():
    """Remove all files of the cases."""
    units = [f"{name}.service" for name in (*DISTRIBUTIONS, "containerd")]
    systemctl("stop", *units, check=False)
    systemctl("reset-failed", *units, check=False)
    for name in DISTRIBUTIONS:
        (UNITS / f"{name}.service").unlink(missing_ok=True)
    for path in (*TOUCHED, DROP_INS):
        shutil.rmtree(path, ignore_errors=True)
    systemctl("daemon-reload")


def start(release, check=""):
    """Start a release of containerd. Its state is in memory, where overlay file systems work."""
    clear()
    for name, text in json.load(sys.stdin).items():
        path = CONFIGURATION / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    DROP_INS.mkdir()
    before = f"ExecStartPre=/bin/sh -c '{check}'\nRestart=no\n" if check else ""
    command = f"{PROGRAMS[release]} --root /run/containerd-{release}"
    (DROP_INS / "release.conf").write_text(f"[Service]\nExecStart=\nExecStart={command}\n{before}", encoding="utf-8")
    systemctl("daemon-reload")
    systemctl("restart", "containerd.service")


def distribution(unit, path):
    """Write the configuration file of a distribution's containerd, and start a unit with the distribution's name.

    The distribution's containerd is a link to release 1.7 for a file of version 2, and to release 2 for a newer file.
    """
    clear()
    text = sys.stdin.read()
    written = Path(path)
    written.parent.mkdir(parents=True)
    written.write_text(text, encoding="utf-8")
    program = RANCHER / BUNDLED[unit.partition("-")[0]]
    program.parent.mkdir(parents=True)
    program.symlink_to(PROGRAMS["1.7" if text.startswith("version = 2") else "2"])
    (UNITS / f"{unit}.service").write_text("[Service]\nExecStart=/bin/sleep infinity\n", encoding="utf-8")
    systemctl("daemon-reload")
    systemctl("start", f"{unit}.service")


VERBS = {"start": start, "distribution": distribution, "show": lambda: None, "clear": clear}

if __name__ == "__main__":
    VERBS[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write(json.dumps(show(), sort_keys=True))
