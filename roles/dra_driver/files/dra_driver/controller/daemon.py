# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the controller's process, from its start to the signal of systemd, the kubelet, or a user."""

from __future__ import annotations

import asyncio
import logging
import signal
import uuid
from collections.abc import Awaitable
from typing import Callable, TypeVar

from aiohttp import web

from .. import __version__
from ..api.client import ApiClient
from ..api.events import EventRecorder
from ..api.resources import GROUP, ResourceApi
from ..api.watching import Watched
from ..core.dra.class_kinds import kind_of_class
from ..core.host.system import System
from ..logs import fields
from ..scrapes import add_metrics, metrics_readers
from ..service_manager import notify
from ..supervisors.driver_state import keep_running
from ..supervisors.token_renewal import TokenSupervisor
from .admission import rules_for
from .cleanup.cleanup_loop import CleanupLoop
from .controller_config import ControllerSettings
from .controller_metrics import ControllerMetrics
from .drift import findings, report_all
from .fleet_report import FleetReport
from .health_server import keep_serving, status_application
from .lease import Elector, LeaseTimes
from .reader_authorization import ReaderAuthorizer
from .report_endpoint import add_report
from .reporting import Reporter
from .serving_certificate import ServingCertificate, WebhookSecret
from .webhook import application

LOG = logging.getLogger(__name__)
T = TypeVar("T")

COMPONENT = "dra-accelerators-controller"


def lease_times(lease_seconds: float) -> LeaseTimes:
    """Return the times of a Lease in the proportions of Kubernetes' own controllers: 15, 10, and 2 seconds."""
    return LeaseTimes(lease_seconds, lease_seconds * 2 / 3, lease_seconds * 2 / 15)


def make_cleanup_loop(
    settings: ControllerSettings,
    client: ApiClient,
    elector: Elector,
    measurements: ControllerMetrics,
    events: EventRecorder,
    reports: EventRecorder,
) -> CleanupLoop:
    """Create the active part. ``events`` is for the cleanup, ``reports`` for drift and progress."""
    reporter = Reporter(
        drivers=settings.drivers,
        events=reports,
        measurements=measurements,
        lasting=settings.drifting,
        dry_run=settings.dry_run,
    )
    return CleanupLoop(
        client,
        drivers=settings.drivers,
        events=events,
        measurements=measurements,
        may_act=lambda: elector.holds,
        grace=settings.grace,
        lift_drains_after=settings.lift_drains_after,
        interval=settings.interval,
        dry_run=settings.dry_run,
        reporter=reporter,
        driver_namespace=settings.driver_namespace,
    )


class Webhook:
    """The parts of the admission webhook."""

    def __init__(self, settings: ControllerSettings, client: ApiClient, measurements: ControllerMetrics) -> None:
        chosen = settings.webhook
        secret = WebhookSecret(client, settings.namespace, chosen.secret_name)
        self._address = chosen.address
        self._rules = rules_for(settings.drivers, chosen.device_classes)
        self._measurements = measurements
        self._resources = ResourceApi(client)
        self._report = (
            (FleetReport(settings.kubeconfig, settings.drivers), ReaderAuthorizer(client)) if chosen.report else None
        )
        self._metrics = metrics_readers(client) if chosen.metrics else None
        self.classes: Watched[str] = Watched(
            client, "DeviceClasses", self._find_classes, lambda found: kind_of_class(found, self._rules.device_types)
        )
        self.certificate = ServingCertificate(
            secret, chosen.names, seconds=chosen.certificate_seconds, renewed=measurements.certificate
        )

    async def serve(self) -> None:
        """Serve as soon as there is a certificate, until canceled."""
        await self.certificate.ready.wait()
        await keep_serving(
            self._application,
            self._address,
            "the webhook",
            self.certificate.context,
        )

    @property
    def has_metrics(self) -> bool:
        """Return whether the metrics are served here."""
        return self._metrics is not None

    def _application(self) -> web.Application:
        made = application(self._rules, self._measurements, self.kinds)
        if self._report is not None:
            add_report(made, *self._report, self._measurements)
        if self._metrics is not None:
            add_metrics(made, self._measurements.text, self._metrics)
        return made

    def kinds(self) -> dict[str, str]:
        """Return the known kinds of devices of the cluster's classes, by name. Does not wait for unknown ones."""
        return {name.rpartition("/")[2]: kind for name, kind in self.classes.items.items()}

    async def _find_classes(self) -> str:
        self._resources.forget()  # the cluster may have been upgraded
        return f"/apis/{GROUP}/{await self._resources.version()}/deviceclasses"


async def run_controller(settings: ControllerSettings) -> int:
    """Run until SIGTERM or SIGINT and return the exit status."""
    LOG.info("starting", extra=fields(version=__version__, name=settings.name, drivers=list(settings.drivers)))
    measurements = ControllerMetrics()
    client = ApiClient(settings.kubeconfig, user_agent=f"{COMPONENT}/{__version__}", observer=measurements.request)
    # Each has its own rate limit, so that cleanup and reports do not block each other.
    events, reports = (EventRecorder(client, component=COMPONENT, node_name=settings.name) for _each in range(2))
    # A new name at every start, so that a Lease of an earlier process on this host is not treated as this one's.
    elector = Elector(
        client,
        namespace=settings.namespace,
        name=settings.lease,
        identity=f"{settings.name}_{uuid.uuid4()}",
        times=lease_times(settings.lease_seconds),
    )
    identity = TokenSupervisor(client, settings.kubeconfig, lifetime=settings.token_lifetime, system=System())
    measurements.token_ends(lambda: identity.expires)

    webhook = Webhook(settings, client, measurements) if settings.webhook.address else None

    async def work() -> None:
        measurements.leading(True)
        try:
            await make_cleanup_loop(settings, client, elector, measurements, events, reports).run()
        finally:
            measurements.leading(False)

    def problems() -> tuple[str, ...]:
        found = [] if elector.has_response.is_set() else ["the API server has not answered about the Lease yet"]
        if webhook is not None and not webhook.certificate.ready.is_set():
            found.append("the webhook has no certificate yet")
        if identity.problem():
            found.append(identity.problem())
        return tuple(found)

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    parts = [
        loop.create_task(keep_running("lead", lambda: elector.run_as_leader(work))),
        loop.create_task(keep_running("identity", identity.run)),
    ]
    metrics = None if webhook is not None and webhook.has_metrics else measurements.text
    if settings.address:
        parts.append(
            loop.create_task(
                keep_serving(lambda: status_application(metrics, problems), settings.address, "the status")
            )
        )
    if webhook is not None:
        parts += [
            loop.create_task(keep_running("certificate", webhook.certificate.run)),
            loop.create_task(keep_running("webhook", webhook.serve)),
            loop.create_task(keep_running("device classes", webhook.classes.run)),
        ]
    notify("READY=1")
    try:
        await stop.wait()
    finally:
        LOG.info("stopping")
        notify("STOPPING=1")
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await events.close()
        await reports.close()
        await client.close()
    LOG.info("stopped")
    return 0


async def show_plan(settings: ControllerSettings) -> list[str]:
    """Return the actions that would be taken now if the grace period of all absent nodes were over.

    Raises ApiError, ApiUnreachable.
    """
    return [str(action) for action in await _once(settings, lambda cleanup_loop: cleanup_loop.plan_once())]


async def show_drift(settings: ControllerSettings) -> list[str]:
    """Return the current findings as text, however short they exist. Raises ApiError, ApiUnreachable."""
    view = await _once(settings, lambda cleanup_loop: cleanup_loop.read_view())
    found = findings(view, settings.drivers, changed_at=0.0)
    return [report.message for report in report_all(found).values()]


async def _once(settings: ControllerSettings, read: Callable[[CleanupLoop], Awaitable[T]]) -> T:
    measurements = ControllerMetrics()
    client = ApiClient(settings.kubeconfig, user_agent=f"{COMPONENT}/{__version__}", observer=measurements.request)
    events = EventRecorder(client, component=COMPONENT, node_name=settings.name)
    elector = Elector(
        client,
        namespace=settings.namespace,
        name=settings.lease,
        identity="",
        times=lease_times(settings.lease_seconds),
    )
    try:
        return await read(make_cleanup_loop(settings, client, elector, measurements, events, events))
    finally:
        await client.close()
