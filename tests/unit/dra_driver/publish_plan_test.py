# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare the publisher's decisions with a small model of the API server, with a simulated clock and other writers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import board_model
import pytest
from dra_driver.core.dra.resource_slices import SliceWrite
from dra_driver.core.model import Taint
from dra_driver.core.vendors.nvidia import offers
from dra_driver.publish import publish_plan
from dra_driver.publish.api_compatibility import COUNTERS, TAINTS, Content, fit_to_server
from dra_driver.publish.publish_plan import Decision, Identity, Pace, State
from hypothesis import given, settings
from hypothesis import strategies as st

DRIVER = "gpu.nvidia.com"
IDENTITY = Identity(DRIVER, "node-1", "node-1")
PACE = Pace()
OWNER = {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-uid", "controller": True}
LOST = (Taint("gpu.nvidia.com/gpu-lost", "NoSchedule"),)


def content(*boards: str, dynamic: bool = True, faulty: int | None = None) -> Content:
    """Return the content of a pool. ``faulty`` is the index of the board with tainted devices."""
    devices = [board_model.device(board, index) for index, board in enumerate(boards)]
    found = [
        replace(offer, taints=LOST) if index == faulty else offer
        for index, device in enumerate(devices)
        for number, offer in enumerate(offers.offers(device, dynamic))
        if number % 8 == 0 or offer.kind == "device"  # a part of the 26 offers is enough, and faster
    ]
    return Content(tuple(found), tuple(offers.counter_set(device) for device in devices if dynamic))


CONTENTS = (
    Content(),
    content("l4", dynamic=False),
    content("l4", "t4", dynamic=False, faulty=0),
    content("h100-80", "l4"),
    content("h100-80", "h100-80", faulty=1),
)


class Failure(Exception):
    def __init__(self, status: int, retry_after: float | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.retry_after = retry_after


@dataclass
class ServerModel:
    """A model of ResourceSlices with conflicts, feature gates, a removal policy, and failures from a given time on."""

    drops: frozenset[str] = frozenset()
    slices: dict[str, Any] = field(default_factory=dict)
    revision: int = 10
    kept: set[str] = field(default_factory=set)
    away_until: float = 0.0
    throttled_until: float = 0.0
    events: list[tuple[str, Any]] = field(default_factory=list)

    def answer(self, now: float) -> None:
        if now < self.away_until:
            raise Failure(0)
        if now < self.throttled_until:
            raise Failure(429, self.throttled_until - now)

    def changed_by_server(self, body: Any) -> Any:
        body = copy.deepcopy(body)
        for device in body["spec"].get("devices", ()):
            if TAINTS in self.drops:
                device.pop("taints", None)
            if COUNTERS in self.drops:
                device.pop("consumesCounters", None)
        if COUNTERS in self.drops:
            body["spec"].pop("sharedCounters", None)
        return body

    def put(self, name: str, body: Any) -> Any:
        self.revision += 1
        body["metadata"] = {**body["metadata"], "name": name, "resourceVersion": str(self.revision)}
        body["metadata"].setdefault("uid", f"uid-{self.revision}")
        self.events.append(("MODIFIED" if name in self.slices else "ADDED", copy.deepcopy(body)))
        self.slices[name] = body
        return copy.deepcopy(body)

    def remove(self, name: str) -> None:
        self.revision += 1
        item = self.slices.pop(name)
        item["metadata"]["resourceVersion"] = str(self.revision)
        self.events.append(("DELETED", item))

    def write(self, write: SliceWrite, now: float) -> Any:
        self.answer(now)
        if write.verb == "create":
            assert write.body is not None
            return self.put(
                f"{write.body['metadata']['generateName']}{self.revision}", self.changed_by_server(write.body)
            )
        present = self.slices.get(write.name)
        if present is None:
            if write.body is None:
                return None
            raise Failure(404)
        if any(present["metadata"].get(key) != value for key, value in write.preconditions.items()):
            raise Failure(409)
        if write.body is None:
            if write.name in self.kept:
                raise Failure(403)
            self.remove(write.name)
            return None
        body = self.changed_by_server(write.body)
        body["metadata"]["uid"] = present["metadata"]["uid"]
        return self.put(write.name, body)

    def devices(self) -> dict[str, Any]:
        newest = max((item["spec"]["pool"]["generation"] for item in self.own()), default=0)
        return {
            device["name"]: device
            for item in self.own()
            if item["spec"]["pool"]["generation"] == newest
            for device in item["spec"].get("devices", ())
        }

    def complete(self) -> bool:
        """Return whether the scheduler would use the pool: it skips a pool that lacks slices of the newest generation."""
        newest = max((item["spec"]["pool"]["generation"] for item in self.own()), default=0)
        pools = [item["spec"]["pool"] for item in self.own() if item["spec"]["pool"]["generation"] == newest]
        return bool(pools) and all(pool["resourceSliceCount"] == len(pools) for pool in pools)

    def own(self) -> list[Any]:
        return [item for item in self.slices.values() if item["spec"]["pool"]["name"] == IDENTITY.pool]


class World:
    """The executor without delays: it executes the reducer's decisions and reports the results to it."""

    def __init__(self, server: ServerModel, *, asks: bool = True) -> None:
        self.server = server
        self.asks = asks
        self.now = 0.0
        self.state = publish_plan.with_list(State(), copy.deepcopy(list(server.slices.values())), 0.0)
        self.batches: list[tuple[float, Decision]] = []
        self.refusals: list[float] = []
        #: Requests to the API server.
        self.requests = 0
        self.history: list[dict[str, Any]] = []

    def want(self, wanted: Content) -> None:
        self.state = replace(self.state, content=wanted)

    def watch(self) -> None:
        for kind, item in self.server.events:
            self.state = publish_plan.with_watch_event(self.state, kind, item, self.now)
        self.server.events.clear()

    def act(self, decision: Decision) -> None:
        try:
            self.server.answer(self.now)
            self.requests += 1
            if decision.query_server:
                self.requests += 1  # the version, and the dry run
                assert self.state.content is not None
                sent = publish_plan.probe_slice(IDENTITY, self.state.content, "separate", self.state.owner)
                answer = self.server.changed_by_server(sent) if sent and self.asks else None
                self.state = publish_plan.with_server_features(self.state, (1, 37), sent, answer)
            elif decision.query_owner:
                self.state = publish_plan.with_owner(self.state, OWNER)
            else:
                self.batches.append((self.now, decision))
                self.carry_out(decision)
        except Failure as failure:
            if failure.status == 429:
                self.refusals.append(self.now)
            self.state = publish_plan.after_failure(
                self.state, PACE, self.now, status=failure.status, retry_after=failure.retry_after
            )
            if decision.writes and publish_plan.needs_list(self.state):
                self.requests += 1
                self.state = publish_plan.with_list(
                    self.state, copy.deepcopy(list(self.server.slices.values())), self.now
                )

    def carry_out(self, decision: Decision) -> None:
        before = self.state.server
        for write in decision.writes:
            try:
                answer = self.server.write(write, self.now)
            except Failure as failure:
                if decision.leftover and failure.status == 403:
                    self.state = publish_plan.after_refused_removal(self.state, PACE, write.name, self.now)
                    continue
                raise
            self.state = publish_plan.with_answer(self.state, write, answer)
            if self.server.complete():
                self.history.append(copy.deepcopy(self.server.devices()))
            if self.state.server != before:
                return
        self.state = publish_plan.after_writes(self.state, PACE, decision, self.now)

    def go_on(self, until: float, *, seen_after: float = 0.0) -> None:
        """Advance the time until ``until``. The watch reports changes at the end of each wait, or after ``seen_after`` seconds."""
        for _round in range(2000):
            decision = publish_plan.decide(IDENTITY, PACE, self.state, self.now)
            if decision.query_server or decision.query_owner or decision.writes:
                self.act(decision)
                self.watch()
                continue
            if decision.current:
                self.state = publish_plan.when_current(self.state, decision)
            if decision.wake_at is None or decision.wake_at > until:
                self.now = until
                self.watch()
                return
            assert decision.wake_at > self.now, "a wait that has ended already would be one without end"
            self.now = decision.wake_at
        raise AssertionError("more than 2000 decisions")


def expected(wanted: Content, drops: frozenset[str]) -> set[str]:
    return {offer.name for offer in fit_to_server(wanted, drops)[0].offers}


OTHERS = st.one_of(
    st.tuples(st.just("delete"), st.integers(0, 9)),
    st.tuples(st.just("change"), st.integers(0, 9)),
    st.tuples(st.just("wipe"), st.just(0)),
    st.tuples(st.just("away"), st.integers(1, 90)),
    st.tuples(st.just("throttle"), st.integers(1, 60)),
    st.tuples(st.just("want"), st.integers(0, len(CONTENTS) - 1)),
    st.tuples(st.just("interrupt"), st.just(0)),
)


def happen(world: World, what: str, number: int) -> None:
    server, names = world.server, sorted(world.server.slices)
    if what == "delete" and names:
        server.remove(names[number % len(names)])
    elif what == "change" and names:
        name = names[number % len(names)]
        body = copy.deepcopy(server.slices[name])
        body["spec"]["devices"] = [{"name": "foreign"}]
        body["spec"].pop("sharedCounters", None)
        server.put(name, body)
    elif what == "wipe":
        for name in names:
            server.remove(name)
    elif what == "away":
        server.away_until = world.now + number
    elif what == "throttle":
        server.throttled_until = world.now + number
    elif what == "want":
        world.want(CONTENTS[number])
    elif what == "interrupt":
        world.state = publish_plan.after_interruption(world.state)


@given(
    st.lists(st.tuples(st.floats(0.0, 20.0), OTHERS), max_size=25),
    st.sets(st.sampled_from([TAINTS, COUNTERS])),
    st.booleans(),
)
def test_pool_reaches_the_desired_content_and_stays(
    story: list[tuple[float, tuple[str, int]]], drops: set[str], asks: bool
) -> None:
    world = World(ServerModel(drops=frozenset(drops)), asks=asks)
    world.want(CONTENTS[3])
    for seconds, (what, number) in story:
        world.go_on(world.now + seconds)
        happen(world, what, number)
        world.watch()
    throttled = world.server.throttled_until
    # A caller that waits for all changes waits no longer than this.
    world.go_on(max(world.now, world.server.away_until, throttled) + PACE.retry_limit + PACE.settle_limit + 5)
    wanted = world.state.content
    assert wanted is not None
    assert set(world.server.devices()) == expected(wanted, world.server.drops)
    assert publish_plan.decide(IDENTITY, PACE, world.state, world.now).current
    done = len(world.batches)
    world.go_on(world.now + 3600)
    assert len(world.batches) == done, "nothing is written at rest"


@given(
    st.lists(
        st.tuples(st.floats(0.01, 3.0), st.sampled_from(["delete", "change", "wipe"]), st.integers(0, 9)), max_size=40
    ),
    st.integers(0, len(CONTENTS) - 1),
)
def test_own_change_is_published_within_a_second_during_other_writes(
    story: list[tuple[float, str, int]], number: int
) -> None:
    world = World(ServerModel())
    world.want(CONTENTS[3])
    world.go_on(5)
    for seconds, what, which in story:
        world.go_on(world.now + seconds)
        happen(world, what, which)
        world.watch()
    wanted = replace(
        CONTENTS[number], offers=tuple(offer for offer in CONTENTS[number].offers if offer.name != "gpu-0")
    )
    world.want(wanted)
    world.go_on(world.now + 1.0)
    assert set(world.server.devices()) == {offer.name for offer in wanted.offers}


@settings(max_examples=10)
@given(st.floats(0.2, 5.0), st.sampled_from(["delete", "change", "wipe"]))
def test_continuous_foreign_writes_are_reverted_with_growing_pauses(every: float, what: str) -> None:
    world = World(ServerModel())
    world.want(CONTENTS[1])
    world.go_on(5)
    world.batches.clear()
    while world.now < 305:
        world.go_on(world.now + every)
        happen(world, what, 0)
        world.watch()
    # Waits of 1, 2, 4, 8, 16, and then 30 seconds. Content that keeps changing is published nevertheless.
    assert 9 <= len(world.batches) <= 14


@given(st.lists(st.floats(0.0, 0.2), min_size=20, max_size=60))
def test_many_own_changes_are_written_in_few_batches(pauses: list[float]) -> None:
    world = World(ServerModel())
    for number, seconds in enumerate(pauses):
        world.want(CONTENTS[1 + number % 2])
        world.go_on(world.now + seconds)
    assert len(world.batches) <= sum(pauses) / PACE.gap + 1


@given(st.integers(1, 200), st.lists(st.floats(0.0, 5.0), max_size=20))
def test_throttled_server_gets_no_requests_until_its_retry_after(seconds: int, changes: list[float]) -> None:
    world = World(ServerModel())
    world.server.throttled_until = float(seconds)
    world.want(CONTENTS[1])
    for number, pause in enumerate(changes):
        world.go_on(world.now + pause)
        world.want(CONTENTS[1 + number % 2])
    world.go_on(float(seconds) + 1)
    assert len(world.refusals) == 1
    assert world.server.devices()


@given(
    st.lists(st.tuples(st.integers(0, len(CONTENTS) - 1), st.floats(0, 3)), min_size=1, max_size=8),
    st.sets(st.sampled_from([TAINTS, COUNTERS])),
)
def test_unsupported_content_is_never_published(changes: list[tuple[int, float]], drops: set[str]) -> None:
    world = World(ServerModel(drops=frozenset(drops)))
    previous: set[str] = set()
    for number, seconds in changes:
        world.history.clear()
        world.want(CONTENTS[number])
        world.go_on(world.now + seconds + 1)
        offered = {offer.name: offer for offer in CONTENTS[number].offers}
        for devices in world.history:
            assert set(devices) in (previous, expected(CONTENTS[number], world.server.drops))
        for name, device in world.server.devices().items():
            assert bool(device.get("taints")) == bool(offered[name].taints)
        previous = set(world.server.devices())


def test_server_with_new_features_gets_all_devices() -> None:
    world = World(ServerModel(drops=frozenset({TAINTS, COUNTERS})))
    world.want(CONTENTS[4])
    world.go_on(5)
    assert set(world.server.devices()) == {"gpu-0"}
    world.server.drops = frozenset()
    world.state = publish_plan.after_interruption(world.state)
    world.go_on(10)
    assert set(world.server.devices()) == {offer.name for offer in CONTENTS[4].offers}


@pytest.mark.parametrize("allowed", [False, True])
def test_slices_of_a_previous_pool_are_deleted_last_and_block_nothing(allowed: bool) -> None:
    server = ServerModel()
    spec = {"driver": DRIVER, "nodeName": "node-1", "pool": {"name": "old", "generation": 3, "resourceSliceCount": 1}}
    server.put("old-slice", {"metadata": {"name": "old-slice"}, "spec": spec})
    server.events.clear()
    server.kept = set() if allowed else {"old-slice"}
    world = World(server)
    world.want(CONTENTS[1])
    world.go_on(5)
    assert set(server.devices()) == {"gpu-0"}
    assert ("old-slice" in server.slices) != allowed
    assert publish_plan.decide(IDENTITY, PACE, world.state, world.now).current
    world.want(CONTENTS[2])
    world.go_on(6)
    assert set(server.devices()) == {"gpu-0", "gpu-1"}
    tries = [batch for _at, batch in world.batches if batch.leftover]
    assert len(tries) == 1
    world.server.kept = set()
    world.go_on(5 + PACE.leftover + 1)
    assert "old-slice" not in server.slices


@pytest.mark.parametrize("status", [404, 409, 403, 422, 503])
def test_failed_writes_refused_always_wait_longer_each_time(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(ServerModel())
    world.requests = 3  # the versions of the API, the list, and the watch

    def refuse(*_arguments: Any) -> None:
        raise Failure(status)

    monkeypatch.setattr(world.server, "write", refuse)
    world.want(CONTENTS[3])
    world.go_on(8)
    assert world.requests <= 15
    before = world.requests
    world.go_on(600)
    assert world.requests - before <= 60
    # Another program changes the slices: the next attempt is not delayed.
    assert publish_plan.decide(IDENTITY, PACE, world.state, world.now).writes == ()
    changed = {"metadata": {"name": "other", "uid": "o", "resourceVersion": "1"}, "spec": {"pool": {"name": "n"}}}
    assert publish_plan.with_list(world.state, [changed], world.now).not_before < world.now
    assert publish_plan.with_list(world.state, [], world.now).not_before > world.now


def test_failed_jitter_shortens_the_pause_and_not_the_retry_after() -> None:
    assert publish_plan.after_failure(State(), PACE, 100.0).not_before == 100.0 + PACE.retry
    found = publish_plan.after_failure(State(), PACE, 100.0, retry_after=5.0, jitter=0.5)
    assert (found.not_before, found.retry_at) == (100.0 + PACE.retry * 0.5, 105.0)


def test_decide_unacceptable_content_is_a_problem_without_a_retry_loop() -> None:
    identity = replace(IDENTITY, pool="Not a pool")
    state = publish_plan.with_list(State(content=CONTENTS[1]), (), 0.0)
    state = publish_plan.with_server_features(state, (1, 36), None, None)
    decision = publish_plan.decide(identity, PACE, state, 1.0)
    assert "Pool name" in decision.problem
    assert (decision.wake_at, decision.writes) == (None, ())


LONG_NAME = "A product name with more than sixty-four bytes, as no board has had so f\u00e4r"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"name": "Not a label"}, "is not a DNS label"),
        ({"name": "gpu-0"}, "is in the pool twice"),
        ({"counter_set": "missing", "consumes": {"slices": 1}}, "which the pool lacks"),
    ],
)
def test_decide_one_invalid_device_publishes_all_others(change: dict[str, Any], word: str) -> None:
    world = World(ServerModel())
    first, second = content("l4", "t4", dynamic=False).offers
    world.want(Content((first, replace(second, **change))))
    world.go_on(100)
    assert set(world.server.devices()) == {"gpu-0"}
    decision = publish_plan.decide(IDENTITY, PACE, world.state, world.now)
    assert decision.current and decision.problem == ""
    (withheld,) = decision.withheld
    assert word in withheld.describe() and (change.get("name") or "gpu-1") in withheld.describe()


def test_decide_invalid_counter_set_withholds_its_devices_only() -> None:
    world = World(ServerModel())
    valid, other = content("h100-80", "h100-80").counter_sets
    offered = content("h100-80", "h100-80").offers
    world.want(Content(offered, (valid, replace(other, counters={"Not a label": 1}))))
    world.go_on(100)
    of_first = {offer.name for offer in offered if offer.counter_set == valid.name}
    assert set(world.server.devices()) == of_first
    decision = publish_plan.decide(IDENTITY, PACE, world.state, world.now)
    assert all("is not a DNS label" in each.describe() for each in decision.withheld)


def test_decide_invalid_attributes_are_shortened_or_left_out_and_all_devices_published() -> None:
    world = World(ServerModel())
    first, second = content("l4", "t4", dynamic=False).offers
    many = {f"extra{number}": number for number in range(40)}
    spoiled = {**second.attributes, "productName": LONG_NAME, "no name": 1, **many}
    world.want(Content((first, replace(second, attributes=spoiled))))
    world.go_on(100)
    devices = {
        device["name"]: device for item in world.server.slices.values() for device in item["spec"].get("devices", ())
    }
    assert set(devices) == {"gpu-0", "gpu-1"}
    attributes = devices["gpu-1"]["attributes"]
    name = attributes["productName"]["string"]
    assert LONG_NAME.startswith(name) and 60 < len(name.encode()) <= 64
    assert "no name" not in attributes and len(attributes) + len(devices["gpu-1"]["capacity"]) == 32
    (reported,) = publish_plan.decide(IDENTITY, PACE, world.state, world.now).withheld
    assert (
        "productName is shortened to 64 bytes" in reported.describe() and "'no name' is left out" in reported.describe()
    )


def test_probe_of_content_with_an_invalid_device_is_of_a_valid_one() -> None:
    bad, good = content("h100-80", "h100-80").offers[:2]
    wanted = Content((replace(bad, name="Not a label"), good), content("h100-80").counter_sets)
    sent = publish_plan.probe_slice(IDENTITY, wanted, publish_plan.layout_of((1, 36)), OWNER)
    assert sent is not None and [each["name"] for each in sent["spec"]["devices"]] == [good.name]


def test_probe_before_kubernetes_1_35_has_counters_that_one_slice_takes() -> None:
    """The API server accepts 32 counters per slice with devices. The counters of several GPUs would make it reject the probe."""
    wanted = content("h100-80", "h100-80", "h100-80", faulty=1)
    last = {offer.name: replace(offer, prepared_before_binding=True) for offer in wanted.offers[-1:]}
    wanted = replace(wanted, offers=tuple(last.get(offer.name, offer) for offer in wanted.offers))
    sent = publish_plan.probe_slice(IDENTITY, wanted, publish_plan.layout_of((1, 34)), OWNER)
    assert sent is not None and len(sent["spec"]["devices"]) == 3
    assert sum(len(each["counters"]) for each in sent["spec"]["sharedCounters"]) <= 32
    for feature in ("taints", "consumesCounters", "bindingConditions"):
        assert any(device.get(feature) for device in sent["spec"]["devices"])


def test_decide_watch_opens_at_another_server_reads_its_features() -> None:
    """The server is replaced between the query and the next watch, so that no watch ends at the replacement: its features are read again."""
    world = World(ServerModel(drops=frozenset({COUNTERS})))
    wanted = content("h100-80")
    world.want(wanted)
    world.go_on(10)
    assert set(world.server.devices()) == {"gpu-0"}
    world.server.drops = frozenset()
    world.state = publish_plan.after_watch_start(world.state, world.now + 5)
    world.state = publish_plan.after_watch_start(world.state, world.now + 500)
    world.go_on(world.now + 20)
    assert set(world.server.devices()) == {offer.name for offer in wanted.offers}
