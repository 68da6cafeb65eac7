# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the devices of containers from the kubelet's PodResources socket.

This needs no permission in the cluster. Facts: the kubelet includes claims since 1.34 by default
(KubeletPodResourcesDynamicResources).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..core.errors import AcceleratorError
from .sockets import PATH_BYTES

# Bytes. A node with 110 pods returns some hundred kB.
_LARGEST_ANSWER = 64 * 1024 * 1024


class PodResourcesUnreachable(AcceleratorError):
    """The kubelet does not return the devices of containers."""

    default_code = "pod-resources-unreachable"


@dataclass(frozen=True)
class ContainerDevice:
    """One device of a claim in a container."""

    namespace: str
    pod: str
    container: str
    claim: str
    driver: str
    pool: str
    device: str
    share_id: str


@dataclass(frozen=True)
class PluginAssignment:
    """The devices of one resource that a device plugin assigned to a container."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]


def socket_path(kubelet_root: str) -> str:
    """Return the path of the kubelet's PodResources socket."""
    return f"{kubelet_root}/pod-resources/kubelet.sock"


def container_devices(path: str, seconds: float) -> tuple[ContainerDevice, ...]:
    """Return the devices of claims in containers. Blocks for up to ``seconds``. Raises PodResourcesUnreachable."""
    return tuple(
        ContainerDevice(
            namespace=pod.namespace,
            pod=pod.name,
            container=container.name,
            claim=claim.claim_name,
            driver=resource.driver_name,
            pool=resource.pool_name,
            device=resource.device_name,
            share_id=resource.share_id,
        )
        for pod in _list_pods(path, seconds).pod_resources
        for container in pod.containers
        for claim in container.dynamic_resources
        for resource in claim.claim_resources
    )


def plugin_assignments(path: str, resources: Collection[str], seconds: float) -> tuple[PluginAssignment, ...]:
    """Return the containers with devices of these resources from a device plugin. Raises PodResourcesUnreachable."""
    return tuple(
        PluginAssignment(pod.namespace, pod.name, container.name, assigned.resource_name, tuple(assigned.device_ids))
        for pod in _list_pods(path, seconds).pod_resources
        for container in pod.containers
        for assigned in container.devices
        if assigned.resource_name in resources and assigned.device_ids
    )


def _list_pods(path: str, seconds: float) -> Any:
    """Return the kubelet's list of pods with their devices. Raises PodResourcesUnreachable."""
    import grpc

    from ..protocol import pod_resources_pb2, pod_resources_pb2_grpc

    if len(path) > PATH_BYTES:
        raise PodResourcesUnreachable(f"The socket path {path} is longer than {PATH_BYTES} bytes")
    options = [("grpc.max_receive_message_length", _LARGEST_ANSWER)]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        stub = pod_resources_pb2_grpc.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
        try:
            return stub.List(pod_resources_pb2.ListPodResourcesRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise PodResourcesUnreachable(
                f"The kubelet does not answer at {path}: {error.code().name}",
                hint="The claims' status contains the pods of a device as well.",
            ) from error
