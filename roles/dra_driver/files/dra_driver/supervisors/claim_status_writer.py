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
from ..api.throttling import spread
from ..claims.claim_statuses import MissingDevice, prepared_entries
from ..claims.store.records import ClaimRecord, ClaimReference
from ..core.errors import AcceleratorError
from ..deadlines import within
from ..logs import StateLog, fields
from .driver_state import Shared, Snapshot

LOG = logging.getLogger(__name__)

# Claims with a shorter life are not written. In a burst, the writes do not compete with the claims for the processor.
SETTLE_SECONDS = 1.0
# After a start, the statuses of all prepared claims are written within this time: after a power failure all nodes start at once.
SPREAD_SECONDS = 120.0
RETRY_FIRST, RETRY_LIMIT = 1.0, 60.0
# The first and the longest pause, in seconds, for a claim whose status the API server refuses while it accepts those of others.
REFUSED_FIRST, REFUSED_LIMIT = 10.0, 600.0
# The claim was deleted: the status is not written again. Status 422 is also a policy's default answer. Status 409 is no conflict of field
# managers, because the apply is forced. Either other programs wrote the claim during all retries of the API server, or another claim has
# the name. So it is written again, until the driver has unprepared the claim.
GONE = 404


class StatusApi(Protocol):
    """Writes claims' status."""

    async def apply_claim_devices(self, claim: ClaimReference, driver: str, entries: list[dict[str, Any]]) -> None:
        """Replace the driver's entries of a claim's ``status.devices`` by these. Raises ApiError."""


class ClaimStatuses:
    """Write the status of prepared claims, one after the other. ``note`` is called after each preparation.

    ``store`` is the identity of the store that has the claims. ``missing`` returns the devices of claims that do not
    exist.
    """

    def __init__(
        self,
        *,
        driver: str,
        api: StatusApi,
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
        #: The time at which each claim is due, on the monotonic clock, and the number of refusals in a row.
        self._waiting: dict[str, float] = {}
        self._refused: dict[str, int] = {}
        #: Claims that failed since the last written status, where the claim or the server can be the cause: attempts, and the last error.
        self._failing: dict[str, tuple[int, AcceleratorError]] = {}
        self._wake = asyncio.Event()
        self._state = StateLog(LOG)

    def note(self, uid: str) -> None:
        """Write the status of a claim that was just prepared, after the time that a claim must live."""
        self._forget(uid)
        self._schedule(uid, self._settle)

    def _forget(self, uid: str) -> None:
        """Forget the failures of a claim."""
        self._refused.pop(uid, None)
        self._failing.pop(uid, None)

    def _schedule(self, uid: str, seconds: float) -> None:
        self._waiting[uid] = time.monotonic() + seconds
        self._wake.set()

    async def run(self) -> None:
        """Write until canceled. API server errors are reported and retried."""
        while self._snapshots.value.survey is None:  # the first scan returns the devices
            await self._snapshots.changed(RETRY_LIMIT)
        for uid in tuple(self._claims()):
            self._forget(uid)
            self._schedule(uid, self._settle + random.uniform(0.0, SPREAD_SECONDS))  # noqa: S311  no secret is made of it
        failures = 0
        while True:
            self._wake.clear()
            now = time.monotonic()
            uid = self._next(now)
            due = self._waiting.get(uid, float("inf"))
            if due > now:
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._wake.wait(), min(due - now, REFUSED_LIMIT))
                continue
            wait = await self._write(uid, failures)
            if wait:
                failures += 1
            elif not self._failing:
                failures = 0
            await asyncio.sleep(wait)

    def _next(self, now: float) -> str:
        """Return the next claim to write, "" for none.

        While statuses fail, claims that have not failed are first, the latest of them before the others: several claims that fail by
        themselves do not delay a new claim by a pause each.
        """

        def order(uid: str) -> tuple[float, bool, float]:
            due, has_failed = self._waiting[uid], uid in self._failing
            return max(due, now), has_failed, -due if self._failing and not has_failed else due

        return min(self._waiting, key=order, default="")

    async def _write(self, uid: str, failures: int) -> float:
        """Write the status of one claim. Return the seconds before the next write of any claim."""
        record = self._claims().get(uid)
        if record is None or not record.prepared or not record.devices or not record.name:
            self._waiting.pop(uid, None)
            self._forget(uid)
            return 0.0
        try:
            await self.write(record)
        except ApiError as error:
            if error.status == GONE and not error.is_of_server:
                self._forget(uid)
                LOG.debug("the status of claim %s is not written: %s", record.describe(), error)
                return 0.0
            if not error.is_of_server or error.status == 403:  # status 403 can be a policy that matches one claim
                self._failing.pop(uid, None)
                self._postpone(record, error)
                return 0.0
            return self._failed(record, error, failures)
        except AcceleratorError as error:
            return self._failed(record, error, failures)
        self._forget(uid)
        self._blame_last()
        self._state.report("the status of claims is written")
        return 0.0

    def _blame_last(self) -> None:
        """Postpone the claim that failed just before another one was written. The others of that time can have failed with the server."""
        if self._failing:
            uid, (_number, error) = self._failing.popitem()
            self._failing.clear()
            record = self._claims().get(uid)
            if record is not None and self._waiting.pop(uid, None) is not None:
                self._postpone(record, error)

    async def write(self, record: ClaimRecord) -> None:
        """Write a prepared claim's devices now. Raises ApiError, ApiUnreachable."""
        self._waiting.pop(record.uid, None)
        offers = self._snapshots.value.inventory.offers
        entries = prepared_entries(self._driver, record, offers, self._store, self._missing())
        await self._api.apply_claim_devices(record.reference, self._driver, entries)

    def _postpone(self, record: ClaimRecord, error: AcceleratorError) -> None:
        """Write this claim again later. Other claims do not wait: a policy, or the size of the claim, concerns this one only."""
        if record.uid in self._waiting:
            return  # it was prepared again in the meantime
        number = self._refused[record.uid] = self._refused.get(record.uid, 0) + 1
        self._schedule(record.uid, min(REFUSED_FIRST * 2.0 ** min(number - 1, 30), REFUSED_LIMIT))
        if number == 1:
            text = f"the status of claim {record.describe()} cannot be written, others can: {error}"
            LOG.warning("%s", text, extra=fields(uid=record.uid, code=error.code))

    def _failed(self, record: ClaimRecord, error: AcceleratorError, failures: int) -> float:
        """Schedule a claim again after an error of the server; return how many seconds the next write of any claim must wait.

        A webhook that matches only this claim can be the cause, so another claim is tried before all claims wait.
        """
        uid = record.uid
        can_be_of_claim = _can_be_of_claim(error)
        if uid in self._refused and can_be_of_claim:
            self._postpone(record, error)  # other claims were written since its first failure
            return 0.0
        number = 1
        if can_be_of_claim:
            number += self._failing.pop(uid, (0, error))[0]
            self._failing[uid] = (number, error)
        else:
            self._failing.clear()
        tries_another = len(self._failing) == 1
        requested = spread((error.retry_after if isinstance(error, ApiError) else None) or 0.0)
        pause = max(
            requested, min(RETRY_FIRST * 2.0 ** min(number - 1 if tries_another else failures, 30), RETRY_LIMIT)
        )
        self._schedule(uid, pause if tries_another else self._settle)
        if not tries_another or number > 1:
            text = f"the status of claims cannot be written: {error}"
            self._state.report(text, level=logging.WARNING, code=error.code)
        return 0.0 if tries_another else pause


def _can_be_of_claim(error: AcceleratorError) -> bool:
    """Return whether an error of the server can be caused by one claim: a webhook that fails or answers too late for it."""
    if isinstance(error, ApiError):
        return error.status >= 500 and error.status != 503
    return isinstance(error.__cause__, (TimeoutError, asyncio.TimeoutError))
