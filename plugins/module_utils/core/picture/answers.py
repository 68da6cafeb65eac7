# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Combine the reports of a fleet's nodes with the state of the cluster. No side effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..dra.extended_claims import describe_duplicate, duplicates

Json = dict[str, Any]
#: The owner of a manually created partition in a form that no profile has.
FOREIGN = "foreign"


def attention(code: str, message: str, remedy: str = "", device: str = "") -> dict[str, str]:
    """Return one entry that requires attention."""
    return {"code": code, "device": device, "message": message, "remedy": remedy}


def duplicate_class_notes(classes: Iterable[Json]) -> list[dict[str, str]]:
    """Return a note for each extended resource that several DeviceClasses serve."""
    return [
        {"node": "", **attention("duplicate-extended-resource", describe_duplicate(resource, names))}
        for resource, names in duplicates(classes).items()
    ]


def fleet_report(
    nodes: Mapping[str, Json], published: Sequence[Json] | None, claims: Sequence[Json], not_asked: Collection[str] = ()
) -> Json:
    """Combine the reports of nodes, by node name, with the cluster's state: ``published`` devices and facts of claims.

    ``published`` is None if no cluster was queried. A node with an empty answer is silent, except for nodes of
    ``not_asked``.
    """
    unasked = sorted(name for name in not_asked if not nodes.get(name))
    silent = [name for name in nodes if not nodes[name] and name not in unasked]
    answered = {name: report for name, report in nodes.items() if report}
    by_node: dict[str, list[Json]] = {}
    for one in published or ():
        by_node.setdefault(one["node"], []).append(one)
    notes = [
        {"node": name, **attention("node-silent", f"{name} has not answered", "Find out why the query failed.")}
        for name in silent
    ]
    if unasked:
        number = f"{len(unasked)} nodes were" if len(unasked) > 1 else "One node was"
        notes.append(
            {"node": "", **attention("nodes-not-asked", f"{number} not asked in this run: {', '.join(unasked)}")}
        )
    reports = {}
    for name, report in answered.items():
        extra = _published(report, by_node.get(name, [])) if published is not None else {}
        mine = [f"{each['namespace']}/{each['name']}" for each in claims if name in each["nodes"]]
        reports[name] = {**report, **extra, "cluster_claims": mine}
        notes += [{"node": name, **each} for each in (*report["attention"], *_publication_notes(extra))]
    for name in sorted(by_node):
        if name and name not in nodes and name not in unasked:
            notes.append(
                {
                    "node": name,
                    **attention("node-unknown", f"{name} publishes {len(by_node[name])} devices and was not asked"),
                }
            )
    versions = _versions(answered)
    notes += [{"node": "", **each} for each in (*_claim_notes(claims), *_version_notes(versions))]
    return {
        "nodes": reports,
        "silent": silent,
        "not_asked": unasked,
        "totals": _totals(answered, published, claims),
        "products": dict(
            sorted(Counter(device["product"] for report in answered.values() for device in report["devices"]).items())
        ),
        "versions": versions,
        "claims": list(claims),
        "cluster": published is not None,
        "attention": notes,
    }


def _published(report: Json, devices: Sequence[Json]) -> Json:
    known = {device["uuid"] for device in report["devices"]}
    known |= {each["uuid"] for device in report["devices"] for each in device["partitions"] if each["uuid"]}
    named = {one["uuid"] for one in devices} | {_parent(one) for one in devices}
    return {
        "published": {
            "devices": len(devices),
            "available": sum(one["available"] for one in devices),
            "held": sum(bool(one["claims"]) for one in devices),
            "tainted": [{"name": one["name"], "taints": one["taints"]} for one in devices if one["taints"]],
        },
        "unpublished": [
            f"{device['product']} {device['index']} ({device['uuid']})"
            for device in report["devices"]
            if device["uuid"] not in named
        ],
        "vanished": sorted(one["name"] for one in devices if not _is_known(one, known)),
    }


def _parent(one: Json) -> str:
    attributes = one["attributes"]
    return str(attributes.get("parentUUID", attributes.get(f"{one['driver']}/parentUUID", "")))


def _is_known(one: Json, known: Collection[str]) -> bool:
    """Return whether a published device exists.

    A partition can also be one that can be created, or that was created after the node's report.
    """
    names = {one["uuid"], _parent(one)} - {""}
    return not names or bool(names & set(known))


def _publication_notes(extra: Json) -> list[dict[str, str]]:
    notes = [
        attention("not-published", f"{each} is there and no driver publishes it", "See that the node driver runs.")
        for each in extra.get("unpublished", ())
    ]
    notes += [
        attention("published-and-gone", f"{name} is published and not there", "See that the node driver runs.")
        for name in extra.get("vanished", ())
    ]
    for each in extra.get("published", {}).get("tainted", ()):
        taints = ", ".join(f"{one['key']}={one['value']}:{one['effect']}" for one in each["taints"])
        notes.append(attention("tainted", f"{each['name']} has the taint {taints}"))
    return notes


def _claim_notes(claims: Sequence[Json]) -> list[dict[str, str]]:
    notes = []
    for each in claims:
        name = f"{each['namespace']}/{each['name']}"
        if each["pods"] and not each["allocated"]:
            notes.append(
                attention("claim-waits", f"The claim {name} has no device, and {', '.join(each['pods'])} waits for it")
            )
        if each["allocated"] and not each["healthy"]:
            signs = [one["message"] or one["health"] for one in each["health"] if one["health"] != "Healthy"]
            notes.append(
                attention(
                    "claim-unhealthy",
                    f"The claim {name} has devices that are not well" + (f": {'; '.join(signs)}" if signs else ""),
                )
            )
        if each["allocated"] and any(not one["published"] for one in each["devices"]):
            notes.append(
                attention("claim-of-the-past", f"The claim {name} has a device that no driver publishes any more")
            )
    return notes


def _versions(nodes: Mapping[str, Json]) -> dict[str, dict[str, list[str]]]:
    """Return, by component, the nodes with each of its versions."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, report in nodes.items():
        versions = report["versions"]
        flat = {f"driver of {vendor}": text for vendor, text in versions["drivers"].items()}
        for what, text in {**flat, "release": versions["release"], "kernel": versions["kernel"]}.items():
            if text:
                found.setdefault(what, {}).setdefault(text, []).append(name)
    return found


def _version_notes(versions: Mapping[str, Mapping[str, Sequence[str]]]) -> list[dict[str, str]]:
    return [
        attention(
            "versions-differ",
            f"Nodes differ in the {what}: "
            + "; ".join(f"{text} on {', '.join(names)}" for text, names in found.items()),
        )
        for what, found in versions.items()
        if what != "kernel" and len(found) > 1
    ]


def _totals(nodes: Mapping[str, Json], published: Sequence[Json] | None, claims: Sequence[Json]) -> dict[str, int]:
    devices = [device for report in nodes.values() for device in report["devices"]]
    return {
        "nodes": len(nodes),
        "devices": len(devices),
        "unhealthy": sum(not device["health"]["healthy"] for device in devices),
        "unread": sum(len(report["unread"]) for report in nodes.values()),
        "partitions": sum(len(device["partitions"]) for device in devices),
        "made_by_hand": sum(one["owner"] == FOREIGN for device in devices for one in device["partitions"]),
        "memory_bytes": sum(device["memory_bytes"] for device in devices),
        "drifting": sum(len(report["layout"]["differences"]) for report in nodes.values()),
        "published": len(published or ()),
        "available": sum(one["available"] for one in published or ()),
        "claims": len(claims),
        "waiting": sum(bool(each["pods"]) and not each["allocated"] for each in claims),
    }
