# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Waiting that ends, and that can be cancelled at every moment.

Before Python 3.12 ``asyncio.wait_for`` loses a cancellation that comes as what it waits for is done: a loop around it never ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(work: Awaitable[T], seconds: float) -> T:
    """Return what ``work`` returns, in so many seconds. Raises asyncio.TimeoutError, with the work cancelled and ended."""
    task = asyncio.ensure_future(work)
    try:
        done, _pending = await asyncio.wait((task,), timeout=max(seconds, 0.0))
        if done:
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    raise asyncio.TimeoutError
