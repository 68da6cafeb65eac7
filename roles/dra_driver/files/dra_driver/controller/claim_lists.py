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
from ..api.throttling import backoff
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
from ..supervisors.driver_state import run_together
from .facts import MANAGED_BY, MANAGED_BY_LABEL, ClaimFacts, ClaimIndex, NodeFacts

LOG = logging.getLogger(__name__)

MANAGER = "dra-accelerators-controller"
LABELS = {MANAGED_BY_LABEL: MANAGED_BY, "app.kubernetes.io/component": "controller"}
# Seconds between a change of a node's claims and the write of its list. A node has at most one write in this time.
GATHER_SECONDS = 0.1
# The limit for writes at the same time. The Lease is renewed over the same connections.
WRITERS = 4
# Seconds in which each list is compared once, and in which the watch must show a write.
COMPARE_SECONDS = 60.0
# Seconds in which all lists are compared after all claims or all lists were read again.
SPREAD_SECONDS = 1.0
# Seconds until a failed write is repeated: the first value, which doubles after each failure up to the second one.
RETRY_FIRST, RETRY_LIMIT = 1.0, 60.0
# Seconds of failing writes after which the sign is no longer renewed. The drivers then publish their devices without binding conditions.
FAILING_SECONDS = 60.0
# Seconds until another attempt to renew the sign.
RETRY_SECONDS = 5.0


class NodeList(NamedTuple):
    """The list of one node: the node's name, the UID of the Node that owns the ConfigMap, and the text."""

    node: str
    owner: str
    text: str


def list_text(claims: Iterable[ClaimFacts]) -> str:
    """Return the text of a list with these claims, in a fixed order. Above MOST_CLAIMS, prepared claims are left out first."""
    kept = sorted(claims, key=lambda each: (each.is_prepared, each.namespace, each.name))[:MOST_CLAIMS]
    return write_list(sorted(ListedClaim(each.namespace, each.name, each.uid, each.allocation_digest) for each in kept))


def read_node_list(item: Json) -> NodeList | None:
    """Return the list in a ConfigMap; None for another ConfigMap, such as the sign."""
    metadata = item["metadata"]
    name = str(metadata["name"])
    if not name.startswith(PREFIX):
        return None
    owners = ",".join(str(each.get("uid", "")) for each in metadata.get("ownerReferences") or ())
    return NodeList(name[len(PREFIX) :], owners, str((item.get("data") or {}).get(CLAIMS) or ""))


class ClaimLists:
    """Write the lists of all nodes in ``namespace``, and renew the sign.

    ``may_act`` returns, before each write, whether this controller is still the leader.
    """

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
        #: The time of the next comparison of each node's list with its claims, also as a heap, which can have outdated entries.
        self._due_at: dict[str, float] = {}
        self._due_heap: list[tuple[float, str]] = []
        self._busy: set[str] = set()
        #: Written lists that the watch has not shown yet (None: deleted), and the time until which that is expected.
        self._unconfirmed: dict[str, tuple[NodeList | None, float]] = {}
        self._failures: dict[str, int] = {}
        #: The time of the first failed write since the last new list; None without failures.
        self._failing_since: float | None = None
        self._paused_until = 0.0
        self._last_claim_index: object = None
        self._wake = asyncio.Event()
        self._state, self._sign_state = StateLog(LOG), StateLog(LOG)

        async def path() -> str:
            return self._path

        self.lists: Watched[NodeList] = Watched(
            client,
            "lists of waiting claims",
            path,
            read_node_list,
            params={"labelSelector": ",".join(f"{key}={value}" for key, value in LABELS.items())},
            changed=self._schedule_all,
            matters=self._list_changed,
        )

    def _list_changed(self, former: NodeList | None, new: NodeList | None) -> bool:
        """Schedule a comparison if another program has changed a list. Return False, because ``changed`` need not be called."""
        for each in {former, new} - {None}:
            assert each is not None  # noqa: S101  for the type checker
            if each.node in self._unconfirmed and self._unconfirmed[each.node][0] == new:
                del self._unconfirmed[each.node]
            else:
                self.schedule(each.node)
        return False

    def claims_changed(self, *claims: ClaimFacts | None) -> None:
        """Schedule comparisons of the lists of these claims' nodes."""
        for claim in claims:
            if claim is not None and claim.pre_binding_node:
                self.schedule(claim.pre_binding_node)

    def claims_listed(self) -> None:
        """Schedule comparisons of all lists if all claims were read again."""
        if self._claims.items is not self._last_claim_index:
            self._last_claim_index = self._claims.items
            self._schedule_all()

    def schedule(self, node: str, seconds: float = GATHER_SECONDS) -> None:
        """Schedule a comparison of a node's list with its claims, within ``seconds``."""
        due = self._clock() + seconds
        if due < self._due_at.get(node, math.inf):
            self._due_at[node] = due
            heapq.heappush(self._due_heap, (due, node))
            self._wake.set()

    def _schedule_all(self, spread: float = SPREAD_SECONDS) -> None:
        for node in (
            {each.node for each in self.lists.items.values()} | set(self._claims_by_node) | set(self._unconfirmed)
        ):
            self.schedule(node, random.uniform(0.0, spread))  # noqa: S311  no secret is made of it

    @property
    def _claims_by_node(self) -> Mapping[str, Mapping[str, ClaimFacts]]:
        index = self._claims.items
        return index.awaited if isinstance(index, ClaimIndex) else {}

    async def run(self) -> None:
        """Write lists until canceled, as soon as Nodes, claims, and lists have been read."""
        await run_together(self.lists.run, self._write_lists)

    async def _write_lists(self) -> None:
        await asyncio.gather(*(each.synced.wait() for each in (self._nodes, self._claims, self.lists)))
        await run_together(
            *(self._write_due for _each in range(WRITERS)), self._schedule_all_periodically, self._renew_sign
        )

    async def _schedule_all_periodically(self) -> None:
        while True:
            self._schedule_all(COMPARE_SECONDS)
            await asyncio.sleep(COMPARE_SECONDS)

    # ------------------------------------------------------------------ writing

    async def _write_due(self) -> None:
        while True:
            node = await self._next_due_node()
            self._busy.add(node)
            try:
                is_new = await self._write(node)
                self._failures.pop(node, None)
                if is_new or not self._failures:
                    self._failing_since = None
                if not self._failures:
                    self._state.report("lists of waiting claims are written")
            except Exception as error:
                if not isinstance(error, AcceleratorError):
                    LOG.exception("the list of waiting claims of node %s cannot be written", node)
                self._retry_later(node, error)
            finally:
                self._busy.discard(node)

    async def _next_due_node(self) -> str:
        """Wait for the next node whose list is due."""
        while True:
            await asyncio.sleep(0)  # many lists can be due, and most need no write
            now = self._clock()
            due = max(self._due_heap[0][0], self._paused_until) if self._due_heap else now + COMPARE_SECONDS
            if due > now:
                self._wake.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._wake.wait(), due - now)
                continue
            stamp, node = heapq.heappop(self._due_heap)
            if self._due_at.get(node) != stamp:
                continue
            del self._due_at[node]
            if node not in self._busy:
                return node
            self.schedule(node)  # a write must not overtake the previous one

    def _retry_later(self, node: str, error: Exception) -> None:
        attempts = self._failures[node] = self._failures.get(node, 0) + 1
        if self._failing_since is None:
            self._failing_since = self._clock()
        if isinstance(error, ApiError) and error.retry_after:
            self._paused_until = self._clock() + error.retry_after
        text = f"the list of waiting claims of node {node} cannot be written: {error}"
        self._state.report(text, level=logging.WARNING, code=getattr(error, "code", "defect"))
        self.schedule(node, backoff(attempts, RETRY_FIRST, RETRY_LIMIT))

    async def _write(self, node: str) -> bool:
        """Write the list of a node if it differs from its claims. Return whether a new list was created. Raises ApiError, ApiUnreachable."""
        facts, name = self._nodes.items.get(f"/{node}"), f"{PREFIX}{node}"
        current = self.lists.items.get(f"{self._namespace}/{name}")
        if node in self._unconfirmed:
            sent, until = self._unconfirmed[node]
            if self._clock() < until:
                current = sent
            else:
                del self._unconfirmed[node]
        text = list_text(self._claims_by_node.get(node, {}).values())
        if facts is None and text:
            return False  # without a Node no driver reads the list
        desired = NodeList(node, facts.uid, text) if facts is not None and text else None
        if desired == current or not self._may_act():
            return False
        self._unconfirmed[node] = desired, self._clock() + COMPARE_SECONDS
        try:
            if desired is None:
                await self._delete(name)
            else:
                # The garbage collector deletes the list with its Node.
                owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": desired.owner}
                await self._apply(name, {CLAIMS: text}, [owner])
        except BaseException:
            self._unconfirmed.pop(node, None)
            raise
        return current is None and desired is not None

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

    def _are_writes_failing(self) -> bool:
        """Return whether writes have failed for FAILING_SECONDS, for at least as many nodes as have a list without a failure."""
        if self._failing_since is None or self._clock() - self._failing_since <= FAILING_SECONDS:
            return False
        others = {each.node for each in self.lists.items.values()} - self._failures.keys()
        return len(self._failures) >= len(others)

    async def _renew_sign(self) -> None:
        """Renew the sign while claims can be seen and lists can be written.

        If fewer writes fail than lists exist, the failing objects are the cause, and the sign is renewed. A quota or a policy can refuse new
        lists only. So only a new list, and not a change of an existing one, ends the time of failures.
        """
        while True:
            pause = RETRY_SECONDS
            if self._are_writes_failing():
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
