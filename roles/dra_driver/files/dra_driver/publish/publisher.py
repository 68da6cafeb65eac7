# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keep the node's pool of ResourceSlices at the API server in the desired state, without writes while it is.

This module executes the decisions of publish_plan.py. A list and a watch read the current state. They and the writes run
independently and retry after every API server error, so that neither waits for the other.
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
from ..api.throttling import spread
from ..api.watching import list_and_watch
from ..controller.facts import OUT_OF_SERVICE, node_facts
from ..core.dra.resource_slices import SliceWrite
from ..core.errors import AcceleratorError
from ..core.texts import LONGEST_CAUSE, join_problems
from ..logs import StateLog, fields, operation
from ..metrics import Metrics
from . import publish_plan
from .api_compatibility import CHANGED, REJECTED, Content, Withheld, without_binding
from .publish_plan import Decision, Identity, Pace, State

LOG = logging.getLogger(__name__)

# Seconds to wait before changes by others are reverted the first time, and after the first failure.
SETTLE_SECONDS, RETRY_FIRST = 1.0, 0.5
# An API server that ends closes the watches of all nodes at once. Each node queries the version and the features of the new
# server at a random time within these seconds.
CHECK_SECONDS = 60.0
# The minimum time between two queries, random in this range, in seconds. A load balancer with an idle limit can end the
# watches several times a minute.
CHECK_INTERVAL = (300.0, 600.0)


class Publisher:
    """Publish one driver's pool on one node.

    ``report_problem(reason, message)`` is called for problems that need an administrator.
    """

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
        self._next_check = 0.0
        self._wanted: Content | None = None
        self._binding: bool | None = None
        self._withheld: tuple[Withheld, ...] = ()
        self._writes_log, self._watch_log = StateLog(LOG), StateLog(LOG)
        self._wake = asyncio.Event()
        # Held during a list and during writes, so that a list shows all earlier writes.
        self._api_lock = asyncio.Lock()
        self.published = asyncio.Event()
        #: The time since when the pool differs from the desired one, on the monotonic clock; None while it does not.
        self.outdated_since: float | None = None
        self._problems: dict[str, str] = {}

    @property
    def problem(self) -> str:
        """Return the reason why the pool cannot be published or watched; "" if there is no problem."""
        return join_problems(dict.fromkeys(self._problems.values()), longest=LONGEST_CAUSE)

    @property
    def is_current(self) -> bool:
        """Return whether the pool in the API server matches the last content, as far as the watch shows."""
        return self.published.is_set()

    def set_content(self, content: Content) -> None:
        """Set the content of the pool and publish it.

        Devices with binding conditions are published only after ``set_binding``.
        """
        self._wanted = content
        self._publish(content)

    def set_binding(self, possible: bool) -> None:
        """Set whether a controller reports to this node which claims pods wait for.

        Without it, pods must not wait for the node's devices.
        """
        self._binding = possible
        if self._wanted is not None:
            self._publish(self._wanted)

    def _publish(self, content: Content) -> None:
        if any(offer.prepared_before_binding for offer in content.offers):
            if self._binding is None:
                return
            if not self._binding:
                content = without_binding(content)
        if content != self._state.content:
            self._state = replace(self._state, content=content)
            self._mark_outdated()
            self._wake.set()

    def set_notes(self, notes: Mapping[str, str]) -> None:
        """Set the pool's annotations (see PoolSpec) and publish them.

        Before the first call the existing annotations stay.
        """
        if notes != self._state.annotations:
            self._state = replace(self._state, annotations=dict(notes))
            self._mark_outdated()
            self._wake.set()

    async def run(self) -> None:
        """Publish until canceled. API server errors are reported and retried."""
        self._state = replace(publish_plan.after_interruption(self._state), slices=None)
        follower = asyncio.get_running_loop().create_task(self._list_and_watch())
        try:
            while not follower.done():
                self._wake.clear()
                decision = publish_plan.decide(self._identity, self._pace, self._state, time.monotonic())
                self._report_decision(decision)
                if decision.query_server or decision.query_owner or decision.writes:
                    with operation():
                        await self._execute(decision)
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

    # ------------------------------------------------------------------ actions

    def _report_decision(self, decision: Decision) -> None:
        """Update the state of the publication, and report problems and withheld devices."""
        if decision.current:
            self._state = publish_plan.when_current(self._state, decision)
            self.published.set()
            self.outdated_since = None
            self._problems.pop("write", None)
            self._writes_log.report(f"the pool {self._identity.pool} is published", driver=self._identity.driver)
        else:
            self._mark_outdated()
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

    def _mark_outdated(self) -> None:
        self.published.clear()
        if self.outdated_since is None:
            self.outdated_since = time.monotonic()

    async def _execute(self, decision: Decision) -> None:
        try:
            if decision.query_server:
                await self._query_server()
            elif decision.query_owner:
                await self._query_owner()
            else:
                async with self._api_lock:
                    await self._write_all(decision)
        except AcceleratorError as error:
            self._report_failure(error)
            if decision.writes and publish_plan.needs_list(self._state):
                with contextlib.suppress(AcceleratorError):  # the watch shows it too, later
                    await self._list()

    def _report_failure(self, error: AcceleratorError) -> None:
        status, retry_after = (error.status, error.retry_after) if isinstance(error, ApiError) else (0, None)
        if status == 404 and isinstance(error, ApiError) and error.is_of_server:
            status = 503  # an answer of a load balancer, or of a server that does not serve the path
        delay = None if retry_after is None else spread(retry_after)
        jitter = random.random()  # noqa: S311  no secret is made of it
        self._state = publish_plan.after_failure(
            self._state, self._pace, time.monotonic(), status=status, retry_after=delay, jitter=jitter
        )
        if status in publish_plan.OUTDATED and self._state.failures <= publish_plan.FAST_CONFLICTS:
            return  # a conflicting write; the next attempt uses a new list
        self._problems["write"] = f"slices cannot be published: {error}"
        self._writes_log.report(self._problems["write"], level=logging.WARNING, code=error.code)
        if status == publish_plan.INVALID:
            self._report_problem("SlicesRefused", str(error))

    async def _query_server(self) -> None:
        """Query the server's version, and by a dry run the fields that it keeps."""
        version = await self._api.server_version()
        content, sent, answer = self._state.content, None, None
        if content is not None:
            with contextlib.suppress(ValueError):  # the decision on the whole pool reports the error
                sent = publish_plan.probe_slice(
                    self._identity, content, publish_plan.layout_of(version), self._state.owner
                )
        if sent is not None:
            try:
                answer = await self._api.create_slice(sent, dry_run=True)
            except ApiError as error:
                if error.is_of_server and error.status != 403:  # a policy can match the probe only
                    raise
                # The answers to the real writes are checked as well.
                LOG.warning("cannot query which fields of a slice the API server keeps: %s", error)
        self._state = publish_plan.with_server_features(self._state, version, sent, answer)
        self._next_check = time.monotonic() + random.uniform(*CHECK_INTERVAL)  # noqa: S311  no secret is made of it

    async def _query_owner(self) -> None:
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
        facts = node_facts(node)
        if facts.out_of_service and not facts.ready:
            # The controller deletes the slices of this node, so creating them again would never end.
            raise AcceleratorError(
                f"Node {name} has the taint {OUT_OF_SERVICE} and is not ready, so the controller deletes its slices",
                hint=f"Start the kubelet, or remove the taint: kubectl taint node {name} {OUT_OF_SERVICE}-",
                code="node-out-of-service",
            )
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"], "controller": True}
        self._state = publish_plan.with_owner(self._state, owner)

    async def _write_all(self, decision: Decision) -> None:
        began, server = time.perf_counter(), self._state.server
        for write in decision.writes:
            try:
                answer = await self._write(write)
            except ApiError as error:
                if not decision.leftover or error.status not in publish_plan.REFUSED:
                    raise
                self._report_leftover(write.name, error)
                continue
            self._state = publish_plan.with_answer(self._state, write, answer)
            if decision.leftover:
                LOG.info("removed a slice of a previous pool", extra=fields(slice=write.name))
            if self._state.server != server:
                return  # the server drops more fields than known, so the content is decided again first
        self._state = publish_plan.after_writes(self._state, self._pace, decision, time.monotonic())
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
        """Report a slice under another pool name that cannot be removed. The pool is published nevertheless."""
        known = name in self._state.leftovers
        self._state = publish_plan.after_refused_removal(self._state, self._pace, name, time.monotonic())
        if known:
            return
        text = (
            f"slice {name} is of another pool of this node and the driver may not remove it ({error.message}). "
            f"Remove it: kubectl delete resourceslice {name}"
        )
        LOG.warning("%s", text, extra=fields(slice=name))
        self._report_problem("SliceLeftOver", text)

    # ------------------------------------------------------------------ list and watch

    async def _list(self) -> str:
        async with self._api_lock:
            items, version = await self._api.list_slices(self._identity.driver, self._identity.node_name)
            self._state = publish_plan.with_list(self._state, items, time.monotonic())
        self._wake.set()
        return version

    async def _list_and_watch(self) -> None:
        """List and watch the slices until canceled."""
        await list_and_watch(
            self._list_again, self._watch, self._apply_watch_event, opened=self._watch_started, ended=self._watch_ended
        )

    async def _list_again(self) -> str:
        self._api.forget()  # the cluster may have been upgraded
        return await self._list()

    def _watch(self, version: str, opened: Callable[[], None]) -> AsyncIterator[WatchEvent]:
        return self._api.watch_slices(self._identity.driver, self._identity.node_name, version, opened=opened)

    def _watch_started(self) -> None:
        self._state = publish_plan.after_watch_start(self._state, self._next_check_time())
        self._wake.set()
        self._problems.pop("watch", None)
        self._watch_log.report("the API server shows the slices", driver=self._identity.driver)

    def _watch_ended(self, error: Exception | None) -> None:
        self._state = publish_plan.after_watch_end(self._state, self._next_check_time())
        self._wake.set()
        if error is None:
            return
        if isinstance(error, ApiError) and error.status == 404:
            self._api.forget()  # the API server that answers now may serve other versions of the group
        is_known = isinstance(error, AcceleratorError)
        text = f"slices cannot be watched: {error if is_known else type(error).__name__}"
        self._problems["watch"] = text
        if isinstance(error, AcceleratorError):
            self._watch_log.report(text, level=logging.WARNING, code=error.code)
        elif self._watch_log.report(text, level=logging.ERROR):
            LOG.error("unexpected exception in a watch", exc_info=error, extra=fields(driver=self._identity.driver))

    def _next_check_time(self) -> float:
        soon = time.monotonic() + random.uniform(0.0, CHECK_SECONDS)  # noqa: S311  no secret is made of it
        return max(soon, self._next_check)

    def _apply_watch_event(self, kind: str, item: Json) -> None:
        before = self._state
        self._state = publish_plan.with_watch_event(before, kind, item, time.monotonic())
        if self._state is not before:
            self._wake.set()


__all__ = ["Content", "Pace", "Publisher"]
