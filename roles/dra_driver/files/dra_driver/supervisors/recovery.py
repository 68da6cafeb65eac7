# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Serve claims as soon as the hardware answers, after the incomplete work of an earlier run was completed or undone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection
from typing import Any, Callable

from ..claims.call_results import Reporter
from ..claims.configs import obsolete_setting_entries
from ..claims.pending_cleanups import PendingDeactivation, obsolete_fabric_cleanup_entries
from ..claims.plan import must_disable_partitioning
from ..claims.service import ClaimService
from ..claims.startup_recovery import RecoveryPlan, obsolete_partitioning_entries, plan_recovery
from ..claims.store.tables import Change
from ..core.errors import AcceleratorError, to_error
from ..inventory import Survey
from ..logs import StateLog, fields, operation
from ..metrics import Metrics
from .driver_state import Conditions, Shared, Snapshot

LOG = logging.getLogger(__name__)

PART = "claims"


class Recovery:
    """Refuse claims while the hardware does not respond, and recover the claims of an earlier run once.

    ``scan`` scans the hardware, and ``report_stage`` is called with each completed stage.
    """

    def __init__(
        self,
        service: ClaimService,
        *,
        snapshots: Shared[Snapshot],
        conditions: Conditions,
        reporter: Reporter,
        scan: Callable[[], Awaitable[None]],
        report_stage: Callable[[str], None],
        boot_id: str,
        metrics: Metrics | None = None,
    ) -> None:
        self._service = service
        self._metrics = metrics or Metrics()
        self._snapshots = snapshots
        self._conditions = conditions
        self._reporter = reporter
        self._scan = scan
        self._report_stage = report_stage
        self._boot_id = boot_id
        #: The planned steps. It is set when the steps that must precede the first served claim are complete.
        self._plan: RecoveryPlan | None = None
        self._to_restore: set[str] = set()
        self._recovered = False
        self._faulty_uuids: frozenset[str] = frozenset()
        self._cleanup_log = StateLog(LOG)
        self._mode_logs: dict[str, StateLog] = {}
        self._fabric_logs: dict[int, StateLog] = {}

    async def run(self) -> None:
        """Process each scan until canceled. A second call continues where the first one has ended."""
        await self._repair_hooks()
        async for snapshot in self._snapshots.follow():
            if snapshot.survey is not None:
                if not self._recovered:
                    await self._recover(snapshot.survey)
                    self._recovered = True
                else:
                    await self._complete_pending_work(snapshot.survey, snapshot.inventory.faults)
                self._faulty_uuids = frozenset(snapshot.inventory.faults)
                self._service.set_ready()
                self._conditions.report(PART)
            elif snapshot.given_up:
                self._service.set_ready(snapshot.given_up)

    async def _repair_hooks(self) -> None:
        """Repair the CDI files of an earlier release. Containers can restart before the hardware responds."""
        try:
            repaired = await self._service.run_on_thread(self._service.hardware.repair_hooks)
        except OSError as error:
            LOG.warning("recovery: hooks without an environment cannot be repaired: %s", error)
            return
        if repaired:
            LOG.info("recovery: hooks without an environment repaired", extra=fields(claims=len(repaired)))

    async def _recover(self, current: Survey) -> None:
        """Restore the prepared claims of an earlier run, and undo its incomplete ones. Completed steps are not repeated."""
        service = self._service
        with operation():
            if self._plan is None:
                self._plan = await self._recover_before_serving(current)
                self._to_restore = set(self._plan.restore)
            plan = self._plan
            # From now on claims are served. A call of the kubelet also restores its claim.
            service.set_ready()
            self._conditions.report(PART)
            await asyncio.gather(*(self._restore(uid) for uid in plan.restore if uid in self._to_restore))
            for uid in await self._orphans():
                await self._step(service.housekeeping.stop_orphaned_companions(uid), "end-companions", uid)
            if plan.undo or plan.restore or plan.stale_files or plan.mode_changes:
                LOG.info(
                    "recovered",
                    extra=fields(undone=len(plan.undo), restored=len(plan.restore), stale_files=len(plan.stale_files)),
                )
                await self._scan()

    async def _recover_before_serving(self, current: Survey) -> RecoveryPlan:
        """Plan the recovery, and execute the steps that must precede the first served claim. Return the plan."""
        service, store = self._service, self._service.store
        files = await service.run_on_thread(service.hardware.cdi_uids)
        invalid = await service.run_on_thread(service.hardware.invalid_cdi_uids)
        plan = plan_recovery(
            store.claims,
            files,
            current.devices,
            store.meta,
            dynamic=current.dynamic,
            boot_id=self._boot_id,
            invalid=invalid,
        )
        self._report_stage("recovery-planned")
        marks = {
            **obsolete_partitioning_entries(current.devices, store.meta),
            **service.unprepare_runner.ownership.obsolete_cleanup_entries(),
            **obsolete_fabric_cleanup_entries(store.meta, self._boot_id),
            **obsolete_setting_entries(store.meta, self._boot_id),
        }
        if marks:
            await store.commit(Change(meta=marks))
        service.suspect.update(plan.restore)
        for uid in plan.undo:
            # A claim that was prepared after the plan was made stays.
            await self._step(service.forget(uid, prepared_too=False), "undo", uid)
        for uid in plan.stale_files:
            await self._step(service.housekeeping.remove_files(uid), "remove-cdi", uid)
        for uid in set(await service.run_on_thread(service.hardware.files.uids)) - set(store.claims):
            await self._step(service.housekeeping.remove_files(uid), "remove-metadata", uid)
        for change in plan.mode_changes:
            await self._step(
                service.housekeeping.disable_partitioning(change.device_uuid), "switch-off", change.device_uuid
            )
        return plan

    async def _restore(self, uid: str) -> None:
        await self._step(self._service.housekeeping.restore(uid), "restore", uid)
        self._to_restore.discard(uid)

    async def _complete_pending_work(self, current: Survey, faults: Collection[str]) -> None:
        """Complete pending cleanup, and restore prepared claims on devices that respond again."""
        service = self._service
        recovered_uuids = self._faulty_uuids - set(faults)
        for uuid in sorted(service.unprepare_runner.pending_uuids_on_device - set(faults)):
            try:
                await service.housekeeping.settle(uuid)
            except Exception as error:  # noqa: BLE001  an error affects only its device
                text = to_error(error, f"The pending cleanup of {uuid}")
                self._cleanup_log.report(f"the pending cleanup of {uuid} failed: {text}", level=logging.WARNING)
            else:
                self._cleanup_log.report("no cleanup is pending", level=logging.DEBUG)
        for cleanup in service.unprepare_runner.fabric_cleanups:
            await self._settle_fabric(cleanup)
        claimed_uuids = {uuid for record in service.store.claims.values() for uuid in record.device_uuids}
        # The partitioning mode is still enabled on a device that was read late, or whose mode could not be disabled after its last claim.
        for uuid in sorted(current.devices.keys() - claimed_uuids):
            if must_disable_partitioning(current.devices[uuid], service.store.meta):
                await self._disable_partitioning(uuid)
        for uid in sorted(service.suspect):
            record = service.store.claims.get(uid)
            if record is not None and record.prepared and recovered_uuids & set(record.device_uuids):
                await self._step(service.housekeeping.restore(uid), "restore", uid)

    async def _settle_fabric(self, cleanup: PendingDeactivation) -> None:
        state = self._fabric_logs.setdefault(cleanup.number, StateLog(LOG))
        try:
            await self._service.housekeeping.complete_fabric_cleanup(cleanup)
        except Exception as error:  # noqa: BLE001  an error affects only its partition
            text = to_error(error, f"The {cleanup.describe()}")
            state.report(f"the pending cleanup failed: {text}", level=logging.WARNING)
        else:
            del self._fabric_logs[cleanup.number]

    async def _disable_partitioning(self, uuid: str) -> None:
        state = self._mode_logs.setdefault(uuid, StateLog(LOG))
        try:
            await self._service.housekeeping.disable_partitioning(uuid)
        except Exception as error:  # noqa: BLE001  an error affects only its device
            text = to_error(error, f"Switching partitioning of {uuid} off")
            state.report(f"partitioning stays on: {text}", level=logging.WARNING, device=uuid)
            self._metrics.recovery_step("switch-off", "failure")
        else:
            state.report("switched partitioning off, like before the device's claims", device=uuid)
            self._metrics.recovery_step("switch-off", "success")

    async def _orphans(self) -> tuple[str, ...]:
        try:
            return await self._service.housekeeping.orphaned_companions()
        except Exception as error:  # noqa: BLE001  recovery continues without the list of programs
            text = to_error(error, "Listing the programs that run for claims")
            LOG.warning("recovery: the programs that run for claims cannot be listed: %s", text)
            return ()

    async def _step(self, work: Awaitable[Any], what: str, subject: str) -> None:
        """Run one step. An exception affects only this claim or device, and does not end the recovery."""
        outcome = "failure"
        try:
            await work
            outcome = "success"
        except Exception as error:
            if not isinstance(error, (AcceleratorError, OSError)):
                LOG.exception("recovery: unexpected exception", extra=fields(step=what, subject=subject))
            failure = to_error(error, f"Step {what} of the recovery of {subject}")
            LOG.warning("recovery: %s failed: %s", what, failure, extra=fields(subject=subject))
            record = self._service.store.claims.get(subject)
            if record is not None and not isinstance(error, OSError):
                self._reporter.failed(record.reference, "Restore" if what == "restore" else "Unprepare", failure)
        else:
            LOG.info("recovery: %s", what, extra=fields(subject=subject))
        finally:
            self._metrics.recovery_step(what, outcome)
        self._report_stage("recovery-step-done")
