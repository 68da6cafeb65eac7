# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What one node answers of its accelerators, and what a fleet of nodes and its cluster answer together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._facts import device_facts
from ._layout import assign, needs_reset
from ._layout_module import Look
from ._layout_states import FOREIGN, by_place, compare, name_of, owner_of, partition_facts
from .core.backend import BACKENDS, create
from .core.layout import Rule
from .core.model import Device
from .core.prepared import PreparedClaim
from .core.signs import Severity

Json = dict[str, Any]
# What a report says of a device, of all facts that there are. The others are kinds of partitions, and what never changes.
TOLD = (
    *("vendor", "index", "uuid", "product", "pci_address", "pcie_root", "numa_node", "memory_bytes", "memory_slices"),
    "partitioning",
)


@dataclass(frozen=True)
class Answer:
    """What one vendor's driver answers: a look, or the reason why there is none. ``claims`` are those that the node has prepared."""

    vendor: str
    driver_name: str
    look: Look | None
    claims: tuple[PreparedClaim, ...] = ()
    reason: str = ""


def attention(code: str, message: str, remedy: str = "", device: str = "") -> dict[str, str]:
    """Return one thing that somebody has to look at."""
    return {"code": code, "device": device, "message": message, "remedy": remedy}


# ---- one node


def node_report(answers: Sequence[Answer], rules: Sequence[Rule] | None, source: str, versions: Json) -> Json:
    """Return what is so on a node. ``rules`` are its layout, None where none is known; ``source`` says where they are from."""
    devices: list[Json] = []
    unread: list[str] = []
    notes: list[dict[str, str]] = []
    for answer in answers:
        if answer.look is None:
            notes.append(attention("driver-unavailable", f"No devices of {answer.vendor}: {answer.reason}"))
            continue
        for device in answer.look.devices:
            devices.append(_device(device, answer.look))
            notes += _notes(device)
        for each in answer.look.faulty:
            unread.append(each.describe())
            notes.append(attention("device-unread", each.describe(), "", each.uuid))
    layout = _layout(answers, rules, source)
    notes += [attention("layout-differs", each["message"], "", each["uuid"]) for each in layout["differences"]]
    notes += [attention("layout-refused", each["message"], each["hint"]) for each in layout["refused"]]
    return {
        "devices": devices,
        "unread": unread,
        "drivers": [
            {
                "vendor": each.vendor,
                "driver_name": each.driver_name,
                "available": each.look is not None,
                "reason": each.reason,
            }
            for each in answers
        ],
        "layout": layout,
        "claims": [
            {
                "namespace": claim.namespace,
                "name": claim.name,
                "uid": claim.uid,
                "state": claim.state,
                "driver": each.driver_name,
                "devices": [device.name for device in claim.devices],
            }
            for each in answers
            for claim in each.claims
        ],
        "versions": {**versions, "drivers": _driver_versions(answers)},
        "attention": notes,
    }


def _device(device: Device, look: Look) -> Json:
    facts = device_facts(device)
    mine = [each for each in look.prepared if each.device_uuid == device.uuid]
    partitions = []
    for partition in by_place(device):
        owner, claims = owner_of(device, partition, look.prepared)
        memory = partition.memory_bytes
        partitions.append(
            {**partition_facts(partition), "memory_bytes": memory, "owner": owner, "claims": list(claims)}
        )
    return {
        **{key: facts[key] for key in TOLD},
        "groups": _groups(device),
        "partitions": partitions,
        "claims": list(dict.fromkeys(each.claim for each in mine)),
        "processes": facts["processes"],
        "health": facts["health"],
    }


def _groups(device: Device) -> dict[str, str]:
    """The groups of devices with direct links to each other that a device belongs to, by what people call such a group."""
    found = create(device.vendor).facts.groups_of(device.attributes) if device.vendor in BACKENDS else {}
    return {**found, **({"fabric": str(device.clique)} if device.clique is not None else {})}


def _notes(device: Device) -> list[dict[str, str]]:
    notes = [
        attention("device-unhealthy", f"{device.describe()}: {sign.message}", sign.remedy, device.uuid)
        for sign in device.health.signs
        if sign.severity != Severity.INFORMATIVE
    ]
    if device.partitioning.pending != device.partitioning.enabled:
        notes.append(
            attention(
                "mode-pending",
                f"{device.describe()}: a change of its mode waits for a reset",
                "Reset the device while nothing uses it, or start the machine again.",
                device.uuid,
            )
        )
    return notes + [
        attention(
            "made-by-hand",
            f"{name_of(device, each)}: it takes room, and no claim can have it",
            "Give it one compute instance that fills it, or destroy it.",
            device.uuid,
        )
        for each in by_place(device)
        if not each.uuid
    ]


def _layout(answers: Sequence[Answer], rules: Sequence[Rule] | None, source: str) -> Json:
    differences: list[Json] = []
    refused: list[Json] = []
    resets: list[str] = []
    if rules is not None:
        for look in (each.look for each in answers if each.look is not None):
            differences += compare(look.devices, rules, look.prepared)
            assigned, errors = assign(look.devices, rules, look.prepared)
            refused += [error.to_dict() for error in errors]
            resets += [one.device.uuid for one in assigned if needs_reset(one)]
    return {
        "known": rules is not None,
        "source": source,
        "matches": rules is not None and not differences,
        "differences": differences,
        "refused": refused,
        "resets": resets,
    }


def _driver_versions(answers: Sequence[Answer]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in answers:
        for device in each.look.devices if each.look is not None else ():
            version = device.attributes.get("driverVersion")
            if version is not None:
                found.setdefault(each.vendor, str(version))
    return found


# ---- a fleet


def fleet_report(nodes: Mapping[str, Json], published: Sequence[Json] | None, claims: Sequence[Json]) -> Json:
    """Join the answers of nodes, by the nodes' names, with what the cluster has: ``published`` devices and facts of claims.

    None for ``published`` where no cluster was asked. A node whose answer is empty is silent.
    """
    silent = [name for name in nodes if not nodes[name]]
    answered = {name: report for name, report in nodes.items() if report}
    by_node: dict[str, list[Json]] = {}
    for one in published or ():
        by_node.setdefault(one["node"], []).append(one)
    notes = [
        {"node": name, **attention("node-silent", f"{name} has not answered", "See why it could not be asked.")}
        for name in silent
    ]
    told = {}
    for name, report in answered.items():
        extra = _published(report, by_node.get(name, [])) if published is not None else {}
        mine = [f"{each['namespace']}/{each['name']}" for each in claims if name in each["nodes"]]
        told[name] = {**report, **extra, "cluster_claims": mine}
        notes += [{"node": name, **each} for each in (*report["attention"], *_of_cluster(extra))]
    for name in sorted(by_node):
        if name and name not in nodes:
            notes.append(
                {
                    "node": name,
                    **attention("node-unknown", f"{name} publishes {len(by_node[name])} devices and was not asked"),
                }
            )
    versions = _versions(answered)
    notes += [{"node": "", **each} for each in (*_of_claims(claims), *_of_versions(versions))]
    return {
        "nodes": told,
        "silent": silent,
        "totals": _totals(answered, published, claims),
        "products": _counted(device["product"] for report in answered.values() for device in report["devices"]),
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
    """Whether what is published is there: a partition may be one that could be made, or have been made since the node was asked."""
    names = {one["uuid"], _parent(one)} - {""}
    return not names or bool(names & set(known))


def _of_cluster(extra: Json) -> list[dict[str, str]]:
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


def _of_claims(claims: Sequence[Json]) -> list[dict[str, str]]:
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
                attention("claim-of-the-past", f"The claim {name} has a device that nobody publishes any more")
            )
    return notes


def _versions(nodes: Mapping[str, Json]) -> dict[str, dict[str, list[str]]]:
    """By what has a version, the nodes that have each of its versions."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, report in nodes.items():
        versions = report["versions"]
        flat = {f"driver of {vendor}": text for vendor, text in versions["drivers"].items()}
        for what, text in {**flat, "release": versions["release"], "kernel": versions["kernel"]}.items():
            if text:
                found.setdefault(what, {}).setdefault(text, []).append(name)
    return found


def _of_versions(versions: Mapping[str, Mapping[str, Sequence[str]]]) -> list[dict[str, str]]:
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


def _counted(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))
