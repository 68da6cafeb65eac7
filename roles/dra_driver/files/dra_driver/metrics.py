# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Metrics of events: durations and outcomes of stages, API server requests, partition changes, and findings.

Events are counted here when they happen. The current state (devices, claims, and their users) is read at each scrape by
``monitoring``. Without a configured address no metrics are collected, and the Prometheus library is not loaded.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from . import __version__
from .logs import StateLog

LOG = logging.getLogger(__name__)

# The interval, in seconds, at which a listener whose port is in use is started again.
RETRY_SECONDS = 10.0
# Seconds. A prepare of a whole device takes milliseconds, enabling partitioning takes seconds, and 45 s is the limit.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 45.0)
# Seconds. A response of the API server takes milliseconds. The timeout is 15 s.
API_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)
# Seconds. One transaction of the store, with its sync if it has one.
COMMIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
PREFIX = "dra_accelerators"
# Label values for a value beyond the limit, and for an unknown value.
OTHER, UNKNOWN = "other", "unknown"
# The maximum number of values of a label. The driver's own values are fewer.
LABEL_VALUES = 64
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,62}")
# The parts of an API path after group and version: an optional namespace, the resource, an optional name, and a
# subresource.
_PATH = re.compile(
    r"/(?:api/v1|apis/[^/]+/[^/]+)/(?:namespaces/[^/]+/)?(?P<resource>[a-z]+)(?:/[^/]+(?:/(?P<sub>[a-z]+))?)?"
)


class Metrics:
    """The events that the driver reports. This class ignores them, and PrometheusMetrics counts them."""

    def request(self, method: str, outcome: str, seconds: float) -> None:
        """Report an answered kubelet call. ``outcome`` is "success", or "failure" if it failed for any of its claims."""

    def stage(self, operation: str, kind: str, stage: str, outcome: str, seconds: float) -> None:
        """Report the end of one stage.

        ``kind`` is the kind of the claim's devices, ``outcome`` is "success" or "failure".
        """

    def finished(self, operation: str, kind: str, code: str, seconds: float) -> None:
        """Report the end of an operation. ``code`` is "" for success, else the error's code."""

    def slice_write(self, verb: str, outcome: str) -> None:
        """Report that a ResourceSlice was created, updated, or deleted, or that this failed."""

    def partition_change(self, change: str, profile: str, outcome: str) -> None:
        """Report that a partition was created or destroyed for a claim, or that this failed."""

    def commit(self, outcome: str, seconds: float) -> None:
        """Report the end of a transaction of the store."""

    def recovery_step(self, step: str, outcome: str) -> None:
        """Report that an operation of a previous run was completed, or that this failed."""

    def finding(self, finding: str) -> None:
        """Report a difference between the prepared claims and the cluster or the host."""

    def repartition_step(self, step: str) -> None:
        """Report a step of an operation that repartitions devices."""


class PrometheusMetrics(Metrics):
    """Collect the metrics of one driver name. Several drivers of a process share ``registry``."""

    def __init__(self, registry: MetricsRegistry, driver: str) -> None:
        self._registry = registry
        self._driver = driver

    def request(self, method: str, outcome: str, seconds: float) -> None:
        """Observe the duration of a kubelet call."""
        self._registry.requests.labels(self._driver, method, outcome).observe(seconds)

    def stage(self, operation: str, kind: str, stage: str, outcome: str, seconds: float) -> None:
        """Observe the duration of a stage, including failed ones."""
        self._registry.stages.labels(self._driver, operation, kind, stage, outcome).observe(seconds)

    def finished(self, operation: str, kind: str, code: str, seconds: float) -> None:
        """Observe the duration of an operation and count its error."""
        outcome = "failure" if code else "success"
        self._registry.operations.labels(self._driver, operation, kind, outcome).observe(seconds)
        if code:
            self._registry.errors.labels(self._driver, operation, self._registry.word("code", code)).inc()

    def slice_write(self, verb: str, outcome: str) -> None:
        """Count the write."""
        self._registry.writes.labels(self._driver, verb, outcome).inc()

    def partition_change(self, change: str, profile: str, outcome: str) -> None:
        """Count the change. A device has about twenty profiles."""
        profile = self._registry.word("profile", profile)
        self._registry.partitions.labels(self._driver, change, profile, outcome).inc()

    def commit(self, outcome: str, seconds: float) -> None:
        """Observe the duration of a transaction."""
        self._registry.commits.labels(self._driver, outcome).observe(seconds)

    def recovery_step(self, step: str, outcome: str) -> None:
        """Count the step."""
        self._registry.recoveries.labels(self._driver, step, outcome).inc()

    def finding(self, finding: str) -> None:
        """Count the finding."""
        self._registry.findings.labels(self._driver, finding).inc()

    def repartition_step(self, step: str) -> None:
        """Count the step."""
        self._registry.repartitions.labels(self._driver, step).inc()


class MetricsRegistry:
    """The metrics of the process, and the server for them."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

        registry = CollectorRegistry()
        self._collector = registry
        self._words: dict[str, set[str]] = {}
        self._lock = threading.Lock()
        ProcessCollector(registry=registry)

        def histogram(name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...] = BUCKETS) -> Any:
            return Histogram(f"{PREFIX}_{name}", text, labels, registry=registry, buckets=buckets)

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Any:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        build = Gauge(f"{PREFIX}_build_info", "The version of the driver", ("version",), registry=registry)
        build.labels(__version__).set(1)
        self.requests = histogram(
            "request_duration_seconds",
            "How long the kubelet waited for the answer to one call, which can contain several claims",
            ("driver", "method", "outcome"),
        )
        self.stages = histogram(
            "stage_duration_seconds",
            "Duration of one stage of an operation on a claim, by kind",
            ("driver", "operation", "kind", "stage", "outcome"),
        )
        self.operations = histogram(
            "operation_duration_seconds",
            "Duration of preparing, unpreparing, or restoring one claim, by kind",
            ("driver", "operation", "kind", "outcome"),
        )
        self.errors = counter(
            "operation_errors",
            "Operations on claims that failed, by the error's code",
            ("driver", "operation", "code"),
        )
        self.writes = counter(
            "resource_slice_writes", "Writes of ResourceSlices to the API server", ("driver", "verb", "outcome")
        )
        self.partitions = counter(
            "partition_changes",
            "Partitions that were created and destroyed for claims",
            ("driver", "change", "profile", "outcome"),
        )
        self.commits = histogram(
            "store_commit_duration_seconds",
            "Duration of one transaction of the store, with its sync if it has one",
            ("driver", "outcome"),
            COMMIT_BUCKETS,
        )
        self.recoveries = counter(
            "recovery_steps",
            "Operations of an earlier run that this run completed",
            ("driver", "step", "outcome"),
        )
        self.findings = counter(
            "reconcile_findings",
            "Prepared claims that differ from the cluster or the node",
            ("driver", "finding"),
        )
        self.repartitions = counter(
            "repartition_steps", "Steps of operations that repartition devices, and how these ended", ("driver", "step")
        )
        self.api_requests = counter(
            "api_requests",
            "Requests to the API server, by HTTP status, or unreachable",
            ("verb", "resource", "code"),
        )
        self.api_seconds = histogram(
            "api_request_duration_seconds",
            "Duration of requests to the API server, without watches",
            ("verb", "resource"),
            API_BUCKETS,
        )
        self.watches = counter("api_watch_starts", "Watches that were begun at the API server", ("resource",))

    def word(self, label: str, value: str) -> str:
        """Return ``value`` as the value of ``label``, or "other" if it is malformed or the label has LABEL_VALUES values already."""
        with self._lock:
            known = self._words.setdefault(label, set())
            if value not in known:
                if len(known) >= LABEL_VALUES or not _WORD.fullmatch(value):
                    return OTHER
                known.add(value)
        return value

    def api_request(self, verb: str, path: str, code: str, seconds: float) -> None:
        """Count a request to the API server. ``code`` is the HTTP status, or "unreachable"."""
        resource = self.word("resource", resource_of(path))
        self.api_requests.labels(verb, resource, self.word("status", code)).inc()
        if verb == "WATCH":
            self.watches.labels(resource).inc()
        else:
            self.api_seconds.labels(verb, resource).observe(seconds)

    def register(self, collector: Any) -> None:
        """Add a collector that is queried at each scrape."""
        self._collector.register(collector)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._collector))

    def serve(self, address: str) -> Any:
        """Serve /metrics at host:port on a thread and return the server; its shutdown() stops it."""
        from prometheus_client import start_http_server

        host, _colon, port = address.rpartition(":")
        server, _thread = start_http_server(int(port), addr=host.strip("[]"), registry=self._collector)
        return server

    async def keep_serving(self, address: str) -> None:
        """Serve /metrics until cancelled. If the port is in use, retry every RETRY_SECONDS."""
        state = StateLog(LOG)
        while True:
            try:
                server = self.serve(address)
            except OSError as error:
                message = f"metrics are not served at {address}: {error.strerror or error}; retrying until it is free"
                state.report(message, level=logging.WARNING)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            state.report(f"metrics are served at {address}")
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.to_thread(server.shutdown)
                server.server_close()


def resource_of(path: str) -> str:
    """Return the resource of an API path with its subresource ("pods", "resourceclaims-status"); "discovery" for other paths."""
    found = _PATH.fullmatch(path)
    if found is None:
        return "discovery"
    return found["resource"] + (f"-{found['sub']}" if found["sub"] else "")


class Stopwatch:
    """The durations of the stages of one operation. ``kind`` is the kind of the claim's devices, set once it is known."""

    def __init__(self, metrics: Metrics, operation: str, kind: str = UNKNOWN) -> None:
        self._metrics = metrics
        self._operation = operation
        self._began = time.perf_counter()
        self._total: float | None = None
        self._ended: list[tuple[str, str, float]] = []
        self.kind = kind
        self.stages: dict[str, float] = {}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that measures one stage, also if it fails."""
        return _Stage(self, name)

    def add(self, name: str, outcome: str, seconds: float) -> None:
        """Add a stage that was measured elsewhere."""
        self.stages[name] = self.stages.get(name, 0.0) + seconds
        self._ended.append((name, outcome, seconds))

    def stop(self) -> None:
        """Record the duration of the whole operation. ``finish`` reports it later."""
        self._total = time.perf_counter() - self._began

    def finish(self, code: str = "") -> dict[str, float]:
        """Report the operation and its stages, and return the milliseconds of each stage and in total, for the log."""
        total = self._total if self._total is not None else time.perf_counter() - self._began
        for name, outcome, seconds in self._ended:
            self._metrics.stage(self._operation, self.kind, name, outcome, seconds)
        self._metrics.finished(self._operation, self.kind, code, total)
        return {
            **{f"{name}_ms": round(seconds * 1000, 2) for name, seconds in self.stages.items()},
            "total_ms": round(total * 1000, 2),
        }


class _Stage:
    """The context manager that measures one stage."""

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch = watch
        self._name = name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._watch.add(self._name, "success" if kind is None else "failure", time.perf_counter() - self._began)
