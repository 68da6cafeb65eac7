# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Tells systemd that the driver lives, for as long as it answers on its own sockets; a driver that does not is started again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ..core.errors import AcceleratorError
from ..deadlines import within
from ..logs import StateLog

LOG = logging.getLogger(__name__)

# So often within the time that systemd allows.
TIMES = 3


def interval(environment: Mapping[str, str], pid: int) -> float | None:
    """Return how often systemd wants to be told, in seconds; None where it does not, or means another process."""
    meant = environment.get("WATCHDOG_PID", "")
    allowed = environment.get("WATCHDOG_USEC", "")
    if not allowed.isdigit() or int(allowed) == 0 or (meant and meant != str(pid)):
        return None
    return int(allowed) / 1e6 / TIMES


class Watchdog:
    """Asks every driver, and tells systemd when all have answered."""

    def __init__(self, alive: Sequence[Callable[[], Awaitable[None]]], tell: Callable[[str], None]) -> None:
        self._alive = alive
        self._tell = tell
        self._state = StateLog(LOG)

    async def run(self) -> None:
        """Tell systemd until cancelled; nothing is done where it does not ask."""
        every = interval(os.environ, os.getpid())
        if every is None:
            await asyncio.Event().wait()
            return
        while True:
            if await self.look(every):
                self._tell("WATCHDOG=1")
            await asyncio.sleep(every)

    async def look(self, seconds: float) -> bool:
        """Whether all drivers answer within so many seconds. Raises nothing."""
        try:
            await within(asyncio.gather(*(alive() for alive in self._alive)), seconds)
        except (AcceleratorError, asyncio.TimeoutError) as error:
            reason = str(error) or f"no answer within {seconds:g} s"
            self._state.report(f"the driver does not answer itself: {reason}", level=logging.ERROR)
            return False
        self._state.report("the driver answers itself", level=logging.DEBUG)
        return True
