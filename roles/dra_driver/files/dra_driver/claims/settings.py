# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a claim sets on whole devices, and what was set before: decided from facts, remembered until it is set back.

What was there before is in the store's meta table before anything is set, and leaves it when it is there again. So the
entries that no claim stands for any more are what is owed to a device. No setting outlives a reboot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import InUse
from ..core.settings import (
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
    """One knob of a device to set back; ``before`` is None where the device's default is to be."""

    device_uuid: str
    name: str
    before: Any

    @property
    def key(self) -> str:
        """The key under which it is owed."""
        return setting_key(self.device_uuid, self.name)


def wanted_of(record: ClaimRecord) -> dict[str, Mapping[str, Any]]:
    """Return what a claim sets, by device; devices on which it sets nothing are not in it."""
    return {uuid: held.settings for held in record.devices if held.settings for uuid in held.device_uuids}


def fit_settings(record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]]) -> ClaimRecord:
    """Hold what a claim sets against what its devices take, and return the record with the devices' own bounds.

    Raises ClaimError, naming the device, each field that is wrong and what it may be.
    """
    fitted = []
    for held in record.devices:
        for uuid in held.device_uuids if held.settings else ():
            there = knobs[uuid]
            # Nobody asks for persistence: where a device knows nothing of it there is nothing to switch off.
            wanted = {name: value for name, value in held.settings.items() if name != PERSISTENCE or name in there}
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
    """Return what was there before, as changes of the meta table. What an earlier one of this boot says stands."""
    found = {}
    for uuid, values in wanted_of(record).items():
        for name in values:
            key = setting_key(uuid, name)
            if key not in meta or read_noting(meta[key])[0] != boot_id:
                found[key] = noting(boot_id, knobs[uuid][name].value)
    return found


def forgotten(records: Iterable[ClaimRecord], meta: Mapping[str, str], boot_id: str) -> dict[str, str]:
    """Return what is to be noted where a store has forgotten what was there before the claims of this boot: the device's default.

    A driver that comes back would take the claims' own values for it.
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
    """Refuse a claim that sets a knob otherwise than another claim that shares the device. Raises InUse, naming that claim."""
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
    """Return what is to be set back when a claim goes: what it has set, and no other claim wants.

    What nothing is noted of (a store that was lost) goes to the device's default.
    """
    before = {(each.device_uuid, each.name): each for each in _noted(meta, boot_id)}
    return tuple(
        before.get(knob) or Restoration(*knob, None)
        for knob in sorted(_turned([record]) - _turned(other for other in records if other.uid != record.uid))
    )


def owed(meta: Mapping[str, str], boot_id: str, records: Iterable[ClaimRecord]) -> tuple[Restoration, ...]:
    """Return what was set in this boot and no claim wants any more."""
    turned = _turned(records)
    return tuple(each for each in _noted(meta, boot_id) if (each.device_uuid, each.name) not in turned)


def _turned(records: Iterable[ClaimRecord]) -> set[tuple[str, str]]:
    """The knobs that claims turn, as device and name."""
    return {(uuid, name) for record in records for uuid, values in wanted_of(record).items() for name in values}


def still_owed(left: Iterable[Restoration], boot_id: str) -> dict[str, str]:
    """Return what could not be set back, as changes of the meta table."""
    return {each.key: noting(boot_id, each.before) for each in left}


def void_settings(meta: Mapping[str, str], boot_id: str) -> dict[str, None]:
    """Return what was noted in former boots, as changes of the meta table: the settings went with them."""
    return {
        key: None for key, value in meta.items() if key.startswith(SETTING_KEY) and read_noting(value)[0] != boot_id
    }


def _noted(meta: Mapping[str, str], boot_id: str) -> Iterable[Restoration]:
    return [Restoration(uuid, name, before) for (uuid, name), before in noted_before(meta, boot_id).items()]
