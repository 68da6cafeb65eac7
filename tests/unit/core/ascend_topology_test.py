# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Rings of chips, from the links that the device reports, or else from the generation."""

from __future__ import annotations

import pytest
from dra_driver.core.vendors.ascend.families import FAMILIES
from dra_driver.core.vendors.ascend.topology import UNKNOWN_LINK, Chip, places

A3, A2 = FAMILIES[0xD803], FAMILIES[0xD802]
DIES = [Chip(number, number // 2, number % 2) for number in range(16)]
PAIRS = [(one, other) for one in range(16) for other in range(16) if one < other]


@pytest.mark.parametrize("between_modules", ["HCCS_SW", "XLINK_SW", UNKNOWN_LINK])
def test_places_a3_modules_make_one_ring(between_modules: str) -> None:
    links = {pair: "SIO" if pair[0] // 2 == pair[1] // 2 else between_modules for pair in PAIRS}
    assert {place.ring for place in places(A3, DIES, links).values()} == {tuple(range(16))}


def test_places_reported_pcie_link_is_no_ring() -> None:
    chips = [Chip(number, number) for number in range(8)]
    links = {(one, other): "SYS" for one in range(8) for other in range(8) if one < other}
    assert {place.ring for place in places(A2, chips, links).values()} == {(number,) for number in range(8)}
