# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""All that a driver could have left on its node, as data that can be compared: hardware, store, files, programs, drivers of PCI devices.

Nothing here asks the product: boards answer through the simulator, the rest are files.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerator_simulator.library import Library

from tests.chaos.node import CDI, REGISTRY, STATE, Broken

COMPANIONS = Path("/run/dra-accelerators/companions")
SERVICES = Path("/run/service-manager")
CAPABILITIES = Path("/dev/nvidia-caps")
PCI = Path("/sys/bus/pci/devices")
#: What a GPU is set to.
SETTINGS = (
    "mig_mode_current",
    "mig_mode_pending",
    "compute_mode",
    "persistence_mode",
    "time_slice",
    "power_limit_mw",
    "locked_clock_minimum_mhz",
    "locked_clock_maximum_mhz",
    "locked_memory_clock_minimum_mhz",
    "locked_memory_clock_maximum_mhz",
)
#: Files that any driver has: the store, its locks, its sockets, what it remembers of health.
OWN_FILES = re.compile(r"state\.db(-wal|-shm)?|driver\.lock|locks|metadata|dra\.sock|status\.sock|health\.json")
Snapshot = dict[str, Any]


def hardware(silicon: Library) -> dict[str, Any]:
    """Each GPU that NVML lists, by PCI address: what it is set to, and its partitions."""
    return {
        gpu["pci_address"]: {
            "set": [gpu[name] for name in SETTINGS],
            "partitions": sorted(
                [
                    each["profile"],
                    each["start"],
                    each["size"],
                    [inner["profile"] for inner in each["compute_instances"]],
                ]
                for each in gpu["gpu_instances"]
            ),
        }
        for gpu in silicon.command("show")["gpus"]
    }


def drivers() -> dict[str, list[str]]:
    """By PCI address of each GPU: its driver, and what it is told to have instead."""
    found = {}
    for device in sorted(PCI.iterdir()):
        if (device / "driver_override").is_file() and (device / "class").read_text().startswith("0x0302"):
            link = device / "driver"
            found[device.name] = [
                link.readlink().name if link.is_symlink() else "",
                (device / "driver_override").read_text().strip(),
            ]
    return found


def stored(path: Path = STATE / "state.db") -> dict[str, Any]:
    """The claims in the store with their state, and what else is in it."""
    if not path.exists():
        return {"claims": {}, "meta": {}}
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10) as connection:
        claims = dict(connection.execute("SELECT uid, state FROM claims"))
        meta = dict(connection.execute("SELECT key, value FROM meta"))
    connection.close()
    return {"claims": claims, "meta": meta}


def programs() -> int:
    """How many MPS daemons and servers run."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += os.path.basename(words[0]).startswith(b"nvidia-cuda-mps") and b"-f" in words and state != "Z"
    return found


def listed(folder: Path) -> list[str]:
    """All that lies below a folder, by its path in it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.is_dir() else []


def snapshot(silicon: Library) -> Snapshot:
    """All of it. A store that is being written at this moment is read as it was."""
    store = stored()
    return {
        "hardware": hardware(silicon),
        "drivers": drivers(),
        "claims": store["claims"],
        "meta": store["meta"],
        "cdi": listed(CDI),
        "metadata": listed(STATE / "metadata"),
        "state folder": [name for name in os.listdir(STATE) if not OWN_FILES.fullmatch(name)],
        "registry": [name for name in os.listdir(REGISTRY) if name != f"{STATE.name}-reg.sock"],
        "companions": sorted(os.listdir(COMPANIONS)),
        "services": sorted(os.listdir(SERVICES)) if SERVICES.is_dir() else [],
        "programs": programs(),
        "mounts": sum(str(COMPANIONS) in line for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "capabilities": len(os.listdir(CAPABILITIES)),
        "vfio": sorted(path.name for path in Path("/dev/vfio").rglob("*") if not path.is_dir()),
    }


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """What differs, in words; "" where nothing does."""
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


def check_files(silicon: Library) -> None:
    """See that each CDI file names partitions that exist, by the device nodes that NVIDIA's driver has for them. Raises Broken."""
    instances = [
        each for gpu in silicon.command("show")["gpus"] for each in gpu["gpu_instances"] if each["compute_instances"]
    ]
    minors = {
        f"/dev/nvidia-caps/nvidia-cap{number}"
        for each in instances
        for number in (each["capability_minor"], *(inner["capability_minor"] for inner in each["compute_instances"]))
    }
    partitions = {inner["uuid"] for each in instances for inner in each["compute_instances"]}
    for file in CDI.glob("k8s.gpu.nvidia.com-claim_*.json"):
        text = file.read_text(encoding="utf-8")
        document = json.loads(text)
        nodes = {
            node["path"]
            for device in document["devices"]
            for node in device["containerEdits"].get("deviceNodes", ())
            if "nvidia-caps/" in node["path"]
        }
        gone = {path for path in nodes - minors if path not in MONITOR}
        unknown = set(re.findall(r"MIG-[0-9a-f-]{36}", json.dumps(document["devices"]))) - partitions
        if gone or unknown:
            raise Broken(f"{file} names {sorted(gone | unknown)}, which is no partition that exists")


#: The capabilities that are no partition's: mig/config and mig/monitor.
MONITOR = {f"{CAPABILITIES}/nvidia-cap1", f"{CAPABILITIES}/nvidia-cap2"}
