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
from .allocation import ACTIVATED_KEY, CREATED_KEY, READY_CONDITION, STORE_KEY
from .claim_fabric import ACTIVATED_BY_DRIVER_KEY, NUMBER_KEY
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
    device_record: DeviceRecord
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
    for device_record in record.devices:
        gone = [uuid for uuid in device_record.device_uuids if uuid in absent]
        if gone:
            found.append((device_record, _device_gone(device_record, gone)))
        elif device_record.kind == PARTITION and not device_record.admin and device_record.device_uuid in readable:
            device = devices[device_record.device_uuid]
            partition = partition_of(device, device_record)
            if partition is None or not partition.uuid:
                found.append((device_record, _partition_gone(device_record, device)))
        elif active is not None and device_record.fabric and device_record.fabric[NUMBER_KEY] not in active:
            found.append((device_record, _fabric_inactive(device_record)))
    return tuple(found)


def _device_gone(device_record: DeviceRecord, gone: Collection[str]) -> Sign:
    return Sign(
        DEVICE_GONE,
        Severity.FAILED,
        f"{device_record.name}: device {', '.join(gone)} is not on this node any more.",
        f"Plug the device in again, or delete the pod. {_RESTART}",
        value=device_record.name,
    )


def _fabric_inactive(device_record: DeviceRecord) -> Sign:
    return Sign(
        FABRIC_INACTIVE,
        Severity.FAILED,
        f"{device_record.name}: partition {device_record.fabric[NUMBER_KEY]} of the fabric is not active any more. The fabric manager was probably restarted.",
        "The driver activates it again. Restart the pod's containers afterwards: their devices were not connected.",
        value=device_record.name,
    )


def _partition_gone(device_record: DeviceRecord, device: Device) -> Sign:
    uuid = device_record.partition_uuid or device_record.name
    remedy = (
        "The driver creates it again."
        if device_record.created
        else "Create it again, as in the layout, or delete the pod."
    )
    return Sign(
        PARTITION_GONE,
        Severity.FAILED,
        f"{device_record.name}: partition {uuid} of {device.describe()} does not exist any more.",
        f"{remedy} {_RESTART}",
        value=device_record.name,
    )


#: The maximum number of characters in a condition's message.
LONGEST_MESSAGE = 4096


@dataclass(frozen=True)
class DeviceKey:
    """The fields that identify a device's entry in the status of a claim."""

    pool: str
    device: str
    share_id: str = ""


@dataclass(frozen=True)
class AwaitedClaim:
    """A claim whose allocation has devices of this driver and pool with binding conditions.

    The scheduler waits for conditions of ``devices`` before it binds the pod. For the devices in ``unreported``, the claim's
    status has no condition yet that ends the wait. ``allocated_at`` identifies the allocation of the claim.
    """

    claim: ClaimReference
    devices: tuple[DeviceKey, ...]
    unreported: tuple[DeviceKey, ...]
    allocated_at: str = ""


def awaited_claim(claim: Mapping[str, Any], driver: str, pool: str) -> AwaitedClaim | None:
    """Parse a claim. Return None if the scheduler does not wait for a device of this driver and pool."""
    status = claim.get("status") or {}
    allocation = status.get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    awaited = {
        DeviceKey(str(each["pool"]), str(each["device"]), str(each.get("shareID") or "")): {
            *each["bindingConditions"],
            *(each.get("bindingFailureConditions") or ()),
        }
        for each in results
        if each.get("driver") == driver and each.get("pool") == pool and each.get("bindingConditions")
    }
    if not awaited:
        return None
    reported_conditions = {
        DeviceKey(str(each.get("pool")), str(each.get("device")), str(each.get("shareID") or "")): {
            condition.get("type") for condition in each.get("conditions") or () if condition.get("status") == "True"
        }
        for each in status.get("devices") or ()
        if each.get("driver") == driver
    }
    metadata = claim["metadata"]
    return AwaitedClaim(
        claim=ClaimReference(str(metadata.get("namespace", "")), str(metadata["name"]), str(metadata["uid"])),
        devices=tuple(awaited),
        unreported=tuple(
            place for place, conditions in awaited.items() if not conditions & reported_conditions.get(place, set())
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

    ``data`` of an entry contains the UUID and the attributes of the device, the claim's settings and sharing configuration,
    and the capacity that the claim consumes of a shared device. So an exporter can find the devices of a pod. ``missing``
    are the missing devices of all claims, which are not ready.
    """
    gone = {each.device_record.cdi_id: each for each in missing if each.uid == record.uid}
    return [
        _prepared_entry(driver, record, device, offers.get(device.name), store, gone.get(device.cdi_id))
        for device in record.devices
    ]


def failed_entries(
    driver: str, devices: Iterable[DeviceKey], reason: str, message: str, now: float
) -> list[dict[str, Any]]:
    """Return the entries that end the scheduler's wait for devices that cannot be prepared.

    ``reason`` is an error's code.
    """
    condition_reason = _reason(reason)
    found = []
    for place in devices:
        conditions = [
            _condition(FAILED_CONDITION, True, condition_reason, message, now),
            _condition(READY_CONDITION, False, condition_reason, message, now),
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
    conditions = [_condition(READY_CONDITION, True, "Prepared", "The device is prepared on its node.", since)]
    if missing is not None:
        reason = _reason(missing.sign.cause)
        conditions = [_condition(READY_CONDITION, False, reason, missing.sign.describe(), missing.since)]
    if offer is not None and offer.prepared_before_binding:
        conditions.insert(0, _condition(PREPARED_CONDITION, True, "Prepared", "The pod can be bound.", since))
    attributes = {
        name: _plain(value) for name, value in sorted((offer.attributes if offer is not None else {}).items())
    }
    data = {
        **({"uuids": list(device.members)} if device.members else {"uuid": device.device_uuid}),
        **attributes,
        **({"uuid": device.partition_uuid} if device.partition_uuid else {}),
        # After the loss of its store and files, the driver recognizes its partition by this value.
        **({CREATED_KEY: True} if device.created and device.partition_uuid else {}),
        # If the value matches the current store, a claim that is missing in the store was released.
        STORE_KEY: store,
        **({ACTIVATED_KEY: device.fabric[NUMBER_KEY]} if device.fabric.get(ACTIVATED_BY_DRIVER_KEY) else {}),
        **({"settings": dict(device.settings)} if device.settings else {}),
        **({"sharing": dict(device.sharing)} if device.sharing else {}),
        **({"consumed": dict(device.consumed)} if device.consumed else {}),
    }
    place = DeviceKey(device.pool, device.name, device.share_id)
    return {**_identity(driver, place), "conditions": conditions, "data": data}


def _identity(driver: str, place: DeviceKey) -> dict[str, str]:
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
