# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepares a claim on devices that may refuse a partition although all that is counted allows it.

What can be done is done in order: the device is looked at again, because somebody else may have made a partition since; another
number is taken, where partitions have numbers and no places; what of the driver's own is left over on the device, or waits for a pod
that is not bound yet, is taken away for a moment, so that what is free lies together. Then the claim is refused, and what cannot be
made is kept from others for a while. A place is never exchanged for another one: the scheduler counts the places by the device's name.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import AcceleratorError, DoesNotFit
from ..core.model import Device, Placement
from ..logs import fields
from ..metrics import Stopwatch
from .allocation import Allocation
from .plan import Inventory, PreparePlan
from .records import ClaimRecord
from .refusals import PartitionRefused, Refusals, clearance

if TYPE_CHECKING:
    from .service import ClaimService

LOG = logging.getLogger(__name__)

#: How many other numbers are tried. What is refused with these is not refused for its number.
MOST_NUMBERS = 2


class Insisting:
    """Prepares claims of one driver. The locks of a claim's devices are the caller's."""

    def __init__(self, service: ClaimService, refusals: Refusals, inventory: Callable[[], Inventory]) -> None:
        self._service = service
        self._refusals = refusals
        self._inventory = inventory

    async def prepare(
        self,
        allocation: Allocation,
        plan: PreparePlan,
        facts: Mapping[str, Device],
        watch: Stopwatch,
        tried: Callable[[], Awaitable[ClaimRecord]] | None = None,
    ) -> ClaimRecord:
        """Prepare a claim as planned, or in another of the ways that there are. ``tried`` returns, or raises, what came of the plan.

        Raises AcceleratorError; PartitionRefused when there is none.
        """
        refused: set[tuple[str, Placement]] = set()
        cleared: list[ClaimRecord] = []
        has_cleared = False
        try:
            while True:
                try:
                    if tried is not None:
                        first, tried = tried, None
                        record = await first()
                    else:
                        record = await self._service.carry_out(plan, facts, watch)
                except PartitionRefused as refusal:
                    LOG.warning("a partition is refused that should fit: %s", refusal, extra=_about(plan, refusal))
                    facts = await self._service.facts(plan.record.reference, facts)
                    placement = refusal.held.placement
                    if placement is not None and placement.is_number and len(refused) < MOST_NUMBERS:
                        refused.add((refusal.held.device_uuid, placement))
                        plan = self._service.plan(allocation, facts, refused)
                        continue
                    if not has_cleared:
                        has_cleared = True
                        cleared += await self._clear(plan, refusal, facts)
                        facts = await self._service.facts(plan.record.reference, facts)
                        if cleared:
                            plan = self._service.plan(allocation, facts, refused)
                            continue
                    raise self._refused(refusal, facts) from None  # all that the refusal says is logged
                self._note_made(plan)
                return record
        finally:
            for waiting in cleared:
                await self._bring_back(waiting)

    def _note_made(self, plan: PreparePlan) -> None:
        for name in {device.name for device in plan.creates}:
            offer = self._inventory().offers.get(name)  # a look may have ended meanwhile
            if offer is not None:
                self._refusals.made(offer)

    async def _clear(
        self, plan: PreparePlan, refusal: PartitionRefused, facts: Mapping[str, Device]
    ) -> tuple[ClaimRecord, ...]:
        """Take away what can be taken away from the device that refuses; return the claims that this was done to."""
        service, store = self._service, self._service.store
        others = [record for record in store.claims.values() if record.uid != plan.record.uid]
        found = clearance(facts, refusal.held.device_uuid, others, service.ahead)
        if not found:
            return ()
        # From here on who asks for one of them has it made again, once the locks of its devices are free.
        service.suspect.update(record.uid for record in found.movable)
        names = [record.describe() for record in (*found.leftovers, *found.movable)]
        LOG.warning("taken away, so that what is free lies together", extra=fields(claims=names))
        try:
            for record in found.leftovers:
                await service.undo(record)
            await service.thread(service.hands.destroy, found.destructions)
        except AcceleratorError as error:
            LOG.warning("not all of it could be taken away: %s", error)
        return (*found.leftovers, *found.movable)

    async def _bring_back(self, record: ClaimRecord) -> None:
        """Make the partitions of a claim again that were taken away for a moment. What was left over stays away."""
        service = self._service
        now = service.store.claims.get(record.uid)
        if now is None or not now.prepared:
            return
        try:
            await service.make_again(now, Stopwatch(service.metrics, "restore", record.kind))
        except AcceleratorError as error:
            # Its pod is not bound yet, and when the kubelet asks for it this is tried again.
            LOG.warning("claim %s is not prepared any more: %s", record.describe(), error)
            service.reporter.failed(record.reference, "Restore", error)

    def _refused(self, refusal: PartitionRefused, facts: Mapping[str, Device]) -> PartitionRefused:
        """Take note of what a device refuses for good, and return the error that says what follows."""
        held = refusal.held
        self._service.metrics.finding("partition-refused")
        hint = f"{refusal.hint} A pod that is bound to this node already goes elsewhere when it is deleted: its claim is allocated anew then."
        offer = self._inventory().offers.get(held.name)
        if offer is not None:
            seconds = self._refusals.note(offer, facts[held.device_uuid])
            hint += f" New claims are kept from it for {seconds:.0f} s, or until a partition has gone from the device."
        return PartitionRefused(DoesNotFit(refusal.message, blockers=refusal.blockers, hint=hint.strip()), held)


def _about(plan: PreparePlan, refusal: PartitionRefused) -> dict[str, dict[str, Any]]:
    return fields(claim=plan.record.describe(), device=refusal.held.name)
