# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Events on what a driver works for: the claims that it could not serve, and the node."""

from __future__ import annotations

from collections.abc import Callable

from ..api.events import EventRecorder, Subject
from ..claims.records import ClaimReference
from ..core.errors import AcceleratorError

# Errors that say that the hardware is not what was published.
STALE_CODES = (
    "in-use",
    "device-gone",
    "device-faulty",
    "partition-gone",
    "partitioning-on",
    "partitioning-off",
    "does-not-fit",
)


class Reports:
    """Tells one driver's troubles. ``stale`` is called when one shows that what is published is no longer so."""

    def __init__(self, events: EventRecorder, *, driver: str, node_name: str, stale: Callable[[], None]) -> None:
        self._events = events
        self._driver = driver
        self._node_name = node_name
        self._stale = stale

    def failed(self, claim: ClaimReference, verb: str, error: AcceleratorError) -> None:
        """Write an Event on a claim that could not be prepared or unprepared."""
        if error.code in STALE_CODES:
            self._stale()  # the scheduler should stop offering what is not there
        subject = Subject("ResourceClaim", "resource.k8s.io/v1", claim.name, claim.uid, claim.namespace)
        self._events.warning(subject, f"{verb}Failed", f"{self._driver}: {error}", action=verb)

    def problem(self, reason: str, message: str) -> None:
        """Write an Event on the node: something that its administrator should know."""
        subject = Subject("Node", "v1", self._node_name, self._node_name)
        self._events.warning(subject, reason, f"{self._driver}: {message}", action="Publish")
