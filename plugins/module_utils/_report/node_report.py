# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Build the report of a node's accelerators. No side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._layout.apply_layout import NodeScan, assign, needs_reset
from ..core.health.conditions import Severity
from ..core.model import Device
from ..core.partitioning.layout_differences import (
    compare,
    owner_of,
    partition_facts,
    partition_name,
    partitions_by_placement,
)
from ..core.partitioning.layout_plan import groups_of
from ..core.partitioning.rules import Rule, document_of, wanted_for
from ..core.picture.answers import Json, attention
from ..core.store.prepared_claims import PreparedClaim
from ..core.vendors.registry import BACKENDS, create
from .device_facts import device_facts
from .device_kinds import kinds_of

# The device facts in a report. The kinds contain the other facts.
REPORTED = (
    *("vendor", "index", "uuid", "product", "pci_address", "pcie_root", "numa_node", "memory_bytes", "memory_slices"),
    "partitioning",
)


@dataclass(frozen=True)
class Answer:
    """The answer of one vendor's driver: a scan, or the reason why it failed. ``claims`` are the node's prepared claims."""

    vendor: str
    driver_name: str
    scan: NodeScan | None
    claims: tuple[PreparedClaim, ...] = ()
    reason: str = ""


def node_report(answers: Sequence[Answer], rules: Sequence[Rule] | None, source: str, versions: Json) -> Json:
    """Return the report of a node. ``rules`` are its layout, or None if unknown; ``source`` is the origin of the layout."""
    devices: list[Json] = []
    unread: list[str] = []
    notes: list[dict[str, str]] = []
    for answer in answers:
        if answer.scan is None:
            notes.append(attention("driver-unavailable", f"No devices of {answer.vendor}: {answer.reason}"))
            continue
        links = linked_groups(answer.scan.devices)
        for device in answer.scan.devices:
            devices.append(_device(device, answer.scan, links.get(device.uuid, "")))
            rule = None if rules is None else wanted_for(device, rules)
            devices[-1]["rule"] = None if rule is None else document_of(rule)
            notes += _notes(device)
        for each in answer.scan.faulty:
            unread.append(each.describe())
            notes.append(attention("device-unread", each.describe(), "", each.uuid))
    kinds, names = kinds_of(device for each in answers if each.scan is not None for device in each.scan.devices)
    for entry, name in zip(devices, names):
        entry["kind"] = name
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
                "available": each.scan is not None,
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


def _device(device: Device, scan: NodeScan, links: str) -> Json:
    facts = device_facts(device)
    prepared = [each for each in scan.prepared if each.device_uuid == device.uuid]
    partitions = []
    for partition in partitions_by_placement(device):
        owner, claims = owner_of(device, partition, scan.prepared)
        partitions.append(
            {
                **partition_facts(partition),
                "profile_id": partition.profile_id,
                "memory_bytes": partition.memory_bytes,
                "owner": owner,
                "claims": list(claims),
            }
        )
    return {
        **{key: facts[key] for key in REPORTED},
        "groups": _groups(device, links),
        "partitions": partitions,
        "claims": list(dict.fromkeys(each.claim for each in prepared)),
        "processes": facts["processes"],
        "health": facts["health"],
    }


def linked_groups(devices: Sequence[Device]) -> dict[str, str]:
    """Return the group of each linked device, by UUID. Links connect the devices directly or over switches of one host.

    A group is named by its device indices. Single devices have no group, nor do devices that report the name of their fabric.
    """
    linked = groups_of(devices, lambda device, other: other.pci_address in device.linked)
    groups = [[devices[position] for position in group] for group in linked]
    groups.append([each for each in devices if each.switched])
    return {
        each.uuid: _ranges(sorted(one.index for one in group)) for group in groups if len(group) > 1 for each in group
    }


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, with consecutive numbers as ranges: 0-3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _groups(device: Device, links: str) -> dict[str, str]:
    """Return the names of the directly linked groups of a device, by the kind of group."""
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
                f"{device.describe()}: currently no partition can be created, so only the whole device is published",
                device.partitioning.blocked,
                device.uuid,
            )
        )
    if device.partitioning.pending != device.partitioning.enabled:
        notes.append(
            attention(
                "mode-pending",
                f"{device.describe()}: a mode change is pending until a reset",
                "Reset the device while it is not in use, or reboot the node.",
                device.uuid,
            )
        )
    return notes + [
        attention(
            "made-by-hand",
            f"{partition_name(device, each)}: it was created manually in a form that no profile has, so no claim can use it",
            "Create one compute instance that uses the whole partition, or delete the partition.",
            device.uuid,
        )
        for each in partitions_by_placement(device)
        if not each.uuid
    ]


def _layout(answers: Sequence[Answer], rules: Sequence[Rule] | None, source: str) -> Json:
    differences: list[Json] = []
    refused: list[Json] = []
    resets: list[str] = []
    if rules is not None:
        for scan in (each.scan for each in answers if each.scan is not None):
            differences += compare(scan.devices, rules, scan.prepared)
            assigned, errors = assign(scan.devices, rules, scan.prepared)
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
        for device in each.scan.devices if each.scan is not None else ():
            version = device.attributes.get("driverVersion")
            if version is not None:
                found.setdefault(each.vendor, str(version))
    return found
