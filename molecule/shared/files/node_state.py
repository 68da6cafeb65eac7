# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What there is on a node that a role could change: files and device nodes, packages, units, simulated boards, and the objects of its
API server.

``node_state.py keep`` writes it down, ``node_state.py compare`` says what is another since then and exits with 1 where
anything is. A run in check mode stands between the two, so that nothing may be another.

What runs by itself is not looked at: logs, caches, the stores of containerd, etcd and systemd, the times of folders, what a
kubelet says in the status of an object. A file is the same while its kind, mode, owner, size and time of change are; one
that is written anew with the same content is another, since check mode has nothing to write.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Where the state is kept between the two.
KEPT = Path("/run/molecule-node-state.json")
#: The operator's access to the API server of shared/tasks/api_server.yml.
KUBECONFIG = Path("/srv/api-server/kubeconfig")
#: Folders that other programs than a role's tasks write to all the time, or that hold no files.
PASSED_OVER = frozenset(
    {
        "/dev/mqueue",
        "/dev/pts",
        "/dev/shm",  # noqa: S108 - nothing is written there
        "/proc",
        "/root/.ansible",
        "/root/.kube",
        "/run/containerd",
        "/run/lock",
        "/run/log",
        "/run/systemd",
        "/run/udev",
        "/run/user",
        "/srv/api-server",
        "/sys",
        "/tmp",  # noqa: S108
        "/var/cache",
        "/var/lib/containerd",
        "/var/lib/kubelet/pods",
        "/var/lib/systemd",
        "/var/log",
        "/var/tmp",  # noqa: S108
    }
)
UNIT_PROPERTIES = "Id,FragmentPath,UnitFileState,ActiveState,InvocationID,NRestarts"
#: The simulated boards, which each look through their library writes to: what they are set to is asked for.
BOARDS = ("libnvidia-gpusim.so.", "libdcmi-sim.so.")
#: What is said of a machine or a board that is no setting of it: how often it was written to, and whether somebody looks at it now.
LOOKS = ("events", "generation", "open")
#: Where units lie that somebody has put there, not a package.
OWN_UNITS = ("/etc/systemd/system/", "/run/systemd/system/")
#: Kinds of objects that the API server's own programs write all the time, or that are another kind's under an older name.
PASSED_OVER_KINDS = frozenset(
    {"componentstatuses", "endpoints", "events", "events.events.k8s.io", "leases.coordination.k8s.io"}
)


def files(root: str = "/") -> dict[str, str]:
    """Return what is said of each file, link, device node and folder below ``root``, by path."""
    found: dict[str, str] = {}
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            if entry.path in PASSED_OVER or entry.path == str(KEPT):
                continue
            if entry.name == "__pycache__" or entry.name.startswith(BOARDS):
                continue
            try:
                facts = entry.stat(follow_symlinks=False)
                target = str(Path(entry.path).readlink()) if stat.S_ISLNK(facts.st_mode) else ""
            except FileNotFoundError:
                continue
            found[f"file {entry.path}"] = file_words(facts, target)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
    return found


def file_words(facts: os.stat_result, target: str) -> str:
    """Return in words what ``lstat`` says of a file; of a folder not when its entries changed, they speak for themselves."""
    words = f"{stat.filemode(facts.st_mode)} {facts.st_uid}:{facts.st_gid}"
    if stat.S_ISREG(facts.st_mode):
        return f"{words} {facts.st_size} bytes of {facts.st_mtime_ns}"
    if stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode):
        return f"{words} device {os.major(facts.st_rdev)}:{os.minor(facts.st_rdev)}"
    return f"{words} {target}".rstrip()


def units(shown: str) -> dict[str, str]:
    """Return of each unit that is enabled, or that somebody has put there, whether it is, runs, and which of its runs this is.

    :param shown: what ``systemctl show`` says of all units, of the properties of ``UNIT_PROPERTIES``
    """
    found: dict[str, str] = {}
    for block in shown.split("\n\n"):
        unit = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        own = unit.get("FragmentPath", "").startswith(OWN_UNITS)
        if not own and not unit.get("UnitFileState", "").startswith("enabled"):
            continue
        # What ends and is begun again all the time says nothing about a role.
        looping = unit.get("NRestarts", "0") != "0"
        runs = "again and again" if looping else f"{unit['ActiveState']} {unit['InvocationID']}"
        found[f"unit {unit['Id']}"] = f"{unit['UnitFileState']} {runs}".strip()
    return found


def boards(shown: str) -> dict[str, str]:
    """Return what each simulated board is set to, with its partitions.

    :param shown: what ``accelerator-simulator show --json`` says, of one vendor or of several; empty where there is none
    """
    said = json.loads(shown or "{}")
    found: dict[str, str] = {}
    for vendor in (said, *(each for each in said.values() if isinstance(each, dict))):
        for kind in {"gpus", "npus"} & vendor.keys():
            found[f"machine of {kind}"] = _settings({key: value for key, value in vendor.items() if key != kind})
            found.update((f"board {number} of {kind}", _settings(board)) for number, board in enumerate(vendor[kind]))
    return found


def _settings(shown: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in shown.items() if key not in LOOKS}, sort_keys=True)


def objects() -> dict[str, str]:
    """Return the objects of the node's API server, without what is written down by itself; nothing where none runs."""
    if not KUBECONFIG.exists():
        return {}
    kubectl = ("kubectl", "--kubeconfig", str(KUBECONFIG))
    kinds = set(output(*kubectl, "api-resources", "--verbs=list", "--output=name").split()) - PASSED_OVER_KINDS
    listed = json.loads(output(*kubectl, "get", ",".join(sorted(kinds)), "--all-namespaces", "--output=json"))
    found: dict[str, str] = {}
    for item in listed["items"]:
        name = "/".join(filter(None, (item["metadata"].get("namespace"), item["metadata"]["name"])))
        found[f"object {item['apiVersion']} {item['kind']} {name}"] = object_words(item)
    return found


def object_words(item: dict[str, Any]) -> str:
    """Return an object as text, without its status and what the API server counts at each of its updates."""
    counted = ("generation", "managedFields", "resourceVersion")
    lasting = {key: value for key, value in item["metadata"].items() if key not in counted}
    return json.dumps({**item, "metadata": lasting, "status": None}, sort_keys=True)


def output(*command: str, check: bool = True) -> str:
    """Return what a command writes; nothing of one that fails, where ``check`` is false.

    :raises subprocess.CalledProcessError: where it fails
    """
    done = subprocess.run(command, check=check, stdout=subprocess.PIPE, encoding="utf-8", timeout=120)
    return done.stdout if done.returncode == 0 else ""


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return a line for each thing that is another in ``after``, with what it was and what it is."""
    return [
        f"{name}: {before.get(name, 'not there')} -> {after.get(name, 'not there')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def main(arguments: list[str]) -> int:
    """Write the state down, or print what is another since then."""
    shown = output("systemctl", "show", f"--property={UNIT_PROPERTIES}", "*")
    simulator = shutil.which("accelerator-simulator")
    # No boards are shown of a machine whose driver is not there, or not loaded.
    silicon = output("accelerator-simulator", "show", "--json", check=False) if simulator else ""
    state = {**files(), **units(shown), **boards(silicon), **objects()}
    if arguments == ["keep"]:
        KEPT.write_text(json.dumps(state), encoding="utf-8")
        return 0
    lines = differences(json.loads(KEPT.read_text(encoding="utf-8")), state)
    KEPT.unlink()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
