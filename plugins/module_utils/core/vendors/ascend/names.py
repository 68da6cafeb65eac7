# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Names and numbers of chips and vNPUs: published names, UUIDs, and the IDs of the vendor's tools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ...model import Device, Placement
from .families import Family

VENDOR = "ascend"
DRIVER_NAME = "npu.huawei.com"
CDI_KIND = "k8s.npu.huawei.com/claim"

# The kinds of groups of chips.
CARD, RING, NODE = "card", "ring", "node"

_FIRST_SLICE = 100
_SLICES_OF_A_CHIP = 16
_CHIPS = 64
_DIE_WORDS = 5


def chip_uuid(die: Sequence[int]) -> str:
    """Return the UUID of a chip from its VDIE, the only ID that a chip keeps in every slot.

    Raises ValueError.
    """
    if len(die) != _DIE_WORDS or not all(0 <= word < 1 << 32 for word in die) or not any(die):
        raise ValueError(f"{list(die)!r} is no VDIE: expected {_DIE_WORDS} words of 32 bits, not all of them 0")
    return "NPU-" + "".join(f"{word:08x}" for word in die)


def slice_uuid(uuid: str, slice_id: int) -> str:
    """Return the UUID of a vNPU. A vNPU that is created again with the same ID has the same UUID."""
    return f"{uuid}-{slice_id}"


def slice_id(physical_id: int, number: int) -> int:
    """Return the ID of a vNPU, unique on its host, from its number on the chip. Raises ValueError."""
    if not 0 <= physical_id < _CHIPS or not 0 <= number < _SLICES_OF_A_CHIP:
        raise ValueError(f"A machine has no slice {number} of chip {physical_id}")
    return _FIRST_SLICE + _SLICES_OF_A_CHIP * physical_id + number


def number_of(slice_id: int) -> int:
    """Return the number of a vNPU on its chip from its ID. Raises ValueError."""
    if not _FIRST_SLICE <= slice_id < _FIRST_SLICE + _CHIPS * _SLICES_OF_A_CHIP:
        raise ValueError(f"{slice_id} is no slice's id: those begin at {_FIRST_SLICE}")
    return (slice_id - _FIRST_SLICE) % _SLICES_OF_A_CHIP


def whole_name(device: Device) -> str:
    """Return the published name of a whole chip.

    Its ``minor`` is its physical ID, which is also in the name of its device node.
    """
    return f"npu-{device.minor}"


def group_name(kind: str, devices: Sequence[Device]) -> str:
    """Return the published name of a group of chips, by its first chip. There is only one node group."""
    return "npu-node" if kind == NODE else f"npu-{kind}-{min(device.minor for device in devices)}"


def partition_name(device: Device, template: str, start: int) -> str:
    """Return the published name of a vNPU by its place, for existing and possible ones, or by its number for an existing one."""
    return f"npu-{device.minor}-{template.lower().replace('_', '-')}-{start}"


def countable_name(device: Device, template: str, ordinal: int) -> str:
    """Return the published name of a possible vNPU on a chip where vNPUs have numbers.

    The number is assigned at creation. An existing vNPU cannot have such a name, so a claim keeps its vNPU under this
    name, whatever numbers other vNPUs get.
    """
    return partition_name(device, f"{template}-new", ordinal)


def counter_set_name(device: Device) -> str:
    """Return the name of a chip's counter set."""
    return f"npu-{device.minor}-counter-set"


def placements(family: Family, cores: int) -> tuple[Placement, ...]:
    """Return the possible placements of vNPUs with this number of AI cores: their places in vGroups, or their numbers."""
    if not family.groups:
        return tuple(Placement(number, 0) for number in range(family.numbers))
    size = 1 if cores <= 1 else 2
    return tuple(Placement(start, size) for start in range(0, family.places, size))


def group_of(placement: Placement) -> int | None:
    """Return the vGroup of a placement; None if it is a number."""
    return None if placement.is_number else placement.start // 2


def found_placements(family: Family, slices: Iterable[tuple[int, int | None, int]]) -> Mapping[int, Placement]:
    """Return the placements of existing vNPUs on a chip, by their IDs.

    ``slices`` are tuples of ID, vGroup (None if not reported), and number of places. Of the two places of a vGroup, a
    vNPU has the one of its number, as this collection creates them. vNPUs of other programs get the remaining places,
    in the order of their IDs.
    """
    known = sorted(slices)
    if not family.groups:
        return {each: Placement(number_of(each), 0) for each, _group, _size in known}
    found: dict[int, Placement] = {}
    taken: set[int] = set()
    waiting: list[tuple[int, int]] = []
    for each, reported_group, size in known:
        number = number_of(each)
        group = number // 2 % family.groups if reported_group is None else reported_group
        if size != 1:
            found[each] = Placement(2 * group, 2)
        elif number // 2 == group:
            found[each] = Placement(number, 1)
            taken.add(number)
        else:
            waiting.append((each, group))
    for each, group in waiting:
        start = next((place for place in (2 * group, 2 * group + 1) if place not in taken), 2 * group)
        found[each] = Placement(start, 1)
        taken.add(start)
    return found


def elsewhere(family: Family, slice_id: int, placement: Placement) -> tuple[Placement, ...]:
    """Return the other possible placement of a vNPU: the other half of its vGroup, if its number does not determine the half."""
    if not family.groups or placement.size != 1 or number_of(slice_id) == placement.start:
        return ()
    return (Placement(placement.start ^ 1, 1),)


def free_number(family: Family, placement: Placement, taken: Collection[int]) -> int | None:
    """Return the number for a new vNPU at a placement; None if all are taken.

    It is the number of the placement. If a vNPU that another program created in another vGroup has it, it is the
    highest free number, which conflicts with the fewest others. The number of the other place in the vGroup is
    excluded, because it would mean that place.
    """
    if placement.start not in taken:
        return placement.start
    if placement.is_number:
        return None
    free = (number for number in range(family.numbers) if number not in taken)
    beside = range(0) if placement.size != 1 else range(placement.start // 2 * 2, placement.start // 2 * 2 + 2)
    return max((number for number in free if number not in beside), default=None)
