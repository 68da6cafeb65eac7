# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The facts of each chip generation, by PCI device ID, as data.

Names of chips, products, and templates are read from the device. The resources that a generation shares are here if the
chip reports a wrong total or none.
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

    ``device_type`` is the published deviceType. ``numbers`` is the number of vNPUs that a chip can distinguish, 0 for a
    chip that cannot be partitioned. With ``groups``, each vNPU is in one of that many vGroups, which hold one vNPU, or
    two with a single core. ``helpers`` is the number of AICPUs that vNPUs share, for chips that do not report it, or
    that report fewer while they have no vNPU: the creation of the first vNPU adds one. ``reserve`` is the memory, in
    bytes, that the device itself uses of each quarter. ``has_hbm`` means memory on the package. ``has_racks`` means
    that super-pods of these chips number their racks. ``is_module`` means that a card is a module of two dies.
    """

    word: str
    device_type: str
    numbers: int = 0
    groups: int = 0
    helpers: int = 0
    reserve: int = 0
    has_hbm: bool = False
    has_racks: bool = False
    is_module: bool = False

    @property
    def supports_vnpus(self) -> bool:
        """Return whether there are vNPU templates for these chips."""
        return self.numbers > 0

    @property
    def places(self) -> int:
        """The number of places of a chip: two for each vGroup; 0 if vNPUs have numbers instead."""
        return 2 * self.groups


#: The device ID of the driver for the unified bus (`specific_func_ub.inc` of hicann/driver).
UNIFIED_BUS_ID = 0xD806

_310P = Family("310P", "Ascend310P", numbers=8, groups=4)
_950 = Family("950", "npu", has_hbm=True, has_racks=True)

#: By the PCI device ID. The PCI tables of hicann/driver also have 0xD804. Its generation is not public, so such a chip
#: is published whole.
FAMILIES: Mapping[int, Family] = MappingProxyType(
    {
        0xD100: Family("310", "Ascend310"),
        0xD105: Family("310B", "Ascend310B"),
        0xD500: _310P,
        0xD501: _310P,
        0xD801: Family("910A", "Ascend910", numbers=16, helpers=14, has_hbm=True),
        0xD802: Family("910B", "Ascend910", numbers=16, helpers=7, reserve=GIBIBYTE, has_hbm=True),
        0xD803: Family("910_93", "Ascend910", numbers=16, helpers=7, reserve=GIBIBYTE, has_hbm=True, is_module=True),
        0xD806: _950,
        0xD807: _950,
    }
)
#: The PCI subsystem of cards with two chips of the 310P (300I Duo). The vendor does not support vNPUs for claims on
#: these chips, and requires that both chips of a card are used in the same way: partitioned, or whole.
_PAIRED = 0x0110
#: The reason why the dies of an A3 cannot be partitioned.
DIES_AS_ONE = "The two dies of a module work as one; `npu-smi set -t multi-die-policy -d 1` makes them independent."
#: An unknown chip. It is published whole.
UNKNOWN = Family("unknown", "npu")


def family_of(pci_device_id: int) -> Family:
    """Return the family of a chip by its PCI device ID: 16 bits, or 0xDDDDVVVV as in the model."""
    return FAMILIES.get(pci_device_id >> 16 if pci_device_id > 0xFFFF else pci_device_id, UNKNOWN)


def is_paired(pci_device_id: int, pci_subsystem_id: int) -> bool:
    """Return whether a chip is one of two on a card that must be used in the same way.

    The IDs are 0xDDDDVVVV as in the model.
    """
    return bool(family_of(pci_device_id).groups) and pci_subsystem_id >> 16 == _PAIRED


def helpers_of(family: Family, reported: Fraction | None) -> Fraction | None:
    """Return the number of AICPUs that vNPUs share, from the chip's value (None if not reported); None if unknown."""
    if reported is None:
        return Fraction(family.helpers) if family.helpers else None
    return max(reported, Fraction(family.helpers))
