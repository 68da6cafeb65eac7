# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Count the claims that do not fit if devices are published in our order, and in the order of their names like
NVIDIA's driver.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from dra_driver.core.model import Partitioning
from dra_driver.core.vendors.nvidia import offers

from tests.bench.figures import Figures
from tests.bench.order_model import MIXES, served, trace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "core"))

import board_model

SEEDS, CLAIMS = 40, 2000


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("board", ["h100-80", "a30", "rtx-pro-6000"])
def test_claims_that_find_no_room(figures: Figures, board: str, mix: str) -> None:
    device = replace(board_model.device(board), partitioning=Partitioning(True, True, True))
    published, counters = offers.offers(device, True), offers.counter_set(device).counters
    by_name = sorted(published, key=lambda offer: offer.name)
    sizes = {each.name: each.size for each in device.profiles if not set("+-") & set(each.name)}
    turned_away = {"ours": 0, "by name": 0}
    for seed in range(SEEDS):
        events = trace(sizes, device.memory_slices, mix, seed=seed, claims=CLAIMS)
        turned_away["ours"] += CLAIMS - served(published, counters, events)
        turned_away["by name"] += CLAIMS - served(by_name, counters, events)
    assert turned_away["by name"] > 0, "a trace that is served whole compares nothing"
    figures.add_line(
        f"{board}, {mix}: of {SEEDS * CLAIMS} claims {turned_away['ours']} find no room, "
        f"{turned_away['by name']} in the order of names: {turned_away['ours'] / turned_away['by name']:.2f}"
    )
