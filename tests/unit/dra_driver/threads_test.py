# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Blocking work in a pool's threads, awaited in an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from dra_driver.claims.device_reads import on_thread

LONG = 30.0
NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as made:
        yield made


def refuse(text: str) -> None:
    raise ValueError(text)


def test_on_thread_returns_the_result_or_raises_the_error(pool: ThreadPoolExecutor) -> None:
    async def ask() -> None:
        assert await on_thread(pool, threading.current_thread) is not threading.current_thread()
        assert await on_thread(pool, sorted, [2, 1]) == [1, 2]
        with pytest.raises(ValueError, match="no"):
            await on_thread(pool, refuse, "no")
        NAME.set("of the caller")
        assert await on_thread(pool, NAME.get) == "of the caller"

    asyncio.run(asyncio.wait_for(ask(), LONG))


def test_on_thread_canceled_calls_keep_running_work_and_start_no_waiting_work(pool: ThreadPoolExecutor) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        assert go_on.wait(LONG)
        done.append("first")

    async def give_up() -> None:
        running = asyncio.ensure_future(on_thread(pool, first))
        waiting = asyncio.ensure_future(on_thread(pool, done.append, "second"))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        go_on.set()
        await on_thread(pool, done.append, "third")

    asyncio.run(asyncio.wait_for(give_up(), LONG))
    assert done == ["first", "third"]


def test_on_thread_pool_shut_down_leaves_no_waiting_calls() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(LONG)

    async def shut_down() -> None:
        pool = ThreadPoolExecutor(max_workers=1)
        running = asyncio.ensure_future(on_thread(pool, hold))
        waiting = asyncio.ensure_future(on_thread(pool, refuse, "never called"))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        pool.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        await running

    asyncio.run(asyncio.wait_for(shut_down(), LONG))
