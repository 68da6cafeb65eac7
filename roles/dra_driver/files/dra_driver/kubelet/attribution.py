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
            _add(found, container["name"], names.get(each["name"]), each.get("request"))
    extended = status.get("extendedResourceClaimStatus") or {}
    for each in extended.get("requestMappings") or ():
        _add(found, each["containerName"], extended.get("resourceClaimName"), each["requestName"])
    return {key: None if requests is None else frozenset(requests) for key, requests in found.items()}


def _add(found: dict[tuple[str, str], set[str] | None], container: str, claim: str | None, request: str | None) -> None:
    if not claim:
        return
    known = found.setdefault((container, claim), set())
    if not request:
        found[container, claim] = None
    elif known is not None:
        known.add(_base(request))


def _base(request: str) -> str:
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
        records: Claims; devices of claims that have no record are left out.
        containers: The kubelet's list, of all drivers.
        pods: The requests by namespace and name of those pods that were read. A pod that is missing here gets an empty container for
            devices that more than one container can have.

    """
    found: dict[tuple[str, str, str, int], Assignment] = {}
    for record, listed in _by_claim(records, containers):
        exact = _is_exact(driver, record, listed)
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
                if not exact and requests is None:
                    container = ""
                elif not exact and requests is not None:
                    wanted = requests.get((container, record.name), frozenset())
                    if wanted is not None and _base(device.request) not in wanted:
                        continue
                assignment = Assignment(entry.namespace, entry.pod, container, record, device)
                found.setdefault((entry.namespace, entry.pod, container, id(device)), assignment)
    return tuple(found.values())


def ambiguous_pods(
    driver: str, records: Iterable[ClaimRecord], containers: Iterable[ContainerDevice]
) -> frozenset[tuple[str, str]]:
    """Return namespace and name of the pods that have to be read to know which of their containers has which device."""
    return frozenset(
        (entry.namespace, entry.pod)
        for record, listed in _by_claim(records, containers)
        if not _is_exact(driver, record, listed)
        for entry in listed
    )


def _by_claim(
    records: Iterable[ClaimRecord], containers: Iterable[ContainerDevice]
) -> Iterator[tuple[ClaimRecord, list[ContainerDevice]]]:
    listed: dict[tuple[str, str], list[ContainerDevice]] = {}
    for entry in containers:
        listed.setdefault((entry.namespace, entry.claim), []).append(entry)
    for record in records:
        yield record, listed.get((record.namespace, record.name), [])


def _is_exact(driver: str, record: ClaimRecord, listed: list[ContainerDevice]) -> bool:
    """Return whether the kubelet's list attributes each device to a container.

    A claim with devices of another driver has a request that the record does not contain.
    """
    if len({(entry.namespace, entry.pod, entry.container) for entry in listed}) < 2:
        return True
    one_request = len({_base(device.request) for device in record.devices}) < 2
    return one_request and all(entry.driver == driver for entry in listed)
