# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pending cleanups: partitions of ended claims that could not be destroyed, because their device was faulty.

They are stored in the meta table until the device answers again. If partitions do not survive a reboot, neither do
their pending cleanups.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..core.model import OwnedPartition

# A key of the store's meta table, with the device's UUID, profile ID, start, and size. The value is the boot ID. If
# partitions survive a reboot, the boot ID has no meaning, and the value is the partition's ID; earlier releases wrote a
# value that is not a number.
OWED_KEY = "owed:"
# A key of the store's meta table, with the number of a fabric partition. The value is a JSON object with the boot ID
# and the UUIDs of the partition's devices.
OWED_FABRIC_KEY = "owed-fabric:"


@dataclass(frozen=True)
class PendingDestruction:
    """One partition to destroy when its device answers: profile ID, start, and size on a device, and its ID if known."""

    device_uuid: str
    partition: OwnedPartition
    instance_id: int | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """Return the key in the meta table."""
        return ":".join((OWED_KEY.rstrip(":"), self.device_uuid, *map(str, self.partition)))


def cleanups_in(meta: Mapping[str, str], boot_id: str | None) -> tuple[PendingDestruction, ...]:
    """Return the pending cleanups of this boot; with None those of all boots, because partitions survive a reboot."""
    found = []
    for key, value in meta.items():
        if key.startswith(OWED_KEY) and boot_id in (None, value):
            uuid, *numbers = key[len(OWED_KEY) :].rsplit(":", 3)
            profile_id, start, size = map(int, numbers)
            instance_id = int(value) if boot_id is None and value.isdecimal() else None
            found.append(PendingDestruction(uuid, (profile_id, start, size), instance_id))
    return tuple(found)


def void_cleanups(meta: Mapping[str, str], boot_id: str | None) -> dict[str, None]:
    """Return the removal of pending cleanups of previous boots, unless partitions survive a reboot, as changes of the meta table."""
    return {key: None for key, value in meta.items() if key.startswith(OWED_KEY) and boot_id not in (None, value)}


def cleanups_to_meta(cleanups: Collection[PendingDestruction], boot_id: str | None) -> dict[str, str]:
    """Return new pending cleanups as changes of the meta table; ``boot_id`` None if partitions survive a reboot."""
    return {cleanup.key: str(cleanup.instance_id or "") if boot_id is None else boot_id for cleanup in cleanups}


@dataclass(frozen=True)
class PendingDeactivation:
    """A fabric partition whose deactivation was rejected after its last claim had ended: its number, and its devices by UUID."""

    number: int
    device_uuids: frozenset[str]

    @property
    def key(self) -> str:
        """Return the key in the meta table."""
        return f"{OWED_FABRIC_KEY}{self.number}"

    def describe(self) -> str:
        """Return a description of the pending cleanup."""
        return f"deactivation of partition {self.number} of the fabric ({', '.join(sorted(self.device_uuids))})"

    def to_meta(self, boot_id: str) -> dict[str, str]:
        """Return the pending cleanup as a change of the meta table. It ends with the boot, like the partition."""
        return {self.key: json.dumps({"boot": boot_id, "devices": sorted(self.device_uuids)})}


def fabric_cleanups_in(meta: Mapping[str, str], boot_id: str) -> tuple[PendingDeactivation, ...]:
    """Return the fabric partitions with a pending deactivation in this boot."""
    pending = {key: json.loads(value) for key, value in meta.items() if key.startswith(OWED_FABRIC_KEY)}
    return tuple(
        PendingDeactivation(int(key[len(OWED_FABRIC_KEY) :]), frozenset(value["devices"]))
        for key, value in sorted(pending.items())
        if value["boot"] == boot_id
    )


def void_fabric_cleanups(meta: Mapping[str, str], boot_id: str) -> dict[str, None]:
    """Return the removal of pending cleanups of previous boots, as changes of the meta table: a reboot deactivates all fabric partitions."""
    current = {cleanup.key for cleanup in fabric_cleanups_in(meta, boot_id)}
    return {key: None for key in meta if key.startswith(OWED_FABRIC_KEY) and key not in current}
