# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Writes into claims' status what their devices are. Never in a claim's way: the kubelet has its answer by then.

An entry goes with its allocation, at the API server itself; nothing has to be taken back. A claim is written again after the driver
has started, which changes nothing where it was written before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ..api.client import ApiError
from ..claims.missing import MissingDevice
from ..claims.records import ClaimRecord, ClaimReference
from ..claims.statuses import prepared_entries
from ..core.errors import AcceleratorError
from ..logs import StateLog
from .shared import Shared, Snapshot

LOG = logging.getLogger(__name__)

# A claim that lives shorter is not written; those of a burst do not keep the processor from the claims themselves.
SETTLE_SECONDS = 1.0
RETRY_FIRST, RETRY_LIMIT = 1.0, 60.0
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
        self._waiting: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._state = StateLog(LOG)

    def note(self, uid: str) -> None:
        """A claim was prepared; one that was before, and given back, waits anew."""
        self._waiting.pop(uid, None)  # so that those who wait are in the order of their time
        self._waiting[uid] = time.monotonic() + self._settle
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
            if not self._waiting:
                await self._wake.wait()
                continue
            uid, due = next(iter(self._waiting.items()))
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            if self._waiting.get(uid) != due:
                continue
            wait = await self._write(uid, failures)
            failures = failures + 1 if wait else 0
            await asyncio.sleep(wait)

    async def _write(self, uid: str, failures: int) -> float:
        """Write one claim; return for how long the API server is to be left alone."""
        record = self._claims().get(uid)
        if record is None or not record.prepared or not record.devices or not record.name:
            self._waiting.pop(uid, None)
            return 0.0
        try:
            await self.write(record)
        except ApiError as error:
            if error.status not in OUTDATED or error.is_of_server:
                return self._failed(uid, error, failures, error.retry_after)
            LOG.debug("the status of claim %s is not written: %s", record.describe(), error)
        except AcceleratorError as error:
            return self._failed(uid, error, failures, None)
        else:
            self._state.report("the status of claims is written")
        return 0.0

    async def write(self, record: ClaimRecord) -> None:
        """Write a prepared claim's devices now. Raises ApiError, ApiUnreachable."""
        self._waiting.pop(record.uid, None)
        offers = self._snapshots.value.inventory.offers
        entries = prepared_entries(self._driver, record, offers, self._store, self._missing())
        await self._api.apply_claim_devices(record.reference, self._driver, entries)

    def _failed(self, uid: str, error: AcceleratorError, failures: int, told: float | None) -> float:
        self.note(uid)
        self._state.report(f"the status of claims cannot be written: {error}", level=logging.WARNING, code=error.code)
        return max(told or 0.0, min(RETRY_FIRST * 2.0 ** min(failures, 30), RETRY_LIMIT))
