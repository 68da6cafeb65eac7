# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Record the steps of repartitioning operations on a node, for Events.

The list of the last steps is next to the record of the current operation (record.py). The program that
changes the devices appends to it. The node driver, which may write Events, reads it. The list is only for information:
if it cannot be written or read, no Events are created.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..host.system import System
from .record import APPLYING, DRAINING, PUBLISHING, REVERTING, Record

FILE = "repartition-steps.json"
VERSION = 1
#: The maximum number of recorded steps. An operation has four, five if it fails.
MOST_STEPS = 16
LONGEST_REASON = 400
#: The ends of an operation: its devices are published again, or it failed and was rolled back, or a later run cleaned it
#: up.
RELEASED, FAILED, ENDED = "released", "failed", "ended"
#: The operation was not ended in time. The reader determines this; it is in no list.
ABANDONED = "abandoned"
STEPS = (DRAINING, APPLYING, PUBLISHING, REVERTING, RELEASED, FAILED, ENDED)


@dataclass(frozen=True)
class StartedStep:
    """A started step, or the end of an operation.

    ``at`` is the time in seconds since the epoch, ``devices`` are UUIDs, and ``reason`` is why it failed.
    """

    at: float
    operation: str
    devices: tuple[str, ...]
    step: str
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the step as data."""
        return {**vars(self), "devices": list(self.devices)}


def begun(previous: Record | None, wanted: Record, reason: str, now: float) -> StartedStep | None:
    """Return the step that a new record starts, or its failure; None if the previous record has the same step."""
    same = previous is not None and (previous.operation, previous.step) == (wanted.operation, wanted.step)
    if same and not reason:
        return None
    return StartedStep(now, wanted.operation, wanted.devices, wanted.step, reason[:LONGEST_REASON])


def over(record: Record, reason: str, now: float) -> StartedStep:
    """Return the end of the operation whose record is removed. ``reason`` is why it failed, or empty."""
    step = FAILED if reason else RELEASED if record.step == PUBLISHING else ENDED
    return StartedStep(now, record.operation, record.devices, step, reason[:LONGEST_REASON])


def path_in(directory: str) -> str:
    """Return the path of the steps in a driver's state directory."""
    return f"{directory}/{FILE}"


def parse(text: str) -> tuple[StartedStep, ...]:
    """Parse steps, in order. Empty for invalid text."""
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            return ()
        return tuple(_parse_step(each) for each in content["steps"] if each["step"] in STEPS)[-MOST_STEPS:]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


def _parse_step(each: Mapping[str, Any]) -> StartedStep:
    return StartedStep(
        float(each["at"]),
        str(each["operation"]),
        tuple(str(uuid) for uuid in each["devices"]),
        str(each["step"]),
        str(each["reason"])[:LONGEST_REASON],
    )


def add(system: System, directory: str, step: StartedStep) -> None:
    """Append a step. Raises OSError."""
    path = path_in(directory)
    former: Sequence[StartedStep] = parse(system.read_text(path)) if system.exists(path) else ()
    steps = [each.to_dict() for each in (*former, step)][-MOST_STEPS:]
    text = json.dumps({"version": VERSION, "steps": steps}, indent=1, sort_keys=True) + "\n"
    system.write_atomic(path, text.encode(), mode=0o600)


class StepReader:
    """The steps in a driver's state directory. The file is read again only after it has changed."""

    def __init__(self, directory: str) -> None:
        self._path = Path(path_in(directory))
        self._seen: tuple[tuple[int, ...], tuple[StartedStep, ...]] = ((), ())

    def steps(self) -> tuple[StartedStep, ...]:
        """Return the last steps, in order."""
        try:
            there = os.stat(self._path)  # noqa: PTH116  every second: no objects
        except OSError:
            return ()
        stamp = (there.st_ino, there.st_mtime_ns, there.st_size)
        if self._seen[0] != stamp:
            try:
                self._seen = (stamp, parse(self._path.read_text(encoding="utf-8")))
            except (OSError, ValueError):
                return self._seen[1]
        return self._seen[1]
