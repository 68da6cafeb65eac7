# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Lend the vendor's library to a program that resets a device, because a reset fails while any process has the device open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Collection
from typing import Callable

from ..claims.locking import DeviceGuard
from ..core.discovery.device_locks import LIBRARY, REQUEST, DeviceLocks
from ..core.errors import AcceleratorError, InUse

LOG = logging.getLogger(__name__)

# Seconds to wait for running operations of claims before the library is lent.
DRAIN_SECONDS = 20.0
# The longest time, in seconds, for which the library is lent. A reset may take five minutes.
LEND_SECONDS = 360.0
# Seconds between checks whether the other program has returned the library.
POLL_SECONDS = 0.1


class LibraryLock:
    """The lock of the vendor's library, which this driver has while the library is open.

    ``claim_guard`` makes operations of claims wait while the library is lent.
    """

    def __init__(self, locks: DeviceLocks, claim_guard: DeviceGuard) -> None:
        self._locks = locks
        self._claim_guard = claim_guard

    def acquire(self) -> None:
        """Take the lock before the library is opened. Raises AcceleratorError with the holder."""
        if not self._locks.holds(LIBRARY) and not self._locks.take(LIBRARY):
            raise AcceleratorError(
                f"The vendor's library is lent to {self._locks.holder_of(LIBRARY)}", code="library-lent"
            )

    def release(self) -> None:
        """Release the lock after the library was closed."""
        self._locks.drop(LIBRARY)

    @property
    def holder(self) -> str:
        """Return the name of the other program that has requested the library, before and while it is lent to this program."""
        return self._locks.holder_of(REQUEST)

    @property
    def is_requested(self) -> bool:
        """Return whether another program has requested the library. It keeps the request until it returns the library."""
        return self._locks.is_taken(REQUEST)

    async def lend(self, close: Callable[[], Awaitable[None]], reopen: Callable[[], Awaitable[None]]) -> None:
        """Close the library, lend it for up to LEND_SECONDS, take it back, and open it. Claims wait meanwhile.

        If running operations of claims do not end within DRAIN_SECONDS, the library is not lent.
        """
        holder = self.holder
        async with self._claim_guard.lent(holder, DRAIN_SECONDS) as drained:
            if not drained:
                LOG.warning("the library is not lent to %s: operations on claims are running", holder)
                await self._wait_for_return(DRAIN_SECONDS)
                return
            LOG.info("the library is lent to %s", holder)
            await close()
            self._locks.drop(LIBRARY)
            if await self._wait_for_return(LEND_SECONDS):
                LOG.info("the library was returned")
            else:
                LOG.error("%s keeps the library for more than %g s; the driver opens it now", holder, LEND_SECONDS)
            self._locks.take(LIBRARY)
            await reopen()

    @contextlib.asynccontextmanager
    async def reserve_devices(self, uuids: Collection[str], holder: str) -> AsyncIterator[None]:
        """Return a context in which no other program uses these devices, and no claim any device. Raises InUse with the user."""
        async with self._claim_guard.lent(holder, DRAIN_SECONDS) as drained:
            if not drained:
                raise InUse(f"Claims are under way, for more than {DRAIN_SECONDS:g} s", code="device-locked")
            locked_uuids: list[str] = []
            try:
                for uuid in sorted(uuids):
                    if not self._locks.take(uuid):
                        raise self._locks.refusal(uuid, 0)
                    locked_uuids.append(uuid)
                yield
            finally:
                for uuid in locked_uuids:
                    self._locks.drop(uuid)

    async def _wait_for_return(self, seconds: float) -> bool:
        """Return whether the other program has withdrawn its request within ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.is_requested:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True
