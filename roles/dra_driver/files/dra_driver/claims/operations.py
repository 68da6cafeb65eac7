# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Operations on claims whose locks are held: read devices, plan, execute, restore, and undo.

``ClaimService`` adds the calls of the kubelet. The parts of the service use these operations, and do not import the service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable, Protocol, TypeVar

from ..core.errors import AcceleratorError, BackendUnavailable
from ..core.model import Device, Placement
from ..deadlines import within
from ..metrics import Metrics, Stopwatch
from .allocation import Allocation
from .call_results import Reporter
from .claim_fabric import deactivation_pending_error
from .configs import settings_by_uuid
from .device_reads import on_thread, read_facts, refuse_missing
from .hardware_executor import HardwareExecutor
from .locking import DeviceGuard, NamedLocks
from .partitions.ownership import RESTORING_KEY, Ownership
from .plan import Inventory, PreparePlan, plan_prepare, plan_restore, refuse_faulty, with_chosen_ids
from .plan_runner import PlanCompletion, PlanRunner, Work
from .store.records import ClaimRecord, ClaimReference
from .store.store import Store
from .store.tables import Change
from .unprepare import UnprepareRunner

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# The default time, in seconds, that a call waits while the driver starts.
READY_SECONDS = 5.0


class ClaimSource(Protocol):
    """Reads claims."""

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return one ResourceClaim."""


@dataclass(frozen=True)
class ClaimContext:
    """The objects of a driver that operations on claims need.

    ``inventory`` returns the published devices. ``report_prepared`` is called with the UID of each claim that was prepared
    or restored. A call waits up to ``ready_seconds`` (default READY_SECONDS) until claims can
    be served.
    """

    driver: str
    hardware: HardwareExecutor
    store: Store
    source: ClaimSource
    reporter: Reporter
    metrics: Metrics
    executor: ThreadPoolExecutor
    boot_id: str
    inventory: Callable[[], Inventory]
    ownership: Ownership
    devices: DeviceGuard
    ready_seconds: float | None = None
    report_prepared: Callable[[str], None] = lambda _uid: None


class ClaimOperations:
    """Work on one driver's claims on this node. Except for ``restore``, the caller holds the locks of a claim's devices.

    set_ready() sets whether claims can be served.
    """

    def __init__(self, context: ClaimContext) -> None:
        self.driver = context.driver
        self.hardware = hardware = context.hardware
        self.store = store = context.store
        self.source = context.source
        self.reporter = context.reporter
        self.metrics = context.metrics
        self.ownership = ownership = context.ownership
        self._executor = context.executor
        self._boot_id = boot_id = context.boot_id
        self._inventory = context.inventory
        self._devices = context.devices
        self._report_prepared = context.report_prepared
        self._ready_seconds = READY_SECONDS if context.ready_seconds is None else context.ready_seconds
        self._ready = asyncio.Event()
        self._not_ready_reason = "the driver is starting"
        self._claim_locks = NamedLocks()
        self.unprepare_runner = UnprepareRunner(
            hardware=hardware, store=store, ownership=ownership, boot_id=boot_id, run_on_thread=self.run_on_thread
        )
        self.completion = PlanCompletion(hardware, store, boot_id, self.unprepare_runner, self.run_on_thread)
        self._runner = PlanRunner(hardware, store, boot_id)
        # UIDs of claims whose partitions or CDI file can differ from the record. Their next Prepare restores them.
        self.suspect: set[str] = set()
        # UIDs of claims that the kubelet has prepared since this process started.
        self.prepared_by_kubelet: set[str] = set()
        # UIDs of claims that were prepared before their pod was bound, and that the kubelet has not prepared yet.
        self.prepared_ahead: set[str] = set()
        # When the allocation of a claim was last read, by its UID.
        self._allocation_read_at: dict[str, float] = {}

    def set_ready(self, reason: str = "") -> None:
        """Allow claims to be served, or block them for a reason."""
        self._not_ready_reason = reason
        if reason:
            self._ready.clear()
        else:
            self._ready.set()

    async def wait_until_ready(self) -> None:
        """Wait until claims can be served, for at most ``ready_seconds``. Raises BackendUnavailable with the cause."""
        if self._ready.is_set():
            return
        try:
            await within(self._ready.wait(), self._ready_seconds)
        except asyncio.TimeoutError:
            if self._ready.is_set():  # just now, before the loop ran this code
                return
            raise BackendUnavailable(
                f"The driver {self.driver} cannot serve claims yet: {self._not_ready_reason}",
                hint="The driver and the kubelet retry it.",
            ) from None

    async def run_on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run blocking work on a thread of the driver's pool. The log lines of the work contain the operation's ID."""
        return await on_thread(self._executor, function, *arguments)

    def lock_devices(self, uuids: Collection[str]) -> AbstractAsyncContextManager[None]:
        """Lock devices for reads and changes. Raises InUse or BackendUnavailable with the holder of the lock."""
        return self._devices.hold(uuids)

    @asynccontextmanager
    async def _lock_devices_of(self, record: ClaimRecord) -> AsyncIterator[ClaimRecord | None]:
        """Lock the devices of a claim, and yield the claim's current record, or None if it was removed.

        The caller holds the lock of the claim. Another claim's Prepare can have changed the record before the devices were
        locked: it undoes leftovers, and moves partitions.
        """
        async with self._devices.hold(record.device_uuids):
            yield self.store.claims.get(record.uid)

    async def facts(self, reference: ClaimReference, uuids: Collection[str]) -> Mapping[str, Device]:
        """Return fresh facts of locked devices, after their pending cleanup. Raises ClaimError."""
        found = await read_facts(self.hardware, uuids, self.run_on_thread)
        refuse_faulty(reference, uuids, found.faults)
        pending = self.unprepare_runner.pending_uuids_on_device & set(uuids)
        if pending:
            for uuid in sorted(pending & set(found.devices)):
                await self.unprepare_runner.clean_up(found.devices[uuid])
            found = await self.run_on_thread(self.hardware.facts, uuids)
            refuse_faulty(reference, uuids, found.faults)
        refuse_missing(uuids, found.devices)
        return found.devices

    def plan(
        self, allocation: Allocation, facts: Mapping[str, Device], refused: Collection[tuple[str, Placement]] = ()
    ) -> PreparePlan:
        """Plan how to prepare a claim, from fresh facts of its devices.

        ``refused`` are the placements that devices have rejected, with the UUID of the device.
        """
        plan = plan_prepare(
            allocation,
            self._inventory(),
            facts,
            self.store.claims,
            config_kinds=self.hardware.backend.config_kinds,
            cdi_kind=self.hardware.backend.cdi_kind,
            boot_id=self._boot_id,
            now=time.time(),
            refused=refused,
            choose_id=self.hardware.backend.choose_id,
        )
        self.hardware.report_stage("planned")
        return plan

    async def execute(self, plan: PreparePlan, facts: Mapping[str, Device], watch: Stopwatch) -> ClaimRecord:
        """Prepare a claim as planned. A failure is rolled back. The device locks are held. Raises AcceleratorError."""
        watch.kind = plan.record.kind
        plan, meta_entries = await self.completion.complete(plan, facts)
        self.ownership.note(plan.record)
        work = Work(plan, facts, meta_entries, watch)
        return await self.finish(work, self.run_on_thread(self._runner.execute, work))

    async def finish(self, work: Work, execution: Awaitable[ClaimRecord]) -> ClaimRecord:
        """Wait for the execution of a plan. A failure is rolled back. Raises AcceleratorError."""
        try:
            done = await execution
        except Exception:
            # Roll back after any exception. Otherwise the record "preparing", a partition, or a file would stay until the
            # next call for the claim. The caller reports the exception.
            if work.has_begun:
                with work.watch.stage("undo"):
                    await self._undo_quietly(work.plan.record)
            raise
        self.suspect.discard(done.uid)
        self.prepared_by_kubelet.add(done.uid)
        self.hardware.report_stage("recorded-prepared")
        self._report_prepared(done.uid)
        return done

    async def restore_locked(self, record: ClaimRecord, watch: Stopwatch, pod_claim: str | None = None) -> ClaimRecord:
        """Restore the devices and files of a prepared claim, whose device locks are held, from its record.

        ``pod_claim`` is the pod's name for the claim, if it is known. Raises AcceleratorError.
        """
        self.suspect.add(record.uid)
        with watch.stage("restore"):
            found = await self.run_on_thread(self.hardware.facts, record.device_uuids)
            refuse_faulty(record.reference, record.device_uuids, found.faults)
            plan = plan_restore(
                record,
                found.devices,
                self._inventory().dynamic,
                self.hardware.backend.choose_id,
                is_from_previous_boot=self.ownership.is_from_previous_boot(record),
            )
            plan, meta_entries = await self.completion.complete(replace(plan, pod_claim=pod_claim), found.devices)
            restoring = f"{RESTORING_KEY}{record.uid}"
            intended = with_chosen_ids(record, plan.record)
            if (plan.partitions_to_create or settings_by_uuid(intended)) and record.boot_id != self._boot_id:
                meta_entries[restoring] = self._boot_id
            if meta_entries or intended != record:
                await self.store.commit(Change(put=intended if intended != record else None, meta=meta_entries))
            # The record stays "prepared", so that the next start restores the claim again if the driver crashes now.
            restored = await self.run_on_thread(self._runner.execute_without_records, plan, found.devices)
            done = restored.as_prepared(restored.devices, self._boot_id)
            await self.store.commit(Change(put=done, meta=self.unprepare_runner.cleared([restoring])))
            self.suspect.discard(record.uid)
            self._report_prepared(done.uid)
            return done

    async def restore(self, uid: str) -> None:
        """Restore a prepared claim's partitions and CDI file. Raises AcceleratorError."""
        async with self._claim_locks.hold([uid]):
            record = self.store.claims.get(uid)
            if record is None or not record.prepared:  # unprepared since, or its next prepare has failed
                return
            watch, code = Stopwatch(self.metrics, "restore", record.kind), "internal"
            try:
                async with self._lock_devices_of(record) as current:
                    if current is not None and current.prepared:
                        await self.restore_locked(current, watch)
                code = ""
            except AcceleratorError as error:
                code = error.code
                raise
            finally:
                watch.finish(code)

    async def undo(self, record: ClaimRecord) -> None:
        """Undo a claim and delete its record. The device locks are held. Raises AcceleratorError."""
        self.suspect.add(record.uid)
        undone = await self.unprepare_runner.undo(record)
        if undone.rejection is not None:
            self.reporter.failed(record.reference, "Unprepare", deactivation_pending_error(undone.rejection))
        self.suspect.discard(record.uid)
        self.prepared_by_kubelet.discard(record.uid)
        self.prepared_ahead.discard(record.uid)
        self._allocation_read_at.pop(record.uid, None)
        self.hardware.report_stage("record-removed")

    async def _undo_quietly(self, record: ClaimRecord) -> None:
        """Undo a claim, and log an error."""
        try:
            await self.undo(record)
        except Exception:
            # The kubelet gets the original error, not the error of the rollback. The record stays.
            LOG.exception("claim %s is left half prepared; it is undone at the next call", record.describe())
