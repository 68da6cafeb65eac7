# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Partitions that the driver owes: made for a claim that has gone, and not destroyed because their device was faulty.

They are remembered in the store's meta table until the device answers again. Where partitions do not outlive a start of the
machine, neither do the debts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..core.model import OwnedPartition

# In the store's meta table, with the device's UUID, profile id, start and size behind it. The value is the boot id; where partitions
# outlive boots, whose ids say nothing then, it is the partition's own id. What releases before wrote there is no number.
OWED_KEY = "owed:"


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
