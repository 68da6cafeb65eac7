# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""A layout over all devices of a node: every plan is made and checked before the first step is taken anywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .core.backend_protocol import Backend
from .core.device_locks import DeviceLocks, library_alone
from .core.errors import AcceleratorError, InUse, LayoutFailed, Unsupported
from .core.layout import CreatePartition, DestroyPartition, LayoutPlan, ResetDevice, SetPartitioning, Step, plan_layouts
from .core.layout_rules import Match, Rule, WantedPartition, wanted_for
from .core.layout_run import execute
from .core.model import Device, Finding, well
from .core.prepared import PreparedPartition

# How long a layout change waits for claims of a device to end, and for the driver to let go of the library.
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Look:
    """What one look tells: the devices that are well, those with a fault, and what claims hold."""

    devices: tuple[Device, ...]
    faulty: tuple[Finding, ...]
    prepared: tuple[PreparedPartition, ...]

    @property
    def unread(self) -> list[int]:
        """The numbers of the devices with a fault."""
        return [each.index for each in self.faulty]


@dataclass(frozen=True)
class Assignment:
    """What one device is to become.

    ``plan`` holds the steps that will be taken; ``withheld`` those that wait for a reset that may not be done now.
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
    """Plan every device that a rule matches; pure. Returns the plans, and what stands in the way of the others."""
    assignments: list[Assignment] = []
    errors: list[AcceleratorError] = []
    wanted = [(device, wanted_for(device, rules)) for device in devices]
    for (device, rule), outcome in zip(wanted, plan_layouts(wanted, prepared=prepared)):
        if isinstance(outcome, AcceleratorError):
            errors.append(outcome)
        elif rule is not None:
            assignments.append(Assignment(device, rule, outcome))
    return tuple(assignments), tuple(errors)


def withhold_resets(assignment: Assignment) -> Assignment:
    """Return the assignment with the steps from the first reset on withheld.

    Partitions that are only made again after a reset, because it would have taken them along, are left as well.
    """
    steps = assignment.plan.steps
    first = next((number for number, step in enumerate(steps) if isinstance(step, ResetDevice)), len(steps))
    again = {
        (step.device_uuid, step.profile_id, step.placement)
        for step in steps[first:]
        if isinstance(step, CreatePartition)
    }
    spared = [
        step
        for step in steps[:first]
        if isinstance(step, DestroyPartition)
        and (step.device_uuid, step.partition.profile_id, step.partition.placement) in again
    ]
    now = tuple(step for step in steps[:first] if step not in spared)
    return replace(assignment, plan=replace(assignment.plan, steps=now), withheld=(*spared, *steps[first:]))


def needs_reset(assignment: Assignment) -> bool:
    """Whether the wanted state of the device is reached only through a reset."""
    return any(isinstance(step, ResetDevice) for step in (*assignment.plan.steps, *assignment.withheld))


def consent(assignments: Sequence[Assignment], reset: str | None) -> tuple[Assignment, ...]:
    """Apply what the user said of resets: None refuses, ``never`` withholds, ``when_needed`` agrees; pure.

    Raises Unsupported with code reset-needs-consent.
    """
    waiting = [one.device for one in assignments if needs_reset(one)]
    if reset == "never":
        return tuple(withhold_resets(one) for one in assignments)
    if waiting and reset is None:
        raise Unsupported(
            f"{'; '.join(device.describe() for device in waiting)}: this board changes its MIG mode only by a reset of "
            "the GPU, which ends whatever runs on it, and nothing was said about resets. Nothing was changed",
            hint="Set reset to when_needed to allow resets where nothing uses the GPU, or to never to leave the change "
            "pending until the next reboot.",
            code="reset-needs-consent",
        )
    return tuple(assignments)


def devices_of(step: Step) -> tuple[str, ...]:
    """Return the UUIDs of the devices that a step concerns; pure."""
    return step.device_uuids if isinstance(step, ResetDevice) else (step.device_uuid,)


def steps_on(device: Device, assignments: Sequence[Assignment]) -> tuple[Step, ...]:
    """Return the steps that concern a device; a plan may hold those of devices that are reset together."""
    return tuple(step for one in assignments for step in one.plan.steps if device.uuid in devices_of(step))


def state(device: Device) -> dict[str, Any]:
    """Return what a layout is about, of one device: its mode, where it has one, and its partitions."""
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
    """Return what ``state`` will say of the device after the steps; partitions yet to be made have no UUID."""
    after = state(device)
    for step in steps:
        if isinstance(step, SetPartitioning):
            after["pending"] = step.enabled
            if not device.partitioning.needs_reset:
                after["enabled"] = step.enabled
        elif isinstance(step, ResetDevice):
            after["enabled"] = after["pending"]
        elif isinstance(step, DestroyPartition):
            gone = {
                "profile": step.partition.profile,
                "placement": {"start": step.partition.placement.start, "size": step.partition.placement.size},
                "uuid": step.partition.uuid,
            }
            after["partitions"] = [partition for partition in after["partitions"] if partition != gone]
        elif isinstance(step, CreatePartition):
            made = {
                "profile": step.profile,
                "placement": {"start": step.placement.start, "size": step.placement.size},
                "uuid": "",
            }
            after["partitions"] = sorted([*after["partitions"], made], key=lambda one: one["placement"]["start"])
    return after


def lines(one: dict[str, Any]) -> str:
    """Return the state of one device as text for a diff; without UUIDs, which change when a partition is made again."""
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
    """Return Ansible's diff, one entry for each device that changes; ``word`` is what such a device is called."""
    entries = []
    for old, new in zip(before, after):
        if lines(old) != lines(new):
            header = f"{word} {old['index']} ({old['uuid']}, {old['pci_address']})"
            entries.append({"before_header": header, "after_header": header, "before": lines(old), "after": lines(new)})
    return entries


def former_rule(device: Device) -> Rule:
    """Return the rule that describes the device exactly as it is, placements included."""
    if not device.partitioning.enabled:
        return Rule(Match(), "whole", ())
    return Rule(
        Match(),
        "static",
        tuple(WantedPartition(one.profile, 1, one.placement.start) for one in device.partitions),
    )


def concerned(assignments: Sequence[Assignment]) -> frozenset[str]:
    """Return the UUIDs of the devices that the steps concern."""
    return frozenset(
        uuid
        for one in assignments
        for step in one.plan.steps
        for uuid in (step.device_uuids if isinstance(step, ResetDevice) else (step.device_uuid,))
    )


def touched(devices: Sequence[Device], assignments: Sequence[Assignment]) -> tuple[Device, ...]:
    """Return the devices that a rule matches, and those that are reset along with one of them; pure."""
    matched = {one.device.uuid for one in assignments}
    return tuple(device for device in devices if device.uuid in matched or steps_on(device, assignments))


def describe_step(step: Step, devices: Sequence[Device]) -> dict[str, Any]:
    """Return a step as data, with the numbers that people know its devices by; pure."""
    indices = [device.index for device in devices if device.uuid in devices_of(step)]
    return {**step.to_dict(), "indices": indices, "description": step.describe()}


def report(devices: Sequence[Device], assignments: Sequence[Assignment], word: str = "GPU") -> dict[str, Any]:
    """Return what is done, or would be, and what the devices, each called ``word``, are like before and after; pure."""
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
    """Hold devices against the node driver from the look to the act: what is seen inside stays so until it is changed.

    Yields a check that the steps of a plan made inside concern no other device. Raises InUse, which names who holds one.
    """
    with locks.hold(devices, seconds):

        def check(assignments: Sequence[Assignment]) -> None:
            others = sorted(concerned(assignments) - set(devices))
            if others:
                raise InUse(
                    f"What has to be done has changed while the locks were waited for: it concerns {', '.join(others)} as "
                    "well. Nothing was changed",
                    hint="Run this again.",
                    code="changed-meanwhile",
                )

        yield check


@contextlib.contextmanager
def library_for_resets(
    locks: DeviceLocks, assignments: Sequence[Assignment], wake: Callable[[], object], seconds: float = LOCK_SECONDS
) -> Iterator[None]:
    """Have the node driver let go of the vendor's library if a device is reset. Raises InUse when it does not."""
    if any(isinstance(step, ResetDevice) for one in assignments for step in one.plan.steps):
        with library_alone(locks, wake, seconds):
            yield
    else:
        yield


def apply(backend: Backend, assignments: Sequence[Assignment]) -> None:
    """Take the steps of all devices in order. When one device fails, all devices get their former layout back.

    Raises LayoutFailed that says which devices were put back and which could not be.
    """
    for assignment in assignments:
        if not assignment.plan.steps:
            continue
        try:
            execute(backend, assignment.plan)
        except AcceleratorError as error:
            raise _put_back(backend, assignments, assignment, error) from error


def _put_back(
    backend: Backend, assignments: Sequence[Assignment], failed: Assignment, error: AcceleratorError
) -> LayoutFailed:
    """Give the devices that were finished before their former layout, and say what became of everything.

    Partitions that were made by hand, in a form of their own, and are still there stay: nobody could make them again.
    """
    changed = concerned(assignments)
    former = {one.device.uuid: one.device for one in assignments if one is not failed and one.device.uuid in changed}
    undone = list(getattr(error, "undone", ()))
    not_undone = list(getattr(error, "not_undone", ()))
    text = f"{failed.device.describe()}: {error}"
    findings = backend.discover()
    wanted = [_former_of(device, former.get(device.uuid)) for device in well(findings)]
    for (device, _rule), outcome in reversed(tuple(zip(wanted, plan_layouts(wanted)))):
        try:
            if isinstance(outcome, AcceleratorError):
                raise outcome
            if not execute(backend, outcome):
                continue
        except AcceleratorError as second:
            not_undone.append(f"{device.describe()}: {second}")
            text += f" {device.describe()} could not be put back: {second}"
        else:
            undone.append(f"{device.describe()} has its former layout again")
            text += f" {device.describe()} has its former layout again."
    for finding in findings:
        if finding.fault is not None and finding.uuid in former:
            not_undone.append(finding.describe())
            text += f" {finding.name} could not be put back: {finding.fault}"
    return LayoutFailed(text, undone=undone, not_undone=not_undone, code=error.code)


def _former_of(device: Device, before: Device | None) -> tuple[Device, Rule | None]:
    """Return a device without the partitions made by hand that are there as before, and the rule for the others."""
    if before is None:
        return device, None
    by_hand = {each.key for each in before.partitions if not each.uuid}
    stay = {each.key for each in device.partitions if not each.uuid and each.key in by_hand}

    def others(one: Device) -> Device:
        return replace(one, partitions=tuple(each for each in one.partitions if each.uuid or each.key not in stay))

    return others(device), former_rule(others(before))
