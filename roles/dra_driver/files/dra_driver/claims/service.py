# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepare and unprepare claims: the order of the steps, the locks, and the results for the kubelet.

Prepare of one claim: fetch it, plan, write *preparing*, change the hardware, write the CDI file and *prepared*. If the hardware
needs no change, *preparing* is not written.
Claims of different physical devices run in parallel, short ones one after the other (locking.py). An operation that has started runs
to its end even if the kubelet stops waiting; its next call gets the result. The kubelet times out after 45 seconds and calls again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Callable, TypeVar

from ..api.throttling import is_of_network, retry
from ..core.errors import AcceleratorError, BackendUnavailable
from ..core.repartition.record import Watch
from ..deadlines import within
from ..logs import fields
from ..metrics import Stopwatch
from .allocation import Allocation, decode_allocation
from .call_results import Answers, Outcome
from .claim_fabric import to_activate
from .housekeeping import Housekeeping
from .locking import FairQueue
from .lost_claims import LostClaimRecovery
from .operations import ClaimContext, ClaimOperations
from .plan import (
    offers_of,
    refuse_faulty,
)
from .prepare import PlacementRetry, PrepareCall, PrepareCalls, SingleDevicePrepare
from .refusals import Refusals
from .startup_recovery import reallocated, refuse_in_use
from .store.records import ClaimRecord, ClaimReference

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# How long a read of a prepared claim from the API server can take.
COMPARE_SECONDS = 5.0
# Seconds after the call of the kubelet for which a failed read of a claim is retried. The kubelet waits for 45 s. The rest is for the devices.
RETRY_SECONDS = 30.0


class ClaimService(ClaimOperations):
    """Prepare and unprepare one driver's claims on this node.

    ``refresh`` scans the hardware at once. ``request_scan`` requests a scan, after a lost claim was found and its partitions
    have an owner again. ``repartition`` has the devices that a repartitioning reserves: they get no new claims.
    """

    def __init__(
        self,
        context: ClaimContext,
        *,
        refresh: Callable[[], Awaitable[None]],
        request_scan: Callable[[], None] = lambda: None,
        refusals: Refusals | None = None,
        repartition: Watch | None = None,
    ) -> None:
        super().__init__(context)
        inventory, boot_id = context.inventory, context.boot_id
        self._repartition = repartition
        self._refresh = refresh
        self._request_scan = request_scan
        self._calls = PrepareCalls()
        self._turns = FairQueue()
        self._answers = Answers(context.reporter, context.metrics)
        self._lost_claims = LostClaimRecovery(self, inventory, boot_id)
        self._placements = PlacementRetry(self, refusals or Refusals(), inventory)
        self.housekeeping = Housekeeping(self, self._claims, self._lost_claims, inventory, boot_id)

    async def prepare(self, references: Sequence[ClaimReference]) -> dict[str, Outcome]:
        """Prepare claims. Returns one outcome for each, by UID, and never raises."""
        self.ahead.difference_update(reference.uid for reference in references)
        return await self._answers.to_all(references, "Prepare", self._prepare)

    async def prepare_ahead(self, reference: ClaimReference) -> Outcome:
        """Prepare a claim before the call of the kubelet: its pod is bound afterwards. Never raises."""
        if reference.uid not in self.asked:
            self.ahead.add(reference.uid)
        return (await self._answers.to_all([reference], "Prepare", self._prepare))[reference.uid]

    async def unprepare(self, references: Sequence[ClaimReference]) -> dict[str, Outcome]:
        """Unprepare claims. Returns one outcome for each, by UID, and never raises."""
        return await self._answers.to_all(references, "Unprepare", self._unprepare)

    @property
    def under_way(self) -> int:
        """Return the number of claims with a call of the kubelet in progress."""
        return self._answers.under_way

    async def drain(self, seconds: float) -> None:
        """Wait for operations in progress, for at most ``seconds``."""
        await self._answers.drain(seconds)

    # ------------------------------------------------------------------ prepare

    async def _prepare(self, reference: ClaimReference, watch: Stopwatch) -> ClaimRecord:
        with self._calls.begin(reference) as call:
            return await self._prepare_called(reference, call, watch)

    async def _prepare_called(self, reference: ClaimReference, call: PrepareCall, watch: Stopwatch) -> ClaimRecord:
        asked = time.monotonic()
        with watch.stage("ready"):
            await self.wait_until_ready()
        async with self._claims.hold([reference.uid]):
            call.refuse_outdated()
            record = self.store.claims.get(reference.uid)
            if self.hardware.driver_edits.is_due:  # the read from the API server takes longer than this
                asyncio.get_running_loop().call_soon(self._executor.submit, self.hardware.fill_edits_cache)
            with watch.stage("fetch"):
                allocation = await self._allocation(reference, record, asked)
            if record is not None and record.prepared and (allocation is None or not reallocated(record, allocation)):
                return await self._again(record, allocation, watch)
            assert allocation is not None  # noqa: S101  only a prepared claim goes without
            self.hardware.report_stage("claim-fetched")
            if any(device.device not in self._inventory().offers for device in allocation.devices):
                with watch.stage("refresh"):
                    await self._refresh()
            offers = offers_of(allocation, self._inventory()).values()
            uuids = {uuid for offer in offers for uuid in offer.device_uuids}
            refuse_faulty(reference, uuids, self._inventory().faults)
            former = record.device_uuids if record is not None else ()
            waiting = time.perf_counter()
            async with self._devices.hold([*uuids, *former]):
                watch.add("device-lock", "success", time.perf_counter() - waiting)
                waiting = time.perf_counter()
                async with self._turns.take():
                    watch.add("turn", "success", time.perf_counter() - waiting)
                    # Another claim's Prepare can have changed this record while this one waited for the devices.
                    return await self._prepare_held(self.store.claims.get(reference.uid), allocation, uuids, watch)

    async def _prepare_held(
        self, record: ClaimRecord | None, allocation: Allocation, uuids: set[str], watch: Stopwatch
    ) -> ClaimRecord:
        """Prepare a claim that is not prepared, or was prepared with other devices. The device locks are held."""
        if self._repartition is not None:
            self._repartition.refuse(uuids)
        if record is not None:
            with watch.stage("undo"):
                await self._undo_former(record, allocation)
        may_be_lost = record is None and allocation.was_prepared
        if len(uuids) == 1 and not may_be_lost and not self.unprepare_runner.pending_uuids_on_device & uuids:
            single = SingleDevicePrepare(self, self._runner, allocation, next(iter(uuids)), watch)
            await single.make()
            return await self._placements.prepare(allocation, single.plan, single.facts, watch, single.tried)
        with watch.stage("facts"):
            facts = await self.facts(allocation.claim, uuids)
        plan = self.plan(allocation, facts)
        lost = await self._lost_claims.adopt(plan.record, allocation, facts) if may_be_lost else None
        if lost is not None:
            self.asked.add(lost.uid)
            self._request_scan()
            return await self.make_again(lost, watch) or lost
        return await self._placements.prepare(allocation, plan, facts, watch)

    async def _allocation(
        self, reference: ClaimReference, record: ClaimRecord | None, asked: float
    ) -> Allocation | None:
        """Return the allocation of a claim, or None to keep a prepared claim, because the API server does not answer.

        A claim that was read after the call of the kubelet (``asked``) is not read again: the kubelet sends several calls at once.
        """
        prepared = record is not None and record.prepared
        if prepared and self._compared.get(reference.uid, 0.0) > asked:
            return None
        began = time.monotonic()
        if prepared:
            try:
                claim = await within(self.source.claim(reference.namespace, reference.name), COMPARE_SECONDS)
            except (AcceleratorError, asyncio.TimeoutError):
                return None
        else:
            claim = await retry(
                lambda: self.source.claim(reference.namespace, reference.name),
                asked + RETRY_SECONDS - began,
                when=is_of_network,
            )
        allocation = decode_allocation(claim, reference, self.driver)
        self._compared[reference.uid] = began
        return allocation

    async def _undo_former(self, record: ClaimRecord, allocation: Allocation) -> None:
        """Undo the remains of an earlier call for a claim, or its previous allocation."""
        if record.prepared:
            held = await self.thread(self.hardware.facts, record.device_uuids)
            others = await self.thread(self.hardware.others, record, held.devices)
            refuse_in_use(record, allocation, others, held.faults)
            LOG.info(
                "claim was allocated again: previous devices undone",
                extra=fields(claim=record.describe(), had=[device.name for device in record.devices]),
            )
        await self.undo(record)

    async def _again(self, record: ClaimRecord, allocation: Allocation | None, watch: Stopwatch) -> ClaimRecord:
        """Return the record of a prepared claim. Restore it first if it may differ from the hardware.

        A claim that was restored after a reboot, before the kubelet called, has no pod's name for the claim in its
        files yet.
        """
        pod_claim = allocation.pod_claim if allocation is not None else None
        self.asked.add(record.uid)
        watch.kind = record.kind
        with watch.stage("check"):
            present = not record.devices or self.hardware.system.exists(self.hardware.cdi_path(record.uid))
            if pod_claim is not None:
                present = present and self.hardware.files.has_pod_claim(record, pod_claim)
        # A restart of the fabric manager deactivates partitions without a notification.
        lasts = record.uid not in self.suspect and record.boot_id == self._boot_id and to_activate(record) is None
        if present and lasts:
            return record
        async with self._current(record) as current:
            if current is None or not current.prepared:
                raise AcceleratorError(
                    f"Claim {record.describe()} was undone while its devices were in use by another call",
                    hint="It is prepared when the kubelet calls again.",
                    code="claim-changed",
                )
            restored = await self.make_again(current, watch, pod_claim)
        return restored or self.store.claims[record.uid]

    # ------------------------------------------------------------------ unprepare

    async def _unprepare(self, reference: ClaimReference, watch: Stopwatch) -> ClaimRecord | None:
        with self._calls.ending_earlier(reference.uid):
            async with self._claims.hold([reference.uid]):
                return await self._unprepare_held(reference, watch)

    async def _unprepare_held(self, reference: ClaimReference, watch: Stopwatch) -> ClaimRecord | None:
        """Unprepare a claim whose lock is held."""
        record = self.store.claims.get(reference.uid)
        was_lost = record is None
        if record is None:
            record = await self._lost_claims.adopt_ending(reference)
        if record is None:
            self._compared.pop(reference.uid, None)
            with watch.stage("cdi"):
                await self.thread(self.hardware.remove_cdi, reference.uid)
            return None
        watch.kind = record.kind
        if self.unprepare_runner.needs_hardware(record) and not self.unprepare_runner.went_with_the_boot(record):
            with watch.stage("ready"):
                await self._wait_for_undoing(record)
        # A pod with a whole device can end although the device's driver is unloaded. After a reboot this is so for all
        # devices.
        async with self._current(record) as current, self._turns.take():
            self.hardware.report_stage("unprepare-started")
            with watch.stage("undo"):
                if current is not None or was_lost:
                    await self.undo(current or record)
        if was_lost:
            self._request_scan()
        return record

    async def _wait_for_undoing(self, record: ClaimRecord) -> None:
        """Wait until a claim can be undone. Raises BackendUnavailable if that needs the vendor's library, and it is not available."""
        try:
            await self.wait_until_ready()
        except BackendUnavailable:
            if self.unprepare_runner.needs_library(record):
                raise

    async def forget(self, uid: str, *, prepared_too: bool = True) -> None:
        """Undo a prepared or half prepared claim and delete its record. Raises AcceleratorError, such as InUse."""
        async with self._claims.hold([uid]):
            record = self.store.claims.get(uid)
            if record is not None and (prepared_too or not record.prepared):
                if not record.prepared:
                    self.suspect.add(uid)  # the reconciler undoes it if this fails
                async with self._current(record) as current:
                    if current is not None and (prepared_too or not current.prepared):
                        await self.undo(current)

    async def forget_ahead(self, uid: str) -> None:
        """Undo a claim that was prepared ahead, unless the kubelet has prepared it since. Raises AcceleratorError."""
        async with self._claims.hold([uid]):
            record = self.store.claims.get(uid)
            if uid in self.ahead and record is not None:
                async with self._current(record) as current:
                    if uid in self.ahead and current is not None:
                        await self.undo(current)
            self.ahead.discard(uid)

    async def forget_reallocated(self, record: ClaimRecord, allocation: Allocation) -> None:
        """Undo a claim that was prepared with other devices than its current ones, unless its record differs from ``record``.

        Raises AcceleratorError: InUse if the previous devices are in use.
        """
        async with self._claims.hold([record.uid]):
            if self.store.claims.get(record.uid) == record:
                async with self._current(record) as current:
                    if current == record:
                        await self._undo_former(record, allocation)
