# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of one run, printed as ratios to the cost of their parts, which were measured in the same run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` (0–1) of the values lie: nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


@dataclass
class Figures:
    """Lines of the table, in the order in which they were measured."""

    lines: list[str] = field(default_factory=list)

    def prepared(self, what: str, parallel: int, seconds: dict[str, list[float]]) -> None:
        """Add one measurement of ``node_side.py``: p50 and p99 as multiples of the parts of one prepare of a GPU.

        One sync is among them: what is written before a GPU is changed waits for none, since what is changed goes with the power.
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
            f"shared edits held against the disk {parts['edits'] * 1e6:.0f} µs)"
        )

    def staged(self, before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> None:
        """Add what the stages of the last measurement took on average, as the driver itself timed them (seconds and number)."""
        told = []
        for stage, (seconds, number) in after.items():
            former = before.get(stage, (0.0, 0.0))
            if number > former[1]:
                told.append(f"{stage} {(seconds - former[0]) / (number - former[1]) * 1e3:.2f}")
        self.lines.append(f"{'':8}     stages of preparing, ms each time: {', '.join(told)}")

    def compared(self, what: str, parallel: int, ours: list[float], theirs: list[float]) -> float:
        """Add how long one prepare takes against another of the same run, at p50 and p90; returns the first ratio."""
        (middle, late) = (percentile(ours, share) / percentile(theirs, share) for share in (0.5, 0.9))
        self.lines.append(f"{what}, {parallel} in parallel: {middle:.2f} at p50, {late:.2f} at p90")
        return middle

    def beside(self, what: str, ours: Mapping[str, list[float]], theirs: Mapping[str, list[float]]) -> None:
        """Add our times as multiples of another driver's: a call at p50 and p90, and all calls that came together."""
        told = []
        for name, share in (("prepare", 0.5), ("prepare", 0.9), ("unprepare", 0.5)):
            mine, other = percentile(ours[name], share), percentile(theirs[name], share)
            told.append(f"{name} p{share * 100:.0f} {mine / other:.2f} ({mine * 1e3:.1f} and {other * 1e3:.1f} ms)")
        mine, other = median(ours["prepare_all"]), median(theirs["prepare_all"])
        told.append(f"all prepared {mine / other:.3f} ({mine * 1e3:.1f} and {other * 1e3:.1f} ms)")
        self.lines.append(f"{what}: {', '.join(told)}")

    def explained(self, what: str, says: str) -> None:
        """Say once what the rows of a name are."""
        line = f"{what}: {says}"
        if line not in self.lines:
            self.lines.append(line)

    def said(self, line: str) -> None:
        """Add a line that is no ratio."""
        self.lines.append(line)

    def print(self) -> None:
        sys.__stdout__.write("\n" + "\n".join(["Figures of this run", *self.lines]) + "\n")
        sys.__stdout__.flush()
