# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The number of free chips on the card and in the ring of each chip, by which claims can keep cards and rings complete.

The scheduler allocates the first devices that fit, and cannot select the least useful ring itself. With published
attributes it can: the first alternatives of a claim select chips of rings that are already partly used, and the
scheduler prefers nodes with such chips. The attributes follow claims with the delay of a write. A claim that is
allocated by outdated attributes still gets its devices. This module has no side effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...model import DEVICE, AttributeValue, Device, Offer

CARD, RING = "cardID", "hccsRing"
#: The numbers of free chips on a chip's card and in its ring, including the chip itself, and the numbers of all chips
#: there.
CARD_FREE, CARD_CHIPS, RING_FREE, RING_CHIPS = "cardFree", "cardChips", "ringFree", "ringChips"


def arranged(offers: Sequence[Offer], devices: Mapping[str, Device], held: Collection[str]) -> tuple[Offer, ...]:
    """Return the offers with the numbers of free chips around each whole chip.

    ``held`` are the UUIDs of chips that claims use, in whole or as vNPUs. A chip with vNPUs is not free either. Cards
    with one chip, and chips without direct links, get no such attributes.
    """
    groups = {
        name: {uuid: str(device.attributes[name]) for uuid, device in devices.items() if name in device.attributes}
        for name in (CARD, RING)
    }
    taken = set(held) | {uuid for uuid, device in devices.items() if device.partitions}
    sizes = {name: Counter(group.values()) for name, group in groups.items()}
    free = {
        name: Counter(group for uuid, group in of_name.items() if uuid not in taken) for name, of_name in groups.items()
    }

    def around(uuid: str) -> Mapping[str, AttributeValue]:
        found: dict[str, AttributeValue] = {}
        card, ring = groups[CARD].get(uuid), groups[RING].get(uuid)
        if card is not None and sizes[CARD][card] > 1:
            found.update({CARD_FREE: free[CARD][card], CARD_CHIPS: sizes[CARD][card]})
        if ring is not None:
            found.update({RING_FREE: free[RING][ring], RING_CHIPS: sizes[RING][ring]})
        return found

    return tuple(
        replace(offer, attributes=MappingProxyType({**offer.attributes, **around(offer.device_uuid)}))
        if offer.kind == DEVICE
        else offer
        for offer in offers
    )
