# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the obstacles on a node: for each request why devices are unsuitable, and conflicts between requests.

No side effects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from .. import quantity
from ..errors import AcceleratorError
from .capacity import lacking, taken
from .constraints import text_of, values_of
from .nodes import blocking_taints, taint_text
from .objects import Constraint, Device, NotJudged, Request, SelectorFailed, WantedClaim
from .search import Aborted, Chosen, NodeSearch, TooManyAttempts, compatible

FITS, NO, ERROR, UNKNOWN, NOT_ASKED = "fits", "no", "error", "unknown", "not-asked"
#: The kinds of obstacles, in the order of the checks. Properties of the device come before allocations and other
#: temporary states.
SELECTOR, FAILED, JUDGED, CAPACITY, OPERATIONS, TAINT, CLAIM, COUNTER, GROUPS, SHARE = (
    *("selector", "selector-error", "selector-unknown", "capacity", "operations"),
    *("taint", "claim", "counter", "compatibility", "share"),
)
#: Obstacles that can disappear when a claim ends.
HELD = (CLAIM, COUNTER, GROUPS, SHARE)
MOST_NAMED = 5
_NAMED = re.compile(r"""attributes\[\s*(?P<q>['"])(?P<domain>[^'"]+)(?P=q)\s*\]\s*\.\??(?P<name>[A-Za-z_]\w*)""")


@dataclass(frozen=True)
class Obstacle:
    """An obstacle: its kind, a sentence, the devices, and the claims that use them or their resources."""

    kind: str
    detail: str
    devices: tuple[str, ...]
    claims: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the obstacle as data."""
        return {
            "kind": self.kind,
            "detail": self.detail,
            "count": len(self.devices),
            "devices": list(self.devices),
            "claims": list(self.claims),
            "taints": list(self.taints),
        }


@dataclass(frozen=True)
class RequestFinding:
    """The result of a request on a node: requested, existing, and free devices, and the obstacles of the others."""

    claim: str
    request: str
    device_class: str
    wanted: int
    every: bool
    devices: int
    free: int
    obstacles: tuple[Obstacle, ...]

    @property
    def short(self) -> bool:
        """Return whether too few devices are free even without other requests."""
        blocked = self.every and any(each.kind not in (SELECTOR, CAPACITY) for each in self.obstacles)
        return blocked or self.free < max(self.wanted, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as data."""
        return {
            "claim": self.claim,
            "request": self.request,
            "device_class": self.device_class,
            "wanted": "all" if self.every else self.wanted,
            "devices": self.devices,
            "free": self.free,
            "enough": not self.short,
            "obstacles": [each.to_dict() for each in self.obstacles],
        }


@dataclass(frozen=True)
class NodeFinding:
    """The scheduler's result on a node, and the reasons. ``together`` is the conflict between the requests."""

    node: str
    verdict: str
    message: str = ""
    requests: tuple[RequestFinding, ...] = ()
    together: str = ""
    pools: tuple[str, ...] = ()
    chosen: tuple[Chosen, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as data."""
        return {
            "node": self.node,
            "verdict": self.verdict,
            "message": self.message,
            "requests": [each.to_dict() for each in self.requests],
            "together": self.together,
            "pools": list(self.pools),
            "devices": [
                {
                    "claim": each.claim,
                    "request": each.request,
                    "driver": each.device.driver,
                    "pool": each.device.pool,
                    "device": each.device.name,
                    "consumed": {name: amount_text(amount) for name, amount in each.consumed.items()},
                }
                for each in self.chosen
            ],
        }


def evaluate_node(at: NodeSearch, claims: Sequence[WantedClaim]) -> NodeFinding:
    """Return the scheduler's result for these claims on a node, with the obstacles."""
    node = str(at.node["metadata"]["name"])
    pools = tuple(
        f"pool {pool.label} is {'being updated' if pool.incomplete else 'invalid'}: {pool.incomplete or pool.invalid}"
        for pool in at.pools
        if not pool.usable
    )
    verdict, message, hint, chosen = outcome(at, claims)
    if verdict == FITS:
        return NodeFinding(node, FITS, pools=pools, chosen=tuple(chosen))
    requests = tuple(
        _request(at, claim, request) for claim in claims for alternatives in claim.requests for request in alternatives
    )
    together = _find_conflict(at, claims, requests) if verdict == NO else ""
    return NodeFinding(node, verdict, f"{message}. {hint}" if hint else message, requests, together, pools)


def outcome(at: NodeSearch, claims: Sequence[WantedClaim]) -> tuple[str, str, str, list[Chosen]]:
    """Return the scheduler's verdict on a node with a message, a hint, and the allocated devices."""
    try:
        chosen = at.find(claims)
    except Aborted as error:
        return ERROR, error.message, error.hint, []
    except (NotJudged, TooManyAttempts) as error:
        return UNKNOWN, error.message, error.hint, []
    return (NO, "", "", []) if chosen is None else (FITS, "", "", chosen)


def obstacle_of(at: NodeSearch, request: Request, device: Device) -> Obstacle | None:
    """Return the obstacle of one device for a request without other requests; None without an obstacle."""
    names = (device.label,)
    for where, expression in request.selectors:
        of_class = where.startswith("class ")
        try:
            if not at.judged(expression, device):
                return Obstacle(SELECTOR, f"not of {where}" if of_class else f"not selected by {expression}", names)
        except SelectorFailed as error:
            return Obstacle(FAILED, f"on which the selector of {where} has an error ({error.reason})", names)
        except NotJudged:
            return Obstacle(JUDGED, f"on which the selector of {where} is not evaluated here, {expression}", names)
    if not at.selectable(replace(request, selectors=()), device):  # the device itself selects nodes
        return Obstacle(SELECTOR, "for other nodes", names)
    consumed = taken(request.capacity, device)
    if consumed is None or lacking(consumed, device, {}):
        asked = ", ".join(f"{amount_text(amount)} of {name}" for name, amount in request.capacity.items())
        return Obstacle(CAPACITY, f"without a capacity that gives {asked}", names)
    if at.lacks_operations(device):
        return Obstacle(OPERATIONS, "prepared by no driver, which the node does not know of", names)
    taints = blocking_taints(device.taints, request.tolerations)
    if taints:
        texts = tuple(sorted({taint_text(each) for each in taints}))
        return Obstacle(TAINT, f"tainted {' and '.join(texts)}, not tolerated", names, taints=texts)
    return _allocation_obstacle(at, request, device, consumed)


def _allocation_obstacle(
    at: NodeSearch, request: Request, device: Device, consumed: dict[str, Fraction]
) -> Obstacle | None:
    names, held = (device.label,), at.held
    if device.key in held.alone and not request.admin:
        holders = tuple(sorted(held.alone[device.key]))
        return Obstacle(CLAIM, f"held by {' and '.join(holders)}", names, holders)
    short = lacking(consumed, device, held.consumed(device.key))
    if short is not None:
        holders = tuple(sorted({name for name, _consumed in held.shares.get(device.key, ())}))
        left = f"of which {_first_names(holders)} {'leaves' if len(holders) == 1 else 'leave'} {amount_text(short[2])} of {short[0]}"
        return Obstacle(SHARE, f"{left}, {amount_text(short[1])} wanted", names, holders)
    if device.shared and device.key in held.shares:
        return None
    lack = at.lacks_counter(device)
    if lack is not None:
        holders = holders_of_counters(at, [lack[0]])
        by = f" after {_first_names(holders)}" if holders else ""
        return Obstacle(
            COUNTER, f"for which counter set {lack[0][1]} has too little {lack[1]} left{by}", names, holders
        )
    groups = at.groups_of_held(device)
    for place, _drawn, mine in device.draws:
        if not compatible(mine, groups.get(place, ())):
            holders = holders_of_counters(at, [place])
            detail = f"not compatible with what {_first_names(holders)} {'has' if len(holders) == 1 else 'have'} of counter set {place[1]}"
            return Obstacle(GROUPS, detail, names, holders)
    return None


def holders_of_counters(at: NodeSearch, places: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the claims with a device that consumes one of these counter sets."""
    wanted = set(places)
    found: set[str] = set()
    for pool in at.pools:
        for device in (*pool.devices, *pool.elsewhere):
            if wanted & {place for place, _drawn, _groups in device.draws}:
                found.update(at.held.holders(device.key))
    return tuple(sorted(found))


def _request(at: NodeSearch, claim: WantedClaim, request: Request) -> RequestFinding:
    devices = at.devices()
    found: dict[tuple[str, str], list[Obstacle]] = {}
    free = 0
    for device in devices:
        obstacle = obstacle_of(at, request, device)
        if obstacle is None:
            free += 1
        else:
            found.setdefault((obstacle.kind, obstacle.detail), []).append(obstacle)
    obstacles = [
        replace(
            those[0],
            detail=those[0].detail + _attribute_values(those[0], request, devices, at),
            devices=tuple(one.devices[0] for one in those),
        )
        for those in found.values()
    ]
    wanted = (
        free + sum(len(one.devices) for one in obstacles if one.kind in (TAINT, *HELD))
        if request.every
        else request.count
    )
    return RequestFinding(
        claim.label,
        request.full_name,
        request.device_class,
        wanted,
        request.every,
        len(devices),
        free,
        tuple(obstacles),
    )


def _attribute_values(obstacle: Obstacle, request: Request, devices: Sequence[Device], at: NodeSearch) -> str:
    """Return the devices' values of the attributes in a selector. A typical cause is a wrong value in the selector."""
    if obstacle.kind != SELECTOR or obstacle.detail.startswith("not of class "):
        return ""
    names = dict.fromkeys(f"{found['domain']}/{found['name']}" for found in _NAMED.finditer(obstacle.detail))
    said = []
    for name in names:
        seen = Counter(
            text_of(found)
            for device in devices
            if _matches_class(at, request, device) and (found := values_of(device.attribute(name))) is not None
        )
        if seen:
            few = ", ".join(each for each, _count in seen.most_common(MOST_NAMED))
            said.append(f"{name.rpartition('/')[2]} is {few}{', …' if len(seen) > MOST_NAMED else ''}")
    return f" ({'; '.join(said)})" if said else ""


def _matches_class(at: NodeSearch, request: Request, device: Device) -> bool:
    own = tuple(each for each in request.selectors if each[0].startswith("class "))
    try:
        return at.selectable(replace(request, selectors=own), device)
    except AcceleratorError:
        return False


# ---------------------------------------------------------------------- conflicts between requests


def _find_conflict(at: NodeSearch, claims: Sequence[WantedClaim], findings: Sequence[RequestFinding]) -> str:
    """Return the conflict if each request alone has enough devices."""
    by_name = {(one.claim, one.request): one for one in findings}
    for claim in claims:
        for alternatives in claim.requests:
            if all(by_name[claim.label, each.full_name].short for each in alternatives):
                return ""  # the obstacles of the request already show it
    constrained = [(claim, each) for claim in claims for each in claim.constraints]
    if constrained and node_fits(at, [replace(claim, constraints=()) for claim in claims]):
        culprits = [
            _constraint_text(at, claim, each)
            for claim, each in constrained
            if node_fits(at, [_without(one, each) if one is claim else one for one in claims])
        ]
        return "; ".join(culprits) or "the constraints together rule out every choice of devices"
    for claim in claims:
        for alternatives in claim.requests:
            if len(alternatives) == 1 and not alternatives[0].every and alternatives[0].count > 1:
                most = _max_devices(at, claim, alternatives[0])
                if most < alternatives[0].count:
                    name = alternatives[0].full_name
                    return f"request {name} wants {alternatives[0].count} devices; of the free ones at most {most} fit at the same time"
    if sum(len(claim.requests) for claim in claims) > 1:
        return "each request has enough devices alone; they want the same devices, or the same room on a device"
    return ""


def _constraint_text(at: NodeSearch, claim: WantedClaim, constraint: Constraint) -> str:
    requests = [
        request
        for alternatives in claim.requests
        for request in alternatives
        if request.is_named_by(constraint.requests)
    ]
    seen = Counter(
        text_of(values_of(device.attribute(constraint.attribute)))
        for device in at.devices()
        if any(obstacle_of(at, request, device) is None for request in requests)
    )
    values = ", ".join(f"{count} with {text}" for text, count in seen.most_common(MOST_NAMED))
    relation = "differ" if constraint.distinct else "agree"
    return f"the claim wants devices that {relation} in {constraint.attribute}; free are {values}"


def _without(claim: WantedClaim, constraint: Constraint) -> WantedClaim:
    left = list(claim.constraints)
    left.remove(constraint)
    return replace(claim, constraints=tuple(left))


def _max_devices(at: NodeSearch, claim: WantedClaim, request: Request) -> int:
    for count in range(request.count, 0, -1):
        if node_fits(at, [replace(claim, requests=((replace(request, count=count),),), constraints=())]):
            return count
    return 0


def node_fits(at: NodeSearch, claims: Sequence[WantedClaim]) -> bool:
    """Return whether the scheduler finds devices for these claims on a node."""
    return outcome(at, claims)[0] == FITS


def amount_text(amount: Fraction) -> str:
    """Return an amount as text."""
    if amount.denominator == 1:
        value = int(amount)
        return quantity.format_bytes(value) if value % 1024 == 0 else str(value)
    return str(float(amount))


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
