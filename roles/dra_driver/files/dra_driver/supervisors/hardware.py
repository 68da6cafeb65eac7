# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Scan the hardware periodically and on request, and publish the results to the other parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Callable, TypeVar

from ..claims.partitions.ownership import Ownership
from ..claims.refusals import Refusals
from ..claims.store.records import ClaimRecord
from ..core.errors import AcceleratorError, BackendUnavailable, InUse, unexpected
from ..core.model import Finding, Surroundings
from ..core.partitioning.rules import Rule
from ..core.repartition.record import Watch
from ..core.texts import join_problems
from ..core.vendors.protocol import Backend
from ..deadlines import within
from ..inventory import survey, with_previous_offers
from ..logs import StateLog, fields
from . import driver_state
from .driver_state import Conditions, Shared, Snapshot
from .library_release import LibraryLock

LOG = logging.getLogger(__name__)
T = TypeVar("T")

PART = "hardware"
# The number of consecutive failed scans after which the devices are withdrawn. The first scan after a start has no such delay.
MAX_FAILED_SCANS = 3
# Seconds for which a scan waits for a device that was never read, and between the scans until it is read.
FIRST_READ_SECONDS = 2.0
# The minimum pause, in seconds, between two requested scans.
MIN_PAUSE_SECONDS = 0.25
# Seconds between checks of the surroundings: the PCI devices and the loaded driver. No event reports their changes.
SURROUNDINGS_SECONDS = 1.0


class HardwareWatch:
    """Scan one vendor's hardware, write ``snapshots``, and open and close the backend.

    ``interval`` and ``full_interval`` are the seconds between scans of the changing facts and of all facts. ``scan_requested`` requests
    an earlier scan. ``apply_repair_marks`` is called before each scan, and before the library is opened.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        driver: str,
        pool: str,
        rules: tuple[Rule, ...],
        interval: float,
        full_interval: float,
        ownership: Ownership,
        snapshots: Shared[Snapshot],
        conditions: Conditions,
        library_lock: LibraryLock,
        scan_requested: asyncio.Event,
        report_problem: Callable[[str, str], None],
        refusals: Refusals | None = None,
        repartition: Watch | None = None,
        apply_repair_marks: Callable[[], object] = lambda: None,
        claims: Callable[[], Collection[ClaimRecord]] = tuple,
    ) -> None:
        self._apply_repair_marks = apply_repair_marks
        self._claims = claims
        self._repartition = repartition
        self._backend = backend
        self._driver = driver
        self._pool = pool
        self._rules = rules
        self._interval = interval
        self._full_interval = full_interval
        self._last_full_scan = float("-inf")  # time of the last full scan, on the event loop's clock
        self._ownership = ownership
        self._refusals = refusals or Refusals()
        self._snapshots = snapshots
        self._conditions = conditions
        self._report_problem = report_problem
        self._devices_log = StateLog(LOG)
        self._reported_causes: tuple[tuple[int, str, bool], ...] = ()
        self._edits_log, self._defects_log = StateLog(LOG), StateLog(LOG)
        self._groups_log, self._unpublished_groups = StateLog(LOG), ""
        self._scan_lock = asyncio.Lock()
        self._scan_requested = scan_requested
        self._library_lock = library_lock
        self._is_lent = False
        self._surroundings: Surroundings | None = None
        self._surroundings_changed = False  # since the library was opened
        self._has_unread_devices = False  # the vendor's library is still reading them for the first time
        # A separate thread, so that operations of claims do not delay a scan.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{backend.vendor}-scan")

    async def run(self) -> None:
        """Scan until canceled. Hardware errors are reported and retried."""
        delay, is_open = driver_state.RETRY_FIRST, False
        failures = MAX_FAILED_SCANS  # no earlier scan has succeeded, so the first failure is reported
        while True:
            try:
                if is_open and self._library_lock.is_requested:
                    is_open = False
                    await self._lend_library()
                if not is_open:
                    self._library_lock.acquire()
                    await self._check_surroundings()  # later changes need another opening of the library
                    self._apply_repair_marks()
                    await self._run_on_thread(self._backend.open)
                    is_open = True
                elif self._surroundings_changed:
                    LOG.info("devices or their driver have come or gone", extra=fields(driver=self._driver))
                    self._last_full_scan = float("-inf")
                    await self._run_on_thread(self._backend.reopen)
                self._surroundings_changed = False
                self._apply_repair_marks()
                await self.scan()
                failures, delay = 0, driver_state.RETRY_FIRST
                await self._pause(
                    min(self._interval, FIRST_READ_SECONDS) if self._has_unread_devices else self._interval
                )
            except Exception as error:
                failed = error
                if not isinstance(error, AcceleratorError):
                    failed = unexpected(error, "Scanning the devices")
                    if self._defects_log.report(str(failed), level=logging.ERROR, driver=self._driver):
                        LOG.exception("unexpected exception in a scan", extra=fields(driver=self._driver))
                failures += 1
                if failures >= MAX_FAILED_SCANS:
                    await self._give_up(failed)
                    is_open = False
                await self._pause(delay)
                delay = min(delay * 2, driver_state.RETRY_LIMIT)

    async def scan(self) -> None:
        """Scan the hardware, and write the result to ``snapshots`` after the first device was read. Raises BackendUnavailable."""
        if self._is_lent:
            raise BackendUnavailable(
                f"The vendor's library is lent to {self._library_lock.holder}",
                hint="A device is being reset.",
                code="library-lent",
            )
        async with self._scan_lock:
            with self._ownership.observe() as observation:
                findings = await self._discover()
                while findings and all(finding.is_first_read_pending for finding in findings):
                    findings = await self._discover()
                owned = observation.owned()
            self._has_unread_devices = any(finding.is_first_read_pending for finding in findings)
            found = await self._run_on_thread(survey, self._backend, findings, self._rules, owned)
            former = self._snapshots.value.survey
            known = former.devices if former is not None else {}
            held = self._repartition.held(known) if self._repartition is not None else frozenset()
            found = with_previous_offers(found, former, held | found.failed)
            found = replace(found, offers=self._refusals.taint_offers(self._driver, found.offers, found.devices))
            self._snapshots.put(
                Snapshot(
                    survey=found,
                    inventory=found.inventory(self._pool),
                    scanned_at=time.time(),
                    scanned_clock=time.monotonic(),
                )
            )
            self._conditions.report(PART)
            self._report_devices(found.findings)
            if found.left_out or self._unpublished_groups:
                self._unpublished_groups = join_problems(f"{name}: {why}" for name, why in found.left_out.items())
                self._groups_log.report(
                    f"groups that are not published: {self._unpublished_groups or 'none'}", driver=self._driver
                )
            await self._check_edits()

    async def reset(self, uuids: Sequence[str]) -> None:
        """Reset devices together. Raises InUse if one of them has processes, partitions, or claims, and other AcceleratorErrors."""
        async with (
            self._scan_lock,
            self._library_lock.reserve_devices(uuids, f"the driver {self._driver}, which resets a device"),
        ):
            for uuid in uuids:
                device = await self._run_on_thread(self._backend.device, uuid)
                # A claim without a process can have been prepared after the device's last users ended.
                claims = [record.describe() for record in self._claims() if uuid in record.device_uuids]
                if device.processes or device.partitions or claims:
                    pids = [each.pid for each in device.processes]
                    partitions = [each.describe() for each in device.partitions]
                    raise InUse(
                        f"{device.describe()} is not reset: it has processes {pids}, partitions {partitions}, and claims {claims}; "
                        "expected none",
                        pids=pids,
                        claims=claims,
                        hint="It is reset when nothing uses it any more.",
                    )
            await self._run_on_thread(self._backend.reset, uuids)
        self._scan_requested.set()

    async def _discover(self) -> tuple[Finding, ...]:
        """Return the findings about all devices. Read all facts after ``full_interval``, otherwise only the changing facts."""
        now = asyncio.get_running_loop().time()
        is_full = now - self._last_full_scan >= self._full_interval
        findings = await self._run_on_thread(self._backend.discover, is_full, FIRST_READ_SECONDS)
        if is_full:
            self._last_full_scan = now
        return findings

    def close(self) -> None:
        """Shut down the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _give_up(self, error: Exception) -> None:
        """Withdraw the devices after repeated failures, and close the library."""
        self._reported_causes = ()
        self._devices_log.report(f"no devices: {error}", level=logging.WARNING, driver=self._driver)
        self._conditions.report(PART, str(error))
        self._snapshots.put(
            Snapshot(
                given_up=str(error),
                inventory=self._snapshots.value.inventory,
                scanned_at=self._snapshots.value.scanned_at,
                scanned_clock=self._snapshots.value.scanned_clock,
            )
        )
        await self._close_library()
        self._library_lock.release()

    async def _lend_library(self) -> None:
        """Lend the library to the program that has requested it. The devices stay published."""
        async with self._scan_lock:
            self._is_lent = True
            self._conditions.report(PART, f"the library is lent to {self._library_lock.holder}, which resets a device")
            try:
                await self._library_lock.lend(self._close_library, self._reopen_library)
            finally:
                self._is_lent = False

    async def _reopen_library(self) -> None:
        """Open the library after it was returned."""
        self._apply_repair_marks()
        await self._run_on_thread(self._backend.open)

    async def _close_library(self) -> None:
        try:
            await self._run_on_thread(self._backend.close)
        except AcceleratorError as error:
            LOG.debug("the library was closed with an error: %s", error, extra=fields(driver=self._driver))
        except Exception:
            # The callers release the lock of the library next. An exception would leave it locked, and end the scans.
            LOG.exception("unexpected exception while the library was closed", extra=fields(driver=self._driver))

    def _report_devices(self, findings: Collection[Finding]) -> None:
        """Log the number of devices that respond, and the faults, if the faults differ from the last report."""
        faults = [
            f"{finding.describe()} ({'tainted' if finding.device else 'not published'}: {finding.fault.cause})"
            for finding in findings
            if finding.fault is not None and not finding.is_first_read_pending
        ]
        awaited = sum(finding.is_first_read_pending for finding in findings)
        # A fault's text can change with every scan, for example by the duration of a hanging call.
        causes = tuple(
            (each.index, each.fault.cause, each.device is None) for each in findings if each.fault is not None
        )
        if faults and causes == self._reported_causes:
            return
        self._reported_causes = causes
        message = f"{len(findings) - len(faults) - awaited} devices answer"
        if awaited:
            message += f", {awaited} {'is' if awaited == 1 else 'are'} still being read"
        if not faults:
            self._devices_log.report(message, driver=self._driver)
            return
        message += f", {len(faults)} {'does' if len(faults) == 1 else 'do'} not: {'; '.join(faults)}"
        if self._devices_log.report(message, level=logging.WARNING, driver=self._driver):
            self._report_problem("DevicesUnhealthy", message)

    async def _check_edits(self) -> None:
        """Report errors in the container edits, with which claims would fail. The backend caches the edits for claims."""
        try:
            await self._run_on_thread(self._backend.driver_edits)
        except Exception as error:  # noqa: BLE001  devices are published nevertheless
            if not isinstance(error, AcceleratorError):
                error = unexpected(error, "Reading the files of the driver for containers")
            message = f"claims are refused until it is there: {error}"
            if self._edits_log.report(message, level=logging.WARNING, driver=self._driver):
                self._report_problem("DriverIncomplete", message)
        else:
            self._edits_log.report("what every container needs is there", driver=self._driver)

    async def _pause(self, seconds: float) -> None:
        """Wait ``seconds`` for the next scan, or until a scan is requested or the surroundings have changed."""
        clock = asyncio.get_running_loop().time
        began = clock()
        earliest, until = began + min(seconds, MIN_PAUSE_SECONDS), began + seconds
        while (now := clock()) < until and not (self._scan_requested.is_set() and now >= earliest):
            if self._scan_requested.is_set():
                await asyncio.sleep(min(earliest - now, SURROUNDINGS_SECONDS))
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._scan_requested.wait(), min(until - now, SURROUNDINGS_SECONDS))
            if await self._check_surroundings():
                self._surroundings_changed = True
                break
        self._scan_requested.clear()

    async def _check_surroundings(self) -> bool:
        """Read the surroundings, and return whether they have changed since the last call."""
        before, self._surroundings = self._surroundings, await self._run_on_thread(self._backend.surroundings)
        return before != self._surroundings

    async def _run_on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
