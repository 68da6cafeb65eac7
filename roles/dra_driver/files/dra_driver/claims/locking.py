# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Lock claims and devices by name, guard devices during other changes, and run short work in turn.

Locks are created when needed and removed when free. A device serves one claim at a time, none during a change of the
layout, and none while the vendor's library is lent: the driver closes it, so that another program can reset a device.

Short operations run one after the other, because Python's threads share one interpreter lock. Each short call into the
kernel or a library releases the lock, another thread takes it, and the first thread must be woken again. With many
parallel claims this took nearly half of the processor time. An operation that takes longer continues in parallel with the
next one, because it mostly waits for hardware.
"""

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


class NamedLocks:
    """Locks that exist only while a caller holds them or waits for them."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    def hold(self, names: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """Hold several locks. They are taken in sorted order, so that two holders never wait for each other."""
        return _Holding(self, names)

    async def take(self, name: str) -> None:
        """Wait for one lock and take it, until ``drop``."""
        lock, users = self._locks.get(name) or (asyncio.Lock(), 0)
        self._locks[name] = (lock, users + 1)
        try:
            await lock.acquire()
        except BaseException:  # a canceled caller no longer counts as waiting
            self._leave(name)
            raise

    def drop(self, name: str) -> None:
        """Release a lock."""
        self._locks[name][0].release()
        self._leave(name)

    def is_used(self, name: str) -> bool:
        """Return whether a caller holds a lock or waits for it."""
        return name in self._locks

    def _leave(self, name: str) -> None:
        lock, users = self._locks[name]
        if users > 1:
            self._locks[name] = (lock, users - 1)
        else:
            del self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)


class _Holding:
    """A context manager that holds several locks."""

    def __init__(self, locks: NamedLocks, names: Iterable[str]) -> None:
        self._locks = locks
        self._names = sorted(set(names))
        self._held: list[str] = []

    async def __aenter__(self) -> None:
        try:
            for name in self._names:
                await self._locks.take(name)
                self._held.append(name)
        except BaseException:
            self._drop()
            raise

    async def __aexit__(self, *_error: object) -> None:
        self._drop()

    def _drop(self) -> None:
        while self._held:
            self._locks.drop(self._held.pop())


# Seconds that a claim waits for a layout change of its device, for a lent library, and between two checks of a lock. After
# the wait, the claim fails, and the kubelet calls again.
LOCK_SECONDS = 10.0
LENT_SECONDS = 5.0
POLL_SECONDS = 0.05


class DeviceGuard:
    """Lock physical devices: with locks of this process, and with locks shared with programs that change layouts."""

    def __init__(self, shared: DeviceLocks) -> None:
        self._shared = shared
        #: The locks of this process only.
        self.own = NamedLocks()
        self._holders = 0
        self._holder_left = asyncio.Event()
        #: Set while the library is not lent.
        self._open = asyncio.Event()
        self._open.set()
        self._lent_to = ""

    def hold(self, uuids: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """Lock devices for reads and changes. Raises InUse or BackendUnavailable with the holder."""
        return _GuardHolding(self, sorted(set(uuids)))

    async def enter(self, uuids: Iterable[str], taken: list[str]) -> None:
        """Take the shared locks, and add them to ``taken``, which must be released later.

        The caller holds this process's own locks.
        """
        if not self._open.is_set():
            await self._wait_until_open()
        self._holders += 1
        try:
            await self._take(uuids, taken)
        except BaseException:
            self.leave(taken)
            raise

    def leave(self, taken: Iterable[str]) -> None:
        """Release the shared locks."""
        for uuid in taken:
            self._shared.drop(uuid)
        self._holders -= 1
        self._holder_left.set()

    @contextlib.asynccontextmanager
    async def lent(self, holder: str, seconds: float) -> AsyncIterator[bool]:
        """Block new holders, and yield whether all current holders have left within ``seconds``."""
        self._lent_to = holder
        self._open.clear()
        try:
            deadline = time.monotonic() + seconds
            while self._holders and time.monotonic() < deadline:
                self._holder_left.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._holder_left.wait(), max(deadline - time.monotonic(), 0.01))
            yield not self._holders
        finally:
            self._open.set()

    async def _wait_until_open(self) -> None:
        try:
            await within(self._open.wait(), LENT_SECONDS)
        except asyncio.TimeoutError:
            raise BackendUnavailable(
                f"The vendor's library is lent to {self._lent_to}",
                hint="A device is being reset. The kubelet retries the request.",
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


class _GuardHolding:
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
