# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The shared state of the parts of one driver: values with one writer each, and the condition of each part."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..claims.plan import Inventory
from ..deadlines import within
from ..inventory import Survey
from ..kubelet.sockets import DirectoryReplaced

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# The first and the longest pause, in seconds, between attempts of a part. The pause doubles after each failure.
RETRY_FIRST, RETRY_LIMIT = 1.0, 15.0

EMPTY_INVENTORY = Inventory(pool="", offers={}, dynamic=frozenset())


@dataclass(frozen=True)
class Snapshot:
    """The facts about the hardware from the last scan.

    ``survey`` has the devices that the last scan found. It is None before the first scan and after repeated failed scans. After
    failures ``given_up`` has the reason, and ``inventory`` still has the devices of the last successful scan.
    ``scanned_at`` and ``scanned_clock`` are the time of the last successful scan: in seconds since the epoch, for display, and of the
    monotonic clock, for durations.
    """

    survey: Survey | None = None
    inventory: Inventory = EMPTY_INVENTORY
    given_up: str = ""
    scanned_at: float = 0.0
    scanned_clock: float = float("-inf")


class Shared(Generic[T]):
    """A value that one part writes and other parts read or watch."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changed = asyncio.Event()

    @property
    def value(self) -> T:
        """Return the current value."""
        return self._value

    def put(self, value: T) -> None:
        """Replace the value and wake all readers that follow it."""
        self._value = value
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self, seconds: float) -> None:
        """Wait up to ``seconds`` until the value is replaced."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._changed.wait(), seconds)

    async def follow(self) -> AsyncIterator[T]:
        """Yield the current value, and then the latest one after every change.

        Values that were replaced in between are skipped.
        """
        while True:
            changed = self._changed
            yield self._value
            await changed.wait()


class Conditions:
    """The current problem of each part of a driver, by the name of the part.

    A part without a problem has no entry. Until its first report, a part has the problem that it has not begun.
    """

    def __init__(self, *parts: str) -> None:
        self._problems = dict.fromkeys(parts, "it has not begun yet")

    def report(self, part: str, problem: str = "") -> None:
        """Set the problem of a part, or remove it ("")."""
        if problem:
            self._problems[part] = problem
        else:
            self._problems.pop(part, None)

    def problem_of(self, part: str) -> str:
        """Return the problem of one part; "" if it works."""
        return self._problems.get(part, "")

    @property
    def problems(self) -> tuple[str, ...]:
        """Return all problems, each with the name of its part."""
        return tuple(f"{part}: {text}" for part, text in self._problems.items())


async def keep_running(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work``, and start it again each time it ends, until the caller is canceled.

    An exception of the work, and a cancellation by other code than the caller, are logged. Raises DirectoryReplaced: the kubelet's
    directories were replaced, and only a new process can use the new ones.
    """
    while True:
        task = asyncio.ensure_future(work())
        try:
            await asyncio.wait((task,))
        finally:
            if not task.done():  # the caller is canceled
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, DirectoryReplaced):
            raise error
        if task.cancelled() or error is not None:
            # One part ends by its own fault; the other parts and the claims continue.
            LOG.error("%s failed and restarts", name, exc_info=error or asyncio.CancelledError("not by its caller"))
        await asyncio.sleep(RETRY_LIMIT)


async def run_together(*works: Callable[[], Awaitable[None]]) -> None:
    """Run several works in parallel until the first one ends, and cancel the others. Raises the exception of the ended work."""
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
