# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run calls that may hang on one worker thread (lane) per device, each call with a deadline.

A call into a vendor library cannot be cancelled. So each device has its own thread, which runs the device's calls one
after the other. The caller waits for the answer until the deadline. A call that misses its deadline keeps the lane
occupied: the next calls for the same device fail at once, and calls for all other devices continue. When the late call
returns, the lane accepts calls again. So a device never has more than one thread, however long it hangs.

A call can make nested calls on its own lane. They are part of it, and each has its own deadline. If one of them is
late, its callers stop waiting for the whole call, and the parts that have not started do not run. A call can leave the
lane to finish work that does not use the device, so that the lane serves other calls. It stays on its thread, because a
switch to another thread would cost more than most of such work.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Callable, Generic, TypeVar, cast

from ..errors import AcceleratorError, DeviceFaulty
from ..model import NO_ANSWER

Answer = TypeVar("Answer")

_QUEUED, _RUNNING, _DONE = range(3)
#: The deadline, in seconds, of a call that consists of nested calls with their own deadlines. It covers the work between
#: them.
TOGETHER_SECONDS = 120.0


class DeviceBusy(AcceleratorError):
    """The device is busy with another call, within that call's deadline, for longer than the caller wants to wait."""

    default_code = "busy"


class Abandoned(BaseException):
    """Report that no caller waits for a part of a call any more.

    The part ends, and handlers of ``Exception`` do not catch this.
    """


class Call(Generic[Answer]):
    """Represent a call that was submitted to a lane."""

    def __init__(
        self,
        lane: _Lane,
        function: Callable[[], Answer],
        deadline: float,
        doing: str,
        late: Callable[[Answer], object] | None,
    ) -> None:
        self.lane = lane
        self.function = function
        self.deadline = deadline
        self.doing = doing
        self.late = late
        self.state = _QUEUED
        self.started = 0.0
        self.given_up = False
        self.left = False  # the call left the lane; its remaining work does not use the device
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self.callback: Callable[[], object] | None = None

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Register a function that is called once when the call returns, or at once if it has returned.

        The function can run on any thread and must not block.
        """
        with self.lane.changed:
            if self.state != _DONE:
                self.callback = callback
                return
        callback()

    @property
    def due(self) -> float:
        """Return the time by which the call must return; valid only for a running call."""
        return self.started + self.deadline

    def is_abandoned(self) -> bool:
        """Return whether all callers gave up. Another thread can change this between two checks."""
        return self.given_up

    def result(self, until: float | None = None) -> Answer:
        """Wait for the answer and return it, or raise the call's exception.

        Raises DeviceFaulty with the cause no-answer if the call, or a call before it, misses its deadline. Raises
        DeviceBusy if ``until`` (a time of ``time.monotonic``) has passed and no deadline has expired.
        """
        lane = self.lane
        with lane.changed:
            while self.state != _DONE:
                now = time.monotonic()
                if self.left:  # it does not use the device any more, and its remaining work has its own deadlines
                    if until is not None and now >= until:
                        raise DeviceBusy(f"{self.doing}: that has not returned", hint="Try again when it has.")
                    lane.changed.wait(None if until is None else until - now)
                    continue
                ahead = lane.running
                if ahead is not None and now >= ahead.due:
                    lane.hangs = True
                    lane.changed.notify_all()
                if lane.hangs:
                    self._give_up()
                    raise lane.no_answer(self.doing)
                if until is not None and now >= until:
                    self._give_up()
                    raise DeviceBusy(
                        f"{self.doing}: the device is still busy" + (f" ({ahead.doing})" if ahead is not None else ""),
                        hint="Try again when that is done.",
                    )
                # The start of a call does not wake its waiters. No queued call is due before the earliest of these
                # times.
                ends = [ahead.due if ahead is not None else now + min(each.deadline for each in lane.waiting)]
                ends += [until] if until is not None else []
                lane.changed.wait(min(ends) - now)
        if self.error is not None:
            raise self.error
        return cast("Answer", self.answer)

    def _give_up(self) -> None:
        self.given_up = True
        with contextlib.suppress(ValueError):
            self.lane.waiting.remove(self)


class _Lane:
    """Hold the calls of one device. Hold ``changed`` for every read and write of its fields."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changed = threading.Condition()
        self.waiting: deque[Call[Any]] = deque()
        self.running: Call[Any] | None = None
        self.thread: threading.Thread | None = None
        self.hangs = False
        self.ending = False
        self.held = False  # no call starts while this is set
        self.latest_wakeup = 0.0  # the time until which waiters for the running call can sleep

    def no_answer(self, doing: str) -> DeviceFaulty:
        """Return the error for a call on a device that hangs."""
        hung = self.running
        if hung is None:
            return DeviceFaulty(f"{doing}: the device did not answer", code=NO_ANSWER)
        since = time.monotonic() - hung.started
        what = "it" if hung.doing == doing else f"a call before it ({hung.doing})"
        return DeviceFaulty(
            f"{doing}: {what} has not returned for {since:.0f} s, expected at most {hung.deadline:g} s",
            hint="Look for the device in the kernel log. It is queried again when that call has returned.",
            code=NO_ANSWER,
        )

    def put(self, call: Call[Any]) -> None:
        with self.changed:
            if self.hangs:
                call.state = _DONE
                call.error = self.no_answer(call.doing)
                return
            self.waiting.append(call)
            self.ending = False
            if self.thread is None:
                self._start()
            else:
                self.changed.notify_all()

    def leave(self) -> None:
        """Free the lane for other calls and continue the running call off the lane.

        Raises Abandoned if no caller waits for the running call.
        """
        with self.changed:
            call = self.running
            if call is None or call.is_abandoned():
                raise Abandoned(self.name)
            call.left = True
            self.running, self.thread, self.hangs = None, None, False
            if self.waiting:
                self._start()
            self.changed.notify_all()

    def _start(self) -> None:
        self.thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self.thread.start()

    def run_nested(
        self,
        whole: Call[Any],
        function: Callable[[], Answer],
        deadline: float,
        doing: str,
        late: Callable[[Answer], object] | None,
    ) -> Answer:
        """Make a nested call of the running call, on the lane's thread.

        Raises Abandoned if no caller waits for the whole call.
        """
        with self.changed:
            if whole.is_abandoned():
                raise Abandoned(doing)
            previous = whole.deadline, whole.doing
            whole.started, whole.deadline, whole.doing = time.monotonic(), deadline, doing
            if whole.due < self.latest_wakeup:
                self.changed.notify_all()  # wake the waiters, so that they do not sleep past the new deadline
            self.latest_wakeup = whole.due
        answer: Answer | None = None
        error: BaseException | None = None
        try:
            answer = function()
        except BaseException as raised:  # noqa: BLE001  it is raised again, unless no caller waits any more
            error = raised
        with self.changed:
            given_up = whole.is_abandoned()
            if not given_up:
                whole.started, (whole.deadline, whole.doing) = time.monotonic(), previous
                self.hangs = False
        if given_up:
            if late is not None and error is None:
                with contextlib.suppress(Exception):  # no caller is left to receive the error
                    late(cast("Answer", answer))
            raise Abandoned(doing) from error
        if error is not None:
            raise error
        return cast("Answer", answer)

    def hold(self, held: bool) -> None:
        with self.changed:
            self.held = held
            self.changed.notify_all()

    def wait_idle(self, until: float) -> str:
        """Wait until no call runs.

        Return the description of the running call if the time expires or the call hangs, else "".
        """
        with self.changed:
            while self.running is not None:
                left = until - time.monotonic()
                if left <= 0 or self.hangs:
                    return self.running.doing
                self.changed.wait(left)
        return ""

    def end(self) -> None:
        with self.changed:
            self.ending = True
            self.changed.notify_all()

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.waiting or self.held:
                    if self.ending and not self.waiting:
                        self.thread = None
                        return
                    self.changed.wait()
                call = self.waiting.popleft()
                call.state, call.started = _RUNNING, time.monotonic()
                self.running, self.latest_wakeup = call, call.due
            try:
                call.answer = call.function()
            except BaseException as error:  # noqa: BLE001  it is raised again where the answer is awaited
                call.error = error
            if call.left:
                with self.changed:
                    self._settle(call)
                    if self.thread is not None or self.ending:
                        return  # another thread serves the lane, or the lane ends
                    self.thread = threading.current_thread()
                continue
            with self.changed:
                given_up = call.given_up
                if not given_up:
                    self._finish(call)
            if given_up:
                if call.late is not None and call.error is None:
                    with contextlib.suppress(Exception):  # no caller is left to receive the error
                        call.late(call.answer)
                with self.changed:
                    self._finish(call)
            del call

    def _finish(self, call: Call[Any]) -> None:
        self.running = None
        self.hangs = False
        self._settle(call)

    def _settle(self, call: Call[Any]) -> None:
        call.state = _DONE
        self.changed.notify_all()
        if call.callback is not None:
            with contextlib.suppress(Exception):  # a failing callback must not stop the lane
                call.callback()


class Lanes:
    """Manage lanes by name and create them when needed. Thread-safe."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._alone = threading.Lock()
        self._held_for: str | None = None

    def submit(
        self,
        key: str,
        function: Callable[[], Answer],
        deadline: float,
        *,
        doing: str = "",
        late: Callable[[Answer], object] | None = None,
    ) -> Call[Answer]:
        """Call a function on the lane ``key``; ``deadline`` counts in seconds from the start of the call.

        If no caller waits when the answer arrives, ``late`` gets the answer on the lane, to revert the call's effects.
        A call submitted from the lane itself is a nested call of the running call, and has finished when this method
        returns.
        """
        lane, whole = self._lane(key)
        call = Call(lane, function, deadline, doing or key, late)
        if whole is not None:
            try:
                call.answer = lane.run_nested(whole, function, deadline, call.doing, late)
            except Exception as error:  # noqa: BLE001  it is raised again where the answer is awaited
                call.error = error
            call.state = _DONE
        else:
            lane.put(call)
        return call

    def run(
        self,
        key: str,
        function: Callable[[], Answer],
        deadline: float,
        *,
        doing: str = "",
        late: Callable[[Answer], object] | None = None,
    ) -> Answer:
        """Call a function on the lane ``key`` and return its answer, like ``submit`` and then ``result``.

        Raises the function's exceptions, and DeviceFaulty with the cause no-answer.
        """
        lane, whole = self._lane(key)
        if whole is not None:
            return lane.run_nested(whole, function, deadline, doing or key, late)
        call = Call(lane, function, deadline, doing or key, late)
        lane.put(call)
        return call.result()

    def is_mine(self, key: str) -> bool:
        """Return whether the caller runs on the lane ``key``."""
        return self._lane(key)[1] is not None

    def _lane(self, key: str) -> tuple[_Lane, Call[Any] | None]:
        """Return a lane, and the call that runs on it if the current thread is the lane's thread, else None."""
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = _Lane(f"{self._prefix}-{key}")
                lane.held = self._held_for not in (None, key)
        whole = lane.running
        return lane, whole if lane.thread is threading.current_thread() else None

    def leave(self, key: str) -> None:
        """Continue the calling function off the lane ``key``, on which it runs, so that the lane can serve other calls.

        After this, the call has no deadline and its callers cannot give up. Raises Abandoned if no caller waits for the call.
        """
        with self._lock:
            lane = self._lanes[key]
        lane.leave()

    @contextlib.contextmanager
    def alone(self, key: str, seconds: float) -> Iterator[None]:
        """Block all lanes except ``key``, on which the caller runs. Calls for the other lanes are queued.

        Raises DeviceBusy if a running call, or another exclusive caller, does not end within ``seconds``.
        """
        until = time.monotonic() + seconds
        if not self._alone.acquire(timeout=seconds):
            raise DeviceBusy(f"Another device has all to itself for more than {seconds:g} s", hint="Try again.")
        try:
            with self._lock:
                self._held_for = key
                others = [lane for name, lane in self._lanes.items() if name != key]
            for lane in others:
                lane.hold(True)
            for lane in others:
                doing = lane.wait_idle(until)
                if doing:
                    raise DeviceBusy(f"{doing}: that has not returned", hint="Try again when it has.")
            yield
        finally:
            with self._lock:
                self._held_for = None
                others = list(self._lanes.values())
            for lane in others:
                lane.hold(False)
            self._alone.release()

    def hung(self) -> tuple[str, ...]:
        """Return the names of the lanes with a call that has missed its deadline."""
        with self._lock:
            lanes = dict(self._lanes)
        return tuple(key for key, lane in lanes.items() if lane.hangs)

    def rest(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until all lanes except hung ones are idle; return whether they are."""
        deadline = time.monotonic() + seconds
        with self._lock:
            lanes = tuple(self._lanes.values())
        for lane in lanes:
            with lane.changed:
                while (lane.running is not None or lane.waiting) and not lane.hangs:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    lane.changed.wait(left)
        return True

    def close(self) -> None:
        """End the threads of idle lanes, and of the other lanes when they become idle. The lanes can be used again."""
        with self._lock:
            lanes = tuple(self._lanes.values())
        for lane in lanes:
            lane.end()
