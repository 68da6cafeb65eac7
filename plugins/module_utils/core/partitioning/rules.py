# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define layout rules: the desired state of matching devices.

All vendors share one schema, and the first matching rule applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ..dra.consumable_capacity import MOST_SHARES
from ..errors import InvalidLayout
from ..host.pci import normalize_address
from ..model import Device

STATIC = "static"
DYNAMIC = "dynamic"
WHOLE = "whole"
MODES = (STATIC, DYNAMIC, WHOLE)
_MATCH_KEYS = ("vendor", "index", "uuid", "pci_address", "product")
_RULE_KEYS = ("match", "mode", "partitions", "shares", "passthrough", "prepared_before_binding", "composed")
_PARTITION_KEYS = ("profile", "placement", "count")


@dataclass(frozen=True)
class Match:
    """Select the devices of a rule.

    All keys must match. A key with the value None matches all devices, and a list matches any of its values.
    ``product`` contains shell patterns.
    """

    vendor: tuple[str, ...] | None = None
    index: tuple[int, ...] | None = None
    uuid: tuple[str, ...] | None = None
    pci_address: tuple[str, ...] | None = None
    product: tuple[str, ...] | None = None

    def matches(self, device: Device) -> bool:
        """Return whether all given keys match a device."""
        return (
            (self.vendor is None or device.vendor in self.vendor)
            and (self.index is None or device.index in self.index)
            and (self.uuid is None or device.uuid in self.uuid)
            and (self.pci_address is None or device.pci_address in self.pci_address)
            and (self.product is None or any(fnmatchcase(device.product, pattern) for pattern in self.product))
        )


@dataclass(frozen=True)
class WantedPartition:
    """A number of partitions of one profile; with ``start`` (a memory slice) exactly one partition at this placement."""

    profile: str
    count: int = 1
    start: int | None = None

    def __str__(self) -> str:
        return f"{self.profile} at {self.start}" if self.start is not None else f"{self.count} × {self.profile}"


@dataclass(frozen=True)
class Rule:
    """The desired state of the matching devices.

    ``shares`` is the number of claims that can share a whole device. With ``passthrough`` a virtual machine can get a
    device. With ``prepared_before_binding`` a pod is bound to the node only after slow preparation steps are done.
    Without ``composed`` the device is not a member of groups.
    """

    match: Match
    mode: str
    partitions: tuple[WantedPartition, ...] = ()
    shares: int = 0
    passthrough: bool = False
    prepared_before_binding: bool = False
    composed: bool = True

    def describe(self) -> str:
        """Return the desired state as text."""
        if self.shares:
            return f"{self.mode}, in {self.shares} shares"
        if self.passthrough:
            return f"{self.mode}, or passed through"
        if self.mode != STATIC:
            return self.mode
        return "static: " + (" + ".join(str(wanted) for wanted in self.partitions) or "no partitions")


def parse_rules(document: Any) -> tuple[Rule, ...]:
    """Parse rules from YAML or JSON data, a list of mappings.

    Raises InvalidLayout, which names the rule, counted from 1, and the key.
    """
    if not isinstance(document, list):
        raise InvalidLayout(f"The layout must be a list of rules, not {_type_name(document)}")
    return tuple(_parse_rule(number, entry) for number, entry in enumerate(document, start=1))


def document_of(rule: Rule) -> dict[str, Any]:
    """Return a rule, without its match, in the form that ``parse_rules`` reads."""
    found: dict[str, Any] = {"mode": rule.mode}
    if rule.mode == STATIC:
        found["partitions"] = [
            {"profile": each.profile, "count": each.count}
            if each.start is None
            else {"profile": each.profile, "placement": each.start}
            for each in rule.partitions
        ]
    if rule.shares:
        found["shares"] = rule.shares
    for key in ("passthrough", "prepared_before_binding"):
        if getattr(rule, key):
            found[key] = True
    if not rule.composed:
        found["composed"] = False
    return found


def wanted_for(device: Device, rules: Sequence[Rule]) -> Rule | None:
    """Return the first rule that matches a device, or None if no rule applies and the device must not be changed."""
    return next((rule for rule in rules if rule.match.matches(device)), None)


def unmatched_indices(rules: Sequence[Rule], devices: Sequence[Device], unread: Sequence[int] = ()) -> tuple[str, ...]:
    """Return a message for each rule with device indices that do not exist although its other keys match a device."""
    found = []
    for number, rule in enumerate(rules, start=1):
        others = [device.index for device in devices if replace(rule.match, index=None).matches(device)]
        missing = [each for each in rule.match.index or () if each not in others and each not in unread]
        if others and missing:
            found.append(
                f"Layout rule {number}, key match.index: there is no device {', '.join(map(str, missing))}; the devices are "
                f"{', '.join(map(str, sorted(others)))}"
            )
    return tuple(found)


def _parse_rule(number: int, entry: Any) -> Rule:
    where = f"Layout rule {number}"
    check_keys(where, entry, _RULE_KEYS)
    if "match" not in entry:
        raise InvalidLayout(f"{where}: the key match is missing", hint="Write `match: {}` to match every device.")
    mode = entry.get("mode")
    if mode not in MODES:
        raise InvalidLayout(f"{where}, key mode: {mode!r} is not one of {', '.join(MODES)}")
    if mode != STATIC and entry.get("partitions"):
        raise InvalidLayout(f"{where}, key partitions: only mode static has partitions, this rule's mode is {mode}")
    if mode == STATIC and "partitions" not in entry:
        raise InvalidLayout(
            f"{where}: the key partitions is missing", hint="Mode static needs it; `partitions: {}` means none."
        )
    return Rule(
        parse_match(where, entry["match"]),
        mode,
        _parse_partitions(where, entry.get("partitions")),
        _parse_shares(where, mode, entry.get("shares")),
        _parse_passthrough(where, mode, entry),
        _parse_prepared_before_binding(where, mode, entry),
        _parse_boolean(where, "composed", entry, default=True),
    )


def _parse_shares(where: str, mode: str, shares: Any) -> int:
    if shares is None:
        return 0
    if mode != WHOLE:
        raise InvalidLayout(f"{where}, key shares: only mode whole has shares, this rule's mode is {mode}")
    if isinstance(shares, bool) or not isinstance(shares, int) or not 2 <= shares <= MOST_SHARES:
        raise InvalidLayout(
            f"{where}, key shares: expected a number from 2 to {MOST_SHARES}, not {shares!r}",
            hint="Without the key one claim at a time has the device.",
        )
    return shares


def _parse_passthrough(where: str, mode: str, entry: Mapping[str, Any]) -> bool:
    passthrough = _parse_boolean(where, "passthrough", entry)
    if passthrough and mode == STATIC:
        raise InvalidLayout(
            f"{where}, key passthrough: a statically partitioned device cannot be passed through as a whole",
            hint="Set mode of the rule to whole or dynamic, or leave the key out.",
        )
    if passthrough and entry.get("shares"):
        raise InvalidLayout(f"{where}: a device has shares or passthrough, not both")
    return passthrough


def _parse_prepared_before_binding(where: str, mode: str, entry: Mapping[str, Any]) -> bool:
    prepared_before_binding = _parse_boolean(where, "prepared_before_binding", entry)
    if prepared_before_binding and mode != DYNAMIC and not entry.get("passthrough"):
        raise InvalidLayout(
            f"{where}, key prepared_before_binding: nothing about a device of mode {mode} takes time when a claim gets it",
            hint="Give the rule mode dynamic or passthrough, or leave the key out.",
        )
    return prepared_before_binding


def _parse_boolean(where: str, key: str, entry: Mapping[str, Any], *, default: bool = False) -> bool:
    value = entry.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidLayout(f"{where}, key {key}: expected true or false, not {value!r}")
    return value


def parse_match(where: str, entry: Any) -> Match:
    """Parse a rule's match; ``where`` names the rule in errors. Raises InvalidLayout."""
    where = f"{where}, key match"
    check_keys(where, entry if entry is not None else {}, _MATCH_KEYS)
    values: dict[str, tuple[Any, ...]] = {}
    for key, value in (entry or {}).items():
        listed: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        if not listed:
            raise InvalidLayout(f"{where}.{key}: an empty list matches nothing")
        for each in listed:
            is_index = not isinstance(each, bool) and isinstance(each, int) and each >= 0
            is_text = isinstance(each, str) and each != ""
            if not (is_index if key == "index" else is_text):
                expected = "a number from 0 on" if key == "index" else "a text"
                raise InvalidLayout(f"{where}.{key}: expected {expected} or a list of them, not {each!r}")
        if key == "pci_address":
            try:
                listed = [normalize_address(each) for each in listed]
            except ValueError as error:
                raise InvalidLayout(f"{where}.{key}: {error}") from error
        values[key] = tuple(listed)
    return Match(**values)


def _parse_partitions(where: str, entry: Any) -> tuple[WantedPartition, ...]:
    where = f"{where}, key partitions"
    if entry is None:
        return ()
    if isinstance(entry, Mapping):
        return tuple(
            _parse_count(where, profile, count) for profile, count in entry.items() if count != 0 or count is False
        )
    if not isinstance(entry, (list, tuple)):
        raise InvalidLayout(f"{where}: expected a mapping of profile to count, or a list, not {_type_name(entry)}")
    found: list[WantedPartition] = []
    taken: dict[int, int] = {}
    for position, each in enumerate(entry, start=1):
        here = f"{where}, entry {position}"
        check_keys(here, each, _PARTITION_KEYS)
        profile, start = each.get("profile"), each.get("placement")
        count = each.get("count", 1)
        if start is None:
            if count != 0 or count is False:
                found.append(_parse_count(here, profile, count))
            continue
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise InvalidLayout(f"{here}: placement must be the number of a memory slice from 0 on, not {start!r}")
        if count != 1:
            raise InvalidLayout(f"{here}: a partition with a placement is one, count {count!r} is not possible")
        if start in taken:
            raise InvalidLayout(
                f"{here}: placement {start} is that of entry {taken[start]} already",
                hint="Give each partition a different placement, or write the profile with a count and without a placement.",
            )
        taken[start] = position
        found.append(WantedPartition(_parse_count(here, profile, 1).profile, 1, start))
    return tuple(found)


def _parse_count(where: str, profile: Any, count: Any) -> WantedPartition:
    if not isinstance(profile, str) or not profile.strip():
        raise InvalidLayout(f"{where}: {profile!r} is not the name of a profile")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidLayout(f"{where}: the count of {profile} must be a number from 0 on, not {count!r}")
    return WantedPartition(profile.strip(), count)


def check_keys(where: str, entry: Any, known: Sequence[str]) -> None:
    """Raise InvalidLayout if the entry is not a mapping or has unknown keys."""
    if not isinstance(entry, Mapping):
        raise InvalidLayout(f"{where}: expected a mapping, not {_type_name(entry)}")
    unknown = [str(key) for key in entry if key not in known]
    if unknown:
        raise InvalidLayout(f"{where}: unknown key {', '.join(unknown)}", hint=f"Known are {', '.join(known)}.")


def _type_name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
