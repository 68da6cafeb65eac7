# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Writes into claims' status what their devices are. Never in a claim's way: the kubelet has its answer by then.

An entry goes with its allocation, at the API server itself; nothing has to be taken back. A claim is written again after the driver
has started, which changes nothing where it was written before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ..api.client import ApiError
from ..claims.missing import MissingDevice
from ..claims.records import ClaimRecord, ClaimReference
from ..claims.statuses import prepared_entries
from ..core.errors import AcceleratorError
from ..deadlines import within
from ..logs import StateLog, fields
from .shared import Shared, Snapshot

LOG = logging.getLogger(__name__)

# A claim that lives shorter is not written; those of a burst do not keep the processor from the claims themselves.
SETTLE_SECONDS = 1.0
RETRY_FIRST, RETRY_LIMIT = 1.0, 60.0
# The same for a claim whose status the API server refuses while it accepts those of other claims.
REFUSED_FIRST, REFUSED_LIMIT = 10.0, 600.0
# The claim is gone, another one has its name, or its allocation has changed: somebody else writes it, or nobody.
OUTDATED = (404, 409, 422)


class StatusApi(Protocol):
    """Where claims' status is written."""

    async def apply_claim_devices(self, claim: ClaimReference, driver: str, entries: list[dict[str, Any]]) -> None:
        """Make these the driver's entries of a claim's ``status.devices``. Raises ApiError."""


class ClaimStatuses:
    """Tells the API server of prepared claims, one after the other. ``note`` is called by whoever has prepared one.

    ``store`` is the identity of the store that has the claims. ``missing`` returns the devices of claims that do not exist.
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
        #: When each claim is due, by the monotonic clock, and how often in a row its status was refused.
        self._waiting: dict[str, float] = {}
        self._refused: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._state = StateLog(LOG)

    def note(self, uid: str) -> None:
        """Write the status of a claim that was just prepared, after the time that a claim must live."""
        self._refused.pop(uid, None)
        self._schedule(uid, self._settle)

    def _schedule(self, uid: str, seconds: float) -> None:
        self._waiting[uid] = time.monotonic() + seconds
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled, through every trouble of the API server."""
        while self._snapshots.value.survey is None:  # what the devices are comes from the first look
            await self._snapshots.changed(RETRY_LIMIT)
        for uid in tuple(self._claims()):
            self.note(uid)
        failures = 0
        while True:
            self._wake.clear()
            uid, due = min(self._waiting.items(), key=lambda each: each[1], default=("", float("inf")))
            if due > time.monotonic():
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._wake.wait(), min(due - time.monotonic(), REFUSED_LIMIT))
                continue
            wait = await self._write(uid, failures)
            failures = failures + 1 if wait else 0
            await asyncio.sleep(wait)

    async def _write(self, uid: str, failures: int) -> float:
        """Write one claim; return how many seconds the next write of any claim must wait."""
        record = self._claims().get(uid)
        if record is None or not record.prepared or not record.devices or not record.name:
            self._waiting.pop(uid, None)
            self._refused.pop(uid, None)
            return 0.0
        try:
            await self.write(record)
        except ApiError as error:
            if _concerns_all_claims(error):
                return self._failed(uid, error, failures, error.retry_after)
            if error.status not in OUTDATED:
                self._postpone(record, error)
                return 0.0
            self._refused.pop(uid, None)
            LOG.debug("the status of claim %s is not written: %s", record.describe(), error)
        except AcceleratorError as error:
            return self._failed(uid, error, failures, None)
        else:
            self._refused.pop(uid, None)
            self._state.report("the status of claims is written")
        return 0.0

    async def write(self, record: ClaimRecord) -> None:
        """Write a prepared claim's devices now. Raises ApiError, ApiUnreachable."""
        self._waiting.pop(record.uid, None)
        offers = self._snapshots.value.inventory.offers
        entries = prepared_entries(self._driver, record, offers, self._store, self._missing())
        await self._api.apply_claim_devices(record.reference, self._driver, entries)

    def _postpone(self, record: ClaimRecord, error: ApiError) -> None:
        """Write this claim again later. Other claims do not wait: a policy, or the size of the claim, concerns this one only."""
        if record.uid in self._waiting:
            return  # it was prepared again in the meantime
        number = self._refused[record.uid] = self._refused.get(record.uid, 0) + 1
        self._schedule(record.uid, min(REFUSED_FIRST * 2.0 ** min(number - 1, 30), REFUSED_LIMIT))
        if number == 1:
            text = f"the status of claim {record.describe()} is refused: {error}"
            LOG.warning("%s", text, extra=fields(uid=record.uid, status=error.status))

    def _failed(self, uid: str, error: AcceleratorError, failures: int, told: float | None) -> float:
        self._schedule(uid, self._settle)
        self._state.report(f"the status of claims cannot be written: {error}", level=logging.WARNING, code=error.code)
        return max(told or 0.0, min(RETRY_FIRST * 2.0 ** min(failures, 30), RETRY_LIMIT))


def _concerns_all_claims(error: ApiError) -> bool:
    """Return whether the API server would refuse other claims as well. Status 403 can be a policy that matches one claim."""
    return error.is_of_server and error.status != 403
