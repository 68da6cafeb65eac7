# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Holds prepared claims against the API server, and drops those that it no longer knows and nothing uses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from ..api.client import ApiError
from ..claims.allocation import allocated_here, decode_allocation
from ..claims.answers import Reporter
from ..claims.compare import reallocated
from ..claims.records import ClaimRecord
from ..claims.recovery import droppable
from ..claims.service import ClaimService
from ..core.errors import AcceleratorError
from ..logs import StateLog, fields, operation
from ..metrics import Metrics, NoMetrics
from . import shared
from .shared import Shared, Snapshot

LOG = logging.getLogger(__name__)

# How often claims are held against the API server, and how often one must be missing there before it is dropped.
RECONCILE_SECONDS = 600.0
MISSING_LIMIT = 2
RETRY_LIMIT = 60.0


class ClaimSource(Protocol):
    """Where claims are read."""

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return one ResourceClaim. Raises ApiError."""


class Reconciler:
    """Visits every prepared claim every ten minutes. Nothing is dropped before the hardware has answered."""

    def __init__(
        self,
        service: ClaimService,
        *,
        source: ClaimSource,
        reporter: Reporter,
        pool: str,
        boot_id: str,
        snapshots: Shared[Snapshot],
        metrics: Metrics | None = None,
    ) -> None:
        self._service = service
        self._metrics = metrics or NoMetrics()
        self._reporter = reporter
        self._source = source
        self._pool = pool
        self._snapshots = snapshots
        self._former_boot = {uid for uid, record in service.store.claims.items() if record.boot_id != boot_id}
        self._missing: dict[str, int] = {}
        self._companions, self._files = StateLog(LOG), StateLog(LOG)

    async def run(self) -> None:
        """Visit the claims until cancelled."""
        delay = shared.RETRY_FIRST
        while True:
            try:
                if self._snapshots.value.survey is not None:
                    await self.visit()
                    await asyncio.sleep(RECONCILE_SECONDS)
                delay = shared.RETRY_FIRST
            except AcceleratorError:
                delay = min(delay * 2, RETRY_LIMIT)  # the publisher reports that the API server does not answer
            await asyncio.sleep(delay)

    async def visit(self) -> None:
        """Visit every claim once. Raises ApiError, ApiUnreachable."""
        for record in tuple(self._service.store.claims.values()):
            await self._visit(record)
        await self._visit_companions()
        await self._visit_files()

    async def _visit_files(self) -> None:
        """Remove the files of claims that are not there."""
        try:
            for uid in await self._service.upkeep.stale_files():
                self._metrics.finding("file-orphaned")
                with operation():
                    LOG.info("files of a claim that is not there: they are removed", extra=fields(uid=uid))
                    await self._service.upkeep.remove_files(uid)
        except OSError as error:
            self._files.report(f"files of claims that are not there stay: {error}", level=logging.WARNING)
        else:
            self._files.report("no file is left of a claim that is not there", level=logging.DEBUG)

    async def _visit_companions(self) -> None:
        """Start the programs of claims that do not run, and end those of no claim. What goes wrong with one is its own."""
        for record in tuple(self._service.store.claims.values()):
            if record.shared and record.uid not in self._service.suspect:
                try:
                    await self._service.upkeep.keep_companions(record.uid)
                except AcceleratorError as error:
                    self._metrics.finding("companion-lost")
                    self._reporter.failed(record.reference, "Prepare", error)
        try:
            for uid in await self._service.upkeep.orphans():
                self._metrics.finding("companion-orphaned")
                with operation():
                    LOG.info("programs run for a claim that is not there: they are ended", extra=fields(uid=uid))
                    await self._service.upkeep.end_companions(uid)
        except AcceleratorError as error:
            self._companions.report(f"the programs that run for claims are not known: {error}", level=logging.WARNING)
        else:
            self._companions.report("the programs that run for claims are known", level=logging.DEBUG)

    async def _visit(self, record: ClaimRecord) -> None:
        service = self._service
        if not record.prepared:
            # Either it is being prepared at this moment, or undoing it failed and the kubelet never asked again.
            if record.uid in service.suspect:
                self._metrics.finding("claim-half-prepared")
                with contextlib.suppress(AcceleratorError):
                    await service.forget(record.uid, prepared_too=False)
            return
        claim = await self._claim(record)
        if claim is None or allocated_here(claim, record.uid, service.driver, self._pool):
            self._missing.pop(record.uid, None)
            if claim is not None:
                await self._compare(record, claim)
            return
        self._missing[record.uid] = self._missing.get(record.uid, 0) + 1
        from_former_boot = record.uid in self._former_boot and record.uid not in service.asked
        if not from_former_boot and self._missing[record.uid] < MISSING_LIMIT:
            return
        found = await service.thread(service.hands.facts, record.device_uuids)
        others = await service.thread(service.hands.others, record, found.devices)
        if not droppable(record, others):
            return
        self._metrics.finding("claim-gone")
        with operation():
            LOG.info(
                "claim is gone from the API server and nothing uses its devices: dropped",
                extra=fields(claim=record.describe(), uid=record.uid),
            )
            with contextlib.suppress(AcceleratorError):
                await service.forget(record.uid)
                self._missing.pop(record.uid, None)

    async def _compare(self, record: ClaimRecord, claim: Mapping[str, Any]) -> None:
        """Undo a claim that was prepared with other devices than it has now; the kubelet has it prepared anew."""
        try:
            allocation = decode_allocation(claim, record.reference, self._service.driver)
            if reallocated(record, allocation):
                self._metrics.finding("claim-reallocated")
                with operation():
                    await self._service.forget_reallocated(record, allocation)
        except AcceleratorError as error:
            self._reporter.failed(record.reference, "Prepare", error)

    async def _claim(self, record: ClaimRecord) -> Mapping[str, Any] | None:
        """Return a claim as the API server has it, empty for one that it has not; None for a record without a name."""
        if not record.name:
            return None
        try:
            return await self._source.claim(record.namespace, record.name)
        except ApiError as error:
            if error.status == 404:
                return {}
            raise
