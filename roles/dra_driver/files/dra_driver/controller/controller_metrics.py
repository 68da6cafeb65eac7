# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The controller's Prometheus metrics.

No label is the name of a node, claim, or pool, because their number is not limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

from ..metrics import resource_of
from .cleanup.cleanup_plan import VERBS
from .drift import KINDS

PREFIX = "dra_accelerators_controller"
REPORT_OUTCOMES = ("served", "stale", "refused", "unavailable")
OUTCOMES = ("done", "failed", "not-needed", "dry-run")


class ControllerMetrics:
    """The metrics of this process, in a separate registry."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector

        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._requests: Any = Counter(
            f"{PREFIX}_api_requests",
            "Requests to the API server, by HTTP status, or unreachable",
            ("verb", "resource", "code"),
            registry=registry,
        )
        self._leading: Any = Gauge(f"{PREFIX}_leading", "1 while this process holds the Lease", registry=registry)
        self._actions: Any = Counter(
            f"{PREFIX}_clean_up_actions",
            "Cleanup actions for lost nodes",
            ("action", "outcome"),
            registry=registry,
        )
        self._passes: Any = Histogram(
            f"{PREFIX}_pass_duration_seconds",
            "Duration of one pass over all known objects",
            registry=registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
        )
        self._objects: Any = Gauge(f"{PREFIX}_objects", "Objects that are known", ("kind",), registry=registry)
        self._drift: Any = Gauge(
            f"{PREFIX}_drift", "Findings of drift that have lasted, by kind", ("kind",), registry=registry
        )
        self._nodes: Any = Gauge(
            f"{PREFIX}_nodes",
            "Nodes with a node driver, by its release and the node's state",
            ("release", "state"),
            registry=registry,
        )
        self._releases: Any = Counter(
            f"{PREFIX}_release_changes", "Node drivers that were seen to change their release", registry=registry
        )
        self._draining: Any = Gauge(
            f"{PREFIX}_draining_nodes", "Nodes of which an operation drains devices", registry=registry
        )
        self._drains: Any = Counter(
            f"{PREFIX}_drains_ended", "Drains of devices of a node that were seen to end", registry=registry
        )
        self._token: Any = Gauge(
            f"{PREFIX}_identity_token_expiry_timestamp_seconds",
            "Expiry time of the controller's token for the API server; 0 for a token without expiry",
            registry=registry,
        )
        self._reviews: Any = Histogram(
            f"{PREFIX}_admission_duration_seconds",
            "Duration of the check of one claim, template or class",
            ("outcome",),
            registry=registry,
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
        )
        self._certificate: Any = Gauge(
            f"{PREFIX}_certificate_expiry_timestamp_seconds",
            "Expiry time of the webhook's certificate; 0 without a certificate",
            registry=registry,
        )
        self._reports: Any = Counter(
            f"{PREFIX}_report_requests",
            "Requests for the report of the fleet",
            ("outcome",),
            registry=registry,
        )
        for outcome in REPORT_OUTCOMES:
            self._reports.labels(outcome)
        for outcome in ("allowed", "refused", "unreadable", "timeout"):
            self._reviews.labels(outcome)
        for verb in VERBS:
            for outcome in OUTCOMES:
                self._actions.labels(verb, outcome)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry))

    def request(self, verb: str, path: str, code: str, _seconds: float) -> None:
        """Count a completed request to the API server. ``code`` is the HTTP status, or unreachable."""
        self._requests.labels(verb, resource_of(path), code).inc()

    def leading(self, leads: bool) -> None:
        """Set whether this process is active."""
        self._leading.set(1 if leads else 0)

    def admission(self, outcome: str, seconds: float) -> None:
        """Record a response of the webhook. ``outcome`` may be allowed, refused, unreadable, or timeout."""
        self._reviews.labels(outcome).observe(seconds)

    def reported(self, outcome: str) -> None:
        """Count a request for the report. ``outcome`` is one of REPORT_OUTCOMES."""
        self._reports.labels(outcome).inc()

    def certificate(self, expires: float) -> None:
        """Set the end of the webhook's certificate, in seconds since 1970."""
        self._certificate.set(expires)

    def action(self, verb: str, outcome: str) -> None:
        """Count an action, taken or not."""
        self._actions.labels(verb, outcome).inc()

    def fleet(self, drift: Mapping[str, int], nodes: Mapping[tuple[str, str], int]) -> None:
        """Set the numbers of lasting findings by kind, and of nodes by release and state."""
        for kind in KINDS:
            self._drift.labels(kind).set(drift.get(kind, 0))
        self._nodes.clear()
        for labels, number in nodes.items():
            self._nodes.labels(*labels).set(number)

    def release_changed(self) -> None:
        """Count a change of a node driver's release."""
        self._releases.inc()

    def draining(self, nodes: int) -> None:
        """Set the number of nodes with drained devices."""
        self._draining.set(nodes)

    def drain_ended(self) -> None:
        """Count the end of a drain of a node's devices."""
        self._drains.inc()

    def token_ends(self, expires: Callable[[], float]) -> None:
        """Set the function that returns the end of the identity's token, in seconds since 1970; 0 for never.

        It is called at each scrape.
        """
        self._token.set_function(expires)

    def record_pass(self, seconds: float, **objects: int) -> None:
        """Record a completed pass. ``objects`` are the numbers of known objects, by kind."""
        self._passes.observe(seconds)
        for kind, number in objects.items():
            self._objects.labels(kind).set(number)
