# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the devices of prepared claims that do not exist on the node any more, or are not connected. Has no side effects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..core.health.conditions import Severity, Sign
from ..core.model import PARTITION, Device
from .claim_fabric import NUMBER
from .plan import partition_of
from .records import ClaimRecord, DeviceRecord

DEVICE_GONE = "device-gone"
PARTITION_GONE = "partition-gone"
FABRIC_INACTIVE = "fabric-partition-inactive"
#: The action for a user of the claim after the claim was restored.
_RESTART = "The driver then restores the claim; restart the pod's containers afterwards."


@dataclass(frozen=True)
class MissingDevice:
    """One device of a prepared claim that does not exist any more, or is not connected. ``since`` is in seconds since the epoch."""

    uid: str
    held: DeviceRecord
    sign: Sign
    since: float


def missing_devices(
    record: ClaimRecord,
    devices: Mapping[str, Device],
    absent: Collection[str],
    readable: Collection[str],
    active: Collection[int] | None = None,
) -> tuple[tuple[DeviceRecord, Sign], ...]:
    """Return the devices of a prepared claim that do not exist or are not connected, each with the reason.

    ``devices`` are those of the last scan by UUID, ``absent`` the UUIDs of the claim's devices that the scan has not found,
    ``readable`` the UUIDs of devices without a fault: the partitions of others are not known. ``active`` are the active partitions
    of the machine's fabric, None if they are not known.
    """
    found = []
    for held in record.devices:
        gone = [uuid for uuid in held.device_uuids if uuid in absent]
        if gone:
            found.append((held, _device_gone(held, gone)))
        elif held.kind == PARTITION and not held.admin and held.device_uuid in readable:
            device = devices[held.device_uuid]
            partition = partition_of(device, held)
            if partition is None or not partition.uuid:
                found.append((held, _partition_gone(held, device)))
        elif active is not None and held.fabric and held.fabric[NUMBER] not in active:
            found.append((held, _fabric_inactive(held)))
    return tuple(found)


def _device_gone(held: DeviceRecord, gone: Collection[str]) -> Sign:
    return Sign(
        DEVICE_GONE,
        Severity.FAILED,
        f"{held.name}: device {', '.join(gone)} is not on this node any more.",
        f"Plug the device in again, or delete the pod. {_RESTART}",
        value=held.name,
    )


def _fabric_inactive(held: DeviceRecord) -> Sign:
    return Sign(
        FABRIC_INACTIVE,
        Severity.FAILED,
        f"{held.name}: partition {held.fabric[NUMBER]} of the fabric is not active any more. The fabric manager was probably restarted.",
        "The driver activates it again. Restart the pod's containers afterwards: their devices were not connected.",
        value=held.name,
    )


def _partition_gone(held: DeviceRecord, device: Device) -> Sign:
    uuid = held.partition_uuid or held.name
    remedy = "The driver creates it again." if held.created else "Create it again, as in the layout, or delete the pod."
    return Sign(
        PARTITION_GONE,
        Severity.FAILED,
        f"{held.name}: partition {uuid} of {device.describe()} does not exist any more.",
        f"{remedy} {_RESTART}",
        value=held.name,
    )
