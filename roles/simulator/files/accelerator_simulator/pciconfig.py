# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The sysfs contents of one PCI function: resources and configuration space (PCI Local Bus 3.0, PCI Express Base)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# linux/ioport.h: memory, prefetchable, 64 bit, aligned to its size; the low nibble repeats the register's own bits
RESOURCE_MEMORY_32 = 0x00040200
RESOURCE_PREFETCHABLE_64 = 0x0014220C
RESOURCE_LINES = 13
LINK_SPEEDS = {
    1: "2.5 GT/s PCIe",
    2: "5.0 GT/s PCIe",
    3: "8.0 GT/s PCIe",
    4: "16.0 GT/s PCIe",
    5: "32.0 GT/s PCIe",
    6: "64.0 GT/s PCIe",
}
CAPABILITIES_AT, POWER_MANAGEMENT_AT, EXPRESS_AT = 0x34, 0x60, 0x78
CONFIGURATION_SIZE = 256


@dataclass(frozen=True)
class Bar:
    """A memory window: register index, first address, size in bytes."""

    index: int
    start: int
    size: int
    prefetchable: bool


def place_bars(pci: Mapping[str, Any], position: int) -> tuple[Bar, ...]:
    """Return memory windows for the ``position``-th function: 32-bit ones from 0xa0000000, 64-bit ones from
    0x200000000000.
    """
    bars: list[Bar] = []
    high = 0x200000000000 + position * (1 << 40)
    for region in pci.get("bars", ()):
        if region["prefetchable"]:
            start = (high + region["size"] - 1) // region["size"] * region["size"]
            high = start + region["size"]
        else:
            start = 0xA0000000 + position * (1 << 26)
        bars.append(Bar(region["index"], start, region["size"], region["prefetchable"]))
    return tuple(bars)


def resource_file(bars: Sequence[Bar]) -> str:
    """Return the sysfs file ``resource``: start, end, and flags of each window, one per line."""
    lines = [f"0x{0:016x} 0x{0:016x} 0x{0:016x}"] * RESOURCE_LINES
    for region in bars:
        flags = RESOURCE_PREFETCHABLE_64 if region.prefetchable else RESOURCE_MEMORY_32
        lines[region.index] = f"0x{region.start:016x} 0x{region.start + region.size - 1:016x} 0x{flags:016x}"
    return "\n".join(lines) + "\n"


def configuration_space(
    pci: Mapping[str, Any], bars: Sequence[Bar], bridge: bool, buses: tuple[int, int, int], port_type: int
) -> bytes:
    """Return 256 bytes of configuration space with power management and PCI Express capabilities.

    ``buses`` are the primary, secondary, and subordinate bus of a bridge. ``port_type`` is the PCI Express device
    type: 0 endpoint, 4 root port, 5 and 6 switch upstream and downstream port.
    """
    space = bytearray(CONFIGURATION_SIZE)
    number = {
        key: int(str(pci[key]), 16)
        for key in ("vendor", "device", "class", "revision", "subsystem_vendor", "subsystem_device")
    }
    struct.pack_into("<HHHH", space, 0, number["vendor"], number["device"], 0x0546, 0x0010)
    struct.pack_into("<I", space, 8, number["class"] << 8 | number["revision"])
    space[0x0E] = 1 if bridge else 0
    space[CAPABILITIES_AT] = POWER_MANAGEMENT_AT
    if bridge:
        space[0x18:0x1B] = bytes(buses)
    else:
        for region in bars:
            low = region.start & 0xFFFFFFF0
            struct.pack_into("<I", space, 0x10 + 4 * region.index, low | (0xC if region.prefetchable else 0))
            if region.prefetchable:
                struct.pack_into("<I", space, 0x14 + 4 * region.index, region.start >> 32)
        struct.pack_into("<HH", space, 0x2C, number["subsystem_vendor"], number["subsystem_device"])
    struct.pack_into("<BBHH", space, POWER_MANAGEMENT_AT, 0x01, EXPRESS_AT, 0x0003, 0x0008)
    generation, width = int(pci["max_link_generation"]), int(pci["max_link_width"])
    struct.pack_into("<BBHI", space, EXPRESS_AT, 0x10, 0, 2 | port_type << 4, 0x00008FE1)
    struct.pack_into("<I", space, EXPRESS_AT + 0x0C, generation | width << 4)
    struct.pack_into("<H", space, EXPRESS_AT + 0x12, generation | width << 4)
    return bytes(space)
