# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Names and numbers of MIG profiles.

Facts: the naming rule of NVIDIA/go-nvlib (pkg/nvlib/device/mig_profile.go); NVML's header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from ...errors import InvalidLayout
from ...model import Placement
from ...partitioning.capacity import count_disjoint

_NAME = re.compile(r"(?:MIG )?(?:(\d+)c\.)?(\d+)g\.(\d+)gb((?:[+-][a-z][a-z.]*)*)")
_SUFFIX = re.compile(r"[+-][a-z][a-z.]*")
_SUFFIX_ORDER = ("+me", "+me.all", "+gfx", "-me")

# The suffix of each value of NVML_GPU_INSTANCE_PROFILE_*, for drivers that do not name profiles.
SUFFIX_OF_NUMBER: Mapping[int, str] = {
    0x7: "+me",
    0x8: "+me",
    0xA: "+gfx",
    0xB: "+gfx",
    0xC: "+gfx",
    0xD: "-me",
    0xE: "-me",
    0xF: "+me.all",
    0x10: "+me.all",
    0x11: "+gfx",
}

# Some drivers report wrong instance counts for the A30 (PCI device 0x20B7). These are the counts of the board.
A30_DEVICE_ID = 0x20B710DE
A30_MAXIMUM: Mapping[int, int] = {0: 1, 5: 2, 6: 1, 14: 4, 21: 1}


@dataclass(frozen=True, order=True)
class ProfileName:
    """The parts of a profile name: compute slices of the compute instance and of the GPU instance, gigabytes, and suffixes."""

    compute: int
    slices: int
    gigabytes: int
    suffixes: tuple[str, ...] = ()

    @property
    def fills(self) -> bool:
        """Return whether the compute instance fills its GPU instance."""
        return self.compute == self.slices

    def __str__(self) -> str:
        prefix = "" if self.fills else f"{self.compute}c."
        return f"{prefix}{self.slices}g.{self.gigabytes}gb{''.join(self.suffixes)}"


def parse_name(text: str) -> ProfileName:
    """Return the parts of a profile name in any spelling: ``1g.5gb``, ``MIG 1g.5gb+me``, ``1c.1g.5gb``.

    Raises InvalidLayout for any other text.
    """
    found = _NAME.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise InvalidLayout(
            f"{text!r} is not the name of a MIG profile", hint="Expected is a name such as 1g.10gb or 1g.10gb+me."
        )
    compute, slices, gigabytes, suffixes = found.groups()
    parts = _SUFFIX.findall(suffixes)
    if len(set(parts)) != len(parts) or set(parts) - set(_SUFFIX_ORDER):
        raise InvalidLayout(
            f"{text!r} is not the name of a MIG profile",
            hint=f"The suffixes known are {', '.join(_SUFFIX_ORDER)}, each once.",
        )
    name = ProfileName(
        compute=int(compute or slices),
        slices=int(slices),
        gigabytes=int(gigabytes),
        suffixes=tuple(sorted(parts, key=_SUFFIX_ORDER.index)),
    )
    if not 0 < name.compute <= name.slices:
        raise InvalidLayout(f"{text!r}: a compute instance cannot have more slices than its GPU instance")
    return name


def shown_gigabytes(profile_megabytes: int, device_bytes: int) -> int:
    """Return the gigabytes in a profile's name.

    The profile's share of the device memory is rounded up to eighths. This share of the device memory in GiB, rounded
    up, is rounded to the nearest integer.
    """
    eighths = ceil(Fraction(profile_megabytes * 1024 * 1024, device_bytes) * 8)
    whole = ceil(Fraction(device_bytes, 1024**3))
    return floor(Fraction(eighths * whole, 8) + Fraction(1, 2))


def computed_name(number: int, slices: int, profile_megabytes: int, device_bytes: int) -> str:
    """Return the name of a profile, for drivers that return no names."""
    return f"{slices}g.{shown_gigabytes(profile_megabytes, device_bytes)}gb{SUFFIX_OF_NUMBER.get(number, '')}"


def aliases(name: str) -> tuple[str, ...]:
    """Return the other spellings of a profile's name."""
    parsed = parse_name(name)
    plain = str(parsed)
    spellings = (f"MIG {plain}", f"{parsed.slices}c.{plain}", f"MIG {parsed.slices}c.{plain}", plain)
    return tuple(spelling for spelling in spellings if spelling != name)


def maximum_of(profile_id: int, reported: int, placements: tuple[Placement, ...], pci_device_id: int) -> int:
    """Return the maximum number of partitions with a profile, from the driver's number and the placements."""
    if pci_device_id == A30_DEVICE_ID and profile_id in A30_MAXIMUM:
        return A30_MAXIMUM[profile_id]
    room = count_disjoint(placements)
    return min(reported, room) if reported else room
