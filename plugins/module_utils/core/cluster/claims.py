# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read claims from API objects: their devices, pods, nodes, shares, and the health of the devices. No side effects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from . import inventory
from .inventory import Json, Key

HEALTHY = "Healthy"
EXISTS = "Exists"
_POD_CLAIM = "resource.kubernetes.io/pod-claim-name"
_EXTENDED = "resource.kubernetes.io/extended-resource-claim"


def claim_facts(claim: Json, published: Mapping[Key, Json], pods: Mapping[tuple[str, str], Json]) -> dict[str, Any]:
    """Return the facts of a claim. ``published`` are devices from ``inventory``, ``pods`` the queried pods.

    Raises KeyError, TypeError, AttributeError for an object that is not a claim.
    """
    metadata, status = claim["metadata"], claim.get("status") or {}
    allocation = status.get("allocation") or {}
    statuses = {_status_key(one): one for one in status.get("devices") or ()}
    devices = [device_facts(one, published, statuses) for one in inventory.results(claim)]
    users = pods_of(claim)
    nodes = _selected_nodes(allocation.get("nodeSelector")) or [one["node"] for one in devices if one["node"]]
    health = [
        entry
        for name in users
        for entry in _device_health(pods.get((metadata["namespace"], name)), metadata["name"], name)
    ]
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "uid": metadata.get("uid", ""),
        "created": metadata.get("creationTimestamp", ""),
        "deleting": bool(metadata.get("deletionTimestamp")),
        "template": (metadata.get("annotations") or {}).get(_POD_CLAIM, ""),
        "extended_resource": (metadata.get("annotations") or {}).get(_EXTENDED) == "true",
        "device_classes": _classes(claim),
        "allocated": bool(allocation),
        "nodes": sorted(set(nodes)),
        "reserved_for": [
            {"resource": one.get("resource", ""), "name": one.get("name", ""), "uid": one.get("uid", "")}
            for one in status.get("reservedFor") or ()
        ],
        "pods": users,
        "devices": devices,
        "health": health,
        "healthy": all(entry["health"] == HEALTHY for entry in health) and not any(one["taints"] for one in devices),
    }


def facts_by(
    found: Iterable[Json], devices: Iterable[Json], pods: Mapping[tuple[str, str], Json]
) -> list[dict[str, Any]]:
    """Return the facts of each claim. ``devices`` are the published devices, ``pods`` the queried pods."""
    by_key = {(one["driver"], one["pool"], one["name"]): one for one in devices}
    return [claim_facts(claim, by_key, pods) for claim in found]


def device_facts(result: Json, published: Mapping[Key, Json], statuses: Mapping[Any, Json]) -> dict[str, Any]:
    """Return the facts of one device of a claim. An unpublished device has no node, type, and product."""
    driver, pool, name = key = inventory.key_of(result)
    device = published.get(key, {})
    status = statuses.get((*key, str(result.get("shareID") or "")), {})
    network = status.get("networkData") or {}
    return {
        "request": result.get("request", ""),
        "driver": driver,
        "pool": pool,
        "name": name,
        "node": device.get("node", ""),
        "published": key in published,
        "type": device.get("type", ""),
        "product": device.get("product", ""),
        "profile": device.get("profile", ""),
        "uuid": device.get("uuid", ""),
        "taints": device.get("taints", []),
        "share_id": str(result.get("shareID") or ""),
        "consumed": {
            str(each): value["value"] if isinstance(value, Mapping) else str(value)
            for each, value in (result.get("consumedCapacity") or {}).items()
        },
        "admin_access": bool(result.get("adminAccess")),
        "conditions": [
            {each: str(one.get(each, "")) for each in ("type", "status", "reason", "message")}
            for one in status.get("conditions") or ()
        ],
        "addresses": [str(each) for each in network.get("ips") or ()],
    }


def pods_of(claim: Json) -> list[str]:
    """Return the names of the pods that a claim is reserved for."""
    return [
        str(one["name"])
        for one in (claim.get("status") or {}).get("reservedFor") or ()
        if one.get("resource") == "pods"
    ]


def holders(claims: Iterable[Json], selector: Mapping[str, str], taint: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the claims with a device that a rule selects, and whether they tolerate its taint on every such device.

    An empty selector selects everything. ``pods`` are the pods that a claim is reserved for; without pods no wait is
    necessary. ``extended_resource`` says whether the scheduler created the claim for a pod with devices in its limits.
    """
    found = []
    for claim in claims:
        mine = [
            one for one in inventory.results(claim) if all(one.get(key) == value for key, value in selector.items())
        ]
        if mine:
            found.append(
                {
                    "namespace": claim["metadata"]["namespace"],
                    "name": claim["metadata"]["name"],
                    "devices": ["/".join(inventory.key_of(one)) for one in mine],
                    "pods": pods_of(claim),
                    "extended_resource": (claim["metadata"].get("annotations") or {}).get(_EXTENDED) == "true",
                    "tolerates": all(
                        any(tolerates(each, taint) for each in one.get("tolerations") or ()) for one in mine
                    ),
                }
            )
    return sorted(found, key=lambda one: (str(one["namespace"]), str(one["name"])))


def tolerates(toleration: Json, taint: Mapping[str, str]) -> bool:
    """Return whether a claim's toleration lets its pods stay permanently; False if it has tolerationSeconds."""
    if toleration.get("tolerationSeconds") is not None:
        return False
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("operator") == EXISTS:
        return not toleration.get("key") or toleration["key"] == taint["key"]
    return toleration.get("key") == taint["key"] and (toleration.get("value") or "") == taint.get("value", "")


def select(
    found: Iterable[dict[str, Any]],
    *,
    names: Sequence[str] = (),
    nodes: Collection[str] = (),
    drivers: Collection[str] = (),
    devices: Sequence[str] = (),
    pods: Sequence[str] = (),
    device_classes: Collection[str] = (),
    allocated: bool | None = None,
    healthy: bool | None = None,
) -> list[dict[str, Any]]:
    """Return the facts of the claims that meet every given filter. Names of claims, pods, and devices are patterns."""

    def meets(one: dict[str, Any]) -> bool:
        return (
            (not names or _any_fits([one["name"]], names))
            and (not nodes or bool(set(nodes) & set(one["nodes"])))
            and (not drivers or any(device["driver"] in drivers for device in one["devices"]))
            and (
                not devices
                or _any_fits((each for device in one["devices"] for each in _selectable_names(device)), devices)
            )
            and (not pods or _any_fits(one["pods"], pods))
            and (not device_classes or bool(set(device_classes) & set(one["device_classes"])))
            and (allocated is None or one["allocated"] == allocated)
            and (healthy is None or one["healthy"] == healthy)
        )

    return sorted((one for one in found if meets(one)), key=lambda one: (str(one["namespace"]), str(one["name"])))


def _selectable_names(device: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names by which a device can be selected: its name, its pool and name, and its UUID."""
    return (device["name"], f"{device['pool']}/{device['name']}", device["uuid"])


def _any_fits(texts: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(text, pattern) for text in texts for pattern in patterns)


def _classes(claim: Json) -> list[str]:
    """Return the DeviceClasses in the requests of a claim, without duplicates, in order."""
    requests = ((claim.get("spec") or {}).get("devices") or {}).get("requests") or ()
    named = [
        part.get("deviceClassName")
        for request in requests
        # In v1beta1 the fields of ``exactly`` are at the same level as the name.
        for part in (request, request.get("exactly") or {}, *(request.get("firstAvailable") or ()))
    ]
    return list(dict.fromkeys(str(each) for each in named if each))


def _selected_nodes(selector: Json | None) -> list[str]:
    """Return the node to which an allocation is bound; empty if it is not bound to a single node name."""
    terms = (selector or {}).get("nodeSelectorTerms") or []
    if len(terms) != 1:
        return []
    for each in terms[0].get("matchFields") or ():
        if each.get("key") == "metadata.name" and each.get("operator") == "In":
            return [str(value) for value in each.get("values") or ()]
    return []


def _status_key(status: Json) -> tuple[str, str, str, str]:
    return (str(status["driver"]), str(status["pool"]), str(status["device"]), str(status.get("shareID") or ""))


def _device_health(pod: Json | None, claim: str, name: str) -> list[dict[str, str]]:
    """Return the health of a claim's devices from a pod's status, by container."""
    if pod is None:
        return []
    pod_names = _names_in_pod(pod, claim)
    status = pod.get("status") or {}
    found = []
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            for resource in container.get("allocatedResourcesStatus") or ():
                pod_name, _slash, request = str(resource.get("name", "")).removeprefix("claim:").partition("/")
                if str(resource.get("name", "")).startswith("claim:") and pod_name in pod_names:
                    found += [
                        {
                            "pod": name,
                            "container": str(container.get("name", "")),
                            "request": request,
                            "resource": str(one.get("resourceID", "")),
                            "health": str(one.get("health") or "Unknown"),
                            "message": str(one.get("message") or ""),
                        }
                        for one in resource.get("resources") or ()
                    ]
    return found


def _names_in_pod(pod: Json, claim: str) -> set[str]:
    """Return a pod's names for a claim: those of claims that its spec names, and those of claims generated for it."""
    words = {
        str(one["name"])
        for one in (pod.get("spec") or {}).get("resourceClaims") or ()
        if one.get("resourceClaimName") == claim
    }
    words |= {
        str(one["name"])
        for one in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
        if one.get("resourceClaimName") == claim
    }
    return words
