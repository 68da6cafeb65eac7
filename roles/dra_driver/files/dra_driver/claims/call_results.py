# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the work of one kubelet call, with a separate result for each claim, before the kubelet's timeout.

Work that takes longer continues after the answer.
"""

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
from .store.records import ClaimRecord, ClaimReference

LOG = logging.getLogger(__name__)
Work = Callable[[ClaimReference, Stopwatch], Awaitable[ClaimRecord | None]]

# Seconds. The kubelet stops waiting after 45 s, and an answer about the current state is better than a timeout.
ANSWER_SECONDS = 40.0


class DeferredCallbacks:
    """Callbacks that run after the answer of a call was sent, such as log lines, so that the caller does not wait for them."""

    def __init__(self) -> None:
        #: None after the answer.
        self._queued: list[Callable[[], None]] | None = []

    def run_later(self, callback: Callable[[], None]) -> None:
        """Run a callback after the answer, or at once if the answer was already sent."""
        if self._queued is None:
            callback()
        else:
            self._queued.append(callback)

    def run_all_now(self) -> None:
        """Run the queued callbacks, because the answer was sent or the call has ended."""
        queued, self._queued = self._queued or (), None
        for callback in queued:
            callback()


_DEFERRED: contextvars.ContextVar[DeferredCallbacks | None] = contextvars.ContextVar("afterwards", default=None)


@contextlib.contextmanager
def defer_callbacks(callbacks: DeferredCallbacks) -> Iterator[None]:
    """Queue the callbacks of the work inside this context. Outside of it they run at once."""
    token = _DEFERRED.set(callbacks)
    try:
        yield
    finally:
        _DEFERRED.reset(token)


@dataclass(frozen=True)
class Outcome:
    """The result for one claim: its record, or an error message for the kubelet with the error's code."""

    record: ClaimRecord | None = None
    error: str = ""
    code: str = ""


class Reporter(Protocol):
    """Receives the claims that could not be prepared or unprepared."""

    def failed(self, claim: ClaimReference, verb: str, error: AcceleratorError) -> None:
        """Report a failed operation. ``verb`` is Prepare or Unprepare."""


class ClaimWorkRunner:
    """Run the work for claims and return the outcomes. ``reporter`` receives failures."""

    def __init__(self, reporter: Reporter, metrics: Metrics) -> None:
        self._reporter = reporter
        self._metrics = metrics
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def calls_in_progress(self) -> int:
        """Return the number of claims in progress."""
        return len(self._running)

    async def drain(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the running operations."""
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=seconds)

    async def run_all(
        self,
        references: Sequence[ClaimReference],
        verb: str,
        work: Work,
    ) -> dict[str, Outcome]:
        """Run the work for each claim, and return one outcome for each, by UID. It raises no exception.

        ``verb`` is Prepare or Unprepare.
        """
        loop = asyncio.get_running_loop()
        tasks: dict[str, asyncio.Task[Outcome]] = {}
        outcomes: dict[str, Outcome] = {}
        all_done: asyncio.Future[None] = loop.create_future()

        def note_end(uid: str, _task: asyncio.Task[Outcome] | None = None) -> None:
            unfinished.discard(uid)
            self._running.discard(tasks[uid])
            if not unfinished:
                end_waiting()

        def end_waiting() -> None:
            if not all_done.done():
                all_done.set_result(None)

        for reference in references:
            if reference.problem:
                # Only the caller gets this error: an Event would need the claim's invalid name.
                LOG.warning("%s refused: %s", verb.lower(), reference.problem)
                outcomes[reference.uid] = Outcome(error=reference.problem, code="invalid-claim")
            elif reference.uid not in tasks:
                note_this_end = partial(note_end, reference.uid)
                task = loop.create_task(self._run_one(reference, verb, work, note_this_end))
                tasks[reference.uid] = task
                self._running.add(task)
                task.add_done_callback(note_this_end)  # for a task that is canceled before it starts
        unfinished = set(tasks)
        if tasks:
            # Neither the timeout nor the end of the kubelet's call cancels the tasks. A task reports its end in its last
            # step, because a done callback runs one iteration of the loop later.
            timer = loop.call_later(ANSWER_SECONDS, end_waiting)
            try:
                await all_done
            finally:
                timer.cancel()
        late = Outcome(error=f"{verb} is still in progress after {ANSWER_SECONDS:g} s and continues; retry")
        outcomes.update({uid: task.result() if task.done() else late for uid, task in tasks.items()})
        return outcomes

    async def _run_one(self, reference: ClaimReference, verb: str, work: Work, done: Callable[[], None]) -> Outcome:
        """Run the work for one claim. ``done`` is called at the end, also after a failure."""
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
                # Each claim of a call needs an answer for the kubelet. An unexpected error of one claim must not remove
                # the answers of the others.
                timings = watch.finish("internal")
                LOG.exception("%s failed", verb.lower(), extra=fields(**about, **timings))
                unforeseen = AcceleratorError(f"{type(error).__name__}: {error}", hint="See the driver's log.")
                self._reporter.failed(reference, verb, unforeseen)
                return Outcome(error=str(unforeseen), code=unforeseen.code)
            watch.stop()
            report_result = partial(_report, contextvars.copy_context(), verb, about, record, watch)
            callbacks = _DEFERRED.get()
            if callbacks is None:
                report_result()
            else:
                callbacks.run_later(report_result)
            return Outcome(record=record)


def _report(
    context: contextvars.Context, verb: str, about: dict[str, str], record: ClaimRecord | None, watch: Stopwatch
) -> None:
    """Log a prepared or unprepared claim with its timings, in the context of its operation."""
    names = [device.name for device in record.devices] if record else []
    more = fields(**about, devices=names, **watch.finish())
    context.run(partial(LOG.info, "%sd claim", verb.lower(), extra=more))
