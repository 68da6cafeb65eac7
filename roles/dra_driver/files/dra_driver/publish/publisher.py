# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keeps the node's pool of ResourceSlices at the API server as it should be, and writes nothing while it is.

Carries out what reducer.py decides. A list and a watch show what is there; both go on through every trouble of the API
server, apart from the writes, so that neither waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from ..api.client import ApiError, Json, WatchEvent
from ..api.resources import ResourceApi
from ..api.watching import list_and_watch
from ..core.errors import AcceleratorError
from ..core.slices import SliceWrite
from ..core.texts import LONGEST_CAUSE, join_problems
from ..logs import StateLog, fields, operation
from ..metrics import Metrics
from . import reducer
from .fit import CHANGED, REJECTED, Content, Withheld
from .reducer import Decision, Identity, Pace, State

LOG = logging.getLogger(__name__)

# Where the pace begins: before what others did is undone, and after a failure.
SETTLE_SECONDS, RETRY_FIRST = 1.0, 0.5
# An ending API server ends the watches of all nodes at once. Each node asks for the server's version and features within this time.
CHECK_SECONDS = 60.0


class Publisher:
    """One driver's pool on one node. ``report_problem(reason, message)`` is told what an administrator should know."""

    def __init__(
        self,
        *,
        api: ResourceApi,
        driver: str,
        pool: str,
        node_name: str,
        metrics: Metrics,
        report_problem: Callable[[str, str], None],
        pace: Pace | None = None,
    ) -> None:
        self._api = api
        self._identity = Identity(driver, pool, node_name)
        self._metrics = metrics
        self._report_problem = report_problem
        self._pace = pace or Pace(settle=SETTLE_SECONDS, retry=RETRY_FIRST)
        self._state = State()
        self._withheld: tuple[Withheld, ...] = ()
        self._writes_log, self._watch_log = StateLog(LOG), StateLog(LOG)
        self._wake = asyncio.Event()
        # A list must not be older than a write that it is taken to show.
        self._gate = asyncio.Lock()
        self.published = asyncio.Event()
        #: Since when, on the monotonic clock, the pool is not what it is to be; None while it is.
        self.behind_since: float | None = None
        self._problems: dict[str, str] = {}

    @property
    def problem(self) -> str:
        """What keeps the pool from being published, or watched; "" when nothing does."""
        return join_problems(dict.fromkeys(self._problems.values()), longest=LONGEST_CAUSE)

    @property
    def is_current(self) -> bool:
        """Whether the pool in the API server is what the last content asks for, as far as the watch has told."""
        return self.published.is_set()

    def set_content(self, content: Content) -> None:
        """Say what the pool is to hold; it is published at once."""
        if content != self._state.content:
            self._state = reducer.wanted(self._state, content)
            self._behind()
            self._wake.set()

    def set_notes(self, notes: Mapping[str, str]) -> None:
        """Say what the pool is to bear beside its content (see PoolSpec); it is published at once. Nothing is said of it until then."""
        if notes != self._state.notes:
            self._state = reducer.noted(self._state, notes)
            self._behind()
            self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled, through every trouble of the API server."""
        self._state = replace(reducer.interrupted(self._state), slices=None)
        follower = asyncio.get_running_loop().create_task(self._follow())
        try:
            while not follower.done():
                self._wake.clear()
                decision = reducer.decide(self._identity, self._pace, self._state, time.monotonic())
                self._note(decision)
                if decision.ask_server or decision.ask_owner or decision.writes:
                    with operation():
                        await self._act(decision)
                else:
                    await self._pause(decision.wake_at, follower)
            await follower
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def _pause(self, until: float | None, follower: asyncio.Task[None]) -> None:
        waker = asyncio.get_running_loop().create_task(self._wake.wait())
        left = None if until is None else max(until - time.monotonic(), 0.0)
        try:
            await asyncio.wait((waker, follower), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waker.cancel()

    # ------------------------------------------------------------------ acting

    def _note(self, decision: Decision) -> None:
        if decision.current:
            self._state = reducer.settled(self._state, decision)
            self.published.set()
            self.behind_since = None
            self._problems.pop("write", None)
            self._writes_log.report(f"the pool {self._identity.pool} is published", driver=self._identity.driver)
        else:
            self._behind()
        if decision.problem:
            text = f"the pool {self._identity.pool} cannot be published: {decision.problem}"
            self._problems["write"] = text
            if self._writes_log.report(text, level=logging.ERROR, code="invalid-pool"):
                self._report_problem("SlicesRefused", text)
        if decision.pool is not None and decision.withheld != self._withheld:
            self._withheld = decision.withheld
            for each in decision.withheld:
                LOG.error("%s", each.describe())
                reason = "DeviceNotPublishable" if each.feature in (REJECTED, CHANGED) else "SliceFieldsDropped"
                self._report_problem(reason, each.describe())
            if not decision.withheld:
                LOG.info("nothing is withheld any more", extra=fields(pool=self._identity.pool))

    def _behind(self) -> None:
        self.published.clear()
        if self.behind_since is None:
            self.behind_since = time.monotonic()

    async def _act(self, decision: Decision) -> None:
        try:
            if decision.ask_server:
                await self._ask_server()
            elif decision.ask_owner:
                await self._ask_owner()
            else:
                async with self._gate:
                    await self._write_all(decision)
        except AcceleratorError as error:
            self._failed(error)
            if isinstance(error, ApiError) and error.status in reducer.OUTDATED and decision.writes:
                with contextlib.suppress(AcceleratorError):  # the watch tells of it too, if later
                    await self._list()

    def _failed(self, error: AcceleratorError) -> None:
        status, retry_after = (error.status, error.retry_after) if isinstance(error, ApiError) else (0, None)
        self._state = reducer.failed(self._state, self._pace, time.monotonic(), status=status, retry_after=retry_after)
        if status in reducer.OUTDATED and self._state.failures < 3:
            return  # somebody wrote in between; the next try knows of it
        self._problems["write"] = f"slices cannot be published: {error}"
        self._writes_log.report(self._problems["write"], level=logging.WARNING, code=error.code)
        if status == reducer.INVALID:
            self._report_problem("SlicesRefused", str(error))

    async def _ask_server(self) -> None:
        """Find out what the server keeps, by sending a slice as a dry run: nothing wrong is published to learn it."""
        version = await self._api.server_version()
        content, sent, answer = self._state.content, None, None
        if content is not None:
            with contextlib.suppress(ValueError):  # the decision on the whole pool says what is wrong with it
                sent = reducer.probe(self._identity, content, reducer.layout_of(version), self._state.owner)
        if sent is not None:
            try:
                answer = await self._api.create_slice(sent, dry_run=True)
            except ApiError as error:
                if error.status == 429 or error.status >= 500:
                    raise
                # What the real writes make of it is looked at as well.
                LOG.warning("the API server cannot be asked what it keeps of a slice: %s", error)
        self._state = reducer.asked(self._state, version, sent, answer)

    async def _ask_owner(self) -> None:
        name = self._identity.node_name
        node: Json | None = None
        try:
            node = await self._api.client.get(f"/api/v1/nodes/{name}")
        except ApiError as error:
            if not error.is_not_found:
                raise
        if node is None:
            raise AcceleratorError(
                f"Node {name} is not in the cluster (yet)",
                hint="The kubelet registers it. If it has another name, set node_name in the driver's configuration.",
                code="node-missing",
            )
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"], "controller": True}
        self._state = reducer.owned(self._state, owner)

    async def _write_all(self, decision: Decision) -> None:
        began, server = time.perf_counter(), self._state.server
        for write in decision.writes:
            try:
                answer = await self._write(write)
            except ApiError as error:
                if not decision.leftover or error.status == 429 or error.status >= 500:
                    raise
                self._report_leftover(write.name, error)
                continue
            self._state = reducer.answered(self._state, write, answer)
            if decision.leftover:
                LOG.info("removed a slice of a former pool", extra=fields(slice=write.name))
            if self._state.server != server:
                return  # it keeps less than was thought: what is published changes first of all
        self._state = reducer.written(self._state, self._pace, decision, time.monotonic())
        if decision.leftover:
            return
        LOG.info(
            "published the pool",
            extra=fields(
                pool=self._identity.pool,
                generation=decision.generation,
                devices=sum(len(each.devices) for each in decision.pool.slices) if decision.pool else 0,
                writes=len(decision.writes),
                ms=round((time.perf_counter() - began) * 1000, 1),
            ),
        )

    async def _write(self, write: SliceWrite) -> Json | None:
        outcome, answer = "failure", None
        try:
            if write.body is None:
                await self._api.delete_slice(write.name, write.preconditions)
            elif write.verb == "create":
                answer = await self._api.create_slice(write.body)
            else:
                answer = await self._api.update_slice(write.name, write.body)
            outcome = "success"
        finally:
            self._metrics.slice_write(write.verb, outcome)
        return answer

    def _report_leftover(self, name: str, error: ApiError) -> None:
        """A slice under another pool name stays; ours is published beside it."""
        known = name in self._state.leftovers
        self._state = reducer.refused(self._state, self._pace, name, time.monotonic())
        if known:
            return
        text = (
            f"slice {name} is of another pool of this node and the driver may not remove it ({error.message}). "
            f"Remove it: kubectl delete resourceslice {name}"
        )
        LOG.warning("%s", text, extra=fields(slice=name))
        self._report_problem("SliceLeftOver", text)

    # ------------------------------------------------------------------ looking

    async def _list(self) -> str:
        async with self._gate:
            items, version = await self._api.list_slices(self._identity.driver, self._identity.node_name)
            self._state = reducer.listed(self._state, items, time.monotonic())
        self._wake.set()
        return version

    async def _follow(self) -> None:
        """List and watch the slices until cancelled."""
        await list_and_watch(self._read, self._watch, self._observe, opened=self._opened, ended=self._ended)

    async def _read(self) -> str:
        self._api.forget()  # the cluster may have been upgraded
        return await self._list()

    def _watch(self, version: str, opened: Callable[[], None]) -> AsyncIterator[WatchEvent]:
        return self._api.watch_slices(self._identity.driver, self._identity.node_name, version, opened=opened)

    def _opened(self) -> None:
        self._problems.pop("watch", None)
        self._watch_log.report("the API server shows the slices", driver=self._identity.driver)

    def _ended(self, error: Exception | None) -> None:
        spread = random.uniform(0.0, CHECK_SECONDS)  # noqa: S311  no secret is made of it
        self._state = reducer.watch_ended(self._state, time.monotonic() + spread)
        self._wake.set()
        if error is None:
            return
        is_known = isinstance(error, AcceleratorError)
        text = f"slices cannot be watched: {error if is_known else type(error).__name__}"
        self._problems["watch"] = text
        if isinstance(error, AcceleratorError):
            self._watch_log.report(text, level=logging.WARNING, code=error.code)
        elif self._watch_log.report(text, level=logging.ERROR):
            LOG.error("unexpected exception in a watch", exc_info=error, extra=fields(driver=self._identity.driver))

    def _observe(self, kind: str, item: Json) -> None:
        before = self._state
        self._state = reducer.seen(before, kind, item, time.monotonic())
        if self._state is not before:
            self._wake.set()


__all__ = ["Content", "Pace", "Publisher"]
