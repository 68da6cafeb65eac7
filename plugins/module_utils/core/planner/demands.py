# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the demands on a fleet: numbers of claims, each for devices of one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Optional

from .. import quantity
from ..errors import AcceleratorError
from ..model import Device, Profile

ANY, DEVICE, PARTITION = "any", "whole", "partition"
TYPES = (ANY, DEVICE, PARTITION)
_KEYS = ("name", "count", "priority", "devices", "type", "profile", "memory", "vendor", "product")
_PART_KEYS = ("devices", "type", "profile", "memory", "vendor", "product")
_MOST = 1_000_000
#: Vendor, product, and memory of a device; the profile id, or None for the whole device; whether the partition is
#: created on demand.
Kind = tuple[str, str, int, Optional[int], bool]


class InvalidDemand(AcceleratorError):
    """Report that a demand is invalid."""

    default_code = "invalid-wish"


@dataclass(frozen=True)
class Part:
    """A number of similar devices of a claim.

    ``type`` is whole device, partition, or any. ``profiles`` are alternative profile names. ``memory_bytes`` is the
    minimum memory of a device. ``vendor`` is empty for any vendor. ``products`` are alternative shell patterns. If the
    caller has already found the matching kinds, ``items`` lists them and the other criteria are ignored; ``text``
    describes them.
    """

    devices: int = 1
    type: str = DEVICE
    profiles: tuple[str, ...] = ()
    memory_bytes: int = 0
    vendor: str = ""
    products: tuple[str, ...] = ()
    items: frozenset[Kind] | None = None
    text: str = ""

    def takes(self, device: Device, profile: Profile | None, on_demand: bool = False) -> bool:
        """Return whether a whole device (profile None) or a partition of it matches.

        ``on_demand`` says that the partition is created on demand.
        """
        if self.items is not None:
            number = None if profile is None else profile.profile_id
            made_then = on_demand and profile is not None
            return (device.vendor, device.product, device.memory_bytes, number, made_then) in self.items
        if self.vendor not in ("", device.vendor):
            return False
        if self.products and not any(fnmatchcase(device.product, pattern) for pattern in self.products):
            return False
        if profile is None:
            return self.type != PARTITION and not self.profiles and device.memory_bytes >= self.memory_bytes
        if self.profiles and not any(profile.has_name(name) for name in self.profiles):
            return False
        return self.type != DEVICE and profile.memory_bytes >= self.memory_bytes

    def describe(self) -> str:
        """Return the demand as text."""
        words = [self.text] if self.text else [" or ".join(self.profiles)] if self.profiles else []
        if not words:
            words = [{ANY: "device or partition", DEVICE: "whole device", PARTITION: "partition"}[self.type]]
        if self.memory_bytes:
            words.append(f"with {quantity.format_bytes(self.memory_bytes)}")
        if self.products or self.vendor:
            words.append(f"of {' or '.join(self.products) or self.vendor}")
        return (f"{self.devices} × " if self.devices > 1 else "") + " ".join(words)


@dataclass(frozen=True)
class Demand:
    """A number of similar claims.

    Each claim gets its devices from one node. Demands with a higher priority are served first. ``elsewhere`` are the
    nodes whose devices the claims cannot use.
    """

    name: str
    count: int
    parts: tuple[Part, ...]
    priority: int = 0
    elsewhere: frozenset[str] = frozenset()

    @property
    def devices(self) -> int:
        """Return the number of devices of one claim."""
        return sum(part.devices for part in self.parts)

    def describe(self) -> str:
        """Return the demand as text."""
        return " + ".join(part.describe() for part in self.parts)


def read_demands(document: Any) -> tuple[Demand, ...]:
    """Read demands from a list of mappings. Raises InvalidDemand, which names the entry, counted from 1, and the key."""
    if not isinstance(document, list):
        raise InvalidDemand(f"The wanted devices must be a list, not {type(document).__name__}")
    found = [_demand(f"Wanted entry {number}", entry) for number, entry in enumerate(document, start=1)]
    twice = sorted({each.name for each in found if sum(one.name == each.name for one in found) > 1})
    if twice:
        raise InvalidDemand(
            f"Several entries of the wanted devices have the name {twice[0]}", hint="Use a unique name for each."
        )
    return tuple(found)


def _demand(where: str, entry: Any) -> Demand:
    _check_keys(where, entry, (*_KEYS, "parts"))
    parts = entry.get("parts")
    if parts is not None:
        beside = [key for key in _PART_KEYS if entry.get(key) is not None]
        if beside:
            raise InvalidDemand(
                f"{where}: {', '.join(beside)} cannot be combined with parts", hint="Move it into the parts."
            )
        if not isinstance(parts, list) or not parts:
            raise InvalidDemand(f"{where}, key parts: expected a list with at least one part, not {parts!r}")
        read = tuple(_checked_part(f"{where}, part {number}", each) for number, each in enumerate(parts, start=1))
    else:
        read = (_part(where, entry),)
    name = _text(where, entry, "name")
    priority = entry.get("priority") or 0
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidDemand(f"{where}, key priority: expected a whole number, not {priority!r}")
    return Demand(
        name or " + ".join(part.describe() for part in read), _number(where, entry, "count", least=0), read, priority
    )


def _checked_part(where: str, entry: Any) -> Part:
    _check_keys(where, entry, _PART_KEYS)
    return _part(where, entry)


def _part(where: str, entry: Mapping[str, Any]) -> Part:
    profile, memory = entry.get("profile"), entry.get("memory")
    profiles = _texts(where, entry, "profile")
    size = 0
    if memory is not None:
        try:
            size = quantity.parse_rounded_up(memory)
        except ValueError as error:
            raise InvalidDemand(f"{where}, key memory: {error}") from error
    kind = entry.get("type") or (PARTITION if profile else ANY if size else DEVICE)
    if kind not in TYPES:
        raise InvalidDemand(f"{where}, key type: {kind!r} is not one of {', '.join(TYPES)}")
    if profile and kind == DEVICE:
        raise InvalidDemand(f"{where}: a whole device has no profile", hint="Leave type or profile out.")
    return Part(
        _number(where, entry, "devices", least=1),
        kind,
        profiles,
        size,
        _text(where, entry, "vendor"),
        _texts(where, entry, "product"),
    )


def _number(where: str, entry: Mapping[str, Any], key: str, *, least: int) -> int:
    value = entry.get(key)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise InvalidDemand(f"{where}, key {key}: expected a whole number from {least} to {_MOST}, not {value!r}")
    return value


def _text(where: str, entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise InvalidDemand(f"{where}, key {key}: expected a text, not {value!r}")
    return (value or "").strip()


def _texts(where: str, entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = entry.get(key)
    listed: Sequence[Any] = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(_text(where, {key: each if each is not None else ""}, key) for each in listed)


def _check_keys(where: str, entry: Any, known: Sequence[str]) -> None:
    if not isinstance(entry, Mapping):
        raise InvalidDemand(f"{where}: expected a mapping, not {type(entry).__name__}")
    unknown = [str(key) for key in entry if key not in known]
    if unknown:
        raise InvalidDemand(f"{where}: unknown key {', '.join(unknown)}", hint=f"Known are {', '.join(known)}.")
