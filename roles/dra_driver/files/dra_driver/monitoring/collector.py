# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the current state at each scrape: the drivers on their event loop, the devices, the kubelet, and pods, each with a timeout.

A source that does not answer in time is reported as failed. The metrics of the other sources are still returned.
Parallel scrapes share one query of each source.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from ..core.errors import AcceleratorError
from ..core.telemetry import Telemetry
from ..kubelet.attribution import PodRequests, ambiguous_pods
from ..kubelet.pod_resources import ContainerDevice, container_devices
from ..logs import StateLog
from ..metrics import PREFIX
from .families import COUNTER, FAMILIES, Samples, add_telemetry, add_view
from .pods import PodReader
from .view import DriverView

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# The timeouts of the sources, in seconds.
VIEW_SECONDS, TELEMETRY_SECONDS, KUBELET_SECONDS = 2.0, 2.0, 1.0
# Scrapes that waited for the lock get a result that is up to this old, in seconds.
FRESH_SECONDS = 1.0
# The names of the sources, as values of the label ``source``.
STATE, TELEMETRY, KUBELET, PODS = "state", "telemetry", "kubelet", "pods"


class Driver(Protocol):
    """One vendor's driver of this process."""

    def view(self) -> DriverView:
        """Return the current state of the driver. Called on its event loop."""

    def telemetry(self, seconds: float) -> tuple[Telemetry, ...]:
        """Return the telemetry of the devices. Called on any thread. Raises AcceleratorError."""


class Collector:
    """Read the metrics at each scrape.

    ``expires`` returns the time at which the identity's token expires, 0 for never. ``pods`` reads pods; None without that right.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        drivers: Sequence[Driver],
        *,
        pod_resources: str,
        expires: Callable[[], float],
        pods: PodReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._drivers = drivers
        self._pod_resources = pod_resources
        self._expires = expires
        self._pods = pods
        self._clock = clock
        self._lock = threading.Lock()
        self._last_samples, self._read_at = Samples(), float("-inf")
        self._states: dict[tuple[str, str], StateLog] = {}

    def describe(self) -> list[Any]:
        """Return no metrics, so that the registry does not query the devices when it needs names only."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as metric families of the Prometheus library."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, values in self.samples().values.items():
            family = FAMILIES[name]
            made = (CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily)(
                f"{PREFIX}_{name}", family.text, labels=family.labels
            )
            for labels, value in values.items():
                made.add_metric(labels, value)
            yield made

    def samples(self) -> Samples:
        """Return the current samples, or those of a scrape up to FRESH_SECONDS ago."""
        with self._lock:
            if self._clock() - self._read_at > FRESH_SECONDS:
                self._last_samples = self._read()
                self._read_at = self._clock()
            return self._last_samples

    def _read(self) -> Samples:
        samples = Samples()
        views: tuple[DriverView, ...] = self._read_source(samples, "", STATE, self._driver_views) or ()
        containers: tuple[ContainerDevice, ...] = ()
        if any(view.records for view in views):
            containers = self._read_source(samples, "", KUBELET, self._containers) or ()
        pods = self._pod_requests(samples, views, containers)
        for view in views:
            add_view(samples, view, containers, pods)
        for view, driver in zip(views, self._drivers):
            readings = self._read_source(samples, view.driver, TELEMETRY, partial(driver.telemetry, TELEMETRY_SECONDS))
            add_telemetry(samples, view, readings or ())
        ends = self._expires()
        samples.add("identity_token_expiry_timestamp_seconds", ends or None)
        return samples

    def _pod_requests(
        self, samples: Samples, views: Sequence[DriverView], containers: Sequence[ContainerDevice]
    ) -> Mapping[tuple[str, str], PodRequests]:
        """Return the requests of the pods for which the kubelet's list is ambiguous; none without the right to read pods."""
        reader = self._pods
        if reader is None:
            return {}
        claims: dict[tuple[str, str], set[str]] = {}
        for view in views:
            for record in view.records:
                for pod in ambiguous_pods(view.driver, [record], containers):
                    claims.setdefault(pod, set()).add(record.uid)
        if claims:
            self._read_source(samples, "", PODS, partial(reader.refresh, claims))
        return reader.known(claims)

    def _read_source(self, samples: Samples, driver: str, source: str, read: Callable[[], T]) -> T | None:
        """Return the data of a source, None after an error, and add the metrics about its query. ``driver`` is "" for the whole node."""
        began, problem = time.perf_counter(), ""
        found: T | None = None
        try:
            found = read()
        except AcceleratorError as error:
            problem = str(error)
        samples.add("collection_success", not problem, driver, source)
        samples.add("collection_duration_seconds", time.perf_counter() - began, driver, source)
        text = f"metrics lack the data of {source}: {problem}" if problem else f"metrics include the data of {source}"
        state = self._states.setdefault((driver, source), StateLog(LOG))
        state.report(text, level=logging.WARNING if problem else logging.DEBUG)
        return found

    def _driver_views(self) -> tuple[DriverView, ...]:
        views: concurrent.futures.Future[tuple[DriverView, ...]] = concurrent.futures.Future()

        def read_views() -> None:
            if views.set_running_or_notify_cancel():
                try:
                    views.set_result(tuple(driver.view() for driver in self._drivers))
                except Exception as error:  # noqa: BLE001  the waiting thread raises it
                    views.set_exception(error)

        self._loop.call_soon_threadsafe(read_views)
        try:
            return views.result(VIEW_SECONDS)
        except concurrent.futures.TimeoutError:
            views.cancel()
            raise AcceleratorError(f"The driver did not answer within {VIEW_SECONDS:g} s", code="no-answer") from None

    def _containers(self) -> tuple[ContainerDevice, ...]:
        return container_devices(self._pod_resources, KUBELET_SECONDS)
