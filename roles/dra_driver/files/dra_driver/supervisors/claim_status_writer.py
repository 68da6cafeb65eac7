# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write the devices of prepared claims to the claims' status.

This never delays a claim, because the kubelet already has its answer. The API server removes an entry together with its
allocation, so the driver removes none. All claims are written again after a start of the driver, which changes nothing
if they were written before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ..api.client import ApiError
from ..api.throttling import backoff, requested_pause, spread
from ..claims.claim_statuses import MissingDevice, prepared_entries
from ..claims.store.records import ClaimRecord, ClaimReference
from ..core.errors import AcceleratorError
from ..deadlines import within
from ..logs import StateLog, fields
from .driver_state import Shared, Snapshot

LOG = logging.getLogger(__name__)

# Seconds between the preparation of a claim and the write of its status. Claims that end earlier are not written, and in a burst the writes
# do not compete with the preparations for the processor.
SETTLE_SECONDS = 1.0
# Seconds within which the statuses of all prepared claims are written after a start. After a power failure all nodes start at once.
SPREAD_SECONDS = 120.0
# The first and the longest pause, in seconds, of all claims while writes fail because of the API server.
RETRY_FIRST, RETRY_LIMIT = 1.0, 60.0
# The first and the longest pause, in seconds, for a claim whose status the API server refuses while it accepts those of others.
REFUSED_FIRST, REFUSED_LIMIT = 10.0, 600.0
# The HTTP status for a deleted claim, whose status is not written again. All other errors are retried until the claim is unprepared: 422
# can be the answer of a policy, and 409 means that other programs wrote the claim at the same time, because a forced apply has no
# conflicts of field managers.
GONE = 404


class ClaimStatusApi(Protocol):
    """The part of the API that writes statuses of claims."""

    async def apply_claim_devices(self, claim: ClaimReference, driver: str, entries: list[dict[str, Any]]) -> None:
        """Replace the driver's entries of a claim's ``status.devices`` by these. Raises ApiError."""


class ClaimStatusWriter:
    """Write the status of prepared claims, one after the other. The driver calls ``request_write`` after each preparation.

    ``store`` is the identity of the store that has the claims. ``missing`` returns the devices of prepared claims that have
    vanished. ``settle`` is SETTLE_SECONDS, except in tests.
    """

    def __init__(
        self,
        *,
        driver: str,
        api: ClaimStatusApi,
        claims: Callable[[], Mapping[str, ClaimRecord]],
        snapshots: Shared[Snapshot],
        store: str,
        missing: Callable[[], Iterable[MissingDevice]] = tuple,
        settle: float = SETTLE_SECONDS,
    ) -> None:
        self._driver = driver
        self._api = api
        self._claims = claims
        self._snapshots = snapshots
        self._store = store
        self._missing = missing
        self._settle = settle
        #: By the claim's UID: the time of its next write, on the monotonic clock, and how often the server has refused it in a row.
        self._due_at: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        #: The claims whose writes have failed since the last success, if the claim or the server can be the cause: the number of attempts,
        #: and the last error.
        self._recent_failures: dict[str, tuple[int, AcceleratorError]] = {}
        self._wake = asyncio.Event()
        self._state = StateLog(LOG)

    def request_write(self, uid: str) -> None:
        """Write the status of a claim that was just prepared, after SETTLE_SECONDS."""
        self._forget_failures(uid)
        self._schedule(uid, self._settle)

    def _forget_failures(self, uid: str) -> None:
        self._refusals.pop(uid, None)
        self._recent_failures.pop(uid, None)

    def _schedule(self, uid: str, seconds: float) -> None:
        self._due_at[uid] = time.monotonic() + seconds
        self._wake.set()

    async def run(self) -> None:
        """Write until canceled. API server errors are reported and retried."""
        while self._snapshots.value.survey is None:  # the first scan returns the devices
            await self._snapshots.changed(RETRY_LIMIT)
        for uid in tuple(self._claims()):
            self._forget_failures(uid)
            self._schedule(uid, self._settle + random.uniform(0.0, SPREAD_SECONDS))  # noqa: S311  no secret is made of it
        failures = 0
        while True:
            self._wake.clear()
            now = time.monotonic()
            uid = self._next_claim(now)
            due = self._due_at.get(uid, float("inf"))
            if due > now:
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._wake.wait(), min(due - now, REFUSED_LIMIT))
                continue
            wait = await self._write(uid, failures)
            if wait:
                failures += 1
            elif not self._recent_failures:
                failures = 0
            await asyncio.sleep(wait)

    def _next_claim(self, now: float) -> str:
        """Return the UID of the next claim to write, "" for none.

        While writes fail, claims without a failure come first, and the latest of them first. Otherwise each claim with an error of its
        own would delay a new claim by one pause.
        """

        def order(uid: str) -> tuple[float, bool, float]:
            due, has_failed = self._due_at[uid], uid in self._recent_failures
            return max(due, now), has_failed, -due if self._recent_failures and not has_failed else due

        return min(self._due_at, key=order, default="")

    async def _write(self, uid: str, failures: int) -> float:
        """Write the status of one claim. Return the seconds before the next write of any claim."""
        record = self._claims().get(uid)
        if record is None or not record.prepared or not record.devices or not record.name:
            self._due_at.pop(uid, None)
            self._forget_failures(uid)
            return 0.0
        try:
            await self.write_now(record)
        except ApiError as error:
            if error.status == GONE and not error.is_of_server:
                self._forget_failures(uid)
                LOG.debug("the status of claim %s is not written: %s", record.describe(), error)
                return 0.0
            if not error.is_of_server or error.status == 403:  # status 403 can be a policy that matches one claim
                self._recent_failures.pop(uid, None)
                self._postpone(record, error)
                return 0.0
            return self._retry_after_error(record, error, failures)
        except AcceleratorError as error:
            return self._retry_after_error(record, error, failures)
        self._forget_failures(uid)
        self._postpone_last_failed()
        self._state.report("the status of claims is written")
        return 0.0

    def _postpone_last_failed(self) -> None:
        """Postpone the claim that failed just before the successful write of another claim, because its error is its own.

        The server can be the cause of earlier failures.
        """
        if self._recent_failures:
            uid, (_number, error) = self._recent_failures.popitem()
            self._recent_failures.clear()
            record = self._claims().get(uid)
            if record is not None and self._due_at.pop(uid, None) is not None:
                self._postpone(record, error)

    async def write_now(self, record: ClaimRecord) -> None:
        """Write the status of a prepared claim without a delay. Raises ApiError, ApiUnreachable."""
        self._due_at.pop(record.uid, None)
        offers = self._snapshots.value.inventory.offers
        entries = prepared_entries(self._driver, record, offers, self._store, self._missing())
        await self._api.apply_claim_devices(record.reference, self._driver, entries)

    def _postpone(self, record: ClaimRecord, error: AcceleratorError) -> None:
        """Write this claim again later, without a delay for other claims. A policy, or the size of the claim, concerns only this claim."""
        if record.uid in self._due_at:
            return  # it was prepared again in the meantime
        number = self._refusals[record.uid] = self._refusals.get(record.uid, 0) + 1
        self._schedule(record.uid, backoff(number, REFUSED_FIRST, REFUSED_LIMIT))
        if number == 1:
            text = f"the status of claim {record.describe()} cannot be written, others can: {error}"
            LOG.warning("%s", text, extra=fields(uid=record.uid, code=error.code))

    def _retry_after_error(self, record: ClaimRecord, error: AcceleratorError, failures: int) -> float:
        """Schedule another write after an error of the server. Return the seconds before the next write of any claim.

        ``failures`` is the number of consecutive pauses of all claims. A webhook that matches only this claim can be the cause of the
        error, so another claim is tried before all claims wait.
        """
        uid = record.uid
        can_be_caused_by_claim = _can_be_caused_by_claim(error)
        if uid in self._refusals and can_be_caused_by_claim:
            self._postpone(record, error)  # other claims were written since its first failure
            return 0.0
        attempts = 1
        if can_be_caused_by_claim:
            attempts += self._recent_failures.pop(uid, (0, error))[0]
            self._recent_failures[uid] = (attempts, error)
        else:
            self._recent_failures.clear()
        tries_another = len(self._recent_failures) == 1
        delay = backoff(attempts if tries_another else failures + 1, RETRY_FIRST, RETRY_LIMIT)
        pause = max(spread(requested_pause(error)), delay)
        self._schedule(uid, pause if tries_another else self._settle)
        if not tries_another or attempts > 1:
            text = f"the status of claims cannot be written: {error}"
            self._state.report(text, level=logging.WARNING, code=error.code)
        return 0.0 if tries_another else pause


def _can_be_caused_by_claim(error: AcceleratorError) -> bool:
    """Return whether an error of the server can be caused by one claim: a webhook that fails or answers too late for it."""
    if isinstance(error, ApiError):
        return error.status >= 500 and error.status != 503
    return isinstance(error.__cause__, (TimeoutError, asyncio.TimeoutError))
