# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Scan the devices of a node and apply a layout to them: create and validate every plan before the first step on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.discovery.device_locks import DeviceLocks, library_alone
from ..core.errors import AcceleratorError, InUse, LayoutFailed, Unsupported
from ..core.health.resets import blocked_reset
from ..core.model import Device, Finding, healthy_devices
from ..core.partitioning.layout_execute import execute
from ..core.partitioning.layout_plan import (
    CreatePartition,
    DestroyPartition,
    LayoutPlan,
    ResetDevice,
    SetPartitioning,
    Step,
    plan_layouts,
)
from ..core.partitioning.rules import Match, Rule, WantedPartition, wanted_for
from ..core.store.prepared_claims import ClaimFiles, PreparedPartition, observe, prepared_claims, prepared_partitions
from ..core.vendors.protocol import Backend

# The maximum wait, in seconds, for claims of a device to end and for the driver to close the vendor library.
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class NodeScan:
    """The result of one scan: the healthy devices, the devices with a fault, and the partitions that claims use."""

    devices: tuple[Device, ...]
    faulty: tuple[Finding, ...]
    prepared: tuple[PreparedPartition, ...]

    @property
    def unread(self) -> list[int]:
        """Return the indices of the devices with a fault."""
        return [each.index for each in self.faulty]


#: Returns the layout rules for a scan.
Rules = Callable[[NodeScan], tuple[Rule, ...]]


def scan_node(backend: Backend, state_path: str) -> NodeScan:
    """Scan the devices of an open backend, and read the prepared claims."""
    backend.use_number_file(str(Path(state_path).parent))
    files = ClaimFiles(kind=backend.cdi_kind)
    backend.add_detached(device for claim in prepared_claims(state_path, files) for device in claim.away)
    findings, claims = observe(state_path, backend.discover, files)
    faulty = tuple(each for each in findings if each.fault is not None)
    return NodeScan(healthy_devices(findings), faulty, prepared_partitions(claims))


@dataclass(frozen=True)
class Assignment:
    """The desired state of one device.

    ``plan`` contains the steps to run. ``withheld`` are the steps that wait for a reset that is not allowed now.
    """

    device: Device
    rule: Rule
    plan: LayoutPlan
    withheld: tuple[Step, ...] = ()


def assign(
    devices: Sequence[Device],
    rules: Sequence[Rule],
    prepared: Sequence[PreparedPartition],
) -> tuple[tuple[Assignment, ...], tuple[AcceleratorError, ...]]:
    """Plan every device that a rule matches, without side effects.

    Return the plans, and the errors of the other devices.
    """
    assignments: list[Assignment] = []
    errors: list[AcceleratorError] = []
    wanted = [(device, wanted_for(device, rules)) for device in devices]
    for (device, rule), outcome in zip(wanted, plan_layouts(wanted, prepared=prepared)):
        if isinstance(outcome, AcceleratorError):
            errors.append(outcome)
        elif rule is not None:
            assignments.append(Assignment(device, rule, outcome))
    return tuple(assignments), tuple(errors)


def without_resets(assignment: Assignment) -> Assignment:
    """Return the assignment without its first reset and the steps after it. These are in ``withheld``.

    Deletions of partitions that are created again after the reset are withheld too.
    """
    steps = assignment.plan.steps
    first_reset = next((number for number, step in enumerate(steps) if isinstance(step, ResetDevice)), len(steps))
    recreated = {
        (step.device_uuid, step.profile_id, step.placement)
        for step in steps[first_reset:]
        if isinstance(step, CreatePartition)
    }
    needless_deletions = [
        step
        for step in steps[:first_reset]
        if isinstance(step, DestroyPartition)
        and (step.device_uuid, step.partition.profile_id, step.partition.placement) in recreated
    ]
    remaining = tuple(step for step in steps[:first_reset] if step not in needless_deletions)
    withheld = (*needless_deletions, *steps[first_reset:])
    return replace(assignment, plan=replace(assignment.plan, steps=remaining), withheld=withheld)


def needs_reset(assignment: Assignment) -> bool:
    """Return whether the device reaches its desired state only through a reset."""
    return any(isinstance(step, ResetDevice) for step in (*assignment.plan.steps, *assignment.withheld))


def apply_reset_option(assignments: Sequence[Assignment], reset: str | None) -> tuple[Assignment, ...]:
    """Apply the option ``reset`` of the module: None rejects resets, ``never`` withholds them, ``when_needed`` allows them.

    Raises Unsupported with code reset-needs-consent, or reset-blocked if a device cannot be reset now.
    """
    waiting = [one.device for one in assignments if needs_reset(one)]
    if reset == "never":
        return tuple(without_resets(one) for one in assignments)
    if waiting and reset is None:
        raise Unsupported(
            f"{'; '.join(device.describe() for device in waiting)}: this board changes its MIG mode only by a reset of "
            "the GPU, which ends all programs on it, and the option reset is not set. Nothing was changed",
            hint="Set reset to when_needed to allow resets of unused GPUs, or to never to leave the change pending "
            "until the next reboot.",
            code="reset-needs-consent",
        )
    blocked = blocked_reset(waiting)
    if blocked is not None:
        raise blocked
    return tuple(assignments)


def devices_of(step: Step) -> tuple[str, ...]:
    """Return the UUIDs of the devices that a step changes."""
    return step.device_uuids if isinstance(step, ResetDevice) else (step.device_uuid,)


def steps_on(device: Device, assignments: Sequence[Assignment]) -> tuple[Step, ...]:
    """Return the steps that change a device.

    A plan can also contain steps for devices that are reset together with it.
    """
    return tuple(step for one in assignments for step in one.plan.steps if device.uuid in devices_of(step))


def state(device: Device) -> dict[str, Any]:
    """Return the state of one device that a layout defines: its mode, if it has one, and its partitions."""
    modes = {"enabled": device.partitioning.enabled, "pending": device.partitioning.pending}
    return {
        "index": device.index,
        "uuid": device.uuid,
        "product": device.product,
        "pci_address": device.pci_address,
        **(modes if device.partitioning.has_mode else {}),
        "partitions": [
            {
                "profile": partition.profile,
                "placement": {"start": partition.placement.start, "size": partition.placement.size},
                "uuid": partition.uuid,
            }
            for partition in sorted(device.partitions, key=lambda one: one.placement)
        ],
    }


def predict(device: Device, steps: Sequence[Step]) -> dict[str, Any]:
    """Return the result of ``state`` after the steps. New partitions have no UUID yet."""
    after = state(device)
    for step in steps:
        if isinstance(step, SetPartitioning):
            after["pending"] = step.enabled
            if not device.partitioning.needs_reset:
                after["enabled"] = step.enabled
        elif isinstance(step, ResetDevice):
            after["enabled"] = after["pending"]
        elif isinstance(step, DestroyPartition):
            deleted = {
                "profile": step.partition.profile,
                "placement": {"start": step.partition.placement.start, "size": step.partition.placement.size},
                "uuid": step.partition.uuid,
            }
            after["partitions"] = [partition for partition in after["partitions"] if partition != deleted]
        elif isinstance(step, CreatePartition):
            created = {
                "profile": step.profile,
                "placement": {"start": step.placement.start, "size": step.placement.size},
                "uuid": "",
            }
            after["partitions"] = sorted([*after["partitions"], created], key=lambda one: one["placement"]["start"])
    return after


def state_text(one: dict[str, Any]) -> str:
    """Return the state of one device as text for a diff. It omits UUIDs, which change when a partition is recreated."""
    modes = []
    if "enabled" in one:
        modes = [f"MIG {'enabled' if one['enabled'] else 'disabled'}"]
        if one["pending"] != one["enabled"]:
            modes = [f"{modes[0]}, {'enabled' if one['pending'] else 'disabled'} after the next reset"]
    partitions = [f"  {each['profile']} at {each['placement']['start']}" for each in one["partitions"]]
    return "\n".join([*modes, *(["partitions:", *partitions] if partitions else ["no partitions"])]) + "\n"


def difference(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], word: str = "GPU"
) -> list[dict[str, str]]:
    """Return Ansible's diff with one entry for each changed device. ``word`` is the term for a device."""
    entries = []
    for old, new in zip(before, after):
        if state_text(old) != state_text(new):
            header = f"{word} {old['index']} ({', '.join(filter(None, (old['uuid'], old['pci_address'])))})"
            entries.append(
                {"before_header": header, "after_header": header, "before": state_text(old), "after": state_text(new)}
            )
    return entries


def current_state_rule(device: Device) -> Rule:
    """Return the rule that describes the device's current state exactly, with placements."""
    if not device.partitioning.enabled:
        return Rule(Match(), "whole", ())
    return Rule(
        Match(),
        "static",
        tuple(WantedPartition(one.profile, 1, one.placement.start) for one in device.partitions),
    )


def changed_device_uuids(assignments: Sequence[Assignment]) -> frozenset[str]:
    """Return the UUIDs of the devices that the steps change."""
    return frozenset(uuid for one in assignments for step in one.plan.steps for uuid in devices_of(step))


def devices_in_result(devices: Sequence[Device], assignments: Sequence[Assignment]) -> tuple[Device, ...]:
    """Return the devices that a rule matches, and the devices that are reset together with one of them."""
    matched = {one.device.uuid for one in assignments}
    return tuple(device for device in devices if device.uuid in matched or steps_on(device, assignments))


def describe_step(step: Step, devices: Sequence[Device]) -> dict[str, Any]:
    """Return a step as data, with the indices of its devices."""
    indices = [device.index for device in devices if device.uuid in devices_of(step)]
    return {**step.to_dict(), "indices": indices, "description": step.describe()}


def report(devices: Sequence[Device], assignments: Sequence[Assignment], word: str = "GPU") -> dict[str, Any]:
    """Return the module result: the steps, and the devices before and after. ``word`` is the term for a device."""
    modes = {one.device.uuid: one.rule.mode for one in assignments}
    waiting = {uuid for one in assignments for step in one.withheld for uuid in devices_of(step)}
    before = [state(device) for device in devices]
    after = [predict(device, steps_on(device, assignments)) for device in devices]
    steps = [describe_step(step, devices) for one in assignments for step in one.plan.steps]
    return {
        "changed": bool(steps),
        "steps": steps,
        "before": before,
        "after": after,
        "reset_required": bool(waiting),
        "devices": [
            {
                "index": device.index,
                "uuid": device.uuid,
                "mode": modes.get(device.uuid),
                "changed": bool(steps_on(device, assignments)),
                "kept": len(device.partitions)
                - sum(isinstance(step, DestroyPartition) for step in steps_on(device, assignments)),
                "reset_required": device.uuid in waiting,
            }
            for device in devices
        ],
        "diff": difference(before, after, word),
    }


@contextlib.contextmanager
def undisturbed(
    locks: DeviceLocks, devices: Collection[str], seconds: float = LOCK_SECONDS
) -> Iterator[Callable[[Sequence[Assignment]], None]]:
    """Lock devices against the node driver, so that their scanned state stays valid until they are changed.

    Yields a function that verifies that the steps of a plan change no other device. Raises InUse, which names the
    holder of a lock.
    """
    with locks.hold(devices, seconds):

        def check(assignments: Sequence[Assignment]) -> None:
            others = sorted(changed_device_uuids(assignments) - set(devices))
            if others:
                raise InUse(
                    f"The plan changed while this run waited for locks: it now also affects {', '.join(others)}. "
                    "Nothing was changed",
                    hint="Run this again.",
                    code="changed-meanwhile",
                )

        yield check


@contextlib.contextmanager
def library_for_resets(
    locks: DeviceLocks, assignments: Sequence[Assignment], wake: Callable[[], object], seconds: float = LOCK_SECONDS
) -> Iterator[None]:
    """Make the node driver close the vendor library if a device is reset. Raises InUse if it does not."""
    if any(isinstance(step, ResetDevice) for one in assignments for step in one.plan.steps):
        with library_alone(locks, wake, seconds):
            yield
    else:
        yield


def apply(backend: Backend, assignments: Sequence[Assignment]) -> None:
    """Run the steps of all devices in order. If one device fails, restore the previous layout of all devices.

    Raises LayoutFailed, which lists the restored devices and those that could not be restored.
    """
    for assignment in assignments:
        if not assignment.plan.steps:
            continue
        try:
            execute(backend, assignment.plan)
        except AcceleratorError as error:
            raise _restore_previous_layout(backend, assignments, assignment, error) from error


def _restore_previous_layout(
    backend: Backend, assignments: Sequence[Assignment], failed: Assignment, error: AcceleratorError
) -> LayoutFailed:
    """Restore the previous layout of the devices that changed before the failure, and return the error with all results.

    Manually created partitions in a form that no profile has stay if they still exist, because they could not be recreated.
    """
    changed = changed_device_uuids(assignments)
    previous = {one.device.uuid: one.device for one in assignments if one is not failed and one.device.uuid in changed}
    undone = list(getattr(error, "undone", ()))
    not_undone = list(getattr(error, "not_undone", ()))
    text = f"{failed.device.describe()}: {error}"
    try:
        findings = backend.discover()
    except (AcceleratorError, OSError) as second:
        findings = ()
        not_undone.extend(device.describe() for device in previous.values())
        text += f" The devices could not be read, and no previous layout was restored: {second}"
    wanted = [_restorable_state(device, previous.get(device.uuid)) for device in healthy_devices(findings)]
    for (device, _rule), outcome in reversed(tuple(zip(wanted, plan_layouts(wanted)))):
        try:
            if isinstance(outcome, AcceleratorError):
                raise outcome
            if not execute(backend, outcome):
                continue
        except (AcceleratorError, OSError) as second:
            not_undone.append(f"{device.describe()}: {second}")
            text += f" {device.describe()} could not be restored: {second}"
        else:
            undone.append(f"{device.describe()} has its previous layout again")
            text += f" {device.describe()} has its previous layout again."
    for finding in findings:
        if finding.fault is not None and finding.uuid in previous:
            not_undone.append(finding.describe())
            text += f" {finding.name} could not be restored: {finding.fault}"
    return LayoutFailed(text, undone=undone, not_undone=not_undone, code=error.code)


def _restorable_state(device: Device, before: Device | None) -> tuple[Device, Rule | None]:
    """Return a device without its unchanged manually created partitions, and the rule for the other partitions."""
    if before is None:
        return device, None
    manual_before = {each.key for each in before.partitions if not each.uuid}
    unchanged = {each.key for each in device.partitions if not each.uuid and each.key in manual_before}

    def without_unchanged(one: Device) -> Device:
        partitions = tuple(each for each in one.partitions if each.uuid or each.key not in unchanged)
        return replace(one, partitions=partitions)

    return without_unchanged(device), current_state_rule(without_unchanged(before))
