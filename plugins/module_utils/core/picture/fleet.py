# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the report data of a fleet: nodes, devices and their claims, faults, waiting claims, and layout differences.

The module has no side effects. ``docs/report.schema.json`` describes the output. The page of the playbook ``report``
displays it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..partitioning.layout_differences import summarize_difference
from .devices import Json, device_of, free_bytes, published_devices, reported_devices
from .former import FormerDevice, read_former_devices
from .waiting import waiting

VERSION = 1
_NONE: Mapping[str, Any] = MappingProxyType({})
#: Device states, worst first. ``sick``: faulty. ``withheld``: healthy, but not available, because it is tainted or
#: unpublished.
STATES = ("sick", "withheld", "full", "partly", "free")
#: Codes that the page displays in their own sections. ``attention`` contains only the others.
_SHOWN_ELSEWHERE = frozenset({"device-unhealthy", "device-unread", "layout-differs", "claim-waits", "tainted"})


def picture(
    report: Json,
    published: Sequence[Json] | None,
    *,
    pending: Sequence[Json] | None = None,
    rules: Sequence[Json] = (),
    reasons: Mapping[str, Json] | None = None,
    explained: Mapping[str, Json] | None = None,
    generated: str = "",
    former: Json | None = None,
    differing: Mapping[str, Mapping[str, Json]] | None = None,
) -> Json:
    """Return the report data of a fleet.

    - ``report``: the result of ``fleet_report``.
    - ``published``: devices from ``cluster.inventory.devices``; None if the cluster was not queried.
    - ``pending``: the pending pods; None if they were not queried.
    - ``rules``: the DeviceTaintRules.
    - ``reasons``: explanations, by claim namespace/name, why the claim waits. They take precedence over ``explained``,
      by pod namespace/name, which takes precedence over the scheduler's message.
    - ``generated``: the time of the queries, RFC 3339.
    - ``former``: earlier report data. Its devices are shown, with their age, if their node or driver does not answer
      now.
    - ``differing``: published differences between devices and their layout (``layout_differences.differences_in_slices``),
      used for devices whose node does not report them.
    """
    by_node: dict[str, list[Json]] = {}
    for one in published or ():
        by_node.setdefault(one["node"], []).append(one)
    names = {*report["nodes"], *report["silent"], *report["not_asked"], *(each for each in by_node if each)}
    nodes, models = pictures_of_nodes(
        names,
        None if published is None else lambda name: by_node.get(name, ()),
        answers=report["nodes"],
        rules=rules,
        known=read_former_devices(former, generated),
        differing=differing,
    )
    return picture_of_fleet(
        report,
        nodes,
        models,
        pending=pending,
        reasons=reasons,
        explained=explained,
        generated=generated,
        differing=differing,
        cluster=published is not None,
    )


def pictures_of_nodes(
    names: Iterable[str],
    published: Callable[[str], Sequence[Json]] | None,
    *,
    answers: Mapping[str, Json] = _NONE,
    rules: Sequence[Json] = (),
    known: Mapping[str, Mapping[str, FormerDevice]] = _NONE,
    differing: Mapping[str, Mapping[str, Json]] | None = None,
) -> tuple[list[Json], list[Json]]:
    """Return the nodes, sorted by name, and the models of their devices.

    ``published`` returns the published devices of a node. It is called once for each node, in the order of the names.
    """
    tainting = [each for each in map(_blocking_rule, rules) if each is not None]
    models: list[Json] = []
    numbers: dict[tuple[Any, ...], int] = {}
    nodes = [
        _node(
            name,
            answers.get(name),
            published(name) if published is not None else (),
            tainting,
            models,
            numbers,
            known.get(name, {}),
            (differing or {}).get(name, {}),
            cluster=published is not None,
        )
        for name in sorted(names)
    ]
    for node in nodes:
        node["totals"] = _totals(node["devices"], models)
    return nodes, models


def picture_of_fleet(
    report: Json,
    nodes: list[Json],
    models: list[Json],
    *,
    pending: Sequence[Json] | None = None,
    reasons: Mapping[str, Json] | None = None,
    explained: Mapping[str, Json] | None = None,
    generated: str = "",
    differing: Mapping[str, Mapping[str, Json]] | None = None,
    cluster: bool = True,
) -> Json:
    """Return the report data from the result of ``pictures_of_nodes``. The other arguments are those of ``picture``."""
    for node in nodes:
        node["asked"] = node["name"] not in report["not_asked"]
    room = _remaining_capacity(nodes, models) if cluster else []
    waits = waiting(report["claims"], pending, reasons or {}, explained or {})
    devices = [each for node in nodes for each in node["devices"]]
    for each in devices:
        each.pop("most", None)
    return {
        "version": VERSION,
        "generated": generated,
        "asked": {"nodes": bool(report["nodes"] or report["silent"] or report["not_asked"]), "cluster": cluster},
        "totals": {
            **_totals(devices, models),
            "nodes": len(nodes),
            "silent": sum(node["source"] != "node" for node in nodes if node["name"] in report["silent"]),
            "sick_nodes": sum(node["totals"]["sick"] > 0 for node in nodes),
            "drifting": sum(each["drift"] is not None for each in devices),
            "drifting_nodes": sum(any(each["drift"] for each in node["devices"]) for node in nodes),
            "claims": len(report["claims"]),
            "waiting": len(waits),
        },
        "models": models,
        "nodes": nodes,
        "room": room,
        "claims": [_claim(each) for each in report["claims"] if each["allocated"]],
        "waiting": waits,
        "attention": [
            {key: each.get(key, "") for key in ("code", "node", "message", "remedy")}
            for each in report["attention"]
            if each["code"] not in _SHOWN_ELSEWHERE
        ]
        + _unlisted_differences(nodes, differing or {}),
        "versions": report["versions"],
    }


def _node(
    name: str,
    answer: Json | None,
    published: Sequence[Json],
    rules: Sequence[Json],
    models: list[Json],
    numbers: dict[tuple[Any, ...], int],
    known: Mapping[str, FormerDevice],
    differing: Mapping[str, Json],
    *,
    cluster: bool,
) -> Json:
    """Return the data of one node: its answer, or without one its published devices and the earlier data in ``known``."""
    facts, mine = reported_devices(answer, published) if answer else ([], {})
    reported_uuids = {each["uuid"] for each in facts}
    away = _unavailable_drivers(answer)
    others, theirs = published_devices([each for each in published if away is None or each["driver"] in away])
    facts += [each for each in others if each["uuid"] not in reported_uuids]
    mine = {**theirs, **mine}
    source = "node" if answer else "cluster" if others else "none"
    listed = {each["uuid"] for each in facts}
    facts += [
        each.facts(claims=not cluster)
        for uuid, each in known.items()
        if uuid not in listed and (away is None or each.model["vendor"] in away)
    ]
    differences = {each["uuid"]: each for each in (answer or {}).get("layout", {}).get("differences", ())}
    devices = []
    for each in facts:
        key = (each["vendor"], each["product"], each["memory_bytes"], each["memory_slices"])
        if key not in numbers:
            numbers[key] = len(models)
            models.append(dict(zip(("vendor", "product", "memory_bytes", "slices"), key)))
        last = known.get(each["uuid"]) if each["uuid"] not in reported_uuids else None
        if last is not None:
            each["health"] = last.health()
        device = device_of(each, mine.get(each["uuid"], []), rules)
        device["model"] = numbers[key]
        device["drift"] = summarize_difference(differences[each["uuid"]]) if each["uuid"] in differences else None
        if each["uuid"] not in reported_uuids:
            # The driver's current report is newer than the earlier data.
            difference = differing.get(each["uuid"])
            device["drift"] = (
                {key: difference[key] for key in ("wanted", "steps", "held_by", "error")}
                if difference is not None
                else last.device["drift"]
                if last is not None
                else None
            )
        if last is not None:
            device["as_of"] = last.as_of()
        device["state"] = _state(device, models[device["model"]], cluster)
        devices.append(device)
    layout = (answer or {}).get("layout")
    return {
        "name": name,
        "source": source,
        "devices": sorted(devices, key=lambda each: (models[each["model"]]["vendor"], each["index"], each["uuid"])),
        "unread": list((answer or {}).get("unread", ())),
        "layout": {key: layout[key] for key in ("known", "source", "matches")}
        if layout
        else {"known": False, "source": "", "matches": False},
        "refused": [{"message": each["message"], "hint": each["hint"]} for each in layout["refused"]] if layout else [],
    }


def _unlisted_differences(nodes: Sequence[Json], differing: Mapping[str, Mapping[str, Json]]) -> list[Json]:
    """Return attention entries for devices that differ from their layout and are neither published nor in the report."""
    listed = {(node["name"], device["uuid"]) for node in nodes for device in node["devices"]}
    return [
        {
            "code": "layout-differs",
            "node": name,
            "message": f"device {difference['index']} ({uuid}), of which nothing is published, differs from the requested layout ({difference['wanted']}): "
            + "; ".join([*difference["steps"], *([difference["error"]] if difference["error"] else [])]),
            "remedy": "Apply the node's layout, or correct it.",
        }
        for name, those in sorted(differing.items())
        for uuid, difference in sorted(those.items())
        if (name, uuid) not in listed
    ]


def _unavailable_drivers(answer: Json | None) -> set[str] | None:
    """Return the vendors and driver names that are unavailable on a node; None if the node did not answer at all."""
    if not answer:
        return None
    return {
        name
        for each in answer.get("drivers", ())
        if not each["available"]
        for name in (each["vendor"], each["driver_name"])
    }


def _blocking_rule(rule: Json) -> Json | None:
    """Return a DeviceTaintRule and its taint for the report; None if its taint has no effect on scheduling."""
    spec = rule.get("spec") or {}
    taint = spec.get("taint") or {}
    if taint.get("effect") not in ("NoSchedule", "NoExecute"):
        return None
    return {
        "selects": rule,
        "taint": {
            **{key: str(taint.get(key) or "") for key in ("key", "value", "effect")},
            "rule": str(rule["metadata"]["name"]),
        },
    }


def _state(device: Json, model: Json, cluster: bool) -> str:
    if any(each["severity"] != "informative" for each in device["health"]):
        return "sick"
    if cluster and device["kept_away"] == device["published"]:
        return "withheld"
    held = [each for each in device["partitions"] if each["claims"]]
    if not held and not device["claims"]:
        return "free"
    if cluster:
        return "partly" if device["fits"] else "full"
    covered = sum(each["size"] for each in held) >= model["slices"] > 0
    return "full" if covered or not free_bytes(device, model["memory_bytes"]) else "partly"


def _totals(devices: Sequence[Json], models: Sequence[Json]) -> Json:
    states = Counter(each["state"] for each in devices)
    return {
        "devices": len(devices),
        **{state: states[state] for state in STATES},
        "drift": sum(each["drift"] is not None for each in devices),
        "memory_bytes": sum(models[each["model"]]["memory_bytes"] for each in devices),
        "used_bytes": sum(each["used_bytes"] for each in devices),
    }


def _remaining_capacity(nodes: Sequence[Json], models: Sequence[Json]) -> list[Json]:
    """Return, by product and partition profile, how many further claims fit now, and how many without fragmentation.

    ``at_most`` is the sum over all devices of the number that would fit if the free part of the device were contiguous.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for node in nodes:
        for device in node["devices"]:
            model = models[device["model"]]
            free = free_bytes(device, model["memory_bytes"]) if device["state"] not in ("sick", "withheld") else 0
            for profile, most in device["most"].items():
                one = found.setdefault(
                    (model["product"], profile), {"now": 0, "most": 0, "share": 0.0, "nodes": set(), "devices": 0}
                )
                now = device["fits"].get(profile, 0)
                one["now"] += now
                one["most"] += most
                one["share"] += most * free / model["memory_bytes"] if model["memory_bytes"] else 0
                if now:
                    one["nodes"].add(node["name"])
                    one["devices"] += 1
    return [
        {
            "product": product,
            "profile": profile,
            "now": one["now"],
            "at_most": max(int(one["share"] + 1e-9), one["now"]),
            "of": one["most"],
            "devices": one["devices"],
            "nodes": len(one["nodes"]),
        }
        for (product, profile), one in sorted(found.items(), key=lambda each: (each[0][0], each[1]["most"], each[0][1]))
    ]


def _claim(facts: Json) -> Json:
    return {
        "name": f"{facts['namespace']}/{facts['name']}",
        "pods": facts["pods"],
        "nodes": facts["nodes"],
        "classes": facts["device_classes"],
        "devices": [each["name"] for each in facts["devices"]],
        "created": facts["created"],
        "deleting": facts["deleting"],
        "healthy": facts["healthy"],
    }
