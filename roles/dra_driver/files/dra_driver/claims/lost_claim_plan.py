# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Decide what exists of a claim whose record and CDI file are lost, from the claim's status and the devices.

No side effects. The status contains the prepared devices and the partitions that were created for the claim
(``claim_statuses.py`` writes it). It is read with the claim, by name, when the kubelet calls for it, so the driver needs no
right to list claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..core.model import PARTITION
from ..core.settings.knobs import Knob
from .claim_fabric import is_ours, partition_of
from .claim_settings import forgotten, wanted_of
from .plan import PARTITIONING_KEY, Inventory
from .records import ClaimRecord


def is_found_again(
    record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]], *, has_companions: bool, is_of_this_store: bool
) -> bool:
    """Return whether something exists of a claim that was prepared according to its status, but is missing in the store.

    ``record`` is the planned record, with an active fabric partition if the status of a lost store contains it.
    ``knobs`` are the settings that the claim changes. A claim that was prepared and released since has left neither
    partitions nor companions.

    A setting does not show who changed it: the value can be the device's default, or an administrator's choice. So
    settings count only if the status is not ``is_of_this_store``: the present store has lost nothing, and a claim that
    is missing in it was released. Settings that cannot be read then count as the claim's, because the previous value is
    the device's default in both cases.
    """
    if any(held.created and held.partition_uuid for held in record.devices) or is_ours(record):
        return True
    if record.shared and has_companions:
        return True
    wanted = wanted_of(record) if not is_of_this_store else {}
    return bool(wanted) and all(
        knobs[uuid][name].value in (None, value)
        for uuid, values in wanted.items()
        for name, value in values.items()
        if name in knobs.get(uuid, {})
    )


def noted_with(record: ClaimRecord, meta: Mapping[str, str], boot_id: str) -> dict[str, str]:
    """Return the entries of the meta table for a restored claim, as in a rebuilt store."""
    marks = {f"{PARTITIONING_KEY}{held.device_uuid}": boot_id for held in record.devices if held.created}
    return {**marks, **forgotten([record], meta, boot_id)}


def has_unknown_partitions(inventory: Inventory) -> bool:
    """Return whether a device that is partitioned on demand has a partition without a known claim.

    It belongs to an administrator, or to a lost claim.
    """
    return any(
        offer.kind == PARTITION and not offer.dynamic and offer.device_uuid in inventory.dynamic
        for offer in inventory.offers.values()
    )


def unknown_fabric_partitions(active: Iterable[int] | None, records: Iterable[ClaimRecord]) -> frozenset[int]:
    """Return the active partitions of the fabric that no known claim has: an administrator's, or those of a lost claim."""
    return frozenset(active or ()) - {partition_of(record) for record in records}
