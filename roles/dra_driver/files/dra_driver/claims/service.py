# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepare and unprepare claims: the order of the steps, the locks, and the results for the kubelet.

Prepare of one claim: fetch it, plan, write *preparing*, change the hardware, write the CDI file and *prepared*. If the hardware
needs no change, *preparing* is not written.
Claims of different physical devices run in parallel, short ones one after the other (turns.py). An operation that has started runs
to its end even if the kubelet stops waiting; its next call gets the result. The kubelet times out after 45 seconds and calls again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Callable, Protocol, TypeVar

from ..api.throttling import retry_throttled
from ..core.errors import AcceleratorError, BackendUnavailable
from ..core.model import Device, Placement
from ..core.repartition_record import Watch
from ..deadlines import within
from ..logs import fields
from ..metrics import Metrics, Stopwatch
from .adopting import Adopting
from .allocation import Allocation, decode_allocation
from .answers import Answers, Outcome, Reporter
from .asking import look_at, refuse_missing
from .calls import PrepareCall, PrepareCalls
from .compare import reallocated, refuse_in_use
from .doing import Doing, Work
from .execute import Hands
from .fabric import still_pending, to_activate
from .guard import DeviceGuard
from .insisting import Insisting
from .locks import NamedLocks
from .ownership import RESTORING_KEY, Ownership
from .plan import (
    Inventory,
    PreparePlan,
    offers_of,
    plan_prepare,
    plan_restore,
    refuse_faulty,
    with_chosen_ids,
)
from .plan_completion import PlanCompletion
from .records import ClaimRecord, ClaimReference
from .refusals import Refusals
from .settings import wanted_of
from .store import Store
from .store_tables import Change
from .threads import on_thread
from .turns import Turns
from .undoing import Undoing
from .upkeep import Upkeep
from .visit import Visit

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# How long a call waits while the driver starts.
READY_SECONDS = 5.0
# How long a read of a prepared claim from the API server can take.
COMPARE_SECONDS = 5.0
# Seconds after the call of the kubelet for which a refused read of a claim is retried. The kubelet waits for 45 s. The rest is for the devices.
THROTTLED_SECONDS = 30.0


class ClaimSource(Protocol):
    """Reads claims."""

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return one ResourceClaim."""


class ClaimService:
    """Prepares and unprepares one driver's claims on this node.

    ``inventory`` returns the published devices. ``refresh`` scans the hardware at once. ``look_soon`` requests a scan, after a lost
    claim was found and its partitions have an owner again. ``prepared`` is called with the UID of each claim that was prepared or
    restored. ``repartition`` has the devices that a repartitioning reserves: they get no new claims.
    set_ready() says whether claims can be served. A call waits up to ``ready_seconds`` for it.
    """

    def __init__(
        self,
        *,
        driver: str,
        hands: Hands,
        store: Store,
        source: ClaimSource,
        reporter: Reporter,
        metrics: Metrics,
        executor: ThreadPoolExecutor,
        boot_id: str,
        inventory: Callable[[], Inventory],
        ownership: Ownership,
        devices: DeviceGuard,
        refresh: Callable[[], Awaitable[None]],
        look_soon: Callable[[], None] = lambda: None,
        ready_seconds: float | None = None,
        prepared: Callable[[str], None] = lambda _uid: None,
        refusals: Refusals | None = None,
        repartition: Watch | None = None,
    ) -> None:
        self._repartition = repartition
        self._ready_seconds = READY_SECONDS if ready_seconds is None else ready_seconds
        self.driver = driver
        self.hands = hands
        self.store = store
        self.source = source
        self._executor = executor
        self._boot_id = boot_id
        self._inventory = inventory
        self.ownership = ownership
        self.undoing = Undoing(hands=hands, store=store, ownership=ownership, boot_id=boot_id, thread=self.thread)
        self.completion = PlanCompletion(hands, store, boot_id, self.undoing, self.thread)
        self._doing = Doing(hands, store, boot_id)
        self._refresh = refresh
        self._look_soon = look_soon
        self._prepared = prepared
        self._claims = NamedLocks()
        self._calls = PrepareCalls()
        self._turns = Turns()
        self._devices = devices
        self._answers = Answers(reporter, metrics)
        self.reporter = reporter
        self.metrics = metrics
        self._adopting = Adopting(self, inventory, boot_id)
        self._insisting = Insisting(self, refusals or Refusals(), inventory)
        self.upkeep = Upkeep(self, self._claims, self._adopting, inventory)
        # Claims whose partitions or CDI file can differ from the record. Their next Prepare restores them.
        self.suspect: set[str] = set()
        # Claims that the kubelet has prepared since this process started.
        self.asked: set[str] = set()
        # Claims that were prepared before the call of the kubelet.
        self.ahead: set[str] = set()
        # When the allocation of a claim was last read, by its UID.
        self._compared: dict[str, float] = {}
        self._ready = asyncio.Event()
        self._reason = "the driver is starting"

    def set_ready(self, reason: str = "") -> None:
        """Allow claims to be served, or block them for a reason."""
        self._reason = reason
        if reason:
            self._ready.clear()
        else:
            self._ready.set()

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

    async def thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run blocking work on a thread of the driver's pool. Its log lines have the ID of the operation."""
        return await on_thread(self._executor, function, *arguments)

    # ------------------------------------------------------------------ whether claims can be served

    async def wait_until_ready(self) -> None:
        """Wait until claims can be served, for at most ``ready_seconds``. Raises BackendUnavailable with the cause."""
        if self._ready.is_set():
            return
        try:
            await within(self._ready.wait(), self._ready_seconds)
        except asyncio.TimeoutError:
            if self._ready.is_set():  # at this very moment, or while the loop did not come to see it
                return
            raise BackendUnavailable(
                f"The driver {self.driver} cannot serve claims yet: {self._reason}",
                hint="It goes on trying; so does the kubelet.",
            ) from None

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
            if self.hands.driver_edits.is_due:  # the API server takes longer than that does
                asyncio.get_running_loop().call_soon(self._executor.submit, self.hands.look_ahead)
            with watch.stage("fetch"):
                allocation = await self._allocation(reference, record, asked)
            if record is not None and record.prepared and (allocation is None or not reallocated(record, allocation)):
                return await self._again(record, allocation, watch)
            assert allocation is not None  # noqa: S101  only a prepared claim goes without
            self.hands.reached("claim-fetched")
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
        if len(uuids) == 1 and not may_be_lost and not self.undoing.owing_on_device & uuids:
            visit = Visit(self, self._doing, allocation, next(iter(uuids)), watch)
            await visit.make()
            return await self._insisting.prepare(allocation, visit.plan, visit.facts, watch, visit.tried)
        with watch.stage("facts"):
            facts = await self.facts(allocation.claim, uuids)
        plan = self.plan(allocation, facts)
        lost = await self._adopting.adopt(plan.record, allocation, facts) if may_be_lost else None
        if lost is not None:
            self.asked.add(lost.uid)
            self._look_soon()
            return await self.make_again(lost, watch) or lost
        return await self._insisting.prepare(allocation, plan, facts, watch)

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
            claim = await retry_throttled(
                lambda: self.source.claim(reference.namespace, reference.name), asked + THROTTLED_SECONDS - began
            )
        allocation = decode_allocation(claim, reference, self.driver)
        self._compared[reference.uid] = began
        return allocation

    async def _undo_former(self, record: ClaimRecord, allocation: Allocation) -> None:
        """Undo the remains of an earlier call for a claim, or its previous allocation."""
        if record.prepared:
            held = await self.thread(self.hands.facts, record.device_uuids)
            others = await self.thread(self.hands.others, record, held.devices)
            refuse_in_use(record, allocation, others, held.faults)
            LOG.info(
                "claim was allocated again: previous devices undone",
                extra=fields(claim=record.describe(), had=[device.name for device in record.devices]),
            )
        await self.undo(record)

    def holding(self, uuids: Collection[str]) -> AbstractAsyncContextManager[None]:
        """Lock devices for reads and changes. Raises InUse or BackendUnavailable with the holder of the lock."""
        return self._devices.hold(uuids)

    @asynccontextmanager
    async def _current(self, record: ClaimRecord) -> AsyncIterator[ClaimRecord | None]:
        """Lock the devices of a claim whose lock is held, and return its current record, or None if it was removed.

        A holder of device locks can change the records of other claims on the devices: it undoes leftovers, and moves partitions.
        """
        async with self._devices.hold(record.device_uuids):
            yield self.store.claims.get(record.uid)

    async def facts(self, reference: ClaimReference, uuids: Collection[str]) -> Mapping[str, Device]:
        """Return fresh facts of locked devices, after their pending cleanup. Raises ClaimError."""
        found = await look_at(self.hands, uuids, self.thread)
        refuse_faulty(reference, uuids, found.faults)
        owing = self.undoing.owing_on_device & set(uuids)
        if owing:
            for uuid in sorted(owing & set(found.devices)):
                await self.undoing.pay(found.devices[uuid])
            found = await self.thread(self.hands.facts, uuids)
            refuse_faulty(reference, uuids, found.faults)
        refuse_missing(uuids, found.devices)
        return found.devices

    async def _again(self, record: ClaimRecord, allocation: Allocation | None, watch: Stopwatch) -> ClaimRecord:
        """Answer for a claim that is prepared, and make true what the record says if it may not be.

        What was made again after a start of the machine, before the kubelet asked, bears no name that only the pod gives.
        """
        pod_claim = allocation.pod_claim if allocation is not None else None
        self.asked.add(record.uid)
        watch.kind = record.kind
        with watch.stage("check"):
            present = not record.devices or self.hands.system.exists(self.hands.cdi_path(record.uid))
            if pod_claim is not None:
                present = present and self.hands.files.tell(record, pod_claim)
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

    def plan(
        self, allocation: Allocation, facts: Mapping[str, Device], refused: Collection[tuple[str, Placement]] = ()
    ) -> PreparePlan:
        """Plan how to prepare a claim, from fresh facts of its devices. ``refused`` are placements that the devices have rejected."""
        plan = plan_prepare(
            allocation,
            self._inventory(),
            facts,
            self.store.claims,
            config_kinds=self.hands.backend.config_kinds,
            cdi_kind=self.hands.backend.cdi_kind,
            boot_id=self._boot_id,
            now=time.time(),
            refused=refused,
            choose_id=self.hands.backend.choose_id,
        )
        self.hands.reached("planned")
        return plan

    async def carry_out(self, plan: PreparePlan, facts: Mapping[str, Device], watch: Stopwatch) -> ClaimRecord:
        """Prepare a claim as planned. A failure is rolled back. The device locks are held. Raises AcceleratorError."""
        watch.kind = plan.record.kind
        plan, notes = await self.completion.complete(plan, facts)
        self.ownership.note(plan.record)
        work = Work(plan, facts, notes, watch)
        return await self.carried_out(work, self.thread(self._doing.carry_out, work))

    async def carried_out(self, work: Work, doing: Awaitable[ClaimRecord]) -> ClaimRecord:
        """Wait for the work of a plan. A failure is rolled back. Raises AcceleratorError."""
        try:
            done = await doing
        except Exception:
            # After any exception, roll back the record "preparing" and a partition or file: nothing else does so before the next call for
            # the claim. The caller reports the exception.
            if work.has_begun:
                with work.watch.stage("undo"):
                    await self._undo_quietly(work.plan.record)
            raise
        self.suspect.discard(done.uid)
        self.asked.add(done.uid)
        self.hands.reached("recorded-prepared")
        self._prepared(done.uid)
        return done

    async def make_again(
        self, record: ClaimRecord, watch: Stopwatch, pod_claim: str | None = None
    ) -> ClaimRecord | None:
        """Restore the devices and files of a prepared claim from its record. The device locks are held. Raises AcceleratorError.

        ``pod_claim`` is the name that the pod gives the claim, if it is known.
        """
        self.suspect.add(record.uid)
        with watch.stage("restore"):
            found = await self.thread(self.hands.facts, record.device_uuids)
            refuse_faulty(record.reference, record.device_uuids, found.faults)
            plan = plan_restore(
                record,
                found.devices,
                self._inventory().dynamic,
                self.hands.backend.choose_id,
                gone=self.undoing.went_with_the_boot(record),
            )
            plan, notes = await self.completion.complete(replace(plan, pod_claim=pod_claim), found.devices)
            restoring = f"{RESTORING_KEY}{record.uid}"
            intended = with_chosen_ids(record, plan.record)
            if (plan.creates or wanted_of(intended)) and record.boot_id != self._boot_id:
                notes[restoring] = self._boot_id
            if notes or intended != record:
                await self.store.commit(Change(put=intended if intended != record else None, meta=notes))
            # The record stays "prepared": after a crash in between the next start restores the claim again.
            restored = await self.thread(self._doing.make, plan, found.devices)
            done = restored.as_prepared(restored.devices, self._boot_id)
            await self.store.commit(Change(put=done, meta=self.undoing.cleared([restoring])))
            self.suspect.discard(record.uid)
            self._prepared(done.uid)
            return done

    async def restore(self, uid: str) -> None:
        """Restore a prepared claim's partitions and CDI file. Raises AcceleratorError."""
        async with self._claims.hold([uid]):
            record = self.store.claims.get(uid)
            if record is None or not record.prepared:  # unprepared since, or its next prepare has failed
                return
            watch, code = Stopwatch(self.metrics, "restore", record.kind), "internal"
            try:
                async with self._current(record) as current:
                    if current is not None and current.prepared:
                        await self.make_again(current, watch)
                code = ""
            except AcceleratorError as error:
                code = error.code
                raise
            finally:
                watch.finish(code)

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
            record = await self._adopting.adopt_ending(reference)
        if record is None:
            self._compared.pop(reference.uid, None)
            with watch.stage("cdi"):
                await self.thread(self.hands.remove_cdi, reference.uid)
            return None
        watch.kind = record.kind
        if self.undoing.needs_hardware(record) and not self.undoing.went_with_the_boot(record):
            with watch.stage("ready"):
                await self._wait_for_undoing(record)
        # A pod with a whole device can end although the device's driver is gone; so can, after a reboot, any other.
        async with self._current(record) as current, self._turns.take():
            self.hands.reached("unprepare-started")
            with watch.stage("undo"):
                if current is not None or was_lost:
                    await self.undo(current or record)
        if was_lost:
            self._look_soon()
        return record

    async def _wait_for_undoing(self, record: ClaimRecord) -> None:
        """Wait until a claim can be undone. Raises BackendUnavailable if that needs the vendor's library, and it is not available."""
        try:
            await self.wait_until_ready()
        except BackendUnavailable:
            if self.undoing.needs_library(record):
                raise

    async def forget(self, uid: str, *, prepared_too: bool = True) -> None:
        """Undo a prepared or half prepared claim and delete its record. Raises AcceleratorError, such as InUse."""
        async with self._claims.hold([uid]):
            record = self.store.claims.get(uid)
            if record is not None and (prepared_too or not record.prepared):
                if not record.prepared:
                    self.suspect.add(uid)  # the reconciler undoes it where this fails
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

    async def undo(self, record: ClaimRecord) -> None:
        """Undo a claim and delete its record. The device locks are held. Raises AcceleratorError."""
        self.suspect.add(record.uid)
        undone = await self.undoing.undo(record)
        if undone.rejection is not None:
            self.reporter.failed(record.reference, "Unprepare", still_pending(undone.rejection))
        self.suspect.discard(record.uid)
        self.asked.discard(record.uid)
        self.ahead.discard(record.uid)
        self._compared.pop(record.uid, None)
        self.hands.reached("record-removed")

    async def _undo_quietly(self, record: ClaimRecord) -> None:
        try:
            await self.undo(record)
        except Exception:
            # The kubelet gets the original error, not the one of the rollback. The record stays.
            LOG.exception("claim %s is left half prepared; it is undone at the next call", record.describe())
