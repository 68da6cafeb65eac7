# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write Events for one driver: on claims that it could not serve, and on the node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Protocol

from ...api.events import EventRecorder, Subject
from ...claims.store.records import ClaimRecord, ClaimReference
from ...core.errors import AcceleratorError
from ...core.health.conditions import Severity
from ...core.health.tracker import TrackedFault

LOG = logging.getLogger(__name__)

# The maximum number of a claim's pods that get an Event.
MOST_PODS = 16

# Codes of errors that show that the hardware differs from the published devices.
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
# Codes of errors with Events on pods too, because the pods need an action by a person.
TOLD_TO_PODS = ("does-not-fit", "not-shareable")


class ClaimSource(Protocol):
    """Reads claims."""

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return one ResourceClaim. Raises ApiError."""


class Reports:
    """Write Events about one driver. ``stale`` is called if an error shows that the published devices are outdated."""

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
        self._tasks: set[asyncio.Task[None]] = set()
        self._driver = driver
        self._node_name = node_name
        self._stale = stale

    def failed(self, claim: ClaimReference, verb: str, error: AcceleratorError) -> None:
        """Write an Event on a claim that could not be prepared or unprepared."""
        if error.code in STALE_CODES:
            self._stale()  # the scheduler must stop allocating missing devices
        subject = Subject("ResourceClaim", "resource.k8s.io/v1", claim.name, claim.uid, claim.namespace)
        self._events.warning(subject, f"{verb}Failed", f"{self._driver}: {error}", action=verb)
        if error.code in TOLD_TO_PODS:
            self._begin(self._tell_pods(claim, f"{verb}Failed", f"{self._driver}: {error}", verb, self._events.warning))

    def report_fault(self, device: str, fault: TrackedFault, records: Collection[ClaimRecord]) -> None:
        """Write Events with the remedy on the node, on the claims with an affected device, and on their pods."""
        message = f"{device} is not well: {fault.sign.describe()}"
        if fault.sign.severity > Severity.INFORMATIVE:
            self.problem("DeviceUnhealthy", message)
        self._write_events(records, "DeviceUnhealthy", message, is_warning=True)

    def report_recovery(self, device: str, fault: TrackedFault, records: Collection[ClaimRecord]) -> None:
        """Write Events that a fault has ended, on the same objects."""
        message = f"{device}: {fault.sign.cause} {fault.sign.value}".rstrip() + " is over"
        if fault.sign.severity > Severity.INFORMATIVE:
            node = Subject("Node", "v1", self._node_name, self._node_name)
            self._events.normal(node, "DeviceRecovered", f"{self._driver}: {message}", action="Publish")
        self._write_events(records, "DeviceRecovered", message, is_warning=False)

    def _write_events(self, records: Collection[ClaimRecord], reason: str, message: str, *, is_warning: bool) -> None:
        if not records:
            return
        self._begin(self._tell_users(records, reason, message, is_warning=is_warning))

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_users(
        self, records: Collection[ClaimRecord], reason: str, message: str, *, is_warning: bool
    ) -> None:
        """Write an Event on claims and on their pods."""
        emit = self._events.warning if is_warning else self._events.normal
        for record in records:
            text = f"{self._driver}: {message}"
            subject = Subject("ResourceClaim", "resource.k8s.io/v1", record.name, record.uid, record.namespace)
            emit(subject, reason, text, action="Watch")
            await self._tell_pods(record.reference, reason, text, "Watch", emit)

    async def _tell_pods(
        self, reference: ClaimReference, reason: str, text: str, action: str, emit: Callable[..., object]
    ) -> None:
        """Write an Event on the pods that a claim is reserved for.

        Nothing is written if the API server does not return the claim.
        """
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
        """Write an Event on the node about a completed action or an ended problem.

        ``action`` is the Event's action field.
        """
        subject = Subject("Node", "v1", self._node_name, self._node_name)
        self._events.normal(subject, reason, f"{self._driver}: {message}", action=action)

    def step(self, reason: str, message: str, *, name: str, warning: bool) -> bool:
        """Write an Event with this name on the node about a step, unless it exists.

        Return False if the rate limit is reached.
        """
        subject = Subject("Node", "v1", self._node_name, self._node_name)
        write = self._events.warning if warning else self._events.normal
        return write(subject, reason, f"{self._driver}: {message}", action="Repartition", name=name)

    def problem(self, reason: str, message: str) -> None:
        """Write a warning on the node for its administrator."""
        subject = Subject("Node", "v1", self._node_name, self._node_name)
        self._events.warning(subject, reason, f"{self._driver}: {message}", action="Publish")
