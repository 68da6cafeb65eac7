# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Partitions that the driver owes: made for a claim that has gone, and not destroyed because their device was faulty.

They are remembered in the store's meta table until the device answers again. Where partitions do not outlive a start of the
machine, neither do the debts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..core.model import OwnedPartition

# In the store's meta table, with the device's UUID, profile id, start and size behind it. The value is the boot id; where partitions
# outlive boots, whose ids say nothing then, it is the partition's own id. What releases before wrote there is no number.
OWED_KEY = "owed:"
# In the store's meta table, with the number of a partition of the fabric behind it. The value is a JSON object with the boot id and the
# UUIDs of the partition's devices.
OWED_FABRIC_KEY = "owed-fabric:"


@dataclass(frozen=True)
class Debt:
    """One partition to destroy as soon as its device answers: profile id, start and size on a device, and its id where that is known."""

    device_uuid: str
    partition: OwnedPartition
    instance_id: int | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """The debt's key in the meta table."""
        return ":".join((OWED_KEY.rstrip(":"), self.device_uuid, *map(str, self.partition)))


def debts_in(meta: Mapping[str, str], boot_id: str | None) -> tuple[Debt, ...]:
    """Return the debts of this boot; with None those of all, because partitions outlive boots."""
    found = []
    for key, value in meta.items():
        if key.startswith(OWED_KEY) and boot_id in (None, value):
            uuid, *numbers = key[len(OWED_KEY) :].rsplit(":", 3)
            profile_id, start, size = map(int, numbers)
            instance_id = int(value) if boot_id is None and value.isdecimal() else None
            found.append(Debt(uuid, (profile_id, start, size), instance_id))
    return tuple(found)


def void_debts(meta: Mapping[str, str], boot_id: str | None) -> dict[str, None]:
    """Return the debts of former boots, as changes of the meta table: they went with their partitions, unless those outlive boots."""
    return {key: None for key, value in meta.items() if key.startswith(OWED_KEY) and boot_id not in (None, value)}


def incurred(debts: Collection[Debt], boot_id: str | None) -> dict[str, str]:
    """Return new debts as changes of the meta table; with None those of partitions that outlive boots."""
    return {debt.key: str(debt.instance_id or "") if boot_id is None else boot_id for debt in debts}


@dataclass(frozen=True)
class FabricDebt:
    """A partition of the fabric whose deactivation was rejected after its last claim had ended: its number and its devices, by UUID."""

    number: int
    device_uuids: frozenset[str]

    @property
    def key(self) -> str:
        """The debt's key in the meta table."""
        return f"{OWED_FABRIC_KEY}{self.number}"

    def describe(self) -> str:
        """Return the pending cleanup for people."""
        return f"deactivation of partition {self.number} of the fabric ({', '.join(sorted(self.device_uuids))})"

    def to_meta(self, boot_id: str) -> dict[str, str]:
        """Return the debt as a change of the meta table. It ends with the boot, as the partition does."""
        return {self.key: json.dumps({"boot": boot_id, "devices": sorted(self.device_uuids)})}


def fabric_debts_in(meta: Mapping[str, str], boot_id: str) -> tuple[FabricDebt, ...]:
    """Return the partitions of the fabric whose deactivation is owed in this boot."""
    owed = {key: json.loads(value) for key, value in meta.items() if key.startswith(OWED_FABRIC_KEY)}
    return tuple(
        FabricDebt(int(key[len(OWED_FABRIC_KEY) :]), frozenset(value["devices"]))
        for key, value in sorted(owed.items())
        if value["boot"] == boot_id
    )


def void_fabric_debts(meta: Mapping[str, str], boot_id: str) -> dict[str, None]:
    """Return the debts of former boots as changes of the meta table: a reboot deactivates all partitions of the fabric."""
    current = {debt.key for debt in fabric_debts_in(meta, boot_id)}
    return {key: None for key in meta if key.startswith(OWED_FABRIC_KEY) and key not in current}
