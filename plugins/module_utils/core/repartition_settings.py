# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Settings of devices that are changed only while nobody uses the device: what of them a repartitioning has to see to. Pure.

Facts: ECC is in force after a reset of the device, which takes partitions along; a compute mode other than the default one would keep
further processes of whoever has the device from starting (node_settings).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .model import Device
from .node_settings import KEYS, SettingsRule, rule_for, words
from .settings import COMPUTE_MODE, COMPUTE_MODES, ECC, Knob


@dataclass(frozen=True)
class Unrest:
    """What of one device's settings has to change while nobody uses it, by the names of a rule's keys, and what it is now."""

    wanted: Mapping[str, Any] = field(default_factory=dict)
    former: Mapping[str, Any] = field(default_factory=dict)

    @property
    def resets(self) -> bool:
        """Whether the change is in force only after a reset."""
        return KEYS[ECC] in self.wanted

    def describe(self) -> str:
        """Say what changes."""
        return ", ".join(f"{key} {words(key_to_knob(key), value)}" for key, value in self.wanted.items())


def key_to_knob(key: str) -> str:
    """Return the knob's name for a rule's key."""
    return next(knob for knob, each in KEYS.items() if each == key)


def unrest(device: Device, knobs: Mapping[str, Knob], rules: Sequence[SettingsRule]) -> Unrest | None:
    """Return what has to change on a device while nobody uses it; None where nothing has to.

    What the device does not take at present, such as a compute mode while it is partitioned, is left to who makes the settings.
    """
    rule = rule_for(device, rules)
    wanted: dict[str, Any] = {}
    former: dict[str, Any] = {}
    for name in (ECC, COMPUTE_MODE):
        knob = knobs.get(name)
        if rule is None or name not in rule.values or knob is None or knob.blocked:
            continue
        value = rule.values[name]
        if name == COMPUTE_MODE and value == COMPUTE_MODES[0]:
            continue  # nobody is hurt by it
        if knob.value != value or knob.pending not in (None, value):
            wanted[KEYS[name]], former[KEYS[name]] = value, knob.value
    return Unrest(wanted, former) if wanted else None
