# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The topology of the chips of one host: on one card, in one group of direct links, or further apart.

The links that the device reports are used. If it reports none (info -t topo does not exist for 310P and 910A on x86),
the groups follow from the generation and the number of chips. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ...model import AttributeValue
from .families import Family

#: The link between two chips is unknown.
UNKNOWN_LINK = "NA"
_ALIASES: Mapping[str, str] = MappingProxyType({"XLINK": "HCCS", "XLINK_SW": "HCCS_SW"})
#: The links that form a group: direct links between chips, with or without a switch.
_DIRECT = frozenset({"SIO", "HCCS", "HCCS_SW", "UB"})
#: The group size, in consecutive physical IDs, for generations that do not report links.
_RINGS: Mapping[str, int] = MappingProxyType({"910A": 4, "910B": 8, "910_93": 16, "950": 8})
#: A 910B board without links between its chips.
_BOARDS_WITHOUT_LINKS = frozenset({("910B", 0x33)})
_LONGEST = 64


@dataclass(frozen=True)
class Chip:
    """The numbers of one chip: its physical ID, its card, and its number on the card."""

    physical_id: int
    card: int
    chip: int = 0


@dataclass(frozen=True)
class Place:
    """The neighbors of a chip: the physical IDs of the chips on its card and in its group of links, including itself."""

    card: tuple[int, ...]
    ring: tuple[int, ...]


def places(
    family: Family,
    chips: Iterable[Chip],
    links: Mapping[tuple[int, int], str] | None = None,
    board_id: int | None = None,
) -> Mapping[int, Place]:
    """Return the neighbors of each chip, by physical ID. ``links`` are the reported links by pairs of physical IDs."""
    known = sorted(chips, key=lambda each: each.physical_id)
    cards: dict[int, list[int]] = {}
    for each in known:
        cards.setdefault(each.card, []).append(each.physical_id)
    ids = [each.physical_id for each in known]
    known_links = {pair: link for pair, link in (links or {}).items() if _kind_of(link) != UNKNOWN_LINK}
    groups = _linked(ids, known_links)
    if not links or len(known_links) < len(links):
        # For links that the device does not report, the generation decides.
        expected = _by_generation(family, ids, board_id)
        expected = _joined([*expected, *cards.values()] if _cards_are_linked(family) else expected)
        groups = _joined([*groups, *_missing_pairs(expected, known_links)])
    ring_of = {each: tuple(sorted(group)) for group in groups for each in group}
    return {
        each.physical_id: Place(tuple(cards[each.card]), ring_of.get(each.physical_id, (each.physical_id,)))
        for each in known
    }


def attributes(node: str, chip: Chip, place: Place, card_serial: str = "") -> Mapping[str, AttributeValue]:
    """Return the published topology attributes of a chip.

    ``cardID`` and ``hccsRing`` are the same for the chips of one card and of one ring, and unique in the cluster. A
    chip without direct links has no ``hccsRing``, so constraints on it never match.
    """
    found: dict[str, AttributeValue] = {
        "cardID": card_serial[:_LONGEST] or _unique(node, f"card-{chip.card}"),
        "chipID": chip.chip,
    }
    if len(place.ring) > 1:
        found["hccsRing"] = _unique(node, f"ring-{place.ring[0]}")
    return MappingProxyType(found)


def reset_unit(
    family: Family, chip: Chip, placed: Mapping[int, Place], cards: Mapping[int, Sequence[int]], associated: int | None
) -> tuple[int, ...]:
    """Return the physical IDs of the chips that the driver resets together with this one, including it.

    According to `dcmi_hot_reset_intf.c` of hicann/driver, these are: for the 910A the ring, for the 910B all chips with
    HCCS, for the A3 the dies of the card and of its associated card, and for the 300I Duo the card. ``cards`` are the
    IDs by card. Without ``associated``, that can be any card.
    """
    place = placed[chip.physical_id]
    if family.word == "910A":
        return place.ring
    if family.word == "910B":
        with_links = [number for number, each in placed.items() if len(each.ring) > 1]
        return tuple(sorted(with_links)) if len(place.ring) > 1 else (chip.physical_id,)
    if family.word == "910_93":
        return tuple(sorted(placed if associated is None else {*place.card, *cards.get(associated, ())}))
    return place.card if family.word == "310P" else (chip.physical_id,)


def ring_size(family: Family) -> int:
    """Return the number of chips in a ring of this generation; 0 for one without rings."""
    return _RINGS.get(family.word, 0)


def _unique(node: str, what: str) -> str:
    # The end of a node name is more often unique than its beginning.
    return f"{node[-(_LONGEST - len(what) - 1) :]}-{what}".lstrip("-.")


def _cards_are_linked(family: Family) -> bool:
    """Return whether the chips of one card have direct links between them."""
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
        if len(known & set(pair)) == 2 and _kind_of(link) in _DIRECT  # a chip and itself are not a pair
    )


def _missing_pairs(
    groups: Iterable[Sequence[int]], known_links: Mapping[tuple[int, int], str]
) -> Iterable[tuple[int, int]]:
    """Return the pairs in groups whose link the device does not report."""
    return (
        (one, other)
        for group in groups
        for one in group
        for other in group
        if (one, other) not in known_links and (other, one) not in known_links
    )


def _kind_of(link: str) -> str:
    return _ALIASES.get(link.upper(), link.upper())


def _joined(groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """Merge groups that share a chip."""
    found: list[set[int]] = []
    for group in map(set, groups):
        for other in [each for each in found if each & group]:
            found.remove(other)
            group |= other
        found.append(group)
    return [sorted(each) for each in sorted(found, key=min)]
