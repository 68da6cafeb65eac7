# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the devices from ResourceSlices and their free capacity from ResourceClaims, and select devices by criteria.

No side effects. Source: k8s.io/api/resource/v1/types.go, and the consumption of counters (KEP-4815) and capacities
(KEP-5075) in the scheduler's allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Union

from .. import quantity
from ..dra.device_lookup import attribute_of

Json = Mapping[str, Any]
#: Driver, pool, and name of a device.
Key = tuple[str, str, str]
Number = Union[int, float]
#: Taints with these effects prevent allocations to claims that do not tolerate them.
BLOCKING = ("NoSchedule", "NoExecute")
#: Criteria that are text patterns.
TEXTS = ("name", "driver", "node", "pool", "type", "product", "profile", "uuid")
#: Boolean criteria.
FLAGS = ("available", "whole", "shared", "tainted", "held")
AMOUNTS = ("free", "capacity")
CRITERIA = (*TEXTS, *FLAGS, *AMOUNTS, "attributes")
MEMORY = "memory"
#: Amounts by counter set and counter.
CounterAmounts = dict[str, dict[str, Fraction]]


@dataclass
class _Published:
    """A device of a slice, with the counters of its pool or, on Kubernetes 1.34, of its slice."""

    spec: Json
    device: Json
    remaining: CounterAmounts
    totals: CounterAmounts
    complete: bool
    held: list[Json] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return (str(self.spec["driver"]), str(self.spec["pool"]["name"]), str(self.device["name"]))

    @property
    def consumes(self) -> dict[str, dict[str, Fraction]]:
        """Return the device's consumed amounts, by counter set."""
        return {
            str(each["counterSet"]): _amounts(each.get("counters"))
            for each in self.device.get("consumesCounters") or ()
        }


def devices(slices: Iterable[Json], claims: Iterable[Json] = ()) -> list[dict[str, Any]]:
    """Return all devices in ResourceSlices, ordered by pool and slice, with their free capacity.

    Only the newest generation of a pool counts. Raises ValueError for objects of another kind.
    """
    try:
        found = _published(slices)
        holders = _holders(claims)
        for each in found:
            each.held = holders.get(each.key, [])
            if each.held:
                for name, counters in each.consumes.items():
                    left = each.remaining.get(name, {})
                    for counter, amount in counters.items():
                        left[counter] = left.get(counter, Fraction(0)) - amount
        return [_facts(each) for each in found]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"found something that is no ResourceSlice or ResourceClaim ({type(error).__name__}: {error})"
        ) from error


def results(claim: Json) -> list[Json]:
    """Return the allocation results of a claim, one per device."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return list((allocation.get("devices") or {}).get("results") or ())


def key_of(result: Json) -> Key:
    """Return the key of the device in an allocation result."""
    return (str(result["driver"]), str(result["pool"]), str(result["device"]))


def name_of(item: Json) -> str:
    """Return an object's namespace and name, separated by a slash."""
    metadata = item["metadata"]
    return f"{metadata.get('namespace', 'default')}/{metadata['name']}"


def _holders(claims: Iterable[Json]) -> dict[Key, list[Json]]:
    """Return the allocation results by device. Results with admin access are omitted, because they consume nothing."""
    found: dict[Key, list[Json]] = {}
    for claim in claims:
        for result in results(claim):
            if not result.get("adminAccess"):
                found.setdefault(key_of(result), []).append({**result, "claim": name_of(claim)})
    return found


def _published(slices: Iterable[Json]) -> list[_Published]:
    pools: dict[tuple[str, str], list[Json]] = {}
    for each in slices:
        pools.setdefault((str(each["spec"]["driver"]), str(each["spec"]["pool"]["name"])), []).append(each)
    found = []
    for _pool, members in sorted(pools.items()):
        newest = max(int(each["spec"]["pool"].get("generation", 0)) for each in members)
        current = [each for each in members if int(each["spec"]["pool"].get("generation", 0)) == newest]
        current.sort(key=lambda each: str(each["metadata"]["name"]))
        complete = len(current) >= int(current[0]["spec"]["pool"].get("resourceSliceCount", 1))
        pool_room, pool_totals = _counter_amounts(current), _counter_amounts(current)
        for each in current:
            spec = each["spec"]
            # Up to 1.34 counter sets are in the same slice as their devices, and their names are unique only in the
            # slice.
            has_own_counters = bool(spec.get("sharedCounters")) and bool(spec.get("devices"))
            room, totals = (
                (_counter_amounts([each]), _counter_amounts([each])) if has_own_counters else (pool_room, pool_totals)
            )
            for device in spec.get("devices") or ():
                # In v1beta1 all fields except the name are one level below.
                content = {"name": device["name"], **device["basic"]} if "basic" in device else device
                found.append(_Published(spec, content, room, totals, complete))
    return found


def _counter_amounts(slices: Iterable[Json]) -> CounterAmounts:
    return {
        str(each["name"]): _amounts(each.get("counters"))
        for one in slices
        for each in one["spec"].get("sharedCounters") or ()
    }


def _amounts(values: Json | None) -> dict[str, Fraction]:
    return {
        str(name): quantity.parse(value["value"] if isinstance(value, Mapping) else value)
        for name, value in (values or {}).items()
    }


def _facts(each: _Published) -> dict[str, Any]:
    device, driver = each.device, str(each.spec["driver"])
    attributes = {str(name): _untyped_value(value) for name, value in (device.get("attributes") or {}).items()}
    capacity = _amounts(device.get("capacity"))
    taints = [{key: str(one.get(key, "")) for key in ("key", "value", "effect")} for one in device.get("taints") or ()]
    shared = bool(device.get("allowMultipleAllocations"))
    left = _left(each, capacity, shared)
    available = (
        each.complete
        and not any(one["effect"] in BLOCKING for one in taints)
        and (shared or not each.held)
        and (bool(each.held) or _fits(each))
        and all(left[name] >= _smallest_request(device["capacity"][name]) for name in capacity)
    )

    def text(*names: str) -> str:
        for name in names:
            value = attribute_of(attributes, driver, name)
            if isinstance(value, str):
                return value
        return ""

    return {
        "driver": driver,
        "pool": str(each.spec["pool"]["name"]),
        "node": str(device.get("nodeName") or each.spec.get("nodeName") or ""),
        "name": str(device["name"]),
        "type": text("type"),
        "product": text("productName", "model"),
        "profile": text("profile", "template"),
        "uuid": text("uuid"),
        "attributes": attributes,
        "capacity": {name: _number(amount) for name, amount in capacity.items()},
        "free": {name: _number(left[name] if available else Fraction(0)) for name in capacity},
        "available": available,
        "shared": shared,
        "whole": _is_whole(each),
        "taints": taints,
        "claims": sorted({str(one["claim"]) for one in each.held}),
        "draws": {
            name: {
                counter: {
                    "takes": _number(amount),
                    "left": _number(each.remaining.get(name, {}).get(counter, Fraction(0))),
                }
                for counter, amount in counters.items()
            }
            for name, counters in each.consumes.items()
        },
    }


def _left(each: _Published, capacity: Mapping[str, Fraction], shared: bool) -> dict[str, Fraction]:
    """Return the unallocated amount of each capacity; 0 for a device that one claim uses exclusively."""
    if not shared:
        return {name: Fraction(0) if each.held else total for name, total in capacity.items()}
    left = dict(capacity)
    for result in each.held:
        consumed = _amounts(result.get("consumedCapacity"))
        for name, total in capacity.items():
            # A claim without an amount for a capacity consumes all of it.
            left[name] -= consumed.get(name, total)
    return {name: max(amount, Fraction(0)) for name, amount in left.items()}


def _smallest_request(value: Any) -> Fraction:
    """Return the smallest amount of a capacity that a claim can get."""
    policy = (value.get("requestPolicy") if isinstance(value, Mapping) else None) or {}
    if policy.get("validRange"):
        return quantity.parse(policy["validRange"]["min"])
    if policy.get("validValues"):
        return min(quantity.parse(each) for each in policy["validValues"])
    return Fraction(0)


def _fits(each: _Published) -> bool:
    return all(
        each.remaining.get(name, {}).get(counter, Fraction(0)) >= amount
        for name, counters in each.consumes.items()
        for counter, amount in counters.items()
    )


def _is_whole(each: _Published) -> bool:
    """Return whether it consumes no counters, or a complete counter set, of which other devices are parts."""
    consumes = each.consumes
    return not consumes or any(
        name in each.totals
        and all(counters.get(counter, Fraction(0)) >= total for counter, total in each.totals[name].items())
        for name, counters in consumes.items()
    )


def _untyped_value(value: Any) -> Any:
    """Return an attribute's value without its type name."""
    if isinstance(value, Mapping):
        return next(iter(value.values()), None)
    return value


def _number(value: Fraction) -> Number:
    return int(value) if value.denominator == 1 else float(value)


def select(found: Iterable[Json], **criteria: Any) -> list[Json]:
    """Return the devices that meet all criteria, in the given order. Raises ValueError for unknown criteria."""
    checked = _check_criteria(criteria)
    return [each for each in found if _meets(each, checked)]


def count_allocatable_together(found: Sequence[Json]) -> int:
    """Return how many of these devices can be allocated at the same time, in order, by first fit.

    Devices that consume the same counters can exclude each other.
    """
    room: dict[tuple[str, str, str, str], Fraction] = {}
    count = 0
    for each in found:
        if not each.get("available"):
            continue
        takes: dict[tuple[str, str, str, str], Fraction] = {}
        for name, counters in (each.get("draws") or {}).items():
            for counter, amount in counters.items():
                place = (str(each["driver"]), str(each["pool"]), str(name), str(counter))
                room.setdefault(place, _exact(amount["left"]))
                takes[place] = _exact(amount["takes"])
        # Claims on a shared device have already consumed its counters.
        if each.get("claims") or all(room[place] >= amount for place, amount in takes.items()):
            count += 1
            if not each.get("claims"):
                for place, amount in takes.items():
                    room[place] -= amount
    return count


def has_devices(found: Iterable[Json], count: int = 1, **criteria: Any) -> bool:
    """Return whether at least ``count`` devices meet the criteria.

    With the criteria ``free`` or ``available``, the devices must also be allocatable at the same time.
    """
    matching = select(found, **criteria)
    at_once = criteria.get("free") is not None or criteria.get("available") is True
    return (count_allocatable_together(matching) if at_once else len(matching)) >= count


def nodes_with(found: Iterable[Json], count: int = 1, **criteria: Any) -> list[str]:
    """Return the names of the nodes with at least ``count`` devices that meet the criteria, sorted."""
    by_node: dict[str, list[Json]] = {}
    for each in select(found, **criteria):
        if each.get("node"):
            by_node.setdefault(str(each["node"]), []).append(each)
    return sorted(node for node, matching in by_node.items() if has_devices(matching, count, **criteria))


def _exact(value: Any) -> Fraction:
    return Fraction(value) if isinstance(value, (int, float)) else quantity.parse(value)


def _check_criteria(criteria: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(criteria) - set(CRITERIA))
    if unknown:
        raise ValueError(f"found the criteria {', '.join(unknown)}, expected some of {', '.join(CRITERIA)}")
    given = {name: value for name, value in criteria.items() if value is not None}
    for name in AMOUNTS:
        if name in given:
            amounts = given[name] if isinstance(given[name], Mapping) else {MEMORY: given[name]}
            given[name] = {str(each): quantity.parse(amount) for each, amount in amounts.items()}
    for name in TEXTS:
        if name in given:
            patterns = given[name] if isinstance(given[name], (list, tuple)) else [given[name]]
            if not all(isinstance(pattern, str) for pattern in patterns):
                raise ValueError(f"found {given[name]!r} for {name}, expected a pattern or a list of patterns")
            given[name] = patterns
    for name in FLAGS:
        if not isinstance(given.get(name, False), bool):
            raise ValueError(f"found {given[name]!r} for {name}, expected true or false")  # noqa: TRY004
    if not isinstance(given.get("attributes", {}), Mapping):
        raise ValueError(f"found {given['attributes']!r} for attributes, expected a dictionary")  # noqa: TRY004
    return given


def _meets(device: Json, criteria: Mapping[str, Any]) -> bool:
    return all(_meets_one(device, name, value) for name, value in criteria.items())


def _meets_one(device: Json, name: str, value: Any) -> bool:
    if name in TEXTS:
        return any(fnmatchcase(str(device.get(name, "")), pattern) for pattern in value)
    if name in AMOUNTS:
        amounts = device.get(name) or {}
        return all(each in amounts and _exact(amounts[each]) >= least for each, least in value.items())
    if name == "attributes":
        attributes, driver = device.get("attributes") or {}, str(device.get("driver"))
        return all(attribute_of(attributes, driver, each) == one for each, one in value.items())
    if name == "tainted":
        return bool(device.get("taints")) is value
    if name == "held":
        return bool(device.get("claims")) is value
    return bool(device.get(name)) is value
