# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The benchmark measures the setup in its table: each claim has its own place, and the number of devices is that in the row's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chip_model
import pytest
from board_model import device
from dra_driver.core.dra.consumable_capacity import shared
from dra_driver.core.dra.resource_slices import build_pool
from dra_driver.core.model import Passthrough, Placement
from dra_driver.core.partitioning.rules import parse_rules
from dra_driver.core.vendors.ascend import offers as npu_offers
from dra_driver.core.vendors.nvidia import offers

from tests.bench.allocations import (
    KINDS,
    LAYOUTS,
    NPU_COMPARISONS,
    NPU_KINDS,
    PARALLEL,
    PUBLISHED,
    ROWS,
    Layout,
    places,
)

BOARDS = {"8xH100": ("h100-80", 8), "16xH100": ("h100-80", 16), "32xRTX-PRO-6000": ("rtx-pro-6000", 32)}


def published(machine: str, layout: Layout) -> dict[str, Mapping[str, Any]]:
    """Return the published devices of a node with a layout. The partitions of static GPUs exist."""
    board, count = BOARDS[machine]
    rules = parse_rules([dict(rule) for rule in layout])
    found, counters = [], []
    for number in range(count):
        rule = next(rule for rule in rules if rule.match.index is None or number in rule.match.index)
        made = tuple((19, start) for start in range(7)) if rule.mode == "static" else ()
        gpu = device(board, number, places=made, passthrough=Passthrough(number, 0, iommufd=True))
        offered = offers.offers(gpu, dynamic=rule.mode == "dynamic", passthrough=rule.passthrough)
        found += [
            shared(offer, rule.shares, offers.shareable_capacities(gpu)) if rule.shares else offer for offer in offered
        ]
        counters.append(offers.counter_set(gpu))
    pool = build_pool(driver="d", pool="n", node_name="n", offers=found, counter_sets=counters)
    return {each["name"]: each for part in pool.slices for each in part.devices}


@pytest.fixture(scope="module")
def sixteen() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    return {name: published("16xH100", layout) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize(("layout", "name", "parallel"), ROWS)
def test_claims_of_a_row_have_distinct_placements(
    sixteen: Mapping[str, Any], layout: str, name: str, parallel: int
) -> None:
    kind, devices = KINDS[name], sixteen[layout]
    found = places(kind, devices, parallel)
    assert len(found) == parallel and all(kind.fits(devices[place["device"]]) for place in found)
    own = {(place["device"], place.get("shareID")) for place in found}
    assert len(own) == (min(parallel, 16) if kind.admin else parallel)
    assert all(place.get("adminAccess", False) == kind.admin for place in found)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.admin and name != "mps-mig"])
def test_last_row_of_a_kind_fills_all_devices(sixteen: Mapping[str, Any], name: str) -> None:
    kind, most = KINDS[name], PARALLEL[name][-1]
    with pytest.raises(ValueError, match=f"there is room for {most}"):
        places(kind, sixteen[kind.layout], most + 1)


@pytest.mark.parametrize(("machine", "number", "layout"), PUBLISHED)
def test_curve_covers_the_stated_range(machine: str, number: int, layout: Layout) -> None:
    devices = published(machine, layout)
    assert len(devices) == number and places(KINDS["whole"], devices, 1)


@pytest.mark.parametrize(("name", "number"), [("whole", 32), ("dynamic", 128)])
def test_32_boards_have_room_for_all_measured_claims(name: str, number: int) -> None:
    assert len(places(KINDS[name], published("32xRTX-PRO-6000", LAYOUTS["dynamic"]), number)) == number


@pytest.mark.parametrize("name", NPU_COMPARISONS)
def test_npus_have_room_for_exactly_the_measured_claims(name: str) -> None:
    layout, numbers = NPU_COMPARISONS[name]
    rules = [rule for rule in parse_rules([dict(rule) for rule in layout]) if "nvidia" not in (rule.match.vendor or ())]
    cut = tuple(chip_model.partition("310P", "vir01", Placement(start, 1)) for start in range(7))
    found, counters = [], []
    for number in range(2):
        made = cut if rules[0].mode == "static" else ()
        chip = chip_model.device("310P", made, number)
        found += npu_offers.offers(chip, dynamic=rules[0].mode == "dynamic")
        counters.append(npu_offers.counter_set(chip))
    pool = build_pool(driver="d", pool="n", node_name="n", offers=found, counter_sets=counters)
    devices = {each["name"]: each for part in pool.slices for each in part.devices}
    kind = NPU_KINDS[name]
    assert len({place["device"] for place in places(kind, devices, numbers[-1])}) == numbers[-1]
    most = 14 if kind.is_partition else 2
    with pytest.raises(ValueError, match=f"there is room for {most}"):
        places(kind, devices, most + 1)
