# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Events on what a driver works for: the claims that it could not serve, and the node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Protocol

from ..api.events import EventRecorder, Subject
from ..claims.records import ClaimRecord, ClaimReference
from ..core.errors import AcceleratorError
from ..core.health import Ailment
from ..core.signs import Severity

LOG = logging.getLogger(__name__)

# So many of a claim's pods are told of its devices.
MOST_PODS = 16

# Errors that say that the hardware is not what was published.
STALE_CODES = (
    "in-use",
    "does-not-fit",
    "device-gone",
    "device-faulty",
    "partition-gone",
    "partitioning-on",
    "partitioning-off",
    "not-shareable",
)
# Errors that the pods are told of as well: they wait for what does not come by itself.
TOLD_TO_PODS = ("does-not-fit", "not-shareable")


class ClaimSource(Protocol):
    """Where claims are read."""

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return one ResourceClaim. Raises ApiError."""


class Reports:
    """Tells one driver's troubles. ``stale`` is called when one shows that what is published is no longer so."""

    def __init__(
        self,
        events: EventRecorder,
        *,
        source: ClaimSource,
        driver: str,
        node_name: str,
        stale: Callable[[], None],
    ) -> None:
        self._events = events
        self._source = source
        self._telling: set[asyncio.Task[None]] = set()
        self._driver = driver
        self._node_name = node_name
        self._stale = stale

    def failed(self, claim: ClaimReference, verb: str, error: AcceleratorError) -> None:
        """Write an Event on a claim that could not be prepared or unprepared."""
        if error.code in STALE_CODES:
            self._stale()  # the scheduler should stop offering what is not there
        subject = Subject("ResourceClaim", "resource.k8s.io/v1", claim.name, claim.uid, claim.namespace)
        self._events.warning(subject, f"{verb}Failed", f"{self._driver}: {error}", action=verb)
        if error.code in TOLD_TO_PODS:
            self._begin(self._tell_pods(claim, f"{verb}Failed", f"{self._driver}: {error}", verb, self._events.warning))

    def fell_ill(self, device: str, ailment: Ailment, records: Collection[ClaimRecord]) -> None:
        """Write Events on the node, and on the claims that hold the device and their pods, with what to do."""
        message = f"{device} is not well: {ailment.sign.describe()}"
        if ailment.sign.severity > Severity.INFORMATIVE:
            self.problem("DeviceUnhealthy", message)
        self._tell(records, "DeviceUnhealthy", message, is_warning=True)

    def recovered(self, device: str, ailment: Ailment, records: Collection[ClaimRecord]) -> None:
        """Write Events on all of them that it is over."""
        message = f"{device}: {ailment.sign.cause} {ailment.sign.value}".rstrip() + " is over"
        if ailment.sign.severity > Severity.INFORMATIVE:
            node = Subject("Node", "v1", self._node_name, self._node_name)
            self._events.normal(node, "DeviceRecovered", f"{self._driver}: {message}", action="Publish")
        self._tell(records, "DeviceRecovered", message, is_warning=False)

    def _tell(self, records: Collection[ClaimRecord], reason: str, message: str, *, is_warning: bool) -> None:
        if not records:
            return
        self._begin(self._tell_users(records, reason, message, is_warning=is_warning))

    def _begin(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell_users(
        self, records: Collection[ClaimRecord], reason: str, message: str, *, is_warning: bool
    ) -> None:
        """Write an Event on claims and on the pods that have them reserved."""
        emit = self._events.warning if is_warning else self._events.normal
        for record in records:
            text = f"{self._driver}: {message}"
            subject = Subject("ResourceClaim", "resource.k8s.io/v1", record.name, record.uid, record.namespace)
            emit(subject, reason, text, action="Watch")
            await self._tell_pods(record.reference, reason, text, "Watch", emit)

    async def _tell_pods(
        self, reference: ClaimReference, reason: str, text: str, action: str, emit: Callable[..., object]
    ) -> None:
        """Write an Event on the pods that have a claim reserved. Whom the API server does not know is not told."""
        try:
            claim = await self._source.claim(reference.namespace, reference.name)
        except AcceleratorError as error:
            LOG.info("the pods of claim %s are not known: %s", reference.describe(), error)
            return
        if claim.get("metadata", {}).get("uid") != reference.uid:
            return
        users = [each for each in claim.get("status", {}).get("reservedFor", ()) if each.get("resource") == "pods"]
        for each in users[:MOST_PODS]:
            pod = Subject("Pod", "v1", each["name"], each.get("uid", ""), reference.namespace)
            emit(pod, reason, f"{text} (claim {reference.name})", action=action)

    def done(self, reason: str, message: str, action: str = "Reset") -> None:
        """Write an Event on the node: something that was done there, or is over. ``action`` is a word for programs."""
        subject = Subject("Node", "v1", self._node_name, self._node_name)
        self._events.normal(subject, reason, f"{self._driver}: {message}", action=action)

    def step(self, reason: str, message: str, *, name: str, warning: bool) -> bool:
        """Write an Event of this name on the node, unless there is one: a step of what somebody does there. False: too many were written."""
        subject = Subject("Node", "v1", self._node_name, self._node_name)
        write = self._events.warning if warning else self._events.normal
        return write(subject, reason, f"{self._driver}: {message}", action="Repartition", name=name)

    def problem(self, reason: str, message: str) -> None:
        """Write an Event on the node: something that its administrator should know."""
        subject = Subject("Node", "v1", self._node_name, self._node_name)
        self._events.warning(subject, reason, f"{self._driver}: {message}", action="Publish")
