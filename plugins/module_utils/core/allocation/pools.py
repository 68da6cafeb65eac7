# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the pools that a node can use, in the scheduler's order of devices. No side effects.

Source: k8s.io/dynamic-resource-allocation/structured (gathering of pools) and resourceslice/tracker (taint rules), 1.34
to 1.37.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from ..dra.device_lookup import selects
from .nodes import reaches
from .objects import Device, Json, Pool, amounts, name_of

_PoolId = tuple[str, str]


class Inventory:
    """All slices, with the taints of all rules, for queries by node."""

    def __init__(self, slices: Iterable[Json], rules: Iterable[Json] = ()) -> None:
        self._rules = sorted(rules, key=lambda each: str(each["metadata"]["name"]))
        self._of_pool: dict[_PoolId, list[Json]] = {}
        self._of_node: dict[str, list[Json]] = {}
        self._of_many: list[Json] = []
        for each in slices:
            spec = each["spec"]
            self._of_pool.setdefault(_pool_id(each), []).append(each)
            if spec.get("nodeName"):
                self._of_node.setdefault(str(spec["nodeName"]), []).append(each)
            else:
                self._of_many.append(each)

    def drivers(self) -> set[str]:
        """Return the drivers with slices."""
        return {driver for driver, _pool in self._of_pool}

    def reaches(self, node: Json) -> bool:
        """Return whether a node may have access to any pool, without a check of selectors."""
        return bool(self._of_many) or str(node["metadata"]["name"]) in self._of_node

    def pools(self, node: Json) -> list[Pool]:
        """Return the pools of a node, sorted by driver and name, with pools with binding conditions last."""
        seen: dict[_PoolId, list[Json]] = {}
        for each in (*self._of_node.get(str(node["metadata"]["name"]), ()), *self._of_many):
            if _is_for(each, node):
                _newest_only(seen.setdefault(_pool_id(each), []), each)
        found = [pool for name, members in seen.items() if (pool := self._pool(name, members)) is not None]
        return sorted(found, key=lambda pool: (_waits_for_binding(pool), pool.driver, pool.name))

    def _pool(self, name: _PoolId, members: list[Json]) -> Pool | None:
        generation, count = _generation(members[0]), int(members[0]["spec"]["pool"].get("resourceSliceCount", 1))
        everything = members
        if len(members) != count:
            published = self._of_pool[name]
            if any(_generation(each) > generation for each in published):
                return None  # a newer generation is being published, and has no slices for this node yet
            everything = [each for each in published if _generation(each) == generation]
        if len(everything) != count:
            return Pool(*name, incomplete=f"{len(everything)} of {count} slices of generation {generation} are there")
        return self._complete(name, members, everything)

    def _complete(self, name: _PoolId, members: list[Json], everything: Sequence[Json]) -> Pool:
        members = sorted(members, key=name_of)
        here = {name_of(each) for each in members}
        others = [each for each in everything if name_of(each) not in here]
        devices = [device for each in members for device in self._devices(each)]
        names = [device.name for device in devices]
        duplicate = next((one for one in names if names.count(one) > 1), None) if len(set(names)) < len(names) else None
        if duplicate is not None:
            return Pool(*name, invalid=f"device {duplicate} is there twice")
        counters: dict[tuple[str, str], Mapping[str, Fraction]] = {}
        for each in everything:
            for entry in each["spec"].get("sharedCounters") or ():
                place = (_scope(each), str(entry["name"]))
                if place in counters:
                    return Pool(*name, invalid=f"counter set {entry['name']} is there twice")
                counters[place] = amounts(entry.get("counters"))
        elsewhere = [device for each in others for device in self._devices(each)]
        for device in (*devices, *elsewhere):
            for place, drawn, _groups in device.draws:
                missing = place not in counters or [each for each in drawn if each not in counters[place]]
                if missing:
                    return Pool(
                        *name, invalid=f"device {device.name} draws on counters of {place[1]} that are not there"
                    )
        return Pool(*name, tuple(devices), tuple(elsewhere), counters)

    def _devices(self, each: Json) -> list[Device]:
        spec = each["spec"]
        driver, pool = _pool_id(each)
        found = []
        for entry in spec.get("devices") or ():
            content = {"name": entry["name"], **entry["basic"]} if "basic" in entry else entry
            added = [
                rule["spec"]["taint"]
                for rule in self._rules
                if selects(rule, driver=driver, pool=pool, device=str(content["name"]))
            ]
            found.append(Device(driver, pool, content, (*(content.get("taints") or ()), *added), spec, _scope(each)))
        return found


def _is_for(each: Json, node: Json) -> bool:
    spec = each["spec"]
    if spec.get("perDeviceNodeSelection"):
        return any(device_is_for(device, node) for device in spec.get("devices") or ())
    return device_is_for(spec, node)


def device_is_for(where: Json, node: Json) -> bool:
    """Return whether a slice's spec, or a device with its own node selection, applies to a node."""
    return reaches(
        node,
        node_name=str(where.get("nodeName") or ""),
        all_nodes=bool(where.get("allNodes")),
        selector=where.get("nodeSelector"),
    )


def _newest_only(members: list[Json], each: Json) -> None:
    if members and _generation(each) > _generation(members[0]):
        members.clear()
    if not members or _generation(each) == _generation(members[0]):
        members.append(each)


def _scope(each: Json) -> str:
    # Up to 1.34 counter sets are in the same slice as the devices that use them, and their names are unique only in the
    # slice.
    return name_of(each) if each["spec"].get("sharedCounters") and each["spec"].get("devices") else ""


def _waits_for_binding(pool: Pool) -> bool:
    return any(device.content.get("bindingConditions") for device in pool.devices)


def _pool_id(each: Json) -> _PoolId:
    return (str(each["spec"]["driver"]), str(each["spec"]["pool"]["name"]))


def _generation(each: Json) -> int:
    return int(each["spec"]["pool"].get("generation", 0))
