# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Lets claims be served as soon as the hardware answers, and first ends what an earlier run has begun."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection
from typing import Any, Callable

from ..claims.answers import Reporter
from ..claims.plan import mode_goes_off
from ..claims.recovery import plan_recovery, stale_marks
from ..claims.service import ClaimService
from ..claims.settings import void_settings
from ..claims.store_tables import Change
from ..core.errors import AcceleratorError
from ..inventory import Survey
from ..logs import StateLog, fields, operation
from ..metrics import Metrics, NoMetrics
from .shared import Conditions, Shared, Snapshot

LOG = logging.getLogger(__name__)

PART = "claims"


class Recovery:
    """Follows the hardware: holds claims back while it is given up, and recovers those of an earlier run once."""

    def __init__(
        self,
        service: ClaimService,
        *,
        snapshots: Shared[Snapshot],
        conditions: Conditions,
        reporter: Reporter,
        look: Callable[[], Awaitable[None]],
        reached: Callable[[str], None],
        boot_id: str,
        metrics: Metrics | None = None,
    ) -> None:
        self._service = service
        self._metrics = metrics or NoMetrics()
        self._snapshots = snapshots
        self._conditions = conditions
        self._reporter = reporter
        self._look = look
        self._reached = reached
        self._boot_id = boot_id
        self._recovered = False
        self._faulty: frozenset[str] = frozenset()
        self._owing = StateLog(LOG)
        self._modes: dict[str, StateLog] = {}

    async def run(self) -> None:
        """Follow the hardware until cancelled."""
        async for snapshot in self._snapshots.follow():
            if snapshot.survey is not None:
                if not self._recovered:
                    await self._recover(snapshot.survey)
                    self._recovered = True
                else:
                    await self._catch_up(snapshot.survey, snapshot.inventory.faults)
                self._faulty = frozenset(snapshot.inventory.faults)
                self._service.set_ready()
                self._conditions.report(PART)
            elif snapshot.given_up:
                self._service.set_ready(snapshot.given_up)

    async def _recover(self, current: Survey) -> None:
        """Bring the claims of an earlier run, or of before a reboot, to an end: prepared or cleanly gone."""
        service, store = self._service, self._service.store
        with operation():
            files = await service.thread(service.hands.cdi_uids)
            invalid = await service.thread(service.hands.invalid_cdi_uids)
            plan = plan_recovery(
                store.claims,
                files,
                current.devices,
                store.meta,
                dynamic=current.dynamic,
                boot_id=self._boot_id,
                invalid=invalid,
            )
            self._reached("recovery-planned")
            marks = {
                **stale_marks(current.devices, store.meta),
                **service.undoing.ownership.voided(),
                **void_settings(store.meta, self._boot_id),
            }
            if marks:
                await store.commit(Change(meta=marks))
            service.suspect.update(plan.restore)
            for uid in plan.undo:
                await self._step(service.forget(uid), "undo", uid)
            for uid in plan.stale_files:
                await self._step(service.thread(service.hands.remove_cdi, uid), "remove-cdi", uid)
            for uid in set(await service.thread(service.hands.files.uids)) - set(store.claims):
                await self._step(service.thread(service.hands.files.remove, uid), "remove-metadata", uid)
            for change in plan.mode_changes:
                await self._step(service.upkeep.switch_off(change.device_uuid), "switch-off", change.device_uuid)
            # From here on the kubelet is served: a claim that it asks for is restored then and there.
            service.set_ready()
            self._conditions.report(PART)
            await asyncio.gather(*(self._step(service.restore(uid), "restore", uid) for uid in plan.restore))
            for uid in await self._orphans():
                await self._step(service.upkeep.end_companions(uid), "end-companions", uid)
            if plan.undo or plan.restore or plan.stale_files or plan.mode_changes:
                LOG.info(
                    "recovered",
                    extra=fields(undone=len(plan.undo), restored=len(plan.restore), stale_files=len(plan.stale_files)),
                )
                await self._look()

    async def _catch_up(self, current: Survey, faults: Collection[str]) -> None:
        """Do on devices that answer again, or at last, what had to wait: undo what is owed, make prepared claims exist again."""
        service = self._service
        healed = self._faulty - set(faults)
        for uuid in sorted(service.undoing.owing - set(faults)):
            try:
                await service.upkeep.settle(uuid)
            except AcceleratorError as error:
                self._owing.report(f"what is owed on {uuid} cannot be undone yet: {error}", level=logging.WARNING)
            else:
                self._owing.report("nothing is owed", level=logging.DEBUG)
        held = {uuid for record in service.store.claims.values() for uuid in record.device_uuids}
        # Left on by a run before this one, on a device that is read late; or it did not go off when its last claim did.
        for uuid in sorted(current.devices.keys() - held):
            if mode_goes_off(current.devices[uuid], service.store.meta):
                await self._switch_off(uuid)
        for uid in sorted(service.suspect):
            record = service.store.claims.get(uid)
            if record is not None and record.prepared and healed & set(record.device_uuids):
                await self._step(service.restore(uid), "restore", uid)

    async def _switch_off(self, uuid: str) -> None:
        state = self._modes.setdefault(uuid, StateLog(LOG))
        try:
            await self._service.upkeep.switch_off(uuid)
        except AcceleratorError as error:
            state.report(f"partitioning stays on: {error}", level=logging.WARNING, device=uuid)
            self._metrics.recovery_step("switch-off", "failure")
        else:
            state.report("partitioning is off, as it was before its claims", device=uuid)
            self._metrics.recovery_step("switch-off", "success")

    async def _orphans(self) -> tuple[str, ...]:
        try:
            return await self._service.upkeep.orphans()
        except AcceleratorError as error:
            LOG.warning("recovery: the programs that run for claims cannot be told: %s", error)
            return ()

    async def _step(self, work: Awaitable[Any], what: str, subject: str) -> None:
        outcome = "failure"
        try:
            await work
            outcome = "success"
        except (AcceleratorError, OSError) as error:
            LOG.warning("recovery: %s failed: %s", what, error, extra=fields(subject=subject))
            record = self._service.store.claims.get(subject)
            if record is not None and isinstance(error, AcceleratorError):
                self._reporter.failed(record.reference, "Restore" if what == "restore" else "Unprepare", error)
        else:
            LOG.info("recovery: %s", what, extra=fields(subject=subject))
        finally:
            self._metrics.recovery_step(what, outcome)
        self._reached("recovery-step-done")
