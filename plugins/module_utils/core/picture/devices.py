# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the report data of one device: its partitions with positions and claims, its faults, and the remaining capacity.

The module has no side effects. The data has two sources: the node, which scanned the hardware, and the cluster, which
knows the allocations. If a node has not answered, the data shows its published devices, and the partitions that exist
or are allocated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..dra.device_lookup import attribute_of, selects
from ..vendors.registry import BACKENDS, create

Json = dict[str, Any]
Counters = dict[tuple[str, str, str, str], Any]
#: The names of counters that each represent one place on a device.
_PLACE = re.compile(r"(?:.*-)?(?:slice|place)-(\d+)")
_STANDARD = "resource.kubernetes.io/"
MEMORY = "memory"
#: The profile name of a whole device.
WHOLE = ""


def reported_devices(answer: Json, published: Sequence[Json]) -> tuple[list[Json], dict[str, list[Json]]]:
    """Return the devices that a node reported, and by UUID the published devices of each."""
    facts = [
        {
            **{key: each[key] for key in ("vendor", "index", "uuid", "product", "pci_address", "pcie_root")},
            **{key: each[key] for key in ("numa_node", "memory_bytes", "memory_slices")},
            "groups": each["groups"],
            "partitioned": bool(each["partitioning"]["enabled"]),
            "pending": bool(each["partitioning"]["pending"]),
            "partitions": [
                {
                    "profile": one["profile"],
                    "start": one["placement"]["start"],
                    "size": one["placement"]["size"],
                    "memory_bytes": one["memory_bytes"],
                    "uuid": one["uuid"],
                    "owner": one["owner"],
                    "claims": list(one["claims"]),
                }
                for one in each["partitions"]
            ],
            "claims": [
                claim for claim in each["claims"] if not any(claim in one["claims"] for one in each["partitions"])
            ],
            "processes": len(each["processes"]),
            "health": [
                {key: sign[key] for key in ("cause", "severity", "message", "remedy")}
                for sign in each["health"]["signs"]
            ],
        }
        for each in answer["devices"]
    ]
    return facts, _by_device(published)


def published_devices(published: Sequence[Json]) -> tuple[list[Json], dict[str, list[Json]]]:
    """Return the physical devices with published devices, and by UUID these published devices. Groups are omitted."""
    mine = _by_device(published)
    facts_of_driver = {each.driver_name: each for each in (create(vendor).facts for vendor in BACKENDS)}
    facts = []
    for number, (uuid, those) in enumerate(sorted(mine.items(), key=lambda each: _order(each[1]))):
        whole = next((one for one in those if one["uuid"] == uuid), None)
        one = whole or those[0]
        found = _Attributes(one)
        places = [at for at in map(_place, those) if at]
        partitioned = whole is None or any(each["claims"] or each["uuid"] for each in those if each is not whole)
        facts.append(
            {
                "vendor": one["driver"],
                "index": _number(one["name"], number),
                "uuid": uuid,
                "product": one["product"],
                "pci_address": str(found.get(f"{_STANDARD}pciBusID") or ""),
                "pcie_root": found.get(f"{_STANDARD}pcieRoot"),
                "numa_node": found.get(f"{_STANDARD}numaNode"),
                "memory_bytes": _memory(whole, those),
                "memory_slices": max((start + size for start, size in places), default=0),
                "groups": facts_of_driver[one["driver"]].groups_of(found.plain)
                if one["driver"] in facts_of_driver
                else {},
                "partitioned": partitioned,
                "pending": partitioned,
                "partitions": [],
                "claims": [],
                "processes": 0,
                "health": [],
            }
        )
    return facts, mine


def device_of(facts: Json, published: Sequence[Json], rules: Sequence[Json]) -> Json:
    """Return the report data of one device. ``rules`` are DeviceTaintRules with their taints."""
    partitions = [dict(each) for each in facts["partitions"]]
    claims = list(facts["claims"])
    shared = None
    for one in published:
        if one["uuid"] == facts["uuid"]:
            claims += [each for each in one["claims"] if each not in claims]
            if one["claims"] and one["shared"] and MEMORY in one["free"]:
                shared = one["capacity"][MEMORY] - one["free"][MEMORY]
        elif one["claims"] or one["uuid"]:
            _merge_partition(partitions, one, _place(one))
    partitions.sort(key=lambda each: (each["start"], each["size"], each["profile"], each["uuid"]))
    held = sum(each["memory_bytes"] for each in partitions if each["claims"])
    if claims:
        held = facts["memory_bytes"] if shared is None else shared
    left, totals = _counters(published)
    kinds = _by_profile(facts["uuid"], published)
    kept_away = {one["name"] for one in published if _taints([one], rules)}
    return {
        "index": facts["index"],
        "uuid": facts["uuid"],
        "pci": facts["pci_address"],
        "root": facts["pcie_root"] or "",
        "numa": facts["numa_node"],
        "groups": facts["groups"],
        "published": len(published),
        "kept_away": len(kept_away),
        "partitioned": facts["partitioned"],
        "reset_awaited": facts["partitioned"] != facts["pending"],
        "partitions": partitions,
        "claims": sorted(claims),
        "processes": facts["processes"],
        "used_bytes": min(int(held), facts["memory_bytes"]),
        "health": facts["health"],
        "taints": _taints(published, rules),
        "fits": {
            kind: count
            for kind, those in kinds.items()
            for free in [[one for one in those if one["available"] and one["name"] not in kept_away]]
            for count in [_count_allocatable_together(free, dict(left))]
            if count
        },
        "most": {kind: _count_allocatable_together(those, dict(totals)) for kind, those in kinds.items()},
    }


def free_bytes(device: Json, memory: int) -> int:
    """Return the unused memory of a device in bytes."""
    return max(memory - int(device["used_bytes"]), 0)


# ---- published devices by physical device


class _Attributes:
    """The attributes of a published device, with or without the driver's domain."""

    def __init__(self, one: Json) -> None:
        self._found: Mapping[str, Any] = one["attributes"]
        self._driver = one["driver"]

    @property
    def plain(self) -> dict[str, Any]:
        """Return all attributes, without the driver's domain."""
        return {name.removeprefix(f"{self._driver}/"): value for name, value in self._found.items()}

    def get(self, name: str) -> Any:
        return attribute_of(self._found, self._driver, name)


def _parent(one: Json) -> str:
    return str(_Attributes(one).get("parentUUID") or "")


def _by_device(published: Sequence[Json]) -> dict[str, list[Json]]:
    """Return the published devices by the UUID of their physical device.

    Passthrough devices and groups are omitted: they have a separate UUID or none.
    """
    found: dict[str, list[Json]] = {}
    parents = {_parent(one) for one in published}
    for one in published:
        parent = _parent(one)
        if parent:
            found.setdefault(parent, []).append(one)
        elif one["uuid"] and (one["uuid"] in parents or one["whole"]) and not one["type"].endswith(("group", "vfio")):
            found.setdefault(one["uuid"], []).append(one)
    return found


def _order(those: Sequence[Json]) -> tuple[str, int, str]:
    return (those[0]["driver"], _number(those[0]["name"], 0), those[0]["name"])


def _number(name: str, otherwise: int) -> int:
    found = re.search(r"\d+", name)
    return int(found.group()) if found else otherwise


def _place(one: Json) -> tuple[int, int] | None:
    """Return the position of a partition: its first place and its number of places; None without places."""
    numbers = sorted(
        int(found.group(1))
        for counters in one["draws"].values()
        for name in counters
        for found in [_PLACE.fullmatch(name)]
        if found
    )
    return (numbers[0], len(numbers)) if numbers else None


def _memory(whole: Json | None, those: Sequence[Json]) -> int:
    """Return a device's memory: that of the whole device if published, else the sum of its partitions' memory."""
    if whole is not None:
        return int(whole["capacity"].get(MEMORY, 0))
    shared_out = [amount for key, amount in _counters(those)[1].items() if key[3] == MEMORY]
    return int(sum(shared_out) + sum(one["capacity"].get(MEMORY, 0) for one in those if not one["draws"]))


def _counters(those: Sequence[Json]) -> tuple[Counters, Counters]:
    """Return the remaining amount of each counter, and its amount without any claims."""
    left: Counters = {}
    totals: Counters = {}
    for one in those:
        for name, counters in one["draws"].items():
            for counter, amount in counters.items():
                key = (one["driver"], one["pool"], name, counter)
                if key not in left:
                    left[key] = totals[key] = amount["left"]
    for one in those:
        for key, amount in _consumption(one).items():
            if one["claims"]:
                totals[key] += amount
    return left, totals


def _consumption(one: Json) -> Counters:
    return {
        (one["driver"], one["pool"], name, counter): amount["takes"]
        for name, counters in one["draws"].items()
        for counter, amount in counters.items()
    }


def _by_profile(uuid: str, published: Sequence[Json]) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for one in published:
        found.setdefault(WHOLE if one["uuid"] == uuid else one["profile"], []).append(one)
    return found


def _count_allocatable_together(those: Sequence[Json], remaining: Counters) -> int:
    """Return how many of these fit at the same time, allocated in order. Shared devices count once."""
    count = 0
    for one in those:
        takes = _consumption(one)
        if all(remaining[key] >= amount for key, amount in takes.items()):
            count += 1
            for key, amount in takes.items():
                remaining[key] -= amount
    return count


def _merge_partition(partitions: list[Json], one: Json, place: tuple[int, int] | None) -> None:
    """Add the cluster's data of a partition to the node's data of the same partition, or as a new partition."""
    same = next((each for each in partitions if one["uuid"] and each["uuid"] == one["uuid"]), None)
    if same is None and place:
        same = next(
            (each for each in partitions if each["profile"] == one["profile"] and each["start"] == place[0]), None
        )
    if same is None and one["claims"]:
        # Partitions without a place are distinguished by their claims.
        same = next((each for each in partitions if set(each["claims"]) & set(one["claims"])), None)
    if same is not None:
        same["claims"] += [each for each in one["claims"] if each not in same["claims"]]
        return
    partitions.append(
        {
            "profile": one["profile"],
            "start": place[0] if place else 0,
            "size": place[1] if place else 0,
            "memory_bytes": int(one["capacity"].get(MEMORY, 0)),
            "uuid": one["uuid"],
            "owner": "administrator" if one["uuid"] else "claim",
            "claims": list(one["claims"]),
        }
    )


def _taints(published: Sequence[Json], rules: Sequence[Json]) -> list[Json]:
    """Return the taints, of the driver and of rules, that prevent allocations, without duplicates."""
    found: dict[tuple[str, ...], Json] = {}
    for one in published:
        mine = [{**each, "rule": ""} for each in one["taints"] if each["effect"] in ("NoSchedule", "NoExecute")]
        mine += [
            each["taint"]
            for each in rules
            if selects(each["selects"], driver=one["driver"], pool=one["pool"], device=one["name"])
        ]
        for taint in mine:
            found.setdefault(tuple(sorted(taint.items())), taint)  # type: ignore[arg-type]
    return [{key: taint[key] for key in ("key", "value", "effect", "rule")} for taint in found.values()]
