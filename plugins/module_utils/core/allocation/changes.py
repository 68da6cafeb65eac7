# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The nearest change after which claims would have devices: each one is tried with the scheduler's own search before it is told. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ..errors import AcceleratorError
from .capacity import taken
from .constraints import text_of, values_of
from .nodes import blocking_taints, taint_text
from .objects import Device, Held, Judge, Pool, Request, SelectorFailed, WantedClaim
from .reasons import ERROR, FITS, HELD, NodeFinding, holders_of_counters, outcome
from .search import NodeSearch

TOLERATE, FREE_CLAIMS, REPARTITION, ASK_FOR_LESS, GUARD, WAIT, NOTHING = (
    *("tolerate", "free-claims", "repartition", "ask-for-less", "guard-attribute", "wait", "nothing"),
)
#: Of how many nodes a change is worked out; a fleet's nodes are mostly alike, and any of them will do.
MOST_NODES = 12
#: The most claims of which every set is tried; more are found one by one, which may leave one too many.
MOST_TOGETHER = 2
MOST_HOLDERS = 24
#: By what devices are told to be of the same kind, and parts to be of the same whole.
PRODUCTS = ("productName", "model")
OWN_UUID, PARENT_UUID = "uuid", "parentUUID"
STANDARD = "resource.kubernetes.io/"


@dataclass(frozen=True)
class Change:
    """One thing that somebody could do, in a sentence, on which node, and with what: taints, claims, a device."""

    kind: str
    text: str
    node: str = ""
    taints: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    device: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as data."""
        return {
            "kind": self.kind,
            "text": self.text,
            "node": self.node,
            "taints": list(self.taints),
            "claims": list(self.claims),
            "device": self.device,
        }


def nearest(
    asked: Sequence[tuple[NodeSearch, NodeFinding]],
    claims: Sequence[WantedClaim],
    judge: Judge,
    *,
    everywhere: Sequence[NodeSearch] = (),
) -> list[Change]:
    """Return the changes after which the claims would have devices, the nearest first; one of kind ``nothing`` where none of these would do.

    ``asked`` are the nodes that the pod may go to, ``everywhere`` all those on which a device may be partitioned as it would have to be.
    """
    guards = list(_guards(asked, claims, judge))
    nodes = [(at, one) for at, one in asked if one.verdict != FITS]
    found = [
        *guards,
        *_best(_tolerated(at, claims, judge) for at, _one in nodes),
        *_best(_freed(at, one, claims, judge) for at, one in nodes),
    ]
    if not found:
        models = _models(everywhere, claims)
        found = [
            *_best(_repartitioned(at, claims, models, judge) for at, _one in nodes),
            *_best(_both(at, claims, judge) for at, _one in nodes),
        ]
    if not guards:
        found += _best(_less(at, claims) for at, _one in nodes)
    found += [
        Change(WAIT, f"wait until the driver has published pool {pool.label} whole: {pool.incomplete}", _name(at))
        for at, _one in nodes
        for pool in at.pools
        if pool.incomplete
    ][:1]
    if not found:
        text = "none: whatever claims end and taints go, no node has what this asks for; change that, or add devices"
        found = [Change(NOTHING, text)]
    return found


def _best(found: Iterable[Change | None]) -> list[Change]:
    """The smallest of the changes that a few nodes allow."""
    kept: list[Change] = []
    for each in found:
        if each is not None:
            kept.append(each)
            if len(kept) == MOST_NODES or len(each.claims) + len(each.taints) == 1:
                break
    return sorted(kept, key=lambda one: len(one.claims) + len(one.taints))[:1]


def _name(at: NodeSearch) -> str:
    return str(at.node["metadata"]["name"])


def _fits(at: NodeSearch, claims: Sequence[WantedClaim]) -> bool:
    return outcome(at, claims)[0] == FITS


def _changed(claims: Sequence[WantedClaim], change: Callable[[Request], Request]) -> list[WantedClaim]:
    return [
        replace(claim, requests=tuple(tuple(change(each) for each in alternatives) for alternatives in claim.requests))
        for claim in claims
    ]


# ---------------------------------------------------------------------- tolerate


def _tolerated(at: NodeSearch, claims: Sequence[WantedClaim], judge: Judge) -> Change | None:
    found = _tolerable(at, at.held, claims, judge)
    if found is None:
        return None
    return Change(TOLERATE, f"tolerate {' and '.join(found)} in the claim", _name(at), taints=found)


def _tolerable(at: NodeSearch, held: Held, claims: Sequence[WantedClaim], judge: Judge) -> tuple[str, ...] | None:
    """The fewest taints whose toleration would do; None where none would, or none is in the way."""
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
        return _fits(
            there, _changed(claims, lambda request: replace(request, tolerations=(*request.tolerations, *more)))
        )

    if not fits(tuple(taints)):
        return None
    return _smallest(sorted(taints), fits)


# ---------------------------------------------------------------------- free claims


def _freed(at: NodeSearch, finding: NodeFinding, claims: Sequence[WantedClaim], judge: Judge) -> Change | None:
    found = _freeable(at, finding, claims, judge)
    if found is None:
        return None
    end = "ends" if len(found) == 1 else "end"
    return Change(
        FREE_CLAIMS,
        f"it fits when {' and '.join(found)} {end}, or {'is' if len(found) == 1 else 'are'} moved to another node",
        _name(at),
        claims=found,
    )


def _freeable(
    at: NodeSearch, finding: NodeFinding, claims: Sequence[WantedClaim], judge: Judge
) -> tuple[str, ...] | None:
    """The fewest claims after whose end there would be devices; None where that would not do, or nobody holds any."""
    holders = sorted(
        {
            name
            for pool in at.pools
            for device in (*pool.devices, *pool.elsewhere)
            for name in at.held.holders(device.key)
        }
    )
    if not holders:
        return None

    def fits(gone: Sequence[str]) -> bool:
        return _fits(NodeSearch(at.node, at.pools, at.held.without(gone), judge), claims)

    if not fits(holders):
        return None
    named = {name for one in finding.requests for each in one.obstacles if each.kind in HELD for name in each.claims}
    # Those that were named first: they are where the devices are that the claim wants.
    return _smallest(sorted(holders, key=lambda name: (name not in named, name)), fits)


def _smallest(things: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """The smallest set for which ``fits`` holds, which it does for all; of many, one from which none can be left out."""
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


def _both(at: NodeSearch, claims: Sequence[WantedClaim], judge: Judge) -> Change | None:
    """Tolerate something and free claims, where one of them does not do."""
    holders = {
        name for pool in at.pools for device in (*pool.devices, *pool.elsewhere) for name in at.held.holders(device.key)
    }
    taints = _tolerable(at, at.held.without(holders), claims, judge) if holders else None
    if taints is None:
        return None
    text = (
        f"tolerate {' and '.join(taints)} in the claim, and let claims of this node end: {', '.join(sorted(holders))}"
    )
    return Change(TOLERATE, text, _name(at), taints=taints, claims=tuple(sorted(holders)))


# ---------------------------------------------------------------------- partition a device anew


@dataclass(frozen=True)
class _Model:
    """A device somewhere with its parts, that has what a request selects; ``forms`` is what its parts are."""

    node: str
    pool: Pool
    parts: tuple[Device, ...]
    forms: tuple[str, ...]


def _repartitioned(
    at: NodeSearch, claims: Sequence[WantedClaim], models: Mapping[str, Sequence[_Model]], judge: Judge
) -> Change | None:
    """One device of this node, held by nobody, cut as one of the same product is somewhere in the cluster."""
    for whole, mine in sorted(_wholes(at).items()):
        if not whole or any(at.held.holders(each.key) for each in mine) or _draws_beside(at, mine):
            continue
        for model in models.get(_product(mine[0]), ()):
            if model.forms == _forms(mine):
                continue
            pools = _replaced(at, mine, model)
            if _fits(NodeSearch(at.node, pools, at.held, judge), claims):
                shown = mine[0].label if len(mine) == 1 else f"{mine[0].pool}/{whole}"
                text = f"partition {shown} of node {_name(at)} so that it has parts like {model.parts[0].label} of node {model.node}; no claim has it"
                return Change(REPARTITION, text, _name(at), device=shown)
    return None


def _models(searches: Sequence[NodeSearch], claims: Sequence[WantedClaim]) -> dict[str, list[_Model]]:
    """By product the devices anywhere that have what a request selects; of those that are cut alike one is enough."""
    requests = [each for claim in claims for alternatives in claim.requests for each in alternatives]
    found: dict[str, list[_Model]] = {}
    for other in searches:
        for whole, parts in sorted(_wholes(other).items()):
            product, forms = _product(parts[0]), _forms(parts)
            known = found.setdefault(product, [])
            if not product or not whole or any(each.forms == forms for each in known):
                continue
            if any(_selected(other, request, device) for request in requests for device in parts):
                pool = next(one for one in other.pools if (one.driver, one.name) == parts[0].key[:2])
                known.append(_Model(_name(other), pool, tuple(parts), forms))
    return found


def _selected(at: NodeSearch, request: Request, device: Device) -> bool:
    try:
        return at.selectable(request, device) and taken(request.capacity, device) is not None
    except (SelectorFailed, AcceleratorError):
        return False


def _wholes(at: NodeSearch) -> dict[str, list[Device]]:
    """The devices of a node by the UUID of the whole that they are, or are parts of."""
    found: dict[str, list[Device]] = {}
    for device in at.devices():
        found.setdefault(_text(device, PARENT_UUID) or _text(device, OWN_UUID), []).append(device)
    return found


def _draws_beside(at: NodeSearch, mine: Sequence[Device]) -> bool:
    """Whether counters that these devices draw on are drawn on already."""
    places = {place for device in mine for place, _drawn, _groups in device.draws}
    return bool(places and holders_of_counters(at, places))


def _replaced(at: NodeSearch, mine: Sequence[Device], model: _Model) -> list[Pool]:
    """The node's pools with the parts in place of these devices; they are where these are."""
    standard = {name: value for name, value in mine[0].attributes.items() if name.startswith(STANDARD)}
    gone, scope = {device.key for device in mine}, "partitioned-anew"
    clones = tuple(
        replace(
            each,
            pool=mine[0].pool,
            content={**each.content, "name": f"new-{each.name}", "attributes": {**each.attributes, **standard}},
            slice=mine[0].slice,
            taints=(),
            scope=scope,
        )
        for each in model.parts
    )
    places = {place for each in model.parts for place, _drawn, _groups in each.draws}
    counters = {(scope, place[1]): amounts for place, amounts in model.pool.counters.items() if place in places}
    return [
        replace(
            pool,
            devices=(*(each for each in pool.devices if each.key not in gone), *clones),
            counters={**pool.counters, **counters},
        )
        if (pool.driver, pool.name) == mine[0].key[:2]
        else pool
        for pool in at.pools
    ]


def _text(device: Device, name: str) -> str:
    values = values_of(device.attribute(f"{device.driver}/{name}"))
    return text_of(values) if values is not None and values[0] == "string" else ""


def _product(device: Device) -> str:
    return next((text for name in PRODUCTS if (text := _text(device, name))), "")


def _forms(parts: Iterable[Device]) -> tuple[str, ...]:
    return tuple(sorted(map(_form, parts)))


def _form(device: Device) -> str:
    return f"{_text(device, 'profile') or _text(device, 'type')} {sorted(device.capacity)}"


# ---------------------------------------------------------------------- ask for less, or otherwise


def _less(at: NodeSearch, claims: Sequence[WantedClaim]) -> Change | None:
    """Of the one request that wants several devices, fewer of them."""
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
        fewer = _changed(claims, lambda one, most=count: replace(one, count=most) if one.full_name == name else one)  # type: ignore[misc]
        if _fits(at, fewer):
            text = f"ask for {count} instead of {several[0].count} in request {name}"
            return Change(ASK_FOR_LESS, text, _name(at))
    return None


class _Tolerant:
    """Judges as a selector would that asks first whether an attribute is there: what had an error is not selected."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def matches(self, expression: str, device: Device) -> bool:
        try:
            return self._judge.matches(expression, device)
        except SelectorFailed:
            return False

    def value(self, expression: str, device: Device) -> Any:
        return self._judge.value(expression, device)


def _guards(
    asked: Sequence[tuple[NodeSearch, NodeFinding]], claims: Sequence[WantedClaim], judge: Judge
) -> Iterator[Change]:
    """Where a selector has an error: whether there would be devices if it were written so that it had none."""
    if not any(one.verdict == ERROR for _at, one in asked):
        return
    tolerant = _Tolerant(judge)
    fits = next((at for at, _one in asked if _fits(NodeSearch(at.node, at.pools, at.held, tolerant), claims)), None)
    if fits is not None:
        text = f"write the selector so that it asks first whether the attribute is there: then node {_name(fits)} has devices for it"
        yield Change(GUARD, text, _name(fits))
