# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Functions of the modules that apply a layout to a vendor's devices: scan, plan, reject, apply, and report.

They also save and restore checkpoints. ``layout_info`` has the functions that change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from .._module import fail_all
from ..core.discovery.device_locks import DeviceLocks
from ..core.errors import AcceleratorError, NotFound
from ..core.health.resets import held_reset
from ..core.host.system import System
from ..core.model import Device, Process
from ..core.partitioning.layout_differences import owner_of, partition_facts
from ..core.partitioning.layout_plan import ResetDevice
from ..core.partitioning.rules import Rule, unmatched_indices
from ..core.settings.settings_record import record_damage, record_path
from ..core.store.prepared_claims import wake_driver
from ..core.vendors.protocol import Backend
from .apply_layout import (
    Assignment,
    NodeScan,
    Rules,
    apply,
    assign,
    changed_device_uuids,
    devices_in_result,
    difference,
    library_for_resets,
    report,
    scan_node,
    state,
    undisturbed,
)
from .checkpoint import Restoration, assign_restoration, parse, restoration, to_text, unrestorable

#: Values of the option ``state``. Only PRESENT accepts a layout.
PRESENT, CHECKPOINTED, RESTORED = "present", "checkpointed", "restored"
STATE_OPTIONS: dict[str, Any] = {
    "state": {"type": "str", "choices": [PRESENT, CHECKPOINTED, RESTORED], "default": PRESENT},
    "checkpoint_file": {"type": "path"},
    "on_foreign": {"type": "str", "choices": ["fail", "leave_out"], "default": "fail"},
}
STATE_REQUIRED_IF = [("state", state, ("checkpoint_file",)) for state in (CHECKPOINTED, RESTORED)]


Assigned = tuple[tuple[Assignment, ...], tuple[AcceleratorError, ...]]


@dataclass(frozen=True)
class Layouts:
    """The parts that differ between the modules.

    * ``name``: the name of the module.
    * ``word``: the term for its devices.
    * ``rules``: returns the rules of the module's options for the scanned devices.
    * ``plan``: returns the assignments for these rules, and the errors of devices without a plan.
    * ``allow``: returns the assignments that the options allow. Raises AcceleratorError for a step that they do not allow.
    * ``explain``: returns an error with details about the devices.
    * ``before``: runs once before the first step, if there are steps.
    * ``holders``: returns the processes that would prevent a reset of these devices (UUIDs).
    """

    name: str
    word: str
    rules: Rules
    plan: Callable[[NodeScan, tuple[Rule, ...]], Assigned] = lambda scan, rules: assign(
        scan.devices, rules, scan.prepared
    )
    allow: Callable[[Sequence[Assignment]], tuple[Assignment, ...]] = tuple
    explain: Callable[[AcceleratorError, Sequence[Device]], AcceleratorError] = lambda error, _devices: error
    before: Callable[[], object] = lambda: None
    holders: Callable[[Sequence[str]], Sequence[Process]] = lambda _uuids: ()


Decision = tuple[tuple[Device, ...], tuple[Assignment, ...], list[str]]


def partition_devices(module: AnsibleModule, backend: Backend, layouts: Layouts) -> dict[str, Any]:
    """Apply the layout to the devices of an open backend, and return the result. Check mode returns the predicted result."""
    devices, assignments, warnings = _decide(module, backend, layouts)
    result = report(devices, assignments, layouts.word)
    if module.check_mode:
        warnings += held_reset_warnings(layouts, devices, assignments)
    elif result["changed"]:
        directory = str(Path(module.params["state_path"]).parent)
        locks = DeviceLocks(directory, f"the module {layouts.name}")
        with undisturbed(locks, changed_device_uuids(assignments)) as check:
            devices, assignments, warnings = _decide(module, backend, layouts)
            check(assignments)
            result = report(devices, assignments, layouts.word)
            if result["changed"]:
                try:
                    layouts.before()
                    with library_for_resets(locks, assignments, lambda: wake_driver(directory)):
                        apply(backend, assignments)
                finally:
                    wake_driver(directory)
                result["after"] = [state(backend.device(device.uuid)) for device in devices]
                result["diff"] = difference(result["before"], result["after"], layouts.word)
    if result["changed"]:
        # A reset or a change of the mode deletes the settings of the device.
        warnings += [text for text in [record_damage(System(), record_path(backend.vendor))] if text]
    for text in warnings:
        module.warn(text)
    return result


def held_reset_warnings(layouts: Layouts, devices: Sequence[Device], assignments: Sequence[Assignment]) -> list[str]:
    """Return warnings about processes that would prevent a planned reset. A run without check mode fails with the same processes."""
    groups = [step.device_uuids for one in assignments for step in one.plan.steps if isinstance(step, ResetDevice)]
    found = [held_reset([each for each in devices if each.uuid in group], layouts.holders(group)) for group in groups]
    return [text for text in found if text]


def _decide(module: AnsibleModule, backend: Backend, layouts: Layouts) -> Decision:
    """Scan the devices, and plan. Return the devices of the layout, their assignments, and warnings."""
    scan = scan_node(backend, module.params["state_path"])
    warnings = [f"One {layouts.word} keeps its layout: {each.describe()}" for each in scan.faulty]
    rules = layouts.rules(scan)
    warnings += unmatched_indices(rules, scan.devices, [each.index for each in scan.faulty])
    assignments, errors = layouts.plan(scan, rules)
    if errors:
        fail_all(module, [layouts.explain(error, scan.devices) for error in errors])
    assignments = layouts.allow(assignments)
    if not assignments:
        warnings.append(
            f"No rule of the layout matches any of the {len(scan.devices)} {layouts.word}s of this node: nothing to do."
        )
    return devices_in_result(scan.devices, assignments), assignments, warnings


def checkpoint_devices(module: AnsibleModule, backend: Backend, system: System) -> dict[str, Any]:
    """Write the state of the devices to a checkpoint and return the result.

    Raises AcceleratorError with the code unread for a device that cannot be read.
    """
    scan = scan_node(backend, module.params["state_path"])
    if scan.faulty:
        raise AcceleratorError(
            f"A checkpoint needs all devices, and these cannot be read: {'; '.join(each.describe() for each in scan.faulty)}. "
            "Nothing was written",
            hint="Repair or remove the device, and run this again.",
            code="unread",
        )
    path = module.params["checkpoint_file"]
    before = system.read_text(path) if system.exists(path) else ""
    after = to_text(backend.vendor, scan.devices, scan.prepared)
    left_out = unrestorable(scan.devices)
    for text in left_out:
        module.warn(f"The checkpoint cannot restore: {text}")
    if before != after and not module.check_mode:
        system.write_atomic(path, after.encode(), mode=0o600)
    return {
        "changed": before != after,
        "checkpoint": [
            {
                **state(device),
                "partitions": [
                    {**partition_facts(each), "owner": owner, "claims": list(claims)}
                    for each in sorted(device.partitions, key=lambda one: one.placement)
                    for owner, claims in [owner_of(device, each, scan.prepared)]
                ],
            }
            for device in scan.devices
        ],
        "left_out": left_out,
        "diff": [{"before_header": path, "after_header": path, "before": before, "after": after}],
    }


def restore_devices(module: AnsibleModule, backend: Backend, layouts: Layouts, system: System) -> dict[str, Any]:
    """Restore a checkpoint, as ``partition_devices`` applies rules. Raises NotFound for a missing file."""
    path = module.params["checkpoint_file"]
    if not system.exists(path):
        raise NotFound(
            f"The checkpoint {path} does not exist. Nothing was changed",
            hint="Create a checkpoint with state checkpointed while the devices have the layout to restore.",
            code="no-checkpoint",
        )
    kept = parse(system.read_text(path), path, backend.vendor)
    found: list[Restoration] = []

    def rules(scan: NodeScan) -> tuple[Rule, ...]:
        leave_out = module.params["on_foreign"] == "leave_out"
        found[:] = [restoration(kept, scan.devices, scan.faulty, scan.prepared, leave_out_foreign=leave_out)]
        return found[0].rules

    def plan(scan: NodeScan, _rules: tuple[Rule, ...]) -> Assigned:
        return assign_restoration(scan.devices, found[0], scan.prepared)

    result = partition_devices(module, backend, replace(layouts, rules=rules, plan=plan))
    for text in found[0].left_out:
        module.warn(f"Not restored: {text}")
    return {**result, "left_out": list(found[0].left_out)}
