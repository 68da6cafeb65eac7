# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pending cleanups: changes for ended claims that could not be reverted, because a device or the fabric manager failed.

They are stored in the meta table until a retry succeeds. If partitions do not survive a reboot, their pending cleanups
end with the boot.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..core.model import OwnedPartition

# A key of the store's meta table, with the device's UUID, profile ID, start, and size. The value is the boot ID. If
# partitions survive a reboot, the boot ID has no meaning, and the value is the partition's ID; earlier releases wrote a
# value that is not a number.
DESTRUCTION_KEY = "owed:"
# A key of the store's meta table, with the number of a fabric partition. The value is a JSON object with the boot ID
# and the UUIDs of the partition's devices.
DEACTIVATION_KEY = "owed-fabric:"


@dataclass(frozen=True)
class PendingDestruction:
    """One partition to destroy when its device answers: profile ID, start, and size on a device, and its ID if known."""

    device_uuid: str
    partition: OwnedPartition
    instance_id: int | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """Return the key in the meta table."""
        return ":".join((DESTRUCTION_KEY.rstrip(":"), self.device_uuid, *map(str, self.partition)))


def cleanups_in(meta: Mapping[str, str], boot_id: str | None) -> tuple[PendingDestruction, ...]:
    """Return the pending cleanups of this boot; with None those of all boots, because partitions survive a reboot."""
    found = []
    for key, value in meta.items():
        if key.startswith(DESTRUCTION_KEY) and boot_id in (None, value):
            uuid, *numbers = key[len(DESTRUCTION_KEY) :].rsplit(":", 3)
            profile_id, start, size = map(int, numbers)
            instance_id = int(value) if boot_id is None and value.isdecimal() else None
            found.append(PendingDestruction(uuid, (profile_id, start, size), instance_id))
    return tuple(found)


def obsolete_cleanup_entries(meta: Mapping[str, str], boot_id: str | None) -> dict[str, None]:
    """Return changes of the meta table that remove the pending cleanups of previous boots.

    ``boot_id`` is None if partitions survive a reboot. Then no cleanup is removed.
    """
    return {
        key: None for key, value in meta.items() if key.startswith(DESTRUCTION_KEY) and boot_id not in (None, value)
    }


def cleanups_to_meta(cleanups: Collection[PendingDestruction], boot_id: str | None) -> dict[str, str]:
    """Return new pending cleanups as changes of the meta table; ``boot_id`` None if partitions survive a reboot."""
    return {cleanup.key: str(cleanup.instance_id or "") if boot_id is None else boot_id for cleanup in cleanups}


@dataclass(frozen=True)
class PendingDeactivation:
    """A fabric partition whose deactivation was rejected after its last claim had ended."""

    number: int
    device_uuids: frozenset[str]

    @property
    def key(self) -> str:
        """Return the key in the meta table."""
        return f"{DEACTIVATION_KEY}{self.number}"

    def describe(self) -> str:
        """Return a description of the pending cleanup."""
        return f"deactivation of partition {self.number} of the fabric ({', '.join(sorted(self.device_uuids))})"

    def to_meta(self, boot_id: str) -> dict[str, str]:
        """Return the pending cleanup as a change of the meta table. It ends with the boot, like the partition."""
        return {self.key: json.dumps({"boot": boot_id, "devices": sorted(self.device_uuids)})}


def fabric_cleanups_in(meta: Mapping[str, str], boot_id: str) -> tuple[PendingDeactivation, ...]:
    """Return the fabric partitions with a pending deactivation in this boot."""
    pending = {key: json.loads(value) for key, value in meta.items() if key.startswith(DEACTIVATION_KEY)}
    return tuple(
        PendingDeactivation(int(key[len(DEACTIVATION_KEY) :]), frozenset(value["devices"]))
        for key, value in sorted(pending.items())
        if value["boot"] == boot_id
    )


def obsolete_fabric_cleanup_entries(meta: Mapping[str, str], boot_id: str) -> dict[str, None]:
    """Return changes of the meta table that remove the entries of previous boots. A reboot deactivates all fabric partitions."""
    current = {cleanup.key for cleanup in fabric_cleanups_in(meta, boot_id)}
    return {key: None for key in meta if key.startswith(DEACTIVATION_KEY) and key not in current}
