# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run blocking work on threads of a pool, and wait for reads of devices on the event loop.

A read that a device answers quickly needs no thread of the pool.
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

    If the caller is canceled, work that has started continues.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        if result.cancelled():
            return
        try:
            value = context.run(function, *arguments)
        except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
            call_on_loop(_fail, error)
        else:
            call_on_loop(_succeed, value)

    def call_on_loop(set_result: Callable[..., None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so no caller waits there
            loop.call_soon_threadsafe(set_result, result, value)

    def cancel_unstarted(submitted: Future[None]) -> None:
        if submitted.cancelled():  # the pool was shut down before the work started
            call_on_loop(_cancel, None)

    executor.submit(work).add_done_callback(cancel_unstarted)
    return await result


def _cancel(result: asyncio.Future[Any], _value: None) -> None:
    result.cancel()


def _succeed(result: asyncio.Future[T], value: T) -> None:
    if not result.done():
        result.set_result(value)


def _fail(result: asyncio.Future[Any], error: BaseException) -> None:
    if not result.done():
        result.set_exception(error)


# The event loop waits for a device for this time, in seconds. After that, a thread of the pool waits for it.
SOON_SECONDS = 0.1


async def read_facts(
    hardware: HardwareExecutor, uuids: Iterable[str], run_on_thread: Callable[..., Awaitable[Facts]]
) -> Facts:
    """Return fresh facts. Raises BackendUnavailable."""
    calls = hardware.start_reads(uuids)
    if await _end_soon(calls.values()):
        return hardware.collect_facts(calls)
    return await run_on_thread(hardware.collect_facts, calls)


def refuse_missing(uuids: Iterable[str], found: Collection[str]) -> None:
    """Raise ClaimError with the requested devices that are missing in ``found``."""
    missing = sorted(set(uuids) - set(found))
    if missing:
        raise ClaimError(
            f"Device {', '.join(missing)} is no longer on this node",
            hint="Delete the pod, so that the claim is allocated again.",
            code="device-gone",
        )


async def answer_of(call: Call[T], run_on_thread: Callable[..., Awaitable[T]]) -> T:
    """Return the result of a call, or raise its error. Raises DeviceFaulty if the device does not answer in time."""
    if await _end_soon([call]):
        return call.result()
    return await run_on_thread(call.result)


async def _end_soon(calls: Collection[Call[Any]]) -> bool:
    """Wait for calls, and return whether all have ended within SOON_SECONDS."""
    if not calls:
        return True
    loop = asyncio.get_running_loop()
    all_ended: asyncio.Future[bool] = loop.create_future()
    running = len(calls)

    def count_ended() -> None:
        nonlocal running
        running -= 1
        if running == 0:
            set_answer(True)

    def set_answer(answer: bool) -> None:
        if not all_ended.done():
            all_ended.set_result(answer)

    timer = loop.call_later(SOON_SECONDS, set_answer, False)
    for call in calls:
        call.add_done_callback(lambda: loop.call_soon_threadsafe(count_ended))
    try:
        return await all_ended
    finally:
        timer.cancel()
