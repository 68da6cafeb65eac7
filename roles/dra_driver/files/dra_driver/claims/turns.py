# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Lets claims that are quick go one after the other, and has nobody wait for one that is not.

Python's threads share one interpreter. Each short call into the kernel or a library lets go of it, another thread takes it, and who comes back
waits to be woken on another processor: of many claims side by side nearly half of the processor's time went into that. One after the other they
all end sooner, as long as it is the interpreter that they need. Who waits for hardware does not need it, and lets the next one begin.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

# Some times what a claim takes of which nothing but files is changed. Devices that take longer are worked on side by side after as long.
TURN_SECONDS = 0.01


class Turns:
    """One turn at a time, in the order of asking. A turn ends with its claim's work, or after so many seconds, and the work goes on beside others then."""

    def __init__(self, seconds: float = TURN_SECONDS) -> None:
        self._seconds = seconds
        self._free = asyncio.Semaphore(1)

    def take(self) -> AbstractAsyncContextManager[None]:
        """Wait for a turn and have it."""
        return _Turn(self._free, self._seconds)


class _Turn:
    """One turn. A claim takes three such things on its way, and a generator for each would cost it as much again."""

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
        """Give the turn back, once: when its time is over or its work has ended."""
        if self._timer is not None:
            self._timer = None
            self._free.release()
