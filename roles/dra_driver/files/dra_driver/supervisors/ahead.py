# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepares claims before their pods are bound: what takes time, as a change of mode or of a device's driver, is done by then.

Only while something is published that pods wait for, claims are watched at all: the API server cannot say which of them are a
node's. The kubelet's own call finds the claim prepared. A claim that the scheduler gives up is taken back at once; after a
restart in between, by the reconciler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ..api.client import ApiClient, ApiError, Json
from ..api.watching import Watched
from ..claims.service import ClaimService
from ..claims.statuses import Waiting, failed_entries, waiting
from ..core.errors import AcceleratorError
from ..logs import fields, operation
from .shared import Shared, Snapshot
from .statuses import OUTDATED, ClaimStatuses, StatusApi

LOG = logging.getLogger(__name__)

# How long it is tried to prepare a claim until the scheduler is told to look elsewhere, and how often.
GIVE_UP_SECONDS = 60.0
RETRY_FIRST, RETRY_LIMIT = 0.5, 8.0
# Whatever happens to be missed is seen by then.
VISIT_SECONDS = 30.0
# Errors that no waiting mends.
FINAL = (
    "claim-annotation",
    "claim-refused",
    "config-refused",
    "device-gone",
    "device-faulty",
    "partitioning-off",
    "overlap",
    "unsupported",
    "does-not-fit",
    "not-shareable",
)


class PreparingAhead:
    """Follows the claims that wait for this node's devices. ``path`` says where claims are listed."""

    def __init__(
        self,
        service: ClaimService,
        *,
        client: ApiClient,
        path: Callable[[], Awaitable[str]],
        api: StatusApi,
        statuses: ClaimStatuses,
        pool: str,
        snapshots: Shared[Snapshot],
        give_up: float = GIVE_UP_SECONDS,
    ) -> None:
        self._service = service
        self._api = api
        self._statuses = statuses
        self._pool = pool
        self._snapshots = snapshots
        self._give_up = give_up
        self._changed = asyncio.Event()
        self._trying: dict[str, tuple[Waiting, asyncio.Task[None]]] = {}
        self._claims: Watched[Waiting] = Watched(
            client, "resource claims that wait for devices", path, self._keep, changed=self._changed.set
        )

    def _keep(self, claim: Json) -> Waiting | None:
        return waiting(claim, self._service.driver, self._pool)

    async def run(self) -> None:
        """Wait for something that is waited for, then follow the claims as long as it is there; until cancelled."""
        while True:
            if self._is_waited_for():
                await self._follow()
            else:
                await self._snapshots.changed(VISIT_SECONDS)

    def _is_waited_for(self) -> bool:
        return any(offer.prepared_before_binding for offer in self._snapshots.value.inventory.offers.values())

    async def _follow(self) -> None:
        watcher = asyncio.get_running_loop().create_task(self._claims.run())
        try:
            while self._is_waited_for() and not watcher.done():
                self._changed.clear()
                if self._claims.current:
                    await self._visit()
                pause = asyncio.get_running_loop().create_task(self._changed.wait())
                await asyncio.wait((pause, watcher), timeout=VISIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
            if watcher.done():
                watcher.result()
        finally:
            watcher.cancel()
            running = [task for _claim, task in self._trying.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(watcher, *running, return_exceptions=True)
            self._trying.clear()

    async def _visit(self) -> None:
        """Begin with claims that wait, and take back those that are no longer allocated here."""
        there = {each.claim.uid: each for each in self._claims.items.values()}
        for uid, (claim, task) in tuple(self._trying.items()):
            if task.done():
                del self._trying[uid]
            elif uid not in there or there[uid].allocated_at != claim.allocated_at:
                task.cancel()
        for uid, claim in there.items():
            if claim.untold and uid not in self._trying:
                task = asyncio.get_running_loop().create_task(self._prepare(claim))
                task.add_done_callback(lambda _task: self._changed.set())
                self._trying[uid] = (claim, task)
        for uid in tuple(self._service.ahead - set(there) - set(self._trying)):
            await self._take_back(uid)

    async def _take_back(self, uid: str) -> None:
        with operation():
            LOG.info("claim was prepared for a pod that is not bound here: undone", extra=fields(uid=uid))
            try:
                await self._service.forget_ahead(uid)
            except AcceleratorError as error:
                LOG.warning("claim %s is undone later: %s", uid, error)

    async def _prepare(self, claim: Waiting) -> None:
        """Prepare a claim and say so; or, when there is no hope, that its pod is to go elsewhere."""
        until, delay = time.monotonic() + self._give_up, RETRY_FIRST
        while True:
            outcome = await self._service.prepare_ahead(claim.claim)
            try:
                if outcome.record is not None:
                    await self._statuses.write(outcome.record)
                    return
                if outcome.code in FINAL or time.monotonic() > until:
                    await self._refuse(claim, outcome.code, outcome.error)
                    return
            except ApiError as error:
                if error.status in OUTDATED and not error.is_of_server:
                    return  # the claim has changed, and the watch tells how
                LOG.warning("claim %s: %s", claim.claim.describe(), error)
            except AcceleratorError as error:
                LOG.warning("claim %s: %s", claim.claim.describe(), error)
            await asyncio.sleep(delay)
            delay = min(delay * 2, RETRY_LIMIT)

    async def _refuse(self, claim: Waiting, code: str, error: str) -> None:
        entries = failed_entries(self._service.driver, claim.devices, code, error, time.time())
        await self._api.apply_claim_devices(claim.claim, self._service.driver, entries)
