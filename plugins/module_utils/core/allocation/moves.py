# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Where claims that would make room could have devices instead: each is searched for on the other nodes, beside all that is held by then. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .objects import Held, Json, Judge, WantedClaim
from .reasons import FITS, outcome
from .search import Chosen, NodeSearch


@dataclass(frozen=True)
class Holder:
    """A claim that has devices: what it wants, and whether it, with the pods that use it, may go to a node."""

    wanted: WantedClaim
    may_go: Callable[[Json], bool]


#: Returns a claim by its namespace and name; None where too little is known of it to say where it could go.
HolderOf = Callable[[str], "Holder | None"]


def places(
    at: NodeSearch,
    names: Sequence[str],
    claims: Sequence[WantedClaim],
    everywhere: Sequence[NodeSearch],
    holder_of: HolderOf,
    judge: Judge,
) -> dict[str, str]:
    """Return, of the claims ``names`` that make room for ``claims`` on a node, those that have room on another one, each with that node.

    What the waiting claims then have, and what the ones before have on their new nodes, counts as taken.
    """
    held = at.held.without(names)
    verdict, _message, _hint, chosen = outcome(NodeSearch(at.node, at.pools, held, judge), claims)
    if verdict != FITS:
        return {}
    held = _with(held, chosen, claims)
    found: dict[str, str] = {}
    for name in names:
        one = holder_of(name)
        if one is None:
            continue
        for other in everywhere:
            if other.node is at.node or not one.may_go(other.node):
                continue
            verdict, _message, _hint, chosen = outcome(NodeSearch(other.node, other.pools, held, judge), [one.wanted])
            if verdict == FITS:
                found[name] = _name(other.node)
                held = _with(held, chosen, [one.wanted])
                break
    return found


def _with(held: Held, chosen: Sequence[Chosen], claims: Sequence[WantedClaim]) -> Held:
    """What is held once claims have what was chosen for them; who watches as an administrator has nothing."""
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


def _name(node: Any) -> str:
    return str(node["metadata"]["name"])
