# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What to write to the API server, and when: a pure function of what is there, what is wanted and what time it is.

``decide`` looks at a State and answers with writes, with a question, or with the time at which to ask again. The other
functions take what happened (a list, a change that was seen, an answer, a failure) into the next State. Nothing here
waits, reads a clock or talks to anybody.

Own changes are written at once, whatever others do. What others do to the slices is undone when they seem done with it,
ever more slowly if they do it again and again. Facts: the kubelet's start-up wipe, pool generations, fields that the
server drops where a feature gate is off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.model import Offer
from ..core.slices import (
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
from .fit import Content, Withheld, fit, needs, without_invalid

Json = dict[str, Any]
Owner = Mapping[str, Any]

# From this version on, counters are in slices of their own.
SEPARATE_COUNTERS_FROM = (1, 35)
# What the server answers with when an object is not the one that the plan was made for.
OUTDATED = (404, 409)
# The API server answers with this where it does not accept the form of an object, for example after an upgrade.
INVALID = 422


@dataclass(frozen=True)
class Pace:
    """How fast, in seconds.

    ``gap`` is between two publications. ``settle`` is how long others are left to finish what they do to the slices (the
    kubelet deletes them one by one), doubled each time up to ``settle_limit``; forgotten after ``calm``. ``retry`` and
    ``conflict`` are the first waits after a failure and after a change that got in between, doubled up to
    ``retry_limit``. ``leftover`` is how long a slice stays that may not be removed, until the next try.
    """

    gap: float = 0.25
    settle: float = 1.0
    settle_limit: float = 30.0
    calm: float = 120.0
    retry: float = 0.5
    conflict: float = 0.05
    retry_limit: float = 30.0
    leftover: float = 600.0


@dataclass(frozen=True)
class Identity:
    """Whose pool it is."""

    driver: str
    pool: str
    node_name: str


@dataclass(frozen=True)
class Server:
    """What the API server can keep: where counters go; which features (see fit.GATES) are known of, and it drops."""

    layout: str = SEPARATE
    known: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()


@dataclass(frozen=True)
class State:
    """All that is known. ``slices`` None: never listed. ``server`` None: has to be asked. Times are of one clock.

    ``notes`` are annotations of the pool, as in PoolSpec. ``check_at`` is when a known server is asked again (None: not
    planned). ``sent`` is the pool that was last seen complete. ``curtailed`` holds by slice
    name what was sent and what the server made of it, where that is not the same. ``not_before`` ends a wait after a failure, ``told`` one
    that the server asked for. ``leftovers`` says when the removal of a slice of another pool is tried again.
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
    not_before: float = float("-inf")
    told: float = float("-inf")
    leftovers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What to do now: ask for the ``server`` or the ``owner``, or write, or wait until ``wake_at`` (None: for news).

    ``current`` says that the pool is as wanted, ``repair`` that the writes undo what others did. ``leftover`` marks
    writes that remove slices of another pool name. ``problem`` is why the content cannot be published at all.
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
    due = max(state.check_at, state.not_before, state.told)
    if now >= due:
        return replace(decision, ask_server=True)
    return replace(decision, wake_at=due if decision.wake_at is None else min(decision.wake_at, due))


def _decide(identity: Identity, pace: Pace, state: State, now: float) -> Decision:
    if state.content is None or state.slices is None:
        return Decision()
    waited = max(state.not_before, state.told)
    if state.server is None or needed(state.content) - state.server.known:
        return Decision(ask_server=True) if now >= waited else Decision(wake_at=waited)
    content, withheld = fit(state.content, state.server.drops, state.server.layout)
    try:
        pool = _build(identity, content, state.server.layout, state.notes)
    except ValueError:
        # One device is enough for that: the other devices are published without it.
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
        # Slices of a node that was made anew with another UID are garbage to the cluster.
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
    """The pool is right: what is left is to remove slices of pool names that the configuration had before."""
    items = list(existing)
    former = sorted({item["spec"]["pool"]["name"] for item in items} - {identity.pool})
    removals = [write for name in former for write in plan_removal(identity.driver, name, items).writes]
    at = {write.name: max(state.leftovers.get(write.name, 0.0), state.told, state.not_before) for write in removals}
    due = tuple(write for write in removals if at[write.name] <= now)
    if due:
        return replace(decision, writes=due, leftover=True)
    return replace(decision, wake_at=min(at.values(), default=None))


def patience(pace: Pace, state: State, now: float) -> float:
    """How long others are left alone with the slices before what they did is undone."""
    again = state.repairs if now - state.repaired_at < pace.calm else 0
    return min(pace.settle * 2.0 ** min(again, 16), pace.settle_limit)


# ---------------------------------------------------------------------- what happened


def wanted(state: State, content: Content) -> State:
    """The pool is to hold this from now on."""
    return replace(state, content=content)


def noted(state: State, notes: Mapping[str, str]) -> State:
    """The pool is to bear these annotations from now on."""
    return replace(state, notes=dict(notes))


def listed(state: State, items: Iterable[Json], now: float) -> State:
    """The server's slices, whole. It answers: what failed may be tried again, unless it asked for patience."""
    slices = {str(item["metadata"]["name"]): item for item in items}
    changed = state.slices is not None and _versions(slices) != _versions(state.slices)
    found = replace(state, slices=slices, not_before=float("-inf"))
    return _disturbed(found, now) if changed else found


def interrupted(state: State) -> State:
    """The connection was lost: the server may come back as another version, with other gates, and the node anew."""
    return replace(state, server=None, owner_doubtful=True)


def watch_ended(state: State, check_at: float) -> State:
    """Plan to ask the server again: it ended a watch in order, which it also does before it is upgraded."""
    earliest = check_at if state.check_at is None else min(state.check_at, check_at)
    return replace(state, check_at=earliest, owner_doubtful=True)


def seen(state: State, kind: str, item: Json, now: float) -> State:
    """One change in the watch. Our own writes come back in it and change nothing: they are known from the answer."""
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
    """The node's object, which owns the slices."""
    return replace(state, owner=dict(owner), owner_doubtful=False, failures=0)


def asked(state: State, version: tuple[int, int], sent: Json | None, answer: Json | None) -> State:
    """What the server can keep: its version, and what it made of a probe (None: there was none, or no answer)."""
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
    """Return where a server of this version wants counters."""
    return SEPARATE if version >= SEPARATE_COUNTERS_FROM else COMBINED


def needed(content: Content) -> frozenset[str]:
    """Return the features that the content needs."""
    return frozenset().union(*(needs(offer) for offer in content.offers))


def answered(state: State, write: SliceWrite, answer: Json | None) -> State:
    """One write was made; ``answer`` is what the server made of it."""
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
        # Take what the server made of it as the best that can be had, or it would be written over and over.
        curtailed[name] = (dict(write.body["spec"]), dict(answer["spec"]))
        server = replace(server, drops=server.drops | lost(write.body, answer))
    return replace(state, slices=slices, curtailed=curtailed, server=server)


def written(state: State, pace: Pace, decision: Decision, now: float) -> State:
    """All writes of a decision were made."""
    if decision.leftover:
        return state
    again = state.repairs if now - state.repaired_at < pace.calm else 0
    found = replace(state, sent=decision.pool, written_at=now, failures=0)
    return replace(found, repairs=again + 1, repaired_at=now, disturbed=None) if decision.repair else found


def settled(state: State, decision: Decision) -> State:
    """The pool was found as wanted."""
    names = state.slices or {}
    return replace(
        state,
        sent=decision.pool,
        disturbed=None,
        failures=0,
        curtailed={name: each for name, each in state.curtailed.items() if name in names},
        leftovers={name: at for name, at in state.leftovers.items() if name in names},
    )


def failed(state: State, pace: Pace, now: float, *, status: int = 0, retry_after: float | None = None) -> State:
    """A request failed; ``status`` is the HTTP status, 0 for no answer, ``retry_after`` what the server asked for.

    After status 422, and after a failed check of the server, the version and features of the server count as unknown.
    """
    number = state.failures + 1
    first = pace.conflict if status in OUTDATED else pace.retry
    wait = min(first * 2.0 ** min(number - 1, 30), pace.retry_limit)
    found = replace(state, failures=number, not_before=now + wait, written_at=now)
    if status == INVALID or (state.check_at is not None and state.check_at <= now):
        found = replace(found, server=None, check_at=None)
    return replace(found, told=now + retry_after) if retry_after is not None else found


def refused(state: State, pace: Pace, name: str, now: float) -> State:
    """A slice of another pool may not be removed. That is somebody's business, and not the pool's."""
    return replace(state, leftovers={**state.leftovers, name: now + pace.leftover})


# ---------------------------------------------------------------------- what the server can keep


def probe(identity: Identity, content: Content, layout: str, owner: Owner | None) -> Json | None:
    """Return a slice to send as a dry run, so that the answer shows what would be kept; None: nothing is in doubt.

    It is one device of the content's with all that the server may drop, and the counters where they go beside it.
    """
    content, _withheld = fit(content, (), layout)
    content, _invalid = without_invalid(content)
    # What stands for several devices needs nothing that its members do not need as well.
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
        offers=[replace(offer, device_uuid="probe") for offer in chosen.values()],
        counter_sets=content.counter_sets,
        layout=layout,
    )
    # Node, driver and pool are the own ones: the probe passes where a write would.
    plan = plan_pool(replace(pool, slices=pool.slices[-1:]), (), owner=owner)
    return plan.writes[0].body


def lost(sent: Mapping[str, Any], answer: Mapping[str, Any]) -> frozenset[str]:
    """Return the features of ours that the server dropped."""
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
    """Whether an object is of a later time than the known one."""
    new, old = (str(entry["metadata"].get("resourceVersion", "")) for entry in (item, known))
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old


def _versions(slices: Mapping[str, Json]) -> dict[str, Any]:
    return {name: item["metadata"].get("resourceVersion") for name, item in slices.items()}
