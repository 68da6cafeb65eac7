# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Answers for the claims of one call: each is worked on by itself, owed an answer in time, and goes on if it is late."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ..core.errors import AcceleratorError
from ..logs import fields, operation
from ..metrics import Metrics, Stopwatch
from .records import ClaimRecord, ClaimReference

LOG = logging.getLogger(__name__)
Work = Callable[[ClaimReference, Stopwatch], Awaitable[ClaimRecord | None]]

# The kubelet's limit is 45 s; an answer that says what is going on is better than none.
ANSWER_SECONDS = 40.0


class Afterwards:
    """What is told of claims that went well, once who asked has the answer: nobody waits for a line of the log."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] | None = []

    def tell(self, telling: Callable[[], None]) -> None:
        """Have something told when the answer has been given, at once if it has."""
        if self._waiting is None:
            telling()
        else:
            self._waiting.append(telling)

    def answered(self) -> None:
        """Tell what waits: the answer has been given, or nobody waits for it any more."""
        waiting, self._waiting = self._waiting or (), None
        for telling in waiting:
            telling()


_AFTERWARDS: contextvars.ContextVar[Afterwards | None] = contextvars.ContextVar("afterwards", default=None)


@contextlib.contextmanager
def telling_afterwards(afterwards: Afterwards) -> Iterator[None]:
    """Have what is asked for inside told of when its answer has been given. Outside of it that is at once."""
    token = _AFTERWARDS.set(afterwards)
    try:
        yield
    finally:
        _AFTERWARDS.reset(token)


@dataclass(frozen=True)
class Outcome:
    """What became of one claim: its record, or an error text for the kubelet, and the error's code."""

    record: ClaimRecord | None = None
    error: str = ""
    code: str = ""


class Reporter(Protocol):
    """Who is told about claims that could not be prepared or unprepared."""

    def failed(self, claim: ClaimReference, verb: str, error: AcceleratorError) -> None:
        """Tell that an operation failed. ``verb`` is Prepare or Unprepare."""


class Answers:
    """Who is worked for at the moment, and what came of it. ``reporter`` is told of failures."""

    def __init__(self, reporter: Reporter, metrics: Metrics) -> None:
        self._reporter = reporter
        self._metrics = metrics
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def under_way(self) -> int:
        """How many claims are being worked on."""
        return len(self._running)

    async def drain(self, seconds: float) -> None:
        """Wait for operations under way."""
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=seconds)

    async def to_all(
        self,
        references: Sequence[ClaimReference],
        verb: str,
        work: Work,
    ) -> dict[str, Outcome]:
        """Do the work for each claim; there is one outcome for each, by UID, and no exception. ``verb`` is Prepare or Unprepare."""
        loop = asyncio.get_running_loop()
        tasks: dict[str, asyncio.Task[Outcome]] = {}
        outcomes: dict[str, Outcome] = {}
        all_done: asyncio.Future[None] = loop.create_future()

        def done(uid: str, _task: asyncio.Task[Outcome] | None = None) -> None:
            waiting.discard(uid)
            self._running.discard(tasks[uid])
            if not waiting:
                end_waiting()

        def end_waiting() -> None:
            if not all_done.done():
                all_done.set_result(None)

        for reference in references:
            if reference.problem:
                # Nobody is told but who asked: an Event would be named by it as well.
                LOG.warning("%s refused: %s", verb.lower(), reference.problem)
                outcomes[reference.uid] = Outcome(error=reference.problem, code="invalid-claim")
            elif reference.uid not in tasks:
                its_done = partial(done, reference.uid)
                task = loop.create_task(self._one(reference, verb, work, its_done))
                tasks[reference.uid] = task
                self._running.add(task)
                task.add_done_callback(its_done)  # of one that is cancelled before it begins
        waiting = set(tasks)
        if tasks:
            # What is waited for is not cancelled: neither here when time is up nor when the kubelet hangs up. That a task is over it tells in
            # its last step, since a callback of it comes one round of the loop later.
            timer = loop.call_later(ANSWER_SECONDS, end_waiting)
            try:
                await all_done
            finally:
                timer.cancel()
        late = Outcome(error=f"{verb} is still under way after {ANSWER_SECONDS:g} s and goes on; ask again")
        outcomes.update({uid: task.result() if task.done() else late for uid, task in tasks.items()})
        return outcomes

    async def _one(self, reference: ClaimReference, verb: str, work: Work, done: Callable[[], None]) -> Outcome:
        """Do the work for one claim; ``done`` is called at the end, however it ends."""
        try:
            return await self._outcome(reference, verb, work)
        finally:
            done()

    async def _outcome(self, reference: ClaimReference, verb: str, work: Work) -> Outcome:
        watch = Stopwatch(self._metrics, verb.lower())
        about = {"claim": reference.describe(), "uid": reference.uid}
        with operation():
            try:
                record = await work(reference, watch)
            except AcceleratorError as error:
                timings = watch.finish(error.code)
                LOG.warning("%s failed: %s", verb.lower(), error, extra=fields(**about, code=error.code, **timings))
                self._reporter.failed(reference, verb, error)
                return Outcome(error=str(error), code=error.code)
            except Exception as error:
                # The border to the kubelet: each claim of a call is owed an answer, and what goes wrong with one, even if
                # nobody foresaw it, must not take the answers of the others along.
                timings = watch.finish("internal")
                LOG.exception("%s failed", verb.lower(), extra=fields(**about, **timings))
                unforeseen = AcceleratorError(f"{type(error).__name__}: {error}", hint="See the driver's log.")
                self._reporter.failed(reference, verb, unforeseen)
                return Outcome(error=str(unforeseen), code=unforeseen.code)
            watch.stop()
            told = partial(_tell, contextvars.copy_context(), verb, about, record, watch)
            afterwards = _AFTERWARDS.get()
            if afterwards is None:
                told()
            else:
                afterwards.tell(told)
            return Outcome(record=record)


def _tell(
    context: contextvars.Context, verb: str, about: dict[str, str], record: ClaimRecord | None, watch: Stopwatch
) -> None:
    """Say that a claim went well, and how long it took, as a part of its operation."""
    names = [device.name for device in record.devices] if record else []
    more = fields(**about, devices=names, **watch.finish())
    context.run(partial(LOG.info, "%sd claim", verb.lower(), extra=more))
