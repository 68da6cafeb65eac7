# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the settings (knobs) of whole devices for all vendors, and the configuration by which a claim sets them.

The node's settings stay until other node settings replace them (settings_plan.py). A claim changes values temporarily
and restores them. Only the node can set ECC, because a change requires a reset and remains after the claim.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dra.opaque_config import ConfigKind, ConfigRefused, Configuration
from ..schema import Choice, Field, Integer, MatchingString, Problem, Record, UniqueStrings, any_of, below

# The names of the knobs. A backend supports some of them. The first five are also fields of DeviceSettings.
POWER_LIMIT = "powerLimit"  # in W
GRAPHICS_CLOCKS = "graphicsClocks"  # {minimum, maximum} in MHz
MEMORY_CLOCKS = "memoryClocks"
COMPUTE_MODE = "computeMode"  # one of COMPUTE_MODES
WORKLOAD_PROFILES = "workloadProfiles"  # the vendor's tunings of a device for types of work, by name
TIME_SLICE = "timeSlice"  # how long one process computes while others wait: a vendor-specific name
PERSISTENCE = "persistence"  # whether the vendor's driver keeps the device initialized while it is unused
ECC = "ecc"  # whether the memory corrects errors; a change takes effect after the next reset

COMPUTE_MODES = ("Default", "ExclusiveProcess", "Prohibited")
#: Knobs that keep their value after a reboot. The others return to the device's default.
KEPT_AFTER_REBOOT = frozenset({ECC})

# The key prefix, in the meta table of the driver's store, of the values before claims. The device's UUID and the knob's
# name follow. The value is JSON with the boot id and the previous value.
SETTING_KEY = "setting:"

#: Upper limits for any device. Each device's knob defines its own limits.
MOST_WATTS = 100_000
MOST_MEGAHERTZ = 100_000
#: The form of a profile name. The device defines the valid profiles.
WORKLOAD_PROFILE = MatchingString(r"[a-z0-9]+(-[a-z0-9]+)*", "the name of a workload profile such as max-q")


@dataclass(frozen=True)
class Knob:
    """One setting of one device: its current value and its allowed values.

    ``value``: None if the vendor does not report the value and no record of it exists; the value is then assumed to
    be the vendor's default. ``pending`` is the value after the next reset, for a knob whose changes require one, else
    None. ``blocked`` is the reason why the knob cannot be changed at present, or empty.
    """

    value: Any
    allowed: Field
    pending: Any = None
    blocked: str = ""


def _check_clock_order(clocks: Mapping[str, Any], path: str) -> Iterator[Problem]:
    if clocks.get("minimum", 0) > clocks["maximum"]:
        yield Problem(
            below(path, "minimum"), f"{clocks['minimum']}", f"no more than the maximum, {clocks['maximum']} MHz"
        )


def clocks(least: int, most: int, *, defaults: Mapping[str, Any] | None = None) -> Record:
    """Return the field for a range of clocks between ``least`` and ``most`` MHz."""
    bound = Integer(least, most, "MHz")
    return Record(
        {"minimum": bound, "maximum": bound},
        required=frozenset({"maximum"}),
        defaults=defaults or {},
        check=_check_clock_order,
    )


DEVICE_SETTINGS = ConfigKind(
    "dra.accelerators/v1alpha1",
    "DeviceSettings",
    "device",
    Record(
        {
            POWER_LIMIT: Integer(1, MOST_WATTS, "W"),
            GRAPHICS_CLOCKS: clocks(0, MOST_MEGAHERTZ),
            MEMORY_CLOCKS: clocks(0, MOST_MEGAHERTZ),
            COMPUTE_MODE: Choice(COMPUTE_MODES),
            WORKLOAD_PROFILES: UniqueStrings(WORKLOAD_PROFILE),
        }
    ),
    settings=lambda values: values,
)


def settings_of(configurations: Iterable[Configuration], *, admin: bool = False) -> dict[str, Any]:
    """Return the settings that the configurations of one device request, by knob.

    Raises ConfigRefused if two of them conflict, or if the request has admin access.
    """
    wanted: dict[str, Any] = {}
    requested_by: dict[str, str] = {}
    for configuration in configurations:
        kind = configuration.kind
        for name, value in kind.settings(configuration.values).items():
            if wanted.setdefault(name, value) != value:
                raise ConfigRefused(
                    f"{kind.name} wants {name} {value} and {requested_by[name]} wants {wanted[name]}",
                    hint=f"Leave {name} to one of them.",
                )
            requested_by.setdefault(name, kind.name)
    if wanted and admin:
        raise ConfigRefused(
            f"it sets {', '.join(wanted)}, and a claim with administrator's access changes nothing on a device",
            hint="Leave the configuration out, or adminAccess.",
        )
    return wanted


def fit_to_device(wanted: Mapping[str, Any], knobs: Mapping[str, Knob]) -> tuple[dict[str, Any], Sequence[Problem]]:
    """Check the desired values against one device. Return the values within the device's limits, and all problems."""
    problems: list[Problem] = []
    fitted = {}
    for name, value in wanted.items():
        knob = knobs.get(name)
        if knob is None:
            problems.append(Problem(name, "not supported by this device", any_of(tuple(knobs))))
        else:
            fitted[name] = knob.allowed.decode(value, name, problems)
    return fitted, problems


def setting_key(device_uuid: str, name: str) -> str:
    """Return the key in the driver's store for a knob's value before claims changed it."""
    return f"{SETTING_KEY}{device_uuid}:{name}"


def encode_previous_value(boot_id: str, before: Any) -> str:
    """Return the JSON value for such a key."""
    return json.dumps({"boot": boot_id, "before": before}, sort_keys=True)


def decode_previous_value(value: str) -> tuple[str, Any]:
    """Return the recorded boot id and previous value. For an unreadable record the boot id is empty."""
    try:
        noted = json.loads(value)
        return str(noted["boot"]), noted["before"]
    except (ValueError, KeyError, TypeError):
        return "", None


def values_before_claims(meta: Mapping[str, str], boot_id: str) -> dict[tuple[str, str], Any]:
    """Return the knobs' values before claims of this boot changed them, by device UUID and knob name."""
    found = {}
    for key, value in meta.items():
        if key.startswith(SETTING_KEY):
            boot, before = decode_previous_value(value)
            if boot == boot_id:
                uuid, name = key[len(SETTING_KEY) :].rsplit(":", 1)
                found[uuid, name] = before
    return found
