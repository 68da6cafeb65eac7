# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Who acts: never two at a time, whatever the API server, the network and the clocks do; and always somebody in the end."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

from dra_driver.controller.lease import (
    CREATE,
    RENEW,
    TAKE,
    WAIT,
    Record,
    Seen,
    Terms,
    decide,
    lease_of,
    look,
    record_of,
)
from hypothesis import given
from hypothesis import strategies as st

TERMS = Terms()
END = 300.0


@dataclass
class Candidate:
    """One process with a clock of its own: it began anywhere and runs up to 10 % fast or slow."""

    name: str
    offset: float
    rate: float
    alive_from: float
    dies_at: float
    cuts: list[tuple[float, float]]
    seen: Seen | None = None
    until: float = float("-inf")
    spans: list[tuple[float, float]] = field(default_factory=list)

    def alive(self, now: float) -> bool:
        return self.alive_from <= now < self.dies_at

    def cut_off(self, now: float) -> bool:
        return any(start <= now < end for start, end in self.cuts)

    def clock(self, now: float) -> float:
        return self.offset + self.rate * now

    def true_time(self, clock: float) -> float:
        return (clock - self.offset) / self.rate


class Server:
    """Keeps one Lease with optimistic locking; somebody may delete it."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.versions = itertools.count(1)

    def write(self, body: dict[str, Any]) -> dict[str, Any] | None:
        given = body["metadata"].get("resourceVersion")
        present = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if given != present:
            return None
        metadata = {**body["metadata"], "resourceVersion": str(next(self.versions))}
        self.lease = {**body, "metadata": metadata}
        return self.lease


class Simulation:
    """Some candidates, one Lease, and a network that is late, loses answers, and cuts a candidate off for a while."""

    def __init__(self, draw: random.Random, terms: Terms) -> None:
        self.draw = draw
        self.terms = terms
        self.server = Server()
        self.order = itertools.count()
        self.queue: list[tuple[float, int, Any]] = []
        self.candidates = [
            Candidate(
                name,
                draw.uniform(-1e6, 1e6),
                draw.uniform(0.9, 1.1),
                draw.choice((0.0, draw.uniform(0, 60))),
                draw.uniform(30, 2 * END),
                [(cut, cut + draw.uniform(5, 40)) for cut in (draw.uniform(0, END) for _number in range(4))],
            )
            for name in ("one", "two", "three")
        ]

    def run(self) -> list[tuple[float, float, str]]:
        """When each candidate may have acted."""
        for candidate in self.candidates:
            self.at(candidate.alive_from, functools.partial(self.begin, candidate))
        for _number in range(self.draw.choice((0, 0, 3))):
            self.at(self.draw.uniform(0, END), lambda _now: setattr(self.server, "lease", None))
        while self.queue and self.queue[0][0] < END:
            now, _number, what = heapq.heappop(self.queue)
            what(now)
        return sorted((start, end, each.name) for each in self.candidates for start, end in each.spans)

    def at(self, when: float, what: Any) -> None:
        heapq.heappush(self.queue, (when, next(self.order), what))

    def delay(self) -> float:
        return self.draw.uniform(0, 0.2) if self.draw.random() < 0.9 else self.draw.uniform(0, 25)

    def begin(self, candidate: Candidate, now: float) -> None:
        if not candidate.alive(now):
            return
        if candidate.cut_off(now):
            self.at(now + self.terms.retry_seconds, functools.partial(self.begin, candidate))
        else:
            self.at(now + self.delay(), functools.partial(self.read, candidate))

    def read(self, candidate: Candidate, now: float) -> None:
        record = record_of(self.server.lease) if self.server.lease else None
        self.at(now + self.delay(), functools.partial(self.decided, candidate, record))

    def decided(self, candidate: Candidate, record: Record | None, now: float) -> None:
        if not candidate.alive(now):
            return
        candidate.seen = look(candidate.seen, record, candidate.clock(now))
        sent = candidate.clock(now)
        again = now + self.terms.retry_seconds
        step = decide(candidate.seen, candidate.name, sent, self.terms)
        if step != WAIT:
            body = lease_of("l", "n", "" if step == CREATE else candidate.name, record, self.terms, "now")
            arrives = now + self.delay()
            self.at(arrives, functools.partial(self.written, candidate, body, sent))
            again = max(again, arrives + 1)
        self.at(again, functools.partial(self.begin, candidate))

    def written(self, candidate: Candidate, body: dict[str, Any], sent: float, now: float) -> None:
        answer = self.server.write(body)
        if answer is not None and self.draw.random() < 0.9:
            self.at(now + self.delay(), functools.partial(self.answered, candidate, answer, sent))

    def answered(self, candidate: Candidate, answer: dict[str, Any], sent: float, now: float) -> None:
        if not candidate.alive(now):
            return
        candidate.seen = Seen(record_of(answer), candidate.clock(now))
        if candidate.seen.record.holder != candidate.name:
            return
        candidate.until = max(candidate.until, sent + self.terms.renew_seconds)
        end = min(candidate.true_time(candidate.until), candidate.dies_at)
        if end > now:
            candidate.spans.append((now, end))


def together(spans: list[tuple[float, float, str]]) -> list[str]:
    """Where two acted at a time."""
    return [
        f"{holder} until {end:.1f}, {other} from {start:.1f}"
        for (_start, end, holder), (start, _end, other) in itertools.combinations(spans, 2)
        if holder != other and start < end
    ]


@given(seed=st.integers(0, 2**32))
def test_never_two_act_at_a_time_and_somebody_does(seed: int) -> None:
    spans = [Simulation(random.Random(f"{seed}-{number}"), TERMS).run() for number in range(10)]
    assert [found for each in spans for found in together(each)] == []
    # A candidate may be cut off or dead in all of one simulation's time; of ten not most.
    assert sum(bool(each) for each in spans) > 5
    assert len({name for each in spans for _start, _end, name in each}) > 1, "the Lease changes hands"


def test_the_simulation_finds_terms_that_are_too_close() -> None:
    wrong = Terms(lease_seconds=15.0, renew_seconds=16.0, retry_seconds=2.0)
    assert any(together(Simulation(random.Random(seed), wrong).run()) for seed in range(200))


@given(
    seen=st.builds(
        Seen,
        st.one_of(
            st.none(),
            st.builds(
                Record, st.sampled_from(("", "me", "other")), st.just("1"), st.just(0), st.sampled_from(("", "t"))
            ),
        ),
        st.floats(0, 100),
    ),
    now=st.floats(0, 1000),
)
def test_decisions(seen: Seen, now: float) -> None:
    step = decide(seen, "me", now, TERMS)
    waited = now - seen.since >= TERMS.lease_seconds
    holder = seen.record.holder if seen.record else None
    given_up = seen.record is not None and seen.record.acquired != "" and not seen.record.holder
    expected = {None: CREATE, "me": RENEW}.get(holder, TAKE if waited or given_up else WAIT)
    assert step == expected


def test_only_a_change_begins_the_wait_anew() -> None:
    record = Record("other", "1")
    seen = look(None, record, 5.0)
    assert look(seen, record, 9.0) is seen
    assert look(seen, replace(record, version="2"), 9.0).since == 9.0
    assert look(seen, None, 9.0) == Seen(None, 9.0)


def test_what_is_written_counts_takeovers_and_gives_up() -> None:
    def stored(lease: dict[str, Any]) -> Record:
        return record_of({**lease, "metadata": {**lease["metadata"], "resourceVersion": "7"}})

    made = lease_of("l", "n", "", None, TERMS, "t0")
    assert "resourceVersion" not in made["metadata"] and "acquireTime" not in made["spec"]
    taken = lease_of("l", "n", "one", stored(made), TERMS, "t1")
    assert (taken["spec"]["holderIdentity"], taken["spec"]["leaseTransitions"]) == ("one", 1)
    renewed = lease_of("l", "n", "one", stored(taken), TERMS, "t2")
    assert (renewed["spec"]["acquireTime"], renewed["spec"]["renewTime"]) == ("t1", "t2")
    assert renewed["metadata"]["resourceVersion"] == "7" and renewed["spec"]["leaseTransitions"] == 1
    assert lease_of("l", "n", "two", stored(renewed), TERMS, "t3")["spec"]["leaseTransitions"] == 2
    given_up = lease_of("l", "n", "", stored(renewed), TERMS, "t3")
    assert (given_up["spec"]["holderIdentity"], given_up["spec"]["leaseDurationSeconds"]) == ("", 1)
    assert decide(Seen(stored(given_up), 0.0), "two", 0.0, TERMS) == TAKE
    assert decide(Seen(stored(made), 0.0), "two", 0.0, TERMS) == WAIT
