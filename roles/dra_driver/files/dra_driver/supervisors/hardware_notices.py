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
    """Pass the first event to ``on_event`` at once with 0, and then the number of its repetitions every REPEAT_SECONDS."""

    def __init__(self, on_event: Callable[[Notice, int], None]) -> None:
        self._on_event = on_event
        self._repetitions: dict[Notice, int] = {}
        self._timers: dict[Notice, asyncio.TimerHandle] = {}

    def take(self, notice: Notice) -> None:
        """Pass on an event, or count it as a repetition."""
        if notice in self._repetitions:
            self._repetitions[notice] += 1
            return
        self._start_counting(notice)
        self._on_event(notice, 0)

    def close(self) -> None:
        """Forget all events."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._repetitions.clear()

    def _start_counting(self, notice: Notice) -> None:
        self._repetitions[notice] = 0
        self._timers[notice] = asyncio.get_running_loop().call_later(REPEAT_SECONDS, self._report_repetitions, notice)

    def _report_repetitions(self, notice: Notice) -> None:
        count = self._repetitions.pop(notice)
        del self._timers[notice]
        if count:
            self._start_counting(notice)
            self._on_event(notice, count)


class DeviceEventListener:
    """Receive the events of one vendor's devices: pass them to ``on_events``, log them, and set ``scan_requested``.

    Repetitions of an event share a log line and a scan. While the library is not open, the listener tries again every RETRY_FIRST seconds.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        driver: str,
        scan_requested: asyncio.Event,
        on_events: Callable[[tuple[Notice, ...]], None],
    ) -> None:
        self._backend = backend
        self._driver = driver
        self._scan_requested = scan_requested
        self._on_events = on_events
        self._limiter = RepeatLimiter(self._log_and_request_scan)

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
                    self._on_events(notices)  # all of them: taints do not wait for a scan
                    for notice in notices:
                        self._limiter.take(notice)
                elif loop.time() - began < driver_state.RETRY_FIRST:
                    await asyncio.sleep(driver_state.RETRY_FIRST)  # the library is not open: the scan opens it
        finally:
            self._limiter.close()

    def _log_and_request_scan(self, notice: Notice, repeated: int) -> None:
        if repeated:
            times = f"{repeated} more times" if repeated > 1 else "once more"
            text = f"{notice.message}: {times} in the last {REPEAT_SECONDS:g} s"
        else:
            text = notice.message
        LOG.info("%s", text, extra=fields(driver=self._driver, device=notice.uuid, repeated=repeated))
        self._scan_requested.set()

    async def _wait(self) -> tuple[Notice, ...]:
        """Wait for events on a daemon thread, which does not delay the end of the driver. Raises the exception of the backend."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[tuple[Notice, ...]] = loop.create_future()

        def set_result(notices: tuple[Notice, ...], error: Exception | None) -> None:
            if result.cancelled():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(notices)

        def wait() -> None:
            notices: tuple[Notice, ...] = ()
            failure: Exception | None = None
            try:
                notices = self._backend.wait_for_change(WAIT_SECONDS)
            except Exception as error:  # noqa: BLE001  it is raised where it is awaited
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(set_result, notices, failure)

        threading.Thread(target=wait, name=f"{self._backend.vendor}-listen", daemon=True).start()
        return await result
