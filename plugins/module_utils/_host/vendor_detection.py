# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read the facts of each vendor's accelerators and driver from a node's files, without querying a driver.

Needs only the standard library, because it also runs before anything is installed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from ..core.host.system import System
from ..core.vendors.ascend import bus
from ..core.vendors.ascend.dcmi.boundary import container_reason
from ..core.vendors.ascend.driver_files import INSTALL_INFO, LIBRARIES, MANAGER, install_folder, version_of
from ..core.vendors.ascend.npu_smi.npu_smi_tables import key_values
from ..core.vendors.ascend.vendor import FACTS as ASCEND
from ..core.vendors.nvidia.sysfs import bound_gpus, gpus_on_the_bus
from ..core.vendors.nvidia.vendor import FACTS as NVIDIA

# Possible paths of the library outside of the installation directory.
LIBRARY, FURTHER_PLACE = "libdcmi.so", "/usr/local/dcmi"
COMPLETE = "complete"
# Programs that assign or partition devices without using claims.
FOREIGN_UNITS = (*NVIDIA.manager_units, *ASCEND.manager_units)
# Units that apply a layout at boot.
LAYOUT_UNITS = (NVIDIA.layout_unit, ASCEND.layout_unit)


def devices_by_vendor(system: System) -> dict[str, list[str]]:
    """Return the PCI addresses of the devices by vendor, only for vendors with devices on the node. Queries no driver.

    Devices without a PCI address are returned by their device nodes.
    """
    found = {
        NVIDIA.word: sorted({*gpus_on_the_bus(system), *bound_gpus(system)}),
        ASCEND.word: [chip.address for chip in bus.chips(system)],
    }
    return {vendor: addresses for vendor, addresses in found.items() if addresses}


def device_rules(system: System, vendors: Iterable[str]) -> list[dict[str, Any]]:
    """Return the OCI device rules that allow only the character devices of these vendors on this node.

    A rule allows a whole major number if /proc/devices assigns it to the vendor. A device node of the vendor whose major
    number has another name, such as ``misc``, gets a rule for its own number.
    """
    majors: set[int] = set()
    nodes: set[tuple[int, int]] = set()
    for facts in (each for each in (NVIDIA, ASCEND) if each.word in set(vendors)):
        majors.update(
            major
            for major, name in character_drivers(system)
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


def character_drivers(system: System) -> list[tuple[int, str]]:
    """Return the major number and the name of each driver of character devices, from /proc/devices."""
    try:
        text = system.read_text("/proc/devices")
    except OSError:
        return []
    lines = [line.split() for line in text.partition("Block devices:")[0].splitlines()]
    return [(int(words[0]), words[1]) for words in lines if len(words) == 2 and words[0].isdecimal()]


def ascend_facts(system: System) -> dict[str, Any]:
    """Return the facts of Ascend's driver from its files, and why it cannot be used. No program is run."""
    folders = (f"{install_folder(system)}/{LIBRARIES[0]}", FURTHER_PLACE)
    library = next((path for path in (f"{each}/{LIBRARY}" for each in folders) if system.exists(path)), "")
    try:
        said = key_values(system.read_text(INSTALL_INFO).replace("=", ":"))
    except OSError:
        said = {}
    # An interrupted installation has a status. A driver without a status was installed in another way.
    status = said.get("driver_install_status", COMPLETE)
    lacks = [
        *([f"{INSTALL_INFO} calls the installation {status!r}, not {COMPLETE!r}"] if status != COMPLETE else []),
        *([] if library else [f"{LIBRARY} is neither in {' nor in '.join(folders)}"]),
        *([] if system.exists(MANAGER) else [f"there is no {MANAGER}, so that its kernel module is not loaded"]),
    ]
    return {
        "answers": not lacks,
        "version": version_of(system),
        "unified_bus": bus.has_unified_bus_driver(system),
        "library": library,
        "group": _known_group(system, said.get("usergroup", "")),
        **_ids_of(system, said.get("username", "")),
        "problem": "; ".join(lacks),
        "container": container_reason(system),
    }


def _ids_of(system: System, name: str) -> dict[str, int]:
    """Return the UID and GID of the driver's user from /etc/passwd, or -1 if the user does not exist."""
    try:
        entries = [line.split(":") for line in system.read_text("/etc/passwd").splitlines()]
    except OSError:
        entries = []
    found = next((each for each in entries if name and each[0] == name and len(each) > 3), None)
    numbers = [int(each) if each.isdecimal() else -1 for each in found[2:4]] if found else [-1, -1]
    return {"uid": numbers[0], "gid": numbers[1]}


def _known_group(system: System, name: str) -> str:
    """Return the group if it exists on the node, or an empty string: a process with a missing group does not start."""
    try:
        groups = system.read_text("/etc/group").splitlines()
    except OSError:
        return ""
    return name if name and any(line.startswith(f"{name}:") for line in groups) else ""
