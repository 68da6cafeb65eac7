# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Save and compare the state of a node that a role can change: files, device nodes, units, simulated boards, and API objects.

``node_state.py save`` writes the state to a file. ``node_state.py compare`` prints the differences from that state and
exits with 1 if there are any. A scenario runs a role in check mode between the two commands.

Excluded are changes by other programs: logs, caches, the stores of containerd, etcd, and systemd, the times of
directories, and the status of objects. A file is unchanged if its type, mode, owner, size, and modification time are
the same. A file that was written again with the same content is a difference, because check mode must not write.
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

#: File with the saved state.
STATE_FILE = Path("/run/molecule-node-state.json")
#: The operator's kubeconfig for the API server of shared/tasks/api_server.yml.
KUBECONFIG = Path("/srv/api-server/kubeconfig")
#: Directories that other programs change all the time, or that have no regular files.
EXCLUDED_PATHS = frozenset(
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
#: State files of the simulated boards. Each query writes to them, so the settings are compared instead.
BOARDS = ("libnvidia-gpusim.so.", "libdcmi-sim.so.")
#: Keys of a board or a machine that are no settings: counters of writes, and whether a program has it open.
VOLATILE_KEYS = ("events", "generation", "open")
#: Directories of units that no package installs.
OWN_UNITS = ("/etc/systemd/system/", "/run/systemd/system/")
#: Kinds that Kubernetes components write all the time, and kinds that show objects of another kind under an older name.
EXCLUDED_KINDS = frozenset(
    {"componentstatuses", "endpoints", "events", "events.events.k8s.io", "leases.coordination.k8s.io"}
)


def files(root: str = "/") -> dict[str, str]:
    """Return a description of each file, link, device node, and directory below ``root``, by path."""
    found: dict[str, str] = {}
    pending = [root]
    while pending:
        directory = pending.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            if entry.path in EXCLUDED_PATHS or entry.path == str(STATE_FILE):
                continue
            if entry.name == "__pycache__" or entry.name.startswith(BOARDS):
                continue
            try:
                facts = entry.stat(follow_symlinks=False)
                target = str(Path(entry.path).readlink()) if stat.S_ISLNK(facts.st_mode) else ""
            except FileNotFoundError:
                continue
            found[f"file {entry.path}"] = describe_file(facts, target)
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
    return found


def describe_file(facts: os.stat_result, target: str) -> str:
    """Return a description of a file from its ``lstat`` result, without the times of directories."""
    text = f"{stat.filemode(facts.st_mode)} {facts.st_uid}:{facts.st_gid}"
    if stat.S_ISREG(facts.st_mode):
        return f"{text} {facts.st_size} bytes of {facts.st_mtime_ns}"
    if stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode):
        return f"{text} device {os.major(facts.st_rdev)}:{os.minor(facts.st_rdev)}"
    return f"{text} {target}".rstrip()


def units(shown: str) -> dict[str, str]:
    """Return a description of each unit that is enabled or that no package installs: its states and its invocation.

    :param shown: output of ``systemctl show`` for all units with the properties ``UNIT_PROPERTIES``
    """
    found: dict[str, str] = {}
    for block in shown.split("\n\n"):
        unit = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        own = unit.get("FragmentPath", "").startswith(OWN_UNITS)
        if not own and not unit.get("UnitFileState", "").startswith("enabled"):
            continue
        # A unit that restarts repeatedly has no stable invocation.
        restarting = unit.get("NRestarts", "0") != "0"
        runs = "restarts repeatedly" if restarting else f"{unit['ActiveState']} {unit['InvocationID']}"
        found[f"unit {unit['Id']}"] = f"{unit['UnitFileState']} {runs}".strip()
    return found


def boards(shown: str) -> dict[str, str]:
    """Return the settings and the partitions of each simulated board.

    :param shown: output of ``accelerator-simulator show --json`` for one or several vendors, empty without boards
    """
    machine = json.loads(shown or "{}")
    found: dict[str, str] = {}
    for vendor in (machine, *(each for each in machine.values() if isinstance(each, dict))):
        for kind in {"gpus", "npus"} & vendor.keys():
            found[f"machine of {kind}"] = _settings({key: value for key, value in vendor.items() if key != kind})
            found.update((f"board {number} of {kind}", _settings(board)) for number, board in enumerate(vendor[kind]))
    return found


def _settings(shown: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in shown.items() if key not in VOLATILE_KEYS}, sort_keys=True)


def objects() -> dict[str, str]:
    """Return the objects of the node's API server without the excluded kinds. Empty if no API server runs."""
    if not KUBECONFIG.exists():
        return {}
    kubectl = ("kubectl", "--kubeconfig", str(KUBECONFIG))
    kinds = set(output(*kubectl, "api-resources", "--verbs=list", "--output=name").split()) - EXCLUDED_KINDS
    listed = json.loads(output(*kubectl, "get", ",".join(sorted(kinds)), "--all-namespaces", "--output=json"))
    found: dict[str, str] = {}
    for item in listed["items"]:
        name = "/".join(filter(None, (item["metadata"].get("namespace"), item["metadata"]["name"])))
        found[f"object {item['apiVersion']} {item['kind']} {name}"] = describe_object(item)
    return found


def describe_object(item: dict[str, Any]) -> str:
    """Return an object as a JSON string, without its status and the fields that the API server changes in each update."""
    counted = ("generation", "managedFields", "resourceVersion")
    lasting = {key: value for key, value in item["metadata"].items() if key not in counted}
    return json.dumps({**item, "metadata": lasting, "status": None}, sort_keys=True)


def output(*command: str, check: bool = True) -> str:
    """Return the output of a command. If ``check`` is false, return an empty string for a failed command.

    :raises subprocess.CalledProcessError: the command failed and ``check`` is true
    """
    done = subprocess.run(command, check=check, stdout=subprocess.PIPE, encoding="utf-8", timeout=120)
    return done.stdout if done.returncode == 0 else ""


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return a line for each difference with the previous and the current description."""
    return [
        f"{name}: {before.get(name, 'missing')} -> {after.get(name, 'missing')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def main(arguments: list[str]) -> int:
    """Save the state, or print the differences from the saved state."""
    shown = output("systemctl", "show", f"--property={UNIT_PROPERTIES}", "*")
    simulator = shutil.which("accelerator-simulator")
    # The simulator shows no boards if the driver is not installed or not loaded.
    shown_boards = output("accelerator-simulator", "show", "--json", check=False) if simulator else ""
    state = {**files(), **units(shown), **boards(shown_boards), **objects()}
    if arguments == ["save"]:
        STATE_FILE.write_text(json.dumps(state), encoding="utf-8")
        return 0
    lines = differences(json.loads(STATE_FILE.read_text(encoding="utf-8")), state)
    STATE_FILE.unlink()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
