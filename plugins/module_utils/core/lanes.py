# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Calls that may hang, each on the lane of the device that it is about, each with a deadline.

A call into a vendor's library cannot be taken back. So each device has one thread of its own, on which its calls go one
after the other; who asked waits for the answer until the deadline. A call that has not come back by then keeps its lane:
whoever wants the same device next is refused at once, all other devices go on, and when the call comes back after all the
lane serves again. So there is never more than one thread for a device, however long it hangs.

A call may make others on its own lane, which are part of it: each has its own deadline. When one of them is late nobody waits for the
whole any more, and none of it that was not begun is. What a call has left to do that is not about its device it may do off the lane, which
serves others meanwhile; to go on there with another thread would cost more than most such things.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Callable, Generic, TypeVar, cast

from .errors import AcceleratorError, DeviceFaulty
from .model import NO_ANSWER

Answer = TypeVar("Answer")

_QUEUED, _RUNNING, _DONE = range(3)
#: The deadline of a call that is there for its parts, which have their own: for what is done between them.
VISIT_SECONDS = 120.0


class DeviceBusy(AcceleratorError):
    """The device works on something else, within its deadline, for longer than the caller wanted to wait."""

    default_code = "busy"


class Abandoned(BaseException):
    """A part of a call that nobody waits for any more: it ends there, and no handler of errors goes on with what is left of it."""


class Call(Generic[Answer]):
    """A call that was given to a lane."""

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
        self.left = False  # what it does now is no work of the lane's
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self.told: Callable[[], object] | None = None

    def when_back(self, told: Callable[[], object]) -> None:
        """Have a function called, once and on whatever thread, when the call is back; at once if it is. It must not block."""
        with self.lane.changed:
            if self.state != _DONE:
                self.told = told
                return
        told()

    @property
    def due(self) -> float:
        """When the call has to be back; only of one that runs."""
        return self.started + self.deadline

    def nobody_waits(self) -> bool:
        """Whether it was given up; another thread may do that between two looks."""
        return self.given_up

    def result(self, until: float | None = None) -> Answer:
        """Wait for the answer, or raise what the call raised.

        Raises DeviceFaulty with the cause no-answer when the call, or one before it, is not back by its deadline; with
        ``until``, a time of ``time.monotonic``, DeviceBusy when it is not back by then though no deadline is over.
        """
        lane = self.lane
        with lane.changed:
            while self.state != _DONE:
                now = time.monotonic()
                if self.left:  # it is not on the device any more, and what it does has its own deadlines
                    if until is not None and now >= until:
                        raise DeviceBusy(f"{self.doing}: that has not come back", hint="Try again when it has.")
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
                # Nobody is woken when a call begins; none of those that wait for their turn is due sooner than this.
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
    """One device's calls. Everything is read and changed with ``changed`` held."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changed = threading.Condition()
        self.waiting: deque[Call[Any]] = deque()
        self.running: Call[Any] | None = None
        self.thread: threading.Thread | None = None
        self.hangs = False
        self.ending = False
        self.held = False  # nothing begins meanwhile
        self.slept_until = 0.0  # how long those may sleep at most that wait for what runs

    def no_answer(self, doing: str) -> DeviceFaulty:
        """Return what is said to whoever wants something of a device that hangs."""
        hung = self.running
        if hung is None:
            return DeviceFaulty(f"{doing}: the device did not answer", code=NO_ANSWER)
        since = time.monotonic() - hung.started
        what = "it" if hung.doing == doing else f"a call before it ({hung.doing})"
        return DeviceFaulty(
            f"{doing}: {what} has not come back for {since:.0f} s, expected were {hung.deadline:g} s at most",
            hint="Look for the device in the kernel log; it is asked again when that call has come back.",
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
        """Serve others from now on; what the running call still does it does off the lane. Raises Abandoned when nobody waits for it."""
        with self.changed:
            call = self.running
            if call is None or call.nobody_waits():
                raise Abandoned(self.name)
            call.left = True
            self.running, self.thread, self.hangs = None, None, False
            if self.waiting:
                self._start()
            self.changed.notify_all()

    def _start(self) -> None:
        self.thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self.thread.start()

    def within(
        self,
        whole: Call[Any],
        function: Callable[[], Answer],
        deadline: float,
        doing: str,
        late: Callable[[Answer], object] | None,
    ) -> Answer:
        """Make a call that is part of the one that runs, on the lane's own thread. Raises Abandoned when nobody waits for that any more."""
        with self.changed:
            if whole.nobody_waits():
                raise Abandoned(doing)
            former = whole.deadline, whole.doing
            whole.started, whole.deadline, whole.doing = time.monotonic(), deadline, doing
            if whole.due < self.slept_until:
                self.changed.notify_all()  # whoever waits must not sleep beyond that
            self.slept_until = whole.due
        answer: Answer | None = None
        error: BaseException | None = None
        try:
            answer = function()
        except BaseException as raised:  # noqa: BLE001  it is raised again, unless nobody waits any more
            error = raised
        with self.changed:
            given_up = whole.nobody_waits()
            if not given_up:
                whole.started, (whole.deadline, whole.doing) = time.monotonic(), former
                self.hangs = False
        if given_up:
            if late is not None and error is None:
                with contextlib.suppress(Exception):  # nobody is left who could be told
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
        """Wait until nothing runs, and return what does when the time is over, or hangs."""
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
                self.running, self.slept_until = call, call.due
            try:
                call.answer = call.function()
            except BaseException as error:  # noqa: BLE001  it is raised again where the answer is awaited
                call.error = error
            if call.left:
                with self.changed:
                    self._settle(call)
                    if self.thread is not None or self.ending:
                        return  # another one serves the lane, or nobody is to
                    self.thread = threading.current_thread()
                continue
            with self.changed:
                given_up = call.given_up
                if not given_up:
                    self._finish(call)
            if given_up:
                if call.late is not None and call.error is None:
                    with contextlib.suppress(Exception):  # nobody is left who could be told
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
        if call.told is not None:
            with contextlib.suppress(Exception):  # who wanted to be told may be gone, and the lane serves others
                call.told()


class Lanes:
    """Lanes by name, made when needed. Safe for threads."""

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
        """Have a function called on the lane ``key``; ``deadline`` is in seconds from when its turn comes.

        ``late`` gets the answer, on the lane, if nobody waits for it any more when it comes: to take back what was done.
        A call that is made on the lane itself is part of the one that runs there, and is back when this returns.
        """
        lane, whole = self._lane(key)
        call = Call(lane, function, deadline, doing or key, late)
        if whole is not None:
            try:
                call.answer = lane.within(whole, function, deadline, call.doing, late)
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
        """Call a function on the lane ``key`` and return its answer; like ``submit`` and ``result``.

        Raises what the function raises, and DeviceFaulty with the cause no-answer.
        """
        lane, whole = self._lane(key)
        if whole is not None:
            return lane.within(whole, function, deadline, doing or key, late)
        call = Call(lane, function, deadline, doing or key, late)
        lane.put(call)
        return call.result()

    def is_mine(self, key: str) -> bool:
        """Whether the caller runs on the lane ``key``."""
        return self._lane(key)[1] is not None

    def _lane(self, key: str) -> tuple[_Lane, Call[Any] | None]:
        """A lane, and the call that runs there and is the one that asks, if it is."""
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = _Lane(f"{self._prefix}-{key}")
                lane.held = self._held_for not in (None, key)
        whole = lane.running
        return lane, whole if lane.thread is threading.current_thread() else None

    def leave(self, key: str) -> None:
        """Do what is left of the call that runs on the lane ``key``, and calls this, off the lane; others go on there meanwhile.

        Nothing is late any more then, and nothing given up. Raises Abandoned when nobody waits for the call.
        """
        with self._lock:
            lane = self._lanes[key]
        lane.leave()

    @contextlib.contextmanager
    def alone(self, key: str, seconds: float) -> Iterator[None]:
        """Have nothing run on any lane but ``key``, on which the caller runs; calls for the others wait for their turn.

        Raises DeviceBusy when a call that runs, or another who wants to be alone, does not end within the time.
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
                    raise DeviceBusy(f"{doing}: that has not come back", hint="Try again when it has.")
            yield
        finally:
            with self._lock:
                self._held_for = None
                others = list(self._lanes.values())
            for lane in others:
                lane.hold(False)
            self._alone.release()

    def hung(self) -> tuple[str, ...]:
        """Return the lanes whose call has not come back within its deadline."""
        with self._lock:
            lanes = dict(self._lanes)
        return tuple(key for key, lane in lanes.items() if lane.hangs)

    def rest(self, seconds: float) -> bool:
        """Wait until no lane but those that hang has anything to do, for so long at most; return whether it is so."""
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
        """Let all threads end that have nothing to do, the others when they have; the lanes can be used again."""
        with self._lock:
            lanes = tuple(self._lanes.values())
        for lane in lanes:
            lane.end()
