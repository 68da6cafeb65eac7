# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Control access to devices: one claim at a time, none during a change of the layout, and none while the library is lent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from ..core.discovery.device_locks import DeviceLocks
from ..core.errors import BackendUnavailable
from ..deadlines import within
from .locks import NamedLocks

# Seconds that a claim waits for a layout change of its device, and for a lent library. The kubelet calls again.
LOCK_SECONDS = 10.0
LENT_SECONDS = 5.0
POLL_SECONDS = 0.05


class DeviceGuard:
    """Lock physical devices: with locks of this process, and with locks shared with programs that change layouts."""

    def __init__(self, shared: DeviceLocks) -> None:
        self._shared = shared
        #: The locks of this process only.
        self.own = NamedLocks()
        self._inside = 0
        self._left = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._lent_to = ""

    def hold(self, uuids: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """Lock devices for reads and changes. Raises InUse or BackendUnavailable with the holder."""
        return _Holding(self, sorted(set(uuids)))

    async def enter(self, uuids: Iterable[str], taken: list[str]) -> None:
        """Take the shared locks, and add them to ``taken``, which must be released later.

        The caller holds this process's own locks.
        """
        if not self._open.is_set():
            await self._wait_until_open()
        self._inside += 1
        try:
            await self._take(uuids, taken)
        except BaseException:
            self.leave(taken)
            raise

    def leave(self, taken: Iterable[str]) -> None:
        """Release the shared locks."""
        for uuid in taken:
            self._shared.drop(uuid)
        self._inside -= 1
        self._left.set()

    @contextlib.asynccontextmanager
    async def lent(self, holder: str, seconds: float) -> AsyncIterator[bool]:
        """Block new holders, and yield whether all current holders have left within ``seconds``."""
        self._lent_to = holder
        self._open.clear()
        try:
            deadline = time.monotonic() + seconds
            while self._inside and time.monotonic() < deadline:
                self._left.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._left.wait(), max(deadline - time.monotonic(), 0.01))
            yield not self._inside
        finally:
            self._open.set()

    async def _wait_until_open(self) -> None:
        try:
            await within(self._open.wait(), LENT_SECONDS)
        except asyncio.TimeoutError:
            raise BackendUnavailable(
                f"The vendor's library is lent to {self._lent_to}",
                hint="A device is being reset. The kubelet asks again.",
                code="library-lent",
            ) from None

    async def _take(self, uuids: Iterable[str], taken: list[str]) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        for uuid in uuids:
            while not self._shared.take(uuid):
                if time.monotonic() >= deadline:
                    raise self._shared.refusal(uuid, LOCK_SECONDS)
                await asyncio.sleep(POLL_SECONDS)
            taken.append(uuid)


class _Holding:
    """A context manager that holds devices."""

    def __init__(self, guard: DeviceGuard, uuids: list[str]) -> None:
        self._guard = guard
        self._uuids = uuids
        self._own = guard.own.hold(uuids)
        self._taken: list[str] = []

    async def __aenter__(self) -> None:
        await self._own.__aenter__()
        try:
            await self._guard.enter(self._uuids, self._taken)
        except BaseException as error:
            await self._own.__aexit__(type(error), error, error.__traceback__)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._guard.leave(self._taken)
        await self._own.__aexit__(kind, error, traceback)
