# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Record the values that the node's settings changed on devices.

The record makes it possible to restore values, and to know values that cannot be read back. It is written before a
value is set: a knob that is in ``before`` but not in ``values`` belongs to an interrupted run. A record is valid for
one boot. Values from an earlier boot are lost, except those that survive a reboot.
"""

from __future__ import annotations

import contextlib
import json
import logging
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import AcceleratorError, NotPermitted
from ..host.system import System
from .knobs import KEPT_AFTER_REBOOT

LOG = logging.getLogger(__name__)

VERSION = 1
FOLDER = "/var/lib/dra-accelerators"


def record_path(vendor: str) -> str:
    """Return the path of the record for a vendor's devices."""
    return f"{FOLDER}/settings-{vendor}.json"


@dataclass(frozen=True)
class RecordedValues:
    """The values that were set on one device, by knob, and the values before; None for the device's default."""

    values: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)

    def without(self, *names: str) -> RecordedValues:
        """Return a copy without these knobs."""
        return RecordedValues(
            {name: value for name, value in self.values.items() if name not in names},
            {name: value for name, value in self.before.items() if name not in names},
        )

    def with_temporary_values(self, values: Mapping[str, Any]) -> RecordedValues:
        """Return a copy with values of a device that an operation changes temporarily."""
        return RecordedValues({**self.values, **values}, {**values, **self.before})

    def with_entries_of(self, former: RecordedValues, names: Iterable[str]) -> RecordedValues:
        """Return a copy with the entries of these knobs from an earlier note."""
        rest = self.without(*names)
        return RecordedValues(
            {**rest.values, **{name: former.values[name] for name in names if name in former.values}},
            {**rest.before, **{name: former.before[name] for name in names if name in former.before}},
        )

    def during_change(self, present: Mapping[str, Any]) -> RecordedValues:
        """Return the record during a change of these knobs, whose current values are ``present``.

        Older values before take precedence.
        """
        values = {name: value for name, value in self.values.items() if name not in present}
        return RecordedValues(values, {**present, **self.before})


@dataclass(frozen=True)
class SettingsRecord:
    """The values that were set in one boot, by device."""

    boot_id: str
    devices: Mapping[str, RecordedValues] = field(default_factory=dict)

    def of(self, uuid: str) -> RecordedValues:
        """Return the values that were set on a device."""
        return self.devices.get(uuid, RecordedValues())

    def with_devices(self, notes: Mapping[str, RecordedValues]) -> SettingsRecord:
        """Return a copy with new records for these devices. Devices without values are omitted."""
        both = {**self.devices, **notes}
        return SettingsRecord(self.boot_id, {uuid: note for uuid, note in sorted(both.items()) if note.before})

    def in_boot(self, boot_id: str) -> SettingsRecord:
        """Return the part of the record that is valid in a boot."""
        if boot_id == self.boot_id:
            return self
        kept = {
            uuid: note.without(*(name for name in note.before if name not in KEPT_AFTER_REBOOT))
            for uuid, note in self.devices.items()
        }
        return SettingsRecord(boot_id).with_devices(kept)

    def to_text(self) -> str:
        """Return the record as JSON text."""
        devices = {uuid: {"set": note.values, "before": note.before} for uuid, note in self.devices.items()}
        return json.dumps({"version": VERSION, "boot_id": self.boot_id, "devices": devices}, indent=1) + "\n"


def parse_record(text: str, path: str) -> SettingsRecord:
    """Parse a record. Raises AcceleratorError with code damaged-record."""
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        devices = {
            str(uuid): RecordedValues(dict(note["set"]), dict(note["before"]))
            for uuid, note in content["devices"].items()
        }
        return SettingsRecord(str(content["boot_id"]), devices)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AcceleratorError(
            f"The record {path} of changed device settings cannot be read: {error!r}",
            hint=f"Move the file to {path}.damaged. The current settings stay until the next boot, and the next run sets them again.",
            code="damaged-record",
        ) from error


def record_damage(system: System, path: str) -> str:
    """Return why the recorded values are unknown, with the remedy; "" if the record is valid or missing.

    ``recorded_values`` returns no values for a damaged record, so that claims continue. Its callers report the damage.
    """
    try:
        parse_record(system.read_text(path), path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}, the record of the node's settings, cannot be read: {error.strerror or error}. Check the file and its file system"
    except AcceleratorError as error:
        return f"{error.message}. Until then claims and resets restore the device's default instead of the node's value. {error.hint}"
    return ""


def read_record(system: System, path: str, boot_id: str) -> SettingsRecord:
    """Return the values that are valid in this boot; empty without a record. Raises AcceleratorError, OSError."""
    try:
        text = system.read_text(path)
    except FileNotFoundError:
        return SettingsRecord(boot_id)
    return parse_record(text, path).in_boot(boot_id)


def write_record(system: System, path: str, record: SettingsRecord) -> None:
    """Write a record, or remove the file of an empty record, and its directory if empty. Raises OSError."""
    if record.devices:
        system.write_atomic(path, record.to_text().encode(), mode=0o644)
        return
    folder = posixpath.dirname(path)
    system.remove_temporaries(path)
    if system.remove(path) and not system.list_directory(folder):
        with contextlib.suppress(OSError):  # another file is there, or the directory is a mount point
            system.path(folder).rmdir()


def devices_with_settings(system: System, path: str) -> frozenset[str]:
    """Return the devices on which the node has set values in this boot. Empty without a readable record."""
    try:
        record = parse_record(system.read_text(path), path).in_boot(system.boot_id())
    except (OSError, AcceleratorError):
        return frozenset()
    return frozenset(uuid for uuid, note in record.devices.items() if note.values)


def recorded_values(system: System, path: str, uuid: str) -> Mapping[str, Any]:
    """Return the values that the node has set on a device in this boot.

    Empty if the record is missing or damaged: claims continue without it, and ``record_damage`` reports the damage.
    Raises AcceleratorError if the record cannot be read at present. The values are then unknown, so the caller tries
    again later.
    """
    try:
        text = system.read_text(path)
        return parse_record(text, path).in_boot(system.boot_id()).of(uuid).values
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise NotPermitted(
            f"{path}, the record of the node's settings, cannot be read for device {uuid}: {error.strerror}",
            hint="Run as root.",
        ) from error
    except OSError as error:
        raise AcceleratorError(
            f"{path}, the record of the node's settings, cannot be read for device {uuid}: {error.strerror or error}",
            hint="Check the file and its file system. The driver tries again.",
            code="unreadable-record",
        ) from error
    except AcceleratorError:
        return {}


class TemporaryChange:
    """Record values that an operation changes temporarily. If the process is killed meanwhile, the next reader of the record restores them.

    A failed write of the record does not stop the operation: the driver's sandbox cannot write it.
    """

    def __init__(self, system: System, path: str, uuids: Iterable[str], values: Mapping[str, Any]) -> None:
        self._system = system
        self._path = path
        self._uuids = tuple(uuids)
        self._values = values
        self._former: Mapping[str, RecordedValues] = {}

    def begin(self) -> None:
        """Write the values."""
        with self._logged("does not have"):
            record = read_record(self._system, self._path, self._system.boot_id())
            former = {uuid: record.of(uuid) for uuid in self._uuids}
            held = {uuid: note.with_temporary_values(self._values) for uuid, note in former.items()}
            write_record(self._system, self._path, record.with_devices(held))
            self._former = former

    def end(self) -> None:
        """Restore the previous entries of the record, after the values of the devices were restored."""
        if not self._former:
            return
        with self._logged("still has"):
            record = read_record(self._system, self._path, self._system.boot_id())
            names = tuple(self._values)
            back = {uuid: record.of(uuid).with_entries_of(former, names) for uuid, former in self._former.items()}
            write_record(self._system, self._path, record.with_devices(back))

    @contextlib.contextmanager
    def _logged(self, state: str) -> Iterator[None]:
        try:
            yield
        except (OSError, AcceleratorError) as error:
            what = ", ".join(f"{name}={value}" for name, value in self._values.items())
            LOG.warning("the record %s %s %s of %s: %s", self._path, state, what, ", ".join(self._uuids), error)
