# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the nearest change after which claims would get devices, and verify each one with the same search.

No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

from .cutting import (
    OWN_UUID,
    Cutter,
    Model,
    draws_beside,
    forms_of,
    models,
    product_of,
    replaced,
    text_attribute,
    wholes,
    with_parts,
)
from .moves import HolderOf, places
from .nodes import blocking_taints, taint_text
from .objects import Device, Held, Judge, Request, SelectorFailed, WantedClaim, name_of
from .reasons import ERROR, FITS, HELD, NodeFinding, node_fits
from .search import NodeSearch

TOLERATE, FREE_CLAIMS, REPARTITION, ASK_FOR_LESS, GUARD, WAIT, NOTHING = (
    *("tolerate", "free-claims", "repartition", "ask-for-less", "guard-attribute", "wait", "nothing"),
)
#: The maximum number of nodes for which changes are computed. Nodes of a fleet are mostly alike, and any of them will
#: do.
MOST_NODES = 12
#: The maximum number of claims of which all sets are tried. Larger sets are reduced one by one, and may contain one
#: claim too many.
MOST_TOGETHER = 2
MOST_HOLDERS = 24
PLAYBOOKS = "dra.accelerators.plan makes such a layout, and dra.accelerators.repartition applies it"


@dataclass(frozen=True)
class Change:
    """One possible change: a sentence, the node, and the affected taints, claims, and device.

    ``moves`` maps claims that fit on another node to this node.
    """

    kind: str
    text: str
    node: str = ""
    taints: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    device: str = ""
    moves: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the change as data."""
        return {
            "kind": self.kind,
            "text": self.text,
            "node": self.node,
            "taints": list(self.taints),
            "claims": list(self.claims),
            "device": self.device,
            "moves": dict(self.moves),
        }


def nearest(
    asked: Sequence[tuple[NodeSearch, NodeFinding]],
    claims: Sequence[WantedClaim],
    judge: Judge,
    *,
    everywhere: Sequence[NodeSearch] = (),
    cutter: Cutter | None = None,
    holder_of: HolderOf = lambda _name: None,
) -> list[Change]:
    """Return the changes after which the claims would get devices, nearest first; kind ``nothing`` if no change helps.

    ``asked`` are the nodes that the pod can run on. ``everywhere`` are all nodes: those with examples of a suitable
    partitioning, and those that moved claims can use. ``cutter`` returns possible partitionings of devices. Without it,
    only partitionings that exist elsewhere are known.
    """
    guards = list(_guard_selector(asked, claims, judge))
    nodes = [(at, one) for at, one in asked if one.verdict != FITS]
    by_name = {_node_name(at): at for at, _one in nodes}
    found = [
        *guards,
        *_smallest_change(_tolerate_taints(at, claims, judge) for at, _one in nodes),
        *(
            _with_moves(each, places(by_name[each.node], each.claims, claims, everywhere, holder_of, judge))
            for each in _smallest_change(_free_claims(at, one, claims, judge) for at, one in nodes)
        ),
    ]
    if not found:
        known = models(everywhere, claims)
        found = [
            *_smallest_change(
                _repartition_by_cutter(at, claims, cutter, judge) or _repartition_like_model(at, claims, known, judge)
                for at, _one in nodes
            ),
            *_smallest_change(_tolerate_and_free(at, claims, judge) for at, _one in nodes),
        ]
    if not found:
        found = _smallest_change(_repartition_by_cutter(at, claims, cutter, judge, freed=True) for at, _one in nodes)
    if not guards:
        found += _smallest_change(_request_fewer(at, claims) for at, _one in nodes)
    found += [
        Change(WAIT, f"wait until the driver has published pool {pool.label} whole: {pool.incomplete}", _node_name(at))
        for at, _one in nodes
        for pool in at.pools
        if pool.incomplete
    ][:1]
    return found or [Change(NOTHING, _describe_no_change(nodes, claims, cutter))]


def _describe_no_change(
    nodes: Sequence[tuple[NodeSearch, NodeFinding]], claims: Sequence[WantedClaim], cutter: Cutter | None
) -> str:
    """Return a text that no change was found, limited to the checked changes."""
    tried = "none: even without all claims and taints, no node has the requested devices with its present partitions"
    unknown = [
        name
        for name in (_node_name(at) for at, _one in nodes if any(True for _device in at.devices()))
        if cutter is None or cutter.cuts(name, claims) is None
    ]
    if unknown:
        which = "the nodes" if cutter is None else f"{', '.join(unknown[:4])}{' and others' * (len(unknown) > 4)}"
        return (
            f"{tried}; whether a different partitioning would help is unknown for {which}: dra.accelerators.plan queries them and plans it. "
            "If it finds no plan, change the request, or add devices"
        )
    return f"{tried}, and no other partitioning of them provides it; change the request, or add devices"


def _smallest_change(found: Iterable[Change | None]) -> list[Change]:
    """Return the smallest of the changes on a few nodes."""
    kept: list[Change] = []
    for each in found:
        if each is not None:
            kept.append(each)
            if len(kept) == MOST_NODES or len(each.claims) + len(each.taints) == 1:
                break
    return sorted(kept, key=lambda one: len(one.claims) + len(one.taints))[:1]


def _node_name(at: NodeSearch) -> str:
    return name_of(at.node)


def _with_changed_requests(claims: Sequence[WantedClaim], change: Callable[[Request], Request]) -> list[WantedClaim]:
    return [
        replace(claim, requests=tuple(tuple(change(each) for each in alternatives) for alternatives in claim.requests))
        for claim in claims
    ]


# ---------------------------------------------------------------------- tolerate


def _tolerate_taints(at: NodeSearch, claims: Sequence[WantedClaim], judge: Judge) -> Change | None:
    found = _taints_to_tolerate(at, at.held, claims, judge)
    if found is None:
        return None
    return Change(TOLERATE, f"tolerate {' and '.join(found)} in the claim", _node_name(at), taints=found)


def _taints_to_tolerate(
    at: NodeSearch, held: Held, claims: Sequence[WantedClaim], judge: Judge
) -> tuple[str, ...] | None:
    """Return the fewest taints whose toleration would help; None if no toleration helps or no taint is an obstacle."""
    requests = [each for claim in claims for alternatives in claim.requests for each in alternatives]
    taints = {
        taint_text(taint): taint
        for device in at.devices()
        for request in requests
        for taint in blocking_taints(device.taints, request.tolerations)
    }
    if not taints:
        return None
    there = at if held is at.held else NodeSearch(at.node, at.pools, held, judge)

    def fits(texts: Sequence[str]) -> bool:
        more = tuple(
            {
                "key": taints[text].get("key"),
                "operator": "Equal",
                "value": taints[text].get("value") or "",
                "effect": taints[text]["effect"],
            }
            for text in texts
        )
        return node_fits(
            there,
            _with_changed_requests(claims, lambda request: replace(request, tolerations=(*request.tolerations, *more))),
        )

    if not fits(tuple(taints)):
        return None
    return _smallest_set(sorted(taints), fits)


# ---------------------------------------------------------------------- free claims


def _free_claims(at: NodeSearch, finding: NodeFinding, claims: Sequence[WantedClaim], judge: Judge) -> Change | None:
    found = _claims_to_free(at, finding, claims, judge)
    if found is None:
        return None
    return Change(FREE_CLAIMS, f"it fits when {_end(found)}", _node_name(at), claims=found)


def _end(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'ends' if len(names) == 1 else 'end'}"


def _with_moves(change: Change, moves: Mapping[str, str]) -> Change:
    """Return the change with those of its claims that can move instead of end."""
    if not moves:
        return change
    if len(change.claims) == 1:
        more = f", or is moved to node {moves[change.claims[0]]}, which has room for it"
    else:
        where = " and ".join(f"{name} to node {node}" for name, node in moves.items())
        more = f"; instead, there is room to move {where}"
    return replace(change, text=change.text + more, moves=moves)


def _claims_to_free(
    at: NodeSearch, finding: NodeFinding, claims: Sequence[WantedClaim], judge: Judge
) -> tuple[str, ...] | None:
    """Return the fewest claims whose end would free enough devices; None if that does not help or no claim has devices."""
    holders = _holders_of_pools(at)
    if not holders:
        return None

    def fits(gone: Sequence[str]) -> bool:
        return node_fits(NodeSearch(at.node, at.pools, at.held.without(gone), judge), claims)

    if not fits(holders):
        return None
    named = {name for one in finding.requests for each in one.obstacles if each.kind in HELD for name in each.claims}
    # The claims in the obstacles first, because they use the suitable devices.
    return _smallest_set(sorted(holders, key=lambda name: (name not in named, name)), fits)


def _holders_of_pools(at: NodeSearch) -> list[str]:
    """Return the claims with devices of the node's pools, also of devices that only other nodes can use."""
    devices = (device for pool in at.pools for device in (*pool.devices, *pool.elsewhere))
    return sorted({name for device in devices for name in at.held.holders(device.key)})


def _smallest_set(things: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Return the smallest set for which ``fits`` is true; it is true for the whole set.

    For many elements, return a set that cannot be reduced by one element.
    """
    if len(things) <= MOST_HOLDERS:
        for size in range(1, MOST_TOGETHER + 1):
            for some in combinations(things, size):
                if fits(some):
                    return some
    kept = list(things)
    for each in reversed(things):
        fewer = [one for one in kept if one != each]
        if fewer and fits(fewer):
            kept = fewer
    return tuple(sorted(kept))


def _tolerate_and_free(at: NodeSearch, claims: Sequence[WantedClaim], judge: Judge) -> Change | None:
    """Return a change that tolerates taints and frees claims, if neither alone helps."""
    holders = _holders_of_pools(at)
    taints = _taints_to_tolerate(at, at.held.without(holders), claims, judge) if holders else None
    if taints is None:
        return None
    text = f"tolerate {' and '.join(taints)} in the claim, and let claims of this node end: {', '.join(holders)}"
    return Change(TOLERATE, text, _node_name(at), taints=taints, claims=tuple(holders))


# ---------------------------------------------------------------------- partition a device again


def _repartition_by_cutter(
    at: NodeSearch, claims: Sequence[WantedClaim], cutter: Cutter | None, judge: Judge, *, freed: bool = False
) -> Change | None:
    """Return the cutter's change for a node if the search confirms it; with ``freed`` after the node's claims end."""
    holders = {name for device in at.devices() for name in at.held.holders(device.key)} if freed else set()
    cuts = cutter.cuts(_node_name(at), claims, sorted(holders)) if cutter is not None and (holders or not freed) else ()
    published, pools = wholes(at), list(at.pools)
    said: list[str] = []
    labels: list[str] = []
    ended: set[str] = set()
    for cut in cuts or ():
        mine = published.get(cut.whole) or []
        gone = [each for each in mine if text_attribute(each, OWN_UUID) not in cut.stays]
        ended.update(name for each in gone for name in at.held.holders(each.key))
        driver = cut.parts[0].driver
        pool = next((each.pool for each in (*mine, *at.devices()) if each.driver == driver), _node_name(at))
        pools = with_parts(pools, (driver, pool), mine, gone, cut.parts)
        labels.append(
            next((one.label for one in mine if text_attribute(one, OWN_UUID) == cut.whole), f"{pool}/{cut.whole}")
        )
        said.append(f"{cut.text} of {labels[-1]}")
    if not said or (ended and not freed):
        return None

    def fits(gone: Sequence[str]) -> bool:
        return node_fits(NodeSearch(at.node, pools, at.held.without([*ended, *gone]), judge), claims)

    if not fits(()):
        # Other requested devices exist, but are in use.
        others = sorted(holders - ended)
        if not others or not fits(others):
            return None
        ended.update(_smallest_set(others, fits))
    who = f"when {_end(sorted(ended))}" if ended else "which takes nothing from any claim"
    text = f"make {' and '.join(said)} on node {_node_name(at)}, {who}: {PLAYBOOKS}"
    return Change(REPARTITION, text, _node_name(at), claims=tuple(sorted(ended)), device=", ".join(labels))


def _repartition_like_model(
    at: NodeSearch, claims: Sequence[WantedClaim], known: Mapping[str, Sequence[Model]], judge: Judge
) -> Change | None:
    """Return a change that partitions one unused device of this node like a device of the same product in the cluster."""
    for whole, mine in sorted(wholes(at).items()):
        if not whole or any(at.held.holders(each.key) for each in mine) or draws_beside(at, mine):
            continue
        for model in known.get(product_of(mine[0]), ()):
            if model.forms == forms_of(mine):
                continue
            pools = replaced(at, mine, model)
            if node_fits(NodeSearch(at.node, pools, at.held, judge), claims):
                shown = mine[0].label if len(mine) == 1 else f"{mine[0].pool}/{whole}"
                like = f"{model.parts[0].label} of node {model.node}"
                text = f"partition {shown} of node {_node_name(at)}, which no claim has, so that it has parts like {like}: {PLAYBOOKS}"
                return Change(REPARTITION, text, _node_name(at), device=shown)
    return None


# ---------------------------------------------------------------------- change the request


def _request_fewer(at: NodeSearch, claims: Sequence[WantedClaim]) -> Change | None:
    """Return a change of the only request for several devices to fewer devices."""
    several = [
        each
        for claim in claims
        for alternatives in claim.requests
        for each in alternatives
        if each.count > 1 and not each.every
    ]
    if len(several) != 1:
        return None
    name = several[0].full_name
    for count in range(several[0].count - 1, 0, -1):
        fewer = partial(_with_count, name=name, count=count)
        if node_fits(at, _with_changed_requests(claims, fewer)):
            text = f"ask for {count} instead of {several[0].count} in request {name}"
            return Change(ASK_FOR_LESS, text, _node_name(at))
    return None


def _with_count(request: Request, *, name: str, count: int) -> Request:
    return replace(request, count=count) if request.full_name == name else request


class _ErrorTolerantJudge:
    """Evaluate expressions like selectors that first check whether an attribute exists: errors count as no match."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def matches(self, expression: str, device: Device) -> bool:
        try:
            return self._judge.matches(expression, device)
        except SelectorFailed:
            return False

    def value(self, expression: str, device: Device) -> Any:
        return self._judge.value(expression, device)


def _guard_selector(
    asked: Sequence[tuple[NodeSearch, NodeFinding]], claims: Sequence[WantedClaim], judge: Judge
) -> Iterator[Change]:
    """Yield a change of a failing selector if the claims would get devices with a selector that does not fail."""
    if not any(one.verdict == ERROR for _at, one in asked):
        return
    tolerant = _ErrorTolerantJudge(judge)
    fits = next((at for at, _one in asked if node_fits(NodeSearch(at.node, at.pools, at.held, tolerant), claims)), None)
    if fits is not None:
        text = f"write the selector so that it asks first whether the attribute is there: then node {_node_name(fits)} has devices for it"
        yield Change(GUARD, text, _node_name(fits))
