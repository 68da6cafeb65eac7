# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan a node's operations for a new layout, and the driver's layout before and after each operation. No side effects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import AcceleratorError, Unsupported
from ..core.health.resets import blocked_reset
from ..core.model import Device
from ..core.partitioning.layout_plan import CreatePartition, ResetDevice, SetPartitioning
from ..core.partitioning.placement import PODS
from ..core.partitioning.rules import Rule, wanted_for
from ..core.repartition.operations import Operation, driver_rules, plan_operations, publish_equally, rule_document
from ..core.repartition.record import Record
from ..core.repartition.settings_changes import IdleSettings
from ..core.settings.settings_plan import parse_settings
from ..core.vendors.protocol import Backend
from .apply_layout import NodeScan

Json = dict[str, Any]


@dataclass(frozen=True)
class Vendor:
    """One vendor's devices of a node: the scan, the backend, and the operation in progress, if any."""

    backend: Backend
    scan: NodeScan
    record: Record | None = None
    idle_settings: Mapping[str, IdleSettings] = field(default_factory=dict)


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
    settings: Sequence[Json] = (),
    boot_settings: Sequence[Json] = (),
) -> tuple[Json, list[AcceleratorError]]:
    """Return the node's operations in order with the records of interrupted runs, and the errors that block an operation.

    ``former`` are the current rules of the driver, ``documents`` are the same rules as written. ``pods`` is the number of
    pods by claim. Resets need ``reset`` to be when_needed. Resets for settings need ``settings_reset`` to be when_needed.
    ``settings`` are the desired rules of settings, ``boot_settings`` those for the next boot. ``prefer`` selects what is
    disturbed the least, before all other criteria.
    """
    errors: list[AcceleratorError] = []
    planned: list[tuple[Vendor, Operation]] = []
    for each in vendors:
        found, problems = plan_operations(
            each.backend, each.scan.devices, rules, each.scan.prepared, pods, former, prefer, each.idle_settings
        )
        errors += problems
        errors += [_without_consent(one) for one in found if _resets_for_mode(one) and reset != "when_needed"]
        errors += [
            _without_consent_for_settings(one)
            for one in found
            if any(each.idle_settings[uuid].resets for uuid in one.uuids if uuid in each.idle_settings)
            and settings_reset != "when_needed"
        ]
        blocked = blocked_reset(device for one in found if one.resets for device in one.devices)
        errors += [] if blocked is None else [blocked]
        planned += [(each, one) for one in found]
    planned.sort(key=_turn)
    devices = [device for each in vendors for device in each.scan.devices]
    pending = {uuid for _each, one in planned for uuid in one.uuids}
    operations: list[Json] = []
    kept = list(boot_settings)
    for each, one in planned:
        before = driver_rules(devices, rules, former, pending)
        pending -= set(one.uuids)
        after = driver_rules(devices, rules, former, pending)
        begun = _begun(each, one)
        document = one.to_dict()
        if begun is not None:
            # The record has the state before an operation that an earlier run has begun.
            document.update(_resumed_state(one, begun))
        changed = [device for device in one.devices if device.uuid in _by_device(document["former_settings"])]
        previous = _previous_boot_settings(changed, document["former_settings"], kept, begun)
        # An interrupted run can have written its rules for the next boot.
        kept_before = kept if begun is None else [*previous, *_without_rules_of(changed, kept)]
        if changed:
            own = _own_rules(changed, settings)
            kept = [*own, *_without_rules_of([device for device in changed if device.uuid in _by_device(own)], kept)]
        operations.append(
            {
                "operation": operation_name(one),
                "vendor": each.backend.vendor,
                "driver": each.backend.driver_name,
                **document,
                "resumes": begun is not None,
                "tells_driver": any(not publish_equally(device, rules, former) for device in one.devices),
                "driver_layout_before": [*before, *documents],
                "driver_layout": [*after, *documents],
                "former_boot_settings": previous,
                "boot_settings_before": kept_before if changed else [],
                "boot_settings": kept if changed else [],
            }
        )
    return {
        "operations": operations,
        "unfinished": [
            {"driver": each.backend.driver_name, **each.record.to_dict()} for each in vendors if each.record is not None
        ],
        "untouched": [_untouched(device) for device in devices if not _is_in(device, planned)],
        "unmatched": [device.describe() for device in devices if wanted_for(device, rules) is None],
        "unread": [finding.describe() for each in vendors for finding in each.scan.faulty],
        "before": [_state(device) for device in devices],
        "after": [_after(device, planned) for device in devices],
    }, errors


def _by_device(rules: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return single-device rules by the UUID of their device."""
    return {rule["match"]["uuid"][0]: rule for rule in rules}


def _own_rules(devices: Sequence[Device], documents: Sequence[Json]) -> list[Json]:
    """Return single-device settings rules: for each matched device, its first matching rule."""
    rules = list(zip(parse_settings(list(documents)), documents))
    found = []
    for device in devices:
        document = next((each for rule, each in rules if rule.match.matches(device)), None)
        if document is not None:
            found.append(rule_document(device, {key: value for key, value in document.items() if key != "match"}))
    return found


def _without_rules_of(devices: Sequence[Device], rules: Sequence[Json]) -> list[Json]:
    """Return the rules without the single-device rules of these devices."""
    own = [rule_document(device, {})["match"] for device in devices]
    return [rule for rule in rules if rule["match"] not in own]


def _previous_boot_settings(
    devices: Sequence[Device], former_settings: Sequence[Json], kept: Sequence[Json], begun: Record | None
) -> list[Json]:
    """Return the settings rules for the next boot from before the operation, one for each device.

    A record of an earlier release lacks them. Then the current rules are used, with the previous values of the settings
    that the operation changes.
    """
    if begun is not None and begun.former_boot_settings is not None:
        uuids = {device.uuid for device in devices}
        return [dict(rule) for uuid, rule in _by_device(begun.former_boot_settings).items() if uuid in uuids]
    own = _own_rules(devices, kept)
    if begun is None:
        return own
    found, former = _by_device(own), _by_device(former_settings)
    return [{**found.get(device.uuid, {}), **former[device.uuid]} for device in devices]


def _begun(vendor: Vendor, operation: Operation) -> Record | None:
    """Return the record of an interrupted run if that run has begun this operation."""
    record = vendor.record
    return record if record is not None and set(record.devices) & set(operation.uuids) else None


def _turn(each: tuple[Vendor, Operation]) -> tuple[bool, bool]:
    """Return the sort key of an operation. Equal keys keep the order of the devices.

    An operation that an earlier run has begun is first: no other can begin while its record exists. Then follow the
    operations that evict no pods, so that evicted pods can use the devices of these operations.
    """
    vendor, operation = each
    return _begun(vendor, operation) is None, bool(operation.claims)


def _resumed_state(operation: Operation, begun: Record) -> Json:
    """Return the previous state from the record of the run that began the operation, and the device names of both runs."""
    names = list(dict.fromkeys((*operation.names, *begun.names)))
    before, now = _by_device(begun.former_settings), _by_device(operation.former_settings)
    settings = [
        {**now.get(uuid, {}), **before.get(uuid, {})} for uuid in operation.uuids if uuid in before or uuid in now
    ]
    return {
        "names": names,
        "former_settings": settings,
        "emptied": [dict(rule) for rule in operation.emptied] if settings else [],
        **({"former": [dict(rule) for rule in begun.former]} if begun.former else {}),
    }


def operation_name(operation: Operation) -> str:
    """Return the name of an operation, which is the same at each run for the same devices."""
    return f"repartition-{hashlib.sha256(' '.join(sorted(operation.uuids)).encode()).hexdigest()[:12]}"


def _without_consent(operation: Operation) -> AcceleratorError:
    return Unsupported(
        f"{'; '.join(device.describe() for device in operation.devices)}: the mode changes only by a reset of "
        "these devices together, and the option reset does not allow it",
        hint="Set reset to when_needed. Pods are evicted first, as your eviction options allow.",
        code="reset-needs-consent",
    )


def _resets_for_mode(operation: Operation) -> bool:
    """Return whether the layout itself needs a reset, not only the settings."""
    modes = {step.device_uuid for step in operation.steps if isinstance(step, SetPartitioning)}
    waiting = any(each.partitioning.needs_reset and each.uuid in modes for each in operation.devices)
    return operation.resets and (waiting or not operation.settings)


def _without_consent_for_settings(operation: Operation) -> AcceleratorError:
    return Unsupported(
        f"{'; '.join(device.describe() for device in operation.devices)}: ECC changes only by a reset of these devices together, and the "
        "option settings_reset does not allow it",
        hint="Set settings_reset to when_needed. Pods are evicted first, as your eviction options allow.",
        code="reset-needs-consent",
    )


def _is_in(device: Device, planned: Sequence[tuple[Vendor, Operation]]) -> bool:
    return any(device.uuid in one.uuids for _each, one in planned)


def _untouched(device: Device) -> Json:
    return {"index": device.index, "uuid": device.uuid, "product": device.product, "vendor": device.vendor}


def _state(device: Device) -> Json:
    """Return a device for a diff: its mode and partitions, in the order of their placements."""
    partitions = [
        f"{each.profile} at {each.placement}" for each in sorted(device.partitions, key=lambda one: one.placement)
    ]
    mode = "partitioned" if device.partitioning.enabled and device.partitioning.supported else "whole"
    return {"device": device.describe(), "uuid": device.uuid, "mode": mode, "partitions": partitions}


def _after(device: Device, planned: Sequence[tuple[Vendor, Operation]]) -> Json:
    """Return a device for a diff, in its state after all operations."""
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
    """Return the text of a device for a diff."""
    return "\n".join([one["mode"], *(f"  {each}" for each in one["partitions"])]) + "\n"


def difference(before: Sequence[Json], after: Sequence[Json]) -> list[dict[str, str]]:
    """Return Ansible's diff, with an entry for each device that changes."""
    return [
        {"before_header": old["device"], "after_header": new["device"], "before": lines(old), "after": lines(new)}
        for old, new in zip(before, after)
        if lines(old) != lines(new)
    ]
