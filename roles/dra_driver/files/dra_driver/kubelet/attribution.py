# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the containers that use the devices of a claim. The module has no side effects.

Facts: for each container that refers to a claim, the kubelet lists all devices of the claim, also those of requests that the container
does not name (k8s.io/kubernetes, pkg/kubelet/cm/dra/manager.go, GetContainerClaimInfos). Only the pod names the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..claims.store.records import ClaimRecord, DeviceRecord
from .pod_resources import ContainerDevice

Json = Mapping[str, Any]
#: The requests that each container has, by container and claim; None for all requests of the claim.
PodRequests = Mapping[tuple[str, str], "frozenset[str] | None"]


@dataclass(frozen=True)
class Assignment:
    """One device of a claim and a pod that has it. ``container`` is empty if only the pod is known."""

    namespace: str
    pod: str
    container: str
    claim: ClaimRecord
    device: DeviceRecord

    def describe(self) -> str:
        """Return namespace, pod, and the container if it is known."""
        return "/".join(each for each in (self.namespace, self.pod, self.container) if each)


def requests_of_pod(pod: Json) -> PodRequests:
    """Return the requests of a pod's containers, for the pod's claims and the claim for its extended resources."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    names = {each["name"]: each.get("resourceClaimName") for each in spec.get("resourceClaims") or ()}
    for each in status.get("resourceClaimStatuses") or ():
        names[each["name"]] = each.get("resourceClaimName") or names.get(each["name"])
    found: dict[tuple[str, str], set[str] | None] = {}
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for each in (container.get("resources") or {}).get("claims") or ():
            _add_request(found, container["name"], names.get(each["name"]), each.get("request"))
    extended = status.get("extendedResourceClaimStatus") or {}
    for each in extended.get("requestMappings") or ():
        _add_request(found, each["containerName"], extended.get("resourceClaimName"), each["requestName"])
    return {key: None if requests is None else frozenset(requests) for key, requests in found.items()}


def _add_request(
    found: dict[tuple[str, str], set[str] | None], container: str, claim: str | None, request: str | None
) -> None:
    if not claim:
        return
    known = found.setdefault((container, claim), set())
    if not request:
        found[container, claim] = None
    elif known is not None:
        known.add(_base_request(request))


def _base_request(request: str) -> str:
    """Return the request of a subrequest ("request/subrequest")."""
    return request.partition("/")[0]


def assign_devices(
    driver: str,
    records: Iterable[ClaimRecord],
    containers: Iterable[ContainerDevice],
    pods: Mapping[tuple[str, str], PodRequests],
) -> tuple[Assignment, ...]:
    """Return the devices of claims with the pods and containers that have them, each once.

    Args:
        driver: The name of the driver whose records these are.
        records: The claims of the driver. Devices of other claims are ignored.
        containers: The kubelet's list, of all drivers.
        pods: The requests of the pods that were read, by namespace and name. For other pods, the container is empty if more than
            one container can have the device.

    """
    found: dict[tuple[str, str, str, int], Assignment] = {}
    for record, listed in _entries_by_claim(records, containers):
        is_unambiguous = _is_unambiguous(driver, record, listed)
        for entry in listed:
            requests = pods.get((entry.namespace, entry.pod))
            for device in record.devices:
                if (entry.driver, entry.pool, entry.device, entry.share_id) != (
                    driver,
                    device.pool,
                    device.name,
                    device.share_id,
                ):
                    continue
                container = entry.container
                if not is_unambiguous and requests is None:
                    container = ""
                elif not is_unambiguous and requests is not None:
                    requested = requests.get((container, record.name), frozenset())
                    if requested is not None and _base_request(device.request) not in requested:
                        continue
                assignment = Assignment(entry.namespace, entry.pod, container, record, device)
                found.setdefault((entry.namespace, entry.pod, container, id(device)), assignment)
    return tuple(found.values())


def ambiguous_pods(
    driver: str, records: Iterable[ClaimRecord], containers: Iterable[ContainerDevice]
) -> frozenset[tuple[str, str]]:
    """Return namespace and name of the pods that must be read to find out which of their containers has a device."""
    return frozenset(
        (entry.namespace, entry.pod)
        for record, listed in _entries_by_claim(records, containers)
        if not _is_unambiguous(driver, record, listed)
        for entry in listed
    )


def _entries_by_claim(
    records: Iterable[ClaimRecord], containers: Iterable[ContainerDevice]
) -> Iterator[tuple[ClaimRecord, list[ContainerDevice]]]:
    listed: dict[tuple[str, str], list[ContainerDevice]] = {}
    for entry in containers:
        listed.setdefault((entry.namespace, entry.claim), []).append(entry)
    for record in records:
        yield record, listed.get((record.namespace, record.name), [])


def _is_unambiguous(driver: str, record: ClaimRecord, listed: list[ContainerDevice]) -> bool:
    """Return whether the kubelet's list attributes each device to a container.

    A claim with devices of another driver has a request that the record does not contain.
    """
    if len({(entry.namespace, entry.pod, entry.container) for entry in listed}) < 2:
        return True
    one_request = len({_base_request(device.request) for device in record.devices}) < 2
    return one_request and all(entry.driver == driver for entry in listed)
