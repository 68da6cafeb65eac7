# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Ascend chips for tests: template tables, devices created from them, and an independent model of the silicon.

The model of the silicon shares no code with the core: it adds up the tables and keeps vGroups as lists of vNPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

from dra_driver.core.model import Device, Partition, Partitioning, Placement, Profile
from dra_driver.core.vendors.ascend import names, templates
from dra_driver.core.vendors.ascend.families import FAMILIES, Family

MIB = 1024 * 1024
KEYS = ("aiCores", "memory", "aiCPU", "vpc", "venc", "vdec", "jpegd", "jpege")
Row = tuple[float, ...]


@dataclass(frozen=True)
class Chip:
    """One kind of chip: its totals in the order of KEYS (memory in MB as measured), and its templates (nominal memory in GB)."""

    pci_device: int
    totals: Row
    rows: Mapping[str, Row]

    @property
    def family(self) -> Family:
        return FAMILIES[self.pci_device]


CHIPS: Mapping[str, Chip] = {
    "310P": Chip(
        0xD500,
        (8, 21527, 7, 12, 3, 12, 16, 8),
        {
            "vir01": (1, 3, 1, 1, 0, 1, 2, 1),
            "vir02": (2, 6, 2, 3, 1, 3, 4, 2),
            "vir02_1c": (2, 6, 1, 3, 0, 3, 4, 2),
            "vir04": (4, 12, 4, 6, 2, 6, 8, 4),
            "vir04_3c": (4, 12, 3, 6, 1, 6, 8, 4),
            "vir04_3c_ndvpp": (4, 12, 3, 0, 0, 0, 0, 0),
            "vir04_4c_dvpp": (4, 12, 4, 12, 3, 12, 16, 8),
        },
    ),
    "910A": Chip(
        0xD801,
        (32, 32768, 14, 16, 0, 16, 16, 8),
        {
            "vir02": (2, 2, 1, 1, 0, 1, 1, 0),
            "vir04": (4, 4, 1, 2, 0, 2, 2, 1),
            "vir08": (8, 8, 3, 4, 0, 4, 4, 2),
            "vir16": (16, 16, 7, 8, 0, 8, 8, 4),
        },
    ),
    "910A-30": Chip(
        0xD801,
        (30, 32768, 14, 16, 0, 16, 16, 8),
        {"vir02": (2, 2, 1, 1, 0, 1, 1, 0), "vir16": (16, 16, 7, 8, 0, 8, 8, 4)},
    ),
    "910B2": Chip(
        0xD802,
        (24, 65536, 6, 10, 0, 2, 28, 4),
        {"vir12_3c_32g": (12, 32, 3, 5, 0, 1, 14, 2), "vir06_1c_16g": (6, 16, 1, 2, 0, 0, 7, 1)},
    ),
    "910B3": Chip(
        0xD802,
        (20, 65536, 6, 9, 0, 2, 24, 4),
        {"vir10_3c_32g": (10, 32, 3, 4, 0, 1, 12, 2), "vir05_1c_16g": (5, 16, 1, 2, 0, 0, 6, 1)},
    ),
    "910B4": Chip(
        0xD802,
        (20, 32768, 6, 9, 0, 2, 24, 4),
        {
            "vir10_3c_16g": (10, 16, 3, 4, 0, 1, 12, 2),
            "vir10_4c_16g_m": (10, 16, 4, 9, 0, 2, 24, 4),
            "vir10_3c_16g_nm": (10, 16, 3, 0, 0, 0, 0, 0),
            "vir05_1c_8g": (5, 8, 1, 2, 0, 0, 6, 1),
        },
    ),
    "A3": Chip(
        0xD803,
        (24, 65536, 7, 10, 0, 2, 28, 4),
        {"vir12_3c_32g": (12, 32, 3, 5, 0, 1, 14, 2), "vir06_1c_16g": (6, 16, 1, 2, 0, 0, 7, 1)},
    ),
}
#: The number of AICPUs that vNPUs really share.
HELPERS = {"310P": 7, "910A": 14, "910A-30": 14, "910B2": 7, "910B3": 7, "910B4": 7, "A3": 7}


def template(name: str, row: Sequence[float]) -> templates.Template:
    amounts = {key: Fraction(amount) for key, amount in zip(KEYS, row) if key != "memory"}
    return templates.Template(name, amounts, Fraction(row[1]))


def templates_and_totals(kind: str) -> tuple[tuple[templates.Template, ...], templates.Totals]:
    chip = CHIPS[kind]
    amounts = {key: Fraction(amount) for key, amount in zip(KEYS, chip.totals) if key != "memory"}
    return (
        tuple(template(name, row) for name, row in chip.rows.items()),
        templates.Totals(amounts, int(chip.totals[1]) * MIB),
    )


@cache
def profiles(kind: str) -> tuple[Profile, ...]:
    return templates.profiles_of(CHIPS[kind].family, *templates_and_totals(kind))


def can_exist(kind: str, counts: Mapping[str, int]) -> bool:
    """Return whether these numbers of vNPUs per template are within the totals, by sums of the tables only."""
    chip = CHIPS[kind]
    for at, key in enumerate(KEYS):
        total = HELPERS[kind] if key == "aiCPU" else chip.totals[at]
        if key != "memory" and sum(count * chip.rows[name][at] for name, count in counts.items()) > total:
            return False
    return True


@cache
def multisets(kind: str) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return each multiset of templates within the totals."""
    rows = CHIPS[kind].rows
    ranges = [range(max(n for n in range(17) if can_exist(kind, {name: n})) + 1) for name in rows]
    every = (dict(zip(rows, counts)) for counts in product(*ranges))
    return tuple(tuple((name, n) for name, n in counts.items() if n) for counts in every if can_exist(kind, counts))


def partition(kind: str, name: str, place: Placement, physical: int = 0, **changes: Any) -> Partition:
    (profile,) = (each for each in profiles(kind) if each.name == name)
    number = names.slice_id(physical, place.start)
    facts: dict[str, Any] = {
        "uuid": names.slice_uuid(uuid(physical), number),
        "profile": name,
        "profile_id": profile.profile_id,
        "placement": place,
        "instance_id": number,
        "compute_instance_id": None,
        "memory_bytes": profile.memory_bytes,
        "capacities": profile.capacities,
        "has_chosen_id": True,
    }
    facts.update(changes)
    return Partition(**facts)


def uuid(physical: int) -> str:
    return names.chip_uuid((0x1234, 0, 0, 0, physical))


def device(kind: str, partitions: Iterable[Partition] = (), physical: int = 0, **changes: Any) -> Device:
    chip = CHIPS[kind]
    present = tuple(partitions)
    facts: dict[str, Any] = {
        "vendor": "ascend",
        "index": physical,
        "minor": physical,
        "uuid": uuid(physical),
        "product": f"Ascend {kind}",
        "pci_address": f"0000:{16 + physical:02x}:00.0",
        "pcie_root": "pci0000:10",
        "numa_node": 0,
        "memory_bytes": int(chip.totals[1]) * MIB,
        "memory_slices": chip.family.places,
        "attributes": {"deviceType": chip.family.device_type, "physicId": physical, "model": kind},
        "capacities": templates.capacities_of(chip.family, *templates_and_totals(kind)),
        "partitioning": Partitioning(supported=True, enabled=bool(present), pending=bool(present), has_mode=False),
        "profiles": profiles(kind),
        "partitions": present,
        "pci_device_id": chip.pci_device << 16 | 0x19E5,
    }
    facts.update(changes)
    return Device(**facts)


@dataclass
class Silicon:
    """A chip that creates and destroys vNPUs: it checks sums, and on the 310P four vGroups."""

    kind: str
    slices: dict[int, tuple[str, int]] = field(default_factory=dict)  # template and vGroup by id

    def create(self, name: str, slice_id: int, group: int = 0) -> bool:
        """Create a vNPU with an id that the caller selects. Return False if the chip refuses."""
        counts: dict[str, int] = {name: 1}
        for other, _group in self.slices.values():
            counts[other] = counts.get(other, 0) + 1
        if slice_id in self.slices or not can_exist(self.kind, counts):
            return False
        cores = CHIPS[self.kind].rows[name][0]
        if CHIPS[self.kind].family.groups:
            there = [CHIPS[self.kind].rows[other][0] for other, at in self.slices.values() if at == group]
            if there and not (cores == 1 and there == [1]):
                return False
        self.slices[slice_id] = (name, group)
        return True
