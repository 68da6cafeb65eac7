# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Describe the differences between devices and a layout: in full for people, and short for the cluster.

No side effects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..decoding import loads
from ..errors import AcceleratorError
from ..model import Device, Partition
from ..picture.answers import FOREIGN
from ..store.prepared_claims import PreparedPartition
from ..texts import shorten
from .layout_plan import (
    CreatePartition,
    DestroyPartition,
    LayoutPlan,
    ResetDevice,
    SetPartitioning,
    claims_on,
    plan_layout,
)
from .rules import DYNAMIC, STATIC, WHOLE, Match, Rule, wanted_for

# The owner of a partition: the node driver created it for a claim (CLAIM), or an administrator created it in the same form
# (ADMINISTRATOR). FOREIGN is a manual partition in a form of no profile, which only its creator can recreate.
CLAIM, ADMINISTRATOR = "claim", "administrator"

#: The owner of a partition, and the claims that use it.
Owner = tuple[str, tuple[str, ...]]


def owner_of(device: Device, partition: Partition, prepared: Sequence[PreparedPartition]) -> Owner:
    """Return the owner of a partition, and the claims that use it."""
    mine = tuple(each for each in prepared if each.device_uuid == device.uuid)
    owning_claims = claims_on(partition, tuple(each for each in mine if each.created))
    if owning_claims:
        return CLAIM, owning_claims
    return (ADMINISTRATOR if partition.uuid else FOREIGN), claims_on(partition, mine)


def partition_name(device: Device, partition: Partition) -> str:
    """Return the name of a partition and its device for messages."""
    if partition.uuid:
        return f"{partition.describe()} on {device.describe()}"
    kind = f"{partition.compute_instances} compute instances" if partition.compute_instances else "no compute instance"
    return f"{partition.profile} at {partition.placement}, created manually with {kind}, on {device.describe()}"


def partitions_by_placement(device: Device) -> list[Partition]:
    """Return the partitions of a device, sorted by placement."""
    return sorted(device.partitions, key=lambda each: (each.placement, each.profile_id))


# ---- differences between devices and a layout


def compare(
    devices: Sequence[Device],
    rules: Sequence[Rule],
    prepared: Sequence[PreparedPartition] = (),
    *,
    mode_only: bool = False,
) -> list[dict[str, Any]]:
    """Return the differences between the devices and the rules, one entry for each device that differs.

    A device whose layout is not possible counts as different.
    """
    found = []
    for device in devices:
        rule = wanted_for(device, rules)
        if rule is None:
            continue
        try:
            plan = mode_plan(device, rule) if mode_only else None
            if plan is None:
                desired = mode_rule(device, rule) if mode_only else rule
                plan = plan_layout(device, desired, prepared=prepared, refuse=False)
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
    requested = switches[0] if switches else device.partitioning.pending
    texts = []
    if device.partitioning.has_mode and requested != device.partitioning.enabled:
        texts.append(
            f"partitioning is {_on_or_off(device.partitioning.enabled)} and is to be {_on_or_off(requested)}"
            + (", which takes a reset" if resets else "")
        )
    elif switches:
        texts.append(
            f"partitioning would be {_on_or_off(not requested)} after the next reset and is to stay {_on_or_off(requested)}"
        )
    if missing:
        texts.append(f"missing: {', '.join(map(_place_text, missing))}")
    if surplus:
        texts.append(f"not requested: {', '.join(map(_place_and_claims_text, surplus))}")
    if error is not None:
        texts.append(str(error))
    return {
        "index": device.index,
        "uuid": device.uuid,
        "product": device.product,
        "pci_address": device.pci_address,
        "requested": rule.describe(),
        "mode": {"found": device.partitioning.enabled, "requested": requested}
        if device.partitioning.has_mode
        else None,
        "missing": missing,
        "surplus": surplus,
        "held_by": [str(each) for each in plan.blockers],
        "error": error.to_dict() if error is not None else None,
        "message": f"{device.describe()} differs from the requested layout ({rule.describe()}): {'; '.join(texts)}",
    }


def unread_difference(name: str, message: str, index: int, uuid: str) -> dict[str, Any]:
    """Return the entry of a device that could not be read, so that its state is unknown."""
    return {
        "index": index,
        "uuid": uuid,
        "product": "",
        "pci_address": "",
        "requested": "",
        "mode": None,
        "missing": [],
        "surplus": [],
        "held_by": [],
        "error": {"code": "unread", "message": message, "hint": ""},
        "message": f"{name} could not be read: {message}",
    }


def partition_facts(partition: Partition) -> dict[str, Any]:
    """Return the properties of a partition that a layout defines."""
    return {
        "profile": partition.profile,
        "placement": {"start": partition.placement.start, "size": partition.placement.size},
        "uuid": partition.uuid,
    }


def _on_or_off(enabled: bool) -> str:
    return "on" if enabled else "off"


def _place_text(partition: Mapping[str, Any]) -> str:
    return f"{partition['profile']} at {partition['placement']['start']}"


def _place_and_claims_text(partition: Mapping[str, Any]) -> str:
    return _place_text(partition) + (f" of {', '.join(partition['claims'])}" if partition["claims"] else "")


# ---- short form for the cluster

#: The annotation, on a node's first ResourceSlice, with the devices that differ from the node's layout, and the
#: differences.
ANNOTATION = "dra.accelerators/layout-differs"
# The annotation stays far below 256 KiB, the limit for all annotations of an object (k8s.io/apimachinery,
# TotalAnnotationSizeLimitB).
MOST_DEVICES, MOST_STEPS, LONGEST_TEXT = 64, 8, 160


def summarize_difference(difference: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of ``compare`` in short form: desired state, steps, holders of deleted partitions, and error."""
    mode = difference["mode"]
    steps = []
    if mode and mode["found"] != mode["requested"]:
        steps.append(f"partitioning {_on_or_off(mode['requested'])}")
    steps += [f"− {_place_text(each)}" for each in difference["surplus"]]
    steps += [f"+ {_place_text(each)}" for each in difference["missing"]]
    return {
        "wanted": difference["requested"],
        "steps": steps,
        "held_by": difference["held_by"],
        "error": (difference["error"] or {}).get("message", ""),
    }


def annotation_text(differences: Iterable[Mapping[str, Any]]) -> str:
    """Return entries of ``compare`` in the form of the annotation: text of a limited length, "" if there are no entries.

    All users with read access to slices can read it, so it contains no claims and no processes. It changes only when
    the devices or their layout change.
    """
    found = {}
    for each in list(differences)[:MOST_DEVICES]:
        summary = summarize_difference(each)
        steps = summary["steps"]
        more = [f"and {len(steps) - MOST_STEPS} more"] if len(steps) > MOST_STEPS else []
        found[each["uuid"]] = {
            "index": each["index"],
            "wanted": shorten(summary["wanted"], LONGEST_TEXT),
            "steps": [shorten(step, LONGEST_TEXT) for step in steps[:MOST_STEPS]] + more,
            "error": shorten(summary["error"], LONGEST_TEXT),
        }
    return json.dumps(found, ensure_ascii=False, sort_keys=True, separators=(",", ":")) if found else ""


def parse_annotation(text: str) -> dict[str, dict[str, Any]]:
    """Return the content of the annotation by device UUID, in the form of ``summarize_difference`` with the ``index``.

    Empty for invalid text.
    """
    if not text:
        return {}  # nearly every slice of a large fleet
    try:
        return {
            str(uuid): {
                "index": int(each["index"]),
                "wanted": str(each["wanted"]),
                "steps": [str(step) for step in each["steps"]],
                "held_by": [],
                "error": str(each["error"]),
            }
            for uuid, each in loads(text).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def differences_in_slices(slices: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the published differences by node and device UUID. Only the newest generation of a pool counts."""
    newest: dict[tuple[str, str], int] = {}
    annotated = []
    for each in slices:
        spec = each["spec"]
        pool = (str(spec["driver"]), str(spec["pool"]["name"]))
        generation = int(spec["pool"].get("generation", 0))
        newest[pool] = max(newest.get(pool, 0), generation)
        text = (each["metadata"].get("annotations") or {}).get(ANNOTATION)
        if text and spec.get("nodeName"):
            annotated.append((pool, generation, str(spec["nodeName"]), str(text)))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for pool, generation, node, text in annotated:
        if generation == newest[pool]:
            found.setdefault(node, {}).update(parse_annotation(text))
    return found


# ---- modes only


def _wants_partitioning(device: Device, rule: Rule) -> bool:
    if rule.mode == DYNAMIC:
        return device.partitioning.needs_reset or device.partitioning.enabled
    return rule.mode == STATIC


def mode_plan(device: Device, rule: Rule) -> LayoutPlan | None:
    """Return the plan for a device that already has the desired mode, without changes to its partitions.

    None for other devices.
    """
    state, enable = device.partitioning, _wants_partitioning(device, rule)
    if not state.supported or state.enabled != enable:
        return None
    steps = (SetPartitioning(device.uuid, enable),) if state.pending != enable else ()
    return LayoutPlan(device.uuid, steps, device.partitions)


def mode_rule(device: Device, rule: Rule) -> Rule:
    """Return a rule that requires only the mode of another rule for a device."""
    return Rule(Match(uuid=(device.uuid,)), STATIC if _wants_partitioning(device, rule) else WHOLE)
