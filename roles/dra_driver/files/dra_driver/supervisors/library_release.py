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

# Seconds that running claims may take, and that the library is lent. A reset may take five minutes.
DRAIN_SECONDS = 20.0
LEND_SECONDS = 360.0
POLL_SECONDS = 0.1


class LibraryRelease:
    """The lock of the library.

    Call ``take`` before the library is opened, and ``give_way`` when another program has requested it.
    """

    def __init__(self, locks: DeviceLocks, guard: DeviceGuard) -> None:
        self._locks = locks
        self._guard = guard

    def take(self) -> None:
        """Take the lock before the library is opened. Raises AcceleratorError with the holder."""
        if not self._locks.holds(LIBRARY) and not self._locks.take(LIBRARY):
            raise AcceleratorError(
                f"The vendor's library is lent to {self._locks.holder_of(LIBRARY)}", code="library-lent"
            )

    def drop(self) -> None:
        """Release the lock after the library was closed."""
        self._locks.drop(LIBRARY)

    @property
    def holder(self) -> str:
        """Return the program that waits for the library, or has it."""
        return self._locks.holder_of(REQUEST)

    @property
    def is_requested(self) -> bool:
        """Return whether a program waits for the library, or has it."""
        return self._locks.is_taken(REQUEST)

    async def give_way(self, close: Callable[[], Awaitable[None]], reopen: Callable[[], Awaitable[None]]) -> None:
        """Close the library, lend it until it is returned or the time is up, take it again, and open it.

        Claims wait during that time. If running claims do not end in time, nothing is lent, and the request is refused.
        """
        holder = self.holder
        async with self._guard.lent(holder, DRAIN_SECONDS) as drained:
            if not drained:
                LOG.warning("the library is not lent to %s: operations on claims are running", holder)
                await self._until_withdrawn(DRAIN_SECONDS)
                return
            LOG.info("the library is lent to %s", holder)
            await close()
            self._locks.drop(LIBRARY)
            if await self._until_withdrawn(LEND_SECONDS):
                LOG.info("the library was returned")
            else:
                LOG.error("%s keeps the library for more than %g s; the driver opens it now", holder, LEND_SECONDS)
            self._locks.take(LIBRARY)
            await reopen()

    @contextlib.asynccontextmanager
    async def alone(self, uuids: Collection[str], holder: str) -> AsyncIterator[None]:
        """Exclude all other work on these devices, and work of claims on any device. Raises InUse with the user."""
        async with self._guard.lent(holder, DRAIN_SECONDS) as drained:
            if not drained:
                raise InUse(f"Claims are under way, for more than {DRAIN_SECONDS:g} s", code="device-locked")
            taken: list[str] = []
            try:
                for uuid in sorted(uuids):
                    if not self._locks.take(uuid):
                        raise self._locks.refusal(uuid, 0)
                    taken.append(uuid)
                yield
            finally:
                for uuid in taken:
                    self._locks.drop(uuid)

    async def _until_withdrawn(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.is_requested:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True
