# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""How many chips of its card and of its ring are free besides a chip: what claims choose by that keep cards and rings whole. Pure.

The scheduler takes the first devices that fit, and cannot ask for the ring that is left the least useful. Published as attributes,
it can: a claim whose first alternatives are chips of rings that are broken already is served there, and its node preferred.
What is published follows claims with the delay of a write; a claim that meets a former state is served all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ..model import DEVICE, AttributeValue, Device, Offer

CARD, RING = "cardID", "hccsRing"
#: Free chips of a chip's card, and of its ring, the chip itself among them; and how many chips they have at all.
CARD_FREE, CARD_CHIPS, RING_FREE, RING_CHIPS = "cardFree", "cardChips", "ringFree", "ringChips"


def arranged(offers: Sequence[Offer], devices: Mapping[str, Device], held: Collection[str]) -> tuple[Offer, ...]:
    """Return the offers with what is free around each whole chip. ``held`` are the UUIDs of chips that claims have, or slices of.

    A chip that has slices is not free either. A card of one chip has no such numbers, nor has a chip without direct links.
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
