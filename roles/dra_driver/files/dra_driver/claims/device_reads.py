# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run blocking work on threads of a pool, and read devices from the event loop.

Each piece of work needs one message in each direction. Fast answers of devices need no thread of the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..core.discovery.device_workers import Call
from .allocation import ClaimError
from .hardware_executor import Facts, HardwareExecutor

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


Answer = TypeVar("Answer")

# Seconds to wait for a device on the event loop before a thread waits for it.
SOON_SECONDS = 0.1


async def read_facts(
    hardware: HardwareExecutor, uuids: Iterable[str], thread: Callable[..., Awaitable[Facts]]
) -> Facts:
    """Return fresh facts. Raises BackendUnavailable."""
    calls = hardware.ask(uuids)
    if await _are_back_soon(calls.values()):
        return hardware.answers(calls)
    return await thread(hardware.answers, calls)


def refuse_missing(uuids: Iterable[str], found: Collection[str]) -> None:
    """Raise ClaimError with the requested devices that are missing in ``found``."""
    missing = sorted(set(uuids) - set(found))
    if missing:
        raise ClaimError(
            f"Device {', '.join(missing)} is no longer on this node",
            hint="Delete the pod, so that the claim is allocated again.",
            code="device-gone",
        )


async def answer_of(call: Call[Answer], thread: Callable[..., Awaitable[Answer]]) -> Answer:
    """Return the result of a call, or raise its error. Raises DeviceFaulty if the device does not answer in time."""
    if await _are_back_soon([call]):
        return call.result()
    return await thread(call.result)


async def _are_back_soon(calls: Collection[Call[Any]]) -> bool:
    if not calls:
        return True
    loop = asyncio.get_running_loop()
    all_back: asyncio.Future[bool] = loop.create_future()
    left = len(calls)

    def came_back() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            decide(True)

    def decide(answer: bool) -> None:
        if not all_back.done():
            all_back.set_result(answer)

    timer = loop.call_later(SOON_SECONDS, decide, False)
    for call in calls:
        call.add_done_callback(lambda: loop.call_soon_threadsafe(came_back))
    try:
        return await all_back
    finally:
        timer.cancel()
