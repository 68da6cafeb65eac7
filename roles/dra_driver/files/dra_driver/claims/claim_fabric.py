# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Partitions of the machine's fabric: which one a claim has, who activated it, and when it is deactivated.

No side effects. A claim's whole devices, for containers or virtual machines, must be exactly one partition. The driver
deactivates a partition that it activated when the last claim with it ends. A partition that was active before its first
claim belongs to an administrator, and stays active.
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
NUMBER, OURS = "partition", "activated"


def _is_whole(held: DeviceRecord) -> bool:
    return held.kind in (DEVICE, PASSTHROUGH) and not held.admin


def has_whole_devices(record: ClaimRecord) -> bool:
    """Return whether a claim has devices that must be a partition of the fabric."""
    return any(_is_whole(held) for held in record.devices)


def whole_devices(record: ClaimRecord, facts: Mapping[str, Device]) -> tuple[Device, ...]:
    """Return the devices of a claim that must be a partition of the fabric, each once."""
    found = {
        held.device_uuid: held.facts or facts[held.device_uuid]
        for held in record.devices
        if _is_whole(held) and (held.passthrough or held.device_uuid in facts)
    }
    return tuple(found.values())


def partition_of(record: ClaimRecord) -> int | None:
    """Return the number of a claim's partition; None without one."""
    return next((int(held.fabric[NUMBER]) for held in record.devices if held.fabric), None)


def is_ours(record: ClaimRecord) -> bool:
    """Return whether the driver activates and deactivates a claim's partition."""
    return any(held.fabric.get(OURS) for held in record.devices)


def with_partition(plan: PreparePlan, number: int, is_active: bool, others: Iterable[ClaimRecord]) -> PreparePlan:
    """Return the plan with the fabric partition that consists of its whole devices.

    Before the activation the vendor's driver must not hold the devices open, so persistence is disabled for the
    duration of the claim.
    """
    ours = (
        not is_active
        or is_ours(plan.record)
        or any(is_ours(other) for other in others if partition_of(other) == number)
    )
    return replace(plan, record=_with_number(plan.record, number, ours))


def found_again(record: ClaimRecord, number: int) -> ClaimRecord:
    """Return the record of a lost claim, with the active partition that the driver activated for it."""
    return _with_number(record, number, ours=True)


def _with_number(record: ClaimRecord, number: int, ours: bool) -> ClaimRecord:
    devices = tuple(
        held.but(
            fabric={NUMBER: number, OURS: ours},
            settings={**held.settings, PERSISTENCE: False} if ours else held.settings,
        )
        if _is_whole(held)
        else held
        for held in record.devices
    )
    return replace(record, devices=devices)


def claimed(records: Iterable[ClaimRecord], meta: Mapping[str, str], boot_id: str) -> frozenset[int]:
    """Return the partitions that are active for prepared claims of this boot, and those whose deactivation is pending."""
    held = {partition_of(record) for record in records if record.prepared and record.boot_id == boot_id}
    pending = {cleanup.number for cleanup in fabric_cleanups_in(meta, boot_id)}
    return frozenset(number for number in held | pending if number is not None)


def to_activate(record: ClaimRecord) -> int | None:
    """Return the partition that must be active for a claim; None if the driver does not manage it."""
    return partition_of(record) if is_ours(record) else None


def still_pending(rejection: AcceleratorError) -> AcceleratorError:
    """Return the error to report for a claim that has ended although the fabric manager rejected the deactivation of its partition."""
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
    mine = _whole_uuids(record)
    held = any(mine & _whole_uuids(other) for other in records if other.uid != record.uid)
    return None if held else to_activate(record)


def _whole_uuids(record: ClaimRecord) -> set[str]:
    return {uuid for held in record.devices if _is_whole(held) for uuid in held.device_uuids}
