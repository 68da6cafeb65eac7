# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Results of one run, printed as ratios to the measured durations of their parts in the same run."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median


def percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile of the values; ``share`` is from 0 to 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def ratio_interval(
    ours: Sequence[list[float]], theirs: Sequence[list[float]], draws: int = 1000
) -> tuple[float, float]:
    """Return the 95 % confidence interval of the ratio of two medians, by bootstrap over paired turns.

    Turns are drawn with replacement, with a fixed seed per number of turns. Host performance differs mostly ratio_interval
    turns, and values within a turn are similar.
    """
    chance, positions = random.Random(len(ours)), range(len(ours))
    ratios = []
    for _draw in range(draws):
        drawn = chance.choices(positions, k=len(ours))
        mine, others = ([value for each in drawn for value in turns[each]] for turns in (ours, theirs))
        ratios.append(percentile(mine, 0.5) / percentile(others, 0.5))
    return percentile(ratios, 0.025), percentile(ratios, 0.975)


@dataclass
class Figures:
    """Lines of the table in the order of measurement."""

    lines: list[str] = field(default_factory=list)

    def add_prepare_row(self, what: str, parallel: int, seconds: dict[str, list[float]]) -> None:
        """Add a measurement of ``node_side.py``: p50 and p99 as multiples of the parts of one GPU prepare.

        The parts include one sync. A record written before a GPU changes is not synced, because the change is lost at
        a power loss too.
        """
        parts = {name: median(seconds[name]) for name in ("get", "fsync", "cdi", "edits")}
        cost = parts["get"] + parts["fsync"] + parts["cdi"]
        middle, worst = percentile(seconds["prepare"], 0.5), percentile(seconds["prepare"], 0.99)
        together = median(seconds["prepare_all"])
        self.lines.append(
            f"{what:8} {parallel:3} in parallel: prepare p50 {middle * 1e3:7.1f} ms = {middle / cost:6.1f}×parts, "
            f"p99 {worst * 1e3:7.1f} ms = {worst / cost:6.1f}×parts, "
            f"all {together * 1e3:7.1f} ms = {together / parallel / cost:5.1f}×parts each; "
            f"unprepare p50 {percentile(seconds['unprepare'], 0.5) * 1e3:7.1f} ms "
            f"(parts: GET {parts['get'] * 1e3:.2f} ms + fsync {parts['fsync'] * 1e3:.2f} ms + CDI file {parts['cdi'] * 1e3:.2f} ms, "
            f"comparison of the shared edits with the disk {parts['edits'] * 1e6:.0f} µs)"
        )

    def add_stages(self, before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> None:
        """Add the average duration of each stage in the last measurement, from the driver's own metrics (seconds and
        count).
        """
        answer = []
        for stage, (seconds, number) in after.items():
            earlier = before.get(stage, (0.0, 0.0))
            if number > earlier[1]:
                answer.append(f"{stage} {(seconds - earlier[0]) / (number - earlier[1]) * 1e3:.2f}")
        self.lines.append(f"{'':8}     stages of preparing, ms each time: {', '.join(answer)}")

    def add_ratio(self, what: str, parallel: int, ours: list[float], theirs: list[float]) -> float:
        """Add the ratio of two prepare durations of the same run at p50 and p90; return the first ratio."""
        (middle, late) = (percentile(ours, share) / percentile(theirs, share) for share in (0.5, 0.9))
        self.lines.append(f"{what}, {parallel} in parallel: {middle:.2f} at p50, {late:.2f} at p90")
        return middle

    def add_driver_comparison(
        self,
        what: str,
        our_turns: Sequence[Mapping[str, list[float]]],
        their_turns: Sequence[Mapping[str, list[float]]],
    ) -> None:
        """Add our times as multiples of another driver's: one call at p50 and p90, and all parallel calls together.

        The turns are pairs of one of ours and one of the other driver's in sequence.
        """
        ours, theirs = (
            {name: [value for turn in turns for value in turn[name]] for name in turns[0]}
            for turns in (our_turns, their_turns)
        )
        answer = []
        for name, share in (("prepare", 0.5), ("prepare", 0.9), ("unprepare", 0.5)):
            mine, other = percentile(ours[name], share), percentile(theirs[name], share)
            answer.append(f"{name} p{share * 100:.0f} {mine / other:.2f} ({mine * 1e3:.1f} and {other * 1e3:.1f} ms)")
            if share == 0.5:
                low, high = ratio_interval([turn[name] for turn in our_turns], [turn[name] for turn in their_turns])
                answer[-1] += f" [{low:.2f} to {high:.2f}]"
        mine, other = median(ours["prepare_all"]), median(theirs["prepare_all"])
        answer.append(f"all prepared {mine / other:.3f} ({mine * 1e3:.1f} and {other * 1e3:.1f} ms)")
        self.lines.append(f"{what}: {', '.join(answer)}")

    def add_explanation(self, what: str, text: str) -> None:
        """Add the description of a row's name once."""
        line = f"{what}: {text}"
        if line not in self.lines:
            self.lines.append(line)

    def add_line(self, line: str) -> None:
        """Add a line without a ratio."""
        self.lines.append(line)

    def print(self) -> None:
        sys.__stdout__.write("\n" + "\n".join(["Figures of this run", *self.lines]) + "\n")
        sys.__stdout__.flush()
