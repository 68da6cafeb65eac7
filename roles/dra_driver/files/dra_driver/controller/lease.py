# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Elect one active controller by a Lease. The decisions are pure functions; ``Elector`` executes them.

Clocks of different machines are never compared. The holder is active for ``renew_seconds`` after it *sent* the last
accepted renewal. Others take the Lease over when it was unchanged for ``lease_seconds`` by their own clocks. That time
starts when the renewal was accepted, or later. The difference of both times is the margin for clock rates and for
running requests.

Facts: k8s.io/api/coordination/v1/types.go. The default times are those of Kubernetes' own controllers.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..api.client import ApiClient, ApiError, Json
from ..core.errors import AcceleratorError
from ..deadlines import within
from ..logs import StateLog

LOG = logging.getLogger(__name__)

# The longest pause, in seconds, before work that fails starts again.
PAUSE_LIMIT = 300.0
CREATE, TAKE, RENEW, WAIT = "create", "take", "renew", "wait"


@dataclass(frozen=True)
class Terms:
    """The times of a Lease, in seconds."""

    lease_seconds: float = 15.0
    renew_seconds: float = 10.0
    retry_seconds: float = 2.0


@dataclass(frozen=True)
class Record:
    """The content of a Lease. ``version`` is its resource version."""

    holder: str
    version: str
    transitions: int = 0
    acquired: str = ""


@dataclass(frozen=True)
class Seen:
    """The Lease as last read (None: it did not exist), and the time since when it is unchanged, by this process's clock."""

    record: Record | None
    since: float


def observe(former: Seen | None, record: Record | None, now: float) -> Seen:
    """Return the observation after a read. ``now`` is the time after the answer, because a later time is safe."""
    return former if former is not None and record == former.record else Seen(record, now)


def decide(seen: Seen, me: str, now: float, terms: Terms) -> str:
    """Return the next step for the observed Lease.

    A missing Lease may have been deleted while its holder is still active. So it is created without a holder, and taken
    after the time in which the previous holder must have noticed. Only a released Lease is taken at once.
    """
    if seen.record is None:
        return CREATE
    if seen.record.holder == me:
        return RENEW
    if not seen.record.holder and seen.record.acquired:
        return TAKE
    return TAKE if now - seen.since >= terms.lease_seconds else WAIT


def record_of(lease: Mapping[str, Any]) -> Record:
    """Parse a Lease."""
    spec = lease.get("spec") or {}
    return Record(
        str(spec.get("holderIdentity") or ""),
        str((lease.get("metadata") or {}).get("resourceVersion", "")),
        int(spec.get("leaseTransitions") or 0),
        str(spec.get("acquireTime") or ""),
    )


def lease_of(name: str, namespace: str, me: str, former: Record | None, terms: Terms, stamp: str) -> Json:
    """Return a Lease with the holder ``me``; "" creates one without a holder, or releases it.

    Its times are for display only.
    """
    kept = former is not None and former.holder == me
    transitions = 0 if former is None else former.transitions + (0 if kept or not me else 1)
    spec: Json = {
        "holderIdentity": me,
        "leaseDurationSeconds": max(1, round(terms.lease_seconds)) if me else 1,
        "renewTime": stamp,
        "leaseTransitions": transitions,
    }
    if former is not None:
        spec["acquireTime"] = former.acquired if (kept or not me) and former.acquired else stamp
    metadata: Json = {
        "name": name,
        "namespace": namespace,
        "labels": {"app.kubernetes.io/managed-by": "dra-accelerators"},
    }
    if former is not None:
        metadata["resourceVersion"] = former.version
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": spec,
    }


class Elector:
    """One candidate for one Lease. ``me`` must be unique for every start of every process."""

    def __init__(
        self,
        client: ApiClient,
        *,
        namespace: str,
        name: str,
        me: str,
        terms: Terms = Terms(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self.me = me
        self._terms = terms
        self._clock = clock
        self._seen: Seen | None = None
        self._until = 0.0
        self._asked = False
        self._failures = 0
        self._log = StateLog(LOG)
        self.answered = asyncio.Event()

    @property
    def holds(self) -> bool:
        """Return whether this process is the active controller now."""
        return self._clock() < self._until

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` only while the Lease is held, until canceled. Then release the Lease."""
        try:
            while True:
                await self._acquire()
                LOG.info("this controller acts now: it holds the Lease %s/%s", self._namespace, self._name)
                await self._hold(work)
        finally:
            await self._give_up()

    async def _acquire(self) -> None:
        while not await self._attempt(self._terms.renew_seconds):
            await asyncio.sleep(self._terms.retry_seconds)

    async def _hold(self, work: Callable[[], Awaitable[None]]) -> None:
        began = self._clock()
        task = asyncio.ensure_future(work())
        try:
            while self.holds and not task.done():
                await asyncio.wait((task,), timeout=min(self._terms.retry_seconds, max(self._until - self._clock(), 0)))
                if self.holds and not task.done():
                    await self._attempt(self._until - self._clock())
        finally:
            await _end(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("the controller's work failed and starts again", exc_info=task.exception())
            await asyncio.sleep(self._pause_after_failure(self._clock() - began))
        elif not self.holds:
            LOG.warning("this controller acts no more: the Lease could not be renewed in time")

    def _pause_after_failure(self, lasted: float) -> float:
        """Return the seconds until work that failed after ``lasted`` seconds starts again: each start reads all objects of the cluster."""
        self._failures = 1 if lasted > PAUSE_LIMIT else self._failures + 1
        return min(self._terms.retry_seconds * 2.0 ** min(self._failures - 1, 30), PAUSE_LIMIT)

    async def _attempt(self, seconds: float) -> bool:
        """Read the Lease, and take or renew it if possible, within ``seconds``. Return whether it is held."""
        try:
            await within(self._try(), seconds)
        except asyncio.TimeoutError:
            self._log.report("the API server does not answer about the Lease", level=logging.WARNING)
        except AcceleratorError as error:
            if not (isinstance(error, ApiError) and error.status == 409):
                self._log.report(f"the Lease cannot be had: {error}", level=logging.WARNING, code=error.code)
        return self.holds

    async def _try(self) -> None:
        record = await self._read()
        self.answered.set()
        self._seen = observe(self._seen, record, self._clock())
        sent = self._clock()
        step = decide(self._seen, self.me, sent, self._terms)
        if step == WAIT:
            whose = f"is held by {record.holder}" if record is not None and record.holder else "is new"
            self._log.report(f"this controller waits: the Lease {self._namespace}/{self._name} {whose}")
            return
        me = "" if step == CREATE else self.me
        body = lease_of(self._name, self._namespace, me, record, self._terms, _stamp())
        collection = f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"
        if step == CREATE:
            self._seen = Seen(record_of(await self._client.request("POST", collection, body=body)), self._clock())
            return
        self._asked = True
        answer = await self._client.request("PUT", f"{collection}/{self._name}", body=body)
        self._seen = Seen(record_of(answer), self._clock())
        self._until = sent + self._terms.renew_seconds

    async def _read(self) -> Record | None:
        try:
            lease = await self._client.get(
                f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases/{self._name}"
            )
        except ApiError as error:
            if not error.is_not_found:
                raise
            return None
        return record_of(lease)

    async def _give_up(self) -> None:
        """Release the Lease, so that another controller can take over at once.

        The Lease is read again: a renewal that was running at the cancellation may have reached the API server, so a
        write with the previous version would be rejected.
        """
        if not self._asked:
            return
        self._until = 0.0
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._clear(), self._terms.lease_seconds - self._terms.renew_seconds)

    async def _clear(self) -> None:
        """Release the Lease. After an error the Lease is read again."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases/{self._name}"
        while True:
            try:
                record = await self._read()
                if record is None or record.holder != self.me:
                    return
                body = lease_of(self._name, self._namespace, "", record, self._terms, _stamp())
                await self._client.request("PUT", path, body=body)
            except AcceleratorError as error:
                if not (isinstance(error, ApiError) and error.status == 409):
                    LOG.warning("the Lease cannot be released: %s", error)
                    await asyncio.sleep(getattr(error, "retry_after", None) or self._terms.retry_seconds)


async def _end(task: asyncio.Future[None]) -> None:
    """Cancel a task and wait for its end. Raises CancelledError afterwards if this was cancelled while it waited."""
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _stamp() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
