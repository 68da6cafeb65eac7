# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What a node says of a new layout: the operations that lead to it, and what its driver is told before and after each. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._layout import Look
from .core.backend_protocol import Backend
from .core.errors import AcceleratorError, Unsupported
from .core.layout import CreatePartition, ResetDevice, SetPartitioning
from .core.layout_rules import Rule, wanted_for
from .core.model import Device
from .core.packing import PODS
from .core.repartition import Operation, driver_rules, plan_operations, same_for_driver
from .core.repartition_record import Record
from .core.repartition_settings import Unrest

Json = dict[str, Any]


@dataclass(frozen=True)
class Vendor:
    """One vendor's devices of a node: what a look has told, the backend's pure functions, and the operation under way, if any."""

    backend: Backend
    look: Look
    record: Record | None = None
    unrest: Mapping[str, Unrest] = field(default_factory=dict)


def node_plan(
    vendors: Sequence[Vendor],
    rules: Sequence[Rule],
    former: Sequence[Rule],
    documents: Sequence[Json],
    *,
    pods: Mapping[str, int],
    reset: str | None,
    prefer: str = PODS,
    settings_reset: str | None = None,
) -> tuple[Json, list[AcceleratorError]]:
    """Return the node's operations in order, with what is left of an earlier run, and what stands in the way of anything.

    ``former`` are the rules that the driver works by, ``documents`` the same as they were written. ``pods`` says how many a claim has.
    Resets need ``reset`` to be when_needed; those for settings need ``settings_reset`` to be so.
    ``prefer`` says what is disturbed the least, before anything else.
    """
    errors: list[AcceleratorError] = []
    planned: list[tuple[Vendor, Operation]] = []
    for each in vendors:
        found, problems = plan_operations(
            each.backend, each.look.devices, rules, each.look.prepared, pods, former, prefer, each.unrest
        )
        errors += problems
        errors += [_without_consent(one) for one in found if _resets_for_mode(one) and reset != "when_needed"]
        errors += [
            _without_consent_for_settings(one)
            for one in found
            if any(each.unrest[uuid].resets for uuid in one.uuids if uuid in each.unrest)
            and settings_reset != "when_needed"
        ]
        planned += [(each, one) for one in found]
    planned.sort(key=_turn)
    devices = [device for each in vendors for device in each.look.devices]
    pending = {uuid for _each, one in planned for uuid in one.uuids}
    operations: list[Json] = []
    for each, one in planned:
        before = driver_rules(devices, rules, former, pending)
        pending -= set(one.uuids)
        after = driver_rules(devices, rules, former, pending)
        begun = _begun(each, one)
        operations.append(
            {
                "operation": operation_name(one),
                "vendor": each.backend.vendor,
                "driver": each.backend.driver_name,
                **one.to_dict(),
                # Where it was begun by an earlier run, what was there before that is what there is to go back to.
                **(_gone_on_with(one, begun) if begun is not None else {}),
                "resumes": begun is not None,
                "tells_driver": any(not same_for_driver(device, rules, former) for device in one.devices),
                "driver_layout_before": [*before, *documents],
                "driver_layout": [*after, *documents],
            }
        )
    return {
        "operations": operations,
        "unfinished": [
            {"driver": each.backend.driver_name, **each.record.to_dict()} for each in vendors if each.record is not None
        ],
        "untouched": [_untouched(device) for device in devices if not _is_in(device, planned)],
        "unmatched": [device.describe() for device in devices if wanted_for(device, rules) is None],
        "unread": [finding.describe() for each in vendors for finding in each.look.faulty],
        "before": [_state(device) for device in devices],
        "after": [_after(device, planned) for device in devices],
    }, errors


def _begun(vendor: Vendor, operation: Operation) -> Record | None:
    """Return the record of the run before this one, if that has begun the operation."""
    record = vendor.record
    return record if record is not None and set(record.devices) & set(operation.uuids) else None


def _turn(each: tuple[Vendor, Operation]) -> tuple[bool, bool]:
    """Return what operations go by, which otherwise have the devices' order.

    First comes what an earlier run has begun: nothing else can begin while its record is there. Then come those for which nobody has to go,
    so that who goes finds what these make.
    """
    vendor, operation = each
    return _begun(vendor, operation) is None, bool(operation.claims)


def _gone_on_with(operation: Operation, begun: Record) -> Json:
    """What an operation has of the run that has begun it: the way back, and names that may be published although what they name is gone."""
    names = list(dict.fromkeys((*operation.names, *begun.names)))
    return {"names": names, **({"former": [dict(rule) for rule in begun.former]} if begun.former else {})}


def operation_name(operation: Operation) -> str:
    """Return what an operation is called: the same at each run, for the same devices."""
    return f"repartition-{hashlib.sha256(' '.join(sorted(operation.uuids)).encode()).hexdigest()[:12]}"


def _without_consent(operation: Operation) -> AcceleratorError:
    return Unsupported(
        f"{'; '.join(device.describe() for device in operation.devices)}: the mode changes only by a reset of "
        "these devices together, and nobody has said that they may be reset",
        hint="Set reset to when_needed. Pods are evicted first, by your word on evictions.",
        code="reset-needs-consent",
    )


def _resets_for_mode(operation: Operation) -> bool:
    """Whether a reset is needed for the layout's own sake: not for settings alone."""
    modes = {step.device_uuid for step in operation.steps if isinstance(step, SetPartitioning)}
    waiting = any(each.partitioning.needs_reset and each.uuid in modes for each in operation.devices)
    return operation.resets and (waiting or not operation.settings)


def _without_consent_for_settings(operation: Operation) -> AcceleratorError:
    return Unsupported(
        f"{'; '.join(device.describe() for device in operation.devices)}: ECC changes only by a reset of these devices together, and nobody "
        "has said that they may be reset",
        hint="Set settings_reset to when_needed. Pods are evicted first, by your word on evictions.",
        code="reset-needs-consent",
    )


def _is_in(device: Device, planned: Sequence[tuple[Vendor, Operation]]) -> bool:
    return any(device.uuid in one.uuids for _each, one in planned)


def _untouched(device: Device) -> Json:
    return {"index": device.index, "uuid": device.uuid, "product": device.product, "vendor": device.vendor}


def _state(device: Device) -> Json:
    """A device in a line of a diff: its mode and partitions, in the order of their places."""
    partitions = [
        f"{each.profile} at {each.placement}" for each in sorted(device.partitions, key=lambda one: one.placement)
    ]
    mode = "partitioned" if device.partitioning.enabled and device.partitioning.supported else "whole"
    return {"device": device.describe(), "uuid": device.uuid, "mode": mode, "partitions": partitions}


def _after(device: Device, planned: Sequence[tuple[Vendor, Operation]]) -> Json:
    """The same when all operations are done."""
    for _each, one in planned:
        if device.uuid not in one.uuids:
            continue
        mine = [step for step in one.steps if not isinstance(step, ResetDevice) and step.device_uuid == device.uuid]
        stays = [(each.placement, each.profile) for uuid, each in one.kept if uuid == device.uuid]
        made = [(step.placement, step.profile) for step in mine if isinstance(step, CreatePartition)]
        modes = [step.enabled for step in mine if isinstance(step, SetPartitioning)]
        enabled = modes[-1] if modes else device.partitioning.enabled and device.partitioning.supported
        return {
            "device": device.describe(),
            "uuid": device.uuid,
            "mode": "partitioned" if enabled else "whole",
            "partitions": [f"{profile} at {placement}" for placement, profile in sorted(stays + made)],
        }
    return _state(device)


def lines(one: Json) -> str:
    """Return a device's line of a diff as text."""
    return "\n".join([one["mode"], *(f"  {each}" for each in one["partitions"])]) + "\n"


def difference(before: Sequence[Json], after: Sequence[Json]) -> list[dict[str, str]]:
    """Return Ansible's diff, an entry for each device that changes."""
    return [
        {"before_header": old["device"], "after_header": new["device"], "before": lines(old), "after": lines(new)}
        for old, new in zip(before, after)
        if lines(old) != lines(new)
    ]
