# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Retry requests that the API server refuses because it is overloaded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .client import ApiError

T = TypeVar("T")

# The server did not process the request: too many requests, and a server that starts or stops.
THROTTLED = (429, 503)


async def retry_throttled(
    send: Callable[[], Awaitable[T]], seconds: float, *, wait: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> T:
    """Return the answer of ``send``. Retry it after each refusal with Retry-After, for up to ``seconds``.

    Raises ApiError for the last refusal if the next attempt would begin after this time. Pauses are randomized, because many nodes get the
    same Retry-After at the same time.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return await send()
        except ApiError as error:
            if error.status not in THROTTLED or error.retry_after is None:
                raise
            pause = max(error.retry_after, 0.1) * random.uniform(1.0, 1.5)  # noqa: S311  no secret is made of it
            if time.monotonic() + pause > until:
                raise
        await wait(pause)
