# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Groups of chips that a claim can request as one device: the chips of a card, of a ring, or of the node.

Groups are computed from the published attributes, and only complete groups are published. Claims can select the chips
of an incomplete ring by constraints on their attributes. The number of chips that should exist is unknown. So a card or
a node counts as complete if its chips are numbered from 0 without a gap, and their number is 2, 4, 8, 16, or another
power of two. A ring is complete if it has the size of its generation. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ...dra.resource_slices import LONGEST_STRING
from ...model import GROUP, AttributeValue, Device, Offer
from .families import family_of
from .names import CARD, NODE, RING, group_name
from .topology import ring_size

#: Attributes of a single chip, even if the values of several chips are equal.
_OF_ONE_CHIP = frozenset({"type", "uuid", "physicId", "chipID", "vdie", "sdid"})


def groups(devices: Sequence[Device]) -> tuple[Offer, ...]:
    """Return the complete groups of chips. ``devices`` are all chips of the host.

    A ring that is a card is published as a card only. A node that is one ring or card is
    published in addition to it.
    """
    chips = sorted(devices, key=lambda each: each.minor)
    cards = [each for each in _by(chips, "cardID") if _is_complete(each, "chipID")]
    rings = [each for each in _by(chips, "hccsRing") if each not in cards and _is_ring(each)]
    found = [(CARD, each) for each in cards] + [(RING, each) for each in rings]
    if _is_complete(chips, "physicId"):
        found.append((NODE, chips))
    return tuple(_offer(kind, each) for kind, each in found)


def attributes_of(kind: str, devices: Sequence[Device]) -> Mapping[str, AttributeValue]:
    """Return the attributes of a group: the common attributes of its chips, and those of the group.

    ``physicIds`` is left out if it exceeds the API server's limit.
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
    """Return whether chips are numbered without a gap and their number is a power of two.

    If a chip is missing, this is false.
    """
    count = len(chips)
    numbers = sorted(value for each in chips if isinstance(value := each.attributes.get(number), int))
    return count > 1 and count & (count - 1) == 0 and numbers == list(range(count))


def _is_ring(chips: Sequence[Device]) -> bool:
    return len(chips) == ring_size(family_of(chips[0].pci_device_id))
