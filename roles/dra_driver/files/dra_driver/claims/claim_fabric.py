# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Partitions of the machine's fabric: the partition of a claim, its activation, and its deactivation. No side effects.

The fabric connects devices, and a fabric partition isolates a group of them. The whole devices of a claim, for containers
or virtual machines, must be exactly one partition. The driver deactivates a partition that it activated when the last
claim with it ends. A partition that was active before its first claim belongs to an administrator, and stays active.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..core.errors import AcceleratorError
from ..core.model import DEVICE, PASSTHROUGH, Device
from ..core.settings.knobs import PERSISTENCE
from .pending_cleanups import PendingDeactivation, fabric_cleanups_in
from .plan import PreparePlan
from .store.records import ClaimRecord, DeviceRecord

# The keys of a device's ``fabric``: the partition's number, and whether the driver activates and deactivates it.
NUMBER_KEY, ACTIVATED_BY_DRIVER_KEY = "partition", "activated"


def _is_whole(device_record: DeviceRecord) -> bool:
    return device_record.kind in (DEVICE, PASSTHROUGH) and not device_record.admin


def has_whole_devices(record: ClaimRecord) -> bool:
    """Return whether a claim has devices that must be a partition of the fabric."""
    return any(_is_whole(device_record) for device_record in record.devices)


def whole_devices(record: ClaimRecord, facts: Mapping[str, Device]) -> tuple[Device, ...]:
    """Return the devices of a claim that must be a partition of the fabric, each once."""
    found = {
        device_record.device_uuid: device_record.facts or facts[device_record.device_uuid]
        for device_record in record.devices
        if _is_whole(device_record) and (device_record.passthrough or device_record.device_uuid in facts)
    }
    return tuple(found.values())


def fabric_partition_of(record: ClaimRecord) -> int | None:
    """Return the number of a claim's fabric partition, or None."""
    return next(
        (int(device_record.fabric[NUMBER_KEY]) for device_record in record.devices if device_record.fabric), None
    )


def is_activated_by_driver(record: ClaimRecord) -> bool:
    """Return whether the driver activates and deactivates a claim's partition."""
    return any(device_record.fabric.get(ACTIVATED_BY_DRIVER_KEY) for device_record in record.devices)


def with_partition(plan: PreparePlan, number: int, is_active: bool, others: Iterable[ClaimRecord]) -> PreparePlan:
    """Return the plan with the fabric partition that consists of its whole devices.

    The vendor's driver must close the devices before the activation, so persistence is disabled for the duration of the
    claim.
    """
    activated_by_driver = (
        not is_active
        or is_activated_by_driver(plan.record)
        or any(is_activated_by_driver(other) for other in others if fabric_partition_of(other) == number)
    )
    return replace(plan, record=_with_number(plan.record, number, activated_by_driver=activated_by_driver))


def with_activated_partition(record: ClaimRecord, number: int) -> ClaimRecord:
    """Return the record of a lost claim, with the active partition that the driver activated for it."""
    return _with_number(record, number, activated_by_driver=True)


def _with_number(record: ClaimRecord, number: int, *, activated_by_driver: bool) -> ClaimRecord:
    devices = tuple(
        device_record.with_changes(
            fabric={NUMBER_KEY: number, ACTIVATED_BY_DRIVER_KEY: activated_by_driver},
            settings={**device_record.settings, PERSISTENCE: False} if activated_by_driver else device_record.settings,
        )
        if _is_whole(device_record)
        else device_record
        for device_record in record.devices
    )
    return replace(record, devices=devices)


def claimed_partitions(records: Iterable[ClaimRecord], meta: Mapping[str, str], boot_id: str) -> frozenset[int]:
    """Return the partitions that are active for prepared claims of this boot, and those whose deactivation is pending."""
    active = {fabric_partition_of(record) for record in records if record.prepared and record.boot_id == boot_id}
    pending = {cleanup.number for cleanup in fabric_cleanups_in(meta, boot_id)}
    return frozenset(number for number in active | pending if number is not None)


def to_activate(record: ClaimRecord) -> int | None:
    """Return the partition that the driver activates for a claim, or None."""
    return fabric_partition_of(record) if is_activated_by_driver(record) else None


def deactivation_pending_error(rejection: AcceleratorError) -> AcceleratorError:
    """Return the error to report if the fabric manager rejected the deactivation of an ended claim's partition."""
    hint = (
        f"The claim has ended. The driver retries until the deactivation succeeds or the node reboots. {rejection.hint}"
    )
    return AcceleratorError(rejection.message, hint=hint, code=rejection.code)


def pending_deactivation(record: ClaimRecord, rejection: AcceleratorError | None) -> PendingDeactivation | None:
    """Return the deactivation to retry after a claim has ended; None unless the fabric manager rejected it."""
    number = to_activate(record)
    if rejection is None or number is None:
        return None
    return PendingDeactivation(number, frozenset(_whole_uuids(record)))


def to_deactivate(record: ClaimRecord, records: Iterable[ClaimRecord]) -> int | None:
    """Return the partition to deactivate with a claim: one that the driver activated, without devices of other claims.

    ``records`` are the claims of this boot. Those of a previous boot have no active partition.
    """
    own_uuids = _whole_uuids(record)
    is_shared = any(own_uuids & _whole_uuids(other) for other in records if other.uid != record.uid)
    return None if is_shared else to_activate(record)


def _whole_uuids(record: ClaimRecord) -> set[str]:
    return {uuid for device_record in record.devices if _is_whole(device_record) for uuid in device_record.device_uuids}
