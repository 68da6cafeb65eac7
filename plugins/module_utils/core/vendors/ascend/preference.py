# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build claims for chips close to each other (one card, else one ring, else anywhere) that keep rings complete.

A constraint can name one alternative of a request, and then applies only if that alternative is chosen. So one claim
can list the preferred allocation first, and acceptable ones after it. The scheduler tries the alternatives in their
order on each node, and prefers nodes where an earlier one fits. The least useful card or ring is selected by attributes
(occupancy.py) in further alternatives. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .names import DRIVER_NAME
from .occupancy import CARD_CHIPS, CARD_FREE, RING_CHIPS, RING_FREE

CARD, RING, ANY = "same-card", "same-ring", "any"
NEAREST_FIRST = (CARD, RING, ANY)
REQUEST = "npus"
#: The maximum number of results of a claim.
MOST_CHIPS = 32
_LITTLE_MORE = 3
#: The maximum number of chips of a card.
MOST_ON_CARD = 4

_OF = f"device.attributes['{DRIVER_NAME}']"
_ON_CARD, _IN_RING = f"{DRIVER_NAME}/cardID", f"{DRIVER_NAME}/hccsRing"
#: Without the attributes of free chips, these alternatives match no chip, and the later ones are used.
_BROKEN_RING = f"'{RING_FREE}' in {_OF} && {_OF}.{RING_FREE} < {_OF}.{RING_CHIPS}"
_BROKEN_CARD = f"'{CARD_FREE}' in {_OF} && {_OF}.{CARD_FREE} < {_OF}.{CARD_CHIPS}"
_WHOLE_CARD = f"'{CARD_FREE}' in {_OF} && {_OF}.{CARD_FREE} == {_OF}.{CARD_CHIPS}"


@dataclass(frozen=True)
class Alternative:
    """One alternative of a claim: the attribute that its chips share, and the selector for each of them; "" for no condition."""

    name: str
    shared: str = ""
    selector: str = ""


def alternatives(chips: int, prefer: Sequence[str] = NEAREST_FIRST, *, whole: bool = True) -> tuple[Alternative, ...]:
    """Return the alternatives of a claim for this number of chips, in their order. Raises ValueError.

    With ``whole``, partly used cards and rings come first, so that complete ones stay available: the last chip of a
    card, the ring with exactly enough chips, then one with more. There are at most eight alternatives, the limit of a
    request.
    """
    unknown = [each for each in prefer if each not in NEAREST_FIRST]
    if unknown or not prefer or len(set(prefer)) < len(prefer):
        raise ValueError(
            f"Expected some of {', '.join(NEAREST_FIRST)}, each once, not {', '.join(prefer) or 'nothing'}"
        )
    if chips == 1:
        # A single chip has no neighbors in its claim. It does the least damage in a ring with an odd number of free
        # chips.
        thrifty = (
            Alternative("broken-card", selector=_BROKEN_CARD),
            *(Alternative(f"ring-with-{each}", selector=_exactly(each)) for each in (1, 3)),
            Alternative("tight-ring", selector=_tight(chips)),
            Alternative("broken-ring", selector=_BROKEN_RING),
        )
        return (*(thrifty if whole else ()), Alternative(ANY))
    found: list[Alternative] = []
    for each in prefer:
        if each == CARD:
            found += _on_card(chips, whole)
        elif each == RING:
            found += _in_ring(chips, whole)
        else:
            found.append(Alternative(ANY))
    if not found:
        raise ValueError(f"No card has {chips} chips: let {RING} or {ANY} follow {CARD}")
    return tuple(found)


def claim_spec(
    chips: int,
    device_class: str,
    *,
    prefer: Sequence[str] = NEAREST_FIRST,
    selectors: Sequence[str] = (),
    request: str = REQUEST,
    whole: bool = True,
) -> dict[str, Any]:
    """Return the spec of a claim for this number of whole chips of a DeviceClass, with the closest chips preferred.

    ``prefer`` are the alternatives in their order. Without ``any`` the claim stays pending rather than get distant
    chips. ``selectors`` are CEL expressions for all chips. With ``whole``, partly used cards and rings come first.
    Raises ValueError.
    """
    if not 1 <= chips <= MOST_CHIPS:
        raise ValueError(f"A claim can have 1 to {MOST_CHIPS} chips, not {chips}")
    ways = alternatives(chips, prefer, whole=whole)
    if len(ways) == 1:
        spec: dict[str, Any] = {
            "requests": [{"name": request, "exactly": _wish(ways[0], chips, device_class, selectors)}]
        }
    else:
        wishes = [{"name": each.name, **_wish(each, chips, device_class, selectors)} for each in ways]
        spec = {"requests": [{"name": request, "firstAvailable": wishes}]}
    names = {each.name: f"{request}/{each.name}" if len(ways) > 1 else request for each in ways}
    constraints = [{"requests": [names[each.name]], "matchAttribute": each.shared} for each in ways if each.shared]
    if constraints:
        spec["constraints"] = constraints
    return {"devices": spec}


def _on_card(chips: int, whole: bool) -> list[Alternative]:
    """Return the alternatives with chips of one card. A claim for more chips gets complete cards if there are enough."""
    found: list[Alternative] = []
    if chips <= 2 and whole:
        found.append(Alternative("same-card-broken-ring", _ON_CARD, _BROKEN_RING))
    if chips <= MOST_ON_CARD:
        found.append(Alternative(CARD, _ON_CARD))
    if chips > 2 and chips % 2 == 0 and whole:
        found += [
            Alternative("whole-cards-broken-ring", _IN_RING, f"{_WHOLE_CARD} && {_BROKEN_RING}"),
            Alternative("whole-cards", _IN_RING, _WHOLE_CARD),
        ]
    return found


def _in_ring(chips: int, whole: bool) -> list[Alternative]:
    thrifty = [
        Alternative("ring-that-fits", _IN_RING, _exactly(chips)),
        Alternative("tight-ring", _IN_RING, _tight(chips)),
        Alternative("broken-ring", _IN_RING, _BROKEN_RING),
    ]
    return [*(thrifty if whole else ()), Alternative(RING, _IN_RING)]


def _exactly(chips: int) -> str:
    return f"'{RING_FREE}' in {_OF} && {_OF}.{RING_FREE} == {chips}"


def _tight(chips: int) -> str:
    """Return a selector for partly used rings with slightly more free chips than needed, also for large rings of a whole node."""
    return f"{_BROKEN_RING} && {_OF}.{RING_FREE} <= {chips + _LITTLE_MORE}"


def _wish(way: Alternative, chips: int, device_class: str, selectors: Sequence[str]) -> dict[str, Any]:
    expressions = [*([way.selector] if way.selector else []), *selectors]
    return {
        "deviceClassName": device_class,
        "allocationMode": "ExactCount",
        "count": chips,
        **({"selectors": [{"cel": {"expression": each}} for each in expressions]} if expressions else {}),
    }
