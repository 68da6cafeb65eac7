# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The kubelet's device-plugin API (v1beta1): one gRPC server for each resource, and its registration.

Protocol only, no decisions. Facts: the kubelet serves the registration at ``kubelet.sock`` in its directory
``device-plugins``. During the registration it connects to the plugin's socket in the same directory. Then it keeps one
ListAndWatch stream open. The plugin is registered while that stream is open. At its start the kubelet deletes all
sockets in the directory and creates its own. If a resource is registered twice while the first stream is open, both can
end, because the kubelet ends the newest client by name. So a connected resource is not registered again.
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

from ..core.dra.device_plugin_model import AllocationResult, PluginDevice, socket_name
from ..core.errors import AcceleratorError
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
# The time, in seconds, that running calls have to finish when a server stops.
GRACE_SECONDS = 5.0


class RegistrationRefused(AcceleratorError):
    """The kubelet does not answer at its socket, or rejects a resource."""

    default_code = "registration-refused"


class Source(Protocol):
    """The devices of a driver's resources, and the data that containers need for them."""

    def devices(self, resource: str) -> Sequence[PluginDevice]:
        """Return the current devices of a resource."""

    def change(self) -> asyncio.Event:
        """Return an event that is set when devices may have changed."""

    def preferred(
        self, resource: str, available: Collection[str], required: Collection[str], size: int
    ) -> Sequence[str]:
        """Return the IDs of ``size`` preferred devices, including the ``required`` ones. Raises ValueError."""

    async def allocate(self, resource: str, ids: Sequence[str]) -> AllocationResult:
        """Return the response for a container with these devices. Raises AcceleratorError if it cannot have them."""


class _Service:
    """The DevicePlugin service of one resource. ``streams`` is the number of open ListAndWatch streams."""

    def __init__(self, source: Source, resource: str, metrics: Metrics) -> None:
        self._source = source
        self._resource = resource
        self._metrics = metrics
        self.closing = asyncio.Event()
        self.streams = 0

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Return the plugin's options."""
        return _options()

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        """Send all devices, and again after each change."""
        closing = asyncio.ensure_future(self.closing.wait())
        sent: Any = None
        self.streams += 1
        try:
            while not closing.done():
                changed = asyncio.ensure_future(self._source.change().wait())
                try:
                    response = _list_response(self._source.devices(self._resource))
                    if response != sent:
                        sent = response
                        yield response
                    await asyncio.wait((changed, closing), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
        finally:
            self.streams -= 1
            closing.cancel()

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the preferred devices for each container."""
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
        """Return the environment and CDI names for each container, or an error."""
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
        """Do nothing: the plugin's options do not request this call."""
        return messages.PreStartContainerResponse()


class ResourceServer:
    """The server of one resource in the kubelet's directory. start() and stop() can be called repeatedly."""

    def __init__(self, source: Source, *, resource: str, folder: str, metrics: Metrics) -> None:
        self.resource = resource
        self.path = f"{folder}/{socket_name(resource)}"
        sockets.check_length(self.path, "kubelet_root")
        self._registration = f"{folder}/{REGISTRATION}"
        self._source = source
        self._metrics = metrics
        self._service: _Service | None = None
        self._server: grpc.aio.Server | None = None
        self._socket_identity: sockets.Identity | None = None

    @property
    def is_served(self) -> bool:
        """Return whether the socket exists and belongs to this server."""
        return self._socket_identity is not None and sockets.identity_of(self.path) == self._socket_identity

    @property
    def is_connected(self) -> bool:
        """Return whether the kubelet watches the resource's devices."""
        return self._service is not None and self._service.streams > 0

    async def start(self) -> None:
        """Start the server. Raises SocketError, DirectoryReplaced."""
        await self.stop()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service = _Service(self._source, self.resource, self._metrics)
        stubs.add_DevicePluginServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        self._socket_identity = await sockets.listen(server, self.path)
        self._service, self._server = service, server

    async def register(self) -> None:
        """Register the resource with the kubelet, which connects to this server during the call.

        Raises RegistrationRefused.
        """
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
                    hint="Check the kubelet's log; the driver retries it.",
                ) from error

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """End the stream, finish running calls for up to ``grace`` seconds, and remove the socket.

        Afterwards the kubelet does not allocate the devices.
        """
        server, service, identity = self._server, self._service, self._socket_identity
        self._server = self._service = self._socket_identity = None
        if service is not None:
            service.closing.set()
        if server is not None:
            await server.stop(grace)
        if identity is not None:
            sockets.remove(self.path, identity)


def _options() -> Any:
    return messages.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


def _list_response(devices: Sequence[PluginDevice]) -> Any:
    response = messages.ListAndWatchResponse()
    for each in devices:
        device = response.devices.add(ID=each.id, health=HEALTHY if each.is_healthy else UNHEALTHY)
        if each.numa_node is not None:
            device.topology.nodes.add(ID=each.numa_node)
    return response
