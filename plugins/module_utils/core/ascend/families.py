# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What holds for all chips of a generation, by their PCI device id, as data.

Nothing here goes by the name of a chip, a product or a template: those are read from the device. What a generation shares
out by itself is here where its own totals tell it wrongly or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

VENDOR_ID = 0x19E5
CLASS = "0x1200"  # processing accelerators
GIBIBYTE = 1024**3


@dataclass(frozen=True)
class Family:
    """One generation of chips.

    ``device_type`` is what is published as deviceType. ``numbers`` are the slices that a chip can tell apart, 0 for one that
    cannot be cut; with ``groups`` each lies in one of so many vGroups, which hold one slice, or two with a single core.
    ``helpers`` is how many AICPUs slices share where the chip does not tell, or tells less while nothing is cut: creating
    the first slice gives them one more. ``reserve`` is what a quarter of the memory loses to the device itself, in bytes.
    ``has_hbm`` tells memory on the package from memory beside it, and ``has_racks`` that super-pods of these chips number their racks.
    """

    word: str
    device_type: str
    numbers: int = 0
    groups: int = 0
    helpers: int = 0
    reserve: int = 0
    has_hbm: bool = False
    has_racks: bool = False

    @property
    def can_be_cut(self) -> bool:
        """Whether there are templates for these chips."""
        return self.numbers > 0

    @property
    def places(self) -> int:
        """The places of a chip: two for each vGroup; 0 where slices have numbers instead."""
        return 2 * self.groups


#: By the PCI device id.
FAMILIES: Mapping[int, Family] = MappingProxyType(
    {
        0xD100: Family("310", "Ascend310"),
        0xD500: Family("310P", "Ascend310P", numbers=8, groups=4),
        0xD801: Family("910A", "Ascend910", numbers=16, helpers=14, has_hbm=True),
        0xD802: Family("910B", "Ascend910", numbers=16, helpers=7, reserve=GIBIBYTE, has_hbm=True),
        0xD803: Family("910_93", "Ascend910", numbers=16, helpers=7, reserve=GIBIBYTE, has_hbm=True),
        0xD806: Family("950", "npu", has_hbm=True, has_racks=True),
    }
)
#: The PCI subsystem of cards with two chips of the 310P (300I Duo). The vendor does not support that their chips are cut for claims, and
#: has both chips of one card used in one way: cut, or whole.
_PAIRED = 0x0110
#: What keeps the dies of an A3 from being cut.
DIES_AS_ONE = "The two dies of a module work as one; `npu-smi set -t multi-die-policy -d 1` has each work by itself."
#: A chip that this program has not heard of: it is published whole.
UNKNOWN = Family("unknown", "npu")


def family_of(pci_device_id: int) -> Family:
    """Return the family of a chip by its PCI device id: 16 bits, or 0xDDDDVVVV as the model has it."""
    return FAMILIES.get(pci_device_id >> 16 if pci_device_id > 0xFFFF else pci_device_id, UNKNOWN)


def is_paired(pci_device_id: int, pci_subsystem_id: int) -> bool:
    """Whether a chip is one of two on a card that are used in one way; by ids as the model has them, 0xDDDDVVVV."""
    return bool(family_of(pci_device_id).groups) and pci_subsystem_id >> 16 == _PAIRED


def helpers_of(family: Family, told: Fraction | None) -> Fraction | None:
    """Return how many AICPUs slices share, by what the chip tells (None: nothing); None where nobody knows."""
    if told is None:
        return Fraction(family.helpers) if family.helpers else None
    return max(told, Fraction(family.helpers))
