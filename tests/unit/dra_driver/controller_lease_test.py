# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Leader election: never two leaders at a time, for any faults of API server, network, and clocks, and a leader in the end."""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from controller_steps import until
from dra_driver.api.client import CONNECTIONS, ApiClient
from dra_driver.api.events import PENDING_LIMIT, EventRecorder, Subject
from dra_driver.controller.lease import (
    CREATE,
    RENEW,
    TAKE,
    WAIT,
    Elector,
    LeaseRecord,
    LeaseTimes,
    ObservedLease,
    lease_of,
    next_step,
    observe,
    record_of,
)
from hypothesis import given
from hypothesis import strategies as st
from object_server import ObjectServer

TERMS = LeaseTimes(lease_seconds=15.0, renew_seconds=10.0, retry_seconds=2.0)
END = 300.0


@dataclass
class Candidate:
    """One process with its own clock, which starts at any value and runs up to 10 % fast or slow."""

    name: str
    offset: float
    rate: float
    alive_from: float
    dies_at: float
    cuts: list[tuple[float, float]]
    seen: ObservedLease | None = None
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
    """A server that keeps one Lease with optimistic locking. The Lease can be deleted."""

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
    """Some candidates, one Lease, and a network that delays and loses answers, and disconnects a candidate for a while."""

    def __init__(self, draw: random.Random, terms: LeaseTimes) -> None:
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
        """Return the periods in which each candidate could act."""
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

    def decided(self, candidate: Candidate, record: LeaseRecord | None, now: float) -> None:
        if not candidate.alive(now):
            return
        candidate.seen = observe(candidate.seen, record, candidate.clock(now))
        sent = candidate.clock(now)
        again = now + self.terms.retry_seconds
        step = next_step(candidate.seen, candidate.name, sent, self.terms)
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
        candidate.seen = ObservedLease(record_of(answer), candidate.clock(now))
        if candidate.seen.record.holder != candidate.name:
            return
        candidate.until = max(candidate.until, sent + self.terms.renew_seconds)
        end = min(candidate.true_time(candidate.until), candidate.dies_at)
        if end > now:
            candidate.spans.append((now, end))


def together(spans: list[tuple[float, float, str]]) -> list[str]:
    """Return the overlapping periods of two candidates."""
    return [
        f"{holder} until {end:.1f}, {other} from {start:.1f}"
        for (_start, end, holder), (start, _end, other) in itertools.combinations(spans, 2)
        if holder != other and start < end
    ]


@given(seed=st.integers(0, 2**32))
def test_lease_simulation_has_one_leader_at_a_time_and_always_a_next_one(seed: int) -> None:
    spans = [Simulation(random.Random(f"{seed}-{number}"), TERMS).run() for number in range(10)]
    assert [found for each in spans for found in together(each)] == []
    # A candidate can be disconnected or dead for a whole simulation, but not in most of ten simulations.
    assert sum(bool(each) for each in spans) > 5
    assert len({name for each in spans for _start, _end, name in each}) > 1, "the Lease changes hands"


def test_lease_simulation_detects_terms_that_are_too_close() -> None:
    wrong = LeaseTimes(lease_seconds=15.0, renew_seconds=16.0, retry_seconds=2.0)
    assert any(together(Simulation(random.Random(seed), wrong).run()) for seed in range(200))


@given(
    seen=st.builds(
        ObservedLease,
        st.one_of(
            st.none(),
            st.builds(
                LeaseRecord, st.sampled_from(("", "me", "other")), st.just("1"), st.just(0), st.sampled_from(("", "t"))
            ),
        ),
        st.floats(0, 100),
    ),
    now=st.floats(0, 1000),
)
def test_decide_returns_the_step_for_each_state(seen: ObservedLease, now: float) -> None:
    step = next_step(seen, "me", now, TERMS)
    waited = now - seen.since >= TERMS.lease_seconds
    holder = seen.record.holder if seen.record else None
    given_up = seen.record is not None and seen.record.acquired != "" and not seen.record.holder
    expected = {None: CREATE, "me": RENEW}.get(holder, TAKE if waited or given_up else WAIT)
    assert step == expected


def test_look_only_a_change_restarts_the_wait() -> None:
    record = LeaseRecord("other", "1")
    seen = observe(None, record, 5.0)
    assert observe(seen, record, 9.0) is seen
    assert observe(seen, replace(record, version="2"), 9.0).since == 9.0
    assert observe(seen, None, 9.0) == ObservedLease(None, 9.0)


def test_lease_written_object_counts_takeovers_and_clears_the_holder() -> None:
    def stored(lease: dict[str, Any]) -> LeaseRecord:
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
    assert next_step(ObservedLease(stored(given_up), 0.0), "two", 0.0, TERMS) == TAKE
    assert next_step(ObservedLease(stored(made), 0.0), "two", 0.0, TERMS) == WAIT


@pytest.mark.parametrize("refusal", [("GET", "/leases/", 500), ("PUT", "/leases/", 503), ("PUT", "/leases/", 409)])
def test_refused_release_is_tried_again(tmp_path: Path, refusal: tuple[str, str, int]) -> None:
    """The API server refused the release of the Lease: the release is retried, so that another controller can lead at once."""

    async def scenario() -> None:
        server = ObjectServer()
        client = ApiClient(await server.start(tmp_path))
        path = "/apis/coordination.k8s.io/v1/namespaces/n/leases/l"
        server.put(path, {"spec": {"holderIdentity": "", "acquireTime": "2026-01-01T00:00:00.000000Z"}})
        elector = Elector(client, namespace="n", name="l", identity="me", times=LeaseTimes(3.0, 2.0, 0.1))
        leads = asyncio.Event()

        async def work() -> None:
            leads.set()
            await asyncio.Event().wait()

        leading = asyncio.create_task(elector.run_as_leader(work))
        try:
            await leads.wait()
            server.refusals.append(refusal)
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
            assert server.objects[path]["spec"]["holderIdentity"] == ""
        finally:
            await client.close()
            await server.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("source", ["events", "requests"])
def test_requests_that_hang_do_not_delay_the_lease(
    tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Event writes that hang delay no other request. Other requests that hang on all connections do not delay the Lease."""

    async def scenario() -> None:
        server = ObjectServer()
        client = ApiClient(await server.start(tmp_path))
        path = "/apis/coordination.k8s.io/v1/namespaces/n/leases/l"
        server.put(path, {"spec": {"holderIdentity": "", "acquireTime": "2026-01-01T00:00:00.000000Z"}})
        server.put("/api/v1/nodes/n", {})
        server.hanging = ("/events", "/slow")
        elector = Elector(client, namespace="n", name="l", identity="me", times=LeaseTimes(6.0, 3.0, 0.1))
        leads, hanging = asyncio.Event(), []

        async def work() -> None:
            leads.set()
            await asyncio.Event().wait()

        leading = asyncio.create_task(elector.run_as_leader(work))
        try:
            await leads.wait()
            if source == "events":
                recorder = EventRecorder(client, component="test", node_name="n", clock=lambda: 1000.0)
                nodes = [Subject("Node", "v1", f"n{number}", f"n{number}") for number in range(PENDING_LIMIT + 7)]
                written = [recorder.warning(each, "DeviceUnhealthy", "it is lost", action="Watch") for each in nodes]
                assert written.count(True) == PENDING_LIMIT
                for number in range(2 * CONNECTIONS):
                    pod = Subject("Pod", "v1", f"p{number}", f"uid-{number}", "team")
                    assert recorder.warning(pod, "DeviceUnhealthy", "it is lost", action="Watch")
                await asyncio.wait_for(client.get("/api/v1/nodes/n"), 2)
            else:
                hanging += [asyncio.create_task(client.request("POST", "/slow", body={})) for _each in range(20)]
            renewed = server.count("PUT", path)
            await asyncio.sleep(1.5)
            assert elector.holds and server.count("PUT", path) >= renewed + 3
            assert server.count("POST", "/events") <= 2
            if source == "events":
                await recorder.close()
                assert "Events are not written" in caplog.text
        finally:
            for task in (*hanging, leading):
                task.cancel()
            await asyncio.gather(*hanging, leading, return_exceptions=True)
            await client.close()
            await server.stop()

    asyncio.run(scenario())


def test_refused_events_are_counted_when_the_queue_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        server = ObjectServer()
        client = ApiClient(await server.start(tmp_path))
        recorder = EventRecorder(client, component="test", node_name="n", clock=lambda: 1000.0)
        accepted = [
            recorder.normal(Subject("Node", "v1", f"n{number}"), "Ready", "it is ready", action="Watch")
            for number in range(PENDING_LIMIT + 7)
        ]
        await recorder.close()
        assert accepted.count(False) == 7 and server.count("POST", "/events") == PENDING_LIMIT
        (text,) = [each.getMessage() for each in caplog.records if "were not written" in each.getMessage()]
        assert "7 Events" in text
        await client.close()
        await server.stop()

    asyncio.run(scenario())


def test_stop_while_the_work_ends_is_not_lost(tmp_path: Path) -> None:
    """The Lease is lost, and the process is stopped while its work still ends: it must not acquire the Lease again."""

    async def scenario() -> None:
        server = ObjectServer()
        client = ApiClient(await server.start(tmp_path))
        path = "/apis/coordination.k8s.io/v1/namespaces/n/leases/l"
        free = {"holderIdentity": "", "acquireTime": "2026-01-01T00:00:00.000000Z"}
        server.put(path, {"spec": free})
        elector = Elector(client, namespace="n", name="l", identity="me", times=LeaseTimes(0.6, 0.4, 0.05))
        leads, ends, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def work() -> None:
            leads.set()
            try:
                await asyncio.Event().wait()
            finally:
                ends.set()
                await may_end.wait()

        leading = asyncio.create_task(elector.run_as_leader(work))
        try:
            await leads.wait()
            server.unserved = (path,)
            await ends.wait()
            leading.cancel()
            await asyncio.sleep(0.05)
            assert not leading.done()
            server.unserved = ()
            may_end.set()
            await asyncio.wait((leading,), timeout=10)
            assert leading.cancelled() and not elector.holds
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
            await client.close()
            await server.stop()

    asyncio.run(scenario())


def test_work_that_fails_restarts_after_growing_pauses(tmp_path: Path) -> None:
    """Each start of the controller's work reads all objects of the cluster: the pauses between failing starts grow."""

    async def scenario() -> None:
        server = ObjectServer()
        client = ApiClient(await server.start(tmp_path))
        path = "/apis/coordination.k8s.io/v1/namespaces/n/leases/l"
        server.put(path, {"spec": {"holderIdentity": "", "acquireTime": "2026-01-01T00:00:00.000000Z"}})
        elector = Elector(client, namespace="n", name="l", identity="me", times=LeaseTimes(15.0, 10.0, 0.05))
        starts: list[float] = []

        async def work() -> None:
            starts.append(asyncio.get_running_loop().time())
            raise RuntimeError("an object that is not expected")

        leading = asyncio.create_task(elector.run_as_leader(work))
        try:
            await until(lambda: len(starts) == 5)
            pauses = [later - earlier for earlier, later in zip(starts, starts[1:])]
            assert all(pause >= 0.05 * 2**number for number, pause in enumerate(pauses)), pauses
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
            await client.close()
            await server.stop()

    asyncio.run(scenario())
