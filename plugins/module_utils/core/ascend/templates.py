# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""From a chip's templates and totals, as the device tells them, to profiles of the model. Pure, and exact.

What a template takes may be a fraction (an AICPU is shared out in parts). Counters are whole numbers, so that such a thing
is counted in parts of itself: in halves it is called ``aiCPU_2``.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from ..model import Placement, Profile, frozen
from ..room import MEMORY, disjoint
from . import names
from .families import GIBIBYTE, Family, helpers_of

CORES, HELPERS = "aiCores", "aiCPU"
#: What a chip shares out besides memory, by the names that are published. PNGD is not among it: no set of slices runs out of it first.
SHARED = (CORES, HELPERS, "vpc", "venc", "vdec", "jpegd", "jpege")
_COUNTERS: Mapping[str, str] = MappingProxyType({CORES: "aicore", HELPERS: "aicpu"})
_PARTS = re.compile(r"([A-Za-z]+)_(\d+)")
_MEBIBYTE = 1024 * 1024
_LARGEST_PART = 1000
# From which ratio on the measured memory is that of another board than the one that the templates are named for.
_OTHER_BOARD = Fraction(3, 2)


@dataclass(frozen=True)
class Template:
    """One kind of slice as the device tells of it; ``memory`` is the nominal one, in GiB. What is not told is not in ``amounts``."""

    name: str
    amounts: Mapping[str, Fraction]
    memory: Fraction


@dataclass(frozen=True)
class Totals:
    """What a chip has to share out, of what it tells of; the memory is the measured one, in bytes."""

    amounts: Mapping[str, Fraction]
    memory_bytes: int


def exact(value: float) -> Fraction:
    """Return the number that is meant by one in a computer's form: DCMI's are such, with seven digits that count."""
    return Fraction(value).limit_denominator(_LARGEST_PART)


def profile_id(template: str) -> int:
    """Return the number that stands for a template in a store: the same whoever lists the templates, in whatever order."""
    return zlib.crc32(template.encode())


def profiles_of(family: Family, templates: Iterable[Template], totals: Totals) -> tuple[Profile, ...]:
    """Return the profiles that a chip can be cut into, from small to large; none for a chip that cannot be cut.

    ``maximum`` is how many of one there can be alone on an empty chip. Templates of which not even one fits are left out.
    Raises ValueError for two templates with one number.
    """
    known = {template.name: template for template in templates}
    shared = _shared(family, totals)
    if not family.can_be_cut or CORES not in shared:
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
            raise ValueError(f"Templates {found[number].name} and {template.name} have the same number {number}")
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
    """Return what the whole chip has, in the same parts as its profiles."""
    shared = _shared(family, totals)
    amounts = _counted(shared, _parts(templates, shared))
    return frozen({**amounts, **({MEMORY: totals.memory_bytes} if totals.memory_bytes else {})})


def rank(profile: Profile) -> tuple[int, tuple[int, ...], str]:
    """Return what orders profiles from small to large: places, then what they take, cores first."""
    return (profile.size, tuple(profile.capacities.values()), profile.name)


def published(capacities: Mapping[str, int]) -> Mapping[str, int]:
    """Return capacities as they are published: whole ones, the part of one that is left over is not promised."""
    found: dict[str, int] = {}
    for key, amount in capacities.items():
        parts = _PARTS.fullmatch(key)
        name, whole = (parts.group(1), amount // int(parts.group(2))) if parts else (key, amount)
        found[name] = whole
    return frozen(found)


def counter(capacity: str) -> str:
    """Return the name of the counter of a capacity."""
    parts = _PARTS.fullmatch(capacity)
    if parts:
        return f"{counter(parts.group(1))}-{parts.group(2)}"
    return _COUNTERS.get(capacity, capacity)


def _shared(family: Family, totals: Totals) -> Mapping[str, Fraction]:
    """Return the totals that are known; of the rest nothing is counted."""
    found = {key: totals.amounts[key] for key in SHARED if key in totals.amounts}
    helpers = helpers_of(family, totals.amounts.get(HELPERS))
    if helpers is not None and CORES in found:
        found[HELPERS] = helpers
    return {key: found[key] for key in SHARED if key in found}


def _parts(templates: Iterable[Template], shared: Mapping[str, Fraction]) -> Mapping[str, int]:
    """Return in how many parts one of each thing is counted: the fewest with which everything is whole."""
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
    """Return the memory, in GiB, that all templates are parts of: more than the measured one, which the device has had its share of.

    Older drivers name the templates of a 910B4-1, which has 64 GiB, as those of a 910B4 with 32 GiB (HAMi issue 1497): vir10_3c_16g measures
    30720 MiB there. Where a chip measures that much more than its templates say, they are parts of what it measures.
    """
    by_cores = max(
        [each.memory * cores / each.amounts[CORES] for each in templates if each.amounts.get(CORES) and each.memory],
        default=Fraction(0),
    )
    measured = Fraction(math.ceil(Fraction(totals.memory_bytes, GIBIBYTE)))
    return by_cores if by_cores and measured >= by_cores * _OTHER_BOARD else max(by_cores, measured)


def _memory_of(family: Family, template: Template, totals: Totals, nominal: Fraction) -> int:
    """Return what a slice will measure, in bytes: its part of what the chip measures, in whole MiB, less what the device keeps."""
    if not nominal:
        return 0
    share = Fraction(totals.memory_bytes) * template.memory / nominal
    kept = family.reserve * template.memory / (nominal / 4)
    return max(math.floor((share - kept) / _MEBIBYTE) * _MEBIBYTE, 0)


def _maximum(amounts: Mapping[str, int], limits: Mapping[str, int], placements: tuple[Placement, ...]) -> int:
    fitting = [limits[key] // amount for key, amount in amounts.items() if amount]
    return min([disjoint(placements), *fitting])
