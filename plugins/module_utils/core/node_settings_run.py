# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Brings a node's devices to their settings: looks at them, plans, and takes the steps. For a module, and for the node's own command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .backend_protocol import Backend
from .device_locks import DeviceLocks, library_alone
from .errors import AcceleratorError, DeviceFaulty, InUse, SettingsFailed
from .model import Fault, Finding, well
from .node_settings import KEYS, KNOBS, DevicePlan, Seen, SettingsPlan, SettingsRule, Turned, plan_settings
from .prepared import ClaimFiles, PreparedClaim, knobs_before_claims, observe, prepared_claims, wake_driver
from .settings import ECC, Knob
from .settings_record import Noted, SettingsRecord, read_record, write_record
from .system import System

# How long a change waits for claims of a device to end, and for the driver to let go of the library.
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Asked:
    """The options of plan_settings, and paths: ``state`` is the driver's store, ``record`` contains previous values.

    ``cdi_directory`` contains the CDI files of the driver's claims.
    """

    rules: tuple[SettingsRule, ...]
    state: str
    record: str
    reset: str | None
    restore: bool = False
    absent: bool = False
    cdi_directory: str = ClaimFiles.directory


@dataclass(frozen=True)
class Decision:
    """What was seen, and what follows from it. ``faulty`` are the devices of which nothing can be changed."""

    looks: tuple[Seen, ...]
    faulty: tuple[Finding, ...]
    record: SettingsRecord
    plan: SettingsPlan
    errors: tuple[AcceleratorError, ...]

    @property
    def away(self) -> tuple[Seen, ...]:
        """The devices that another driver has for a claim."""
        return tuple(seen for seen in self.looks if seen.away)


def decide(backend: Backend, system: System, asked: Asked) -> Decision:
    """Look at all devices, at claims and at the record, and plan. Raises AcceleratorError, OSError where that cannot be done."""
    boot_id = system.boot_id()
    record = read_record(system, asked.record, boot_id)
    files = ClaimFiles(asked.cdi_directory, backend.cdi_kind)
    backend.remember(device for claim in prepared_claims(asked.state, files) for device in claim.away)

    (findings, knobs), claims = observe(asked.state, lambda: look(backend), files)
    before = knobs_before_claims(asked.state, boot_id, files)
    mine = [claim for claim in claims if claim.boot_id == boot_id]
    looks = tuple(seen_of(device.uuid, Seen(device, knobs[device.uuid]), mine, before) for device in well(findings))
    record = _without_those_gone(record, findings, absent=asked.absent)
    plan, errors = plan_settings(
        looks, asked.rules, record, restore=asked.restore, reset=asked.reset, absent=asked.absent
    )
    return Decision(looks, tuple(each for each in findings if each.fault is not None), record, plan, errors)


def look(backend: Backend) -> tuple[tuple[Finding, ...], Mapping[str, Mapping[str, Knob]]]:
    """Look at all devices and at the knobs of those that are well. Raises AcceleratorError where the library does not work."""
    knobs: dict[str, Mapping[str, Knob]] = {}
    findings = []
    for finding in backend.discover():
        if finding.device is not None and finding.fault is None:
            try:
                knobs[finding.device.uuid] = backend.knobs(finding.device.uuid, tuple(KEYS))
            except DeviceFaulty as error:
                finding = replace(finding, fault=Fault(error.code, str(error)))
        findings.append(finding)
    return tuple(findings), knobs


def seen_of(uuid: str, seen: Seen, claims: Sequence[PreparedClaim], before: Mapping[tuple[str, str], Any]) -> Seen:
    """Add to what was seen of a device who has it, and what claims have turned; pure."""
    having = [claim for claim in claims if any(each.device_uuid == uuid for each in claim.devices)]
    turned = {}
    for (device_uuid, name), value in before.items():
        if device_uuid == uuid:
            who = [
                claim.describe()
                for claim in having
                if any(each.device_uuid == uuid and name in each.settings for each in claim.devices)
            ]
            turned[name] = Turned(value, tuple(who))
    away = any(device.uuid == uuid for claim in claims for device in claim.away)
    return Seen(seen.device, seen.knobs, tuple(claim.describe() for claim in having), turned, away)


def _without_those_gone(record: SettingsRecord, findings: Sequence[Finding], *, absent: bool) -> SettingsRecord:
    """Return the record without devices that are not there any more; where all is to go, also without those that do not answer."""
    there = {each.uuid for each in findings if not (absent and each.fault is not None)}
    # One that has never been read tells no UUID: it may be any of them.
    if all(each.uuid for each in findings) or absent:
        return record.noting({uuid: Noted() for uuid in record.devices if uuid not in there})
    return record


@contextlib.contextmanager
def undisturbed(asked: Asked, decision: Decision, holder: str) -> Iterator[Callable[[Decision], None]]:
    """Hold the devices of a decision against the node driver from the look to the act, and for a reset the library.

    Yields a check that a decision made inside concerns no other device. Raises InUse.
    """
    directory = str(Path(asked.state).parent)
    locks, devices = DeviceLocks(directory, holder), decision.plan.concerned

    def check(now: Decision) -> None:
        others = sorted(now.plan.concerned - devices)
        if others or (now.plan.resets and not decision.plan.resets):
            raise InUse(
                f"What has to be done has changed while the locks were waited for: {', '.join(others) or 'a reset is needed'}. Nothing "
                "was changed",
                hint="Run this again.",
                code="changed-meanwhile",
            )

    with contextlib.ExitStack() as stack:
        stack.enter_context(locks.hold(devices, LOCK_SECONDS))
        if decision.plan.resets:
            stack.enter_context(library_alone(locks, lambda: wake_driver(directory), LOCK_SECONDS))
        yield check


def execute(backend: Backend, system: System, path: str, record: SettingsRecord, plan: SettingsPlan) -> SettingsRecord:
    """Take a plan's steps, and return the record that is kept then. ``record`` is the one by which the plan was made.

    The record is written before the first step, so that the next run knows what a killed run has set. If a step fails, the previous
    values are restored, then the previous record: raises SettingsFailed.
    """
    turning = plan.notes_while_turning(record)
    write_record(system, path, record.noting(turning))
    begun: list[DevicePlan] = []
    reset: set[str] = set()
    try:
        for each in plan.devices:
            first = {change.name: change.value for change in each.changes if change.name == ECC}
            if first:
                begun.append(each)
                backend.set_knobs(each.uuid, first)
        for group in plan.resets:
            backend.reset(group)
            reset.update(group)
        lost = {uuid: _lost(backend, uuid, plan.standing.get(uuid, {})) for uuid in sorted(reset)}
        for each in plan.devices:
            values = {change.name: change.value for change in each.changes if change.name != ECC}
            values = {**lost.pop(each.uuid, {}), **values}
            if values:
                begun.append(each)
                backend.set_knobs(each.uuid, values)
        for uuid, values in lost.items():  # reset along with others, and nothing is wanted of it
            if values:
                backend.set_knobs(uuid, values)
    except AcceleratorError as error:
        failed, undone, not_undone = _restore_values(backend, begun, reset, record)
        try:
            write_record(system, path, record.noting({uuid: turning[uuid] for uuid in failed}))
        except OSError as second:
            not_undone.append(f"the record {path}: {second}. The next run restores it")
        raise _settings_failed(error, undone, not_undone) from error
    after = record.noting({each.uuid: each.note for each in plan.devices})
    write_record(system, path, after)
    return after


def _lost(backend: Backend, uuid: str, standing: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reset has taken along, of what a device had."""
    now = backend.knobs(uuid, tuple(standing))
    return {name: value for name, value in standing.items() if name in now and now[name].value != value}


def notes_to_keep(system: System, path: str, decision: Decision) -> SettingsRecord | None:
    """Return the record as it has to be where no step is taken, or None where it is so: it may be of a former boot, or of a killed run."""
    try:
        found = system.read_text(path)
    except FileNotFoundError:
        return None
    kept = decision.record.noting({each.uuid: each.note for each in decision.plan.devices if not each.changes})
    return None if kept.to_text() == found else kept


def keep_notes(system: System, path: str, decision: Decision) -> None:
    """Bring the record up to date where no step is taken. Raises OSError."""
    kept = notes_to_keep(system, path, decision)
    if kept is not None:
        write_record(system, path, kept)


def _restore_values(
    backend: Backend, begun: Sequence[DevicePlan], reset: set[str], record: SettingsRecord
) -> tuple[list[str], list[str], list[str]]:
    """Restore the previous values, the last device first.

    Returns the UUIDs of devices whose values could not be restored, and what was and was not restored, for a person. Where the previous
    value is the default, ``record`` gives the value that the node has set. The file does not: it is restored after the values.
    """
    failed: list[str] = []
    undone: list[str] = []
    not_undone: list[str] = []
    for each in dict.fromkeys(plan.uuid for plan in reversed(begun)):
        changes = next(plan.changes for plan in begun if plan.uuid == each)
        names = ", ".join(KEYS[change.name] for change in changes)
        noted = record.of(each).values
        values = {
            change.name: noted.get(change.name) if change.present is None else change.present for change in changes
        }
        try:
            backend.set_knobs(each, values)
        except AcceleratorError as second:
            failed.append(each)
            not_undone.append(f"{names} of {each}: {second}")
        else:
            undone.append(f"{names} of {each}")
            if each in reset and any(change.name == ECC for change in changes):
                not_undone.append(f"{KEYS[ECC]} of {each} is as before only after another reset")
    return failed, undone, not_undone


def _settings_failed(error: AcceleratorError, undone: Sequence[str], not_undone: Sequence[str]) -> SettingsFailed:
    """Return the error of a failed step with the restored settings and the others."""
    said = "".join(
        [
            f" Set back: {'; '.join(undone)}." if undone else "",
            f" Not set back: {'; '.join(not_undone)}." if not_undone else "",
        ]
    )
    return SettingsFailed(
        f"{error.message.rstrip('.')}.{said}", undone=undone, not_undone=not_undone, hint=error.hint, code=error.code
    )


def told(knobs: Mapping[str, Knob]) -> dict[str, Any]:
    """Return settings as they stand, by the names of a rule's keys; pure."""
    found: dict[str, Any] = {}
    for key, name in KNOBS.items():
        if name in knobs:
            value = knobs[name].value
            found[key] = int(value) if isinstance(value, float) and value.is_integer() else value
            if knobs[name].pending is not None:
                found[f"{key}_pending"] = knobs[name].pending
    return found


def foretold(plan: DevicePlan, *, is_reset: bool) -> dict[str, Any]:
    """Return settings as they will stand when a plan's steps are taken; pure."""
    knobs = dict(plan.seen.knobs)
    for change in plan.changes:
        knob = knobs[change.name]
        knobs[change.name] = (
            replace(knob, value=change.value) if knob.pending is None else replace(knob, pending=change.value)
        )
    if is_reset:
        knobs = {
            name: knob if knob.pending is None else replace(knob, value=knob.pending) for name, knob in knobs.items()
        }
    return told(knobs)
