# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Wait with a timeout, without losing a cancellation.

Before Python 3.12 ``asyncio.wait_for`` ignores a cancellation that arrives after the awaited work is done. A loop around it then never ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(work: Awaitable[T], seconds: float) -> T:
    """Wait up to ``seconds`` for ``work`` and return its result.

    Raises asyncio.TimeoutError if the work did not end in time, and if other code cancelled the work. aiohttp cancels
    host name lookups when a session is closed. Without the conversion, the caller would end as if it was cancelled. If
    the caller is cancelled, the work is cancelled too, and a result of the work is discarded.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _pending = await asyncio.wait((task,), timeout=max(seconds, 0.0))
        if done and not task.cancelled():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        elif not task.cancelled():
            task.exception()  # asyncio logs an exception that no code reads
    try:
        return task.result()  # the work ended although it was cancelled
    except asyncio.CancelledError:
        raise asyncio.TimeoutError from None
