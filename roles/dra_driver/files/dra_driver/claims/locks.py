# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Locks by name: one for each claim and one for each physical device, made when needed and dropped when free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable


class NamedLocks:
    """Locks that exist only while someone holds or awaits them."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def hold(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Hold several locks; they are taken in sorted order, so that two holders never wait for each other."""
        held: list[tuple[str, asyncio.Lock]] = []
        try:
            for name in sorted(set(names)):
                lock = await self._take(name)
                held.append((name, lock))
            yield
        finally:
            for name, lock in reversed(held):
                lock.release()
                self._leave(name)

    async def _take(self, name: str) -> asyncio.Lock:
        lock, users = self._locks.get(name) or (asyncio.Lock(), 0)
        self._locks[name] = (lock, users + 1)
        try:
            await lock.acquire()
        except BaseException:  # who is cancelled while waiting waits no longer
            self._leave(name)
            raise
        return lock

    def _leave(self, name: str) -> None:
        lock, users = self._locks[name]
        if users > 1:
            self._locks[name] = (lock, users - 1)
        else:
            del self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)
