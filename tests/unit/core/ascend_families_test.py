# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Generations of chips by their PCI device ids: those in the PCI tables of Huawei's driver."""

from __future__ import annotations

import pytest
from dra_driver.core.vendors.ascend.families import UNKNOWN, family_of


@pytest.mark.parametrize(
    ("device_id", "word", "supports_vnpus"),
    [
        (0xD100, "310", False),
        (0xD105, "310B", False),
        (0xD500, "310P", True),
        (0xD501, "310P", True),
        (0xD801, "910A", True),
        (0xD802, "910B", True),
        (0xD803, "910_93", True),
        (0xD806, "950", False),
        (0xD807, "950", False),
    ],
)
def test_family_pci_id_in_driver_tables_is_known(device_id: int, word: str, supports_vnpus: bool) -> None:
    for spelled in (device_id, device_id << 16 | 0x19E5):
        family = family_of(spelled)
        assert (family.word, family.supports_vnpus) == (word, supports_vnpus)


def test_family_pci_id_without_public_generation_is_unknown() -> None:
    assert family_of(0xD804) is UNKNOWN and not UNKNOWN.supports_vnpus
