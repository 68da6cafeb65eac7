# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What one node answers of its accelerators. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._facts import device_facts
from ._kinds import kinds_of
from ._layout import Look, assign, needs_reset
from .core.backend import BACKENDS, create
from .core.layout import reset_groups
from .core.layout_differences import by_place, compare, name_of, owner_of, partition_facts
from .core.layout_rules import Rule, document_of, wanted_for
from .core.model import Device
from .core.picture.answers import Json, attention
from .core.prepared import PreparedClaim
from .core.signs import Severity

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


def node_report(answers: Sequence[Answer], rules: Sequence[Rule] | None, source: str, versions: Json) -> Json:
    """Return what is so on a node. ``rules`` are its layout, None where none is known; ``source`` says where they are from."""
    devices: list[Json] = []
    unread: list[str] = []
    notes: list[dict[str, str]] = []
    for answer in answers:
        if answer.look is None:
            notes.append(attention("driver-unavailable", f"No devices of {answer.vendor}: {answer.reason}"))
            continue
        links = linked_groups(answer.look.devices)
        for device in answer.look.devices:
            devices.append(_device(device, answer.look, links.get(device.uuid, "")))
            rule = None if rules is None else wanted_for(device, rules)
            devices[-1]["rule"] = None if rule is None else document_of(rule)
            notes += _notes(device)
        for each in answer.look.faulty:
            unread.append(each.describe())
            notes.append(attention("device-unread", each.describe(), "", each.uuid))
    kinds, names = kinds_of(device for each in answers if each.look is not None for device in each.look.devices)
    for told, name in zip(devices, names):
        told["kind"] = name
    layout = _layout(answers, rules, source)
    notes += [attention("layout-differs", each["message"], "", each["uuid"]) for each in layout["differences"]]
    notes += [attention("layout-refused", each["message"], each["hint"]) for each in layout["refused"]]
    return {
        "devices": devices,
        "kinds": kinds,
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


def _device(device: Device, look: Look, links: str) -> Json:
    facts = device_facts(device)
    mine = [each for each in look.prepared if each.device_uuid == device.uuid]
    partitions = []
    for partition in by_place(device):
        owner, claims = owner_of(device, partition, look.prepared)
        memory = partition.memory_bytes
        partitions.append(
            {
                **partition_facts(partition),
                "profile_id": partition.profile_id,
                "memory_bytes": memory,
                "owner": owner,
                "claims": list(claims),
            }
        )
    return {
        **{key: facts[key] for key in TOLD},
        "groups": _groups(device, links),
        "partitions": partitions,
        "claims": list(dict.fromkeys(each.claim for each in mine)),
        "processes": facts["processes"],
        "health": facts["health"],
    }


def linked_groups(devices: Sequence[Device]) -> dict[str, str]:
    """Return by UUID the group that links connect a device of a machine with, directly or over its switches; groups of one are none.

    A group is called by the indices of its devices. What says itself what its fabric is called is in no group of this kind.
    """
    groups = [[devices[position] for position in group] for group in reset_groups(devices)]
    groups.append([each for each in devices if each.switched])
    return {
        each.uuid: _ranges(sorted(one.index for one in group)) for group in groups if len(group) > 1 for each in group
    }


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, with those that follow each other as a range: 0-3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _groups(device: Device, links: str) -> dict[str, str]:
    """The groups of devices with direct links to each other that a device belongs to, by what people call such a group."""
    facts = create(device.vendor).facts if device.vendor in BACKENDS else None
    found = facts.groups_of(device.attributes) if facts is not None else {}
    if links and facts is not None and facts.links:
        found[facts.links] = links
    return {**found, **({"fabric": str(device.clique)} if device.clique is not None else {})}


def _notes(device: Device) -> list[dict[str, str]]:
    notes = [
        attention("device-unhealthy", f"{device.describe()}: {sign.message}", sign.remedy, device.uuid)
        for sign in device.health.signs
        if sign.severity != Severity.INFORMATIVE
    ]
    if device.partitioning.blocked:
        notes.append(
            attention(
                "no-partitions",
                f"{device.describe()}: no partition can be made at present, so only the whole device is offered",
                device.partitioning.blocked,
                device.uuid,
            )
        )
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
