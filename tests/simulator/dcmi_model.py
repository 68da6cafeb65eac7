# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Brute-force model of vNPUs: tables of the resources of templates and whole chips, without code or data shared with
the library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Amounts = tuple[float, ...]
#: AI Cores, memory (GB), AICPU, VPC, VENC, VDEC, JPEGD, JPEGE
CHIPS: dict[str, Amounts] = {
    "310P": (8, 24, 7, 12, 3, 12, 16, 8),
    "910A": (32, 32, 14, 16, 0, 16, 16, 8),
    "910B4": (20, 32, 7, 9, 0, 2, 24, 4),
    "910A-30": (30, 32, 14, 16, 0, 16, 16, 8),
    "910A-16": (32, 16, 14, 16, 0, 16, 16, 8),
    "910B1": (24, 64, 7, 10, 0, 2, 28, 4),
    "910B2": (24, 64, 7, 10, 0, 2, 28, 4),
    "910B2C": (24, 64, 7, 10, 0, 2, 28, 4),
    "910B3": (20, 64, 7, 9, 0, 2, 24, 4),
    "910B4-1": (20, 64, 7, 9, 0, 2, 24, 4),
    "A3": (24, 64, 7, 10, 0, 2, 28, 4),
    "A3-infer": (20, 64, 7, 9, 0, 2, 24, 4),
}
_OF_24_CORES: dict[str, Amounts] = {
    "vir12_3c_32g": (12, 32, 3, 5, 0, 1, 14, 2),
    "vir06_1c_16g": (6, 16, 1, 2, 0, 0, 7, 1),
}
_OF_20_CORES: dict[str, Amounts] = {
    "vir10_3c_32g": (10, 32, 3, 4, 0, 1, 12, 2),
    "vir05_1c_16g": (5, 16, 1, 2, 0, 0, 6, 1),
}
TEMPLATES: dict[str, dict[str, Amounts]] = {
    "310P": {
        "vir01": (1, 3, 1, 1, 0, 1, 2, 1),
        "vir02": (2, 6, 2, 3, 1, 3, 4, 2),
        "vir02_1c": (2, 6, 1, 3, 0, 3, 4, 2),
        "vir04": (4, 12, 4, 6, 2, 6, 8, 4),
        "vir04_3c": (4, 12, 3, 6, 1, 6, 8, 4),
        "vir04_3c_ndvpp": (4, 12, 3, 0, 0, 0, 0, 0),
        "vir04_4c_dvpp": (4, 12, 4, 12, 3, 12, 16, 8),
    },
    "910A": {
        "vir02": (2, 2, 1, 1, 0, 1, 1, 0),
        "vir04": (4, 4, 1, 2, 0, 2, 2, 1),
        "vir08": (8, 8, 3, 4, 0, 4, 4, 2),
        "vir16": (16, 16, 7, 8, 0, 8, 8, 4),
    },
    "910B4": {
        "vir10_3c_16g": (10, 16, 3, 4, 0, 1, 12, 2),
        "vir10_4c_16g_m": (10, 16, 4, 9, 0, 2, 24, 4),
        "vir10_3c_16g_nm": (10, 16, 3, 0, 0, 0, 0, 0),
        "vir05_1c_8g": (5, 8, 1, 2, 0, 0, 6, 1),
    },
    "910A-16": {
        "vir02": (2, 1, 1, 1, 0, 1, 1, 0),
        "vir04": (4, 2, 1, 2, 0, 2, 2, 1),
        "vir08": (8, 4, 3, 4, 0, 4, 4, 2),
        "vir16": (16, 8, 7, 8, 0, 8, 8, 4),
    },
    **dict.fromkeys(("910B1", "910B2", "910B2C", "A3"), _OF_24_CORES),
    **dict.fromkeys(("910B3", "910B4-1", "A3-infer"), _OF_20_CORES),
}
TEMPLATES["910A-30"] = TEMPLATES["910A"]
COMPLETE_310P = (
    "vir04 vir04_3c",
    "vir04 vir02 vir02_1c",
    "vir04 vir02_1c vir01 vir01",
    "vir04_3c vir02 vir02",
    "vir04_3c vir02 vir01 vir01",
    "vir04_3c vir01 vir01 vir01 vir01",
    "vir02 vir02 vir02 vir02_1c",
    "vir02 vir02 vir02_1c vir01 vir01",
    "vir02 vir02_1c vir01 vir01 vir01 vir01",
    "vir02_1c vir01 vir01 vir01 vir01 vir01 vir01",
    "vir04_4c_dvpp vir04_3c_ndvpp",
    "vir04 vir04_3c_ndvpp",
    "vir04_3c_ndvpp vir02 vir02",
    "vir04_3c_ndvpp vir02 vir01 vir01",
    "vir04_3c_ndvpp vir01 vir01 vir01 vir01",
)

Bag = tuple[str, ...]


def total(chip: str, bag: Iterable[str]) -> Amounts:
    """Return the sum of the vNPUs' resources."""
    taken = [0.0] * len(CHIPS[chip])
    for name in bag:
        taken = [have + more for have, more in zip(taken, TEMPLATES[chip][name])]
    return tuple(taken)


def fits(chip: str, bag: Iterable[str]) -> bool:
    """Return whether the counters of a chip suffice."""
    return all(taken <= has for taken, has in zip(total(chip, bag), CHIPS[chip]))


def all_sets(chip: str, first: int = 0, so_far: Bag = ()) -> Iterator[Bag]:
    """Yield every set of vNPUs that the counters allow."""
    names = sorted(TEMPLATES[chip])
    yield so_far
    for index in range(first, len(names)):
        if fits(chip, (*so_far, names[index])):
            yield from all_sets(chip, index, (*so_far, names[index]))


def maximal_sets(chip: str) -> set[Bag]:
    """Return the sets to which no vNPU can be added."""
    return {bag for bag in all_sets(chip) if not any(fits(chip, (*bag, name)) for name in TEMPLATES[chip])}


def complete_sets(chip: str) -> set[Bag]:
    """Return the sets that use all AI Cores and all AICPU."""
    return {bag for bag in maximal_sets(chip) if total(chip, bag)[0:3:2] == CHIPS[chip][0:3:2]}


@dataclass
class Model:
    """One chip: its vNPUs by virtual ID, with the vGroup of each if the chip has vGroups."""

    chip: str
    physical: int
    slices: dict[int, tuple[str, int | None]] = field(default_factory=dict)

    @property
    def grouped(self) -> bool:
        """Return whether the chip has vGroups. Only the 310P has."""
        return self.chip == "310P"

    @property
    def vids(self) -> range:
        """Return all virtual IDs of the chip."""
        first = 100 + 16 * self.physical
        return range(first, first + (8 if self.grouped else 16))

    def bag(self) -> Bag:
        """Return the templates of the vNPUs."""
        return tuple(sorted(name for name, _group in self.slices.values()))

    def groups(self, name: str) -> list[int]:
        """Return the vGroups with room for one more vNPU of this template, the driver's choice first."""
        inside = {group: [n for n, g in self.slices.values() if g == group] for group in range(4)}
        lone = [group for group, names in inside.items() if names == ["vir01"] and name == "vir01"]
        return lone + [group for group, names in inside.items() if not names]

    def create(self, name: str, vid: int | None, group: int | None) -> tuple[int, int | None] | None:
        """Add a vNPU; return its ID and vGroup, or None if it is rejected."""
        free = [each for each in self.vids if each not in self.slices]
        if vid is not None:
            free = [each for each in free if each == vid]
        groups: list[int | None] = [None]
        if self.grouped:
            groups = [each for each in self.groups(name) if group in (None, each)]
        elif group is not None:
            return None
        if not free or not groups or not fits(self.chip, (*self.bag(), name)):
            return None
        self.slices[free[0]] = (name, groups[0])
        return free[0], groups[0]

    def left(self) -> Mapping[str, float]:
        """Return the free resources by the names of the interface."""
        cores, _memory, cpu, vpc, venc, vdec, jpegd, jpege = (
            has - taken for has, taken in zip(CHIPS[self.chip], total(self.chip, self.bag()))
        )
        return {
            "aic": cores,
            "device_aicpu": cpu,
            "vpc": vpc,
            "venc": venc,
            "vdec": vdec,
            "jpegd": jpegd,
            "jpege": jpege,
        }


def named(sets: Iterable[str]) -> set[Bag]:
    """Return sets written as words."""
    return {tuple(sorted(Counter(words.split()).elements())) for words in sets}
