# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Opaque configurations of claims, templates and classes: one decoder for whoever reads them.

A vendor's folder names its kinds as data. What is wrong is refused by name, never silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .documents import InvalidDocument, Problem, Record, decode, shown
from .errors import AcceleratorError
from .model import DEVICE, GROUP

#: The fields by which every kind is known.
IDENTITY = ("apiVersion", "kind")


class ConfigRefused(AcceleratorError):
    """A configuration cannot be used. ``problems`` has all that is wrong with its fields; it is empty for an unknown kind."""

    default_code = "config-refused"

    def __init__(self, message: str, *, hint: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


@dataclass(frozen=True)
class ConfigKind:
    """One kind of opaque configuration that a vendor's manifests may carry.

    ``device_kind`` says which offers it is for (see Offer.kind), ``record`` what it may hold beside apiVersion and kind.
    ``settings`` tells which knobs of the device a decoded configuration turns (see settings.py), ``sharing`` what it asks of a
    program that lets containers share the device (see companions.py; empty: none is wanted), ``within`` holds that to what the
    claim consumes of a device that several claims share (given the sharing, what is consumed, and what the device has), and
    ``passthrough`` tells how a virtual machine reaches the device (whether by iommufd where the kernel has it, and whether with that
    interface's own node; see passthrough.py). ``named`` returns a sharing with devices named by UUID that it names by their place
    among those whose UUIDs are given: all that the one configuration is for. ``profile`` tells of which profile a partition has to be; empty for any.
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
        """Whether it is for offers of a kind. What is for a whole device holds for each member of a group."""
        return self.device_kind == (DEVICE if kind == GROUP else kind)


@dataclass(frozen=True)
class Configuration:
    """A decoded configuration: its kind, and its values with their defaults."""

    kind: ConfigKind
    values: Mapping[str, Any]


def decode_configuration(kinds: Sequence[ConfigKind], parameters: Mapping[str, Any]) -> Configuration:
    """Decode one configuration. Raises ConfigRefused, naming every field that is wrong and what it may be."""
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
    found = f"has no {' and no '.join(missing)}" if missing else f"is {shown(api_version)} {shown(name)}"
    raise ConfigRefused(f"its kind {found}", hint=f"This version knows {known}.")
