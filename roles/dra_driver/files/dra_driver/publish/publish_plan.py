# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Decide what to write to the API server, and when, as a pure function of current state, desired state, and time.

``decide`` takes a State and returns writes, a query, or the time of its next call. The other functions return the State
after a result: a list, a watch event, an answer, or a failure. This module reads no clock and does no I/O.

The driver writes its own changes at once. It reverts changes by other programs after a delay, which increases if they
repeat. Facts: the kubelet removes slices at its start, pools have generations, and the server drops fields of disabled
feature gates.
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
from .api_compatibility import (
    BINDING,
    COUNTERS,
    SHARES,
    TAINTS,
    Content,
    Withheld,
    fit_to_server,
    needed_features,
    without_invalid,
)

Json = dict[str, Any]
Owner = Mapping[str, Any]

# From this version on, counters are in separate slices.
SEPARATE_COUNTERS_FROM = (1, 35)
PROBE_COUNTERS = CounterSet("probe", {"probe": 1})
# The server's status if an object has changed since the plan was made.
OUTDATED = (404, 409)
# A new list ends the wait before a retry only for this number of conflicts in a row. Further conflicts probably have another
# cause, for example a policy.
FAST_CONFLICTS = 2
# If failure number 1, 9, 17, and so on in a row has status 422, the driver queries the version and the features of the API
# server again.
QUERY_SERVER_EVERY = 8
# The server's status if it does not accept the form of an object, for example after an upgrade.
INVALID = 422
# After this number of failures in a row, a refused pool is retried less often.
FAST_REFUSALS = 10
# The statuses with which a policy or the API server refuses a slice. Other statuses are temporary, or concern all slices.
REFUSED = (400, 403, INVALID)


@dataclass(frozen=True)
class Pace:
    """Time limits, in seconds.

    ``gap`` is the minimum between two publications. ``settle`` is the wait after the last change by others (the kubelet
    deletes slices one by one). It doubles with each repetition up to ``settle_limit``, and is reset after ``calm``.
    ``retry`` and ``conflict`` are the first waits after a failure and after a conflicting change. Each further wait is
    twice as long, up to ``retry_limit``, or up to ``refused_limit`` after ten attempts if the server refuses the pool itself. ``leftover``
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
    """What the driver knows about the API server.

    ``layout`` is SEPARATE or COMBINED: whether counters are in separate slices. ``known`` are the verified features (see
    api_compatibility.GATES), and ``drops`` the features whose fields the server drops.
    """

    layout: str = SEPARATE
    known: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()


@dataclass(frozen=True)
class State:
    """The known state. All times are of one clock.

    ``slices`` is None until the first list, and ``server`` is None until it was queried. ``annotations`` are those of the
    pool, as in PoolSpec. ``check_at`` is when a known server is queried again (None: not planned). ``is_owner_doubtful`` is
    whether ``owner`` must be read again. ``sent`` is the last completely published pool. ``changed_by_server`` contains, by
    slice name, the sent spec and the server's version of it, if they differ. ``foreign_changes`` are the times of the first
    and the last change by others since the last publication. ``repairs`` counts recent reversions of such changes.
    ``failures`` counts failures in a row, and ``failed_status`` is the HTTP status of the last one (0: no answer).
    ``not_before`` ends a wait after a failure, and ``retry_at`` a wait that the server requested. ``leftovers`` contains,
    by name, when the removal of a slice of another pool is retried.
    """

    content: Content | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    slices: Mapping[str, Json] | None = None
    server: Server | None = None
    check_at: float | None = None
    owner: Owner | None = None
    is_owner_doubtful: bool = True
    sent: PoolSpec | None = None
    changed_by_server: Mapping[str, tuple[Json, Json]] = field(default_factory=dict)
    written_at: float = float("-inf")
    foreign_changes: tuple[float, float] | None = None
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

    query_server: bool = False
    query_owner: bool = False
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
    """Return the next action at the time ``now``."""
    decision = _decide(identity, pace, state, now)
    if state.check_at is None or decision.pool is None:
        return decision
    due = max(state.check_at, state.not_before, state.retry_at)
    if now >= due:
        return replace(decision, query_server=True)
    return replace(decision, wake_at=due if decision.wake_at is None else min(decision.wake_at, due))


def _decide(identity: Identity, pace: Pace, state: State, now: float) -> Decision:
    if state.content is None or state.slices is None:
        return Decision()
    wait_end = max(state.not_before, state.retry_at)
    if state.server is None or features_needed_by(state.content) - state.server.known:
        return Decision(query_server=True) if now >= wait_end else Decision(wake_at=wait_end)
    content, withheld = fit_to_server(state.content, state.server.drops, state.server.layout)
    try:
        pool = _build(identity, content, state.server.layout, state.annotations)
    except ValueError:
        # One invalid device is enough for that error. The other devices are published without it.
        content, invalid = without_invalid(content)
        withheld += invalid
        try:
            pool = _build(identity, content, state.server.layout, state.annotations)
        except ValueError as error:
            return Decision(problem=str(error))
    existing = [_without_server_changes(state, name, item) for name, item in sorted(state.slices.items())]
    plan = plan_pool(pool, existing, owner=state.owner)
    decision = Decision(pool=pool, generation=plan.generation, withheld=withheld)
    if not plan.writes and state.owner is not None:
        return _remove_previous_pools(identity, replace(decision, current=True), state, existing, now)
    repair = state.sent == pool
    earliest = max(wait_end, state.written_at + pace.gap)
    if repair and state.foreign_changes is not None:
        first, last = state.foreign_changes
        earliest = max(earliest, min(last + repair_delay(pace, state, now), first + pace.settle_limit))
    if now < earliest:
        return replace(decision, wake_at=earliest)
    if state.owner is None or state.is_owner_doubtful:
        # The cluster deletes slices that refer to a Node's previous UID as garbage.
        return replace(decision, query_owner=True)
    return replace(decision, writes=plan.writes, repair=repair)


def _build(identity: Identity, content: Content, layout: str, annotations: Mapping[str, str]) -> PoolSpec:
    """Return the pool with this content. Raises ValueError for content that the API server would reject."""
    return build_pool(
        driver=identity.driver,
        pool=identity.pool,
        node_name=identity.node_name,
        offers=content.offers,
        counter_sets=content.counter_sets,
        layout=layout,
        notes=annotations,
    )


def _remove_previous_pools(
    identity: Identity, decision: Decision, state: State, existing: Iterable[Mapping[str, Any]], now: float
) -> Decision:
    """Return the decision for a complete pool: remove slices of previous pool names."""
    items = list(existing)
    previous_pools = sorted({item["spec"]["pool"]["name"] for item in items} - {identity.pool})
    removals = [write for name in previous_pools for write in plan_removal(identity.driver, name, items).writes]
    retry_at = {
        write.name: max(state.leftovers.get(write.name, 0.0), state.retry_at, state.not_before) for write in removals
    }
    due = tuple(write for write in removals if retry_at[write.name] <= now)
    if due:
        return replace(decision, writes=due, leftover=True)
    return replace(decision, wake_at=min(retry_at.values(), default=None))


def repair_delay(pace: Pace, state: State, now: float) -> float:
    """Return the seconds to wait after changes by others before they are reverted."""
    return min(pace.settle * 2.0 ** min(_recent_repairs(pace, state, now), 16), pace.settle_limit)


def _recent_repairs(pace: Pace, state: State, now: float) -> int:
    """Return how many times changes by others were reverted recently."""
    return state.repairs if now - state.repaired_at < pace.calm else 0


# ---------------------------------------------------------------------- results


def with_list(state: State, items: Iterable[Json], now: float) -> State:
    """Apply the complete list of the server's slices.

    The wait before a retry ends in any of these cases: the list differs from the known one, the last request got no
    answer, or the last failure was one of the first FAST_CONFLICTS conflicts in a row.
    """
    slices = {str(item["metadata"]["name"]): item for item in items}
    changed = state.slices is not None and _versions(slices) != _versions(state.slices)
    quick = state.failed_status == 0 or (state.failed_status in OUTDATED and state.failures <= FAST_CONFLICTS)
    found = replace(state, slices=slices, not_before=float("-inf") if changed or quick else state.not_before)
    return _with_foreign_change(found, now) if changed else found


def needs_list(state: State) -> bool:
    """Return whether the slices must be listed after the last failure.

    This is so after conflicts, but only after the first, second, fourth, eighth, and so on in a row.
    """
    return state.failed_status in OUTDATED and state.failures & (state.failures - 1) == 0


def after_interruption(state: State) -> State:
    """Apply a lost connection: the server may return with another version or other gates, and the Node may be a new one."""
    return replace(state, server=None, is_owner_doubtful=True)


def after_watch_end(state: State, check_at: float) -> State:
    """Plan to query the server again after a regular end of a watch, which also happens before an upgrade."""
    earliest = check_at if state.check_at is None else min(state.check_at, check_at)
    return replace(state, check_at=earliest, is_owner_doubtful=True)


def after_watch_start(state: State, check_at: float) -> State:
    """Plan to query the server again, unless that is planned: another server may answer now."""
    return replace(state, check_at=check_at) if state.check_at is None else state


def with_watch_event(state: State, kind: str, item: Json, now: float) -> State:
    """Apply one change from the watch. The driver's own writes have no effect here, because their answers are known."""
    slices, name = dict(state.slices or {}), str(item["metadata"]["name"])
    known = slices.get(name)
    if kind == "DELETED":
        if known is None or known["metadata"].get("uid") != item["metadata"].get("uid"):
            return state
        del slices[name]
    else:
        if known is not None and not is_newer(item, known):
            return state
        slices[name] = item
    return _with_foreign_change(replace(state, slices=slices), now)


def _with_foreign_change(state: State, now: float) -> State:
    first = state.foreign_changes[0] if state.foreign_changes is not None else now
    return replace(state, foreign_changes=(first, now), is_owner_doubtful=True)


def with_owner(state: State, owner: Owner) -> State:
    """Set the Node object that owns the slices."""
    return replace(state, owner=dict(owner), is_owner_doubtful=False)


def with_server_features(state: State, version: tuple[int, int], sent: Json | None, answer: Json | None) -> State:
    """Set the server's features from its version and its answer to a probe (None: no probe, or no answer)."""
    known = frozenset() if state.content is None else features_needed_by(state.content)
    if sent is None:
        drops: frozenset[str] = frozenset()
    elif answer is not None:
        drops = dropped_features(sent, answer)
    else:
        # A known server that rejects the probe still drops what it dropped from earlier writes.
        drops = state.server.drops if state.server is not None else frozenset()
    return replace(state, server=Server(layout_of(version), known, drops), check_at=None)


def layout_of(version: tuple[int, int]) -> str:
    """Return where a server of this version expects counters."""
    return SEPARATE if version >= SEPARATE_COUNTERS_FROM else COMBINED


def features_needed_by(content: Content) -> frozenset[str]:
    """Return the features that the content needs."""
    return frozenset().union(*(needed_features(offer) for offer in content.offers))


def with_answer(state: State, write: SliceWrite, answer: Json | None) -> State:
    """Apply a successful write. ``answer`` is the object as the server stored it."""
    slices, changed_by_server = dict(state.slices or {}), dict(state.changed_by_server)
    if write.body is None or answer is None:
        slices.pop(write.name, None)
        changed_by_server.pop(write.name, None)
        leftovers = {name: at for name, at in state.leftovers.items() if name != write.name}
        return replace(state, slices=slices, changed_by_server=changed_by_server, leftovers=leftovers)
    name = str(answer["metadata"]["name"])
    slices[name] = answer
    changed_by_server.pop(name, None)
    server = state.server or Server()
    if not _is_stored_unchanged(write.body, answer):
        # Accept the server's version of the slice, or the slice would be written again and again.
        changed_by_server[name] = (dict(write.body["spec"]), dict(answer["spec"]))
        server = replace(server, drops=server.drops | dropped_features(write.body, answer))
    return replace(state, slices=slices, changed_by_server=changed_by_server, server=server)


def after_writes(state: State, pace: Pace, decision: Decision, now: float) -> State:
    """Apply that all writes of a decision succeeded."""
    if decision.leftover:
        return state
    found = replace(state, sent=decision.pool, written_at=now, failures=0)
    return (
        replace(found, repairs=_recent_repairs(pace, state, now) + 1, repaired_at=now, foreign_changes=None)
        if decision.repair
        else found
    )


def when_current(state: State, decision: Decision) -> State:
    """Apply that the pool is as desired."""
    names = state.slices or {}
    return replace(
        state,
        sent=decision.pool,
        foreign_changes=None,
        failures=0,
        changed_by_server={name: each for name, each in state.changed_by_server.items() if name in names},
        leftovers={name: at for name, at in state.leftovers.items() if name in names},
    )


def after_failure(
    state: State, pace: Pace, now: float, *, status: int = 0, retry_after: float | None = None, jitter: float = 1.0
) -> State:
    """Apply a failed request.

    ``status`` is the HTTP status, 0 for no answer. ``retry_after`` is the wait in seconds that the server requested.
    ``jitter`` is a random factor up to 1 for the wait: nodes whose requests failed at the same time must not retry at
    the same time.

    The version and features of the server become unknown in two cases: failure 1, 9, 17, and so on (QUERY_SERVER_EVERY) in a row
    has status 422, or a planned check of the server fails.
    """
    number = state.failures + 1
    first = pace.conflict if status in OUTDATED and number <= FAST_CONFLICTS else pace.retry
    limit = pace.refused_limit if status in REFUSED and number > FAST_REFUSALS else pace.retry_limit
    wait = min(first * 2.0 ** min(number - 1, 30), limit) * jitter
    found = replace(state, failures=number, failed_status=status, not_before=now + wait, written_at=now)
    if (status == INVALID and number % QUERY_SERVER_EVERY == 1) or (
        state.check_at is not None and state.check_at <= now
    ):
        found = replace(found, server=None, check_at=None)
    return replace(found, retry_at=now + retry_after) if retry_after is not None else found


def after_refused_removal(state: State, pace: Pace, name: str, now: float) -> State:
    """Apply a refused removal of a slice of another pool. It does not affect this pool."""
    return replace(state, leftovers={**state.leftovers, name: now + pace.leftover})


# ---------------------------------------------------------------------- features of the server


def probe_slice(identity: Identity, content: Content, layout: str, owner: Owner | None) -> Json | None:
    """Return a slice for a dry run. The server's answer shows which fields it keeps.

    Returns None if no device needs a field that a server may drop. The slice has all fields that the server may drop, and
    counters where this version expects them.
    """
    content, _withheld = fit_to_server(content, (), layout)
    content, _invalid = without_invalid(content)
    # A group needs only features that its members need too.
    offers = [offer for offer in content.offers if needed_features(offer) and not offer.members]
    if not offers:
        return None
    chosen: dict[frozenset[str], Offer] = {}
    for offer in offers:
        chosen.setdefault(needed_features(offer), offer)
    pool = build_pool(
        driver=identity.driver,
        pool=identity.pool,
        node_name=identity.node_name,
        offers=[_as_probe_device(offer) for offer in chosen.values()],
        counter_sets=[PROBE_COUNTERS],
        layout=layout,
    )
    # The probe has the real node, driver, and pool, so a policy accepts it if it would accept a write.
    plan = plan_pool(replace(pool, slices=pool.slices[-1:]), (), owner=owner)
    return plan.writes[0].body


def _as_probe_device(offer: Offer) -> Offer:
    """Return the offer as a probe device. It consumes only the probe counter, which fits into one slice in all versions."""
    counters = {PROBE_COUNTERS.name: PROBE_COUNTERS.counters} if offer.all_counters else {}
    return replace(offer, device_uuid="probe", counter_set=None, consumes={}, joint_counters=counters)


def dropped_features(sent: Mapping[str, Any], answer: Mapping[str, Any]) -> frozenset[str]:
    """Return the features that the server dropped from a sent object."""
    return frozenset(
        feature
        for feature, field_text in (
            (TAINTS, "taints of"),
            (COUNTERS, "consumesCounters of"),
            (COUNTERS, "sharedCounters"),
            (SHARES, "allowMultipleAllocations of"),
            (BINDING, "bindingConditions of"),
        )
        if any(field_text in text for text in dropped_fields(sent, answer))
    )


def _is_stored_unchanged(sent: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    spec = sent["spec"]
    content = SliceContent(tuple(spec.get("devices") or ()), tuple(spec.get("sharedCounters") or ()))
    return same_content(content, answer["spec"])


def _without_server_changes(state: State, name: str, item: Json) -> Json:
    """Return the slice as the driver sent it, if the stored one differs only by the server's changes."""
    change = state.changed_by_server.get(name)
    if change is None:
        return item
    sent, stored = change
    return {**item, "spec": sent} if stored == item["spec"] else item


def is_newer(item: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether an object is newer than the known one."""
    new, old = (str(entry["metadata"].get("resourceVersion", "")) for entry in (item, known))
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old


def _versions(slices: Mapping[str, Json]) -> dict[str, Any]:
    return {name: item["metadata"].get("resourceVersion") for name, item in slices.items()}
