# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Convert nodes to inventory hosts, with variables and groups by their devices. No side effects."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..core.cluster.inventory import Json, devices

WHOLE, ALL, NONE = "whole", "all", "none"
GROUP = "resource.k8s.io/"
#: Facts of a device that are omitted: they are long, and only the scheduler uses them.
_LEFT_OUT = ("draws",)
#: The host variables whose values become groups, with the term in the group names.
GROUPED = {
    "accelerator_drivers": "driver",
    "accelerator_types": "type",
    "accelerator_products": "product",
    "accelerator_profiles": "profile",
}
_DNS_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
EVERYONE, FREE, TAINTED = "accelerators", "free", "tainted"


def split_objects(documents: Iterable[Any]) -> tuple[list[Json], list[Json], list[Json]]:
    """Return the ResourceSlices, ResourceClaims, and Nodes among objects and lists of objects.

    Raises ValueError for anything other than an API object.
    """
    found: tuple[list[Json], list[Json], list[Json]] = ([], [], [])
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, Mapping):
            raise ValueError(f"found {str(document)[:60]!r}, expected objects of the API with a kind")  # noqa: TRY004
        kind, version = str(document.get("kind", "")), str(document.get("apiVersion", ""))
        items = document.get("items")
        if isinstance(items, list):
            # Items of a list from the API server have no kind and apiVersion.
            item_type = {"kind": kind[: -len("List")], "apiVersion": version} if kind not in ("", "List") else {}
            for objects, more in zip(found, split_objects({**item_type, **each} for each in items)):
                objects.extend(more)
        elif kind == "ResourceSlice" and version.startswith(GROUP):
            found[0].append(document)
        elif kind == "ResourceClaim" and version.startswith(GROUP):
            found[1].append(document)
        elif kind == "Node" and version == "v1":
            found[2].append(document)
        elif not kind:
            raise ValueError(f"found an object without a kind, with {', '.join(map(str, document)) or 'nothing in it'}")
    return found


def hosts(
    slices: Iterable[Json],
    claims: Iterable[Json] = (),
    nodes: Iterable[Json] = (),
    *,
    which: str = WHOLE,
    without: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the variables of each node with devices, by node name. With ``without``, also return nodes without devices.

    ``which`` selects the listed devices: WHOLE (without partitions), ALL, or NONE. Raises ValueError for other objects.
    """
    held: dict[str, list[dict[str, Any]]] = {}
    for device in devices(slices, claims):
        if device["node"]:
            held.setdefault(device["node"], []).append(device)
    known = {str(each["metadata"]["name"]): each for each in nodes}
    names = sorted({*held, *(known if without else ())})
    return {name: _variables(held.get(name, []), known.get(name), name, which) for name in names}


def _variables(held: list[dict[str, Any]], node: Json | None, name: str, which: str) -> dict[str, Any]:
    listed = [one for one in held if which == ALL or (which == WHOLE and one["whole"])]
    whole = [one for one in held if one["whole"]]
    return {
        "accelerators": [{key: value for key, value in one.items() if key not in _LEFT_OUT} for one in listed],
        **{variable: _values(held, word) for variable, word in GROUPED.items()},
        "accelerator_counts": dict(Counter(str(one["type"]) for one in whole)),
        "accelerator_available": dict(Counter(str(one["type"]) for one in whole if one["available"])),
        "accelerator_tainted": any(one["taints"] for one in held),
        "accelerator_node": _node(node, name),
    }


def _values(held: list[dict[str, Any]], word: str) -> list[str]:
    return sorted({str(one[word]) for one in held if one[word]})


def _node(node: Json | None, name: str) -> dict[str, Any]:
    status, metadata = (node or {}).get("status") or {}, (node or {}).get("metadata") or {}
    ready = [str(one["status"]) for one in status.get("conditions") or () if one.get("type") == "Ready"]
    return {
        "name": name,
        "ready": ready[0] if ready else "Unknown",
        "unschedulable": bool(((node or {}).get("spec") or {}).get("unschedulable")),
        "labels": dict(metadata.get("labels") or {}),
        "addresses": {str(one["type"]): str(one["address"]) for one in reversed(status.get("addresses") or ())},
    }


def is_address(kind: str, text: str) -> bool:
    """Return whether a Node address is usable as a host address: an IP address, or for other types a DNS name.

    The kubelet writes the addresses of its Node, and the API server does not validate them. An SSH client reads a host
    name that begins with a dash as an option.
    """
    if kind not in ("InternalIP", "ExternalIP"):
        return _DNS_NAME.fullmatch(text) is not None
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def groups(variables: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the groups of a host by its variables. The names are not sanitized for Ansible yet."""
    if not variables["accelerator_drivers"]:
        return []
    found = [f"{prefix}{word}_{value}" for variable, word in GROUPED.items() for value in variables[variable]]
    found += [f"{prefix}{FREE}"] if variables["accelerator_available"] else []
    found += [f"{prefix}{TAINTED}"] if variables["accelerator_tainted"] else []
    return [EVERYONE, *found]
