# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Receive the events of devices, report them, and request scans. Repeated events cause few log lines and scans."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Callable

from ..core.errors import AcceleratorError
from ..core.model import Notice
from ..core.vendors.protocol import Backend
from ..logs import fields
from . import driver_state

LOG = logging.getLogger(__name__)

# The maximum duration of one wait, in seconds. It ends early when the backend is closed.
WAIT_SECONDS = 60.0
# An event that a device repeats within this number of seconds is counted. It is not logged and starts no scan.
REPEAT_SECONDS = 10.0


class RepeatLimiter:
    """Pass each event of a device to ``passed`` at once, and its repetitions as a number every REPEAT_SECONDS."""

    def __init__(self, passed: Callable[[Notice, int], None]) -> None:
        self._passed = passed
        self._repeated: dict[Notice, int] = {}
        self._timers: dict[Notice, asyncio.TimerHandle] = {}

    def take(self, notice: Notice) -> None:
        """Pass an event on, or count it."""
        if notice in self._repeated:
            self._repeated[notice] += 1
            return
        self._begin(notice)
        self._passed(notice, 0)

    def close(self) -> None:
        """Forget all events."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._repeated.clear()

    def _begin(self, notice: Notice) -> None:
        self._repeated[notice] = 0
        self._timers[notice] = asyncio.get_running_loop().call_later(REPEAT_SECONDS, self._end, notice)

    def _end(self, notice: Notice) -> None:
        count = self._repeated.pop(notice)
        del self._timers[notice]
        if count:
            self._begin(notice)
            self._passed(notice, count)


class Listener:
    """Receive the events of one vendor's devices: pass each to ``heard``, log it, and set ``scan_requested``.

    Repetitions share a log line and a scan. Waits while the library is not open.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        driver: str,
        scan_requested: asyncio.Event,
        heard: Callable[[tuple[Notice, ...]], None],
    ) -> None:
        self._backend = backend
        self._driver = driver
        self._scan_requested = scan_requested
        self._heard = heard
        self._limiter = RepeatLimiter(self._passed)

    async def run(self) -> None:
        """Receive events until canceled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                try:
                    notices = await self._wait()
                except AcceleratorError:
                    notices = ()
                if notices:
                    self._heard(notices)  # all of them: taints do not wait for a scan
                    for notice in notices:
                        self._limiter.take(notice)
                elif loop.time() - began < driver_state.RETRY_FIRST:
                    await asyncio.sleep(driver_state.RETRY_FIRST)  # the library is not open: the scan opens it
        finally:
            self._limiter.close()

    def _passed(self, notice: Notice, repeated: int) -> None:
        if repeated:
            times = f"{repeated} more times" if repeated > 1 else "once more"
            text = f"{notice.message}: {times} in the last {REPEAT_SECONDS:g} s"
        else:
            text = notice.message
        LOG.info("%s", text, extra=fields(driver=self._driver, device=notice.uuid, repeated=repeated))
        self._scan_requested.set()

    async def _wait(self) -> tuple[Notice, ...]:
        """Wait on a separate daemon thread, so that the end of the driver does not wait for it."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[tuple[Notice, ...]] = loop.create_future()

        def done(notices: tuple[Notice, ...], error: Exception | None) -> None:
            if result.cancelled():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(notices)

        def wait() -> None:
            notices: tuple[Notice, ...] = ()
            failed: Exception | None = None
            try:
                notices = self._backend.wait_for_change(WAIT_SECONDS)
            except Exception as error:  # noqa: BLE001  it is raised where it is awaited
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done, notices, failed)

        threading.Thread(target=wait, name=f"{self._backend.vendor}-listen", daemon=True).start()
        return await result
