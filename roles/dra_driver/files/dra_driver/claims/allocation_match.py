# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare the prepared devices of a claim with its current allocation."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.errors import InUse
from ..core.model import Device
from .allocation import Allocation
from .records import ClaimRecord
from .startup_recovery import droppable, users

# Request, pool, device, and share of each device.
Given = frozenset[tuple[str, str, str, str]]


def prepared_for(record: ClaimRecord) -> Given:
    """Return the prepared devices."""
    return frozenset((held.request, held.pool, held.name, held.share_id) for held in record.devices)


def given_to(allocation: Allocation) -> Given:
    """Return the currently allocated devices."""
    return frozenset((each.request, each.pool, each.device, each.share_id) for each in allocation.devices)


def reallocated(record: ClaimRecord, allocation: Allocation) -> bool:
    """Return whether the allocation of a prepared claim has changed."""
    return prepared_for(record) != given_to(allocation)


def refuse_in_use(
    record: ClaimRecord, allocation: Allocation, devices: Mapping[str, Device], faults: Mapping[str, str]
) -> None:
    """Refuse to undo a claim with a changed allocation while its previous devices are, or may be, in use.

    Raises InUse with both allocations and the processes.
    """
    if droppable(record, devices) and not faults:
        return
    pids = users(record, devices)
    before, now = (
        ", ".join(sorted(name for _request, _pool, name, _share in each)) or "nothing"
        for each in (prepared_for(record), given_to(allocation))
    )
    why = (
        "; ".join(f"{uuid}: {text}" for uuid, text in faults.items()) or f"processes {', '.join(map(str, pids))} use it"
    )
    raise InUse(
        f"Claim {record.describe()} was prepared with {before}, and {now} is allocated now. Its previous devices cannot be unprepared: {why}",
        pids=pids,
        claims=(record.describe(),),
        hint="Delete the pods that use the claim. It is prepared again when nothing uses the previous devices.",
        code="allocation-changed",
    )
