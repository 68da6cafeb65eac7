# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Listens to what the devices tell without being asked, and has the hardware looked at when they do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Callable

from ..core.backend import Backend
from ..core.errors import AcceleratorError
from ..core.model import Notice
from ..logs import fields
from . import shared

LOG = logging.getLogger(__name__)

# So long one wait takes at most; it ends early when the backend is closed.
WAIT_SECONDS = 60.0


class Listener:
    """One vendor's devices. Passes on what they tell, and sets ``soon`` then; waits while the library is not open."""

    def __init__(
        self,
        backend: Backend,
        *,
        driver: str,
        soon: asyncio.Event,
        heard: Callable[[tuple[Notice, ...]], None],
    ) -> None:
        self._backend = backend
        self._driver = driver
        self._soon = soon
        self._heard = heard

    async def run(self) -> None:
        """Listen until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                notices = await self._wait()
            except AcceleratorError:
                notices = ()
            for notice in notices:
                LOG.info("%s", notice.message, extra=fields(driver=self._driver))
            if notices:
                self._heard(notices)
                self._soon.set()
            elif loop.time() - began < shared.RETRY_FIRST:
                await asyncio.sleep(shared.RETRY_FIRST)  # the library is not open: the look opens it

    async def _wait(self) -> tuple[Notice, ...]:
        """Wait on a thread of its own, which nobody waits for when the driver ends."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[tuple[Notice, ...]] = loop.create_future()

        def done(notices: tuple[Notice, ...], error: Exception | None) -> None:
            if told.cancelled():
                return
            if error is not None:
                told.set_exception(error)
            else:
                told.set_result(notices)

        def wait() -> None:
            notices: tuple[Notice, ...] = ()
            failed: Exception | None = None
            try:
                notices = self._backend.wait_for_change(WAIT_SECONDS)
            except Exception as error:  # noqa: BLE001  it is raised where it is awaited
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done, notices, failed)

        threading.Thread(target=wait, name=f"{self._backend.vendor}-listen", daemon=True).start()
        return await told
