# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Convert devices and counters of the module's options to the API's format, and split them into slices. No side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..core import quantity
from ..core.dra.resource_slices import (
    COMBINED,
    MOST_COUNTER_SETS,
    MOST_DEVICES,
    MOST_DEVICES_WITH_COUNTERS,
    PoolSpec,
    SliceContent,
    validate_pool,
)
from ..core.errors import AcceleratorError

_API_NAMES = {
    "allow_multiple_allocations": "allowMultipleAllocations",
    "binding_conditions": "bindingConditions",
    "binding_failure_conditions": "bindingFailureConditions",
    "binds_to_node": "bindsToNode",
    "consumes_counters": "consumesCounters",
    "node_allocatable_resources": "nodeAllocatableResources",
}
#: Device fields that select nodes. They are rejected, because a list of devices that a node has reported must not offer
#: devices to other nodes. The options node_name, node_selector, and all_nodes select nodes for the whole pool.
_NODE_FIELDS = frozenset({"nodeName", "nodeSelector", "allNodes", "node_name", "node_selector", "all_nodes"})
_ATTRIBUTE_KINDS = ("string", "int", "bool", "version", "strings", "ints", "bools", "versions")


def _refuse(where: str, found: str, hint: str) -> NoReturn:
    raise AcceleratorError(f"{where}: {found}", hint=hint, code="invalid-devices")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(where, f"found {value!r}", "Expected a dictionary.")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        _refuse(where, f"found {value!r}", "Expected a list.")
    return value


def attribute(value: Any, where: str) -> dict[str, Any]:
    """Return an attribute in the API's format. The type of a plain string, integer, or boolean is detected.

    A version or a list is written as in the API: ``{"version": "1.2.3"}``. Raises AcceleratorError.
    """
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    if isinstance(value, str):
        return {"string": value}
    if isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _ATTRIBUTE_KINDS:
        return dict(value)
    return _refuse(
        where,
        f"found {value!r}",
        f"Expected a string, an integer, a boolean, or a dictionary with one of {', '.join(_ATTRIBUTE_KINDS)}.",
    )


def amount(value: Any, where: str) -> dict[str, Any]:
    """Return a capacity or counter in the API's format: ``{"value": QUANTITY}``. Raises AcceleratorError."""
    whole = dict(value) if isinstance(value, Mapping) else {"value": value}
    try:
        quantity.parse(whole.get("value"))  # type: ignore[arg-type]  # raises ValueError for other types
    except ValueError as error:
        _refuse(where, str(error), "Write for example 80Gi, 4 or 500m.")
    return {**whole, "value": str(whole["value"])}


def _amounts(values: Any, where: str) -> dict[str, dict[str, Any]]:
    return {name: amount(value, f"{where}.{name}") for name, value in _mapping(values, where).items()}


def device(raw: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a device in the API's format. Raises AcceleratorError with the device and the key."""
    name = raw.get("name")
    where = f"devices[{number}]"
    if not isinstance(name, str) or not name:
        _refuse(where, f"found the name {name!r}", "Set the name of each device to a DNS label.")
    where = f"Device {name} ({where})"
    if given := sorted(_NODE_FIELDS & set(raw)):
        _refuse(where, f"found {', '.join(given)}", "Set node_name, node_selector, or all_nodes for the whole pool.")
    whole = {_API_NAMES.get(key, key): value for key, value in raw.items() if value is not None}
    if "attributes" in whole:
        attributes = _mapping(whole["attributes"], f"{where}.attributes")
        whole["attributes"] = {key: attribute(value, f"{where}.attributes.{key}") for key, value in attributes.items()}
    if "capacity" in whole:
        whole["capacity"] = _amounts(whole["capacity"], f"{where}.capacity")
    if "consumesCounters" in whole:
        entries = _list(whole["consumesCounters"], f"{where}.consumesCounters")
        whole["consumesCounters"] = [
            counter_use(entry, f"{where}.consumesCounters[{place}]") for place, entry in enumerate(entries)
        ]
    return whole


def counter_use(raw: Any, where: str) -> dict[str, Any]:
    """Return a device's use of one counter set in the API's format. Raises AcceleratorError."""
    whole = {{"counter_set": "counterSet"}.get(key, key): value for key, value in _mapping(raw, where).items()}
    if not isinstance(whole.get("counterSet"), str):
        _refuse(where, "counterSet is missing", "Set the name of the counter set that the device consumes.")
    whole["counters"] = _amounts(whole.get("counters"), f"{where}.counters")
    return whole


def counter_set(raw: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a counter set in the API's format. Raises AcceleratorError."""
    where = f"shared_counters[{number}]"
    if not isinstance(raw.get("name"), str) or not raw["name"]:
        _refuse(where, f"found the name {raw.get('name')!r}", "Set the name of each counter set to a DNS label.")
    return {**raw, "counters": _amounts(raw.get("counters"), f"Counter set {raw['name']} ({where}).counters")}


def _counter_sets_of(one: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(entry["counterSet"] for entry in one.get("consumesCounters", ()))


def _limits_slice(one: Mapping[str, Any]) -> bool:
    """Return whether a device has fields with which the API allows fewer devices in a slice."""
    lists = any(kind.endswith("s") for value in one.get("attributes", {}).values() for kind in value)
    return bool(one.get("taints") or one.get("consumesCounters") or lists)


def _pieces(values: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(values[start : start + size]) for start in range(0, len(values), size)]


Piece = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def separate_pieces(devices: Sequence[dict[str, Any]], sets: Sequence[dict[str, Any]]) -> list[Piece]:
    """Split a pool into slices with either devices or counter sets, as from Kubernetes 1.35 on.

    The order of the devices is kept, because the scheduler allocates the first device that fits.
    """
    size = MOST_DEVICES_WITH_COUNTERS if any(_limits_slice(one) for one in devices) else MOST_DEVICES
    pieces: list[Piece] = [([], piece) for piece in _pieces(sets, MOST_COUNTER_SETS)]
    pieces += [(piece, []) for piece in _pieces(devices, size)]
    return pieces or [([], [])]


def combined_pieces(devices: Sequence[dict[str, Any]], sets: Sequence[dict[str, Any]]) -> list[Piece]:
    """Split a pool into slices in which counter sets are together with their devices, as up to Kubernetes 1.34.

    Raises AcceleratorError if devices that share counter sets are too many for one slice.
    """
    groups: list[tuple[set[str], list[dict[str, Any]]]] = []
    free: list[dict[str, Any]] = []
    for one in devices:
        names = set(_counter_sets_of(one))
        if not names:
            free.append(one)
            continue
        joined = [group for group in groups if group[0] & names]
        for group in joined:
            names |= group[0]
        members = [member for group in joined for member in group[1]]
        groups = [group for group in groups if group not in joined]
        groups.append((names, [*members, one]))
    order = {one["name"]: place for place, one in enumerate(devices)}
    pieces: list[Piece] = []
    for names, members in groups:
        if len(members) > MOST_DEVICES:
            _refuse(
                f"Counter sets {', '.join(sorted(names))}",
                f"{len(members)} devices use them",
                f"Kubernetes before 1.35 allows at most {MOST_DEVICES} devices in a slice with their counter sets.",
            )
        members.sort(key=lambda one: order[one["name"]])
        pieces.append((members, [one for one in sets if one["name"] in names]))
    used = {name for names, _members in groups for name in names}
    idle = [one for one in sets if one["name"] not in used]
    pieces += [([], piece) for piece in _pieces(idle, MOST_COUNTER_SETS)]
    pieces += [(piece, []) for piece in _pieces(free, MOST_DEVICES)]
    return pieces or [([], [])]


def node_selection(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes that can use the pool, as fields of a PoolSpec. Raises AcceleratorError unless exactly one option is set."""
    given = [key for key in ("node_name", "node_selector", "all_nodes") if params[key]]
    if len(given) != 1:
        raise AcceleratorError(
            f"Expected exactly one of node_name, node_selector, and all_nodes, found {' and '.join(given) if given else 'none'}",
            hint="Set one of them to the nodes that can use the devices.",
            code="invalid-node-selection",
        )
    selector = params["node_selector"]
    if selector:
        terms = selector.get("nodeSelectorTerms")
        if not isinstance(terms, list) or len(terms) != 1:
            raise AcceleratorError(
                f"node_selector has {len(terms) if isinstance(terms, list) else 'no'} nodeSelectorTerms, "
                "expected exactly one",
                hint="Write one term. All of its expressions must match.",
                code="invalid-node-selection",
            )
    return {
        "node_name": params["node_name"] or "",
        "node_selector": selector or None,
        "all_nodes": params["all_nodes"],
    }


def pool_spec(params: Mapping[str, Any], pool: str, layout: str) -> PoolSpec:
    """Return the pool of the module's options, split into slices. Raises AcceleratorError."""
    devices = [device(raw, number) for number, raw in enumerate(params["devices"])]
    sets = [counter_set(raw, number) for number, raw in enumerate(params["shared_counters"])]
    pieces = combined_pieces(devices, sets) if layout == COMBINED else separate_pieces(devices, sets)
    slices = tuple(SliceContent(tuple(members), tuple(counters)) for members, counters in pieces)
    spec = PoolSpec(params["driver"], pool, slices=slices, **node_selection(params))
    try:
        validate_pool(spec, layout)
    except ValueError as error:
        raise AcceleratorError(f"{error}. Nothing was changed", code="invalid-devices") from error
    return spec
