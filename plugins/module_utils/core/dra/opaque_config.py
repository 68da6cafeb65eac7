# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Decode the opaque configurations of claims, claim templates, and device classes.

The vendor packages define their kinds as data. Invalid content is rejected with the field's name, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import AcceleratorError
from ..model import DEVICE, GROUP
from ..schema import InvalidDocument, Problem, Record, decode, value_text

#: The fields that identify the kind.
IDENTITY = ("apiVersion", "kind")


class ConfigRefused(AcceleratorError):
    """A configuration cannot be used. ``problems`` lists all invalid fields; it is empty for an unknown kind."""

    default_code = "config-refused"

    def __init__(self, message: str, *, hint: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


@dataclass(frozen=True)
class ConfigKind:
    """One kind of opaque configuration in a vendor's manifests.

    - ``device_kind`` is the kind of offers that it applies to (Offer.kind).
    - ``record`` defines its fields other than apiVersion and kind.
    - ``settings`` returns the device knobs that a decoded configuration sets (settings/knobs.py).
    - ``sharing`` returns the settings of a program through which containers share the device (host/companions.py), or an
      empty mapping.
    - ``within`` limits a sharing to the claim's part of a shared device, given the sharing, the consumed amounts, and
      the totals.
    - ``passthrough`` returns how a virtual machine uses the device: whether through iommufd if the kernel supports it,
      and whether with that interface's own device node (passthrough.py).
    - ``named`` replaces device positions in a sharing by UUIDs. The positions refer to the given UUIDs, which are all
      devices of the configuration.
    - ``profile`` returns the required profile of a partition, or "" for any.
    """

    api_version: str
    name: str
    device_kind: str
    record: Record
    settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _values: {}
    sharing: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _values: {}
    within: Callable[[Mapping[str, Any], Mapping[str, int], Mapping[str, int]], Mapping[str, Any]] = (
        lambda sharing, _consumed, _totals: sharing
    )
    passthrough: Callable[[Mapping[str, Any]], tuple[bool, bool]] = lambda _values: (False, False)
    profile: Callable[[Mapping[str, Any]], str] = lambda _values: ""
    named: Callable[[Mapping[str, Any], Sequence[str]], Mapping[str, Any]] = lambda sharing, _uuids: sharing

    def suits(self, kind: str) -> bool:
        """Return whether it applies to offers of a kind. A kind for whole devices applies to each member of a group."""
        return self.device_kind == (DEVICE if kind == GROUP else kind)


@dataclass(frozen=True)
class Configuration:
    """A decoded configuration: its kind, and its values with defaults."""

    kind: ConfigKind
    values: Mapping[str, Any]


def decode_configuration(kinds: Sequence[ConfigKind], parameters: Mapping[str, Any]) -> Configuration:
    """Decode one configuration. Raises ConfigRefused, which names every invalid field and its allowed values."""
    kind = _kind(kinds, parameters)
    content = {name: value for name, value in parameters.items() if name not in IDENTITY}
    try:
        values = decode(kind.record, content)
    except InvalidDocument as error:
        raise ConfigRefused(
            f"{kind.name} is wrong: {error}", hint="Correct the configuration.", problems=error.problems
        ) from None
    return Configuration(kind, values)


def _kind(kinds: Sequence[ConfigKind], parameters: Mapping[str, Any]) -> ConfigKind:
    api_version, name = (parameters.get(field) for field in IDENTITY)
    for kind in kinds:
        if (kind.api_version, kind.name) == (api_version, name):
            return kind
    known = ", ".join(f"{kind.api_version} {kind.name}" for kind in kinds) or "none"
    missing = [field for field in IDENTITY if parameters.get(field) is None]
    found = f"has no {' and no '.join(missing)}" if missing else f"is {value_text(api_version)} {value_text(name)}"
    raise ConfigRefused(f"its kind {found}", hint=f"This version knows {known}.")
