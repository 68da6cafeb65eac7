# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Search for devices on one node like the scheduler: the same devices in the same order, and the same errors.

No side effects. The search uses first fit with backtracking over claims, requests, alternatives, and devices, as in
k8s.io/dynamic-resource-allocation/structured, 1.37. Impossible candidates are removed before the search, so it needs
fewer attempts. The result is the same.
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
#: The maximum number of attempts with a device. The scheduler's own limit is time: 10 s for a node.
MOST_ATTEMPTS = 50_000
OPTIONAL_OPERATIONS = "DRAOptionalNodeOperations"

_Place = tuple[str, str]
_Counters = dict[_Place, dict[str, Fraction]]


class Aborted(AcceleratorError):
    """Report that the scheduler aborts the pod with an error, on any node where the cause occurs."""

    default_code = "aborted"


class TooManyAttempts(AcceleratorError):
    """Report that there are too many combinations to try."""

    default_code = "too-many-attempts"


class _TooManyResults(Exception):
    """A claim would get more devices than an allocation can contain."""


@dataclass(frozen=True)
class Chosen:
    """The device for a request of a claim, with the consumed capacities of a shared device."""

    claim: str
    request: str
    device: Device
    consumed: Mapping[str, Fraction]


def remaining_counters(pool: Pool, held: Held) -> _Counters:
    """Return the remaining counters of a pool after existing allocations; negative if claims use too much."""
    left = {place: dict(counters) for place, counters in pool.counters.items()}
    for device in (*pool.devices, *pool.elsewhere):
        if device.key in held.alone or device.key in held.shares:
            for place, drawn, _groups in device.draws:
                for name, amount in drawn.items():
                    left[place][name] -= amount
    return left


class NodeSearch:
    """One node from the scheduler's view: its pools, the existing allocations, and the evaluator of expressions."""

    def __init__(self, node: Json, pools: Sequence[Pool], held: Held, judge: Judge) -> None:
        self.node = node
        self.pools = tuple(pools)
        self.held = held
        self._judge = judge
        self._left = {pool.label: remaining_counters(pool, held) for pool in pools if pool.usable}
        self._pool_of = {device.key: pool for pool in pools if pool.usable for device in pool.devices}
        self._groups = {pool.label: self._held_groups(pool) for pool in pools if pool.usable}

    def devices(self) -> list[Device]:
        """Return all devices of usable pools, in the scheduler's order."""
        return [device for pool in self.pools if pool.usable for device in pool.devices]

    def judged(self, expression: str, device: Device) -> bool:
        """Return whether one selector matches a device. Raises SelectorFailed, NotJudged."""
        return self._judge.matches(expression, device)

    def selectable(self, request: Request, device: Device) -> bool:
        """Return whether the selectors of a request and its class match a device. Raises SelectorFailed, NotJudged."""
        if any(not self._judge.matches(expression, device) for _where, expression in request.selectors):
            return False
        return not device.slice.get("perDeviceNodeSelection") or device_is_for(device.content, self.node)

    def lookup(self, request: Request, device: Device, name: str) -> Json | None:
        """Return an attribute of a device for the constraints of a request."""
        if name in request.derived:
            return self._judge.value(request.derived[name], device)
        return device.attribute(name)

    def counters_left(self, device: Device) -> _Counters:
        """Return the remaining counters of a device's pool."""
        return self._left[self._pool_of[device.key].label]

    def lacks_counter(self, device: Device, used: _Counters | None = None) -> tuple[_Place, str] | None:
        """Return a counter with too little left for a device in addition to ``used``; None if all are sufficient."""
        mine: _Counters = {}
        for place, drawn, _groups in device.draws:
            into = mine.setdefault(place, {})
            for name, amount in drawn.items():
                into[name] = into.get(name, Fraction(0)) + amount
        # An allocation that consumes counters of a pool fails if any counter of the pool is overdrawn.
        for place, counters in self.counters_left(device).items():
            for name, left in counters.items():
                if mine.get(place, {}).get(name, Fraction(0)) + (used or {}).get(place, {}).get(name, 0) > left:
                    return place, name
        return None

    def lacks_operations(self, device: Device) -> bool:
        """Return whether a device's driver does not take part in its preparation and the node does not support this."""
        declared = (self.node.get("status") or {}).get("declaredFeatures") or ()
        return bool(device.slice.get("skipNodeOperations")) and OPTIONAL_OPERATIONS not in declared

    def groups_of_held(self, device: Device) -> Mapping[_Place, list[frozenset[str]]]:
        """Return the compatibility groups of the allocated devices of the same pool, by counter set."""
        return self._groups[self._pool_of[device.key].label]

    def find(self, claims: Sequence[WantedClaim], attempts: int = MOST_ATTEMPTS) -> list[Chosen] | None:
        """Return the devices that the scheduler allocates to claims on this node; None if it finds none.

        Raises Aborted if the scheduler reports an error, NotJudged, and TooManyAttempts.
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
    """Return whether a device with these groups can use a counter set together with the others."""
    common: frozenset[str] | None = None
    for each in others:
        common = each if common is None else common & each
    if common is None:
        return True
    return bool(common & groups) if groups else not common


class _Candidate:
    """A candidate device for a request; ``error`` is the error that the scheduler reports when it reaches the device."""

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
        """Return the devices that a request could get alone; all selected devices if it requests all."""
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
            if request.every or self._is_allocatable(request, device, consumed):
                found.append(_Candidate(order, device, consumed, None))
        return found

    def _is_allocatable(self, request: Request, device: Device, consumed: Mapping[str, Fraction]) -> bool:
        """Return whether one device could be allocated without other allocations in this search."""
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

    # ------------------------------------------------------------------ order of the search

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
            end -= count - already - 1  # after that too few are left; a candidate with an error must not be skipped
        for index in range(already if request.every else start, end):
            self._attempts -= 1
            if self._attempts < 0:
                raise TooManyAttempts("There are too many combinations of devices to try them all")
            candidate = candidates[index]
            if self._allocate(number, request, candidate):
                done = False
                try:
                    done = self._next_device(number, place, which, already + 1, index + 1)
                finally:
                    if not done:
                        self._release(number, request, candidate)
                if done:
                    return True
            if request.every:
                return False  # all of them are required, so there is no alternative
        return False

    # ------------------------------------------------------------------ one device

    def _allocate(self, number: int, request: Request, candidate: _Candidate) -> bool:
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
        if not again and not self._consume_counters(device):
            return False
        if blocking_taints(device.taints, request.tolerations):
            self._return_counters(device, again=again)
            return False
        kept: list[Bound] = []
        for bound in self._bound[number]:
            if not bound.add(request, device):
                for each in reversed(kept):
                    each.remove(request)
                self._return_counters(device, again=again)
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
            self._return_counters(device, again=again)
            return False
        if device.shared:
            self._shares.setdefault(key, []).append(consumed)
        else:
            self._in_use.setdefault(key, set()).add(number)
        self._results[number].append(
            Chosen(self._claims[number].label, request.full_name, device, consumed if device.shared else {})
        )
        return True

    def _release(self, number: int, request: Request, candidate: _Candidate) -> None:
        device, key = candidate.device, candidate.device.key
        self._results[number].pop()
        if device.shared:
            self._shares[key].pop()
        else:
            self._in_use[key].discard(number)
        for bound in reversed(self._bound[number]):
            bound.remove(request)
        self._return_counters(
            device, again=device.shared and (key in self._at.held.shares or bool(self._shares.get(key)))
        )

    def _has_room(self, device: Device, consumed: Mapping[str, Fraction]) -> bool:
        others = self._at.held.consumed(device.key)
        for share in self._shares.get(device.key, ()):
            for name, amount in share.items():
                others[name] = others.get(name, Fraction(0)) + amount
        return lacking(consumed, device, others) is None

    def _consume_counters(self, device: Device) -> bool:
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

    def _return_counters(self, device: Device, *, again: bool) -> None:
        if again:
            return
        scope = "/".join(device.key[:2])
        for place, drawn, _groups in device.draws:
            into = self._used[scope][place]
            for name, amount in drawn.items():
                into[name] -= amount
            self._groups[(scope, *place)].pop()
