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
from ..kubelet.sockets import FolderReplaced

LOG = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_FIRST, RETRY_LIMIT = 1.0, 15.0

EMPTY = Inventory(pool="", offers={}, dynamic=frozenset())


@dataclass(frozen=True)
class Snapshot:
    """The facts about the hardware from the last scan.

    ``survey`` is missing (None) before the first scan, and after repeated failures; then ``given_up`` has the reason.
    ``scanned_at`` is the time of the last scan in seconds since the epoch, for display; ``scanned_clock`` is the same
    time of the monotonic clock, for durations.
    """

    survey: Survey | None = None
    inventory: Inventory = EMPTY
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
        """Wait until the value is replaced, up to ``seconds``."""
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
    """The problem of each part, by its name.

    A part without a problem has no entry. Each part reports its own problem.
    """

    def __init__(self, *parts: str) -> None:
        self._found = dict.fromkeys(parts, "it has not begun yet")

    def report(self, part: str, problem: str = "") -> None:
        """Set the problem of a part, or remove it ("")."""
        if problem:
            self._found[part] = problem
        else:
            self._found.pop(part, None)

    def problem_of(self, part: str) -> str:
        """Return the problem of one part; "" if it works."""
        return self._found.get(part, "")

    @property
    def problems(self) -> tuple[str, ...]:
        """Return all problems, each with the name of its part."""
        return tuple(f"{part}: {text}" for part, text in self._found.items())


async def keep(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run work that never ends.

    After an unexpected exception, or a cancellation by other code than the caller, log it and restart the work. Raises
    FolderReplaced, because only a new process can reach replaced directories.
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
        if isinstance(error, FolderReplaced):
            raise error
        if task.cancelled() or error is not None:
            # One part ends by its own fault; the other parts and the claims continue.
            LOG.error("%s failed and restarts", name, exc_info=error or asyncio.CancelledError("not by its caller"))
        await asyncio.sleep(RETRY_LIMIT)
