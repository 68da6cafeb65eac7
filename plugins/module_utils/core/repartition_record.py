# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The operation that is under way on devices of a node, written down beside the driver's store.

An operation takes longer than any process: pods are evicted, a module changes the devices, the driver looks at them. Its record is one
file in the driver's state folder, written whole or not at all. It says for the next run what was begun and what was there before,
and for the driver which devices nobody new may be given, and until when. A run that was killed therefore holds nothing up for ever:
the driver passes over a record whose time is up, and the next run finds it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import AcceleratorError, InUse
from .system import System
from .times import text_of

FILE = "repartition.json"
VERSION = 1
#: No operation is let to hold devices for longer at a time; it also bounds what a clock that was wrong can do.
LONGEST_SECONDS = 6 * 3600.0
DRAINING, APPLYING, PUBLISHING, REVERTING = "draining", "applying", "publishing", "reverting"
STEPS = (DRAINING, APPLYING, PUBLISHING, REVERTING)


@dataclass(frozen=True)
class Record:
    """One operation: its name, its devices (UUIDs), the step that has begun, and until when it holds them, in seconds since the epoch.

    ``wanted`` and ``former`` are rules for these devices, as in a layout. ``names`` are the published devices that nobody may be given.
    """

    operation: str
    devices: tuple[str, ...]
    step: str
    until: float
    wanted: tuple[Mapping[str, Any], ...]
    former: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the record as data."""
        return {
            "operation": self.operation,
            "devices": list(self.devices),
            "step": self.step,
            "until": self.until,
            "wanted": [dict(each) for each in self.wanted],
            "former": [dict(each) for each in self.former],
            "names": list(self.names),
        }

    def holds(self, now: float) -> bool:
        """Whether the operation still has its time."""
        return now < self.until <= now + LONGEST_SECONDS

    def refusal(self, uuid: str) -> InUse:
        """Return the error for a claim on one of the devices: the kubelet asks again."""
        return InUse(
            f"Device {uuid} is being repartitioned by the operation {self.operation} ({self.step}), until "
            f"{text_of(self.until)} at the latest",
            hint="The kubelet asks again. If nobody runs that operation any more, run the playbook repartition again: it finishes it.",
            code="device-repartitioned",
        )


def path_in(directory: str) -> str:
    """Return where the record lies in a driver's state folder."""
    return f"{directory}/{FILE}"


def read(system: System, directory: str) -> Record | None:
    """Return the record in a driver's state folder, or None. Raises AcceleratorError with code damaged-record."""
    path = path_in(directory)
    if not system.exists(path):
        return None
    return parse(system.read_text(path), path)


def parse(text: str, path: str) -> Record:
    """Read a record. Raises AcceleratorError with code damaged-record for what is none."""
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        found = Record(
            operation=str(content["operation"]),
            devices=tuple(str(each) for each in content["devices"]),
            step=str(content["step"]),
            until=float(content["until"]),
            wanted=tuple(dict(each) for each in content["wanted"]),
            former=tuple(dict(each) for each in content["former"]),
            names=tuple(str(each) for each in content["names"]),
        )
        if found.step not in STEPS:
            raise ValueError(f"step {found.step}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AcceleratorError(
            f"{path}, in which the repartitioning under way is written down, cannot be read: {error!r}",
            hint="See that the devices are as they are to be, remove the file, and run the playbook repartition again.",
            code="damaged-record",
        ) from error
    return found


def write(system: System, directory: str, record: Record) -> None:
    """Write a record in the place of any other. Raises OSError."""
    text = json.dumps({"version": VERSION, **record.to_dict()}, indent=1, sort_keys=True) + "\n"
    system.write_atomic(path_in(directory), text.encode(), mode=0o600)


def remove(system: System, directory: str) -> bool:
    """Remove the record; returns whether there was one."""
    return system.remove(path_in(directory))


class Watch:
    """What a driver knows of the record in its state folder: read again when the file has changed. Safe to call from several threads."""

    def __init__(self, directory: str, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path_in(directory))
        self._clock = clock
        self._seen: tuple[tuple[int, ...], Record | None] = ((), None)

    def current(self) -> Record | None:
        """Return the operation that holds devices now. One that cannot be read, or whose time is up, holds none."""
        record = self.there()
        return record if record is not None and record.holds(self._clock()) else None

    def there(self) -> Record | None:
        """Return the record that is there, be its time up or not. One that cannot be read is none."""
        try:
            there = os.stat(self._path)  # noqa: PTH116  at each claim: no objects
        except OSError:
            return None
        stamp = (there.st_ino, there.st_mtime_ns, there.st_size)
        if self._seen[0] != stamp:
            try:
                found: Record | None = parse(self._path.read_text(encoding="utf-8"), str(self._path))
            except (OSError, AcceleratorError):
                found = None
            self._seen = (stamp, found)
        return self._seen[1]

    def held(self) -> frozenset[str]:
        """Return the UUIDs of the devices that are held now."""
        record = self.current()
        return frozenset(record.devices) if record is not None else frozenset()

    def refuse(self, uuids: frozenset[str] | set[str]) -> None:
        """Raise InUse with code device-repartitioned when one of the devices is held."""
        record = self.current()
        taken = sorted(uuids & set(record.devices)) if record is not None else []
        if record is not None and taken:
            raise record.refusal(taken[0])
