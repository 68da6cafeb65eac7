# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What a node shows of each vendor's accelerators and driver, without any driver being asked.

Needs the standard library alone, because it also runs where nothing is installed yet.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from .core.ascend import bus
from .core.ascend.driver_files import INSTALL_INFO, LIBRARIES, MANAGER, install_folder, version_of
from .core.ascend.tables import key_values
from .core.ascend.vendor import FACTS as ASCEND
from .core.nvidia.names import gpus_on_the_bus, listed
from .core.nvidia.vendor import FACTS as NVIDIA
from .core.system import System

# Where the library may be besides the folder of the installation.
LIBRARY, FURTHER_PLACE = "libdcmi.so", "/usr/local/dcmi"
COMPLETE = "complete"
# The programs that hand out devices, or cut them up, without knowing of claims.
FOREIGN_UNITS = (*NVIDIA.manager_units, *ASCEND.manager_units)
# The units that apply a layout at boot.
LAYOUT_UNITS = (NVIDIA.layout_unit, ASCEND.layout_unit)


def devices_by_vendor(system: System) -> dict[str, list[str]]:
    """Return the PCI addresses of each vendor's devices, of those vendors alone that the node has any of. Asks no driver."""
    found = {
        NVIDIA.word: sorted({*gpus_on_the_bus(system), *listed(system)}),
        ASCEND.word: [chip.address for chip in bus.chips(system)],
    }
    return {vendor: addresses for vendor, addresses in found.items() if addresses}


def device_rules(system: System, vendors: Iterable[str]) -> list[dict[str, Any]]:
    """Return the rules of an OCI specification that allow the character devices of these vendors on this node, and no others.

    A rule allows a whole major number if /proc/devices names it as the vendor's. A device node of the vendor whose major number
    belongs to another name, such as ``misc``, gets a rule for its own number.
    """
    majors: set[int] = set()
    nodes: set[tuple[int, int]] = set()
    for facts in (each for each in (NVIDIA, ASCEND) if each.word in set(vendors)):
        majors.update(
            major
            for major, name in _character_drivers(system)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in facts.character_drivers)
        )
        for path in (*facts.control_nodes, *system.find_nodes(facts.device_nodes)):
            number = system.device_number(path)
            if number is not None and number.type == "c":
                nodes.add((number.major, number.minor))
    allowed = [{"allow": True, "type": "c", "major": major, "access": "rwm"} for major in sorted(majors)]
    return allowed + [
        {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rwm"}
        for major, minor in sorted(nodes)
        if major not in majors
    ]


def _character_drivers(system: System) -> list[tuple[int, str]]:
    try:
        text = system.read_text("/proc/devices")
    except OSError:
        return []
    lines = [line.split() for line in text.partition("Block devices:")[0].splitlines()]
    return [(int(words[0]), words[1]) for words in lines if len(words) == 2 and words[0].isdecimal()]


def ascend_facts(system: System) -> dict[str, Any]:
    """Return what the files of Ascend's driver say of it, and why it cannot be used. No program is run."""
    folders = (f"{install_folder(system)}/{LIBRARIES[0]}", FURTHER_PLACE)
    library = next((path for path in (f"{each}/{LIBRARY}" for each in folders) if system.exists(path)), "")
    try:
        said = key_values(system.read_text(INSTALL_INFO).replace("=", ":"))
    except OSError:
        said = {}
    # An installation that was cut short says so; a driver that says nothing has come by another way.
    status = said.get("driver_install_status", COMPLETE)
    lacks = [
        *([f"{INSTALL_INFO} calls the installation {status!r}, not {COMPLETE!r}"] if status != COMPLETE else []),
        *([] if library else [f"{LIBRARY} is neither in {' nor in '.join(folders)}"]),
        *([] if system.exists(MANAGER) else [f"there is no {MANAGER}, so that its kernel module is not loaded"]),
    ]
    return {
        "answers": not lacks,
        "version": version_of(system),
        "library": library,
        "group": _known_group(system, said.get("usergroup", "")),
        "problem": "; ".join(lacks),
    }


def _known_group(system: System, name: str) -> str:
    """Return the group if the node has it, or nothing: what runs in a group that there is not does not start."""
    try:
        groups = system.read_text("/etc/group").splitlines()
    except OSError:
        return ""
    return name if name and any(line.startswith(f"{name}:") for line in groups) else ""
