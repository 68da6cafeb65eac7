# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert the templates and totals that a chip reports to profiles of the model, with exact arithmetic.

A template can take a fraction of a resource, because vNPUs share AICPUs in parts. Counters are integers, so such a
resource is counted in parts: in halves it is named ``aiCPU_2``. This module has no side effects.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from ...model import Placement, Profile, frozen
from ...partitioning.capacity import MEMORY, count_disjoint
from . import names
from .families import GIBIBYTE, Family, helpers_of

CORES, HELPERS = "aiCores", "aiCPU"
#: The shared resources of a chip besides memory, by their published names. PNGD is left out, because no combination of
#: vNPUs exhausts it first.
SHARED = (CORES, HELPERS, "vpc", "venc", "vdec", "jpegd", "jpege")
_COUNTERS: Mapping[str, str] = MappingProxyType({CORES: "aicore", HELPERS: "aicpu"})
_PARTS = re.compile(r"([A-Za-z]+)_(\d+)")
_MEBIBYTE = 1024 * 1024
_LARGEST_PART = 1000
# From this ratio on, the reported memory is that of a board other than the one that the templates are named for.
_OTHER_BOARD = Fraction(3, 2)


@dataclass(frozen=True)
class Template:
    """One vNPU template that the device reports. ``memory`` is the nominal memory in GiB. Unknown amounts are missing."""

    name: str
    amounts: Mapping[str, Fraction]
    memory: Fraction


@dataclass(frozen=True)
class Totals:
    """The total resources that a chip reports. The memory is the reported size in bytes."""

    amounts: Mapping[str, Fraction]
    memory_bytes: int


def exact(value: float) -> Fraction:
    """Return the exact number for a floating-point number of DCMI, which has about seven significant digits."""
    return Fraction(value).limit_denominator(_LARGEST_PART)


def profile_id(template: str) -> int:
    """Return the number of a template in a store. It depends on the name only."""
    return zlib.crc32(template.encode())


def profiles_of(family: Family, templates: Iterable[Template], totals: Totals) -> tuple[Profile, ...]:
    """Return the profiles of a chip, from small to large; empty for a chip that cannot be partitioned.

    ``maximum`` is the number of vNPUs with one profile on an empty chip. Templates that do not fit once are left out.
    Raises ValueError for two templates with the same number.
    """
    known = {template.name: template for template in templates}
    shared = _shared(family, totals)
    if not family.supports_vnpus or CORES not in shared:
        return ()
    parts = _parts(known.values(), shared)
    limits = _counted(shared, parts)
    nominal = _nominal_memory(known.values(), totals, shared[CORES])
    found: dict[int, Profile] = {}
    for template in known.values():
        amounts = _counted({key: template.amounts.get(key, Fraction(0)) for key in shared}, parts)
        memory = _memory_of(family, template, totals, nominal)
        placements = names.placements(family, math.ceil(template.amounts.get(CORES, 0)))
        maximum = _maximum({**amounts, MEMORY: memory}, {**limits, MEMORY: totals.memory_bytes}, placements)
        if maximum < 1:
            continue
        number = profile_id(template.name)
        if number in found:
            raise ValueError(f"Templates {found[number].name} and {template.name} share the number {number}")
        found[number] = Profile(
            name=template.name,
            profile_id=number,
            memory_bytes=memory,
            capacities=frozen({**amounts, MEMORY: memory}),
            attributes=MappingProxyType({}),
            placements=placements,
            maximum=maximum,
            aliases=(template.name.replace("_", "-"),) if "_" in template.name else (),
        )
    return tuple(sorted(found.values(), key=rank))


def capacities_of(family: Family, templates: Iterable[Template], totals: Totals) -> Mapping[str, int]:
    """Return the capacities of the whole chip, in the same parts as those of its profiles."""
    shared = _shared(family, totals)
    amounts = _counted(shared, _parts(templates, shared))
    return frozen({**amounts, **({MEMORY: totals.memory_bytes} if totals.memory_bytes else {})})


def rank(profile: Profile) -> tuple[int, tuple[int, ...], str]:
    """Return the sort key of profiles from small to large: places, then capacities, cores first."""
    return (profile.size, tuple(profile.capacities.values()), profile.name)


def published(capacities: Mapping[str, int]) -> Mapping[str, int]:
    """Return capacities in their published form: whole units only, rounded down."""
    found: dict[str, int] = {}
    for key, amount in capacities.items():
        parts = _PARTS.fullmatch(key)
        name, whole = (parts.group(1), amount // int(parts.group(2))) if parts else (key, amount)
        found[name] = whole
    return frozen(found)


def shortages(capacities: Mapping[str, int], free: Mapping[str, Fraction]) -> tuple[str, ...]:
    """Return the resources of which a profile needs more than a chip has free, with both amounts.

    Only whole amounts are compared, because a chip reports its free AICPUs without the fraction.
    """
    return tuple(
        f"{amount} {name} needed, {free[name]} free"
        for name, amount in capacities.items()
        if name in free and amount > free[name]
    )


def counter(capacity: str) -> str:
    """Return the name of the counter of a capacity."""
    parts = _PARTS.fullmatch(capacity)
    if parts:
        return f"{counter(parts.group(1))}-{parts.group(2)}"
    return _COUNTERS.get(capacity, capacity)


def _shared(family: Family, totals: Totals) -> Mapping[str, Fraction]:
    """Return the known totals. Other resources are not counted."""
    found = {key: totals.amounts[key] for key in SHARED if key in totals.amounts}
    helpers = helpers_of(family, totals.amounts.get(HELPERS))
    if helpers is not None and CORES in found:
        found[HELPERS] = helpers
    return {key: found[key] for key in SHARED if key in found}


def _parts(templates: Iterable[Template], shared: Mapping[str, Fraction]) -> Mapping[str, int]:
    """Return the number of parts in which each resource is counted: the smallest number with which all amounts are integers."""
    known = tuple(templates)
    return {
        key: math.lcm(total.denominator, *(each.amounts[key].denominator for each in known if key in each.amounts))
        for key, total in shared.items()
    }


def _counted(amounts: Mapping[str, Fraction], parts: Mapping[str, int]) -> dict[str, int]:
    return {
        key if parts[key] == 1 else f"{key}_{parts[key]}": int(value * parts[key]) for key, value in amounts.items()
    }


def _nominal_memory(templates: Iterable[Template], totals: Totals, cores: Fraction) -> Fraction:
    """Return the memory, in GiB, of which all templates are parts.

    It exceeds the reported memory by the part that the device uses itself.

    Older drivers name the templates of a 910B4-1, which has 64 GiB, like those of a 910B4 with 32 GiB (HAMi issue
    1497): vir10_3c_16g reports 30720 MiB there. If a chip reports that much more than its templates state, they are
    parts of the reported memory.
    """
    by_cores = max(
        [each.memory * cores / each.amounts[CORES] for each in templates if each.amounts.get(CORES) and each.memory],
        default=Fraction(0),
    )
    measured = Fraction(math.ceil(Fraction(totals.memory_bytes, GIBIBYTE)))
    return by_cores if by_cores and measured >= by_cores * _OTHER_BOARD else max(by_cores, measured)


def _memory_of(family: Family, template: Template, totals: Totals, nominal: Fraction) -> int:
    """Return the memory of a vNPU in bytes: its part of the reported memory, in whole MiB, less the device's reserve."""
    if not nominal:
        return 0
    share = Fraction(totals.memory_bytes) * template.memory / nominal
    kept = family.reserve * template.memory / (nominal / 4)
    return max(math.floor((share - kept) / _MEBIBYTE) * _MEBIBYTE, 0)


def _maximum(amounts: Mapping[str, int], limits: Mapping[str, int], placements: tuple[Placement, ...]) -> int:
    fitting = [limits[key] // amount for key, amount in amounts.items() if amount]
    return min([count_disjoint(placements), *fitting])
