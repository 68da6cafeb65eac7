# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Measurements: how long each stage took and how it ended, what is prepared, what was written to the API server.

With no address configured nothing is collected and the metrics library is not even loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Protocol

from .logs import StateLog

LOG = logging.getLogger(__name__)

# How often a port that something else has is tried again.
RETRY_SECONDS = 10.0
# Seconds. A prepare of a whole device takes milliseconds, switching partitioning on takes seconds, 45 is the limit.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 45.0)


class Metrics(Protocol):
    """What the driver reports."""

    def stage(self, operation: str, stage: str, outcome: str, seconds: float) -> None:
        """One stage of an operation ended. ``outcome`` is success or failure."""

    def finished(self, operation: str, code: str, seconds: float) -> None:
        """An operation ended. ``code`` is "" for success, else the error's code."""

    def prepared_claims(self, number: int) -> None:
        """So many claims are prepared now."""

    def slice_write(self, verb: str, outcome: str) -> None:
        """A ResourceSlice was created, updated or deleted, or could not be."""


class NoMetrics:
    """Collects nothing."""

    def stage(self, operation: str, stage: str, outcome: str, seconds: float) -> None:
        """Ignore."""

    def finished(self, operation: str, code: str, seconds: float) -> None:
        """Ignore."""

    def prepared_claims(self, number: int) -> None:
        """Ignore."""

    def slice_write(self, verb: str, outcome: str) -> None:
        """Ignore."""


class PrometheusMetrics:
    """Collects for one driver name in a registry of its own. Several drivers of one process share ``registry``."""

    def __init__(self, registry: MetricsRegistry, driver: str) -> None:
        self._registry = registry
        self._driver = driver

    def stage(self, operation: str, stage: str, outcome: str, seconds: float) -> None:
        """Observe the duration of a stage, failures included."""
        self._registry.stages.labels(self._driver, operation, stage, outcome).observe(seconds)

    def finished(self, operation: str, code: str, seconds: float) -> None:
        """Observe the duration of an operation and count its error."""
        self._registry.operations.labels(self._driver, operation, "failure" if code else "success").observe(seconds)
        if code:
            self._registry.errors.labels(self._driver, operation, code).inc()

    def prepared_claims(self, number: int) -> None:
        """Set the gauge."""
        self._registry.claims.labels(self._driver).set(number)

    def slice_write(self, verb: str, outcome: str) -> None:
        """Count the write."""
        self._registry.writes.labels(self._driver, verb, outcome).inc()


class MetricsRegistry:
    """The process's metrics and, with serve(), their listener."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        registry = CollectorRegistry()
        self._collector = registry
        prefix = "dra_accelerators"
        self.stages: Any = Histogram(
            f"{prefix}_stage_duration_seconds",
            "Duration of one stage of an operation on a claim",
            ("driver", "operation", "stage", "outcome"),
            registry=registry,
            buckets=BUCKETS,
        )
        self.operations: Any = Histogram(
            f"{prefix}_operation_duration_seconds",
            "Duration of preparing or unpreparing one claim",
            ("driver", "operation", "outcome"),
            registry=registry,
            buckets=BUCKETS,
        )
        self.errors: Any = Counter(
            f"{prefix}_operation_errors",
            "Operations on claims that failed, by the error's code",
            ("driver", "operation", "code"),
            registry=registry,
        )
        self.claims: Any = Gauge(
            f"{prefix}_prepared_claims", "Claims prepared on this node", ("driver",), registry=registry
        )
        self.writes: Any = Counter(
            f"{prefix}_resource_slice_writes",
            "Writes of ResourceSlices to the API server",
            ("driver", "verb", "outcome"),
            registry=registry,
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._collector))

    def serve(self, address: str) -> Any:
        """Serve /metrics at host:port on a thread and return the server; its shutdown() ends it."""
        from prometheus_client import start_http_server

        host, _colon, port = address.rpartition(":")
        server, _thread = start_http_server(int(port), addr=host.strip("[]"), registry=self._collector)
        return server

    async def keep_serving(self, address: str) -> None:
        """Serve /metrics until cancelled; while something else has the port, the driver goes on without."""
        state = StateLog(LOG)
        while True:
            try:
                server = self.serve(address)
            except OSError as error:
                message = (
                    f"metrics are not served at {address}: {error.strerror or error}; tried again until it is free"
                )
                state.report(message, level=logging.WARNING)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            state.report(f"metrics are served at {address}")
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.to_thread(server.shutdown)
                server.server_close()


class Stopwatch:
    """The stage timings of one operation."""

    def __init__(self, metrics: Metrics, operation: str) -> None:
        self._metrics = metrics
        self._operation = operation
        self._began = time.perf_counter()
        self.stages: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage, however it ends."""
        began = time.perf_counter()
        outcome = "failure"
        try:
            yield
            outcome = "success"
        finally:
            seconds = time.perf_counter() - began
            self.stages[name] = self.stages.get(name, 0.0) + seconds
            self._metrics.stage(self._operation, name, outcome, seconds)

    def finish(self, code: str = "") -> dict[str, float]:
        """Report the whole operation and return milliseconds by stage and in total, for the log."""
        total = time.perf_counter() - self._began
        self._metrics.finished(self._operation, code, total)
        return {
            **{f"{name}_ms": round(seconds * 1000, 2) for name, seconds in self.stages.items()},
            "total_ms": round(total * 1000, 2),
        }
