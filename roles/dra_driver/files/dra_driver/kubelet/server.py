# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the two gRPC servers of a DRA driver: the DRA service, which prepares claims, and the plugin registration.

The service starts before the registration socket is created. At the end the registration socket is removed first. Then
running calls are completed, and the service stops. Facts: kubelet plugin registration, and DRA v1 and v1beta1.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from ..claims.call_results import DeferredCallbacks, Outcome, defer_callbacks
from ..claims.store.records import ClaimReference, DeviceRecord
from ..core.texts import shorten_bytes
from ..logs import StateLog
from ..metrics import Metrics
from ..protocol import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    plugin_registration_pb2,
    plugin_registration_pb2_grpc,
)
from . import sockets
from .health import HealthService, HealthSource

LOG = logging.getLogger(__name__)
Work = Callable[[Sequence[ClaimReference]], Awaitable[Mapping[str, Outcome]]]

# In order of preference: kubelets since 1.34 use the first one that they support.
SUPPORTED_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
# Seconds that running calls have to finish when the driver stops.
DRAIN_SECONDS = 10.0


class ClaimHandler(Protocol):
    """The methods of the driver that a kubelet call runs."""

    async def prepare(self, references: Sequence[ClaimReference]) -> Mapping[str, Outcome]:
        """Return one outcome for each claim, by UID."""

    async def unprepare(self, references: Sequence[ClaimReference]) -> Mapping[str, Outcome]:
        """Return one outcome for each claim, by UID."""


def _references(request: Any) -> list[ClaimReference]:
    return [ClaimReference(namespace=claim.namespace, name=claim.name, uid=claim.uid) for claim in request.claims]


class _Service:
    """NodePrepareResources and NodeUnprepareResources for one version of the messages.

    ``share_ids`` is whether this version has share IDs of devices.
    """

    def __init__(self, claims: ClaimHandler, messages: Any, metrics: Metrics, *, share_ids: bool) -> None:
        self._claims = claims
        self._metrics = metrics
        self._messages = messages
        self._share_ids = share_ids

    async def NodePrepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Prepare claims. The response has one entry for each claim: its devices, or an error."""
        outcomes = await self._run("NodePrepareResources", self._claims.prepare, request, context)
        response = self._messages.NodePrepareResourcesResponse()
        for uid, outcome in outcomes.items():
            entry = response.claims[uid]
            entry.error = shorten_bytes(outcome.error)
            for device in outcome.record.devices if outcome.record else ():
                entry.devices.append(self._device(device))
        return response

    async def NodeUnprepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Unprepare claims. The response has one entry for each claim."""
        outcomes = await self._run("NodeUnprepareResources", self._claims.unprepare, request, context)
        response = self._messages.NodeUnprepareResourcesResponse()
        for uid, outcome in outcomes.items():
            response.claims[uid].error = shorten_bytes(outcome.error)
        return response

    async def _run(self, method: str, work: Work, request: Any, context: Any) -> Mapping[str, Outcome]:
        """Run the work for the claims of a request. Its log lines and metrics are written after the call, also if it fails."""
        began, callbacks = time.perf_counter(), DeferredCallbacks()
        context.add_done_callback(lambda _context: callbacks.run_all_now())
        with defer_callbacks(callbacks):
            outcomes = await work(_references(request))
        if outcomes:  # a call without claims is a probe
            outcome = "failure" if any(each.error for each in outcomes.values()) else "success"
            callbacks.run_later(partial(self._metrics.request, method, outcome, time.perf_counter() - began))
        return outcomes

    def _device(self, device: DeviceRecord) -> Any:
        message = self._messages.Device(
            request_names=[device.base_request],
            pool_name=device.pool,
            device_name=device.name,
            cdi_device_ids=[device.cdi_id],
        )
        if self._share_ids and device.share_id:
            message.share_id = device.share_id
        return message


class _Registration:
    """Registers this plugin with the kubelet."""

    def __init__(self, driver: str, endpoint: str) -> None:
        self._driver = driver
        self._endpoint = endpoint
        self._state = StateLog(LOG)
        self.registered = False

    async def GetInfo(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Return the plugin's type, name, endpoint, and versions."""
        return plugin_registration_pb2.PluginInfo(
            type="DRAPlugin", name=self._driver, endpoint=self._endpoint, supported_versions=list(SUPPORTED_VERSIONS)
        )

    async def NotifyRegistrationStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Record the registration status.

        A failed registration is answered with an error, so that the kubelet tries again.
        """
        self.registered = request.plugin_registered
        if request.plugin_registered:
            self._state.report("the kubelet has registered the driver", driver=self._driver)
            return plugin_registration_pb2.RegistrationStatusResponse()
        self._state.report(f"the kubelet refuses the driver: {request.error}", level=logging.ERROR, driver=self._driver)
        problem = shorten_bytes(f"registration failed: {request.error}")
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        return None


class PluginServer:
    """Both servers of one driver.

    ``service_path`` and ``registration_path`` are absolute paths of the sockets, at most 107 bytes.
    """

    def __init__(
        self,
        claims: ClaimHandler,
        *,
        health: HealthSource,
        driver: str,
        service_path: str,
        registration_path: str,
        metrics: Metrics | None = None,
    ) -> None:
        sockets.check_length(service_path, "kubelet_root or state_directory")
        sockets.check_length(registration_path, "kubelet_root or driver_name")
        self._claims = claims
        self._metrics = metrics or Metrics()
        self._health = health
        self._closing = asyncio.Event()
        self._service_path = service_path
        self._registration_path = registration_path
        self._registration = _Registration(driver, service_path)
        self._service_server: grpc.aio.Server | None = None
        self._registration_server: grpc.aio.Server | None = None
        # The identity of the created sockets and of their directories, by path. A file with another identity at the same
        # path belongs to another process.
        self._created: dict[str, sockets.Identity | None] = {}

    @property
    def registered(self) -> bool:
        """Return whether the kubelet has registered the driver."""
        return self._registration.registered

    async def start(self) -> None:
        """Start the DRA service, then the registration. Raises SocketError."""
        await self._start_service()
        await self._start_registration()

    async def watch_sockets(self, interval: float = 5.0) -> None:
        """Serve again when a socket was removed or replaced. Runs until canceled.

        ``interval`` is the time between checks, in seconds. Raises SocketError if a socket cannot be served. Raises
        DirectoryReplaced if the directory with the driver's state was removed, or if the kubelet's directory was replaced
        (kubeadm reset) and this process cannot reach the new one.
        """
        while True:
            await asyncio.sleep(interval)
            state_directory, registry = (
                str(Path(path).parent) for path in (self._service_path, self._registration_path)
            )
            if self._is_gone_or_foreign(state_directory):
                raise sockets.DirectoryReplaced(f"The directory {state_directory} with the driver's state was removed")
            try:
                if self._is_gone_or_foreign(self._service_path):
                    LOG.warning("the socket %s has disappeared and is made again", self._service_path)
                    await self._stop_registration()
                    await self._stop_service()
                    await self.start()
                elif self._is_gone_or_foreign(self._registration_path):
                    LOG.warning("the socket %s has disappeared and is made again", self._registration_path)
                    await self._stop_registration()
                    await self._start_registration()
            except sockets.SocketError as error:
                if not self._is_gone_or_foreign(registry):
                    raise
                problem = str(error)
            else:
                continue
            raise sockets.DirectoryReplaced(
                f"The directory {registry} was removed or created again, and this process cannot reach the new one: {problem}"
            )

    def _is_gone_or_foreign(self, path: str) -> bool:
        """Return whether this process has not created the file or directory at a path."""
        return path not in self._created or sockets.identity_of(path) != self._created[path]

    async def stop(self, grace: float = DRAIN_SECONDS, settle: float = 0.0) -> None:
        """Withdraw the registration, finish running calls, stop the service, and remove both sockets.

        Calls have up to ``grace`` seconds to finish. New calls are accepted for ``settle`` seconds, because the kubelet
        checks for removed registrations once per second.
        """
        await self._stop_registration()
        if self._service_server is not None:
            await asyncio.sleep(settle)
        await self._stop_service(grace)

    async def _start_service(self) -> None:
        server = _server()
        v1 = _Service(self._claims, dra_v1_pb2, self._metrics, share_ids=True)
        v1beta1 = _Service(self._claims, dra_v1beta1_pb2, self._metrics, share_ids=False)
        dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(v1, server)  # type: ignore[no-untyped-call]
        dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(v1beta1, server)  # type: ignore[no-untyped-call]
        self._closing = asyncio.Event()
        health_v1 = HealthService(self._health, dra_health_v1_pb2, self._closing)
        health_v1alpha1 = HealthService(self._health, dra_health_v1alpha1_pb2, self._closing)
        dra_health_v1_pb2_grpc.add_DRAResourceHealthServicer_to_server(health_v1, server)  # type: ignore[no-untyped-call]
        dra_health_v1alpha1_pb2_grpc.add_DRAResourceHealthServicer_to_server(  # type: ignore[no-untyped-call]
            health_v1alpha1, server
        )
        await self._listen(server, self._service_path)
        self._service_server = server

    async def _start_registration(self) -> None:
        server = _server()
        plugin_registration_pb2_grpc.add_RegistrationServicer_to_server(  # type: ignore[no-untyped-call]
            self._registration, server
        )
        await self._listen(server, self._registration_path)
        self._registration_server = server

    async def _stop_registration(self) -> None:
        server, self._registration_server = self._registration_server, None
        self._registration.registered = False
        if server is not None:
            self._remove(self._registration_path)
            await server.stop(grace=1.0)

    async def _stop_service(self, grace: float = DRAIN_SECONDS) -> None:
        server, self._service_server = self._service_server, None
        self._closing.set()  # ends the health streams, which the server would wait for
        if server is not None:
            await server.stop(grace=grace)
            self._remove(self._service_path)

    def _remove(self, path: str) -> None:
        identity = self._created.pop(path, None)
        if identity is not None:
            sockets.remove(path, identity)

    async def _listen(self, server: grpc.aio.Server, path: str) -> None:
        self._created[path] = await sockets.listen(server, path)
        folder = str(Path(path).parent)
        self._created[folder] = sockets.identity_of(folder)


def _server() -> grpc.aio.Server:
    # Claims of one pod come in one call, but a node starts many pods at once: no limit on concurrent calls is set.
    return grpc.aio.server(options=[("grpc.so_reuseport", 0)])
