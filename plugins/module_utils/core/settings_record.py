# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the node has set on its devices, kept on the node: for the way back, and because not every value can be read back.

Written before anything is set: a knob that is in ``before`` and not in ``values`` was about to be turned by a run that was cut short.
A record is of one boot. What was set in another is gone, but for what outlives a start of the machine.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import AcceleratorError
from .settings import OUTLIVES_BOOT
from .system import System

VERSION = 1
FOLDER = "/var/lib/dra-accelerators"


def record_path(vendor: str) -> str:
    """Return where the record of a vendor's devices is."""
    return f"{FOLDER}/settings-{vendor}.json"


@dataclass(frozen=True)
class Noted:
    """What was set on one device, by knob, and what was there before; None where the device's default stands for it."""

    values: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)

    def without(self, *names: str) -> Noted:
        """Return it without knobs."""
        return Noted(
            {name: value for name, value in self.values.items() if name not in names},
            {name: value for name, value in self.before.items() if name not in names},
        )

    def turning(self, present: Mapping[str, Any]) -> Noted:
        """Return it as it is while these knobs are turned, which are at ``present``. What stands there before is the older word."""
        values = {name: value for name, value in self.values.items() if name not in present}
        return Noted(values, {**present, **self.before})


@dataclass(frozen=True)
class SettingsRecord:
    """What was set in one boot, by device."""

    boot_id: str
    devices: Mapping[str, Noted] = field(default_factory=dict)

    def of(self, uuid: str) -> Noted:
        """Return what was set on a device."""
        return self.devices.get(uuid, Noted())

    def noting(self, notes: Mapping[str, Noted]) -> SettingsRecord:
        """Return the record with these devices' notes in place of what it has of them; devices without any are not in it."""
        both = {**self.devices, **notes}
        return SettingsRecord(self.boot_id, {uuid: note for uuid, note in sorted(both.items()) if note.before})

    def in_boot(self, boot_id: str) -> SettingsRecord:
        """Return what still stands of the record in a boot."""
        if boot_id == self.boot_id:
            return self
        kept = {}
        for uuid, note in self.devices.items():
            kept[uuid] = note.without(*(name for name in note.before if name not in OUTLIVES_BOOT))
        return SettingsRecord(boot_id).noting(kept)

    def to_text(self) -> str:
        """Return the record as it is written."""
        devices = {uuid: {"set": note.values, "before": note.before} for uuid, note in self.devices.items()}
        return json.dumps({"version": VERSION, "boot_id": self.boot_id, "devices": devices}, indent=1) + "\n"


def parse_record(text: str, path: str) -> SettingsRecord:
    """Read a record. Raises AcceleratorError with code damaged-record."""
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        devices = {
            str(uuid): Noted(dict(note["set"]), dict(note["before"])) for uuid, note in content["devices"].items()
        }
        return SettingsRecord(str(content["boot_id"]), devices)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AcceleratorError(
            f"{path}, in which is written what was set on devices, cannot be read: {error!r}",
            hint="Remove the file: what was set stays until the next start of the machine, and is set anew by the next run.",
            code="damaged-record",
        ) from error


def read_record(system: System, path: str, boot_id: str) -> SettingsRecord:
    """Return what stands in this boot of what was set; nothing where there is no record. Raises AcceleratorError, OSError."""
    try:
        text = system.read_text(path)
    except FileNotFoundError:
        return SettingsRecord(boot_id)
    return parse_record(text, path).in_boot(boot_id)


def write_record(system: System, path: str, record: SettingsRecord) -> None:
    """Keep a record; one of nothing is removed, with its folder if nothing else is in it. Raises OSError."""
    if record.devices:
        system.write_atomic(path, record.to_text().encode(), mode=0o644)
        return
    folder = posixpath.dirname(path)
    if system.remove(path) and not system.list_directory(folder):
        with contextlib.suppress(OSError):  # somebody has put something there, or it is a mount
            system.path(folder).rmdir()


def noted_values(system: System, path: str, uuid: str) -> Mapping[str, Any]:
    """Return what the node has set on a device in this boot. A record that cannot be read tells nothing: claims go on without it."""
    try:
        text = system.read_text(path)
        return parse_record(text, path).in_boot(system.boot_id()).of(uuid).values
    except (AcceleratorError, OSError):
        return {}
