# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What is left of a claim whose record was lost together with its CDI file: told by the claim's own status and by the devices.

The status says for which devices a claim was prepared, and which partitions were made for it (``statuses.py`` writes it). It is read
with the claim, by its name, when the kubelet asks for it: nobody has to list the claims of a cluster. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..core.model import PARTITION
from ..core.settings import Knob
from .fabric import is_ours, partition_of
from .plan import PARTITIONING_KEY, Inventory
from .records import ClaimRecord
from .settings import forgotten, wanted_of


def is_found_again(
    record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]], *, has_companions: bool, is_of_this_store: bool
) -> bool:
    """Whether there is something of a claim of which the status says that it was prepared, and the store knows nothing.

    ``record`` is what it would be prepared as, with an active partition of the fabric of which the status of a lost store says that the
    driver activated it. ``knobs`` are those that it turns. One that was prepared and given back since, with the
    same devices, has left neither partition nor companions. Settings tell nobody whose they are: the same may be the device's default, or
    an administrator's choice. So they count only where the status is not ``is_of_this_store``: that has lost nothing, and who is not in
    it was given back. Settings that cannot be read are taken for the claim's own then: what was there before is the device's default
    either way.
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
    """Return what the meta table has to say with a claim that is found again: the same as where a store is made anew."""
    marks = {f"{PARTITIONING_KEY}{held.device_uuid}": boot_id for held in record.devices if held.created}
    return {**marks, **forgotten([record], meta, boot_id)}


def has_unknown_partitions(inventory: Inventory) -> bool:
    """Whether a device that is partitioned on demand has a partition of no claim that the store knows of.

    An administrator's is one; so is one whose claim was lost.
    """
    return any(
        offer.kind == PARTITION and not offer.dynamic and offer.device_uuid in inventory.dynamic
        for offer in inventory.offers.values()
    )


def unknown_fabric_partitions(active: Iterable[int] | None, records: Iterable[ClaimRecord]) -> frozenset[int]:
    """Return the active partitions of the fabric that no known claim has: an administrator's, or those of a lost claim."""
    return frozenset(active or ()) - {partition_of(record) for record in records}
