# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read devices and work on them from the event loop. Fast answers need no thread of the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, TypeVar

from ..core.discovery.device_workers import Call
from .allocation import ClaimError
from .hardware_executor import Facts, HardwareExecutor

Answer = TypeVar("Answer")

# Seconds to wait for a device on the event loop before a thread waits for it.
SOON_SECONDS = 0.1


async def look_at(hardware: HardwareExecutor, uuids: Iterable[str], thread: Callable[..., Awaitable[Facts]]) -> Facts:
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
        call.when_back(lambda: loop.call_soon_threadsafe(came_back))
    try:
        return await all_back
    finally:
        timer.cancel()
