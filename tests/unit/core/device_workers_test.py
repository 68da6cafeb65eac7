# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Lanes: a call that hangs blocks only its own device, and no thread remains afterwards."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from dra_driver.core.discovery.device_workers import DeviceBusy, Lanes
from dra_driver.core.errors import DeviceFaulty
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

LONG = 60.0  # never reached in a passing test
SHORT = 0.01  # always exceeded by a call that hangs


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes("test")
    yield made
    made.close()


class Gate:
    """A call that hangs until the gate opens."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.open.wait(LONG)
        return "late"


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def ends(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(LONG)
            assert not thread.is_alive()


def test_run_nested_part_runs_within_the_call(lanes: Lanes) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("a part")

    def whole() -> str:
        ran.append(threading.current_thread().name)
        ran.append(lanes.run("a", lambda: threading.current_thread().name, LONG))
        call = lanes.submit("a", fail, LONG)
        call.add_done_callback(lambda: ran.append("called"))
        with pytest.raises(ValueError, match="a part"):
            call.result()
        return lanes.run("b", lambda: threading.current_thread().name, LONG)

    assert lanes.run("a", whole, LONG) == "test-b"
    assert ran == ["test-a", "test-a", "called"]


def test_is_mine_inside_call_is_true(lanes: Lanes) -> None:
    found: list[bool] = []

    def call() -> None:
        found.extend((lanes.is_mine("a"), lanes.is_mine("b")))
        lanes.leave("a")
        found.append(lanes.is_mine("a"))

    lanes.run("b", lambda: None, LONG)
    lanes.run("a", call, LONG)
    assert found == [True, False, False]
    assert not lanes.is_mine("a") and not lanes.is_mine("never met")


def test_leave_rest_of_call_runs_off_the_lane(lanes: Lanes) -> None:
    gate, names = Gate(), []

    def whole() -> str:
        names.append(threading.current_thread().name)
        lanes.leave("a")
        return gate()

    call = lanes.submit("a", whole, SHORT)
    assert gate.entered.wait(LONG)
    assert lanes.rest(LONG) and lanes.hung() == (), "its device is not waited for any more"
    assert lanes.run("a", lambda: "others", LONG) == "others"
    with pytest.raises(DeviceBusy):
        call.result(time.monotonic() + SHORT)
    gate.open.set()
    assert call.result() == "late", "nor is it late, however long it takes"
    assert lanes.run("a", lambda: "again", LONG) == "again"
    while threads("test-a") > 1:
        time.sleep(0)  # one of the two threads continues to serve


def test_leave_call_is_not_refused_for_later_hang(lanes: Lanes) -> None:
    here, there = Gate(), Gate()

    def whole() -> str:
        lanes.leave("a")
        return here()

    left = lanes.submit("a", whole, LONG)
    assert here.entered.wait(LONG)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(left.result)
        try:
            with pytest.raises(DeviceFaulty):
                lanes.run("a", there, SHORT)
            assert lanes.hung() == ("a",) and not waits.done()
            here.open.set()
            assert waits.result(LONG) == "late"
        finally:
            here.open.set()
            there.open.set()


def test_leave_ended_call_keeps_its_thread(lanes: Lanes) -> None:
    def whole() -> int:
        lanes.leave("a")
        return threading.get_ident()

    assert len({lanes.run("a", whole, LONG) for _time in range(20)}) == 1
    assert threads("test-a") == 1


def test_leave_abandoned_call_raises(lanes: Lanes) -> None:
    gate, done = Gate(), []

    def whole() -> None:
        gate()
        lanes.leave("a")
        done.append("what it was to do then")

    with pytest.raises(DeviceFaulty):
        lanes.run("a", whole, SHORT)
    gate.open.set()
    while lanes.hung():
        time.sleep(0)
    assert lanes.run("a", lambda: "serves again", LONG) == "serves again"
    assert done == []


def test_run_late_part_ends_call_at_its_deadline(lanes: Lanes) -> None:
    gate, done, taken_back = Gate(), [], threading.Event()

    def whole() -> None:
        try:
            lanes.run("a", lambda: done.append("before"), 2 * LONG)
            lanes.run("a", gate, SHORT, doing="the part", late=lambda _answer: taken_back.set())
        except Exception:  # noqa: BLE001  an abandoned call does not handle errors
            done.append("handled")
        finally:
            with contextlib.suppress(Exception):
                lanes.run("a", lambda: done.append("after"), LONG)

    with pytest.raises(DeviceFaulty, match=r"the part: it has not returned .* expected at most 0\.01 s"):
        lanes.run("a", whole, LONG)
    with pytest.raises(DeviceFaulty):
        lanes.run("a", lambda: "refused", LONG)
    assert not taken_back.is_set()
    gate.open.set()
    assert taken_back.wait(LONG)
    assert lanes.rest(LONG)
    assert lanes.run("a", lambda: "serves again", LONG) == "serves again"
    assert done == ["before"]


def test_submit_call_after_waiters_has_its_own_deadline(lanes: Lanes) -> None:
    gate = Gate()
    with ThreadPoolExecutor(max_workers=1) as pool:
        with lanes.alone("other", LONG):
            lanes.submit("a", gate, 10 * SHORT)
            behind = pool.submit(lanes.submit("a", lambda: "too late", LONG).result)
            time.sleep(5 * SHORT)  # it probably waits before the other begins; the test is valid in either case
        try:
            with pytest.raises(DeviceFaulty):
                behind.result(LONG / 2)
        finally:
            gate.open.set()


def test_done_callback_is_called_once(lanes: Lanes) -> None:
    gate, returned = Gate(), threading.Semaphore(0)
    call = lanes.submit("a", gate, LONG)
    call.add_done_callback(returned.release)
    assert gate.entered.wait(LONG) and not returned.acquire(blocking=False)
    gate.open.set()
    assert returned.acquire(timeout=LONG)
    assert call.result() == "late"
    call.add_done_callback(returned.release)  # the call has already returned
    assert returned.acquire(blocking=False) and not returned.acquire(blocking=False)
    failing = lanes.submit("a", lambda: 1 // 0, LONG)
    failing.add_done_callback(returned.release)
    assert returned.acquire(timeout=LONG)
    with pytest.raises(ZeroDivisionError):
        failing.result()


def test_done_callback_error_does_not_affect_lane(lanes: Lanes) -> None:
    gate = Gate()
    call = lanes.submit("a", gate, LONG)
    call.add_done_callback(lambda: 1 // 0)
    gate.open.set()
    assert call.result() == "late"
    assert lanes.run("a", lambda: 5, LONG) == 5


def test_run_returns_results_and_raises_errors(lanes: Lanes) -> None:
    assert lanes.run("a", lambda: 5, LONG) == 5
    with pytest.raises(ZeroDivisionError):
        lanes.run("a", lambda: 1 // 0, LONG)
    assert lanes.run("a", threading.get_ident, LONG) != threading.get_ident()


def test_run_calls_of_one_lane_are_sequential(lanes: Lanes) -> None:
    inside: list[int] = []
    most: list[int] = []

    def call() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0)
        inside.pop()

    with ThreadPoolExecutor(8) as pool:
        for _done in pool.map(lambda _number: lanes.run("a", call, LONG), range(200)):
            pass
    assert len(most) == 200 and set(most) == {1}
    assert threads("test-a") == 1


def test_run_hung_call_rejects_next_on_its_lane_only(lanes: Lanes) -> None:
    gate = Gate()
    with pytest.raises(DeviceFaulty) as refused:
        lanes.run("a", gate, SHORT, doing="Asking a")
    assert refused.value.code == "no-answer" and "Asking a: it has not returned" in str(refused.value)
    assert lanes.hung() == ("a",)
    with pytest.raises(DeviceFaulty, match="a call before it \\(Asking a\\)"):
        lanes.run("a", lambda: 1, LONG)
    assert lanes.run("b", lambda: 2, LONG) == 2
    assert threads("test-a") == 1
    gate.open.set()
    assert lanes.rest(LONG)
    while lanes.hung():
        time.sleep(0)
    assert lanes.run("a", lambda: 3, LONG) == 3
    assert threads("test-a") == 1


def test_run_waiter_behind_hung_call_is_rejected(lanes: Lanes) -> None:
    gate = Gate()
    first = lanes.submit("a", gate, 0.3)
    assert gate.entered.wait(LONG)
    ran: list[int] = []
    second = lanes.submit("a", lambda: ran.append(1), LONG)
    with pytest.raises(DeviceFaulty):
        second.result()
    with pytest.raises(DeviceFaulty):
        first.result()
    gate.open.set()
    while lanes.hung():
        time.sleep(0)
    assert lanes.run("a", lambda: 3, LONG) == 3
    assert ran == []


def test_result_working_device_is_busy_not_faulty(lanes: Lanes) -> None:
    gate = Gate()
    first = lanes.submit("a", gate, LONG, doing="Making a partition")
    assert gate.entered.wait(LONG)
    with pytest.raises(DeviceBusy, match="Making a partition"):
        lanes.submit("a", lambda: 1, LONG).result(time.monotonic())
    gate.open.set()
    assert first.result() == "late"
    assert lanes.run("a", lambda: 1, LONG) == 1


def test_run_late_result_is_undone(lanes: Lanes) -> None:
    gate, back = Gate(), threading.Event()
    taken: list[str] = []

    def take_back(answer: str) -> None:
        taken.append(answer)
        back.set()
        raise RuntimeError("no caller receives this")

    with pytest.raises(DeviceFaulty):
        lanes.run("a", gate, SHORT, late=take_back)
    gate.open.set()
    assert back.wait(LONG) and taken == ["late"]
    while lanes.hung():
        time.sleep(0)
    assert lanes.run("a", lambda: 1, LONG, late=take_back) == 1
    assert taken == ["late"]


def test_close_ends_threads_and_lanes_work_again(lanes: Lanes) -> None:
    gate = Gate()
    lanes.run("b", lambda: 1, LONG)
    with pytest.raises(DeviceFaulty):
        lanes.run("a", gate, SHORT)
    lanes.close()
    ends("test-b")
    assert lanes.run("b", lambda: 2, LONG) == 2
    with pytest.raises(DeviceFaulty):
        lanes.run("a", lambda: 1, LONG)
    lanes.close()
    gate.open.set()
    ends("test-a")
    assert lanes.run("a", lambda: 3, LONG) == 3


class LaneMachine(RuleBasedStateMachine):
    """Three devices, each of which can hang at any time, for any number of callers."""

    KEYS = st.sampled_from(["a", "b", "c"])

    @initialize()
    def begin(self) -> None:
        self.lanes = Lanes(f"machine{id(self)}")
        self.hanging: dict[str, Gate] = {}
        self.late: list[str] = []
        self.expected_late = 0

    def teardown(self) -> None:
        for gate in self.hanging.values():
            gate.open.set()
        self.lanes.close()
        for key in ("a", "b", "c"):
            ends(f"machine{id(self)}-{key}")

    @rule(key=KEYS, answer=st.integers())
    def call(self, key: str, answer: int) -> None:
        if key in self.hanging:
            with pytest.raises(DeviceFaulty) as refused:
                self.lanes.run(key, lambda: answer, LONG)
            assert refused.value.code == "no-answer"
        else:
            assert self.lanes.run(key, lambda: answer, LONG) == answer

    @rule(key=KEYS)
    def fail(self, key: str) -> None:
        def failing() -> None:
            raise KeyError(key)

        with pytest.raises(DeviceFaulty if key in self.hanging else KeyError):
            self.lanes.run(key, failing, LONG)

    @rule(key=KEYS, callers=st.integers(1, 4))
    def hang(self, key: str, callers: int) -> None:
        if key in self.hanging:
            return
        gate = Gate()
        self.hanging[key] = gate
        self.expected_late += 1
        calls = [self.lanes.submit(key, gate, SHORT, late=self.late.append) for _caller in range(callers)]
        for each in calls:
            with pytest.raises(DeviceFaulty):
                each.result()

    @precondition(lambda self: self.hanging)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.hanging)))
        self.hanging.pop(key).open.set()
        while key in self.lanes.hung():
            time.sleep(0)
        assert self.lanes.run(key, lambda: 7, LONG) == 7

    @rule()
    def close(self) -> None:
        self.lanes.close()

    @invariant()
    def one_thread_for_a_device_and_only_who_hangs_is_hung(self) -> None:
        assert set(self.lanes.hung()) == set(self.hanging)
        assert len(self.late) == self.expected_late - len(self.hanging)
        for key in ("a", "b", "c"):
            name = f"machine{id(self)}-{key}"
            # A stopped thread can still be ending next to the serving thread.
            assert threads(name) <= 2
            assert key not in self.hanging or threads(name) >= 1


LaneMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestLaneMachine = LaneMachine.TestCase


def test_alone_blocks_other_lanes_and_queues_calls() -> None:
    lanes, order = Lanes("test"), []
    lanes.run("b", lambda: None, 5)

    def change() -> None:
        with lanes.alone("a", 5):
            waiting = [lanes.submit(key, lambda key=key: order.append(key), 5) for key in ("b", "c")]
            time.sleep(0.05)
            order.append("a")
        for call in waiting:
            call.result()

    lanes.run("a", change, 5)
    assert order[0] == "a" and sorted(order) == ["a", "b", "c"]


def test_alone_during_hung_call_is_rejected() -> None:
    lanes, never = Lanes("test"), threading.Event()
    hanging = lanes.submit("b", lambda: never.wait(30), 60, doing="Asking b")
    while hanging.started == 0:
        time.sleep(0.001)

    def change() -> None:
        with lanes.alone("a", 0.05):
            raise AssertionError("it is not alone")

    with pytest.raises(DeviceBusy, match="Asking b: that has not returned"):
        lanes.run("a", change, 5)
    never.set()
    assert hanging.result() is True
    assert lanes.run("b", lambda: 1, 5) == 1, "the lane is free again"
