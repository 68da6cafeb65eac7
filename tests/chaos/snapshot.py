# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""All possible traces of a driver on its node, as comparable data: hardware, store, files, programs, and drivers of PCI devices.

It does not query the driver: the simulator shows the boards, and the rest are files.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.chaos.errors import Broken
from tests.chaos.node import CDI, COMPANIONS, REGISTRY, Node

SERVICES = Path("/run/service-manager")
PCI = Path("/sys/bus/pci/devices")
#: Files of each driver: the store, locks, sockets, and its health state.
DRIVER_FILES = re.compile(
    r"state\.db(-wal|-shm)?|driver\.lock|locks|repairs|metadata|dra\.sock|status\.sock|health\.json"
)
Snapshot = dict[str, Any]


def drivers(pci_class: str) -> dict[str, list[str]]:
    """Return the driver and the driver override of each device of a class, by PCI address."""
    found = {}
    for device in sorted(PCI.iterdir()):
        if (device / "driver_override").is_file() and (device / "class").read_text().startswith(pci_class):
            link = device / "driver"
            found[device.name] = [
                link.readlink().name if link.is_symlink() else "",
                (device / "driver_override").read_text().strip(),
            ]
    return found


def read_store(path: Path) -> dict[str, Any]:
    """Return the claims in the store with their state, and its other entries without the identity of the store."""
    if not path.exists():
        return {"claims": {}, "meta": {}}
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10) as connection:
        claims = dict(connection.execute("SELECT uid, state FROM claims"))
        meta = dict(connection.execute("SELECT key, value FROM meta WHERE key != 'identity'"))
    connection.close()
    return {"claims": claims, "meta": meta}


def programs(begin: bytes) -> int:
    """Return the number of running programs for claims: their names start with ``begin``, and they have the argument -f."""
    if not begin:
        return 0
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += os.path.basename(words[0]).startswith(begin) and b"-f" in words and state != "Z"
    return found


def paths_below(folder: Path) -> list[str]:
    """Return all paths in a directory, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.is_dir() else []


def snapshot(node: Node) -> Snapshot:
    """Return the whole state. A store with a running write is read in its previous state."""
    store, vendor, state = read_store(node.store), node.vendor, node.state
    return {
        "hardware": vendor.hardware(node.silicon),
        "made again": vendor.recreated_partitions(),
        "drivers": drivers(vendor.pci_class),
        "claims": store["claims"],
        "meta": store["meta"],
        "cdi": [name for name in paths_below(CDI) if name != node.metadata.name],
        "previous metadata": paths_below(state / "metadata"),
        "state directory": [name for name in os.listdir(state) if not DRIVER_FILES.fullmatch(name)],
        "registry": [name for name in os.listdir(REGISTRY) if name != f"{state.name}-reg.sock"],
        "companions": sorted(os.listdir(COMPANIONS)),
        "services": sorted(os.listdir(SERVICES)) if SERVICES.is_dir() else [],
        "programs": programs(vendor.program_prefix),
        "mounts": sum(str(COMPANIONS) in line for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "nodes": vendor.device_nodes(),
        "vfio": sorted(path.name for path in Path("/dev/vfio").rglob("*") if not path.is_dir()),
    }


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the differences as text, or ""."""
    lines = []
    for key in expected:
        if found[key] == expected[key]:
            continue
        ours, theirs = found[key], expected[key]
        if isinstance(ours, dict):
            names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
            ours, theirs = ({name: each.get(name) for name in names} for each in (ours, theirs))
        lines.append(f"{key}: found {json.dumps(ours)}, expected {json.dumps(theirs)}")
    return "\n".join(lines)


def await_snapshot(node: Node, what: str, expected: Mapping[str, Any], seconds: float = 30) -> None:
    """Wait until a node has the expected state. Raises Broken with the differences."""
    deadline = time.monotonic() + seconds
    while text := difference(snapshot(node), expected):
        if time.monotonic() > deadline:
            raise Broken(f"waited {seconds:g} s for: {what}\n{text}\n{node.log_tail()}")
        time.sleep(0.01)


def check_files(node: Node) -> None:
    """Assert that each claim's CDI file names existing devices. Raises Broken."""
    node.vendor.check_cdi_files(node.silicon, sorted(CDI.glob(f"k8s.{node.driver}-claim_*.json")))
