# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare prepared claims with the API server. Undo claims that it no longer has and that nothing uses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..api.client import ApiError, ApiUnreachable
from ..api.throttling import is_of_server, spread
from ..claims.allocation import allocated_here, decode_allocation
from ..claims.call_results import Reporter
from ..claims.operations import ClaimSource
from ..claims.service import ClaimService
from ..claims.startup_recovery import pids_using, reallocated
from ..claims.store.records import ClaimRecord
from ..core.errors import AcceleratorError, to_error
from ..kubelet.pod_resources import ContainerDevice
from ..logs import StateLog, fields, operation
from ..metrics import Metrics
from . import driver_state
from .driver_state import Shared, Snapshot

LOG = logging.getLogger(__name__)

# Seconds between comparisons of a claim with the API server, and for which a claim must be missing there before it is undone.
RECONCILE_SECONDS = 600.0
# The longest pause, in seconds, before failed claims are compared again.
RETRY_LIMIT = 60.0
# After this number of server errors in a row, the other claims are compared at the next attempt, because each request can take a timeout.
MAX_UNREACHABLE = 2
# Every FULL_PASSES-th pass reads all claims from the API server. The other passes leave out claims of running pods, because the kubelet
# unprepares these claims.
FULL_PASSES = 6
# The timeout, in seconds, of the query of the kubelet.
KUBELET_SECONDS = 5.0


def reconcile_pause() -> float:
    """Return the seconds until the next pass. The random part spreads the reads of nodes that started together."""
    return RECONCILE_SECONDS * random.uniform(1.0, 1.2)  # noqa: S311  no secret is made of it


def first_reconcile_pause() -> float:
    """Return the seconds until the first pass after a start. A power failure starts all nodes at the same time."""
    return RECONCILE_SECONDS * random.uniform(0.0, 0.2)  # noqa: S311  no secret is made of it


class Reconciler:
    """Check every prepared claim every ten minutes, and claims that a container uses once per hour.

    No claim is undone before the hardware has answered.
    """

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
        clock: Callable[[], float] = time.monotonic,
        query_used_devices: Callable[[float], Sequence[ContainerDevice]] = lambda _seconds: (),
    ) -> None:
        """Create a reconciler.

        ``query_used_devices`` returns the devices of claims that containers use, from the kubelet. Its argument is the timeout in
        seconds. It raises AcceleratorError.
        """
        self._clock = clock
        self._service = service
        self._metrics = metrics or Metrics()
        self._reporter = reporter
        self._source = source
        self._pool = pool
        self._snapshots = snapshots
        self._earlier_boot_uids = {uid for uid, record in service.store.claims.items() if record.boot_id != boot_id}
        #: The time, by ``clock``, at which a claim was first missing at the API server, by UID.
        self._missing_since: dict[str, float] = {}
        self._error_logs: dict[str, StateLog] = {}
        #: The pause in seconds that the API server requested during the last pass.
        self._retry_after = 0.0
        self._query_used_devices, self._kubelet_log = query_used_devices, StateLog(LOG)
        self._is_first_pass = True
        self._passes = random.randrange(FULL_PASSES)  # noqa: S311  spreads the full passes of nodes that started together
        self._companions_log, self._files_log = StateLog(LOG), StateLog(LOG)

    async def run(self) -> None:
        """Reconcile the claims until canceled: all of them every RECONCILE_SECONDS, and failed ones sooner."""
        while self._snapshots.value.survey is None:
            await asyncio.sleep(driver_state.RETRY_FIRST)
        delay, pending_uids, next_pass = driver_state.RETRY_FIRST, list[str](), self._clock() + first_reconcile_pause()
        # This work needs no requests to the API server, so it does not wait for the first pass.
        await self._reconcile_claims([uid for uid, record in self._service.store.claims.items() if not record.prepared])
        await self._reconcile_companions()
        await self._remove_stale_files()
        while True:
            if self._clock() >= next_pass:
                pending_uids = await self.reconcile()
                delay, next_pass = driver_state.RETRY_FIRST, self._clock() + reconcile_pause()
            elif pending_uids:
                delay = min(delay * 2, RETRY_LIMIT)
                pending_uids = await self._reconcile_claims(pending_uids)
            until_pass = max(next_pass - self._clock(), 0.0)
            await asyncio.sleep(max(min(delay, until_pass) if pending_uids else until_pass, self._retry_after))

    async def reconcile(self) -> list[str]:
        """Reconcile every claim once. Return the UIDs of failed claims, in the order of their next check."""
        uids = tuple(self._service.store.claims)
        for known in (self._missing_since, self._error_logs):
            for uid in known.keys() - set(uids):
                del known[uid]
        used = await self._used_claims()
        pending_uids = await self._reconcile_claims([uid for uid in uids if uid not in used])
        await self._reconcile_companions()
        await self._remove_stale_files()
        return pending_uids

    async def _reconcile_claims(self, uids: Sequence[str]) -> list[str]:
        """Reconcile claims. An error affects only its claim."""
        failed: list[str] = []
        unreachable, self._retry_after = 0, 0.0
        for number, uid in enumerate(uids):
            record = self._service.store.claims.get(uid)
            if record is None:
                continue
            try:
                await self._reconcile_claim(record)
                unreachable = 0
                self._error_logs.pop(uid, None)
            except Exception as error:
                failed.append(uid)
                if not isinstance(error, ApiUnreachable):  # the publisher reports that
                    text = f"claim {record.describe()} could not be compared with the API server: "
                    text += str(to_error(error, f"The check of claim {record.describe()}"))
                    if self._error_logs.setdefault(uid, StateLog(LOG)).report(text, level=logging.WARNING, uid=uid):
                        LOG.debug("the exception", exc_info=error)
                unreachable = unreachable + 1 if is_of_server(error) else 0
                self._retry_after = spread(getattr(error, "retry_after", None) or 0.0)
                if unreachable >= MAX_UNREACHABLE or self._retry_after:
                    return [*uids[number + 1 :], *failed]
        return failed

    async def _used_claims(self) -> Collection[str]:
        """Return the UIDs of claims that are not compared in this pass, because containers use all of their devices."""
        self._passes += 1
        if self._is_first_pass or self._passes % FULL_PASSES == 0:
            self._is_first_pass = False
            return ()
        try:
            used_devices = await asyncio.to_thread(self._query_used_devices, KUBELET_SECONDS)
        except AcceleratorError as error:
            self._kubelet_log.report(
                f"the kubelet does not show which claims are in use, so all claims are read: {error}"
            )
            return ()
        self._kubelet_log.report("the kubelet shows which claims are in use", level=logging.DEBUG)
        devices: dict[tuple[str, str], set[str]] = {}
        for each in used_devices:
            if each.driver == self._service.driver and each.pool == self._pool:
                devices.setdefault((each.namespace, each.claim), set()).add(each.device)
        return {
            uid
            for uid, record in self._service.store.claims.items()
            if record.prepared
            and record.devices
            and uid not in self._missing_since
            and {each.name for each in record.devices} == devices.get((record.namespace, record.name))
        }

    async def _remove_stale_files(self) -> None:
        """Remove the files of unknown claims."""
        try:
            for uid in await self._service.housekeeping.stale_files():
                self._metrics.finding("file-orphaned")
                with operation():
                    LOG.info("files of a claim that is not there: they are removed", extra=fields(uid=uid))
                    await self._service.housekeeping.remove_files(uid)
        except Exception as error:  # noqa: BLE001  the claims go on without
            error = to_error(error, "Removing files of claims that are not there")
            self._files_log.report(f"files of claims that are not there stay: {error}", level=logging.WARNING)
        else:
            self._files_log.report("no file is left of a claim that is not there", level=logging.DEBUG)

    async def _reconcile_companions(self) -> None:
        """Start the stopped companions of claims, and stop companions without a claim. An error affects only its companion."""
        for record in tuple(self._service.store.claims.values()):
            if record.shared and record.uid not in self._service.suspect:
                try:
                    await self._service.housekeeping.ensure_companions(record.uid)
                except Exception as error:  # noqa: BLE001  the programs of other claims are started
                    self._metrics.finding("companion-lost")
                    failure = to_error(error, f"Starting the programs of claim {record.describe()}")
                    self._reporter.failed(record.reference, "Prepare", failure)
        try:
            for uid in await self._service.housekeeping.orphaned_companions():
                self._metrics.finding("companion-orphaned")
                with operation():
                    await self._end_companions(uid)
        except Exception as error:  # noqa: BLE001  the claims go on without
            error = to_error(error, "Listing the programs that run for claims")
            self._companions_log.report(
                f"the programs that run for claims are not known: {error}", level=logging.WARNING
            )
        else:
            self._companions_log.report("the programs that run for claims are known", level=logging.DEBUG)

    async def _end_companions(self, uid: str) -> None:
        LOG.info("programs run for a claim that is not there: they are ended", extra=fields(uid=uid))
        try:
            await self._service.housekeeping.stop_orphaned_companions(uid)
        except Exception as error:  # noqa: BLE001  such as a device that another process has; the others are ended
            error = to_error(error, f"Ending the programs of {uid}")
            LOG.warning("programs of a claim that is not there still run: %s", error, extra=fields(uid=uid))

    async def _reconcile_claim(self, record: ClaimRecord) -> None:
        """Undo a claim that is half prepared, missing at the API server, or prepared with devices that are not its current ones."""
        service = self._service
        if not record.prepared:
            # Either it is being prepared now, or an earlier rollback has failed (suspect).
            if record.uid in service.suspect:
                self._metrics.finding("claim-half-prepared")
                with contextlib.suppress(AcceleratorError):
                    await service.forget(record.uid, prepared_too=False)
            return
        claim = await self._read_claim(record)
        if claim is None or allocated_here(claim, record.uid, service.driver, self._pool):
            self._missing_since.pop(record.uid, None)
            if claim is not None:
                await self._undo_if_reallocated(record, claim)
            return
        missing_for = self._clock() - self._missing_since.setdefault(record.uid, self._clock())
        is_of_earlier_boot = record.uid in self._earlier_boot_uids and record.uid not in service.prepared_by_kubelet
        if not is_of_earlier_boot and missing_for < RECONCILE_SECONDS:
            return
        found = await service.run_on_thread(service.hardware.facts, record.device_uuids)
        others = await service.run_on_thread(service.hardware.without_own_companions, record, found.devices)
        if pids_using(record, others):
            return
        self._metrics.finding("claim-gone")
        with operation():
            LOG.info(
                "forgot a claim that was deleted from the API server and whose devices nothing uses",
                extra=fields(claim=record.describe(), uid=record.uid),
            )
            with contextlib.suppress(AcceleratorError):
                await service.forget(record.uid)
                self._missing_since.pop(record.uid, None)

    async def _undo_if_reallocated(self, record: ClaimRecord, claim: Mapping[str, Any]) -> None:
        """Undo a claim whose prepared devices differ from its allocated ones. The kubelet then prepares it again."""
        try:
            allocation = decode_allocation(claim, record.reference, self._service.driver)
            if reallocated(record, allocation):
                self._metrics.finding("claim-reallocated")
                with operation():
                    await self._service.undo_reallocated(record, allocation)
        except AcceleratorError as error:
            self._reporter.failed(record.reference, "Prepare", error)

    async def _read_claim(self, record: ClaimRecord) -> Mapping[str, Any] | None:
        """Return a claim from the API server, empty if it does not exist there; None for a record without a name."""
        if not record.name:
            return None
        try:
            return await self._source.claim(record.namespace, record.name)
        except ApiError as error:
            if error.is_not_found:
                return {}
            raise
