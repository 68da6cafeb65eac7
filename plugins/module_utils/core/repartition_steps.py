# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What operations of a repartitioning have done on a node, step by step, for whoever tells of it.

Beside the record of the operation under way (repartition_record.py) lies a list of the last steps. Who changes the devices adds to it; the
node driver, which has the right to write Events, reads it. It decides nothing: where it cannot be written, or read, nothing is told.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .repartition_record import APPLYING, DRAINING, PUBLISHING, REVERTING, Record
from .system import System

FILE = "repartition-steps.json"
VERSION = 1
#: So many steps are kept. An operation has four of them, five where it fails.
MOST = 16
LONGEST_REASON = 400
#: How an operation ends: its devices are published anew; or it has failed, and they are as they were; or a later run has cleaned up after it.
RELEASED, FAILED, ENDED = "released", "failed", "ended"
#: Nobody has ended it within its time: told by whoever sees that, in no list.
ABANDONED = "abandoned"
STEPS = (DRAINING, APPLYING, PUBLISHING, REVERTING, RELEASED, FAILED, ENDED)


@dataclass(frozen=True)
class Taken:
    """A step that has begun, or the end of an operation: when (seconds since the epoch), on which devices (UUIDs), and why it failed."""

    at: float
    operation: str
    devices: tuple[str, ...]
    step: str
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the step as data."""
        return {**vars(self), "devices": list(self.devices)}


def begun(there: Record | None, wanted: Record, reason: str, now: float) -> Taken | None:
    """Return what a new record says that an older one did not: a step has begun, or something has failed. None for neither. Pure."""
    same = there is not None and (there.operation, there.step) == (wanted.operation, wanted.step)
    if same and not reason:
        return None
    return Taken(now, wanted.operation, wanted.devices, wanted.step, reason[:LONGEST_REASON])


def over(record: Record, reason: str, now: float) -> Taken:
    """Return how the operation of a record has ended, which is removed. ``reason`` is why it has failed, "" where it has not. Pure."""
    step = FAILED if reason else RELEASED if record.step == PUBLISHING else ENDED
    return Taken(now, record.operation, record.devices, step, reason[:LONGEST_REASON])


def path_in(directory: str) -> str:
    """Return where the steps lie in a driver's state folder."""
    return f"{directory}/{FILE}"


def parse(text: str) -> tuple[Taken, ...]:
    """Read steps, in their order; none of what is no such text."""
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            return ()
        return tuple(_taken(each) for each in content["steps"] if each["step"] in STEPS)[-MOST:]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


def _taken(each: Mapping[str, Any]) -> Taken:
    return Taken(
        float(each["at"]),
        str(each["operation"]),
        tuple(str(uuid) for uuid in each["devices"]),
        str(each["step"]),
        str(each["reason"])[:LONGEST_REASON],
    )


def add(system: System, directory: str, taken: Taken) -> None:
    """Write down one more step. Raises OSError."""
    path = path_in(directory)
    former: Sequence[Taken] = parse(system.read_text(path)) if system.exists(path) else ()
    steps = [each.to_dict() for each in (*former, taken)][-MOST:]
    text = json.dumps({"version": VERSION, "steps": steps}, indent=1, sort_keys=True) + "\n"
    system.write_atomic(path, text.encode(), mode=0o600)


class Follow:
    """The steps in a driver's state folder: read again when their file has changed."""

    def __init__(self, directory: str) -> None:
        self._path = Path(path_in(directory))
        self._seen: tuple[tuple[int, ...], tuple[Taken, ...]] = ((), ())

    def steps(self) -> tuple[Taken, ...]:
        """Return the last steps, in their order."""
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
