# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepare a claim on a device that may reject a partition although the counters allow it.

After a rejection the driver tries these steps in order. It reads the device again, because another program may have
created a partition. If partitions have numbers instead of placements, it tries other numbers. It destroys the driver's
leftover partitions, and temporarily those of claims whose pod is not bound yet, so that the free capacity is
contiguous. If all steps fail, the claim is refused, and the device is tainted for a while. A placement is never
replaced by another one, because the scheduler counts placements by the device's name.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..core.errors import AcceleratorError, DoesNotFit
from ..core.model import Device, Placement
from ..logs import fields
from ..metrics import Stopwatch
from .allocation import Allocation
from .operations import ClaimOperations
from .plan import Inventory, PreparePlan
from .records import ClaimRecord
from .refusals import PartitionRefused, Refusals, clearance

LOG = logging.getLogger(__name__)

#: How many other numbers are tried. A further rejection is not due to the number.
MOST_NUMBERS = 2


class PlacementRetry:
    """Prepare claims of one driver. The caller holds the locks of a claim's devices."""

    def __init__(self, service: ClaimOperations, refusals: Refusals, inventory: Callable[[], Inventory]) -> None:
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
        """Prepare a claim as planned, or by one of the other steps.

        ``tried`` returns the result of an attempt with this plan that has already started. Raises AcceleratorError;
        PartitionRefused if no step is left.
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
                    raise self._refused(refusal, facts) from None  # the rejection's text is logged
                self._note_made(plan)
                return record
        finally:
            for waiting in cleared:
                await self._bring_back(waiting)

    def _note_made(self, plan: PreparePlan) -> None:
        for name in {device.name for device in plan.creates}:
            offer = self._inventory().offers.get(name)  # a scan may have removed it
            if offer is not None:
                self._refusals.made(offer)

    async def _clear(
        self, plan: PreparePlan, refusal: PartitionRefused, facts: Mapping[str, Device]
    ) -> tuple[ClaimRecord, ...]:
        """Destroy the partitions on the rejecting device that may be destroyed. Return the affected claims."""
        service, store = self._service, self._service.store
        others = [record for record in store.claims.values() if record.uid != plan.record.uid]
        found = clearance(facts, refusal.held.device_uuid, others, service.ahead)
        if not found:
            return ()
        # From now on a call of the kubelet for one of these claims restores it first, once the locks of its devices are
        # free.
        service.suspect.update(record.uid for record in found.movable)
        names = [record.describe() for record in (*found.leftovers, *found.movable)]
        LOG.warning("destroying unused partitions to make free space contiguous", extra=fields(claims=names))
        try:
            for record in found.leftovers:
                await service.undo(record)
            await service.thread(service.hardware.destroy, found.destructions)
        except AcceleratorError as error:
            LOG.warning("cannot destroy all of these partitions: %s", error)
        return (*found.leftovers, *found.movable)

    async def _bring_back(self, record: ClaimRecord) -> None:
        """Restore a claim whose partitions were temporarily destroyed. Leftover claims are not restored."""
        service = self._service
        now = service.store.claims.get(record.uid)
        if now is None or not now.prepared:
            return
        try:
            await service.make_again(now, Stopwatch(service.metrics, "restore", record.kind))
        except AcceleratorError as error:
            # Its pod is not bound yet. The next call of the kubelet for the claim retries this.
            LOG.warning("claim %s is not prepared any more: %s", record.describe(), error)
            service.reporter.failed(record.reference, "Restore", error)

    def _refused(self, refusal: PartitionRefused, facts: Mapping[str, Device]) -> PartitionRefused:
        """Record a final rejection, and return an error with its consequences."""
        held = refusal.held
        self._service.metrics.finding("partition-refused")
        hint = f"{refusal.hint} Delete a pod that is already bound to this node: its claim is then allocated again, on another node."
        offer = self._inventory().offers.get(held.name)
        if offer is not None:
            seconds = self._refusals.note(offer, facts[held.device_uuid])
            hint += (
                f" New claims are kept from it for {seconds:.0f} s, or until a partition of the device is destroyed."
            )
        return PartitionRefused(DoesNotFit(refusal.message, blockers=refusal.blockers, hint=hint.strip()), held)


def _about(plan: PreparePlan, refusal: PartitionRefused) -> dict[str, dict[str, Any]]:
    return fields(claim=plan.record.describe(), device=refusal.held.name)
