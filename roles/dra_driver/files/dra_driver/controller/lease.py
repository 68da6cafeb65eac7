# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Who acts: one of several controllers, by a Lease. The decisions are pure; ``Elector`` carries them out.

No clock is compared with another machine's. Who holds the Lease acts for ``renew_seconds`` after it *sent* the last renewal that was
accepted. The others take it over once they have seen it unchanged for ``lease_seconds`` by their own clocks, which begins when that
renewal was accepted, or later. The difference of the two is what clocks may go apart, and what a request under way may take.

Facts: k8s.io/api/coordination/v1/types.go; the times are those of Kubernetes' own controllers.
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

CREATE, TAKE, RENEW, WAIT = "create", "take", "renew", "wait"


@dataclass(frozen=True)
class Terms:
    """The times of a Lease, in seconds."""

    lease_seconds: float = 15.0
    renew_seconds: float = 10.0
    retry_seconds: float = 2.0


@dataclass(frozen=True)
class Record:
    """What a Lease says. ``version`` is its resource version."""

    holder: str
    version: str
    transitions: int = 0
    acquired: str = ""


@dataclass(frozen=True)
class Seen:
    """The Lease as it was last seen (None: there was none), and since when, by this process's clock, it is so."""

    record: Record | None
    since: float


def look(former: Seen | None, record: Record | None, now: float) -> Seen:
    """Take what was read just now. ``now`` is the time after the answer came: what is too late is safe."""
    return former if former is not None and record == former.record else Seen(record, now)


def decide(seen: Seen, me: str, now: float, terms: Terms) -> str:
    """What to do about the Lease as it was seen.

    One that is not there may have been deleted under a holder who still acts. So it is made without a holder, and taken when
    that one must have noticed; only one that its holder gave up is taken at once.
    """
    if seen.record is None:
        return CREATE
    if seen.record.holder == me:
        return RENEW
    if not seen.record.holder and seen.record.acquired:
        return TAKE
    return TAKE if now - seen.since >= terms.lease_seconds else WAIT


def record_of(lease: Mapping[str, Any]) -> Record:
    """Read a Lease."""
    spec = lease.get("spec") or {}
    return Record(
        str(spec.get("holderIdentity") or ""),
        str((lease.get("metadata") or {}).get("resourceVersion", "")),
        int(spec.get("leaseTransitions") or 0),
        str(spec.get("acquireTime") or ""),
    )


def lease_of(name: str, namespace: str, me: str, former: Record | None, terms: Terms, stamp: str) -> Json:
    """Write a Lease that ``me`` holds; "" makes one that nobody holds, or gives it up. The times in it are for people."""
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
    """One candidate for one Lease. ``me`` has to be another name at every start of every process."""

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
        self._log = StateLog(LOG)
        self.answered = asyncio.Event()

    @property
    def holds(self) -> bool:
        """Whether this process may act at this moment."""
        return self._clock() < self._until

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work`` while the Lease is held, and never otherwise, until cancelled; then give the Lease up."""
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
        task = asyncio.ensure_future(work())
        try:
            while self.holds and not task.done():
                await asyncio.wait((task,), timeout=min(self._terms.retry_seconds, max(self._until - self._clock(), 0)))
                if self.holds and not task.done():
                    await self._attempt(self._until - self._clock())
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        if task.done() and not task.cancelled() and task.exception() is not None:
            LOG.error("the controller's work failed and begins anew", exc_info=task.exception())
            await asyncio.sleep(self._terms.retry_seconds)
        elif not self.holds:
            LOG.warning("this controller acts no more: the Lease could not be renewed in time")

    async def _attempt(self, seconds: float) -> bool:
        """Read the Lease and take or renew it where that is right, in so many seconds; returns whether it is held."""
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
        self._seen = look(self._seen, record, self._clock())
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
        """Let the next one take over at once.

        The Lease is read anew: a renewal that was under way when this was cancelled may have come to the API server all the
        same, and what was seen before it would be refused as out of date.
        """
        if not self._asked:
            return
        self._until = 0.0
        with contextlib.suppress(AcceleratorError, asyncio.TimeoutError):
            await within(self._clear(), self._terms.lease_seconds - self._terms.renew_seconds)

    async def _clear(self) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases/{self._name}"
        while (record := await self._read()) is not None and record.holder == self.me:
            body = lease_of(self._name, self._namespace, "", record, self._terms, _stamp())
            try:
                await self._client.request("PUT", path, body=body)
            except ApiError as error:
                if error.status != 409:
                    raise


def _stamp() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
