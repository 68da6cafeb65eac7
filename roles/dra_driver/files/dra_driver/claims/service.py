# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepares and unprepares claims: the order of things, the locks, and what the kubelet is told.

Prepare of one claim: fetch it, decide, write *preparing*, change the hardware, write the CDI file and *prepared*. Where the
hardware is as it has to be, *preparing* is left out.
Claims of different physical devices run side by side, those that are quick one after the other (turns.py). An operation that has
begun runs to its end even if the kubelet stops waiting; its next call then finds the result. Facts: the kubelet gives up after 45
seconds and calls again.
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
from .ownership import Ownership
from .plan import (
    PARTITIONING_KEY,
    Inventory,
    PreparePlan,
    offers_of,
    plan_prepare,
    plan_restore,
    refuse_faulty,
    with_chosen_ids,
)
from .records import ClaimRecord, ClaimReference
from .refusals import Refusals
from .settings import fit_settings, marks, refuse_contradiction, wanted_of
from .store import Store
from .store_tables import Change
from .threads import on_thread
from .turns import Turns
from .undoing import RESTORING_KEY, Undoing
from .upkeep import Upkeep
from .visit import Visit

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# How long a call waits for a driver that is still starting.
READY_SECONDS = 5.0
# How long the API server may take to say what a claim that is prepared already has now.
COMPARE_SECONDS = 5.0


class ClaimSource(Protocol):
    """Where claims are read."""

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return one ResourceClaim."""


class ClaimService:
    """One driver's claims on this node.

    ``inventory`` returns what is published at that moment, ``refresh`` looks at the hardware again before it does,
    ``look_soon`` has that done soon, since a claim was found again and its partitions are nobody else's. ``prepared`` is
    told the UID of each claim that was prepared or restored. ``repartition`` knows the devices of which nobody new is
    given any.
    The node says with set_ready() whether claims can be served; a call waits ``ready_seconds`` for that, if it has to.
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
        # Claims whose partitions or CDI file may not be what the record says; they are restored when asked for.
        self.suspect: set[str] = set()
        # Claims that the kubelet has asked for since this process started.
        self.asked: set[str] = set()
        # Claims that were prepared before the kubelet asked for them.
        self.ahead: set[str] = set()
        # When the allocation of a claim was last read, by its UID.
        self._compared: dict[str, float] = {}
        self._ready = asyncio.Event()
        self._reason = "the driver is starting"

    def set_ready(self, reason: str = "") -> None:
        """Let claims be served, or hold them back for a reason."""
        self._reason = reason
        if reason:
            self._ready.clear()
        else:
            self._ready.set()

    async def prepare(self, references: Sequence[ClaimReference]) -> dict[str, Outcome]:
        """Prepare claims; there is one outcome for each, by UID, and no exception."""
        self.ahead.difference_update(reference.uid for reference in references)
        return await self._answers.to_all(references, "Prepare", self._prepare)

    async def prepare_ahead(self, reference: ClaimReference) -> Outcome:
        """Prepare a claim that the kubelet has not asked for: its pod is bound afterwards. There is no exception."""
        if reference.uid not in self.asked:
            self.ahead.add(reference.uid)
        return (await self._answers.to_all([reference], "Prepare", self._prepare))[reference.uid]

    async def unprepare(self, references: Sequence[ClaimReference]) -> dict[str, Outcome]:
        """Unprepare claims; there is one outcome for each, by UID, and no exception."""
        return await self._answers.to_all(references, "Unprepare", self._unprepare)

    @property
    def under_way(self) -> int:
        """How many claims are being worked on for the kubelet."""
        return self._answers.under_way

    async def drain(self, seconds: float) -> None:
        """Wait for operations under way."""
        await self._answers.drain(seconds)

    async def thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run blocking work on a thread of the driver's own pool; what it logs has the id of the operation."""
        return await on_thread(self._executor, function, *arguments)

    # ------------------------------------------------------------------ whether claims can be served

    async def wait_until_ready(self) -> None:
        """Wait a while until claims can be served. Raises BackendUnavailable, with what is in the way."""
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
        """Prepare a claim that is not, or was prepared with other devices; the locks of the devices are held."""
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
        lost = await self._adopting.adopt(plan.record, allocation) if may_be_lost else None
        if lost is not None:
            self.asked.add(lost.uid)
            self._look_soon()
            return await self.make_again(lost, watch) or lost
        return await self._insisting.prepare(allocation, plan, facts, watch)

    async def _allocation(
        self, reference: ClaimReference, record: ClaimRecord | None, asked: float
    ) -> Allocation | None:
        """Return what a claim has now; None where a prepared one stands as it is, because the API server does not answer.

        What was read after the kubelet had asked is not read again: it asks for one claim several times at once.
        """
        prepared = record is not None and record.prepared
        if prepared and self._compared.get(reference.uid, 0.0) > asked:
            return None
        began = time.monotonic()
        read = self.source.claim(reference.namespace, reference.name)
        if prepared:
            try:
                claim = await within(read, COMPARE_SECONDS)
            except (AcceleratorError, asyncio.TimeoutError):
                return None
        else:
            claim = await read
        allocation = decode_allocation(claim, reference, self.driver)
        self._compared[reference.uid] = began
        return allocation

    async def _undo_former(self, record: ClaimRecord, allocation: Allocation) -> None:
        """Undo what an earlier call has left of a claim, or what it had before it was allocated anew."""
        if record.prepared:
            held = await self.thread(self.hands.facts, record.device_uuids)
            others = await self.thread(self.hands.others, record, held.devices)
            refuse_in_use(record, allocation, others, held.faults)
            LOG.info(
                "claim was given other devices: undone",
                extra=fields(claim=record.describe(), had=[device.name for device in record.devices]),
            )
        await self.undo(record)

    def holding(self, uuids: Collection[str]) -> AbstractAsyncContextManager[None]:
        """Hold devices, to look at them and change them. Raises InUse or BackendUnavailable, naming who has them."""
        return self._devices.hold(uuids)

    @asynccontextmanager
    async def _current(self, record: ClaimRecord) -> AsyncIterator[ClaimRecord | None]:
        """Hold the devices of a claim whose lock is held, and return its record as it is then, or None if it was removed.

        Whoever holds the devices may change the records of other claims on them: it undoes what is left over, and moves what waits.
        """
        async with self._devices.hold(record.device_uuids):
            yield self.store.claims.get(record.uid)

    async def facts(self, reference: ClaimReference, uuids: Collection[str]) -> Mapping[str, Device]:
        """Return fresh facts of devices whose locks are held; what is owed on them is paid first. Raises ClaimError."""
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
        """Decide how to prepare a claim by fresh facts of its devices; ``refused`` are numbers that these have not taken."""
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
        """Prepare a claim as planned; on failure nothing of it stays. The device locks are held. Raises AcceleratorError."""
        watch.kind = plan.record.kind
        self.hands.refuse_sharing(plan.record)
        plan, notes = await self._with_settings(await self._with_fabric(await self._with_handovers(plan), facts))
        self.ownership.note(plan.record)
        work = Work(plan, facts, {**self.switched_on(plan), **notes}, watch)
        return await self.carried_out(work, self.thread(self._doing.carry_out, work))

    async def carried_out(self, work: Work, doing: Awaitable[ClaimRecord]) -> ClaimRecord:
        """Wait for work to be done; on failure nothing of it stays. Raises AcceleratorError."""
        try:
            done = await doing
        except Exception:
            # Whatever it is: a record "preparing" and maybe a partition, or a file, are there, and nobody else takes them back before the
            # claim is asked for again. It goes on to the border above, which tells of it.
            if work.has_begun:
                with work.watch.stage("undo"):
                    await self._undo_quietly(work.plan.record)
            raise
        self.suspect.discard(done.uid)
        self.asked.add(done.uid)
        self.hands.reached("recorded-prepared")
        self._prepared(done.uid)
        return done

    async def _with_handovers(self, plan: PreparePlan) -> PreparePlan:
        return await self.thread(self.hands.with_handovers, plan) if plan.record.away else plan

    async def _with_fabric(self, plan: PreparePlan, facts: Mapping[str, Device]) -> PreparePlan:
        if not self.hands.needs_fabric_partition(plan.record):
            return plan  # the partition in the record of a prepared claim stays: it is deactivated with the claim
        await self.undoing.pay_fabric(plan.record.device_uuids)
        others = [record for record in self.store.claims.values() if record.uid != plan.record.uid]
        return await self.thread(self.hands.with_fabric, plan, facts, others)

    async def _with_settings(self, plan: PreparePlan) -> tuple[PreparePlan, dict[str, str]]:
        """Return the plan with settings that fit its devices, and what was set before, for the store's meta table."""
        if not wanted_of(plan.record):
            return plan, {}
        refuse_contradiction(plan.record, self.store.claims.values())
        knobs = await self.thread(self.hands.knobs, plan.record)
        record = fit_settings(plan.record, knobs)
        return replace(plan, record=record), marks(record, knobs, self.store.meta, self._boot_id)

    def switched_on(self, plan: PreparePlan) -> dict[str, str]:
        """Return what the store's meta table is to say of partitioning that a plan switches on."""
        return {f"{PARTITIONING_KEY}{mode.device_uuid}": self._boot_id for mode in plan.mode_changes if mode.enabled}

    async def make_again(
        self, record: ClaimRecord, watch: Stopwatch, pod_claim: str | None = None
    ) -> ClaimRecord | None:
        """Make true what the record of a prepared claim says; the device locks are held. Raises AcceleratorError.

        ``pod_claim`` is the name that the pod gives the claim, if it is known.
        """
        self.suspect.add(record.uid)
        with watch.stage("restore"):
            found = await self.thread(self.hands.facts, record.device_uuids)
            refuse_faulty(record.reference, record.device_uuids, found.faults)
            plan = plan_restore(record, found.devices, self._inventory().dynamic, self.hands.backend.choose_id)
            plan = replace(plan, pod_claim=pod_claim)
            self.hands.refuse_sharing(plan.record)
            plan, notes = await self._with_settings(
                await self._with_fabric(await self._with_handovers(plan), found.devices)
            )
            notes.update(self.switched_on(plan))
            restoring = f"{RESTORING_KEY}{record.uid}"
            intended = with_chosen_ids(record, plan.record)
            if (plan.creates or wanted_of(intended)) and record.boot_id != self._boot_id:
                notes[restoring] = self._boot_id
            if notes or intended != record:
                await self.store.commit(Change(put=intended if intended != record else None, meta=notes))
            # The record stays "prepared" all the while: a crash in between is followed by another restore.
            restored = await self.thread(self._doing.make, plan, found.devices)
            done = restored.as_prepared(restored.devices, self._boot_id)
            await self.store.commit(Change(put=done, meta=self.undoing.cleared([restoring])))
            self.suspect.discard(record.uid)
            self._prepared(done.uid)
            return done

    async def restore(self, uid: str) -> None:
        """Make a prepared claim's partitions and CDI file exist again. Raises AcceleratorError."""
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
        """Undo a claim, wholly or half-way prepared, and forget it. Raises AcceleratorError, InUse among them."""
        async with self._claims.hold([uid]):
            record = self.store.claims.get(uid)
            if record is not None and (prepared_too or not record.prepared):
                if not record.prepared:
                    self.suspect.add(uid)  # the reconciler undoes it where this fails
                async with self._current(record) as current:
                    if current is not None and (prepared_too or not current.prepared):
                        await self.undo(current)

    async def forget_ahead(self, uid: str) -> None:
        """Undo a claim that was prepared ahead, unless the kubelet has asked for it since. Raises AcceleratorError."""
        async with self._claims.hold([uid]):
            record = self.store.claims.get(uid)
            if uid in self.ahead and record is not None:
                async with self._current(record) as current:
                    if uid in self.ahead and current is not None:
                        await self.undo(current)
            self.ahead.discard(uid)

    async def forget_reallocated(self, record: ClaimRecord, allocation: Allocation) -> None:
        """Undo a claim that was prepared with other devices than it has now, unless it has changed since ``record``.

        Raises AcceleratorError: InUse where the former devices are in use.
        """
        async with self._claims.hold([record.uid]):
            if self.store.claims.get(record.uid) == record:
                async with self._current(record) as current:
                    if current == record:
                        await self._undo_former(record, allocation)

    async def undo(self, record: ClaimRecord) -> None:
        """Undo a claim and forget it; the device locks are held. Raises AcceleratorError."""
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
            # An error is on its way to the kubelet; another one of the undoing must not take its place. The record stays.
            LOG.exception("claim %s is left half prepared; it is undone at the next call", record.describe())
