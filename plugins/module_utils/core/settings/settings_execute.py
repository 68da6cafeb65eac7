# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Bring a node's devices to their settings: scan the devices, plan, and run the steps.

Used by a module and by the node's own command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..discovery.device_locks import DeviceLocks, library_alone
from ..errors import AcceleratorError, DeviceFaulty, InUse, SettingsFailed, as_failure
from ..host.system import System
from ..model import Fault, Finding, healthy_devices
from ..store.prepared_claims import (
    ClaimFiles,
    PreparedClaim,
    knobs_before_claims,
    observe,
    prepared_claims,
    wake_driver,
)
from ..vendors.protocol import Backend
from .knobs import ECC, Knob
from .settings_plan import KEYS, KNOBS, ClaimedKnob, DevicePlan, Seen, SettingsPlan, SettingsRule, plan_settings
from .settings_record import RecordedValues, SettingsRecord, read_record, write_record

# The maximum wait, in seconds, for claims of a device to end and for the driver to close the vendor library.
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
    """The scanned state, and the plan for it. ``faulty`` are the devices that cannot be changed."""

    seen_devices: tuple[Seen, ...]
    faulty: tuple[Finding, ...]
    record: SettingsRecord
    plan: SettingsPlan
    errors: tuple[AcceleratorError, ...]

    @property
    def away(self) -> tuple[Seen, ...]:
        """Return the devices that are bound to another driver for a claim."""
        return tuple(seen for seen in self.seen_devices if seen.away)


def decide(backend: Backend, system: System, asked: Asked) -> Decision:
    """Scan all devices, read claims and the record, and plan. Raises AcceleratorError, OSError."""
    boot_id = system.boot_id()
    record = read_record(system, asked.record, boot_id)
    files = ClaimFiles(asked.cdi_directory, backend.cdi_kind)
    backend.add_detached(device for claim in prepared_claims(asked.state, files) for device in claim.away)

    (findings, knobs), claims = observe(asked.state, lambda: read_settings(backend), files)
    before = knobs_before_claims(asked.state, boot_id, files)
    mine = [claim for claim in claims if claim.boot_id == boot_id]
    seen_devices = tuple(
        seen_of(device.uuid, Seen(device, knobs[device.uuid]), mine, before) for device in healthy_devices(findings)
    )
    record = _without_removed_devices(record, findings, absent=asked.absent)
    plan, errors = plan_settings(
        seen_devices, asked.rules, record, restore=asked.restore, reset=asked.reset, absent=asked.absent
    )
    return Decision(seen_devices, tuple(each for each in findings if each.fault is not None), record, plan, errors)


def read_settings(backend: Backend) -> tuple[tuple[Finding, ...], Mapping[str, Mapping[str, Knob]]]:
    """Scan all devices, and read the knobs of the healthy ones. Raises AcceleratorError if the vendor library fails."""
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
    """Return the device state with its claims and the knobs that claims changed. No side effects."""
    on_device = [claim for claim in claims if any(each.device_uuid == uuid for each in claim.devices)]
    claimed_knobs = {}
    for (device_uuid, name), value in before.items():
        if device_uuid == uuid:
            names = [
                claim.describe()
                for claim in on_device
                if any(each.device_uuid == uuid and name in each.settings for each in claim.devices)
            ]
            claimed_knobs[name] = ClaimedKnob(value, tuple(names))
    away = any(device.uuid == uuid for claim in claims for device in claim.away)
    return Seen(seen.device, seen.knobs, tuple(claim.describe() for claim in on_device), claimed_knobs, away)


def _without_removed_devices(record: SettingsRecord, findings: Sequence[Finding], *, absent: bool) -> SettingsRecord:
    """Return the record without removed devices; with ``absent`` also without devices that do not answer."""
    present = {each.uuid for each in findings if not (absent and each.fault is not None)}
    # A device that was never read has no UUID: it can be any device of the record.
    if all(each.uuid for each in findings) or absent:
        return record.with_devices({uuid: RecordedValues() for uuid in record.devices if uuid not in present})
    return record


@contextlib.contextmanager
def lock_devices(asked: Asked, decision: Decision, holder: str) -> Iterator[Callable[[Decision], None]]:
    """Lock the devices of a decision against the node driver until they are changed, and for a reset the vendor library.

    Yields a function that verifies that a new decision changes no other device. Raises InUse.
    """
    directory = str(Path(asked.state).parent)
    locks, devices = DeviceLocks(directory, holder), decision.plan.concerned

    def check(now: Decision) -> None:
        others = sorted(now.plan.concerned - devices)
        if others or (now.plan.resets and not decision.plan.resets):
            raise InUse(
                f"The plan changed while this run waited for locks: {', '.join(others) or 'a reset is needed'}. Nothing "
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
    """Run a plan's steps, and return the record after them. ``record`` is the record with which the plan was made.

    The record is written before the first step, so that the next run knows the changes of a killed run. If a step
    fails, the previous values are restored and read back, then the previous record. Raises SettingsFailed.
    """
    during_changes = plan.records_during_changes(record)
    write_record(system, path, record.with_devices(during_changes))
    begun: list[DevicePlan] = []
    reset: set[str] = set()
    try:
        for each in plan.devices:
            first = {change.name: change.value for change in each.changes if change.name == ECC}
            if first:
                begun.append(each)
                backend.set_knobs(each.uuid, first)
        for group in plan.resets:
            reset.update(group)  # also if it fails, because its effect is unknown
            backend.reset(group)
        lost = {uuid: _values_lost_by_reset(backend, uuid, plan.standing.get(uuid, {})) for uuid in sorted(reset)}
        for each in plan.devices:
            values = {change.name: change.value for change in each.changes if change.name != ECC}
            values = {**lost.pop(each.uuid, {}), **values}
            if values:
                begun.append(each)
                backend.set_knobs(each.uuid, values)
        for uuid, values in lost.items():  # devices that were only reset with others
            if values:
                backend.set_knobs(uuid, values)
    except (AcceleratorError, OSError) as error:
        deleted = {uuid: plan.standing.get(uuid, {}) for uuid in sorted(reset)}
        failed, undone, not_undone = _restore_values(backend, begun, deleted, record)
        try:
            write_record(system, path, record.with_devices({uuid: during_changes[uuid] for uuid in failed}))
        except OSError as second:
            not_undone.append(f"the record {path}: {second}. The next run restores it")
        raise _settings_failed(as_failure(error), undone, not_undone) from error
    after = record.with_devices({each.uuid: each.note for each in plan.devices})
    write_record(system, path, after)
    return after


def _values_lost_by_reset(backend: Backend, uuid: str, standing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a reset deleted from a device."""
    now = backend.knobs(uuid, tuple(standing)) if standing else {}
    return {name: value for name, value in standing.items() if name in now and now[name].value != value}


def record_to_write(system: System, path: str, decision: Decision) -> SettingsRecord | None:
    """Return the record to write if no step runs, or None if it is up to date.

    It can be of an earlier boot or a killed run.
    """
    try:
        found = system.read_text(path)
    except FileNotFoundError:
        return None
    kept = decision.record.with_devices({each.uuid: each.note for each in decision.plan.devices if not each.changes})
    return None if kept.to_text() == found else kept


def update_record(system: System, path: str, decision: Decision) -> None:
    """Update the record if no step runs. Raises OSError."""
    kept = record_to_write(system, path, decision)
    if kept is not None:
        write_record(system, path, kept)


def _restore_values(
    backend: Backend, begun: Sequence[DevicePlan], deleted: Mapping[str, Mapping[str, Any]], record: SettingsRecord
) -> tuple[list[str], list[str], list[str]]:
    """Restore the previous values and read them back, the last device first.

    ``deleted`` are values that a reset may have deleted, by device. Returns the UUIDs of devices whose values could not
    be restored, and the restored and the unrestored values as text. If the previous value is the default, ``record``
    has the value that the node has set. The file does not have it, because it is restored after the values.
    """
    failed: list[str] = []
    undone: list[str] = []
    not_undone: list[str] = []
    changed = {plan.uuid: plan.changes for plan in reversed(begun)}
    for each in dict.fromkeys([*changed, *deleted]):
        noted = record.of(each).values
        values = dict(deleted.get(each, {}))
        with contextlib.suppress(AcceleratorError, OSError):  # if the values cannot be read, all are set
            values = _values_lost_by_reset(backend, each, values)
        for change in changed.get(each, ()):
            values[change.name] = noted.get(change.name) if change.present is None else change.present
        if not values:
            continue
        try:
            backend.set_knobs(each, values)
            wrong = _not_restored(backend, each, values)
        except (AcceleratorError, OSError) as second:
            failed.append(each)
            not_undone.append(f"{_keys(values)} of {each}: {second}")
            continue
        if wrong:
            failed.append(each)
            not_undone.append(f"{_keys(wrong)} of {each}: the device has accepted the value and does not have it")
        undone += [f"{_keys(right)} of {each}"] if (right := [name for name in values if name not in wrong]) else []
        if each in deleted and ECC in values:
            not_undone.append(f"{KEYS[ECC]} of {each} is as before only after another reset")
    return failed, undone, not_undone


def _not_restored(backend: Backend, uuid: str, values: Mapping[str, Any]) -> list[str]:
    """Return the knobs that a device reports with other values. Values that cannot be read back count as restored."""
    now = backend.knobs(uuid, tuple(values))
    found = {
        name: now[name].value if now[name].pending is None else now[name].pending for name in values if name in now
    }
    return [name for name, value in found.items() if None not in (value, values[name]) and value != values[name]]


def _keys(names: Iterable[str]) -> str:
    return ", ".join(KEYS[name] for name in names)


def _settings_failed(error: AcceleratorError, undone: Sequence[str], not_undone: Sequence[str]) -> SettingsFailed:
    """Return the error of a failed step with the restored settings and the others."""
    results = "".join(
        [
            f" Set back: {'; '.join(undone)}." if undone else "",
            f" Not set back: {'; '.join(not_undone)}." if not_undone else "",
        ]
    )
    return SettingsFailed(
        f"{error.message.rstrip('.')}.{results}", undone=undone, not_undone=not_undone, hint=error.hint, code=error.code
    )


def values_of(knobs: Mapping[str, Knob]) -> dict[str, Any]:
    """Return the current settings, by the keys of a rule. No side effects."""
    found: dict[str, Any] = {}
    for key, name in KNOBS.items():
        if name in knobs:
            value = knobs[name].value
            found[key] = int(value) if isinstance(value, float) and value.is_integer() else value
            if knobs[name].pending is not None:
                found[f"{key}_pending"] = knobs[name].pending
    return found


def predicted_values(plan: DevicePlan, *, is_reset: bool) -> dict[str, Any]:
    """Return the predicted settings after a plan's steps. No side effects."""
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
    return values_of(knobs)
