# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find missing devices of prepared claims, and build the device entries of a claim's status. No side effects.

Facts: KEP-4817 (``status.devices``: entries are merged by driver, pool, device and share; conditions, and data of the
driver's own) and KEP-5007 (binding conditions: the scheduler has allocated and reserved the claim, and waits for
conditions of its devices).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.dra.device_json import FAILED_CONDITION, PREPARED_CONDITION
from ..core.health.conditions import Severity, Sign
from ..core.model import PARTITION, AttributeValue, Device, Offer, Version
from ..core.times import text_of
from .allocation import ACTIVATED, MADE, READY, STORE
from .claim_fabric import NUMBER, OURS
from .plan import partition_of
from .store.records import ClaimRecord, ClaimReference, DeviceRecord

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


#: The maximum number of characters in a condition's message.
LONGEST_MESSAGE = 4096


@dataclass(frozen=True)
class Place:
    """One device of an allocation, by the fields that identify its entry in the claim's status."""

    pool: str
    device: str
    share_id: str = ""


@dataclass(frozen=True)
class Waiting:
    """A claim with devices of this driver and pool for which the scheduler waits, or has waited.

    ``devices`` have binding conditions. Those in ``untold`` have no condition in the claim's status yet that ends the
    wait. ``allocated_at`` identifies the allocation of the claim.
    """

    claim: ClaimReference
    devices: tuple[Place, ...]
    untold: tuple[Place, ...]
    allocated_at: str = ""


def waiting(claim: Mapping[str, Any], driver: str, pool: str) -> Waiting | None:
    """Parse a claim. Return None if the scheduler does not wait for a device of this driver and pool."""
    status = claim.get("status") or {}
    allocation = status.get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    mine = {
        Place(str(each["pool"]), str(each["device"]), str(each.get("shareID") or "")): {
            *each["bindingConditions"],
            *(each.get("bindingFailureConditions") or ()),
        }
        for each in results
        if each.get("driver") == driver and each.get("pool") == pool and each.get("bindingConditions")
    }
    if not mine:
        return None
    reported_conditions = {
        Place(str(each.get("pool")), str(each.get("device")), str(each.get("shareID") or "")): {
            condition.get("type") for condition in each.get("conditions") or () if condition.get("status") == "True"
        }
        for each in status.get("devices") or ()
        if each.get("driver") == driver
    }
    metadata = claim["metadata"]
    return Waiting(
        claim=ClaimReference(str(metadata.get("namespace", "")), str(metadata["name"]), str(metadata["uid"])),
        devices=tuple(mine),
        untold=tuple(
            place for place, conditions in mine.items() if not conditions & reported_conditions.get(place, set())
        ),
        allocated_at=str(allocation.get("allocationTimestamp") or ""),
    )


def prepared_entries(
    driver: str,
    record: ClaimRecord,
    offers: Mapping[str, Offer],
    store: str,
    missing: Iterable[MissingDevice] = (),
) -> list[dict[str, Any]]:
    """Return the entries of a prepared claim's devices. ``store`` is the identity of the store with the record.

    ``data`` has the attributes of each device as plain values, with its UUID; the claim's settings and sharing
    configuration; and the capacity that the claim consumes of a device that claims share. So an exporter finds a pod's
    devices without guessing. Devices among the ``missing`` ones of all claims are not ready.
    """
    gone = {each.held.cdi_id: each for each in missing if each.uid == record.uid}
    return [
        _prepared_entry(driver, record, device, offers.get(device.name), store, gone.get(device.cdi_id))
        for device in record.devices
    ]


def failed_entries(
    driver: str, devices: Iterable[Place], reason: str, message: str, now: float
) -> list[dict[str, Any]]:
    """Return the entries that end the scheduler's wait for devices that cannot be prepared.

    ``reason`` is an error's code.
    """
    word = _reason(reason)
    found = []
    for place in devices:
        conditions = [
            _condition(FAILED_CONDITION, True, word, message, now),
            _condition(READY, False, word, message, now),
        ]
        found.append({**_identity(driver, place), "conditions": conditions})
    return found


def _prepared_entry(
    driver: str,
    record: ClaimRecord,
    device: DeviceRecord,
    offer: Offer | None,
    store: str,
    missing: MissingDevice | None,
) -> dict[str, Any]:
    since = record.created_at
    conditions = [_condition(READY, True, "Prepared", "The device is prepared on its node.", since)]
    if missing is not None:
        reason = _reason(missing.sign.cause)
        conditions = [_condition(READY, False, reason, missing.sign.describe(), missing.since)]
    if offer is not None and offer.prepared_before_binding:
        conditions.insert(0, _condition(PREPARED_CONDITION, True, "Prepared", "The pod can be bound.", since))
    attributes = {
        name: _plain(value) for name, value in sorted((offer.attributes if offer is not None else {}).items())
    }
    data = {
        **({"uuids": list(device.members)} if device.members else {"uuid": device.device_uuid}),
        **attributes,
        **({"uuid": device.partition_uuid} if device.partition_uuid else {}),
        # A driver that has lost its store and files recognizes its partition by this.
        **({MADE: True} if device.created and device.partition_uuid else {}),
        # A driver that has not lost its store recognizes by this that a claim without a record was released.
        STORE: store,
        **({ACTIVATED: device.fabric[NUMBER]} if device.fabric.get(OURS) else {}),
        **({"settings": dict(device.settings)} if device.settings else {}),
        **({"sharing": dict(device.sharing)} if device.sharing else {}),
        **({"consumed": dict(device.consumed)} if device.consumed else {}),
    }
    place = Place(device.pool, device.name, device.share_id)
    return {**_identity(driver, place), "conditions": conditions, "data": data}


def _identity(driver: str, place: Place) -> dict[str, str]:
    share = {"shareID": place.share_id} if place.share_id else {}
    return {"driver": driver, "pool": place.pool, "device": place.device, **share}


def _condition(kind: str, value: bool, reason: str, message: str, since: float) -> dict[str, str]:
    return {
        "type": kind,
        "status": str(value),
        "reason": reason,
        "message": message[:LONGEST_MESSAGE],
        "lastTransitionTime": text_of(since),
    }


def _reason(code: str) -> str:
    """Return the code of an error, or the cause of a fault, as a condition's reason."""
    return "".join(part.capitalize() for part in code.split("-")) or "Failed"


def _plain(value: AttributeValue) -> bool | int | str:
    return value.text if isinstance(value, Version) else value
