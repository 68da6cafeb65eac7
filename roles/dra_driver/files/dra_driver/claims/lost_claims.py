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
from .claim_fabric import fabric_partition_of, is_activated_by_driver, whole_devices, with_activated_partition
from .configs import default_setting_entries, fit_settings, settings_by_uuid
from .operations import ClaimOperations
from .plan import PARTITIONING_KEY, Inventory, offers_by_device
from .store.records import ClaimRecord, ClaimReference
from .store.tables import Change

LOG = logging.getLogger(__name__)

# The timeout for a read of a claim from the API server, in seconds.
ANSWER_SECONDS = 5.0


def is_found_again(
    record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]], *, has_companions: bool, is_of_this_store: bool
) -> bool:
    """Return whether the changes for a claim exist that was prepared according to its status, but is missing in the store.

    ``record`` is the planned record, with an active fabric partition if the status of a lost store contains it.
    ``knobs`` are the settings that the claim changes. A claim that was prepared and released since has left neither
    partitions nor companions.

    ``is_of_this_store`` is whether the current store wrote the status. It has lost nothing, so the claim was released. Then
    settings do not count, because they can be the device's default, or an administrator's choice. With the status of a lost
    store, settings that cannot be read count as changed by the claim.
    """
    if any(
        device_record.created and device_record.partition_uuid for device_record in record.devices
    ) or is_activated_by_driver(record):
        return True
    if record.shared and has_companions:
        return True
    wanted = settings_by_uuid(record) if not is_of_this_store else {}
    return bool(wanted) and all(
        knobs[uuid][name].value in (None, value)
        for uuid, values in wanted.items()
        for name, value in values.items()
        if name in knobs.get(uuid, {})
    )


def meta_entries_for(record: ClaimRecord, meta: Mapping[str, str], boot_id: str) -> dict[str, str]:
    """Return the entries of the meta table for a restored claim, as in a rebuilt store."""
    marks = {
        f"{PARTITIONING_KEY}{device_record.device_uuid}": boot_id
        for device_record in record.devices
        if device_record.created
    }
    return {**marks, **default_setting_entries([record], meta, boot_id)}


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
    return frozenset(active or ()) - {fabric_partition_of(record) for record in records}


class LostClaimRecovery:
    """Restore lost claims of one driver."""

    def __init__(self, service: ClaimOperations, inventory: Callable[[], Inventory], boot_id: str) -> None:
        self._service = service
        self._inventory = inventory
        self._boot_id = boot_id

    async def restore_record(
        self, record: ClaimRecord, allocation: Allocation, facts: Mapping[str, Device]
    ) -> ClaimRecord | None:
        """Write the record of a claim that was prepared and is missing in the store, and return it.

        Return None if no changes for the claim exist. ``record`` is the planned record, from the ``allocation`` and the
        ``facts`` of the devices, whose locks are held. It is written as prepared and marked as suspect, so that the
        next call for the claim completes it. Raises AcceleratorError.
        """
        service = self._service
        record = await self._with_lost_fabric(record, allocation, facts)
        knobs = await service.run_on_thread(service.hardware.knobs, record) if settings_by_uuid(record) else {}
        record = fit_settings(record, knobs)
        companions: frozenset[str] = frozenset()
        if record.shared and service.hardware.backend.has_companions:
            companions = await service.run_on_thread(service.hardware.companion_services.claims)
        if record.passthrough_devices or not is_found_again(
            record,
            knobs,
            has_companions=record.uid in companions,
            is_of_this_store=allocation.is_from_store(service.store.identity),
        ):
            return None
        record = record.as_prepared(record.devices, self._boot_id)
        service.suspect.add(record.uid)
        await service.store.commit(Change(put=record, meta=meta_entries_for(record, service.store.meta, self._boot_id)))
        service.metrics.finding("claim-found-again")
        LOG.warning(
            "restored the claim from its devices, because its record and its CDI file were lost",
            extra=fields(
                claim=record.describe(),
                uid=record.uid,
                devices=[device_record.name for device_record in record.devices],
            ),
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
            or any(device_record.share_id for device_record in record.devices)
            or not hardware.needs_fabric_partition(record)
        ):
            return record
        found = await self._service.run_on_thread(hardware.fabric.find, whole_devices(record, facts))
        return with_activated_partition(record, number) if found == (number, True) else record

    async def restore_record_to_unprepare(self, reference: ClaimReference) -> ClaimRecord | None:
        """Restore the record of a claim, so that it can be unprepared. Return None if no changes for the claim exist.

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
            offers = offers_by_device(allocation, self._inventory())
            uuids = {uuid for offer in offers.values() for uuid in offer.device_uuids}
            async with service.lock_devices(uuids):
                facts = await service.facts(reference, uuids)
                return await self.restore_record(service.plan(allocation, facts).record, allocation, facts)
        except (ClaimError, InUse) as error:
            # The claim was released: another claim has its name or uses its devices, or it has no devices here.
            LOG.debug("nothing is left of claim %s: %s", reference.uid, error)
            return None

    async def uids_without_claim(self, uids: Collection[str], pool: str) -> tuple[str, ...]:
        """Return the UIDs of unknown claims whose companions must stop, because the API server has no such claim on this node.

        Companions contain their claim's name. Those of earlier releases do not, so their claim cannot be read.
        """
        service, found = self._service, []
        for uid in uids:
            reference = await service.run_on_thread(service.hardware.companion_services.claim_named, uid)
            if reference is None or not await self.may_exist_here(reference, pool):
                found.append(uid)
        return tuple(found)

    async def may_exist_here(self, reference: ClaimReference, pool: str) -> bool:
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
