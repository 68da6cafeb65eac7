# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parse rules for persistent device settings of a node, and plan the changes from the current to the desired state.

The module has no side effects. A claim can change knobs while it exists, and restores the values that it found. So for
a knob that a claim changed, the value that the claim found counts as the current value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import AcceleratorError, InUse, InvalidLayout, InvalidSettings, Unsupported
from ..health.resets import blocked_reset
from ..model import Device
from ..partitioning.layout_plan import reset_groups
from ..partitioning.rules import Match, check_keys, parse_match
from ..schema import Boolean, Choice, Integer, InvalidDocument, MatchingString, Record, UniqueStrings, decode
from ..texts import join_problems
from .knobs import (
    COMPUTE_MODE,
    COMPUTE_MODES,
    ECC,
    GRAPHICS_CLOCKS,
    MEMORY_CLOCKS,
    MOST_MEGAHERTZ,
    MOST_WATTS,
    PERSISTENCE,
    POWER_LIMIT,
    TIME_SLICE,
    WORKLOAD_PROFILE,
    WORKLOAD_PROFILES,
    Knob,
    clocks,
    fit_to_device,
)
from .settings_record import RecordedValues, SettingsRecord

MATCH = "match"
# Maps the keys of a rule to knobs.
KNOBS: Mapping[str, str] = {
    "persistence": PERSISTENCE,
    "compute_mode": COMPUTE_MODE,
    "power_limit": POWER_LIMIT,
    "graphics_clocks": GRAPHICS_CLOCKS,
    "memory_clocks": MEMORY_CLOCKS,
    "workload_profiles": WORKLOAD_PROFILES,
    "time_slice": TIME_SLICE,
    "ecc": ECC,
}
KEYS: Mapping[str, str] = {knob: key for key, knob in KNOBS.items()}
_ANY_CLOCKS = clocks(0, MOST_MEGAHERTZ)
_RULE = Record(
    {
        "persistence": Boolean(),
        "compute_mode": Choice(COMPUTE_MODES),
        "power_limit": Integer(1, MOST_WATTS, "W"),
        "graphics_clocks": _ANY_CLOCKS,
        "memory_clocks": _ANY_CLOCKS,
        "workload_profiles": UniqueStrings(WORKLOAD_PROFILE),
        "time_slice": MatchingString(r"[A-Za-z]+", "the name of a time slice such as Long"),
        "ecc": Boolean(),
    }
)
_UNITS = {"power_limit": " W", "graphics_clocks": " MHz", "memory_clocks": " MHz"}


@dataclass(frozen=True)
class SettingsRule:
    """Define the desired values, by knob, of all devices that match. Other knobs stay unchanged."""

    match: Match
    values: Mapping[str, Any]


@dataclass(frozen=True)
class ClaimedKnob:
    """A knob that claims changed: the value before, and the claims."""

    before: Any
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """The scanned state of one device.

    ``claims`` use the device or a part of it. ``away`` says that the device is bound to another driver for one of them.
    """

    device: Device
    knobs: Mapping[str, Knob]
    claims: tuple[str, ...] = ()
    claimed_knobs: Mapping[str, ClaimedKnob] = field(default_factory=dict)
    away: bool = False

    def value_without_claims(self, name: str, recorded: RecordedValues) -> Any:
        """Return a knob's value outside of claims.

        If a claim changed the knob and the value before is unknown, this is the recorded value.
        """
        if name not in self.claimed_knobs:
            return self.knobs[name].value
        before = self.claimed_knobs[name].before
        return recorded.values.get(name) if before is None else before


@dataclass(frozen=True)
class Change:
    """A change of one knob from its current value to a new value; None for the device's default."""

    device_uuid: str
    name: str
    present: Any
    value: Any

    def describe(self) -> str:
        """Return the change as text."""
        return f"set {KEYS[self.name]} of {self.device_uuid} from {setting_text(self.name, self.present)} to {setting_text(self.name, self.value)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the change as data."""
        return {
            "step": "set",
            "device_uuid": self.device_uuid,
            "setting": KEYS[self.name],
            "from": self.present,
            "to": self.value,
        }


@dataclass(frozen=True)
class DevicePlan:
    """The changes of one device.

    ``wanted`` are the desired values, by knob. ``note`` is the record after the changes. ``withheld`` maps knobs that
    cannot be changed at present to the reason. ``reset`` says that a change takes effect only after a reset.
    """

    seen: Seen
    wanted: Mapping[str, Any]
    changes: tuple[Change, ...]
    note: RecordedValues
    withheld: Mapping[str, str] = field(default_factory=dict)
    reset: bool = False

    @property
    def uuid(self) -> str:
        """Return the device's UUID."""
        return self.seen.device.uuid


@dataclass(frozen=True)
class SettingsPlan:
    """The changes of one node.

    ``resets`` are groups of devices to reset together. ``waiting`` are devices that wait for a reset. ``standing`` are
    the current values, by knob, of the devices to reset: a reset also clears values that other programs set.
    """

    devices: tuple[DevicePlan, ...] = ()
    resets: tuple[tuple[str, ...], ...] = ()
    waiting: tuple[str, ...] = ()
    standing: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def concerned(self) -> frozenset[str]:
        """Return the UUIDs of the devices that change or are reset."""
        changed = {each.uuid for each in self.devices if each.changes}
        return frozenset(changed | {uuid for group in self.resets for uuid in group})

    def records_during_changes(self, record: SettingsRecord) -> dict[str, RecordedValues]:
        """Return the records to keep during the changes. For devices that are reset they contain all current values."""
        previous: dict[str, dict[str, Any]] = {uuid: dict(values) for uuid, values in self.standing.items()}
        for each in self.devices:
            if each.changes:
                previous.setdefault(each.uuid, {}).update({change.name: change.present for change in each.changes})
        return {uuid: record.of(uuid).during_change(present) for uuid, present in previous.items()}

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps in order, as data with descriptions."""
        first = [change for each in self.devices for change in each.changes if change.name == ECC]
        last = [change for each in self.devices for change in each.changes if change.name != ECC]
        resets = [
            {"step": "reset", "device_uuids": list(group), "description": f"reset {', '.join(group)}"}
            for group in self.resets
        ]
        return [*map(_described, first), *resets, *map(_described, last)]


def _described(change: Change) -> dict[str, Any]:
    return {**change.to_dict(), "description": change.describe()}


def setting_text(name: str, value: Any) -> str:
    """Return a knob's value as text."""
    if value is None:
        return "its default"
    if isinstance(value, Mapping):
        return f"{value.get('minimum', 0)} to {value['maximum']}{_UNITS.get(KEYS[name], '')}"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}{_UNITS.get(KEYS[name], '')}" if isinstance(value, (int, float)) else str(value)


def parse_settings(document: Any) -> tuple[SettingsRule, ...]:
    """Parse rules from YAML or JSON data, a list of mappings.

    Raises InvalidSettings, which names the rule and all its problems.
    """
    if not isinstance(document, list):
        raise InvalidSettings(f"The settings must be a list of rules, not {type(document).__name__}")
    return tuple(_parse(f"Settings rule {number}", entry) for number, entry in enumerate(document, start=1))


def _parse(where: str, entry: Any) -> SettingsRule:
    try:
        check_keys(where, entry, (MATCH, *KNOBS))
        if MATCH not in entry:
            raise InvalidLayout(f"{where}: the key match is missing", hint="Write `match: {}` to match every device.")
        match = parse_match(where, entry[MATCH])
    except InvalidLayout as error:
        hint = (
            f"{error.hint} Partitions, and the mode that they need, are a layout's."
            if "unknown" in error.message
            else error.hint
        )
        raise InvalidSettings(error.message, hint=hint) from error
    try:
        values = decode(_RULE, {key: value for key, value in entry.items() if key != MATCH})
    except InvalidDocument as error:
        raise InvalidSettings(f"{where}: {error}") from error
    return SettingsRule(match, {KNOBS[key]: value for key, value in values.items()})


class SettingsRejected(InvalidSettings):
    """Report that devices do not accept the desired values, all for the same reasons."""

    def __init__(self, devices: Sequence[str], reasons: str) -> None:
        super().__init__(
            f"The settings are not valid for {', '.join(devices)}: {reasons}",
            hint="Correct the rule, or match the device with a different one.",
        )
        self.devices = tuple(devices)
        self.reasons = reasons


def rule_for(device: Device, rules: Sequence[SettingsRule]) -> SettingsRule | None:
    """Return the first rule that matches a device, or None."""
    return next((rule for rule in rules if rule.match.matches(device)), None)


def fitted(seen: Seen, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule's values within the device's own limits.

    Raises InvalidSettings with all values that the device does not accept.
    """
    knobs = {KEYS[name]: knob for name, knob in seen.knobs.items()}
    found, problems = fit_to_device({KEYS[name]: value for name, value in values.items()}, knobs)
    if problems:
        raise SettingsRejected([seen.device.describe()], join_problems(problems))
    return {KNOBS[key]: value for key, value in found.items()}


def plan_device(seen: Seen, values: Mapping[str, Any], noted: RecordedValues, *, restore: bool) -> DevicePlan:
    """Plan one device: set the desired values, and with ``restore`` restore other recorded knobs to their previous value.

    Raises InvalidSettings. Raises InUse, with claims and PIDs, if the change would affect a user of the device.
    """
    wanted = fitted(seen, values)
    to_restore = {name: before for name, before in noted.before.items() if restore and name not in wanted}
    note, reset = noted.without(*to_restore), False
    changes: list[Change] = []
    withheld: dict[str, str] = {}
    for name, value in {**wanted, **to_restore}.items():
        knob = seen.knobs.get(name)
        if knob is None:
            continue  # the knob must be restored, but the device no longer has it
        standing = seen.value_without_claims(name, noted)
        if knob.pending is not None:
            reset = reset or (value is not None and knob.value != value)
            standing = knob.pending
        # An interrupted run was changing a knob that cannot be read back, so its value is unknown.
        unknown = standing is None and name in noted.before and name not in noted.values
        if standing == value and not unknown:
            if name in note.before:
                note = RecordedValues({**note.values, name: value}, note.before)
            continue
        if knob.blocked:
            if name in wanted:
                withheld[name] = knob.blocked
            continue
        _require_changeable(seen, name, value)
        changes.append(Change(seen.device.uuid, name, standing, value))
        if name in wanted:
            note = RecordedValues({**note.values, name: value}, {name: standing, **note.before})
    return DevicePlan(seen, wanted, tuple(changes), note, withheld, reset)


def _require_changeable(seen: Seen, name: str, value: Any) -> None:
    """Raise InUse if a claim set the knob itself, or if further processes of the device's users could not start."""
    claimed = seen.claimed_knobs.get(name)
    what = f"{KEYS[name]} of {seen.device.describe()} is not set to {setting_text(name, value)}"
    if claimed is not None:
        raise InUse(
            f"{what}: {_claims(claimed.claims)} {'has' if len(claimed.claims) == 1 else 'have'} set it for the time of the claim",
            claims=claimed.claims,
            hint="Wait until it has ended, or delete its pod.",
        )
    if name == COMPUTE_MODE and value not in (None, COMPUTE_MODES[0]) and (seen.claims or seen.device.processes):
        raise InUse(
            f"{what}: it is used by {_holders([seen])}, whose further processes would not start",
            claims=seen.claims,
            pids=[process.pid for process in seen.device.processes],
            hint="End what uses the device.",
        )


def _claims(claims: Sequence[str]) -> str:
    return f"claim{'' if len(claims) == 1 else 's'} {', '.join(claims) or '(unknown)'}"


def _holders(several: Iterable[Seen]) -> str:
    found = []
    for seen in several:
        found += [_claims(seen.claims)] if seen.claims else []
        found += [f"process {process}" for process in seen.device.processes]
    return ", ".join(dict.fromkeys(found))


def plan_settings(
    seen_devices: Sequence[Seen],
    rules: Sequence[SettingsRule],
    record: SettingsRecord,
    *,
    restore: bool,
    reset: str | None,
    absent: bool = False,
) -> tuple[SettingsPlan, tuple[AcceleratorError, ...]]:
    """Plan all devices of a node; return the plan of the devices that can change, and the errors of the others.

    With ``restore`` recorded values that no rule wants are restored, also on devices that no rule matches. With
    ``absent`` only the ``match`` of the rules is used: all recorded values of the matching devices are restored.
    ``reset`` is None (reject changes that need a reset), "never" (leave the change pending until the next reboot), or
    "when_needed" (reset the device).
    """
    plans: list[DevicePlan] = []
    errors: list[AcceleratorError] = []
    rejected: dict[str, list[str]] = {}
    for seen in seen_devices:
        rule, noted = rule_for(seen.device, rules), record.of(seen.device.uuid)
        if seen.away or (rule is None and (absent or not restore or not noted.before)):
            continue
        values = rule.values if rule is not None and not absent else {}
        try:
            plans.append(plan_device(seen, values, noted, restore=restore or absent))
        except SettingsRejected as error:
            rejected.setdefault(error.reasons, []).extend(error.devices)
        except AcceleratorError as error:
            errors.append(error)
    errors = [*(SettingsRejected(devices, reasons) for reasons, devices in rejected.items()), *errors]
    needing = [each.uuid for each in plans if each.reset]
    groups, refused = _reset_groups(seen_devices, needing) if needing and reset != "never" else ((), ())
    if needing and reset is None:
        errors.append(_reset_not_allowed(plans))
    else:
        errors += refused
    kept = [each for each in plans if not each.reset or reset == "never" or any(each.uuid in group for group in groups)]
    resets = groups if reset == "when_needed" else ()
    to_reset = {uuid for group in resets for uuid in group}
    standing = {seen.device.uuid: _values_to_restore(seen) for seen in seen_devices if seen.device.uuid in to_reset}
    return SettingsPlan(tuple(kept), resets, tuple(needing) if reset == "never" else (), standing), tuple(errors)


def _values_to_restore(seen: Seen) -> dict[str, Any]:
    return {
        name: knob.value
        for name, knob in seen.knobs.items()
        # A persistence mode that cannot be switched off must be switched on again after a reset.
        if knob.value is not None
        and knob.pending is None
        and (not knob.blocked or (name == PERSISTENCE and knob.value))
    }


def _reset_not_allowed(plans: Iterable[DevicePlan]) -> Unsupported:
    names = "; ".join(each.seen.device.describe() for each in plans if each.reset)
    return Unsupported(
        f"{names}: a change of ecc is in force only after a reset of the device, which ends whatever runs on it, and nothing was said "
        "about resets. Nothing was changed",
        hint="Set reset to when_needed to allow resets where nothing uses the device, or to never to leave the change pending until the "
        "machine is started again.",
        code="reset-needs-consent",
    )


def _reset_groups(
    seen_devices: Sequence[Seen], needing: Collection[str]
) -> tuple[tuple[tuple[str, ...], ...], tuple[AcceleratorError, ...]]:
    """Return the groups of devices to reset for these devices, and the errors of devices that cannot be reset."""
    groups: list[tuple[str, ...]] = []
    errors: list[AcceleratorError] = []
    for positions in reset_groups([seen.device for seen in seen_devices]):
        members = [seen_devices[position] for position in positions]
        if not any(member.device.uuid in needing for member in members):
            continue
        busy = [member for member in members if member.claims or member.device.processes or member.away]
        partitioned = [member for member in members if member.device.partitions]
        names = ", ".join(member.device.describe() for member in members)
        blocked = blocked_reset(member.device for member in members)
        if blocked is not None:
            errors.append(blocked)
        elif busy:
            errors.append(
                InUse(
                    f"A change of ecc needs a reset of {names}, which would end what uses it: {_holders(busy)}",
                    claims=[claim for member in busy for claim in member.claims],
                    pids=[process.pid for member in busy for process in member.device.processes],
                    hint="End what uses the device, or leave the change to the next start of the machine with reset: never.",
                )
            )
        elif partitioned:
            blockers = [part.describe() for member in partitioned for part in member.device.partitions]
            errors.append(
                InUse(
                    f"A change of ecc needs a reset of {names}, which would take partitions along: {', '.join(blockers)}",
                    hint="Remove them with a layout first, or leave the change to the next start of the machine with reset: never.",
                    code="partitions-there",
                )
            )
        else:
            groups.append(tuple(member.device.uuid for member in members))
    return tuple(groups), tuple(errors)
