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
from ..api.throttling import backoff
from ..core.errors import AcceleratorError
from ..deadlines import within
from ..logs import StateLog

LOG = logging.getLogger(__name__)

# The longest pause, in seconds, before failed work starts again.
PAUSE_LIMIT = 300.0
CREATE, TAKE, RENEW, WAIT = "create", "take", "renew", "wait"


@dataclass(frozen=True)
class LeaseTimes:
    """The durations of a Lease, in seconds.

    Other controllers take an unchanged Lease after ``lease_seconds``. Its holder is active for ``renew_seconds`` after a renewal, and tries
    to renew it every ``retry_seconds``.
    """

    lease_seconds: float
    renew_seconds: float
    retry_seconds: float


@dataclass(frozen=True)
class LeaseRecord:
    """The content of a Lease. ``version`` is its resource version."""

    holder: str
    version: str
    transitions: int = 0
    acquired: str = ""


@dataclass(frozen=True)
class ObservedLease:
    """The Lease as last read (None: it did not exist), and the time since when it is unchanged, by this process's clock."""

    record: LeaseRecord | None
    since: float


def observe(former: ObservedLease | None, record: LeaseRecord | None, now: float) -> ObservedLease:
    """Return the observation after a read. ``now`` is the time after the answer, because a later time is safe."""
    return former if former is not None and record == former.record else ObservedLease(record, now)


def next_step(observed: ObservedLease, identity: str, now: float, times: LeaseTimes) -> str:
    """Return the next step for the observed Lease.

    A missing Lease may have been deleted while its holder is still active. So it is created without a holder, and taken
    after the time in which the previous holder must have noticed. Only a released Lease is taken at once.
    """
    if observed.record is None:
        return CREATE
    if observed.record.holder == identity:
        return RENEW
    if not observed.record.holder and observed.record.acquired:
        return TAKE
    return TAKE if now - observed.since >= times.lease_seconds else WAIT


def record_of(lease: Mapping[str, Any]) -> LeaseRecord:
    """Parse a Lease."""
    spec = lease.get("spec") or {}
    return LeaseRecord(
        str(spec.get("holderIdentity") or ""),
        str((lease.get("metadata") or {}).get("resourceVersion", "")),
        int(spec.get("leaseTransitions") or 0),
        str(spec.get("acquireTime") or ""),
    )


def lease_of(
    name: str, namespace: str, identity: str, former: LeaseRecord | None, times: LeaseTimes, stamp: str
) -> Json:
    """Return a Lease with the holder ``identity``; "" creates one without a holder, or releases it.

    Its times are for display only.
    """
    is_renewal = former is not None and former.holder == identity
    transitions = 0 if former is None else former.transitions + (0 if is_renewal or not identity else 1)
    spec: Json = {
        "holderIdentity": identity,
        "leaseDurationSeconds": max(1, round(times.lease_seconds)) if identity else 1,
        "renewTime": stamp,
        "leaseTransitions": transitions,
    }
    if former is not None:
        spec["acquireTime"] = former.acquired if (is_renewal or not identity) and former.acquired else stamp
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
    """One candidate for one Lease. ``identity`` must be unique for every start of every process."""

    def __init__(
        self,
        client: ApiClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self._times = times
        self._clock = clock
        self._observed: ObservedLease | None = None
        self._active_until = 0.0
        self._has_written = False
        self._failures = 0
        self._log = StateLog(LOG)
        self.has_response = asyncio.Event()

    @property
    def holds(self) -> bool:
        """Return whether this process is the active controller now."""
        return self._clock() < self._active_until

    async def run_as_leader(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` only while the Lease is held, until canceled. Then release the Lease."""
        try:
            while True:
                await self._acquire()
                LOG.info("this controller acts now: it holds the Lease %s/%s", self._namespace, self._name)
                await self._hold(work)
        finally:
            await self._release()

    async def _acquire(self) -> None:
        while not await self._attempt(self._times.renew_seconds):
            await asyncio.sleep(self._times.retry_seconds)

    async def _hold(self, work: Callable[[], Awaitable[None]]) -> None:
        began = self._clock()
        task = asyncio.ensure_future(work())
        try:
            while self.holds and not task.done():
                await asyncio.wait(
                    (task,), timeout=min(self._times.retry_seconds, max(self._active_until - self._clock(), 0))
                )
                if self.holds and not task.done():
                    await self._attempt(self._active_until - self._clock())
        finally:
            await _cancel(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("the controller's work failed and starts again", exc_info=task.exception())
            await asyncio.sleep(self._pause_after_failure(self._clock() - began))
        elif not self.holds:
            LOG.warning("this controller acts no more: the Lease could not be renewed in time")

    def _pause_after_failure(self, lasted: float) -> float:
        """Return the seconds until work that failed after ``lasted`` seconds starts again: each start reads all objects of the cluster."""
        self._failures = 1 if lasted > PAUSE_LIMIT else self._failures + 1
        return backoff(self._failures, self._times.retry_seconds, PAUSE_LIMIT)

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
        self.has_response.set()
        self._observed = observe(self._observed, record, self._clock())
        sent = self._clock()
        step = next_step(self._observed, self.identity, sent, self._times)
        if step == WAIT:
            whose = f"is held by {record.holder}" if record is not None and record.holder else "is new"
            self._log.report(f"this controller waits: the Lease {self._namespace}/{self._name} {whose}")
            return
        identity = "" if step == CREATE else self.identity
        body = lease_of(self._name, self._namespace, identity, record, self._times, _now_text())
        if step == CREATE:
            self._observed = ObservedLease(
                record_of(await self._client.request("POST", self._collection, body=body)), self._clock()
            )
            return
        self._has_written = True
        answer = await self._client.request("PUT", self._path, body=body)
        self._observed = ObservedLease(record_of(answer), self._clock())
        self._active_until = sent + self._times.renew_seconds

    async def _read(self) -> LeaseRecord | None:
        lease = await self._client.find(self._path)
        return record_of(lease) if lease is not None else None

    async def _release(self) -> None:
        """Release the Lease, so that another controller can take over at once.

        The Lease is read again: a renewal that was running at the cancellation may have reached the API server, so a
        write with the previous version would be rejected.
        """
        if not self._has_written:
            return
        self._active_until = 0.0
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._write_release(), self._times.lease_seconds - self._times.renew_seconds)

    async def _write_release(self) -> None:
        """Release the Lease. After an error the Lease is read again."""
        while True:
            try:
                record = await self._read()
                if record is None or record.holder != self.identity:
                    return
                body = lease_of(self._name, self._namespace, "", record, self._times, _now_text())
                await self._client.request("PUT", self._path, body=body)
            except AcceleratorError as error:
                if not (isinstance(error, ApiError) and error.status == 409):
                    LOG.warning("the Lease cannot be released: %s", error)
                    await asyncio.sleep(getattr(error, "retry_after", None) or self._times.retry_seconds)


async def _cancel(task: asyncio.Future[None]) -> None:
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


def _now_text() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
