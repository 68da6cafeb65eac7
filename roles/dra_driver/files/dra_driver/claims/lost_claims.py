# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Restore claims whose records and CDI files are lost, from the claims' statuses and the devices.

The status contains the prepared devices and the partitions that were created for the claim (``claim_statuses.py`` writes
it). The kubelet calls with the names of claims when pods start or end, and the driver reads these claims by name, so it
needs no right to list claims. While the API server does not answer, no device is treated as a leftover.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ..api.client import ApiError
from ..core.errors import AcceleratorError, InUse
from ..core.model import PARTITION, Device
from ..core.settings.knobs import Knob
from ..deadlines import within
from ..logs import fields
from .allocation import Allocation, ClaimError, allocated_here, decode_allocation
from .claim_fabric import found_again, is_ours, partition_of, whole_devices
from .configs import fit_settings, forgotten, wanted_of
from .operations import ClaimOperations
from .plan import PARTITIONING_KEY, Inventory, offers_of
from .store.records import ClaimRecord, ClaimReference
from .store.tables import Change


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


LOG = logging.getLogger(__name__)

# The timeout for a read of a claim from the API server, in seconds.
ANSWER_SECONDS = 5.0


class LostClaimRecovery:
    """Restore lost claims of one driver."""

    def __init__(self, service: ClaimOperations, inventory: Callable[[], Inventory], boot_id: str) -> None:
        self._service = service
        self._inventory = inventory
        self._boot_id = boot_id

    async def adopt(
        self, record: ClaimRecord, allocation: Allocation, facts: Mapping[str, Device]
    ) -> ClaimRecord | None:
        """Write the record of a claim that was prepared and is missing in the store.

        Return None if nothing of the claim exists. ``record`` is the planned record, from its ``allocation`` and the
        ``facts`` of its devices, whose locks are held. It is written as prepared and marked as suspect, so that the
        next call for the claim completes it. Raises AcceleratorError.
        """
        service = self._service
        record = await self._with_lost_fabric(record, allocation, facts)
        knobs = await service.thread(service.hardware.knobs, record) if wanted_of(record) else {}
        record = fit_settings(record, knobs)
        companions: frozenset[str] = frozenset()
        if record.shared and service.hardware.backend.has_companions:
            companions = await service.thread(service.hardware.companion_services.claims)
        if record.passthrough_devices or not is_found_again(
            record,
            knobs,
            has_companions=record.uid in companions,
            is_of_this_store=allocation.is_from_store(service.store.identity),
        ):
            return None
        record = record.as_prepared(record.devices, self._boot_id)
        service.suspect.add(record.uid)
        await service.store.commit(Change(put=record, meta=noted_with(record, service.store.meta, self._boot_id)))
        service.metrics.finding("claim-found-again")
        LOG.warning(
            "restored the claim from its devices, because its record and its CDI file were lost",
            extra=fields(claim=record.describe(), uid=record.uid, devices=[held.name for held in record.devices]),
        )
        return record

    async def _with_lost_fabric(
        self, record: ClaimRecord, allocation: Allocation, facts: Mapping[str, Device]
    ) -> ClaimRecord:
        """Return the record with the active fabric partition that the driver activated for the claim, from the status of a lost store.

        The record is returned unchanged if the partition is not active, or if other claims can share it: they may be
        lost as well. Raises BackendUnavailable.
        """
        hardware, number = self._service.hardware, allocation.published_fabric_partition
        if (
            number is None
            or allocation.is_from_store(self._service.store.identity)
            or any(held.share_id for held in record.devices)
            or not hardware.needs_fabric_partition(record)
        ):
            return record
        found = await self._service.thread(hardware.fabric.find, whole_devices(record, facts))
        return found_again(record, number) if found == (number, True) else record

    async def adopt_ending(self, reference: ClaimReference) -> ClaimRecord | None:
        """Restore a claim that is about to be unprepared. Return None if nothing of the claim exists.

        Raises AcceleratorError if the API server does not answer and a partition exists that can be the claim's. Raises
        BackendUnavailable if the claim was prepared here and the hardware does not answer yet.
        """
        service = self._service
        try:
            claim = await self._read(reference)
        except AcceleratorError as error:
            partitions = service.hardware.backend.fabric_partitions
            active = partitions.active if partitions is not None else None
            fabric = unknown_fabric_partitions(active, service.store.claims.values())
            if has_unknown_partitions(self._inventory()) or fabric:
                what = (
                    f"fabric partitions {sorted(fabric)} of no known claim are"
                    if fabric
                    else "a partition of no known claim is"
                )
                raise AcceleratorError(
                    f"Nothing is known of claim {reference.describe()}, {what} there, and the API server "
                    f"does not say whether it was made for the claim: {error.message}",
                    hint="The driver reads the claim again at the kubelet's next call.",
                    code=error.code,
                ) from error
            return None
        try:
            allocation = decode_allocation(claim, reference, service.driver)
            if not allocation.was_prepared:
                return None
            await service.wait_until_ready()
            offers = offers_of(allocation, self._inventory())
            uuids = {uuid for offer in offers.values() for uuid in offer.device_uuids}
            async with service.holding(uuids):
                facts = await service.facts(reference, uuids)
                return await self.adopt(service.plan(allocation, facts).record, allocation, facts)
        except (ClaimError, InUse) as error:
            # Another claim has this name, or it has no devices here, or another claim uses its devices, so that it was
            # released.
            LOG.debug("nothing is left of claim %s: %s", reference.uid, error)
            return None

    async def of_no_claim(self, uids: Collection[str], pool: str) -> tuple[str, ...]:
        """Return the UIDs of unknown claims whose companions must stop, because the API server has no such claim on this node.

        Companions contain their claim's name. Those of earlier releases do not, so their claim cannot be read.
        """
        service, found = self._service, []
        for uid in uids:
            reference = await service.thread(service.hardware.companion_services.claim_named, uid)
            if reference is None or not await self.may_be_here(reference, pool):
                found.append(uid)
        return tuple(found)

    async def may_be_here(self, reference: ClaimReference, pool: str) -> bool:
        """Return whether the API server has a claim with devices of this pool. True as well if it does not answer."""
        try:
            claim = await self._read(reference)
        except AcceleratorError as error:
            LOG.warning("claim %s is kept until the API server answers: %s", reference.uid, error)
            return True
        return allocated_here(claim, reference.uid, self._service.driver, pool)

    async def _read(self, reference: ClaimReference) -> Mapping[str, Any]:
        """Return a claim, or an empty mapping if the API server does not have it. Raises AcceleratorError."""
        read = self._service.source.claim(reference.namespace, reference.name)
        try:
            return await within(read, ANSWER_SECONDS)
        except asyncio.TimeoutError:
            raise AcceleratorError(
                f"The API server did not answer within {ANSWER_SECONDS:.0f} s", code="api-unreachable"
            ) from None
        except ApiError as error:
            if error.is_not_found:
                return {}
            raise
