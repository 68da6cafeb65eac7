# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find other nodes for claims that would have to make room, in addition to all other allocations. No side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .objects import Held, Json, Judge, WantedClaim, name_of
from .reasons import FITS, outcome
from .search import Chosen, NodeSearch


@dataclass(frozen=True)
class Holder:
    """A claim with devices: its requests, and whether the claim and its pods can use a node."""

    wanted: WantedClaim
    may_use: Callable[[Json], bool]


#: A function that returns a claim by namespace and name; None if its possible nodes are unknown.
HolderOf = Callable[[str], "Holder | None"]


def places(
    at: NodeSearch,
    names: Sequence[str],
    claims: Sequence[WantedClaim],
    everywhere: Sequence[NodeSearch],
    holder_of: HolderOf,
    judge: Judge,
) -> dict[str, str]:
    """Return, for those of the claims ``names`` that fit on another node, this node.

    Their end makes room for ``claims``. The new devices of the waiting claims, and of previously moved claims, count as
    allocated.
    """
    held = at.held.without(names)
    verdict, _message, _hint, chosen = outcome(NodeSearch(at.node, at.pools, held, judge), claims)
    if verdict != FITS:
        return {}
    held = _with_allocations(held, chosen, claims)
    found: dict[str, str] = {}
    for name in names:
        one = holder_of(name)
        if one is None:
            continue
        for other in everywhere:
            if other.node is at.node or not one.may_use(other.node):
                continue
            verdict, _message, _hint, chosen = outcome(NodeSearch(other.node, other.pools, held, judge), [one.wanted])
            if verdict == FITS:
                found[name] = name_of(other.node)
                held = _with_allocations(held, chosen, [one.wanted])
                break
    return found


def _with_allocations(held: Held, chosen: Sequence[Chosen], claims: Sequence[WantedClaim]) -> Held:
    """Return the allocations after claims get the chosen devices. Requests with admin access allocate nothing."""
    watching = {
        (claim.label, request.full_name)
        for claim in claims
        for alternatives in claim.requests
        for request in alternatives
        if request.admin
    }
    found = held.without(())
    for each in chosen:
        if (each.claim, each.request) in watching:
            continue
        if each.device.shared:
            found.shares.setdefault(each.device.key, []).append((each.claim, each.consumed))
        else:
            found.alone.setdefault(each.device.key, []).append(each.claim)
    return found
