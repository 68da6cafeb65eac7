# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the parts of one driver share: values with one writer each, and what each part says of itself."""

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
    """What is known of the hardware since the last look.

    ``survey`` is None before the first look, and while the hardware is given up: then ``given_up`` says why.
    ``looked_at`` is the time of the last scan in seconds since the epoch, for display; ``looked_clock`` is the same time of
    the monotonic clock, for durations.
    """

    survey: Survey | None = None
    inventory: Inventory = EMPTY
    given_up: str = ""
    looked_at: float = 0.0
    looked_clock: float = float("-inf")


class Shared(Generic[T]):
    """A value that one part writes and others read, or follow."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changed = asyncio.Event()

    @property
    def value(self) -> T:
        """The value as it is."""
        return self._value

    def put(self, value: T) -> None:
        """Replace the value and wake all who follow it."""
        self._value = value
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self, seconds: float) -> None:
        """Wait until the value is replaced, for so many seconds at most."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._changed.wait(), seconds)

    async def follow(self) -> AsyncIterator[T]:
        """Yield the value as it is, then the latest one after every change; one that was replaced in between is left out."""
        while True:
            changed = self._changed
            yield self._value
            await changed.wait()


class Conditions:
    """What stands in the way of each part, by its name; nothing when it works. Each part reports its own."""

    def __init__(self, *parts: str) -> None:
        self._found = dict.fromkeys(parts, "it has not begun yet")

    def report(self, part: str, problem: str = "") -> None:
        """Say what is wrong with a part, or that nothing is."""
        if problem:
            self._found[part] = problem
        else:
            self._found.pop(part, None)

    def problem_of(self, part: str) -> str:
        """What is wrong with one part; "" when it works."""
        return self._found.get(part, "")

    @property
    def problems(self) -> tuple[str, ...]:
        """All problems in words, each with the name of its part."""
        return tuple(f"{part}: {text}" for part, text in self._found.items())


async def keep(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run work that never ends. Log an unexpected exception, also a cancellation by other code than the caller, and start the work again.

    Raises FolderReplaced: only a new process finds its folders again.
    """
    while True:
        task = asyncio.ensure_future(work())
        try:
            await asyncio.wait((task,))
        finally:
            if not task.done():  # the caller is cancelled
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, FolderReplaced):
            raise error
        if task.cancelled() or error is not None:
            # One part ends by its own fault; the other parts and the claims continue.
            LOG.error("%s failed and begins anew", name, exc_info=error or asyncio.CancelledError("not by its caller"))
        await asyncio.sleep(RETRY_LIMIT)
