# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The node daemon: runs all drivers of this node in one process until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence

from . import __version__, logs, stages
from .api.client import ApiClient
from .api.events import EventRecorder
from .api.resources import ResourceApi
from .config import Configuration, InvalidConfiguration, load
from .core.errors import AcceleratorError
from .core.host.system import System
from .core.vendors.registry import create
from .kubelet.pod_resources import socket_path
from .logs import fields
from .metrics import Metrics, MetricsRegistry, PrometheusMetrics
from .monitoring.collector import Collector
from .monitoring.pods import PodReader
from .service_manager import notify
from .supervisors.configuration import ConfigurationSupervisor
from .supervisors.driver_state import keep_running
from .supervisors.token_renewal import TokenSupervisor
from .supervisors.watchdog import Watchdog
from .vendor import VendorDriver

LOG = logging.getLogger(__name__)

# The interval, in seconds, at which a driver in a pod checks its configuration file.
CONFIGURATION_SECONDS = 10.0


async def run_node(configuration: Configuration, path: str) -> int:
    """Run until SIGTERM or SIGINT and return the exit status: 0 after a signal, 1 after an error of a driver.

    SIGHUP reloads the configuration from ``path``, and starts a hardware scan in all drivers.
    """
    LOG.info(
        "starting",
        extra=fields(version=__version__, node=configuration.node_name, backends=list(configuration.backends)),
    )
    registry = MetricsRegistry() if configuration.metrics_address else None
    client = ApiClient(
        configuration.kubeconfig,
        user_agent=f"dra-accelerators-driver/{__version__}",
        observer=registry.api_request if registry else None,
    )
    events = EventRecorder(client, component="dra-accelerators-driver", node_name=configuration.node_name)
    identity = TokenSupervisor(client, configuration.kubeconfig, lifetime=configuration.token_lifetime, system=System())
    drivers: list[VendorDriver] = []
    started: list[asyncio.Event] = []
    supervisor = ConfigurationSupervisor(
        configuration, lambda: load(path), lambda taken: _apply_configuration(taken, drivers, identity)
    )
    for name in configuration.backends:
        system = System()
        backend = create(
            name,
            system,
            by_runtime=name in configuration.vendor_runtimes,
            network_tools=name in configuration.network_tools,
        )
        metrics: Metrics = (
            PrometheusMetrics(registry, configuration.driver_name or backend.driver_name) if registry else Metrics()
        )
        drivers.append(
            VendorDriver(
                configuration=configuration,
                backend=backend,
                system=system,
                api=ResourceApi(client),
                events=events,
                metrics=metrics,
                report_stage=stages.report_stage,
                identity=identity.problem,
                refused=lambda: supervisor.refused,
            )
        )
        started.append(asyncio.Event())
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    loop.add_signal_handler(signal.SIGHUP, supervisor.request_reload)
    work = [loop.create_task(driver.run(event)) for driver, event in zip(drivers, started)]
    watchdog = Watchdog([driver.check_own_socket for driver in drivers], notify)
    helpers = [
        loop.create_task(_notify_when_started(started)),
        loop.create_task(keep_running("identity", identity.run)),
        loop.create_task(keep_running("configuration", supervisor.run)),
        *([loop.create_task(_watch_configuration(supervisor, path, stop))] if configuration.instance else []),
        loop.create_task(keep_running("watchdog", watchdog.run)),
    ]
    if registry is not None:
        registry.register(
            Collector(
                loop,
                drivers,
                pod_resources=socket_path(configuration.kubelet_root),
                expires=lambda: identity.expires,
                pods=PodReader(loop, ResourceApi(client)) if configuration.read_pods else None,
            )
        )
        helpers.append(loop.create_task(_serve_metrics(configuration, registry, client)))
    waiter = loop.create_task(stop.wait())
    status = 0
    try:
        done, _pending = await asyncio.wait((*work, waiter), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is waiter or task.exception() is None:
                continue
            error = task.exception()
            status = 1
            if isinstance(error, AcceleratorError):
                LOG.error("%s", error)
            else:
                LOG.error("a driver failed", exc_info=error)
    finally:
        LOG.info("stopping")
        notify("STOPPING=1")
        for task in (*work, *helpers, waiter):
            task.cancel()
        await asyncio.gather(*work, *helpers, waiter, return_exceptions=True)
        await events.close()
        await client.close()
    LOG.info("stopped")
    return status


def _apply_configuration(
    configuration: Configuration, drivers: Sequence[VendorDriver], identity: TokenSupervisor
) -> None:
    """Apply a configuration to the process. An unchanged configuration starts a hardware scan in all drivers."""
    logs.configure(configuration.log.level, configuration.log.format)
    identity.lifetime = configuration.token_lifetime
    for driver in drivers:
        driver.apply_configuration(configuration)


async def _watch_configuration(supervisor: ConfigurationSupervisor, path: str, stop: asyncio.Event) -> None:
    """Reload a changed configuration, and stop the process if the change needs a restart.

    In a pod no other program does this.
    """
    while True:
        await asyncio.sleep(CONFIGURATION_SECONDS)
        # A file with an error can be incomplete. Otherwise the error is reported at the next start.
        with contextlib.suppress(InvalidConfiguration):
            found = await asyncio.to_thread(load, path)
            if found.digest == supervisor.digest:
                continue
            if supervisor.refused.get("digest") == found.digest:
                break
            supervisor.request_reload()
    LOG.info("the configuration has changed: starting again")
    stop.set()


async def _serve_metrics(configuration: Configuration, registry: MetricsRegistry, client: ApiClient) -> None:
    """Serve the metrics until cancelled, with TLS and authorization where these are configured."""
    if not configuration.metrics_certificate:
        await registry.keep_serving(configuration.metrics_address)
        return
    from .scrapes import keep_serving_metrics, metrics_readers

    await keep_serving_metrics(
        registry.text,
        configuration.metrics_address,
        readers=metrics_readers(client) if configuration.metrics_authorization else None,
        certificate=configuration.metrics_certificate,
        key=configuration.metrics_key,
    )


async def _notify_when_started(started: list[asyncio.Event]) -> None:
    for event in started:
        await event.wait()
    notify("READY=1")
