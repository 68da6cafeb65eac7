# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Notify systemd's watchdog while the driver answers on its own sockets. Otherwise systemd restarts the driver."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ..core.errors import AcceleratorError
from ..deadlines import within
from ..logs import StateLog

LOG = logging.getLogger(__name__)

# Notifications within systemd's timeout.
TIMES = 3


def interval(environment: Mapping[str, str], pid: int) -> float | None:
    """Return the interval of notifications, in seconds; None if the watchdog is off or for another process."""
    meant = environment.get("WATCHDOG_PID", "")
    allowed = environment.get("WATCHDOG_USEC", "")
    if not allowed.isdecimal() or int(allowed) == 0 or (meant and meant != str(pid)):
        return None
    return int(allowed) / 1e6 / TIMES


class Watchdog:
    """Check every driver, and notify systemd when all have answered."""

    def __init__(self, alive: Sequence[Callable[[], Awaitable[None]]], notify: Callable[[str], None]) -> None:
        self._alive = alive
        self._notify = notify
        self._state = StateLog(LOG)

    async def run(self) -> None:
        """Notify systemd until canceled. Do nothing if the watchdog is off."""
        every = interval(os.environ, os.getpid())
        if every is None:
            await asyncio.Event().wait()
            return
        while True:
            if await self.check(every):
                self._notify("WATCHDOG=1")
            await asyncio.sleep(every)

    async def check(self, seconds: float) -> bool:
        """Return whether all drivers answer within ``seconds``. Raises nothing."""
        try:
            await within(asyncio.gather(*(alive() for alive in self._alive)), seconds)
        except (AcceleratorError, asyncio.TimeoutError) as error:
            reason = str(error) or f"no answer within {seconds:g} s"
            self._state.report(f"the driver does not answer itself: {reason}", level=logging.ERROR)
            return False
        self._state.report("the driver answers itself", level=logging.DEBUG)
        return True
