# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What can be set on a whole device, whichever vendor's it is, and the configuration by which a claim asks for it, for its time.

Settings of the node stand until somebody sets others (node_settings.py); a claim finds them, and leaves them again. ECC is theirs
alone: a change of it needs a reset and outlives the claim.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .configuration import ConfigKind, ConfigRefused, Configuration
from .documents import Choice, Field, Problem, Record, Several, Whole, Word, any_of, below

# The knobs by name; a backend has some of them. The first five are fields of DeviceSettings as well.
POWER_LIMIT = "powerLimit"  # a number of W
GRAPHICS_CLOCKS = "graphicsClocks"  # {minimum, maximum} in MHz
MEMORY_CLOCKS = "memoryClocks"
COMPUTE_MODE = "computeMode"  # one of COMPUTE_MODES
WORKLOAD_PROFILES = "workloadProfiles"  # the vendor's own tunings of a device for kinds of work, by their names
TIME_SLICE = "timeSlice"  # how long one process computes while others wait: a word of the vendor's
PERSISTENCE = "persistence"  # whether the vendor's driver holds the device while nobody uses it
ECC = "ecc"  # whether the memory corrects errors; in force after the next reset

COMPUTE_MODES = ("Default", "ExclusiveProcess", "Prohibited")
#: What is there again after a start of the machine; the rest is as the device has it by default.
OUTLIVES_BOOT = frozenset({ECC})

# In the meta table of the driver's store, with the device's UUID and the knob's name behind it: what was there before a claim. The
# value is JSON: the boot id, and that value.
SETTING_KEY = "setting:"

#: No device takes more; what one device takes is its knob's to say.
_MOST_WATTS = 100_000
_MOST_MEGAHERTZ = 100_000
#: Which profiles there are is the device's to say.
_PROFILE = Word(r"[a-z0-9]+(-[a-z0-9]+)*", "the name of a workload profile such as max-q")


@dataclass(frozen=True)
class Knob:
    """One thing that can be set on one device: what it is now, and what it may be.

    ``value`` is None where the vendor has no way to tell and nobody has noted what he set; the vendor's default then stands for it.
    ``pending`` is what it will be after the next reset of the device, for a knob whose change waits for one; None for all others.
    ``blocked`` says why it cannot be turned as the device is at present; "" where it can.
    """

    value: Any
    allowed: Field
    pending: Any = None
    blocked: str = ""


def _in_order(clocks: Mapping[str, Any], path: str) -> Iterator[Problem]:
    if clocks.get("minimum", 0) > clocks["maximum"]:
        yield Problem(
            below(path, "minimum"), f"{clocks['minimum']}", f"no more than the maximum, {clocks['maximum']} MHz"
        )


def clocks(least: int, most: int, *, defaults: Mapping[str, Any] | None = None) -> Record:
    """A range of clocks between ``least`` and ``most`` MHz."""
    bound = Whole(least, most, "MHz")
    return Record(
        {"minimum": bound, "maximum": bound},
        required=frozenset({"maximum"}),
        defaults=defaults or {},
        check=_in_order,
    )


DEVICE_SETTINGS = ConfigKind(
    "dra.accelerators/v1alpha1",
    "DeviceSettings",
    "device",
    Record(
        {
            POWER_LIMIT: Whole(1, _MOST_WATTS, "W"),
            GRAPHICS_CLOCKS: clocks(0, _MOST_MEGAHERTZ),
            MEMORY_CLOCKS: clocks(0, _MOST_MEGAHERTZ),
            COMPUTE_MODE: Choice(COMPUTE_MODES),
            WORKLOAD_PROFILES: Several(_PROFILE),
        }
    ),
    settings=lambda values: values,
)


def settings_of(configurations: Iterable[Configuration], *, admin: bool = False) -> dict[str, Any]:
    """Return what the configurations of one device ask for, by knob.

    Raises ConfigRefused where two contradict each other, and where the device is asked for with administrator's access.
    """
    wanted: dict[str, Any] = {}
    asked_by: dict[str, str] = {}
    for configuration in configurations:
        kind = configuration.kind
        for name, value in kind.settings(configuration.values).items():
            if wanted.setdefault(name, value) != value:
                raise ConfigRefused(
                    f"{kind.name} wants {name} {value} and {asked_by[name]} wants {wanted[name]}",
                    hint=f"Leave {name} to one of them.",
                )
            asked_by.setdefault(name, kind.name)
    if wanted and admin:
        raise ConfigRefused(
            f"it sets {', '.join(wanted)}, and a claim with administrator's access changes nothing on a device",
            hint="Leave the configuration out, or adminAccess.",
        )
    return wanted


def fit_to_device(wanted: Mapping[str, Any], knobs: Mapping[str, Knob]) -> tuple[dict[str, Any], Sequence[Problem]]:
    """Hold what is wanted against what one device takes: the values with the device's own bounds, and all that is wrong."""
    problems: list[Problem] = []
    fitted = {}
    for name, value in wanted.items():
        knob = knobs.get(name)
        if knob is None:
            problems.append(Problem(name, "nothing that this device has", any_of(tuple(knobs))))
        else:
            fitted[name] = knob.allowed.decode(value, name, problems)
    return fitted, problems


def setting_key(device_uuid: str, name: str) -> str:
    """Return the key of the driver's store under which it stands what a knob was before a claim turned it."""
    return f"{SETTING_KEY}{device_uuid}:{name}"


def noting(boot_id: str, before: Any) -> str:
    """Return the value for such a key."""
    return json.dumps({"boot": boot_id, "before": before}, sort_keys=True)


def read_noting(value: str) -> tuple[str, Any]:
    """Return what is noted: the boot id and the value before; one that cannot be read is of no boot."""
    try:
        noted = json.loads(value)
        return str(noted["boot"]), noted["before"]
    except (ValueError, KeyError, TypeError):
        return "", None


def noted_before(meta: Mapping[str, str], boot_id: str) -> dict[tuple[str, str], Any]:
    """Return what knobs were before claims of this boot turned them, by the device's UUID and the knob's name."""
    found = {}
    for key, value in meta.items():
        if key.startswith(SETTING_KEY):
            boot, before = read_noting(value)
            if boot == boot_id:
                uuid, name = key[len(SETTING_KEY) :].rsplit(":", 1)
                found[uuid, name] = before
    return found
