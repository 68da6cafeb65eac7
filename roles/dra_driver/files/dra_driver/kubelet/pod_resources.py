# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read from the kubelet's own socket which container has which device of a claim.

This needs no permission in the cluster. Facts: the kubelet includes claims since 1.34 by default
(KubeletPodResourcesDynamicResources).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..core.errors import AcceleratorError
from .sockets import LIMIT

# A node with 110 pods returns some hundred kB.
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
class PluginHolding:
    """Devices of one resource that a container has from a device plugin."""

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
        for pod in _asked(path, seconds).pod_resources
        for container in pod.containers
        for claim in container.dynamic_resources
        for resource in claim.claim_resources
    )


def plugin_holdings(path: str, resources: Collection[str], seconds: float) -> tuple[PluginHolding, ...]:
    """Return the containers with devices of these resources from a device plugin. Raises PodResourcesUnreachable."""
    return tuple(
        PluginHolding(pod.namespace, pod.name, container.name, given.resource_name, tuple(given.device_ids))
        for pod in _asked(path, seconds).pod_resources
        for container in pod.containers
        for given in container.devices
        if given.resource_name in resources and given.device_ids
    )


def _asked(path: str, seconds: float) -> Any:
    import grpc

    from ..protocol import pod_resources_pb2, pod_resources_pb2_grpc

    if len(path) > LIMIT:
        raise PodResourcesUnreachable(f"The socket path {path} is longer than {LIMIT} bytes")
    options = [("grpc.max_receive_message_length", _LARGEST_ANSWER)]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        stub = pod_resources_pb2_grpc.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
        try:
            return stub.List(pod_resources_pb2.ListPodResourcesRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise PodResourcesUnreachable(
                f"The kubelet does not answer at {path}: {error.code().name}",
                hint="Which pods have a device is in the claims' status as well.",
            ) from error
