# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Retry requests that fail because of the API server or the network, and not because of their object."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..core.errors import AcceleratorError
from .errors import ApiError, ApiUnreachable, ResourceApiMissing

T = TypeVar("T")

# The server did not process the request: it had too many requests, or it is starting or stopping.
THROTTLED = (429, 503)
# The pause after a failure, in seconds: random between half and all of a limit, which doubles from the first value to the last.
PAUSE_FIRST, PAUSE_LIMIT = 1.0, 60.0


def is_temporary(error: Exception) -> bool:
    """Return whether the same read can succeed later: the server is overloaded, starts, stops, or did not respond.

    An error of etcd, such as a change of its leader, can cause status 500 (kubernetes/kubernetes#112152).
    """
    if isinstance(error, ApiError):
        return error.retry_after is not None or error.status in (*THROTTLED, 500, 504)
    return isinstance(error, ApiUnreachable)


def spread(seconds: float) -> float:
    """Return a random time between ``seconds`` and 1.5 times that, because many nodes get the same Retry-After at the same time."""
    return seconds * random.uniform(1.0, 1.5)  # noqa: S311  no secret is made of it


def backoff(failures: int, first: float, limit: float) -> float:
    """Return the seconds to wait after ``failures`` consecutive failures: ``first``, doubled with each failure up to ``limit``."""
    return min(first * 2.0 ** min(max(failures - 1, 0), 30), limit)  # 2**30 avoids an overflow


def requested_pause(error: BaseException) -> float:
    """Return the Retry-After of the server's error in seconds; 0 without one."""
    return (error.retry_after if isinstance(error, ApiError) else None) or 0.0


def pause_after(error: Exception, failures: int) -> float:
    """Return the seconds to wait after ``failures`` consecutive errors: at least the Retry-After of the server."""
    limit = backoff(failures, PAUSE_FIRST, PAUSE_LIMIT)
    return max(spread(requested_pause(error)), limit * random.uniform(0.5, 1.0))  # noqa: S311  no secret is made of it


def is_of_server(error: Exception) -> bool:
    """Return whether the same request for other objects fails too."""
    if isinstance(error, ApiError):
        return error.is_of_server
    return isinstance(error, (ApiUnreachable, ResourceApiMissing))


class SharedPause:
    """Limit requests for many objects to ``readers`` at a time, and slow them down while the server fails.

    After the first server error, only one request is sent at a time. After each further consecutive error all requests
    wait: 1 s at first, up to 60 s, and at least the Retry-After of the server. A success ends this.
    """

    def __init__(self, readers: int) -> None:
        self._readers = asyncio.Semaphore(readers)
        self._single = asyncio.Lock()
        self._failures = 0
        self._until = 0.0

    @property
    def is_failing(self) -> bool:
        """Return whether the last request failed because of the server."""
        return self._failures > 0

    async def send(self, request: Callable[[], Awaitable[T]]) -> T:
        """Wait for a free slot, then send the request. Raises the errors of the request."""
        async with self._readers:
            if not self._failures:
                return await self._send(request)
            async with self._single:
                while self._failures and (left := self._until - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                return await self._send(request)

    async def _send(self, request: Callable[[], Awaitable[T]]) -> T:
        before = self._failures  # requests that fail at the same time count once
        try:
            answer = await request()
        except Exception as error:
            if is_of_server(error):
                self._failures = max(self._failures, before + 1)
                if self._failures > 1 or requested_pause(error):
                    self._until = time.monotonic() + pause_after(error, max(self._failures - 1, 1))
            raise
        self._failures = 0
        return answer


def is_throttled(error: Exception) -> bool:
    """Return whether the server did not process the request, so that it can be sent again even if it is not idempotent."""
    return isinstance(error, ApiError) and error.status in THROTTLED


def is_of_network(error: Exception) -> bool:
    """Return whether an idempotent request can succeed later, because the server or its load balancer restarts or is overloaded."""
    if is_temporary(error):
        return True
    return isinstance(error, ApiError) and (error.status == 502 or (error.status == 404 and not error.is_not_found))


async def retry(
    send: Callable[[], Awaitable[T]],
    seconds: float,
    *,
    when: Callable[[Exception], bool] = is_throttled,
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Return the result of ``send``. Repeat it after each error for which ``when`` returns true, for up to ``seconds``.

    Raises the last error if the next attempt would begin after this time.
    """
    until = time.monotonic() + seconds
    failures = 0
    while True:
        try:
            return await send()
        except AcceleratorError as error:
            failures += 1
            pause = pause_after(error, failures)
            if not when(error) or time.monotonic() + pause > until:
                raise
        await wait(pause)
