# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Report devices that vanish, or lose their partition of the fabric, under prepared claims, and restore the claims when that is possible."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...claims.claim_statuses import DEVICE_GONE, FABRIC_INACTIVE, MissingDevice, missing_devices
from ...claims.service import ClaimService
from ...claims.store.records import ClaimRecord, DeviceRecord
from ...core.errors import to_error
from ...core.health import tracker as health_tracker
from ...core.health.conditions import Sign
from ...core.health.tracker import TrackedFault
from ...inventory import Survey
from ...logs import StateLog, fields
from .. import recovery
from ..driver_state import Conditions, Shared, Snapshot
from ..health import FaultReporter

LOG = logging.getLogger(__name__)

# The pause, in seconds, after a failed restore; it doubles up to the limit.
RETRY_FIRST, RETRY_LIMIT = 5.0, 600.0


@dataclass
class _Case:
    """A claim with missing devices. ``first`` and ``retry_at`` are times of the monotonic clock, ``since`` of the epoch."""

    record: ClaimRecord
    first: float
    since: float
    lost: tuple[tuple[DeviceRecord, Sign], ...]
    reported: tuple[tuple[DeviceRecord, Sign], ...] = ()
    retry_at: float = float("-inf")
    delay: float = RETRY_FIRST

    def postpone(self, now: float) -> None:
        """Set the time of the next restore."""
        self.retry_at = now + self.delay
        self.delay = min(self.delay * 2, RETRY_LIMIT)


class MissingDevices:
    """Compare the prepared claims with each scan of the hardware.

    A device counts as missing after two scans, ``health.VERIFY_SECONDS`` apart: a claim that was prepared during the first
    one is not missing. ``scan_requested`` requests the next scan, ``publish`` is called with all missing devices, ``note`` with the UID
    of a claim whose status has to be written.
    """

    def __init__(
        self,
        service: ClaimService,
        *,
        snapshots: Shared[Snapshot],
        conditions: Conditions,
        scan_requested: asyncio.Event,
        reporter: FaultReporter,
        publish: Callable[[tuple[MissingDevice, ...]], None],
        note: Callable[[str], None],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._snapshots = snapshots
        self._conditions = conditions
        self._scan_requested = scan_requested
        self._reporter = reporter
        self._publish = publish
        self._note = note
        self._now = now
        self._clock = clock
        self._cases: dict[str, _Case] = {}
        self._seen: set[str] = set()  # devices that a scan of this process has found
        self._published: tuple[MissingDevice, ...] = ()
        self._failures: dict[str, StateLog] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Process each scan until canceled.

        Nothing counts as missing before the recovery has started to restore claims.
        """
        async for snapshot in self._snapshots.follow():
            if snapshot.survey is not None and not self._conditions.problem_of(recovery.PART):
                await self._compare(snapshot.survey)

    async def _compare(self, survey: Survey) -> None:
        found = {each.uuid for each in survey.findings if each.uuid}
        readable = {each.uuid for each in survey.findings if each.uuid and each.device and not each.fault}
        self._seen |= found
        is_complete = all(each.uuid for each in survey.findings)
        claims = self._service.store.claims
        for uid in self._cases.keys() - claims.keys():
            self._drop(uid)
        for record in tuple(claims.values()):
            if not record.prepared or self._service.housekeeping.is_busy(record.uid):
                continue
            # A device that was never read, without a known UUID, can be the device of a claim.
            absent = {each for each in record.device_uuids if each not in found and (is_complete or each in self._seen)}
            active = survey.active_fabric_partitions
            self._judge(record, missing_devices(record, survey.devices, absent, readable, active))
        self._publish_changes()
        await asyncio.gather(*(self._restore(case) for case in self._restorable(readable)))
        self._publish_changes()
        self._schedule(readable)

    def _judge(self, record: ClaimRecord, lost: tuple[tuple[DeviceRecord, Sign], ...]) -> None:
        """Open, report, or close the case of one claim."""
        case = self._cases.get(record.uid)
        if lost:
            if case is None or (case.record != record and not case.reported):
                case = self._cases[record.uid] = _Case(record, self._clock(), self._now(), lost)
            case.record, case.lost = record, lost
            if lost != case.reported and self._clock() - case.first >= health_tracker.VERIFY_SECONDS:
                self._report(case)
        elif case is None:
            return
        elif case.reported:
            case.record, case.lost = record, ()
            if record.uid not in self._service.suspect:  # a call of the kubelet has restored it
                self._close(case)
        elif any(sign.cause == DEVICE_GONE for _held, sign in case.lost):
            # It came back before its absence was verified, and may have lost its partitions and its number.
            case.record, case.lost = record, ()
            self._service.suspect.add(record.uid)
        else:
            self._drop(record.uid)

    def _report(self, case: _Case) -> None:
        record = case.record
        self._service.suspect.add(record.uid)  # the kubelet's next call restores it, too
        for held, sign in case.lost:
            if (held, sign) not in case.reported:
                LOG.warning(
                    "device of a prepared claim is missing or not connected",
                    extra=fields(claim=record.describe(), uid=record.uid, device=held.name, cause=sign.cause),
                )
                self._reporter.report_fault(held.name, TrackedFault(sign, case.since, case.since), [record])
        case.reported = case.lost
        self._note(record.uid)

    def _restorable(self, readable: set[str]) -> list[_Case]:
        """Return the cases whose restore can succeed and is due: all devices exist, and the driver can create or activate the missing parts."""
        return [
            case
            for case in self._cases.values()
            if (case.reported or not case.lost)
            and readable.issuperset(case.record.device_uuids)
            and all(held.created or sign.cause == FABRIC_INACTIVE for held, sign in case.lost)
            and case.retry_at <= self._clock()
        ]

    async def _restore(self, case: _Case) -> None:
        record = case.record
        log = self._failures.setdefault(record.uid, StateLog(LOG))
        try:
            if not await self._service.housekeeping.restore(record.uid):
                case.postpone(self._clock())
                return
        except Exception as error:  # noqa: BLE001  the error of one claim is this claim's own
            failure = to_error(error, f"Restoring claim {record.describe()}")
            case.postpone(self._clock())
            if log.report(f"claim {record.describe()} is not restored: {failure}", level=logging.WARNING):
                self._service.reporter.failed(record.reference, "Restore", failure)
        else:
            LOG.info("claim is restored", extra=fields(claim=record.describe(), uid=record.uid))
            self._close(case)

    def _close(self, case: _Case) -> None:
        record = case.record
        for held, sign in case.reported:
            self._reporter.report_recovery(held.name, TrackedFault(sign, case.since, case.since), [record])
        self._drop(record.uid)
        self._note(record.uid)

    def _drop(self, uid: str) -> None:
        self._cases.pop(uid, None)
        self._failures.pop(uid, None)

    def _publish_changes(self) -> None:
        missing = tuple(
            MissingDevice(uid, held, sign, case.since)
            for uid, case in sorted(self._cases.items())
            for held, sign in case.reported
        )
        if missing != self._published:
            self._published = missing
            self._publish(missing)

    def _schedule(self, readable: set[str]) -> None:
        """Request the scan that verifies a case, or after which a failed restore is repeated."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = [
            case.first + health_tracker.VERIFY_SECONDS if not case.reported else case.retry_at
            for case in self._cases.values()
            if not case.reported or readable.issuperset(case.record.device_uuids)
        ]
        later = [time for time in due if time > self._clock()]
        if later:
            self._timer = asyncio.get_running_loop().call_later(min(later) - self._clock(), self._scan_requested.set)
