# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``probe``: check through the kubelet's socket whether the driver is alive, and whether it can prepare claims."""

from __future__ import annotations

from typing import Any

from ..config import DEVICE_PLUGIN
from ..core.errors import AcceleratorError
from ..kubelet.sockets import PATH_BYTES
from ..supervisors.status import Role

# The two probes of a pod: whether the driver runs, and whether it can prepare claims.
LIVENESS, READINESS = "liveness", "readiness"


class NotAlive(AcceleratorError):
    """The driver does not answer on its socket."""

    default_code = "not-alive"


def check_driver(what: str, status: dict[str, Any], path: str, seconds: float) -> list[str]:
    """Return the problems of a driver with this status and DRA socket path; empty without problems.

    ``what`` is "liveness" or "readiness". Two kinds of instances are alive if they report a status: one that starts or
    is on standby, and one that serves the kubelet's device-plugin API, which has no call without an effect.
    """
    is_plugin = status["pid"] and status.get("kubelet_interface") == DEVICE_PLUGIN
    if not is_plugin and (status["role"] in (Role.WAITING, Role.SERVING) or not status["pid"]):
        try:
            call(path, seconds)
        except NotAlive as error:
            return [str(error)]
    return problems_of(status) if what == READINESS else []


def call(path: str, seconds: float) -> None:
    """Call the service at a socket to prepare an empty list of claims, which takes the path of every claim.

    Raises NotAlive.
    """
    import grpc

    from ..protocol import dra_v1_pb2, dra_v1_pb2_grpc

    if len(path) > PATH_BYTES:
        raise NotAlive(f"The socket path {path} is longer than {PATH_BYTES} bytes")
    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = dra_v1_pb2_grpc.DRAPluginStub(channel)  # type: ignore[no-untyped-call]
        try:
            stub.NodePrepareResources(dra_v1_pb2.NodePrepareResourcesRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise NotAlive(
                f"No process answers at {path} within {seconds:g} s: {error.code().name}",
                hint="See the journal of the driver's unit.",
            ) from error


def problems_of(status: dict[str, Any]) -> list[str]:
    """Return the reasons why a driver cannot prepare claims, from its status."""
    found = [str(each) for each in status["problems"]]
    if not status["published"] and not found:
        is_plugin = status.get("kubelet_interface") == DEVICE_PLUGIN
        found.append(
            "device-plugin: the devices are not offered yet"
            if is_plugin
            else "publish: the API server does not show the devices yet"
        )
    return found
