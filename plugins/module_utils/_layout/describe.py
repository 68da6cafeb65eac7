# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Describe devices as layout rules, and plan changes of modes. No side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.errors import AcceleratorError
from ..core.model import Device
from ..core.partitioning.layout_differences import (
    CLAIM,
    mode_plan,
    mode_rule,
    owner_of,
    partition_name,
    partitions_by_placement,
)
from ..core.partitioning.rules import DYNAMIC, STATIC, WHOLE, Rule, wanted_for
from ..core.picture.answers import FOREIGN
from ..core.store.prepared_claims import PreparedPartition
from .apply_layout import Assignment, assign


def assign_modes(
    devices: Sequence[Device], rules: Sequence[Rule], prepared: Sequence[PreparedPartition]
) -> tuple[tuple[Assignment, ...], tuple[AcceleratorError, ...]]:
    """Assign only modes, like ``assign``. Create no partition, and keep the partitions of devices whose mode does not change."""
    assignments: dict[str, Assignment] = {}
    original: dict[str, Rule] = {}
    mode_changes: list[Rule] = []
    for device in devices:
        rule = wanted_for(device, rules)
        if rule is None:
            continue
        original[device.uuid] = rule
        plan = mode_plan(device, rule)
        if plan is not None:
            assignments[device.uuid] = Assignment(device, rule, plan)
        else:
            mode_changes.append(mode_rule(device, rule))
    assigned, errors = assign(devices, mode_changes, prepared)
    assignments.update({one.device.uuid: replace(one, rule=original[one.device.uuid]) for one in assigned})
    return tuple(assignments[device.uuid] for device in devices if device.uuid in assignments), errors


# ---- the present layout, as rules


def describe_devices(
    devices: Sequence[Device], prepared: Sequence[PreparedPartition] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rules for the current layout, with placements, and descriptions of state that rules cannot express.

    A device with partitions of claims belongs to the driver (mode dynamic). Equal devices share a rule.
    """
    groups: list[tuple[dict[str, Any], list[Device]]] = []
    left_out: list[str] = []
    for device in devices:
        wanted, said = _description(device, prepared)
        left_out += said
        for content, members in groups:
            if content == wanted and members[0].vendor == device.vendor:
                members.append(device)
                break
        else:
            groups.append((wanted, [device]))
    rules = []
    for content, members in groups:
        match: dict[str, Any] = {"vendor": members[0].vendor}
        if len(members) != sum(device.vendor == members[0].vendor for device in devices):
            match["index"] = [device.index for device in members]
        rules.append({"match": match, **content})
    return rules, left_out


def _description(device: Device, prepared: Sequence[PreparedPartition]) -> tuple[dict[str, Any], list[str]]:
    owners = [(partition, *owner_of(device, partition, prepared)) for partition in partitions_by_placement(device)]
    if any(owner == CLAIM for _partition, owner, _claims in owners):
        said = [
            f"{partition_name(device, partition)}: a device with partitions of claims has the mode {DYNAMIC}, which allows no other partitions"
            for partition, owner, _claims in owners
            if owner != CLAIM
        ]
        return {"mode": DYNAMIC}, said
    if not device.partitioning.enabled:
        return {"mode": WHOLE}, []
    usable = [partition for partition, owner, _claims in owners if owner != FOREIGN]
    placed = [
        {"profile": each.profile, "placement": each.placement.start} for each in usable if not each.placement.is_number
    ]
    numbered = [each.profile for each in usable if each.placement.is_number]
    counted = [{"profile": name, "count": numbered.count(name)} for name in dict.fromkeys(numbered)]
    said = [
        f"{partition_name(device, partition)}: no rule describes it"
        for partition, owner, _claims in owners
        if owner == FOREIGN
    ]
    return {"mode": STATIC, "partitions": [*placed, *counted]}, said
