# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Store the record of the current repartition operation in the driver's state directory.

An operation outlasts every process: pods are evicted, a module changes the devices, the driver scans them. Its record
is one file, which is replaced atomically. The next run reads the operation and the previous layout from it. The driver
reads which devices get no new claims, and for how long. A killed run does not hold devices forever: the driver ignores
an expired record, and the next run finds it.

The time is measured with CLOCK_BOOTTIME, which cannot be set. After a reboot the record holds its devices for the same
number of seconds from the boot. While a record cannot be read, the driver prepares no new claim on any device.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import AcceleratorError, InUse
from ..host.system import System
from ..times import text_of

FILE = "repartition.json"
VERSION = 1
#: The longest time that one record holds devices.
LONGEST_SECONDS = 6 * 3600.0
DRAINING, APPLYING, PUBLISHING, REVERTING = "draining", "applying", "publishing", "reverting"
STEPS = (DRAINING, APPLYING, PUBLISHING, REVERTING)


@dataclass(frozen=True)
class Moment:
    """A time of the clocks of a node: boot ID, CLOCK_BOOTTIME in seconds, and seconds since the epoch."""

    boot_id: str
    boottime: float
    wall: float


def moment(system: System) -> Moment:
    """Return the current time. Raises OSError."""
    return Moment(system.boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


@dataclass(frozen=True)
class Record:
    """One operation: its name, its devices (UUIDs), and the step that has begun.

    ``wanted`` and ``former`` are rules for these devices, as in a layout. ``former_settings`` are rules of the settings that the operation
    changes, with the previous values, and ``former_boot_settings`` the previous rules of settings for the next boot, each for one of the
    devices. Earlier releases did not write them (``former_boot_settings`` is None). ``names`` are the published devices that get no new claims.
    The record holds the devices for ``seconds``, until CLOCK_BOOTTIME is ``boottime`` in the boot ``boot_id``. ``until`` is the same
    in seconds since the epoch, for readers of the file. Earlier releases wrote only ``until``, which is used for their records.
    """

    operation: str
    devices: tuple[str, ...]
    step: str
    until: float
    wanted: tuple[Mapping[str, Any], ...]
    former: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...] = ()
    boot_id: str = ""
    boottime: float = 0.0
    seconds: float = 0.0
    former_settings: tuple[Mapping[str, Any], ...] = ()
    former_boot_settings: tuple[Mapping[str, Any], ...] | None = None

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
            "boot_id": self.boot_id,
            "boottime": self.boottime,
            "seconds": self.seconds,
            "former_settings": [dict(each) for each in self.former_settings],
            "former_boot_settings": (
                None if self.former_boot_settings is None else [dict(each) for each in self.former_boot_settings]
            ),
        }

    def held_for(self, seconds: float, now: Moment) -> Record:
        """Return the record with a hold of ``seconds`` from ``now``."""
        return replace(
            self, until=now.wall + seconds, boot_id=now.boot_id, boottime=now.boottime + seconds, seconds=seconds
        )

    def remaining(self, now: Moment) -> float:
        """Return for how many more seconds the operation holds its devices, 0 if it does not."""
        if not self.boot_id:
            left = self.until - now.wall
        elif self.boot_id == now.boot_id:
            left = self.boottime - now.boottime
        else:
            left = self.seconds - now.boottime
        return left if 0 < left <= LONGEST_SECONDS else 0.0

    def holds(self, now: Moment) -> bool:
        """Return whether the operation still holds its devices."""
        return self.remaining(now) > 0

    def refusal(self, uuid: str) -> InUse:
        """Return the error for a claim on one of the devices: the kubelet retries."""
        return InUse(
            f"Device {uuid} is being repartitioned by the operation {self.operation} ({self.step}), until "
            f"{text_of(self.until)} at the latest",
            hint="The kubelet retries. If no run of that operation is active any more, run the playbook repartition again to complete it.",
            code="device-repartitioned",
        )


def path_in(directory: str) -> str:
    """Return the path of the record in a driver's state directory."""
    return f"{directory}/{FILE}"


def read(system: System, directory: str) -> Record | None:
    """Return the record in a driver's state directory, or None. Raises AcceleratorError with code damaged-record."""
    path = path_in(directory)
    try:
        return parse(system.read_text(path), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def parse(text: str, path: str) -> Record:
    """Parse a record. Raises AcceleratorError with code damaged-record."""
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        boot = content.get("former_boot_settings")
        found = Record(
            operation=str(content["operation"]),
            devices=tuple(str(each) for each in content["devices"]),
            step=str(content["step"]),
            until=float(content["until"]),
            wanted=tuple(dict(each) for each in content["wanted"]),
            former=tuple(dict(each) for each in content["former"]),
            names=tuple(str(each) for each in content["names"]),
            boot_id=str(content.get("boot_id", "")),
            boottime=float(content.get("boottime", 0.0)),
            seconds=float(content.get("seconds", 0.0)),
            former_settings=tuple(dict(each) for each in content.get("former_settings", ())),
            former_boot_settings=None if boot is None else tuple(dict(each) for each in boot),
        )
        if found.step not in STEPS:
            raise ValueError(f"step {found.step}")
        if not all(math.isfinite(each) for each in (found.until, found.boottime, found.seconds)):
            raise ValueError(f"the hold ends at {found.until}, {found.boottime}, after {found.seconds}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error) from error
    return found


def damaged(path: str, error: Exception) -> AcceleratorError:
    """Return the error for a record that cannot be read."""
    return AcceleratorError(
        f"The record of the current repartition, {path}, cannot be read: {error!r}",
        hint="Verify the layout of the devices, remove the file, and run the playbook repartition again.",
        code="damaged-record",
    )


def write(system: System, directory: str, record: Record) -> None:
    """Replace the record. Raises OSError."""
    text = json.dumps({"version": VERSION, **record.to_dict()}, indent=1, sort_keys=True) + "\n"
    system.write_atomic(path_in(directory), text.encode(), mode=0o600)


def remove(system: System, directory: str) -> bool:
    """Remove the record; return whether it existed."""
    return system.remove(path_in(directory))


class Watch:
    """The record in a driver's state directory, read again when the file has changed. Thread-safe."""

    def __init__(self, directory: str, clock: Callable[[], Moment] | None = None) -> None:
        self._path = Path(path_in(directory))
        self._clock = clock or partial(moment, System())
        self._seen: tuple[tuple[int, ...], Record | None] = ((), None)

    def current(self) -> Record | None:
        """Return the operation that holds devices now, or None. Raises AcceleratorError with code damaged-record."""
        record = self._read()
        return record if record is not None and record.holds(self._clock()) else None

    def expired(self) -> Record | None:
        """Return the operation of an expired record, which no longer holds its devices."""
        try:
            record = self._read()
        except AcceleratorError:
            return None
        return record if record is not None and not record.holds(self._clock()) else None

    def is_active(self) -> bool:
        """Return whether devices are held now, by an operation or because the record cannot be read."""
        try:
            return self.current() is not None
        except AcceleratorError:
            return True

    def held(self, uuids: Iterable[str]) -> frozenset[str]:
        """Return those of the devices that are held now, or all devices while the record cannot be read."""
        try:
            record = self.current()
        except AcceleratorError:
            return frozenset(uuids)
        return frozenset(record.devices) & frozenset(uuids) if record is not None else frozenset()

    def refuse(self, uuids: frozenset[str] | set[str]) -> None:
        """Raise InUse with code device-repartitioned if one of the devices is held."""
        try:
            record = self.current()
        except AcceleratorError as error:
            raise InUse(
                f"No device of this node gets a new claim. {error.message}",
                hint=error.hint,
                code="device-repartitioned",
            ) from error
        held = sorted(uuids & set(record.devices)) if record is not None else []
        if record is not None and held:
            raise record.refusal(held[0])

    def _read(self) -> Record | None:
        """Return the record, or None without a file. Raises AcceleratorError with code damaged-record."""
        try:
            status = os.stat(self._path)  # noqa: PTH116  at each claim: no objects
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if self._seen[0] != stamp:
                self._seen = (stamp, parse(self._path.read_text(encoding="utf-8"), str(self._path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise damaged(str(self._path), error) from error
        return self._seen[1]
