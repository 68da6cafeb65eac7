# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Groups of chips that a claim may have as one: the chips of a card, of a ring, of the node. Pure.

By what is published of the chips, and only those that are whole: a ring that lacks a chip is no ring, and what is left of it is found
by constraints on the attributes of its chips. Nobody tells how many chips there should be. So a card or a node counts as whole when
its chips are numbered from 0 on without a gap and there are 2, 4, 8, 16 or so of them, and a ring when it is as large as those of its generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ..model import GROUP, AttributeValue, Device, Offer
from ..slices import LONGEST_STRING
from .families import family_of
from .names import CARD, NODE, RING, group_name
from .topology import ring_size

#: What of a chip's attributes is its own alone, also where others happen to have the same.
_OF_ONE_CHIP = frozenset({"type", "uuid", "physicId", "chipID", "vdie", "sdid"})


def groups(devices: Sequence[Device]) -> tuple[Offer, ...]:
    """Return the groups of chips that are whole. ``devices`` are all chips of the machine.

    A ring that is a card is published as a card alone; a node is published beside the ring or card that it consists of.
    """
    chips = sorted(devices, key=lambda each: each.minor)
    cards = [each for each in _by(chips, "cardID") if _is_complete(each, "chipID")]
    rings = [each for each in _by(chips, "hccsRing") if each not in cards and _is_ring(each)]
    found = [(CARD, each) for each in cards] + [(RING, each) for each in rings]
    if _is_complete(chips, "physicId"):
        found.append((NODE, chips))
    return tuple(_offer(kind, each) for kind, each in found)


def attributes_of(kind: str, devices: Sequence[Device]) -> Mapping[str, AttributeValue]:
    """Return the attributes of a group: what its chips have in common, and what they are together.

    ``physicIds`` is left out where the API server would not take it.
    """
    first, *others = devices
    common = {
        name: value
        for name, value in first.attributes.items()
        if name not in _OF_ONE_CHIP and all(each.attributes.get(name) == value for each in others)
    }
    own: dict[str, AttributeValue] = {"type": "npu-group", "group": kind, "chips": len(devices)}
    numbers = ",".join(str(each.minor) for each in devices)
    if len(numbers) <= LONGEST_STRING:
        own["physicIds"] = numbers
    return MappingProxyType({**common, **own})


def _offer(kind: str, devices: Sequence[Device]) -> Offer:
    members = tuple(each.uuid for each in devices)
    return Offer(
        name=group_name(kind, devices),
        kind=GROUP,
        device_uuid=members[0],
        dynamic=False,
        profile=kind,
        profile_id=None,
        placement=None,
        partition_uuid=None,
        attributes=attributes_of(kind, devices),
        capacities={},
        members=members,
    )


def _by(chips: Iterable[Device], name: str) -> list[list[Device]]:
    found: dict[AttributeValue, list[Device]] = {}
    for each in chips:
        if name in each.attributes:
            found.setdefault(each.attributes[name], []).append(each)
    return list(found.values())


def _is_complete(chips: Sequence[Device], number: str) -> bool:
    """Whether chips are numbered without a gap, and as many as a machine is built with: with one taken out they are not."""
    count = len(chips)
    numbers = sorted(value for each in chips if isinstance(value := each.attributes.get(number), int))
    return count > 1 and count & (count - 1) == 0 and numbers == list(range(count))


def _is_ring(chips: Sequence[Device]) -> bool:
    return len(chips) == ring_size(family_of(chips[0].pci_device_id))
