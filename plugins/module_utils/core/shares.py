# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Devices that several claims have at a time, each a part of: what is published of them, and what a claim consumes.

Facts: KEP-5075. Every capacity of such a device is consumed; one that a claim does not ask for is consumed by its default, and one
without a policy wholly, so that each has one. A policy's values differ from its smallest one by whole steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import quantity
from .model import AttributeValue, Offer, RequestPolicy, frozen

#: The capacity of which a claim consumes one, unless it asks for more.
SHARES = "shares"
#: Those in bytes are consumed by the MiB.
IN_BYTES = ("memory", "addressableMemory")
_MEBIBYTE = 1024**2
MOST_SHARES = 1024


def shared(offer: Offer, shares: int, parts: Mapping[str, int]) -> Offer:
    """Return a whole device's offer as one that so many claims have at a time.

    ``parts`` are the capacities that are shared out. A claim that asks for nothing gets an equal part of everything, so that as
    many fit as there are shares.
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
    """Return a shared device's offer as one that a single claim has wholly."""
    capacities = {name: total for name, total in offer.capacities.items() if name != SHARES}
    return replace(offer, capacities=frozen(capacities), policies={})


def attributes_of_share(share_id: str, consumed: Mapping[str, int]) -> dict[str, AttributeValue]:
    """Return what tells one claim's share of a device apart, for who reads attributes: its ID, and what the claim consumes.

    KEP-5304 has no field for either; its readers take attributes of any name.
    """
    amounts = {f"consumed{name[:1].upper()}{name[1:]}": amount for name, amount in consumed.items()}
    return {"shareID": share_id, **amounts} if share_id else {}


def consumed(amounts: Mapping[str, Any]) -> dict[str, int]:
    """Read what a claim consumes of a device, as the API writes it; parts of a unit count as one. Raises ValueError."""
    found = {}
    for name, text in amounts.items():
        exact = quantity.parse(text)
        found[str(name)] = -(-exact.numerator // exact.denominator)
    return found
