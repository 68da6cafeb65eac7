# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Limit the memory and processor time that callers of the webhook, who need no certificate, can use.

Bodies are decoded one at a time, on threads, so that the event loop can renew the Lease. Large bodies have a separate
queue, so that they do not delay those of usual size. One address has few requests in a queue, so that a flood from one
address delays the API server by a few requests only. Callers that send their bodies slowly occupy memory slots. There
are enough of these for hundreds of addresses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from aiohttp import web

from ..deadlines import within

T = TypeVar("T")

#: Bytes of a body of usual size. A claim with an old and a new version has a few KiB.
USUAL_BYTES = 256 * 1024
#: The maximum number of running and queued requests of one address. Further ones wait before their bodies are read.
REQUESTS_OF_ADDRESS = 4
#: The maximum number of bodies in memory, of usual size and larger ones: at most 256 MiB and 64 MiB.
USUAL_AT_ONCE, LARGE_AT_ONCE = 1024, 16
#: The time limit for a request, in seconds, equal to the API server's (timeoutSeconds of the webhook).
REQUEST_SECONDS = 1.0


class AdmissionQueue:
    """Run one function for the body of each request, on a thread."""

    def __init__(self) -> None:
        self._usual = _Lane(USUAL_AT_ONCE, "admission")
        self._large = _Lane(LARGE_AT_ONCE, "large-admission")
        self._addresses: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, request: web.Request, work: Callable[[bytes], T]) -> T:
        """Return the result of ``work`` for the body.

        Raises asyncio.TimeoutError if reading or waiting takes too long.
        """
        address = request.remote or ""
        own = self._addresses.get(address)
        if own is None:
            own = self._addresses[address] = asyncio.Semaphore(REQUESTS_OF_ADDRESS)
        length = request.content_length
        lane = self._usual if length is not None and length <= USUAL_BYTES else self._large
        return await within(_guarded(own, lane, request, work), REQUEST_SECONDS)

    def close(self) -> None:
        """End the threads."""
        self._usual.close()
        self._large.close()


class _Lane:
    """Read several bodies at once, and process one after the other."""

    def __init__(self, at_once: int, name: str) -> None:
        self.bodies = asyncio.Semaphore(at_once)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def work(self, function: Callable[[bytes], T], body: bytes) -> T:
        """Run the function on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, body)

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)


async def _guarded(own: asyncio.Semaphore, lane: _Lane, request: web.Request, work: Callable[[bytes], Any]) -> Any:
    async with own, lane.bodies:
        return await lane.work(work, await request.read())


def close_with(application: web.Application, queue: AdmissionQueue) -> None:
    """End the queue's threads when the application ends."""

    async def close(_application: web.Application) -> None:
        queue.close()

    cleanup: Callable[[web.Application], Awaitable[None]] = close
    application.on_cleanup.append(cleanup)
