# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Decide which settings a claim changes on whole devices, and keep the previous values until they are restored.

The previous value is in the store's meta table before a setting changes, and is deleted after the restore. So entries
without a claim are pending cleanups. Settings do not survive a reboot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import InUse
from ..core.settings.knobs import (
    PERSISTENCE,
    SETTING_KEY,
    Knob,
    fit_to_device,
    noted_before,
    noting,
    read_noting,
    setting_key,
)
from ..core.texts import join_problems
from .allocation import ClaimError
from .records import ClaimRecord


@dataclass(frozen=True)
class Restoration:
    """A setting of a device to restore. ``before`` is the previous value, or None for the device's default."""

    device_uuid: str
    name: str
    before: Any

    @property
    def key(self) -> str:
        """Return the key of the previous value in the meta table."""
        return setting_key(self.device_uuid, self.name)


def wanted_of(record: ClaimRecord) -> dict[str, Mapping[str, Any]]:
    """Return the settings that a claim changes, by device. Devices without changes are left out."""
    return {uuid: held.settings for held in record.devices if held.settings for uuid in held.device_uuids}


def fit_settings(record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]]) -> ClaimRecord:
    """Validate a claim's settings against its devices, and return the record with values within the devices' limits.

    Raises ClaimError with the device, each invalid field, and its valid values.
    """
    fitted = []
    for held in record.devices:
        for uuid in held.device_uuids if held.settings else ():
            there = knobs[uuid]
            # No claim requests persistence. It stays unchanged if the device does not support it or must keep it.
            wanted = {
                name: value
                for name, value in held.settings.items()
                if name != PERSISTENCE or (name in there and not there[name].blocked)
            }
            values, problems = fit_to_device(wanted, there)
            if problems:
                raise ClaimError(
                    f"Claim {record.describe()} cannot set device {held.name} ({uuid}): " + join_problems(problems),
                    hint="Correct the configuration in the claim or its DeviceClass.",
                    code="config-refused",
                )
            held = replace(held, settings=values)
        fitted.append(held)
    return replace(record, devices=tuple(fitted))


def marks(
    record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]], meta: Mapping[str, str], boot_id: str
) -> dict[str, str]:
    """Return the previous values as changes of the meta table. Existing entries of this boot are kept."""
    found = {}
    for uuid, values in wanted_of(record).items():
        for name in values:
            key = setting_key(uuid, name)
            if key not in meta or read_noting(meta[key])[0] != boot_id:
                found[key] = noting(boot_id, knobs[uuid][name].value)
    return found


def forgotten(records: Iterable[ClaimRecord], meta: Mapping[str, str], boot_id: str) -> dict[str, str]:
    """Return entries for claims of this boot whose previous values were lost with a store: the device's default.

    Without them, the driver would later read the claims' own values as the previous ones.
    """
    return {
        key: noting(boot_id, None)
        for record in records
        if record.boot_id == boot_id
        for uuid, values in wanted_of(record).items()
        for name in values
        if (key := setting_key(uuid, name)) not in meta
    }


def refuse_contradiction(record: ClaimRecord, records: Iterable[ClaimRecord]) -> None:
    """Refuse a claim that needs another value of a setting than a claim that shares the device.

    Raises InUse, naming that claim.
    """
    for other in records:
        if other.uid == record.uid:
            continue
        for uuid, values in wanted_of(other).items():
            for name, value in wanted_of(record).get(uuid, {}).items():
                if name in values and values[name] != value:
                    raise InUse(
                        f"Claim {record.describe()} wants {name} of device {uuid} to be {value}, and claim {other.describe()}, "
                        f"which shares it, has set {values[name]}",
                        claims=(other.describe(),),
                        hint="Ask for the same, or for another device.",
                    )


def restorations(
    record: ClaimRecord, records: Iterable[ClaimRecord], meta: Mapping[str, str], boot_id: str
) -> tuple[Restoration, ...]:
    """Return the settings to restore when a claim ends: those that it changed and that no other claim needs.

    A setting without a recorded previous value (a lost store) gets the device's default.
    """
    before = {(each.device_uuid, each.name): each for each in _noted(meta, boot_id)}
    return tuple(
        before.get(knob) or Restoration(*knob, None)
        for knob in sorted(_turned([record]) - _turned(other for other in records if other.uid != record.uid))
    )


def owed(meta: Mapping[str, str], boot_id: str, records: Iterable[ClaimRecord]) -> tuple[Restoration, ...]:
    """Return the settings that were changed in this boot and that no claim needs any more."""
    turned = _turned(records)
    return tuple(each for each in _noted(meta, boot_id) if (each.device_uuid, each.name) not in turned)


def _turned(records: Iterable[ClaimRecord]) -> set[tuple[str, str]]:
    """Return the settings that claims change, as device and name."""
    return {(uuid, name) for record in records for uuid, values in wanted_of(record).items() for name in values}


def still_owed(left: Iterable[Restoration], boot_id: str) -> dict[str, str]:
    """Return the settings that could not be restored, as changes of the meta table."""
    return {each.key: noting(boot_id, each.before) for each in left}


def void_settings(meta: Mapping[str, str], boot_id: str) -> dict[str, None]:
    """Return the removal of entries of previous boots, as changes of the meta table, because the reboot reset these settings."""
    return {
        key: None for key, value in meta.items() if key.startswith(SETTING_KEY) and read_noting(value)[0] != boot_id
    }


def _noted(meta: Mapping[str, str], boot_id: str) -> Iterable[Restoration]:
    return [Restoration(uuid, name, before) for (uuid, name), before in noted_before(meta, boot_id).items()]
