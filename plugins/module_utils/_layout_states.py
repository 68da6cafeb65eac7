# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What else is said and done of layouts: how devices differ from one, the rules that describe them, and modes alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ._layout import Assignment, assign
from .core.errors import AcceleratorError
from .core.layout import (
    DYNAMIC,
    STATIC,
    WHOLE,
    CreatePartition,
    DestroyPartition,
    LayoutPlan,
    Match,
    ResetDevice,
    Rule,
    SetPartitioning,
    claims_on,
    plan_layout,
    wanted_for,
)
from .core.model import Device, Partition
from .core.picture.answers import FOREIGN
from .core.prepared import PreparedPartition

# Whose a partition is: the node driver has made it for a claim; somebody else has made it, as the driver would; or somebody has made it
# by hand in a form that no profile has, so that nobody but them can make it again.
CLAIM, ADMINISTRATOR = "claim", "administrator"

Owner = tuple[str, tuple[str, ...]]


def owner_of(device: Device, partition: Partition, prepared: Sequence[PreparedPartition]) -> Owner:
    """Return whose a partition is, and the claims that hold it."""
    mine = tuple(each for each in prepared if each.device_uuid == device.uuid)
    made = claims_on(partition, tuple(each for each in mine if each.created))
    if made:
        return CLAIM, made
    return (ADMINISTRATOR if partition.uuid else FOREIGN), claims_on(partition, mine)


def name_of(device: Device, partition: Partition) -> str:
    """Name a partition with its device, for a person."""
    if partition.uuid:
        return f"{partition.describe()} on {device.describe()}"
    kind = f"{partition.compute_instances} compute instances" if partition.compute_instances else "no compute instance"
    return f"{partition.profile} at {partition.placement}, made by hand with {kind}, on {device.describe()}"


def by_place(device: Device) -> list[Partition]:
    """Return the partitions of a device in the order of their places."""
    return sorted(device.partitions, key=lambda each: (each.placement, each.profile_id))


# ---- how devices differ from a layout


def compare(
    devices: Sequence[Device],
    rules: Sequence[Rule],
    prepared: Sequence[PreparedPartition] = (),
    *,
    mode_only: bool = False,
) -> list[dict[str, Any]]:
    """Return how the devices differ from what the rules want, one entry for each that does; a layout that cannot be there differs."""
    found = []
    for device in devices:
        rule = wanted_for(device, rules)
        if rule is None:
            continue
        try:
            plan = _mode_plan(device, rule) if mode_only else None
            if plan is None:
                aim = _mode_rule(device, rule) if mode_only else rule
                plan = plan_layout(device, aim, prepared=prepared, refuse=False)
        except AcceleratorError as error:
            found.append(_difference(device, rule, LayoutPlan(device.uuid, (), ()), prepared, error))
            continue
        if plan.steps:
            found.append(_difference(device, rule, plan, prepared, None))
    return found


def _difference(
    device: Device, rule: Rule, plan: LayoutPlan, prepared: Sequence[PreparedPartition], error: AcceleratorError | None
) -> dict[str, Any]:
    missing = [
        {"profile": step.profile, "placement": {"start": step.placement.start, "size": step.placement.size}}
        for step in plan.steps
        if isinstance(step, CreatePartition)
    ]
    surplus = []
    for step in plan.steps:
        if isinstance(step, DestroyPartition):
            owner, claims = owner_of(device, step.partition, prepared)
            surplus.append({**partition_facts(step.partition), "owner": owner, "claims": list(claims)})
    switches = [step.enabled for step in plan.steps if isinstance(step, SetPartitioning)]
    resets = any(isinstance(step, ResetDevice) for step in plan.steps)
    wanted = switches[0] if switches else device.partitioning.pending
    words = []
    if device.partitioning.has_mode and wanted != device.partitioning.enabled:
        words.append(
            f"partitioning is {_word(device.partitioning.enabled)} and is to be {_word(wanted)}"
            + (", which takes a reset" if resets else "")
        )
    elif switches:
        words.append(f"partitioning would be {_word(not wanted)} after the next reset and is to stay {_word(wanted)}")
    if missing:
        words.append(f"missing: {', '.join(_at(each) for each in missing)}")
    if surplus:
        words.append(f"not wanted: {', '.join(_at(each) for each in surplus)}")
    if error is not None:
        words.append(str(error))
    return {
        "index": device.index,
        "uuid": device.uuid,
        "product": device.product,
        "pci_address": device.pci_address,
        "wanted": rule.describe(),
        "mode": {"found": device.partitioning.enabled, "wanted": wanted} if device.partitioning.has_mode else None,
        "missing": missing,
        "surplus": surplus,
        "held_by": [str(each) for each in plan.blockers],
        "error": error.to_dict() if error is not None else None,
        "message": f"{device.describe()} is not as wanted ({rule.describe()}): {'; '.join(words)}",
    }


def unread_difference(name: str, message: str, index: int, uuid: str) -> dict[str, Any]:
    """Return the entry of a device that could not be read: nobody can say that it is as wanted."""
    return {
        "index": index,
        "uuid": uuid,
        "product": "",
        "pci_address": "",
        "wanted": "",
        "mode": None,
        "missing": [],
        "surplus": [],
        "held_by": [],
        "error": {"code": "unread", "message": message, "hint": ""},
        "message": f"{name} could not be read: {message}",
    }


def partition_facts(partition: Partition) -> dict[str, Any]:
    """Return what a layout is about, of a partition."""
    return {
        "profile": partition.profile,
        "placement": {"start": partition.placement.start, "size": partition.placement.size},
        "uuid": partition.uuid,
    }


def _word(enabled: bool) -> str:
    return "on" if enabled else "off"


def _at(one: dict[str, Any]) -> str:
    held = f" of {', '.join(one['claims'])}" if one.get("claims") else ""
    return f"{one['profile']} at {one['placement']['start']}{held}"


# ---- modes alone


def _wants_on(device: Device, rule: Rule) -> bool:
    if rule.mode == DYNAMIC:
        return device.partitioning.needs_reset or device.partitioning.enabled
    return rule.mode == STATIC


def _mode_plan(device: Device, rule: Rule) -> LayoutPlan | None:
    """Return the plan for a device whose mode is as wanted already: its partitions stay, whatever they are. None for another."""
    state, on = device.partitioning, _wants_on(device, rule)
    if not state.supported or state.enabled != on:
        return None
    steps = (SetPartitioning(device.uuid, on),) if state.pending != on else ()
    return LayoutPlan(device.uuid, steps, device.partitions)


def _mode_rule(device: Device, rule: Rule) -> Rule:
    return Rule(Match(uuid=(device.uuid,)), STATIC if _wants_on(device, rule) else WHOLE)


def assign_modes(
    devices: Sequence[Device], rules: Sequence[Rule], prepared: Sequence[PreparedPartition]
) -> tuple[tuple[Assignment, ...], tuple[AcceleratorError, ...]]:
    """As ``assign``, of the mode alone: no partition is made, and none goes where the mode stays."""
    ready: dict[str, Assignment] = {}
    original: dict[str, Rule] = {}
    changing: list[Rule] = []
    for device in devices:
        rule = wanted_for(device, rules)
        if rule is None:
            continue
        original[device.uuid] = rule
        plan = _mode_plan(device, rule)
        if plan is not None:
            ready[device.uuid] = Assignment(device, rule, plan)
        else:
            changing.append(_mode_rule(device, rule))
    assigned, errors = assign(devices, changing, prepared)
    made = {one.device.uuid: replace(one, rule=original[one.device.uuid]) for one in assigned}
    return tuple((ready | made)[device.uuid] for device in devices if device.uuid in ready | made), errors


# ---- the present layout, as rules


def describe_devices(
    devices: Sequence[Device], prepared: Sequence[PreparedPartition] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rules that describe the devices as they are, places included, and what rules cannot say.

    A device with partitions of claims is the driver's, mode dynamic. Devices that are alike share a rule.
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
    owners = [(partition, *owner_of(device, partition, prepared)) for partition in by_place(device)]
    if any(owner == CLAIM for _partition, owner, _claims in owners):
        said = [
            f"{name_of(device, partition)}: the device has partitions of claims and is described as {DYNAMIC}, which has no others"
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
        f"{name_of(device, partition)}: no rule describes it"
        for partition, owner, _claims in owners
        if owner == FOREIGN
    ]
    return {"mode": STATIC, "partitions": [*placed, *counted]}, said
