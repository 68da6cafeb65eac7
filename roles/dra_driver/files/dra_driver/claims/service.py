# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepare and unprepare claims: the order of the steps, the locks, and the results for the kubelet.

To prepare a claim, the driver reads it from the API server, plans, writes a record in the state *preparing*, changes the
hardware, and writes the CDI file and the state *prepared*. If the hardware needs no change, *preparing* is not written.

Claims of different physical devices are prepared in parallel, and short operations one after the other (locking.py). The
kubelet stops waiting after 45 seconds and calls again. The operation continues, and the next call gets the result.
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
from .call_results import ClaimWorkRunner, Outcome
from .claim_fabric import to_activate
from .housekeeping import Housekeeping
from .locking import FairQueue
from .lost_claims import LostClaimRecovery
from .operations import ClaimContext, ClaimOperations
from .plan import offers_by_device, refuse_faulty
from .prepare import PlacementRetry, PrepareCall, PrepareCalls, SingleDevicePrepare
from .refusals import Refusals
from .startup_recovery import reallocated, refuse_in_use
from .store.records import ClaimRecord, ClaimReference

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# The timeout, in seconds, for a read of a prepared claim from the API server.
COMPARE_SECONDS = 5.0
# For this time after the kubelet's call, in seconds, a failed read of a claim is retried. The kubelet waits 45 s, and the
# preparation of the devices needs the rest.
RETRY_SECONDS = 30.0


class ClaimService(ClaimOperations):
    """Prepare and unprepare one driver's claims on this node.

    ``refresh`` scans the hardware at once. ``request_scan`` requests a scan, after the driver has found a lost claim and
    owns its partitions again. ``repartition`` knows the devices that a repartitioning reserves: they get no new claims.
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
        self._work_runner = ClaimWorkRunner(context.reporter, context.metrics)
        self._lost_claims = LostClaimRecovery(self, inventory, boot_id)
        self._placements = PlacementRetry(self, refusals or Refusals(), inventory)
        self.housekeeping = Housekeeping(self, self._claim_locks, self._lost_claims, inventory, boot_id)

    async def prepare(self, references: Sequence[ClaimReference]) -> dict[str, Outcome]:
        """Prepare claims. Returns one outcome for each, by UID, and never raises."""
        self.prepared_ahead.difference_update(reference.uid for reference in references)
        return await self._work_runner.run_all(references, "Prepare", self._prepare)

    async def prepare_ahead(self, reference: ClaimReference) -> Outcome:
        """Prepare a claim before the call of the kubelet: its pod is bound afterwards. Never raises."""
        if reference.uid not in self.prepared_by_kubelet:
            self.prepared_ahead.add(reference.uid)
        return (await self._work_runner.run_all([reference], "Prepare", self._prepare))[reference.uid]

    async def unprepare(self, references: Sequence[ClaimReference]) -> dict[str, Outcome]:
        """Unprepare claims. Returns one outcome for each, by UID, and never raises."""
        return await self._work_runner.run_all(references, "Unprepare", self._unprepare)

    @property
    def calls_in_progress(self) -> int:
        """Return the number of claims with a call of the kubelet in progress."""
        return self._work_runner.calls_in_progress

    async def drain(self, seconds: float) -> None:
        """Wait for operations in progress, for at most ``seconds``."""
        await self._work_runner.drain(seconds)

    # ------------------------------------------------------------------ prepare

    async def _prepare(self, reference: ClaimReference, watch: Stopwatch) -> ClaimRecord:
        with self._calls.begin(reference) as call:
            return await self._prepare_called(reference, call, watch)

    async def _prepare_called(self, reference: ClaimReference, call: PrepareCall, watch: Stopwatch) -> ClaimRecord:
        called_at = time.monotonic()
        with watch.stage("ready"):
            await self.wait_until_ready()
        async with self._claim_locks.hold([reference.uid]):
            call.refuse_outdated()
            record = self.store.claims.get(reference.uid)
            if self.hardware.driver_edits.is_due:  # the read from the API server takes longer than this
                asyncio.get_running_loop().call_soon(self._executor.submit, self.hardware.fill_edits_cache)
            with watch.stage("fetch"):
                allocation = await self._allocation(reference, record, called_at)
            if record is not None and record.prepared and (allocation is None or not reallocated(record, allocation)):
                return await self._confirm_prepared(record, allocation, watch)
            assert allocation is not None  # noqa: S101  only a prepared claim has none here
            self.hardware.report_stage("claim-fetched")
            if any(device.device not in self._inventory().offers for device in allocation.devices):
                with watch.stage("refresh"):
                    await self._refresh()
            offers = offers_by_device(allocation, self._inventory()).values()
            uuids = {uuid for offer in offers for uuid in offer.device_uuids}
            refuse_faulty(reference, uuids, self._inventory().faults)
            previous_uuids = record.device_uuids if record is not None else ()
            wait_began = time.perf_counter()
            async with self._devices.hold([*uuids, *previous_uuids]):
                watch.add("device-lock", "success", time.perf_counter() - wait_began)
                wait_began = time.perf_counter()
                async with self._turns.take():
                    watch.add("turn", "success", time.perf_counter() - wait_began)
                    # Another claim's Prepare can have changed this record before the devices were locked.
                    return await self._prepare_held(self.store.claims.get(reference.uid), allocation, uuids, watch)

    async def _prepare_held(
        self, record: ClaimRecord | None, allocation: Allocation, uuids: set[str], watch: Stopwatch
    ) -> ClaimRecord:
        """Prepare a claim that is not prepared, or was prepared with other devices. The device locks are held."""
        if self._repartition is not None:
            self._repartition.refuse(uuids)
        if record is not None:
            with watch.stage("undo"):
                await self._undo_previous_allocation(record, allocation)
        may_be_lost = record is None and allocation.was_prepared
        if len(uuids) == 1 and not may_be_lost and not self.unprepare_runner.pending_uuids_on_device & uuids:
            single = SingleDevicePrepare(self, self._runner, allocation, next(iter(uuids)), watch)
            await single.run()
            return await self._placements.prepare(allocation, single.plan, single.facts, watch, single.result)
        with watch.stage("facts"):
            facts = await self.facts(allocation.claim, uuids)
        plan = self.plan(allocation, facts)
        lost = await self._lost_claims.restore_record(plan.record, allocation, facts) if may_be_lost else None
        if lost is not None:
            self.prepared_by_kubelet.add(lost.uid)
            self._request_scan()
            return await self.restore_locked(lost, watch)
        return await self._placements.prepare(allocation, plan, facts, watch)

    async def _allocation(
        self, reference: ClaimReference, record: ClaimRecord | None, called_at: float
    ) -> Allocation | None:
        """Return the allocation of a claim, or None to keep a prepared claim, because the API server does not answer.

        A claim that was read after the kubelet's call (``called_at``) is not read again: the kubelet sends several calls at once.
        """
        prepared = record is not None and record.prepared
        if prepared and self._allocation_read_at.get(reference.uid, 0.0) > called_at:
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
                called_at + RETRY_SECONDS - began,
                when=is_of_network,
            )
        allocation = decode_allocation(claim, reference, self.driver)
        self._allocation_read_at[reference.uid] = began
        return allocation

    async def _undo_previous_allocation(self, record: ClaimRecord, allocation: Allocation) -> None:
        """Undo the remains of an earlier call for a claim, or its previous allocation."""
        if record.prepared:
            found = await self.run_on_thread(self.hardware.facts, record.device_uuids)
            others = await self.run_on_thread(self.hardware.without_own_companions, record, found.devices)
            refuse_in_use(record, allocation, others, found.faults)
            LOG.info(
                "claim was allocated again: previous devices undone",
                extra=fields(claim=record.describe(), had=[device.name for device in record.devices]),
            )
        await self.undo(record)

    async def _confirm_prepared(
        self, record: ClaimRecord, allocation: Allocation | None, watch: Stopwatch
    ) -> ClaimRecord:
        """Return the record of a prepared claim. Restore it first if it may differ from the hardware.

        A claim that was restored after a reboot, before the kubelet called, has no pod's name for the claim in its
        files yet.
        """
        pod_claim = allocation.pod_claim if allocation is not None else None
        self.prepared_by_kubelet.add(record.uid)
        watch.kind = record.kind
        with watch.stage("check"):
            has_files = not record.devices or self.hardware.system.exists(self.hardware.cdi_path(record.uid))
            if pod_claim is not None:
                has_files = has_files and self.hardware.files.has_pod_claim(record, pod_claim)
        # A restart of the fabric manager deactivates partitions without a notification.
        hardware_is_current = (
            record.uid not in self.suspect and record.boot_id == self._boot_id and to_activate(record) is None
        )
        if has_files and hardware_is_current:
            return record
        async with self._lock_devices_of(record) as current:
            if current is None or not current.prepared:
                raise AcceleratorError(
                    f"Claim {record.describe()} was undone while its devices were in use by another call",
                    hint="It is prepared when the kubelet calls again.",
                    code="claim-changed",
                )
            return await self.restore_locked(current, watch, pod_claim)

    # ------------------------------------------------------------------ unprepare

    async def _unprepare(self, reference: ClaimReference, watch: Stopwatch) -> ClaimRecord | None:
        with self._calls.outdate_earlier_calls(reference.uid):
            async with self._claim_locks.hold([reference.uid]):
                return await self._unprepare_held(reference, watch)

    async def _unprepare_held(self, reference: ClaimReference, watch: Stopwatch) -> ClaimRecord | None:
        """Unprepare a claim whose lock is held."""
        record = self.store.claims.get(reference.uid)
        was_lost = record is None
        if record is None:
            record = await self._lost_claims.restore_record_to_unprepare(reference)
        if record is None:
            self._allocation_read_at.pop(reference.uid, None)
            with watch.stage("cdi"):
                await self.run_on_thread(self.hardware.remove_cdi, reference.uid)
            return None
        watch.kind = record.kind
        if self.unprepare_runner.needs_hardware(record) and not self.ownership.is_from_previous_boot(record):
            with watch.stage("ready"):
                await self._wait_until_undo_is_possible(record)
        # A pod with a whole device can end although the device's driver is not loaded. After a reboot, this is so for the
        # pods of all devices.
        async with self._lock_devices_of(record) as current, self._turns.take():
            self.hardware.report_stage("unprepare-started")
            with watch.stage("undo"):
                if current is not None or was_lost:
                    await self.undo(current or record)
        if was_lost:
            self._request_scan()
        return record

    async def _wait_until_undo_is_possible(self, record: ClaimRecord) -> None:
        """Wait until a claim can be undone. Raises BackendUnavailable if that needs the vendor's library, and it is not available."""
        try:
            await self.wait_until_ready()
        except BackendUnavailable:
            if self.unprepare_runner.needs_library(record):
                raise

    async def forget(self, uid: str, *, prepared_too: bool = True) -> None:
        """Undo a prepared or half prepared claim and delete its record. Raises AcceleratorError, such as InUse."""
        async with self._claim_locks.hold([uid]):
            record = self.store.claims.get(uid)
            if record is not None and (prepared_too or not record.prepared):
                if not record.prepared:
                    self.suspect.add(uid)  # the reconciler undoes it if this fails
                async with self._lock_devices_of(record) as current:
                    if current is not None and (prepared_too or not current.prepared):
                        await self.undo(current)

    async def undo_prepared_ahead(self, uid: str) -> None:
        """Undo a claim that was prepared ahead, unless the kubelet has prepared it since. Raises AcceleratorError."""
        async with self._claim_locks.hold([uid]):
            record = self.store.claims.get(uid)
            if uid in self.prepared_ahead and record is not None:
                async with self._lock_devices_of(record) as current:
                    if uid in self.prepared_ahead and current is not None:
                        await self.undo(current)
            self.prepared_ahead.discard(uid)

    async def undo_reallocated(self, record: ClaimRecord, allocation: Allocation) -> None:
        """Undo a claim that was prepared with other devices than its current ones, unless its record differs from ``record``.

        Raises AcceleratorError: InUse if the previous devices are in use.
        """
        async with self._claim_locks.hold([record.uid]):
            if self.store.claims.get(record.uid) == record:
                async with self._lock_devices_of(record) as current:
                    if current == record:
                        await self._undo_previous_allocation(record, allocation)
