# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The kubelet's device-plugin API (v1beta1): one gRPC server for each resource, and its registration. Protocol only, no decisions.

Facts: the kubelet serves the registration at ``kubelet.sock`` in its folder ``device-plugins``, calls back at the plugin's socket in
the same folder while it registers it, and keeps one ListAndWatch stream open from then on: as long as that is open the kubelet has the
plugin. When it starts it removes all sockets of the folder and makes its own anew. A second registration of one resource, while the
first one's stream is open, may end both (the kubelet ends the newest client by name), so that nobody registers who is connected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from ..core.errors import AcceleratorError
from ..core.plugin_devices import Given, PluginDevice, socket_name
from ..core.texts import shorten_bytes
from ..metrics import Metrics
from ..protocol import device_plugin_pb2 as messages
from ..protocol import device_plugin_pb2_grpc as stubs
from . import sockets

LOG = logging.getLogger(__name__)

VERSION = "v1beta1"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
REGISTRATION = "kubelet.sock"
REGISTER_SECONDS = 10.0
# Calls under way when a server ends get this long to finish.
GRACE_SECONDS = 5.0


class RegistrationRefused(AcceleratorError):
    """The kubelet does not answer at its socket, or does not take a resource."""

    default_code = "registration-refused"


class Source(Protocol):
    """Who knows the devices and what containers need for them."""

    def devices(self, resource: str) -> Sequence[PluginDevice]:
        """Return the devices of a resource at this moment."""

    def change(self) -> asyncio.Event:
        """Return what is set as soon as any of them may be another than now."""

    def preferred(self, resource: str, available: Collection[str], must: Collection[str], size: int) -> Sequence[str]:
        """Return the ids of the devices to take. Raises ValueError."""

    async def allocate(self, resource: str, ids: Sequence[str]) -> Given:
        """Return what a container with these devices is told. Raises AcceleratorError where it cannot have them."""


class _Service:
    """DevicePlugin for one resource. ``streams`` is how many ListAndWatch streams are open."""

    def __init__(self, source: Source, resource: str, metrics: Metrics) -> None:
        self._source = source
        self._resource = resource
        self._metrics = metrics
        self.closing = asyncio.Event()
        self.streams = 0

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Answer what the plugin wants to be asked."""
        return _options()

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        """Send all devices, and all again each time that something of them has changed."""
        closing = asyncio.ensure_future(self.closing.wait())
        told: Any = None
        self.streams += 1
        try:
            while not closing.done():
                changed = asyncio.ensure_future(self._source.change().wait())
                try:
                    now = _listed(self._source.devices(self._resource))
                    if now != told:
                        told = now
                        yield now
                    await asyncio.wait((changed, closing), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
        finally:
            self.streams -= 1
            closing.cancel()

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer for each container which of the devices that are free it should have."""
        response = messages.PreferredAllocationResponse()
        for each in request.container_requests:
            try:
                chosen = self._source.preferred(
                    self._resource,
                    list(each.available_deviceIDs),
                    list(each.must_include_deviceIDs),
                    each.allocation_size,
                )
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, shorten_bytes(str(error)))
            response.container_responses.append(messages.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        return response

    async def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer for each container what it is told of its devices, or why it cannot have them."""
        began = time.perf_counter()
        response = messages.AllocateResponse()
        try:
            for each in request.container_requests:
                found = await self._source.allocate(self._resource, list(each.devices_ids))
                answer = messages.ContainerAllocateResponse(envs=dict(found.variables or {}))
                answer.cdi_devices.extend(messages.CDIDevice(name=name) for name in found.cdi_devices)
                response.container_responses.append(answer)
        except AcceleratorError as error:
            self._metrics.request("Allocate", "failure", time.perf_counter() - began)
            LOG.warning("a container does not get its devices (%s): %s", self._resource, error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, shorten_bytes(str(error)))
        self._metrics.request("Allocate", "success", time.perf_counter() - began)
        return response

    async def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Do nothing: it is not asked for."""
        return messages.PreStartContainerResponse()


class ResourceServer:
    """The server of one resource in the kubelet's folder. start() and stop() may be called again and again."""

    def __init__(self, source: Source, *, resource: str, folder: str, metrics: Metrics) -> None:
        self.resource = resource
        self.path = f"{folder}/{socket_name(resource)}"
        sockets.check_length(self.path, "kubelet_root")
        self._registration = f"{folder}/{REGISTRATION}"
        self._source = source
        self._metrics = metrics
        self._service: _Service | None = None
        self._server: grpc.aio.Server | None = None
        self._made: sockets.Identity | None = None

    @property
    def is_served(self) -> bool:
        """Whether the socket is there and is this server's."""
        return self._made is not None and sockets.identity_of(self.path) == self._made

    @property
    def is_connected(self) -> bool:
        """Whether the kubelet follows the devices of the resource."""
        return self._service is not None and self._service.streams > 0

    async def start(self) -> None:
        """Serve. Raises SocketError, FolderReplaced."""
        await self.stop()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service = _Service(self._source, self.resource, self._metrics)
        stubs.add_DevicePluginServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        self._made = await sockets.listen(server, self.path)
        self._service, self._server = service, server

    async def register(self) -> None:
        """Tell the kubelet of the resource; it calls back meanwhile. Raises RegistrationRefused."""
        request = messages.RegisterRequest(
            version=VERSION, endpoint=Path(self.path).name, resource_name=self.resource, options=_options()
        )
        async with grpc.aio.insecure_channel(f"unix:{self._registration}") as channel:
            stub = stubs.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Register(request, timeout=REGISTER_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise RegistrationRefused(
                    f"The kubelet does not take {self.resource} at {self._registration}: {error.code().name} {error.details()}",
                    hint="Look at the kubelet's log; it is tried again.",
                ) from error

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """End the stream, finish calls under way and remove the socket. The kubelet gives none of the devices away then."""
        server, service, made = self._server, self._service, self._made
        self._server = self._service = self._made = None
        if service is not None:
            service.closing.set()
        if server is not None:
            await server.stop(grace)
        if made is not None:
            sockets.remove(self.path, made)


def _options() -> Any:
    return messages.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


def _listed(devices: Sequence[PluginDevice]) -> Any:
    response = messages.ListAndWatchResponse()
    for each in devices:
        device = response.devices.add(ID=each.id, health=HEALTHY if each.is_healthy else UNHEALTHY)
        if each.numa_node is not None:
            device.topology.nodes.add(ID=each.numa_node)
    return response
