# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The scheduler's search for devices on one node: the same devices in the same order, and the same errors. Pure.

First fit with backtracking over claims, requests, alternatives and devices, as in k8s.io/dynamic-resource-allocation/structured, 1.37. What could never
be taken is left out beforehand, so that less is tried than there; what is found is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import AcceleratorError
from .capacity import lacking, taken
from .constraints import Bound
from .nodes import blocking_taints
from .objects import Device, Held, Json, Judge, Key, Pool, Request, SelectorFailed, WantedClaim
from .pools import device_is_for

MOST_RESULTS = 32
#: Attempts with one device after which it is given up here. The scheduler's own limit is time: ten seconds for a node.
MOST_ATTEMPTS = 50_000
OPTIONAL_OPERATIONS = "DRAOptionalNodeOperations"

_Place = tuple[str, str]
_Counters = dict[_Place, dict[str, Fraction]]


class Aborted(AcceleratorError):
    """The scheduler gives up the pod with an error, on whichever node it comes across the cause."""

    default_code = "aborted"


class TooManyAttempts(AcceleratorError):
    """There are too many combinations to try them all."""

    default_code = "too-many-attempts"


class _TooManyResults(Exception):
    """A claim would get more devices than an allocation can hold."""


@dataclass(frozen=True)
class Chosen:
    """A device for a request of a claim, with what it takes of the capacities of a shared one."""

    claim: str
    request: str
    device: Device
    consumed: Mapping[str, Fraction]


def draw_of_held(pool: Pool, held: Held) -> _Counters:
    """Return what is left of the counters of a pool after what claims have; less than nothing where they have too much."""
    left = {place: dict(counters) for place, counters in pool.counters.items()}
    for device in (*pool.devices, *pool.elsewhere):
        if device.key in held.alone or device.key in held.shares:
            for place, drawn, _groups in device.draws:
                for name, amount in drawn.items():
                    left[place][name] -= amount
    return left


class NodeSearch:
    """One node as the scheduler looks at it: its pools, what is held, and who judges expressions."""

    def __init__(self, node: Json, pools: Sequence[Pool], held: Held, judge: Judge) -> None:
        self.node = node
        self.pools = tuple(pools)
        self.held = held
        self._judge = judge
        self._left = {pool.label: draw_of_held(pool, held) for pool in pools if pool.usable}
        self._pool_of = {device.key: pool for pool in pools if pool.usable for device in pool.devices}
        self._groups = {pool.label: self._held_groups(pool) for pool in pools if pool.usable}

    def devices(self) -> list[Device]:
        """Return all devices of usable pools, in the scheduler's order."""
        return [device for pool in self.pools if pool.usable for device in pool.devices]

    def judged(self, expression: str, device: Device) -> bool:
        """Whether one selector is true of a device. Raises SelectorFailed, NotJudged."""
        return self._judge.matches(expression, device)

    def selectable(self, request: Request, device: Device) -> bool:
        """Whether a device is what a request's selectors, and those of its class, select. Raises SelectorFailed, NotJudged."""
        if any(not self._judge.matches(expression, device) for _where, expression in request.selectors):
            return False
        return not device.slice.get("perDeviceNodeSelection") or device_is_for(device.content, self.node)

    def lookup(self, request: Request, device: Device, name: str) -> Json | None:
        """Return an attribute of a device as constraints of a request see it."""
        if name in request.derived:
            return self._judge.value(request.derived[name], device)
        return device.attribute(name)

    def counters_left(self, device: Device) -> _Counters:
        """Return what is left of the counters of a device's pool."""
        return self._left[self._pool_of[device.key].label]

    def lacks_counter(self, device: Device, used: _Counters | None = None) -> tuple[_Place, str] | None:
        """Return a counter of which there is not enough for a device besides what is ``used``; None where there is of all."""
        mine: _Counters = {}
        for place, drawn, _groups in device.draws:
            into = mine.setdefault(place, {})
            for name, amount in drawn.items():
                into[name] = into.get(name, Fraction(0)) + amount
        # Whoever draws on a pool fails where anything of that pool is overdrawn.
        for place, counters in self.counters_left(device).items():
            for name, left in counters.items():
                if mine.get(place, {}).get(name, Fraction(0)) + (used or {}).get(place, {}).get(name, 0) > left:
                    return place, name
        return None

    def lacks_operations(self, device: Device) -> bool:
        """Whether a device's driver has no part in preparing it and the node does not know of that."""
        declared = (self.node.get("status") or {}).get("declaredFeatures") or ()
        return bool(device.slice.get("skipNodeOperations")) and OPTIONAL_OPERATIONS not in declared

    def groups_of_held(self, device: Device) -> Mapping[_Place, list[frozenset[str]]]:
        """Return by counter set the compatibility groups of the devices of the same pool that claims have."""
        return self._groups[self._pool_of[device.key].label]

    def find(self, claims: Sequence[WantedClaim], attempts: int = MOST_ATTEMPTS) -> list[Chosen] | None:
        """Return the devices that the scheduler takes for claims on this node; None where there are none.

        Raises Aborted where the scheduler has an error, NotJudged, and TooManyAttempts.
        """
        return _Search(self, claims, attempts).run()

    def _held_groups(self, pool: Pool) -> dict[_Place, list[frozenset[str]]]:
        found: dict[_Place, list[frozenset[str]]] = {}
        for device in (*pool.devices, *pool.elsewhere):
            if self.held.holders(device.key):
                for place, _drawn, groups in device.draws:
                    found.setdefault(place, []).append(groups)
        return found


def compatible(groups: frozenset[str], others: Iterable[frozenset[str]]) -> bool:
    """Whether a device of these groups may draw on a counter set beside the others."""
    common: frozenset[str] | None = None
    for each in others:
        common = each if common is None else common & each
    if common is None:
        return True
    return bool(common & groups) if groups else not common


class _Candidate:
    """A device of a request's list; ``error`` is what the scheduler comes across when it gets to it."""

    def __init__(self, order: int, device: Device, consumed: dict[str, Fraction] | None, error: Exception | None):
        self.order, self.device, self.consumed, self.error = order, device, consumed, error


class _Search:
    def __init__(self, at: NodeSearch, claims: Sequence[WantedClaim], attempts: int) -> None:
        self._at, self._claims, self._attempts = at, claims, attempts
        self._bound = [[Bound(each, at.lookup) for each in claim.constraints] for claim in claims]
        self._lists: dict[tuple[int, int, int], list[_Candidate]] = {}
        self._in_use: dict[Key, set[int]] = {}
        self._used: dict[str, _Counters] = {}
        self._groups: dict[tuple[str, str, str], list[frozenset[str]]] = {}
        self._shares: dict[Key, list[Mapping[str, Fraction]]] = {}
        self._results: list[list[Chosen]] = [[] for _claim in claims]

    def run(self) -> list[Chosen] | None:
        for number, claim in enumerate(self._claims):
            least = 0
            for place, alternatives in enumerate(claim.requests):
                counts = []
                for which, request in enumerate(alternatives):
                    self._lists[number, place, which] = self._candidates(claim, request)
                    counts.append(self._count(number, place, which))
                least += min(counts)
            if least > MOST_RESULTS:
                raise Aborted(
                    f"claim {claim.label}: number of requested devices {least} exceeds the claim limit of {MOST_RESULTS}"
                )
        try:
            if self._next_request(0, 0):
                return [each for one in self._results for each in one]
        except _TooManyResults:
            raise Aborted("allocation max size exceeded") from None
        return None

    def _request(self, number: int, place: int, which: int) -> Request:
        return self._claims[number].requests[place][which]

    def _count(self, number: int, place: int, which: int) -> int:
        request = self._request(number, place, which)
        return len(self._lists[number, place, which]) if request.every else request.count

    def _candidates(self, claim: WantedClaim, request: Request) -> list[_Candidate]:
        """The devices that a request could get if nothing else were asked for; for all of them, all that are selected."""
        if request.every:
            for pool in self._at.pools:
                state = "currently being updated" if pool.incomplete else "currently invalid" if not pool.usable else ""
                if state:
                    raise Aborted(
                        f"claim {claim.label}, request {request.name}: asks for all devices, but resource pool {pool.label} is {state}"
                    )
        found = []
        for order, device in enumerate(self._at.devices()):
            if not request.every and not request.admin and device.key in self._at.held.alone:
                continue
            try:
                if not self._at.selectable(request, device):
                    continue
            except SelectorFailed as failed:
                error = Aborted(f"claim {claim.label}, request {request.full_name}: {failed.message}", hint=failed.hint)
                if request.every:
                    raise error from failed
                found.append(_Candidate(order, device, None, error))
                continue
            consumed = taken(request.capacity, device)
            if consumed is None or lacking(consumed, device, {}):
                continue
            if request.every or self._possible(request, device, consumed):
                found.append(_Candidate(order, device, consumed, None))
        return found

    def _possible(self, request: Request, device: Device, consumed: Mapping[str, Fraction]) -> bool:
        """Whether one device could be taken if nothing else were."""
        held = self._at.held
        if self._at.lacks_operations(device) or blocking_taints(device.taints, request.tolerations):
            return False
        if lacking(consumed, device, held.consumed(device.key)):
            return False
        if (device.shared and device.key in held.shares) or not device.draws:
            return True
        groups = self._at.groups_of_held(device)
        return self._at.lacks_counter(device) is None and all(
            compatible(mine, groups.get(place, ())) for place, _drawn, mine in device.draws
        )

    # ------------------------------------------------------------------ the order in which all is tried

    def _next_claim(self, number: int) -> bool:
        try:
            return self._next_request(number, 0)
        except _TooManyResults:
            return False

    def _next_request(self, number: int, place: int) -> bool:
        if number >= len(self._claims):
            return True
        requests = self._claims[number].requests
        if place >= len(requests):
            return self._next_claim(number + 1)
        if not requests[place][0].parent:
            return self._next_device(number, place, 0, 0, 0)
        only_too_many = True
        for which in range(len(requests[place])):
            try:
                if self._next_device(number, place, which, 0, 0):
                    return True
            except _TooManyResults:
                continue
            only_too_many = False
        if only_too_many:
            raise _TooManyResults
        return False

    def _next_device(self, number: int, place: int, which: int, already: int, start: int) -> bool:
        request, candidates = self._request(number, place, which), self._lists[number, place, which]
        if request.every and not candidates:
            return False
        count = self._count(number, place, which)
        if already >= count:
            return self._next_request(number, place + 1)
        if len(self._results[number]) + count - already > MOST_RESULTS:
            raise _TooManyResults
        end = len(candidates)
        if not any(each.error for each in candidates):
            end -= count - already - 1  # from there on too few are left; of an error none may be passed over
        for index in range(already if request.every else start, end):
            self._attempts -= 1
            if self._attempts < 0:
                raise TooManyAttempts("There are too many combinations of devices to try them all")
            candidate = candidates[index]
            if self._take(number, request, candidate):
                done = False
                try:
                    done = self._next_device(number, place, which, already + 1, index + 1)
                finally:
                    if not done:
                        self._give_back(number, request, candidate)
                if done:
                    return True
            if request.every:
                return False  # all of them are wanted, so there is no other to try
        return False

    # ------------------------------------------------------------------ one device

    def _take(self, number: int, request: Request, candidate: _Candidate) -> bool:
        device, key = candidate.device, candidate.device.key
        if request.admin:
            if number in self._in_use.get(key, ()):
                return False
        elif key in self._at.held.alone or self._in_use.get(key):
            return False
        if candidate.error is not None:
            raise candidate.error
        consumed = candidate.consumed or {}
        if self._at.lacks_operations(device) or not (request.every or self._has_room(device, consumed)):
            return False
        again = device.shared and (key in self._at.held.shares or bool(self._shares.get(key)))
        if not again and not self._draw(device):
            return False
        if blocking_taints(device.taints, request.tolerations):
            self._undraw(device, again=again)
            return False
        kept: list[Bound] = []
        for bound in self._bound[number]:
            if not bound.add(request, device):
                for each in reversed(kept):
                    each.remove(request)
                self._undraw(device, again=again)
                if request.every:
                    raise Aborted(
                        f"claim {self._claims[number].label}, request {request.name}: cannot add device "
                        f"{'/'.join(key)} because a claim constraint would not be satisfied"
                    )
                return False
            kept.append(bound)
        if request.every and not self._has_room(device, consumed):
            for each in reversed(kept):
                each.remove(request)
            self._undraw(device, again=again)
            return False
        if device.shared:
            self._shares.setdefault(key, []).append(consumed)
        else:
            self._in_use.setdefault(key, set()).add(number)
        self._results[number].append(
            Chosen(self._claims[number].label, request.full_name, device, consumed if device.shared else {})
        )
        return True

    def _give_back(self, number: int, request: Request, candidate: _Candidate) -> None:
        device, key = candidate.device, candidate.device.key
        self._results[number].pop()
        if device.shared:
            self._shares[key].pop()
        else:
            self._in_use[key].discard(number)
        for bound in reversed(self._bound[number]):
            bound.remove(request)
        self._undraw(device, again=device.shared and (key in self._at.held.shares or bool(self._shares.get(key))))

    def _has_room(self, device: Device, consumed: Mapping[str, Fraction]) -> bool:
        others = self._at.held.consumed(device.key)
        for share in self._shares.get(device.key, ()):
            for name, amount in share.items():
                others[name] = others.get(name, Fraction(0)) + amount
        return lacking(consumed, device, others) is None

    def _draw(self, device: Device) -> bool:
        if not device.draws:
            return True
        held = self._at.groups_of_held(device)
        scope = "/".join(device.key[:2])
        for place, _drawn, groups in device.draws:
            if not compatible(groups, (*held.get(place, ()), *self._groups.get((scope, *place), ()))):
                return False
        used = self._used.setdefault(scope, {})
        if self._at.lacks_counter(device, used) is not None:
            return False
        for place, drawn, groups in device.draws:
            into = used.setdefault(place, {})
            for name, amount in drawn.items():
                into[name] = into.get(name, Fraction(0)) + amount
            self._groups.setdefault((scope, *place), []).append(groups)
        return True

    def _undraw(self, device: Device, *, again: bool) -> None:
        if again:
            return
        scope = "/".join(device.key[:2])
        for place, drawn, _groups in device.draws:
            into = self._used[scope][place]
            for name, amount in drawn.items():
                into[name] -= amount
            self._groups[(scope, *place)].pop()
