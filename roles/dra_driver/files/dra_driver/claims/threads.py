# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run blocking work on the threads of a pool for an event loop, with one message in each direction, so that a claim waits for little else."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, TypeVar

T = TypeVar("T")


async def on_thread(executor: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on a thread of the pool, in the caller's context. Return its result or raise its error.

    If the caller is canceled, running work continues, and work that has not started is not started.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        if answer.cancelled():
            return
        try:
            found = context.run(function, *arguments)
        except BaseException as error:  # noqa: BLE001  it is raised where the answer is awaited
            back(_fail, error)
        else:
            back(_succeed, found)

    def back(settle: Callable[..., None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so no caller waits there
            loop.call_soon_threadsafe(settle, answer, value)

    def given_up(begun: Future[None]) -> None:
        if begun.cancelled():  # the pool was shut down before the work started
            back(_cancel, None)

    executor.submit(work).add_done_callback(given_up)
    return await answer


def _cancel(answer: asyncio.Future[Any], _value: None) -> None:
    answer.cancel()


def _succeed(answer: asyncio.Future[T], found: T) -> None:
    if not answer.done():
        answer.set_result(found)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
