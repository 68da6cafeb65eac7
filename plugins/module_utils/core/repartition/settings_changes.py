# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the settings that a repartitioning must change because they can change only on unused devices. No side effects.

A change of ECC takes effect after a reset of the device, which deletes partitions. A compute mode other than the
default would prevent further processes of the device's users from starting (node_settings).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..model import Device
from ..settings.knobs import COMPUTE_MODE, COMPUTE_MODES, ECC, Knob
from ..settings.settings_plan import KEYS, SettingsRule, rule_for, setting_text


@dataclass(frozen=True)
class IdleSettings:
    """The settings of one device that can change only while it is unused, by rule key: new and current values."""

    wanted: Mapping[str, Any] = field(default_factory=dict)
    former: Mapping[str, Any] = field(default_factory=dict)

    @property
    def resets(self) -> bool:
        """Return whether the change takes effect only after a reset."""
        return KEYS[ECC] in self.wanted

    def describe(self) -> str:
        """Return the change as text."""
        return ", ".join(f"{key} {setting_text(key_to_knob(key), value)}" for key, value in self.wanted.items())


def key_to_knob(key: str) -> str:
    """Return the knob's name for a rule's key."""
    return next(knob for knob, each in KEYS.items() if each == key)


def idle_settings(device: Device, knobs: Mapping[str, Knob], rules: Sequence[SettingsRule]) -> IdleSettings | None:
    """Return the settings of a device that must change while it is unused; None if there are no such settings.

    Settings that the device does not accept at present, such as a compute mode while it is partitioned, are left to the
    program that applies node settings.
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
            continue  # it does not affect users
        if knob.value != value or knob.pending not in (None, value):
            wanted[KEYS[name]], former[KEYS[name]] = value, knob.value
    return IdleSettings(wanted, former) if wanted else None
