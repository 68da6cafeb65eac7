# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""How chips of one machine lie to each other: on one card, in one group of direct links, or further apart. Pure.

What the device tells of its links counts. Where it does not (info -t topo is not there for 310P and 910A on x86), groups go
by what is known of the generation and of how many chips there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..model import AttributeValue
from .families import Family

_ALIASES: Mapping[str, str] = MappingProxyType({"XLINK": "HCCS", "XLINK_SW": "HCCS_SW"})
#: The links that make a group: direct ones between chips, whichever way they are switched.
_DIRECT = frozenset({"SIO", "HCCS", "HCCS_SW", "UB"})
#: Groups where the device does not tell: so many chips, by consecutive physical ids.
_RINGS: Mapping[str, int] = MappingProxyType({"910A": 4, "910B": 8, "910_93": 16, "950": 8})
#: A board of 910B without links between its chips.
_BOARDS_WITHOUT_LINKS = frozenset({("910B", 0x33)})
_LONGEST = 64


@dataclass(frozen=True)
class Chip:
    """Where one chip is: on which card, and which of the card's chips; both ids are the machine's."""

    physical_id: int
    card: int
    chip: int = 0


@dataclass(frozen=True)
class Place:
    """How a chip lies to its neighbours: the physical ids of those on its card and of its group of links, itself among both."""

    card: tuple[int, ...]
    ring: tuple[int, ...]


def places(
    family: Family,
    chips: Iterable[Chip],
    links: Mapping[tuple[int, int], str] | None = None,
    board_id: int | None = None,
) -> Mapping[int, Place]:
    """Return where each chip lies, by physical id. ``links`` are what the device tells, by pairs of physical ids."""
    known = sorted(chips, key=lambda each: each.physical_id)
    cards: dict[int, list[int]] = {}
    for each in known:
        cards.setdefault(each.card, []).append(each.physical_id)
    ids = [each.physical_id for each in known]
    groups = _linked(ids, links) if links else _by_generation(family, ids, board_id)
    if not links:
        groups = _joined([*groups, *cards.values()] if _cards_are_linked(family) else groups)
    ring_of = {each: tuple(sorted(group)) for group in groups for each in group}
    return {
        each.physical_id: Place(tuple(cards[each.card]), ring_of.get(each.physical_id, (each.physical_id,)))
        for each in known
    }


def attributes(node: str, chip: Chip, place: Place, card_serial: str = "") -> Mapping[str, AttributeValue]:
    """Return what is published of where a chip lies.

    ``cardID`` and ``hccsRing`` are the same for the chips of one card and of one ring, and no others' in the cluster. A chip
    without direct links has no ring: constraints on it never match then, which is what they should.
    """
    found: dict[str, AttributeValue] = {
        "cardID": card_serial[:_LONGEST] or _unique(node, f"card-{chip.card}"),
        "chipID": chip.chip,
    }
    if len(place.ring) > 1:
        found["hccsRing"] = _unique(node, f"ring-{place.ring[0]}")
    return MappingProxyType(found)


def ring_size(family: Family) -> int:
    """Return how many chips the rings of a generation have; 0 for one that has none."""
    return _RINGS.get(family.word, 0)


def _unique(node: str, what: str) -> str:
    # The end of a node's name tells it apart from its neighbours more often than the beginning.
    return f"{node[-(_LONGEST - len(what) - 1) :]}-{what}".lstrip("-.")


def _cards_are_linked(family: Family) -> bool:
    """Whether the chips of one card have direct links between them."""
    return family.word in ("310P", "910_93")


def _by_generation(family: Family, ids: Sequence[int], board_id: int | None) -> list[list[int]]:
    size = _RINGS.get(family.word, 0)
    if not size or (family.word, board_id) in _BOARDS_WITHOUT_LINKS:
        return []
    numbers = sorted({number // size for number in ids})
    return [[each for each in ids if each // size == number] for number in numbers]


def _linked(ids: Sequence[int], links: Mapping[tuple[int, int], str]) -> list[list[int]]:
    known = set(ids)
    return _joined(
        pair
        for pair, link in links.items()
        if len(known & set(pair)) == 2 and _kind_of(link) in _DIRECT  # itself is no pair
    )


def _kind_of(link: str) -> str:
    return _ALIASES.get(link.upper(), link.upper())


def _joined(groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """Join groups that share a chip."""
    found: list[set[int]] = []
    for group in map(set, groups):
        for other in [each for each in found if each & group]:
            found.remove(other)
            group |= other
        found.append(group)
    return [sorted(each) for each in sorted(found, key=min)]
