# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run short work of claims one after the other. Work that takes longer does not delay the others.

Python's threads share one interpreter lock. Each short call into the kernel or a library releases it, another thread
takes it, and the first thread must be woken on another processor. With many parallel claims this took nearly half of
the processor time. One after the other, all claims complete sooner while they need the interpreter. A claim that waits
for hardware does not need it, so the next one starts.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

# Several times the duration of a claim that changes only files. Slower devices run in parallel after this time.
TURN_SECONDS = 0.01


class FairQueue:
    """One turn at a time, first come, first served.

    A turn ends with the claim's work, or after ``seconds``. Then the work continues in parallel.
    """

    def __init__(self, seconds: float = TURN_SECONDS) -> None:
        self._seconds = seconds
        self._free = asyncio.Semaphore(1)

    def take(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that waits for a turn and holds it."""
        return _Turn(self._free, self._seconds)


class _Turn:
    """One turn.

    It is a class because a generator would double the cost, and each claim needs three such context managers.
    """

    def __init__(self, free: asyncio.Semaphore, seconds: float) -> None:
        self._free = free
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._free.acquire()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

    async def __aexit__(self, *_error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._end()

    def _end(self) -> None:
        """Release the turn once: when its time is over or its work has ended."""
        if self._timer is not None:
            self._timer = None
            self._free.release()
