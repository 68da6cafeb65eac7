# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The kubelet's side of the device-plugin API and of its pod-resources API, over real unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from dra_driver.protocol import device_plugin_pb2 as messages
from dra_driver.protocol import device_plugin_pb2_grpc as stubs
from dra_driver.protocol import pod_resources_pb2, pod_resources_pb2_grpc


class PluginKubelet:
    """Accept registrations, watch the devices of each resource, and request them. start() and kill() can be called repeatedly."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "device-plugins"
        self.pod_resources = root / "pod-resources/kubelet.sock"
        self.registrations: list[str] = []
        self.refuses = ""
        #: The last list of each resource: state and NUMA nodes by device.
        self.lists: dict[str, dict[str, tuple[str, list[int]]]] = {}
        #: The devices of containers: pod, resource, and ids.
        self.held: list[tuple[str, str, list[str]]] = []
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Remove all sockets, as a kubelet does at its start, and accept registrations."""
        for path in (self.folder, self.pod_resources.parent):
            path.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.is_socket():
                path.unlink()
        for add, path in (
            (stubs.add_RegistrationServicer_to_server, self.folder / "kubelet.sock"),
            (pod_resources_pb2_grpc.add_PodResourcesListerServicer_to_server, self.pod_resources),
        ):
            server = grpc.aio.server()
            add(self, server)  # type: ignore[no-untyped-call]
            path.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            self._servers.append(server)

    async def kill(self) -> None:
        """End like a killed process, with all streams and sockets."""
        servers, self._servers = self._servers, []
        for server in servers:
            await server.stop(0)
        for resource in tuple(self._streams):
            await self._forget(resource)
        self.lists.clear()

    async def Register(self, request: Any, context: Any) -> Any:
        """Call the plugin back, as kubelets do before they answer."""
        assert request.version == "v1beta1" and request.options.get_preferred_allocation_available
        if self.refuses:
            await context.abort(grpc.StatusCode.UNKNOWN, self.refuses)
        await self._forget(request.resource_name)
        channel = grpc.aio.insecure_channel(f"unix:{self.folder}/{request.endpoint}")
        stub = stubs.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        options = await stub.GetDevicePluginOptions(messages.Empty(), timeout=5)
        assert options.get_preferred_allocation_available and not options.pre_start_required
        self._channels[request.resource_name] = channel
        self._streams[request.resource_name] = asyncio.ensure_future(self._follow(request.resource_name, stub))
        self.registrations.append(request.resource_name)
        return messages.Empty()

    async def List(self, request: Any, context: Any) -> Any:
        """Return the devices of containers."""
        answer = pod_resources_pb2.ListPodResourcesResponse()
        for pod, resource, ids in self.held:
            container = answer.pod_resources.add(name=pod, namespace="default").containers.add(name="c")
            container.devices.add(resource_name=resource, device_ids=ids)
        return answer

    async def _follow(self, resource: str, stub: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in stub.ListAndWatch(messages.Empty()):
                self.lists[resource] = {
                    each.ID: (each.health, [node.ID for node in each.topology.nodes]) for each in response.devices
                }
        # The kubelet allocates none of them any more.
        self.lists.pop(resource, None)

    async def _forget(self, resource: str) -> None:
        stream, channel = self._streams.pop(resource, None), self._channels.pop(resource, None)
        if stream is not None:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
        if channel is not None:
            await channel.close()

    def states(self, resource: str) -> dict[str, str]:
        """Return the state of each device of a resource."""
        return {name: state for name, (state, _nodes) in self.lists.get(resource, {}).items()}

    async def allocate(self, resource: str, *containers: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
        """Request devices, and return the CDI devices and variables for each container."""
        requests = [messages.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
        stub = stubs.DevicePluginStub(self._channels[resource])  # type: ignore[no-untyped-call]
        answer = await stub.Allocate(messages.AllocateRequest(container_requests=requests), timeout=10)
        return [([each.name for each in one.cdi_devices], dict(one.envs)) for one in answer.container_responses]

    async def prefers(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        """Request the preferred devices."""
        one = messages.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )
        stub = stubs.DevicePluginStub(self._channels[resource])  # type: ignore[no-untyped-call]
        answer = await stub.GetPreferredAllocation(messages.PreferredAllocationRequest(container_requests=[one]))
        return list(answer.container_responses[0].deviceIDs)
