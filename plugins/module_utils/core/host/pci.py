# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the location of a PCI device from sysfs: its address in the kernel's format, its root complex, and its NUMA node.

The values are those of the standard attributes ``resource.kubernetes.io/pcieRoot``, ``pciBusID``, and ``numaNode``.
"""

from __future__ import annotations

import re

from .system import System

_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.([0-7]))?")
_PCIE_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
LARGEST_NUMA_NODE = 1023
_MEMORY_FLAG = 0x200  # IORESOURCE_MEM
DEVICES, DRIVERS = "/sys/bus/pci/devices", "/sys/bus/pci/drivers"


def normalize_address(text: str) -> str:
    """Return a PCI address in the kernel's format: ``00000000:3B:00.0`` becomes ``0000:3b:00.0``.

    Raises ValueError for a text that is not a PCI address.
    """
    found = _BUS_ID.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a PCI address: expected domain:bus:device.function in hexadecimal digits")
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or '0'}"


def pcie_root(system: System, address: str) -> str | None:
    """Return the root complex above a device, such as ``pci0000:3a``; None if sysfs does not show it."""
    device = f"{DEVICES}/{address}"
    if not system.exists(device):
        return None
    parts = system.real_path(device).split("/")
    if "devices" not in parts or parts[-1] != address:
        return None
    root = parts[parts.index("devices") + 1]
    return root if _PCIE_ROOT.fullmatch(root) else None


def numa_node(system: System, address: str) -> int | None:
    """Return the NUMA node that a device is attached to; None if the firmware does not report it (-1)."""
    try:
        node = int(system.read_text(f"{DEVICES}/{address}/numa_node").strip())
    except (OSError, ValueError):
        return None
    return node if 0 <= node <= LARGEST_NUMA_NODE else None


def driver_of(system: System, address: str) -> str:
    """Return the driver that a device is bound to; empty if it is unbound."""
    return system.link_target(f"{DEVICES}/{address}/driver").rpartition("/")[2]


def override_of(system: System, address: str) -> str:
    """Return the device's driver override; empty without one."""
    text = _read_attribute(system, f"{DEVICES}/{address}/driver_override")
    return "" if text == "(null)" else text


def iommu_group(system: System, address: str) -> str | None:
    """Return the number of a device's IOMMU group; None without an enabled IOMMU."""
    return system.link_target(f"{DEVICES}/{address}/iommu_group").rpartition("/")[2] or None


def group_members(system: System, group: str) -> tuple[str, ...]:
    """Return the addresses of all devices in an IOMMU group."""
    return system.list_directory(f"/sys/kernel/iommu_groups/{group}/devices")


def class_of(system: System, address: str) -> str:
    """Return a device's class, such as ``0x030200``; empty if sysfs does not show it."""
    return _read_attribute(system, f"{DEVICES}/{address}/class")


def modalias_of(system: System, address: str) -> str:
    """Return the modalias by which the kernel finds a device's module; empty if sysfs does not show it."""
    return _read_attribute(system, f"{DEVICES}/{address}/modalias")


def virtual_functions(system: System, address: str) -> int:
    """Return the number of a device's enabled virtual functions."""
    text = _read_attribute(system, f"{DEVICES}/{address}/sriov_numvfs")
    return int(text) if text.isdigit() else 0


def most_virtual_functions(system: System, address: str) -> int:
    """Return the maximum number of a device's virtual functions; 0 if it has none or sysfs does not show it."""
    text = _read_attribute(system, f"{DEVICES}/{address}/sriov_totalvfs")
    return int(text) if text.isdigit() else 0


def memory_regions(system: System, address: str) -> int:
    """Return the size of a device's memory regions in the address space, rounded up to a power of two; 0 if unknown."""
    total = 0
    for line in _read_attribute(system, f"{DEVICES}/{address}/resource").splitlines()[
        :6
    ]:  # the six base address registers
        try:
            start, end, flags = (int(word, 16) for word in line.split())
        except ValueError:
            continue
        if flags & _MEMORY_FLAG and end > start:
            total += end - start + 1
    return 1 << (total - 1).bit_length() if total else 0


def _read_attribute(system: System, path: str) -> str:
    try:
        return system.read_text(path).strip()
    except OSError:
        return ""
