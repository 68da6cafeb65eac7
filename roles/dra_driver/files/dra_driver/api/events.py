# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write Kubernetes Events on claims and on the node, with limits for objects, namespaces, and the node."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..core.errors import AcceleratorError
from ..core.times import now_text
from ..logs import current_operation
from .client import ApiClient, ApiError, Json
from .throttling import retry

LOG = logging.getLogger(__name__)
Value = TypeVar("Value")

# The count of a repeated Event is incremented once in this time (seconds), or at once after an Event of the other type for the object.
REPEAT_SECONDS = 300.0
# The limit of one object: this many Events at once, then one per REFILL_SECONDS.
BURST = 25
REFILL_SECONDS = 5.0
# The limit of all cluster-scoped objects together, and the same again for all objects in namespaces: a fault of a full node
# is reported to the pods of all of its devices. Users of namespaces cannot use up the Events of the node.
TOTAL_BURST = 300
TOTAL_REFILL_SECONDS = 1.0
# The limit of one namespace, so that its users cannot use up the Events of the other namespaces.
NAMESPACE_BURST = 150
NAMESPACE_REFILL_SECONDS = 2.0
# The maximum number of objects, of namespaces, and of written Events that are kept in memory, for each group.
REMEMBERED = 512
#: The maximum number of Events that wait for their write, for each group (cluster-scoped objects, objects in
#: namespaces). More are dropped.
PENDING_LIMIT = 300
# The time, in seconds, during which an Event rejected with status 429 or 503 is sent again.
THROTTLED_SECONDS = 60.0
MESSAGE_LIMIT = 1024
# The annotation with the operation's ID. The operation's log lines contain this ID too.
OPERATION = "dra-accelerators/operation"


@dataclass(frozen=True)
class Subject:
    """The object that an Event is about. ``namespace`` is "" for a cluster-scoped object."""

    kind: str
    api_version: str
    name: str
    uid: str = ""
    namespace: str = ""

    @classmethod
    def of_node(cls, name: str) -> Subject:
        """Return the subject for a Node. The UID is the name, as in the kubelet's Events, because kubectl searches for it."""
        return cls("Node", "v1", name, name)

    @classmethod
    def of_claim(cls, namespace: str, name: str, uid: str) -> Subject:
        """Return the subject for a ResourceClaim."""
        return cls("ResourceClaim", "resource.k8s.io/v1", name, uid, namespace)


@dataclass(frozen=True)
class _Content:
    """The content of an Event. ``kind`` is Warning or Normal. ``name`` is "" for a generated name."""

    kind: str
    subject: Subject
    reason: str
    message: str
    action: str
    name: str
    time: str


@dataclass
class _Written:
    """A written Event: its name ("" before the first write), how often it happened, the time of its last occurrence, and its order."""

    name: str
    namespace: str
    count: int
    at: float
    order: int = 0


class _TokenBucket:
    """Allow ``burst`` Events at once, and one more per ``refill_seconds``."""

    def __init__(self, burst: int, refill_seconds: float, now: float) -> None:
        self._burst = burst
        self._refill_seconds = refill_seconds
        self._left = float(burst)
        self._at = now

    def take(self, now: float) -> bool:
        """Take one token. Return False if the bucket is empty."""
        self._left = min(float(self._burst), self._left + (now - self._at) / self._refill_seconds)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _ObjectState:
    """The limit of one object, and the sequence number of its last Event of each type."""

    def __init__(self, now: float) -> None:
        self.limit = _TokenBucket(BURST, REFILL_SECONDS, now)
        self.last = {"Warning": 0, "Normal": 0}

    def has_other_type_since(self, kind: str, order: int) -> bool:
        """Return whether an Event of another type than ``kind`` was written after the sequence number ``order``."""
        return any(last > order for each, last in self.last.items() if each != kind)


class _Budget:
    """The limits of a group of objects, and their written Events.

    Cluster-scoped objects are one group, and objects in namespaces are the other. A group cannot exhaust the limits of
    the other group, evict its written Events, or delay its writes.
    """

    def __init__(self, now: float) -> None:
        # One write of the group at a time. Writes that hang, for example in an admission webhook, leave the other connections of the
        # client free, and concurrent writes of one Event would create it twice instead of incrementing its count.
        self.write_lock = asyncio.Lock()
        self.pending = self.dropped = 0
        self.written: OrderedDict[tuple[str, str, str, str], _Written] = OrderedDict()
        self._all = _TokenBucket(TOTAL_BURST, TOTAL_REFILL_SECONDS, now)
        self._namespaces: OrderedDict[str, _TokenBucket] = OrderedDict()
        self._objects: OrderedDict[str, _ObjectState] = OrderedDict()

    def object_state(self, subject: Subject, now: float) -> _ObjectState:
        """Return the state of one object."""
        return _recent(self._objects, subject.uid or subject.name, lambda: _ObjectState(now))

    def take(self, subject: Subject, now: float) -> bool:
        """Take one Event of an object. Return False if the object, its namespace, or the group has none left."""
        limits = [self.object_state(subject, now).limit]
        if subject.namespace:
            new = functools.partial(_TokenBucket, NAMESPACE_BURST, NAMESPACE_REFILL_SECONDS, now)
            limits.append(_recent(self._namespaces, subject.namespace, new))
        return all(limit.take(now) for limit in (*limits, self._all))


def _recent(known: OrderedDict[str, Value], key: str, new: Callable[[], Value]) -> Value:
    """Return the value of a key, or a new value. Delete the least recently used keys above REMEMBERED."""
    found = known[key] if key in known else known.setdefault(key, new())
    known.move_to_end(key)
    while len(known) > REMEMBERED:
        known.popitem(last=False)
    return found


class EventRecorder:
    """Write Events in the background. A failed write is logged and does not raise.

    An Event is not written if its object, the namespace, or the group (cluster-scoped objects, objects in namespaces)
    had too many in a short time, or if PENDING_LIMIT Events of the group wait for their write. The methods then return
    False, and the caller can retry later. Each group has one write at a time. The number of Events rejected because of
    a full queue is logged.
    """

    def __init__(
        self, api: ApiClient, *, component: str, node_name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._component = component
        self._node_name = node_name
        self._clock = clock
        self._of_cluster, self._of_namespaces = _Budget(clock()), _Budget(clock())
        self._order = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def warning(self, subject: Subject, reason: str, message: str, *, action: str, name: str = "") -> bool:
        """Write a Warning.

        ``reason`` and ``action`` are UpperCamelCase identifiers. Return False if a limit is reached.

        ``name`` is the Event's name. The Event is not written if an Event of this name exists.
        """
        return self._record("Warning", subject, reason, message, action=action, name=name)

    def normal(self, subject: Subject, reason: str, message: str, *, action: str, name: str = "") -> bool:
        """Write a Normal Event. Return False if a limit is reached. ``name`` is as in ``warning``."""
        return self._record("Normal", subject, reason, message, action=action, name=name)

    async def close(self) -> None:
        """Wait up to 2 s for pending writes, then cancel them."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=2)
        for task in tuple(self._tasks):
            task.cancel()

    def _record(self, kind: str, subject: Subject, reason: str, message: str, *, action: str, name: str) -> bool:
        """Queue the write of an Event. Return False if a limit is reached. A recent repetition is not written, and returns True."""
        message = message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 3] + "..."
        key = (subject.uid or subject.name, kind, reason, name or message)
        now = self._clock()
        budget = self._of_namespaces if subject.namespace else self._of_cluster
        state = budget.object_state(subject, now)
        former = budget.written.get(key)
        if (
            former is not None
            and now - former.at < REPEAT_SECONDS
            and (name or not state.has_other_type_since(kind, former.order))
        ):
            return True
        if budget.pending >= PENDING_LIMIT:
            budget.dropped += 1
            if budget.dropped == 1:
                LOG.warning("Events are not written: %d Events wait for the API server", budget.pending)
            return False
        if not budget.take(subject, now):
            return False
        if former is None:
            former = budget.written[key] = _Written("", subject.namespace or "default", 0, now)
            while len(budget.written) > REMEMBERED:
                budget.written.popitem(last=False)
        self._order += 1
        former.at, former.order = now, self._order
        former.count += 1
        if not name:  # a named Event is written once and is no change of state
            state.last[kind] = self._order
        budget.pending += 1
        content = _Content(kind, subject, reason, message, action, name, now_text())
        task = asyncio.get_running_loop().create_task(self._write(budget.write_lock, former, content))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._end_write, budget))
        return True

    def _end_write(self, budget: _Budget, task: asyncio.Task[None]) -> None:
        """Log the number of dropped Events after the last write of a group."""
        self._tasks.discard(task)
        budget.pending -= 1
        if budget.dropped and not budget.pending:
            LOG.warning("%d Events were not written, because too many waited for the API server", budget.dropped)
            budget.dropped = 0

    async def _write(self, write_lock: asyncio.Lock, written: _Written, content: _Content) -> None:
        async with write_lock:
            await self._write_now(written, content)

    async def _write_now(self, written: _Written, content: _Content) -> None:
        """Create an Event, or increment the count of an existing one. Errors are logged."""
        path = f"/api/v1/namespaces/{written.namespace}/events"
        try:
            if written.name and await self._increment_count(path, written, content.time):
                return
            body = self._body(written.namespace, content)
            answer = await retry(functools.partial(self._api.request, "POST", path, body=body), THROTTLED_SECONDS)
            written.name = str(answer.get("metadata", {}).get("name", ""))
        except AcceleratorError as error:
            if content.name and isinstance(error, ApiError) and error.status == 409:
                written.name = content.name  # an earlier process has written this Event
                return
            LOG.warning("an Event could not be written: %s", error)

    async def _increment_count(self, path: str, written: _Written, stamp: str) -> bool:
        """Increment the Event's count. Return False if the API server has deleted the Event (by default after one hour)."""
        body: Json = {"count": written.count, "lastTimestamp": stamp}
        if current_operation():
            body["metadata"] = {"annotations": {OPERATION: current_operation()}}
        try:
            kind = "application/merge-patch+json"
            target = f"{path}/{written.name}"
            send = functools.partial(self._api.request, "PATCH", target, body=body, content_type=kind)
            await retry(send, THROTTLED_SECONDS)
        except ApiError as error:
            if not error.is_not_found:
                raise
            written.name, written.count = "", 1
            return False
        return True

    def _body(self, namespace: str, content: _Content) -> Json:
        subject = content.subject
        involved: dict[str, str | None] = {
            "kind": subject.kind,
            "apiVersion": subject.api_version,
            "name": subject.name,
            "namespace": subject.namespace,
            "uid": subject.uid,
        }
        metadata: Json = {"namespace": namespace}
        if content.name:
            metadata["name"] = content.name
        else:
            metadata["generateName"] = f"{subject.name[:200]}."
        if current_operation():
            metadata["annotations"] = {OPERATION: current_operation()}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": metadata,
            "involvedObject": {name: value for name, value in involved.items() if value},
            "type": content.kind,
            "reason": content.reason,
            "message": content.message,
            "action": content.action,
            "count": 1,
            "firstTimestamp": content.time,
            "lastTimestamp": content.time,
            "source": {"component": self._component, "host": self._node_name},
            "reportingComponent": self._component,
            "reportingInstance": self._node_name,
        }
