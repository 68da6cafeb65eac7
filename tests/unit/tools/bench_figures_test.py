# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The ratios of the benchmark, for known figures."""

from __future__ import annotations

import random

from tests.bench.figures import Figures, ratio_interval


def turns(factor: float, spread: float, seed: int) -> list[list[float]]:
    """Return 30 turns of 25 values: each turn has its own duration, and each value varies a little."""
    chance = random.Random(seed)
    return [
        [factor * pace * chance.uniform(0.99, 1.01) for _value in range(25)]
        for pace in (chance.uniform(1 - spread, 1 + spread) for _turn in range(30))
    ]


def test_interval_contains_the_ratio_and_reflects_the_variation() -> None:
    widths = []
    for spread in (0.0, 0.05, 0.3):
        low, high = ratio_interval(turns(1.1, spread, 1), turns(1.0, spread, 2))
        assert low < 1.1 < high
        widths.append(high - low)
    assert widths == sorted(widths) and widths[0] < 0.01 < widths[2]
    same = turns(1.0, 0.3, 1)
    assert ratio_interval(same, same) == (1.0, 1.0), "the turns are drawn in pairs"


def test_line_with_comparison_to_another_driver() -> None:
    figures = Figures()
    ours = [{"prepare": [0.002, 0.004], "unprepare": [0.001], "prepare_all": [0.003]}] * 2
    theirs = [{"prepare": [0.004, 0.004], "unprepare": [0.002], "prepare_all": [0.004]}] * 2
    figures.add_driver_comparison("ours", ours, theirs)
    (line,) = figures.lines
    assert line.startswith(
        "ours: prepare p50 0.50 (2.0 and 4.0 ms) [0.50 to 0.50], prepare p90 1.00 (4.0 and 4.0 ms), "
    )
    assert line.endswith("unprepare p50 0.50 (1.0 and 2.0 ms) [0.50 to 0.50], all prepared 0.750 (3.0 and 4.0 ms)")
