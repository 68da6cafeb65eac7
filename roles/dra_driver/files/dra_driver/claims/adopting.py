# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Takes up again what was prepared for claims whose records and CDI files are lost. What to do is decided in ``lost.py``.

The kubelet asks again for claims of pods that start or end, and says their names; the API server is asked by these. While it does not
answer nothing is taken for left over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..api.client import ApiError
from ..core.errors import AcceleratorError, InUse
from ..core.model import Device
from ..deadlines import within
from ..logs import fields
from .allocation import Allocation, ClaimError, allocated_here, decode_allocation
from .fabric import found_again, whole_devices
from .lost import has_unknown_partitions, is_found_again, noted_with, unknown_fabric_partitions
from .plan import Inventory, offers_of
from .records import ClaimRecord, ClaimReference
from .settings import fit_settings, wanted_of
from .store_tables import Change

if TYPE_CHECKING:
    from .service import ClaimService

LOG = logging.getLogger(__name__)

# How long the API server may take to say what has become of a claim.
ANSWER_SECONDS = 5.0


class Adopting:
    """Finds claims of one driver again."""

    def __init__(self, service: ClaimService, inventory: Callable[[], Inventory], boot_id: str) -> None:
        self._service = service
        self._inventory = inventory
        self._boot_id = boot_id

    async def adopt(
        self, record: ClaimRecord, allocation: Allocation, facts: Mapping[str, Device]
    ) -> ClaimRecord | None:
        """Write the record of a claim that was prepared and of which the store knows nothing; None where nothing of it is there.

        ``record`` is what it would be prepared as, by its ``allocation`` and the ``facts`` of its devices, whose locks are held. It is written as prepared,
        and suspect: whoever asks for it has it made complete. Raises AcceleratorError.
        """
        service = self._service
        record = await self._with_lost_fabric(record, allocation, facts)
        knobs = await service.thread(service.hands.knobs, record) if wanted_of(record) else {}
        record = fit_settings(record, knobs)
        companions: frozenset[str] = frozenset()
        if record.shared and service.hands.backend.has_companions:
            companions = await service.thread(service.hands.keeper.claims)
        if record.away or not is_found_again(
            record,
            knobs,
            has_companions=record.uid in companions,
            is_of_this_store=allocation.is_told_by(service.store.identity),
        ):
            return None
        record = record.as_prepared(record.devices, self._boot_id)
        service.suspect.add(record.uid)
        await service.store.commit(Change(put=record, meta=noted_with(record, service.store.meta, self._boot_id)))
        service.metrics.finding("claim-found-again")
        LOG.warning(
            "the claim's record and its CDI file were lost: what was prepared for it is taken up again",
            extra=fields(claim=record.describe(), uid=record.uid, devices=[held.name for held in record.devices]),
        )
        return record

    async def _with_lost_fabric(
        self, record: ClaimRecord, allocation: Allocation, facts: Mapping[str, Device]
    ) -> ClaimRecord:
        """Return the record with the active partition of the fabric that the driver activated for the claim, from the status of a lost store.

        The record is returned as it is if the partition is not active, and if other claims can share it: they may be lost as well.
        Raises BackendUnavailable.
        """
        hands, number = self._service.hands, allocation.told_fabric_partition
        if (
            number is None
            or allocation.is_told_by(self._service.store.identity)
            or any(held.share_id for held in record.devices)
            or not hands.needs_fabric_partition(record)
        ):
            return record
        found = await self._service.thread(hands.fabric.find, whole_devices(record, facts))
        return found_again(record, number) if found == (number, True) else record

    async def adopt_ending(self, reference: ClaimReference) -> ClaimRecord | None:
        """Find a claim again that is to be unprepared; None where nothing of it is there.

        Raises AcceleratorError where the API server does not answer and a partition is there that may be the claim's, and
        BackendUnavailable where the claim was prepared here and the hardware does not answer yet.
        """
        service = self._service
        try:
            claim = await self._read(reference)
        except AcceleratorError as error:
            partitions = service.hands.backend.fabric_partitions
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
                    hint="It is asked again when the kubelet calls again.",
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
            # Another claim of that name; none of this node's; or another claim has what it had, so that it was given back before.
            LOG.debug("nothing is left of claim %s: %s", reference.uid, error)
            return None

    async def of_no_claim(self, uids: Collection[str], pool: str) -> tuple[str, ...]:
        """Return those UIDs, of claims that the store does not know, whose companions are to end: the API server has no such claim here.

        Companions tell their claim's name; of one that tells none (a release before wrote none) there is nobody to ask for.
        """
        service, found = self._service, []
        for uid in uids:
            reference = await service.thread(service.hands.keeper.claim_named, uid)
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
        """Return a claim, empty for one that the API server has not. Raises AcceleratorError."""
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
