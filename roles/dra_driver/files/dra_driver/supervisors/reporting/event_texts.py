# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write Events for one driver: on claims that it could not serve, and on the node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from ...api.events import EventRecorder, Subject
from ...claims.operations import ClaimSource
from ...claims.store.records import ClaimRecord, ClaimReference
from ...core.errors import AcceleratorError
from ...core.health.conditions import Severity
from ...core.health.tracker import TrackedFault

LOG = logging.getLogger(__name__)

# The maximum number of a claim's pods that get an Event.
MAX_PODS = 16

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
POD_EVENT_CODES = ("does-not-fit", "not-shareable")


class EventReporter:
    """Write Events about one driver. ``request_scan`` is called after an error that shows that the published devices are outdated."""

    def __init__(
        self,
        events: EventRecorder,
        *,
        source: ClaimSource,
        driver: str,
        node_name: str,
        request_scan: Callable[[], None],
    ) -> None:
        self._events = events
        self._source = source
        self._tasks: set[asyncio.Task[None]] = set()
        self._driver = driver
        self._node_name = node_name
        self._request_scan = request_scan

    def failed(self, claim: ClaimReference, operation: str, error: AcceleratorError) -> None:
        """Write an Event on a claim after a failed ``operation``: Prepare, Unprepare, or Restore."""
        if error.code in STALE_CODES:
            self._request_scan()  # the scheduler must stop allocating missing devices
        subject, reason, text = (
            Subject.of_claim(claim.namespace, claim.name, claim.uid),
            f"{operation}Failed",
            f"{self._driver}: {error}",
        )
        self._events.warning(subject, reason, text, action=operation)
        if error.code in POD_EVENT_CODES:
            self._start(self._write_pod_events(claim, reason, text, operation, self._events.warning))

    def report_fault(self, device: str, fault: TrackedFault, records: Collection[ClaimRecord]) -> None:
        """Write Events with the remedy on the node, on the claims with an affected device, and on their pods."""
        message = f"{device} is not well: {fault.sign.describe()}"
        if fault.sign.severity > Severity.INFORMATIVE:
            self.problem("DeviceUnhealthy", message)
        self._start(self._write_claim_events(records, "DeviceUnhealthy", message, self._events.warning))

    def report_recovery(self, device: str, fault: TrackedFault, records: Collection[ClaimRecord]) -> None:
        """Write Events that a fault has ended, on the same objects."""
        message = f"{device}: {fault.sign.cause} {fault.sign.value}".rstrip() + " is over"
        if fault.sign.severity > Severity.INFORMATIVE:
            self.done("DeviceRecovered", message, action="Publish")
        self._start(self._write_claim_events(records, "DeviceRecovered", message, self._events.normal))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_claim_events(
        self, records: Collection[ClaimRecord], reason: str, message: str, write: Callable[..., object]
    ) -> None:
        """Write an Event on claims and on their pods."""
        text = f"{self._driver}: {message}"
        for record in records:
            write(Subject.of_claim(record.namespace, record.name, record.uid), reason, text, action="Watch")
            await self._write_pod_events(record.reference, reason, text, "Watch", write)

    async def _write_pod_events(
        self, reference: ClaimReference, reason: str, text: str, action: str, write: Callable[..., object]
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
        for each in users[:MAX_PODS]:
            pod = Subject("Pod", "v1", each["name"], each.get("uid", ""), reference.namespace)
            write(pod, reason, f"{text} (claim {reference.name})", action=action)

    def done(self, reason: str, message: str, action: str = "Reset") -> None:
        """Write an Event on the node about a completed action or an ended problem.

        ``action`` is the Event's action field.
        """
        self._events.normal(Subject.of_node(self._node_name), reason, f"{self._driver}: {message}", action=action)

    def step(self, reason: str, message: str, *, name: str, warning: bool) -> bool:
        """Write an Event with this name on the node about a step, unless it exists.

        Return False if the rate limit is reached.
        """
        write = self._events.warning if warning else self._events.normal
        return write(
            Subject.of_node(self._node_name), reason, f"{self._driver}: {message}", action="Repartition", name=name
        )

    def problem(self, reason: str, message: str) -> None:
        """Write a warning on the node for its administrator."""
        self._events.warning(Subject.of_node(self._node_name), reason, f"{self._driver}: {message}", action="Publish")
