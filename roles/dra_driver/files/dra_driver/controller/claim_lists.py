# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write for each node the list of claims that it prepares before the pods are bound (claims/pre_binding_lists.py), and renew the sign for all nodes.

Facts: k8s.io/api/core/v1/types.go (ConfigMap), k8s.io/kubernetes/pkg/controller/garbagecollector (deletes objects whose
owner is deleted).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..api.client import ApiClient, ApiError, Json
from ..api.resources import APPLY
from ..api.watching import Watched
from ..claims.pre_binding_lists import (
    CLAIMS,
    MOST_CLAIMS,
    PREFIX,
    RENEW_SECONDS,
    RENEWED,
    SIGN,
    ListedClaim,
    write_list,
)
from ..core.errors import AcceleratorError
from ..core.times import text_of
from ..deadlines import within
from ..logs import StateLog
from .facts import MANAGED_BY, MANAGED_BY_LABEL, ClaimFacts, ClaimIndex, NodeFacts

LOG = logging.getLogger(__name__)

MANAGER = "dra-accelerators-controller"
LABELS = {MANAGED_BY_LABEL: MANAGED_BY, "app.kubernetes.io/component": "controller"}
# Changes of a node's claims within this time are one write, so a node has at most one write in this time.
GATHER_SECONDS = 0.1
# The limit for writes at the same time. The Lease is renewed over the same connections.
WRITERS = 4
# The time in which each list is compared once, and in which a write must be visible in the watch.
COMPARE_SECONDS = 60.0
# After all claims or all lists were read again, the lists are compared within this time.
SPREAD_SECONDS = 1.0
# A failed write is repeated after the first value, then after twice the time, up to the second value.
RETRY_FIRST, RETRY_LIMIT = 1.0, 60.0
# While writes of lists fail for longer than this, the sign is not renewed, so the drivers publish their devices without binding conditions.
FAILING_SECONDS = 60.0
# The pause before another attempt to renew the sign.
RETRY_SECONDS = 5.0


class Written(NamedTuple):
    """A list in the API server: its node, the UID of the Node that owns it, and its text."""

    node: str
    owner: str
    text: str


def text_for(claims: Iterable[ClaimFacts]) -> str:
    """Return the list with these claims, in a fixed order. If there are too many, claims that are not prepared are kept."""
    kept = sorted(claims, key=lambda each: (each.is_prepared, each.namespace, each.name))[:MOST_CLAIMS]
    return write_list(sorted(ListedClaim(each.namespace, each.name, each.uid, each.allocation_digest) for each in kept))


def written_list(item: Json) -> Written | None:
    """Read a list; None for another ConfigMap, such as the sign."""
    metadata = item["metadata"]
    name = str(metadata["name"])
    if not name.startswith(PREFIX):
        return None
    owners = ",".join(str(each.get("uid", "")) for each in metadata.get("ownerReferences") or ())
    return Written(name[len(PREFIX) :], owners, str((item.get("data") or {}).get(CLAIMS) or ""))


class ClaimLists:
    """The lists of all nodes in ``namespace``. ``may_act`` returns, before each write, whether this controller is still the leader."""

    def __init__(
        self,
        client: ApiClient,
        *,
        namespace: str,
        nodes: Watched[NodeFacts],
        claims: Watched[ClaimFacts],
        may_act: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/configmaps"
        self._namespace = namespace
        self._nodes = nodes
        self._claims = claims
        self._may_act = may_act
        self._clock = clock
        #: The time at which the list of a node is compared with its claims, also as a heap with outdated entries.
        self._due: dict[str, float] = {}
        self._queue: list[tuple[float, str]] = []
        self._busy: set[str] = set()
        #: Written lists that the watch has not shown yet (None: deleted), and the time until which that is expected.
        self._sent: dict[str, tuple[Written | None, float]] = {}
        self._attempts: dict[str, int] = {}
        #: The time since when writes of lists fail, without a new list in between; None if none fails.
        self._failing_since: float | None = None
        self._paused_until = 0.0
        self._known: object = None
        self._wake = asyncio.Event()
        self._state, self._sign_state = StateLog(LOG), StateLog(LOG)

        async def path() -> str:
            return self._path

        self.lists: Watched[Written] = Watched(
            client,
            "lists of waiting claims",
            path,
            written_list,
            params={"labelSelector": ",".join(f"{key}={value}" for key, value in LABELS.items())},
            changed=self._compare_all,
            matters=self._list_changed,
        )

    def _list_changed(self, former: Written | None, new: Written | None) -> bool:
        """Compare a changed list with the claims, unless this controller wrote it: another program can have changed it."""
        for each in {former, new} - {None}:
            assert each is not None  # noqa: S101  for the type checker
            if each.node in self._sent and self._sent[each.node][0] == new:
                del self._sent[each.node]
            else:
                self.mark(each.node)
        return False

    def claims_changed(self, *claims: ClaimFacts | None) -> None:
        """Compare the lists of these claims' nodes soon."""
        for claim in claims:
            if claim is not None and claim.pre_binding_node:
                self.mark(claim.pre_binding_node)

    def claims_listed(self) -> None:
        """Compare all lists if all claims were read again."""
        if self._claims.items is not self._known:
            self._known = self._claims.items
            self._compare_all()

    def mark(self, node: str, seconds: float = GATHER_SECONDS) -> None:
        """Compare the list of a node with its claims after some seconds at the latest."""
        due = self._clock() + seconds
        if due < self._due.get(node, math.inf):
            self._due[node] = due
            heapq.heappush(self._queue, (due, node))
            self._wake.set()

    def _compare_all(self, spread: float = SPREAD_SECONDS) -> None:
        for node in {each.node for each in self.lists.items.values()} | set(self._awaited) | set(self._sent):
            self.mark(node, random.uniform(0.0, spread))  # noqa: S311  no secret is made of it

    @property
    def _awaited(self) -> Mapping[str, Mapping[str, ClaimFacts]]:
        index = self._claims.items
        return index.awaited if isinstance(index, ClaimIndex) else {}

    async def run(self) -> None:
        """Write lists until canceled, as soon as Nodes, claims, and lists have been read."""
        tasks = [asyncio.ensure_future(self.lists.run())]
        try:
            await asyncio.gather(*(each.synced.wait() for each in (self._nodes, self._claims, self.lists)))
            tasks += [asyncio.ensure_future(self._write_due()) for _each in range(WRITERS)]
            tasks += [asyncio.ensure_future(self._compare_often()), asyncio.ensure_future(self._renew())]
            done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _compare_often(self) -> None:
        while True:
            self._compare_all(COMPARE_SECONDS)
            await asyncio.sleep(COMPARE_SECONDS)

    # ------------------------------------------------------------------ writing

    async def _write_due(self) -> None:
        while True:
            node = await self._next()
            self._busy.add(node)
            try:
                is_new = await self._write(node)
                self._attempts.pop(node, None)
                if is_new or not self._attempts:
                    self._failing_since = None
                if not self._attempts:
                    self._state.report("lists of waiting claims are written")
            except Exception as error:
                if not isinstance(error, AcceleratorError):
                    LOG.exception("the list of waiting claims of node %s cannot be written", node)
                self._failed(node, error)
            finally:
                self._busy.discard(node)

    async def _next(self) -> str:
        """Wait for the next node whose list is due."""
        while True:
            await asyncio.sleep(0)  # many lists can be due, and most need no write
            now = self._clock()
            due = max(self._queue[0][0], self._paused_until) if self._queue else now + COMPARE_SECONDS
            if due > now:
                self._wake.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._wake.wait(), due - now)
                continue
            stamp, node = heapq.heappop(self._queue)
            if self._due.get(node) != stamp:
                continue
            del self._due[node]
            if node not in self._busy:
                return node
            self.mark(node)  # a write must not overtake the previous one

    def _failed(self, node: str, error: Exception) -> None:
        attempts = self._attempts[node] = self._attempts.get(node, 0) + 1
        if self._failing_since is None:
            self._failing_since = self._clock()
        if isinstance(error, ApiError) and error.retry_after:
            self._paused_until = self._clock() + error.retry_after
        text = f"the list of waiting claims of node {node} cannot be written: {error}"
        self._state.report(text, level=logging.WARNING, code=getattr(error, "code", "defect"))
        self.mark(node, min(RETRY_FIRST * 2.0 ** min(attempts - 1, 30), RETRY_LIMIT))

    async def _write(self, node: str) -> bool:
        """Write the list of a node if it differs from its claims. Return whether a new list was created. Raises ApiError, ApiUnreachable."""
        facts, name = self._nodes.items.get(f"/{node}"), f"{PREFIX}{node}"
        present = self.lists.items.get(f"{self._namespace}/{name}")
        if node in self._sent:
            sent, until = self._sent[node]
            if self._clock() < until:
                present = sent
            else:
                del self._sent[node]
        text = text_for(self._awaited.get(node, {}).values())
        if facts is None and text:
            return False  # without a Node no driver reads the list
        wanted = Written(node, facts.uid, text) if facts is not None and text else None
        if wanted == present or not self._may_act():
            return False
        self._sent[node] = wanted, self._clock() + COMPARE_SECONDS
        try:
            if wanted is None:
                await self._delete(name)
            else:
                # The garbage collector deletes the list with its Node.
                owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": wanted.owner}
                await self._apply(name, {CLAIMS: text}, [owner])
        except BaseException:
            self._sent.pop(node, None)
            raise
        return present is None and wanted is not None

    async def _delete(self, name: str) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions"}
        try:
            await self._client.request("DELETE", f"{self._path}/{name}", body=body)
        except ApiError as error:
            if not error.is_not_found:
                raise

    async def _apply(self, name: str, data: Mapping[str, str], owners: list[Json]) -> None:
        metadata = {"name": name, "namespace": self._namespace, "labels": LABELS, "ownerReferences": owners}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        params = {"fieldManager": MANAGER, "force": "true"}
        await self._client.request("PATCH", f"{self._path}/{name}", params=params, body=body, content_type=APPLY)

    def _is_failing(self) -> bool:
        """Return whether writes of lists have failed for long, for at least as many nodes as there are other lists."""
        if self._failing_since is None or self._clock() - self._failing_since <= FAILING_SECONDS:
            return False
        others = {each.node for each in self.lists.items.values()} - self._attempts.keys()
        return len(self._attempts) >= len(others)

    async def _renew(self) -> None:
        """Renew the sign while claims can be seen and lists can be written.

        Without it, the drivers publish their devices without binding conditions. A quota or a policy can refuse new lists only, so a change of
        an existing list does not end the failures. While fewer lists fail than exist, the cause is in their objects, and the sign is renewed.
        """
        while True:
            pause = RETRY_SECONDS
            if self._is_failing():
                text = f"the ConfigMap {self._namespace}/{SIGN} is not renewed: lists of waiting claims cannot be written for {FAILING_SECONDS:g} s"
                self._sign_state.report(text, level=logging.WARNING)
            elif self._may_act() and self._claims.current and self._nodes.current:
                try:
                    await self._apply(SIGN, {RENEWED: text_of(time.time())}, [])
                    pause = RENEW_SECONDS
                    self._sign_state.report(f"the ConfigMap {self._namespace}/{SIGN} is renewed")
                except AcceleratorError as error:
                    text = f"the ConfigMap {self._namespace}/{SIGN} cannot be written: {error}"
                    self._sign_state.report(text, level=logging.WARNING, code=error.code)
            await asyncio.sleep(pause)
