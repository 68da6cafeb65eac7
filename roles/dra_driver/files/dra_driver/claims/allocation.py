# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parse a ResourceClaim of the API server into the devices that the driver must prepare.

Facts: resource.k8s.io/v1 types; ``status.allocation`` has the same form in v1beta1 and v1beta2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.dra.consumable_capacity import consumed
from ..core.dra.device_metadata import POD_CLAIM_ANNOTATION, check_pod_claim
from ..core.errors import AcceleratorError
from ..core.schema import value_text
from .store.records import ClaimReference

FROM_CLASS = "FromClass"
FROM_CLAIM = "FromClaim"
#: The condition of a prepared device in a claim's status.
READY_CONDITION = "Ready"
#: Keys of the device's data in the status: whether its partition was created for the claim, the identity of the store
#: with the claim, and the fabric partition that the driver activated for the claim.
CREATED_KEY = "madeForClaim"
STORE_KEY = "driverStore"
ACTIVATED_KEY = "activatedFabricPartition"


class ClaimError(AcceleratorError):
    """A claim cannot be prepared in its current form."""

    default_code = "claim-refused"


@dataclass(frozen=True)
class OpaqueConfig:
    """One configuration for this driver. ``source`` is FromClass or FromClaim.

    ``requests`` are the requests that it names; empty for all requests.
    """

    source: str
    requests: tuple[str, ...]
    parameters: Mapping[str, Any]

    def applies_to(self, request: str) -> bool:
        """Return whether it applies to a request, given as ``request`` or ``request/subrequest``."""
        return _names_request(self.requests, request)


@dataclass(frozen=True)
class PublishedDeviceStatus:
    """The data of a prepared device in a claim's status.

    ``created_partition`` is the UUID of the partition that was created for the claim, or "". ``store`` is the identity of the
    store with the claim; earlier releases wrote "". ``fabric_partition`` is the fabric partition that the driver activated for
    the claim.
    """

    created_partition: str = ""
    store: str = ""
    fabric_partition: int | None = None


@dataclass(frozen=True)
class AllocatedDevice:
    """One device of the allocation. ``configs`` are sorted from lowest to highest precedence.

    ``consumed`` is the claim's part of each capacity of a device that claims share. ``published`` is the device's data in
    the claim's status, None if the status does not show that it was prepared.
    """

    request: str
    pool: str
    device: str
    share_id: str
    admin: bool
    configs: tuple[OpaqueConfig, ...]
    consumed: Mapping[str, int] = field(default_factory=dict)
    published: PublishedDeviceStatus | None = None

    @property
    def created_partition(self) -> str:
        """Return the UUID of the partition that was created for the claim, according to the claim's status, or ""."""
        return self.published.created_partition if self.published is not None else ""


@dataclass(frozen=True)
class Allocation:
    """The devices of this driver that are allocated to one claim."""

    claim: ClaimReference
    devices: tuple[AllocatedDevice, ...]
    pod_claim: str = ""

    @property
    def was_prepared(self) -> bool:
        """Return whether the claim's status shows all devices as prepared, now or earlier for the same allocation."""
        return bool(self.devices) and all(device.published is not None for device in self.devices)

    @property
    def published_fabric_partition(self) -> int | None:
        """Return the fabric partition that the driver activated for the claim, from the claim's status, or None."""
        published = (each.published.fabric_partition for each in self.devices if each.published is not None)
        return next((number for number in published if number is not None), None)

    def is_from_store(self, store: str) -> bool:
        """Return whether all devices' data in the status is from the store with this identity."""
        return bool(self.devices) and all(
            device.published is not None and device.published.store == store for device in self.devices
        )


def decode_allocation(claim: Mapping[str, Any], reference: ClaimReference, driver: str) -> Allocation:
    """Parse a claim's allocation, without results and configurations of other drivers.

    Raises ClaimError if the claim is not the requested one, is not allocated, or cannot be parsed.
    """
    uid = claim.get("metadata", {}).get("uid", "")
    if uid != reference.uid:
        raise ClaimError(
            f"Claim {reference.describe()} was replaced: the kubelet asks for UID {reference.uid}, the API server has {uid}",
            hint="Delete the pod, so that it is scheduled with the new claim.",
            code="claim-replaced",
        )
    allocation = (claim.get("status") or {}).get("allocation")
    if not allocation:
        raise ClaimError(
            f"Claim {reference.describe()} is not allocated",
            hint="The scheduler allocates it with the pod; delete the pod if it was bound to this node by hand.",
            code="claim-not-allocated",
        )
    content = allocation.get("devices") or {}
    try:
        configs = _configs(_with_request_names(claim, content), driver, reference)
        published = prepared_device_statuses(claim, driver)
        devices = tuple(
            AllocatedDevice(
                request=str(result["request"]),
                pool=str(result["pool"]),
                device=str(result["device"]),
                share_id=str(result.get("shareID") or ""),
                admin=bool(result.get("adminAccess")),
                configs=tuple(config for config in configs if config.applies_to(str(result["request"]))),
                consumed=consumed(result.get("consumedCapacity") or {}) if result.get("shareID") else {},
                published=published.get(_device_key(result)),
            )
            for result in content.get("results") or ()
            if result["driver"] == driver
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ClaimError(f"The allocation of claim {reference.describe()} cannot be read: {error!r}") from error
    pod_claim = str((claim.get("metadata", {}).get("annotations") or {}).get(POD_CLAIM_ANNOTATION, ""))
    try:
        check_pod_claim(pod_claim)
    except ValueError as error:
        raise ClaimError(
            f"Claim {reference.describe()} cannot be prepared: {error}",
            hint="Remove the annotation. Kubernetes sets it on claims that it creates from a template.",
            code="claim-annotation",
        ) from error
    return Allocation(claim=reference, devices=devices, pod_claim=pod_claim)


def prepared_device_statuses(
    claim: Mapping[str, Any], driver: str
) -> Mapping[tuple[str, str, str], PublishedDeviceStatus]:
    """Return the devices of a driver that a claim's status shows as prepared, with their data.

    Invalid data in the status is ignored, because other programs can write there.
    """
    found = {}
    for entry in (claim.get("status") or {}).get("devices") or ():
        conditions = entry.get("conditions") or ()
        if entry.get("driver") == driver and any(
            each.get("type") == READY_CONDITION and each.get("status") == "True" for each in conditions
        ):
            data = entry.get("data")
            data = data if isinstance(data, dict) else {}
            created_partition = data.get("uuid") if data.get(CREATED_KEY) is True else ""
            store = data.get(STORE_KEY)
            number = data.get(ACTIVATED_KEY)
            found[_device_key(entry)] = PublishedDeviceStatus(
                created_partition=created_partition if isinstance(created_partition, str) else "",
                store=store if isinstance(store, str) else "",
                fabric_partition=number if isinstance(number, int) and not isinstance(number, bool) else None,
            )
    return found


def _device_key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return pool, device name, and share ID."""
    return (str(entry.get("pool")), str(entry.get("device")), str(entry.get("shareID") or ""))


def _names_request(names: Sequence[str], request: str) -> bool:
    """Return whether a configuration with these request names applies to a request or subrequest. No names mean all requests."""
    return not names or request in names or request.partition("/")[0] in names


def _with_request_names(claim: Mapping[str, Any], content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the configurations of an allocation, each with the names of its requests.

    Facts: if a configuration names all existing requests, the scheduler of 1.37 drops the names
    (``structured/internal`` of k8s.io/dynamic-resource-allocation). This driver needs them: a configuration that names a
    request must fit its device, and one for all requests may skip devices. So the names are read from the claim's spec,
    which has the same configurations in the same order, and also those of alternatives that were not chosen. The
    configurations of a class have no names, and apply to the requests of the class.
    """
    entries: list[Mapping[str, Any]] = list(content.get("config") or ())
    all_requests = sorted({str(result["request"]) for result in content.get("results") or ()})
    from_spec = [
        each
        for each in ((claim.get("spec") or {}).get("devices") or {}).get("config") or ()
        if any(_names_request(each.get("requests") or (), request) for request in all_requests)
    ]
    of_claim = [each for each in entries if each.get("source") != FROM_CLASS]
    if [each.get("opaque") for each in of_claim] != [each.get("opaque") for each in from_spec]:
        from_spec = of_claim
    remaining = iter(from_spec)
    return [
        {**each, "requests": each.get("requests") or all_requests}
        if each.get("source") == FROM_CLASS
        else {**each, "requests": next(remaining).get("requests") or ()}
        for each in entries
    ]


def _configs(entries: Sequence[Mapping[str, Any]], driver: str, reference: ClaimReference) -> tuple[OpaqueConfig, ...]:
    found: dict[str, list[OpaqueConfig]] = {FROM_CLASS: [], FROM_CLAIM: []}
    for entry in entries:
        source = str(entry.get("source") or FROM_CLAIM)
        opaque = entry.get("opaque")
        if source not in found or not opaque:
            raise ClaimError(
                f"Claim {reference.describe()} has a configuration from {source} that is not opaque",
                hint="This driver knows opaque configurations from a class or a claim; upgrade it for newer kinds.",
                code="config-refused",
            )
        if opaque["driver"] != driver:
            continue
        parameters = opaque.get("parameters")
        if not isinstance(parameters, dict):
            raise ClaimError(
                f"The configuration for {driver} in claim {reference.describe()} is {value_text(parameters)}; expected an object",
                code="config-refused",
            )
        requests = tuple(str(request) for request in entry.get("requests") or ())
        found[source].append(OpaqueConfig(source=source, requests=requests, parameters=parameters))
    return (*found[FROM_CLASS], *found[FROM_CLAIM])


def allocated_here(claim: Mapping[str, Any], uid: str, driver: str, pool: str) -> bool:
    """Return whether a claim from the API server has this UID and still has devices of this driver and pool."""
    if claim.get("metadata", {}).get("uid") != uid:
        return False
    content = ((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}
    return any(result.get("driver") == driver and result.get("pool") == pool for result in content.get("results") or ())
