# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Asks devices for their facts from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from .execute import Facts, Hands

# How long a device that is asked for its facts may take until a thread waits for it.
SOON_SECONDS = 0.1


async def look_at(hands: Hands, uuids: Iterable[str], thread: Callable[..., Awaitable[Facts]]) -> Facts:
    """Return fresh facts. Devices that answer soon cost no thread of the pool; the others are waited for on one."""
    calls = hands.ask(uuids)
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
    for call in calls.values():
        call.when_back(lambda: loop.call_soon_threadsafe(came_back))
    try:
        if not calls or await all_back:
            return hands.answers(calls)
    finally:
        timer.cancel()
    return await thread(hands.answers, calls)
