# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Locks by name: one for each claim and one for each physical device, created when needed and removed when free."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager


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
