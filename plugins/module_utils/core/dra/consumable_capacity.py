# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Publish devices that several claims share, and read the amounts that a claim consumes.

Source: KEP-5075. A claim consumes some of every capacity of such a device: by default the policy's default, and all of
a capacity without a policy. So every capacity has a policy. The values of a policy are the minimum plus a multiple of
the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import quantity
from ..model import AttributeValue, Offer, RequestPolicy, frozen

#: The capacity of which a claim consumes one unit by default.
SHARES = "shares"
#: Capacities in bytes, which are consumed in steps of 1 MiB.
IN_BYTES = ("memory", "addressableMemory")
_MEBIBYTE = 1024**2
MOST_SHARES = 1024


def shared(offer: Offer, shares: int, parts: Mapping[str, int]) -> Offer:
    """Return a whole device's offer as an offer for ``shares`` claims at a time.

    ``parts`` are the divided capacities. A claim without a capacity request gets an equal part of each, so that as many
    claims fit as there are shares.
    """
    capacities = {name: total for name, total in parts.items() if total > 0}
    policies = {name: _policy(name, total, shares) for name, total in capacities.items()}
    return replace(
        offer,
        capacities=frozen({**capacities, SHARES: shares}),
        policies={**policies, SHARES: RequestPolicy(default=1, minimum=1, step=1)},
    )


def _policy(name: str, total: int, shares: int) -> RequestPolicy:
    if name in IN_BYTES and total >= 2 * _MEBIBYTE:
        part = max(total // shares // _MEBIBYTE, 1) * _MEBIBYTE
        return RequestPolicy(default=part, minimum=_MEBIBYTE, step=_MEBIBYTE)
    return RequestPolicy(default=total // shares, minimum=0, step=1)


def exclusive(offer: Offer) -> Offer:
    """Return a shared device's offer as an offer for a single claim."""
    capacities = {name: total for name, total in offer.capacities.items() if name != SHARES}
    return replace(offer, capacities=frozen(capacities), policies={})


def attributes_of_share(share_id: str, consumed: Mapping[str, int]) -> dict[str, AttributeValue]:
    """Return the attributes of one claim's share of a device: its ID, and the consumed amounts.

    KEP-5304 has no fields for these values; its readers accept attributes of any name.
    """
    amounts = {f"consumed{name[:1].upper()}{name[1:]}": amount for name, amount in consumed.items()}
    return {"shareID": share_id, **amounts} if share_id else {}


def consumed(amounts: Mapping[str, Any]) -> dict[str, int]:
    """Parse the amounts that a claim consumes, in the API's format. Fractions are rounded up. Raises ValueError."""
    return {str(name): quantity.parse_rounded_up(text) for name, text in amounts.items()}
