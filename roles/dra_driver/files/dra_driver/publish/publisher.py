# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keeps the node's pool of ResourceSlices at the API server as it should be, and writes nothing while it is.

A watch shows what others do to the slices; the kubelet deletes all of a node's slices when it starts, and they are made
again at once. Facts: dra-api field selectors, kubelet start-up wipe, fields dropped silently where a gate is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

from ..api.client import ApiError, Json
from ..api.resources import ResourceApi
from ..core.errors import AcceleratorError
from ..core.model import CounterSet, Offer
from ..core.slices import PoolSpec, SliceWrite, build_pool, dropped_fields, plan_pool, plan_removal
from ..logs import StateLog, fields, operation
from ..metrics import Metrics

LOG = logging.getLogger(__name__)

# After a change that somebody else made: wait for the rest of it (the kubelet deletes slices one by one).
SETTLE_SECONDS = 1.0
# Somebody who changes the slices again and again is answered ever more slowly.
SETTLE_LIMIT = 30.0
RETRY_FIRST, RETRY_LIMIT = 0.5, 60.0
SEPARATE_COUNTERS_FROM = (1, 35)


@dataclass(frozen=True)
class Content:
    """What the pool is to hold."""

    offers: tuple[Offer, ...] = ()
    counter_sets: tuple[CounterSet, ...] = ()


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
    ) -> None:
        self._api = api
        self._driver = driver
        self._pool = pool
        self._node_name = node_name
        self._metrics = metrics
        self._report_problem = report_problem
        self._state = StateLog(LOG)
        self._content: Content | None = None
        self._existing: dict[str, Json] = {}
        self._owner: Json | None = None
        self._layout = "separate"
        self._wake = asyncio.Event()
        self._disturbed_at = 0.0
        self._disturbances = 0
        # By slice name: what was sent and what the server kept of it, where it dropped fields.
        self._curtailed: dict[str, tuple[Json, Json]] = {}
        self.published = asyncio.Event()

    def set_content(self, content: Content) -> None:
        """Say what the pool is to hold; it is published as soon as possible."""
        if content != self._content:
            self._content = content
            self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled, through every trouble of the API server."""
        delay = RETRY_FIRST
        while True:
            try:
                await self._session()
                delay = RETRY_FIRST
            except AcceleratorError as error:
                self.published.clear()
                if self._state.report(f"slices cannot be published: {error}", level=logging.WARNING, code=error.code):
                    delay = RETRY_FIRST
                if isinstance(error, ApiError) and error.status == 422:
                    self._report_problem("SlicesRefused", str(error))
                await asyncio.sleep(delay)
                delay = min(delay * 2, RETRY_LIMIT)

    async def _session(self) -> None:
        """List, then watch and write until the watch ends for good or something fails."""
        self._api.forget()
        self._layout = "separate" if await self._api.server_version() >= SEPARATE_COUNTERS_FROM else "combined"
        await self._look_up_owner()
        items, version = await self._api.list_slices(self._driver, self._node_name)
        self._existing = {item["metadata"]["name"]: item for item in items}
        self._wake.set()
        watch = asyncio.get_running_loop().create_task(self._watch(version))
        try:
            while not watch.done():
                waker = asyncio.get_running_loop().create_task(self._wake.wait())
                await asyncio.wait((watch, waker), return_when=asyncio.FIRST_COMPLETED)
                waker.cancel()
                if self._wake.is_set():
                    await self._settle()
                    self._wake.clear()
                    await self._sync()
            await watch
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError, AcceleratorError):
                await watch

    async def _watch(self, version: str) -> None:
        while True:
            try:
                async for event in self._api.watch_slices(self._driver, self._node_name, version):
                    metadata = event.object.get("metadata") or {}
                    version = str(metadata.get("resourceVersion") or version)
                    if event.type != "BOOKMARK":
                        self._observe(event.type, event.object)
            except ApiError as error:
                if error.status == 410:  # too old: the session begins anew with a list
                    return
                raise

    def _observe(self, kind: str, item: Json) -> None:
        name = item["metadata"]["name"]
        known = self._existing.get(name)
        if kind == "DELETED":
            if known is None or known["metadata"].get("uid") != item["metadata"].get("uid"):
                return
            del self._existing[name]
        else:
            if known is not None and not _newer(item, known):
                return
            self._existing[name] = item
        # It was not us: our own writes are in _existing before the watch tells of them.
        self._disturbed_at = time.monotonic()
        self._wake.set()

    async def _settle(self) -> None:
        """After somebody else's change, wait until they seem done; then make sure that the node is still the same."""
        if not self._disturbed_at:
            return
        patience = min(SETTLE_SECONDS * 2**self._disturbances, SETTLE_LIMIT)
        while (left := self._disturbed_at + patience - time.monotonic()) > 0:
            await asyncio.sleep(left)
        self._disturbed_at = 0.0
        # Slices of a node that was made anew with another UID are garbage to the cluster.
        await self._look_up_owner()

    async def _look_up_owner(self) -> None:
        node: dict[str, Any] | None = None
        try:
            node = await self._api.client.get(f"/api/v1/nodes/{self._node_name}")
        except ApiError as error:
            if error.status != 404:
                raise
        if node is None:
            raise AcceleratorError(
                f"Node {self._node_name} is not in the cluster (yet)",
                hint="The kubelet registers it. If it has another name, set node_name in the driver's configuration.",
                code="node-missing",
            )
        self._owner = {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self._node_name,
            "uid": node["metadata"]["uid"],
            "controller": True,
        }

    async def _sync(self) -> None:
        if self._content is None:
            return
        with operation():
            try:
                desired = self._desired(self._content)
            except ValueError as error:
                raise AcceleratorError(
                    f"The pool {self._pool} cannot be published: {error}", code="invalid-pool"
                ) from error
            existing = [self._as_sent(item) for item in self._existing.values()]
            plan = plan_pool(desired, existing, owner=self._owner)
            # A pool under a name that the configuration had before is ours to remove: same driver, same node.
            former = {item["spec"]["pool"]["name"] for item in existing} - {self._pool}
            removals = [write for name in sorted(former) for write in plan_removal(self._driver, name, existing).writes]
            writes = (*removals, *plan.writes)
            began = time.perf_counter()
            for write in writes:
                await self._write(write)
            if writes:
                self._disturbances = min(self._disturbances + 1, 5) if self.published.is_set() else 0
                LOG.info(
                    "published the pool",
                    extra=fields(
                        pool=self._pool,
                        generation=plan.generation,
                        devices=len(self._content.offers),
                        writes=len(writes),
                        ms=round((time.perf_counter() - began) * 1000, 1),
                    ),
                )
            else:
                self._disturbances = 0
            self._state.report(f"the pool {self._pool} is published", driver=self._driver)
            self.published.set()

    def _desired(self, content: Content) -> PoolSpec:
        return build_pool(
            driver=self._driver,
            pool=self._pool,
            node_name=self._node_name,
            offers=content.offers,
            counter_sets=content.counter_sets,
            layout=self._layout,
        )

    async def _write(self, write: SliceWrite) -> None:
        outcome = "failure"
        try:
            if write.body is None:
                await self._api.delete_slice(write.name, write.preconditions)
                self._existing.pop(write.name, None)
                self._curtailed.pop(write.name, None)
            else:
                if write.verb == "create":
                    answer = await self._api.create_slice(write.body)
                else:
                    answer = await self._api.update_slice(write.name, write.body)
                self._existing[answer["metadata"]["name"]] = answer
                self._note_dropped(write.body, answer)
            outcome = "success"
        finally:
            self._metrics.slice_write(write.verb, outcome)

    def _note_dropped(self, sent: Mapping[str, Any], answer: Json) -> None:
        """Take what the server kept as the best that can be had, or the pool would be written over and over."""
        name = answer["metadata"]["name"]
        dropped = dropped_fields(sent, answer)
        if not dropped:
            self._curtailed.pop(name, None)
            return
        self._curtailed[name] = (dict(sent["spec"]), dict(answer["spec"]))
        message = f"The API server dropped fields of slice {name}: {'; '.join(dropped)}"
        LOG.error(message, extra=fields(slice=name))
        self._report_problem("SliceFieldsDropped", message)

    def _as_sent(self, item: Json) -> Json:
        sent = self._curtailed.get(item["metadata"]["name"])
        return {**item, "spec": sent[0]} if sent is not None and sent[1] == item["spec"] else item


def _newer(item: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    new, old = (str(entry["metadata"].get("resourceVersion", "")) for entry in (item, known))
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old
