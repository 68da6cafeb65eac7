# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Decide what to write to the API server, and when, as a pure function of current state, desired state, and time.

``decide`` takes a State and returns writes, a question to the API server, or the time of its next call. The other
functions apply a result (a list, a watched change, an answer, a failure) to the State. This module waits for nothing,
reads no clock, and does no I/O.

The driver writes its own changes at once. Changes by others to its slices are reverted after they have settled, and
more and more slowly if they repeat. Facts: the kubelet removes slices at its start, pools have generations, and the
server drops fields of disabled feature gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.dra.resource_slices import (
    COMBINED,
    SEPARATE,
    PoolSpec,
    SliceContent,
    SliceWrite,
    build_pool,
    dropped_fields,
    plan_pool,
    plan_removal,
    same_content,
)
from ..core.model import CounterSet, Offer
from .api_compatibility import Content, Withheld, fit, needs, without_invalid

Json = dict[str, Any]
Owner = Mapping[str, Any]

# From this version on, counters are in separate slices.
SEPARATE_COUNTERS_FROM = (1, 35)
PROBE_COUNTERS = CounterSet("probe", {"probe": 1})
# The server's status if an object has changed since the plan was made.
OUTDATED = (404, 409)
# After this number of conflicts in a row, a new list does not end the wait: another cause than an outdated list is likely, such as a policy.
QUICK_CONFLICTS = 2
# The driver reads version and features of the API server again after the first of this number of failures in a row with status 422.
ASK_EVERY = 8
# The server's status if it does not accept the form of an object, for example after an upgrade.
INVALID = 422
#: After this number of failures in a row, a refused pool is retried less often.
QUICK_REFUSALS = 10
#: A policy or the API server refuses the write of this slice. Other statuses are temporary, or concern all slices.
REFUSED = (400, 403, INVALID)


@dataclass(frozen=True)
class Pace:
    """Time limits, in seconds.

    ``gap`` is the minimum between two publications. ``settle`` is the wait after the last change by others (the kubelet
    deletes slices one by one). It doubles with each repetition up to ``settle_limit``, and is reset after ``calm``.
    ``retry`` and ``conflict`` are the first waits after a failure and after a conflicting change. They double up to
    ``retry_limit``, or up to ``refused_limit`` after ten attempts if the server refuses the pool itself. ``leftover``
    is the wait before another attempt to remove a slice whose removal was refused.
    """

    gap: float = 0.25
    settle: float = 1.0
    settle_limit: float = 30.0
    calm: float = 120.0
    retry: float = 0.5
    conflict: float = 0.05
    retry_limit: float = 30.0
    refused_limit: float = 300.0
    leftover: float = 600.0


@dataclass(frozen=True)
class Identity:
    """The driver, pool, and node name of the published pool."""

    driver: str
    pool: str
    node_name: str


@dataclass(frozen=True)
class Server:
    """Features of the API server: where counters are stored, the verified features (see fit.GATES), and those that it drops."""

    layout: str = SEPARATE
    known: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()


@dataclass(frozen=True)
class State:
    """The known state. All times are of one clock.

    ``slices`` None: never listed. ``server`` None: to be queried. ``notes`` are annotations of the pool, as in
    PoolSpec. ``check_at`` is when a known server is queried again (None: not planned). ``sent`` is the last pool that
    was completely published. ``curtailed`` contains, by slice name, the sent spec and the server's version of it, if
    they differ. ``failures`` counts failures in a row, and ``failed_status`` is the HTTP status of the last one (0: no
    answer). ``not_before`` ends a wait after a failure, and ``retry_at`` a wait that the server requested. ``leftovers`` is
    when the removal of a slice of another pool is retried.
    """

    content: Content | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    slices: Mapping[str, Json] | None = None
    server: Server | None = None
    check_at: float | None = None
    owner: Owner | None = None
    owner_doubtful: bool = True
    sent: PoolSpec | None = None
    curtailed: Mapping[str, tuple[Json, Json]] = field(default_factory=dict)
    written_at: float = float("-inf")
    disturbed: tuple[float, float] | None = None
    repairs: int = 0
    repaired_at: float = float("-inf")
    failures: int = 0
    failed_status: int = 0
    not_before: float = float("-inf")
    retry_at: float = float("-inf")
    leftovers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The next action: query the ``server`` or the ``owner``, or write, or wait until ``wake_at`` (None: for a change).

    ``current``: the pool is as desired. ``repair``: the writes revert changes by others. ``leftover``: the writes
    remove slices of another pool name. ``problem`` is the reason why the content cannot be published at all.
    """

    ask_server: bool = False
    ask_owner: bool = False
    writes: tuple[SliceWrite, ...] = ()
    wake_at: float | None = None
    current: bool = False
    repair: bool = False
    leftover: bool = False
    pool: PoolSpec | None = None
    generation: int = 0
    withheld: tuple[Withheld, ...] = ()
    problem: str = ""


def decide(identity: Identity, pace: Pace, state: State, now: float) -> Decision:
    """Return what to do at this moment."""
    decision = _decide(identity, pace, state, now)
    if state.check_at is None or decision.pool is None:
        return decision
    due = max(state.check_at, state.not_before, state.retry_at)
    if now >= due:
        return replace(decision, ask_server=True)
    return replace(decision, wake_at=due if decision.wake_at is None else min(decision.wake_at, due))


def _decide(identity: Identity, pace: Pace, state: State, now: float) -> Decision:
    if state.content is None or state.slices is None:
        return Decision()
    waited = max(state.not_before, state.retry_at)
    if state.server is None or needed(state.content) - state.server.known:
        return Decision(ask_server=True) if now >= waited else Decision(wake_at=waited)
    content, withheld = fit(state.content, state.server.drops, state.server.layout)
    try:
        pool = _build(identity, content, state.server.layout, state.notes)
    except ValueError:
        # One invalid device is enough for that error. The other devices are published without it.
        content, invalid = without_invalid(content)
        withheld += invalid
        try:
            pool = _build(identity, content, state.server.layout, state.notes)
        except ValueError as error:
            return Decision(problem=str(error))
    existing = [_as_sent(state, name, item) for name, item in sorted(state.slices.items())]
    plan = plan_pool(pool, existing, owner=state.owner)
    decision = Decision(pool=pool, generation=plan.generation, withheld=withheld)
    if not plan.writes and state.owner is not None:
        return _tidy(identity, replace(decision, current=True), state, existing, now)
    repair = state.sent == pool
    earliest = max(waited, state.written_at + pace.gap)
    if repair and state.disturbed is not None:
        first, last = state.disturbed
        earliest = max(earliest, min(last + patience(pace, state, now), first + pace.settle_limit))
    if now < earliest:
        return replace(decision, wake_at=earliest)
    if state.owner is None or state.owner_doubtful:
        # The cluster deletes slices that refer to a Node's previous UID as garbage.
        return replace(decision, ask_owner=True)
    return replace(decision, writes=plan.writes, repair=repair)


def _build(identity: Identity, content: Content, layout: str, notes: Mapping[str, str]) -> PoolSpec:
    """Return the pool with this content. Raises ValueError for content that the API server would reject."""
    return build_pool(
        driver=identity.driver,
        pool=identity.pool,
        node_name=identity.node_name,
        offers=content.offers,
        counter_sets=content.counter_sets,
        layout=layout,
        notes=notes,
    )


def _tidy(
    identity: Identity, decision: Decision, state: State, existing: Iterable[Mapping[str, Any]], now: float
) -> Decision:
    """Return the decision for a complete pool: remove slices of previous pool names."""
    items = list(existing)
    former = sorted({item["spec"]["pool"]["name"] for item in items} - {identity.pool})
    removals = [write for name in former for write in plan_removal(identity.driver, name, items).writes]
    at = {write.name: max(state.leftovers.get(write.name, 0.0), state.retry_at, state.not_before) for write in removals}
    due = tuple(write for write in removals if at[write.name] <= now)
    if due:
        return replace(decision, writes=due, leftover=True)
    return replace(decision, wake_at=min(at.values(), default=None))


def patience(pace: Pace, state: State, now: float) -> float:
    """Return the seconds to wait after changes by others before they are reverted."""
    again = state.repairs if now - state.repaired_at < pace.calm else 0
    return min(pace.settle * 2.0 ** min(again, 16), pace.settle_limit)


# ---------------------------------------------------------------------- results


def wanted(state: State, content: Content) -> State:
    """Set the desired content of the pool."""
    return replace(state, content=content)


def noted(state: State, notes: Mapping[str, str]) -> State:
    """Set the desired annotations of the pool."""
    return replace(state, notes=dict(notes))


def listed(state: State, items: Iterable[Json], now: float) -> State:
    """Apply the complete list of the server's slices.

    The list ends the wait after a failure if it differs, after one of the first conflicts in a row, and if the server
    did not answer before.
    """
    slices = {str(item["metadata"]["name"]): item for item in items}
    changed = state.slices is not None and _versions(slices) != _versions(state.slices)
    quick = state.failed_status == 0 or (state.failed_status in OUTDATED and state.failures <= QUICK_CONFLICTS)
    found = replace(state, slices=slices, not_before=float("-inf") if changed or quick else state.not_before)
    return _disturbed(found, now) if changed else found


def needs_list(state: State) -> bool:
    """Return whether the slices are listed after the last failure: a conflict, the first, second, fourth, and so on in a row."""
    return state.failed_status in OUTDATED and state.failures & (state.failures - 1) == 0


def interrupted(state: State) -> State:
    """Apply a lost connection: the server may return with another version or other gates, and the Node may be a new one."""
    return replace(state, server=None, owner_doubtful=True)


def watch_ended(state: State, check_at: float) -> State:
    """Plan to query the server again after a regular end of a watch, which also happens before an upgrade."""
    earliest = check_at if state.check_at is None else min(state.check_at, check_at)
    return replace(state, check_at=earliest, owner_doubtful=True)


def watch_opened(state: State, check_at: float) -> State:
    """Plan to query the server again, unless that is planned: another server may answer now."""
    return replace(state, check_at=check_at) if state.check_at is None else state


def seen(state: State, kind: str, item: Json, now: float) -> State:
    """Apply one change from the watch. The driver's own writes have no effect here, because their answers are known."""
    slices, name = dict(state.slices or {}), str(item["metadata"]["name"])
    known = slices.get(name)
    if kind == "DELETED":
        if known is None or known["metadata"].get("uid") != item["metadata"].get("uid"):
            return state
        del slices[name]
    else:
        if known is not None and not newer(item, known):
            return state
        slices[name] = item
    return _disturbed(replace(state, slices=slices), now)


def _disturbed(state: State, now: float) -> State:
    first = state.disturbed[0] if state.disturbed is not None else now
    return replace(state, disturbed=(first, now), owner_doubtful=True)


def owned(state: State, owner: Owner) -> State:
    """Set the Node object that owns the slices."""
    return replace(state, owner=dict(owner), owner_doubtful=False)


def asked(state: State, version: tuple[int, int], sent: Json | None, answer: Json | None) -> State:
    """Set the server's features from its version and its answer to a probe (None: no probe, or no answer)."""
    known = frozenset() if state.content is None else needed(state.content)
    if sent is None:
        drops: frozenset[str] = frozenset()
    elif answer is not None:
        drops = lost(sent, answer)
    else:
        # A known server that rejects the probe still drops what it dropped from earlier writes.
        drops = state.server.drops if state.server is not None else frozenset()
    return replace(state, server=Server(layout_of(version), known, drops), check_at=None)


def layout_of(version: tuple[int, int]) -> str:
    """Return where a server of this version expects counters."""
    return SEPARATE if version >= SEPARATE_COUNTERS_FROM else COMBINED


def needed(content: Content) -> frozenset[str]:
    """Return the features that the content needs."""
    return frozenset().union(*(needs(offer) for offer in content.offers))


def answered(state: State, write: SliceWrite, answer: Json | None) -> State:
    """Apply a successful write. ``answer`` is the object as the server stored it."""
    slices, curtailed = dict(state.slices or {}), dict(state.curtailed)
    if write.body is None or answer is None:
        slices.pop(write.name, None)
        curtailed.pop(write.name, None)
        leftovers = {name: at for name, at in state.leftovers.items() if name != write.name}
        return replace(state, slices=slices, curtailed=curtailed, leftovers=leftovers)
    name = str(answer["metadata"]["name"])
    slices[name] = answer
    curtailed.pop(name, None)
    server = state.server or Server()
    if not _kept(write.body, answer):
        # Accept the server's version of the slice, or the slice would be written again and again.
        curtailed[name] = (dict(write.body["spec"]), dict(answer["spec"]))
        server = replace(server, drops=server.drops | lost(write.body, answer))
    return replace(state, slices=slices, curtailed=curtailed, server=server)


def written(state: State, pace: Pace, decision: Decision, now: float) -> State:
    """Apply that all writes of a decision succeeded."""
    if decision.leftover:
        return state
    again = state.repairs if now - state.repaired_at < pace.calm else 0
    found = replace(state, sent=decision.pool, written_at=now, failures=0)
    return replace(found, repairs=again + 1, repaired_at=now, disturbed=None) if decision.repair else found


def settled(state: State, decision: Decision) -> State:
    """Apply that the pool is as desired."""
    names = state.slices or {}
    return replace(
        state,
        sent=decision.pool,
        disturbed=None,
        failures=0,
        curtailed={name: each for name, each in state.curtailed.items() if name in names},
        leftovers={name: at for name, at in state.leftovers.items() if name in names},
    )


def failed(
    state: State, pace: Pace, now: float, *, status: int = 0, retry_after: float | None = None, jitter: float = 1.0
) -> State:
    """Apply a failed request.

    ``status`` is the HTTP status, 0 for no answer. ``retry_after`` is the wait in seconds that the server requested.
    ``jitter`` is a random factor up to 1 for the wait: nodes whose requests failed at the same time must not retry at
    the same time.

    After status 422 (the first of ASK_EVERY failures in a row), and after a failed check of the server, the version and
    features of the server count as unknown.
    """
    number = state.failures + 1
    first = pace.conflict if status in OUTDATED and number <= QUICK_CONFLICTS else pace.retry
    limit = pace.refused_limit if status in REFUSED and number > QUICK_REFUSALS else pace.retry_limit
    wait = min(first * 2.0 ** min(number - 1, 30), limit) * jitter
    found = replace(state, failures=number, failed_status=status, not_before=now + wait, written_at=now)
    if (status == INVALID and number % ASK_EVERY == 1) or (state.check_at is not None and state.check_at <= now):
        found = replace(found, server=None, check_at=None)
    return replace(found, retry_at=now + retry_after) if retry_after is not None else found


def refused(state: State, pace: Pace, name: str, now: float) -> State:
    """Apply a refused removal of a slice of another pool. It does not affect this pool."""
    return replace(state, leftovers={**state.leftovers, name: now + pace.leftover})


# ---------------------------------------------------------------------- features of the server


def probe(identity: Identity, content: Content, layout: str, owner: Owner | None) -> Json | None:
    """Return a slice for a dry run, whose answer shows which fields the server keeps; None if all are known.

    The slice has all fields that the server may drop, and counters where this version expects them.
    """
    content, _withheld = fit(content, (), layout)
    content, _invalid = without_invalid(content)
    # A group needs only features that its members need too.
    offers = [offer for offer in content.offers if needs(offer) and not offer.members]
    if not offers:
        return None
    chosen: dict[frozenset[str], Offer] = {}
    for offer in offers:
        chosen.setdefault(needs(offer), offer)
    pool = build_pool(
        driver=identity.driver,
        pool=identity.pool,
        node_name=identity.node_name,
        offers=[_probing(offer) for offer in chosen.values()],
        counter_sets=[PROBE_COUNTERS],
        layout=layout,
    )
    # The probe has the real node, driver, and pool, so a policy accepts it if it would accept a write.
    plan = plan_pool(replace(pool, slices=pool.slices[-1:]), (), owner=owner)
    return plan.writes[0].body


def _probing(offer: Offer) -> Offer:
    """Return the offer as one of the probe's device, with the one counter that fits into one slice in any version."""
    taken = {PROBE_COUNTERS.name: PROBE_COUNTERS.counters} if offer.taken else {}
    return replace(offer, device_uuid="probe", counter_set=None, consumes={}, jointly=taken)


def lost(sent: Mapping[str, Any], answer: Mapping[str, Any]) -> frozenset[str]:
    """Return the features that the server dropped from a sent object."""
    return frozenset(
        feature
        for feature, word in (
            ("taints", "taints of"),
            ("counters", "consumesCounters of"),
            ("counters", "sharedCounters"),
            ("shares", "allowMultipleAllocations of"),
            ("bindingConditions", "bindingConditions of"),
        )
        if any(word in text for text in dropped_fields(sent, answer))
    )


def _kept(sent: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    spec = sent["spec"]
    content = SliceContent(tuple(spec.get("devices") or ()), tuple(spec.get("sharedCounters") or ()))
    return same_content(content, answer["spec"])


def _as_sent(state: State, name: str, item: Json) -> Json:
    known = state.curtailed.get(name)
    return {**item, "spec": known[0]} if known is not None and known[1] == item["spec"] else item


def newer(item: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether an object is newer than the known one."""
    new, old = (str(entry["metadata"].get("resourceVersion", "")) for entry in (item, known))
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old


def _versions(slices: Mapping[str, Json]) -> dict[str, Any]:
    return {name: item["metadata"].get("resourceVersion") for name, item in slices.items()}
