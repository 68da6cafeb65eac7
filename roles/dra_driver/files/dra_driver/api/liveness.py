# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Detect connections whose other side has disappeared without a word, within a minute.

The kernel ends a connection on which the peer's kernel does not acknowledge anything. A server whose kernel answers but whose program
does not is detected by a request, as client-go does with HTTP/2 pings. Bookmarks are no proof: the API server sends none while nothing
changes. Facts: tcp(7), TCP_USER_TIMEOUT; k8s.io/apiserver/pkg/storage/cacher/cache_watcher.go; k8s.io/apimachinery/pkg/util/net/http.go
(30 s without a frame, then 15 s for the ping).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator

LOG = logging.getLogger(__name__)

#: The first keepalive probe after an idle time, the next ones, and the time without an acknowledgement that ends a connection. In seconds.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, UNACKNOWLEDGED = 15, 5, 30
#: A server that has sent nothing for so many seconds is asked for its version. This is checked every TICK_SECONDS.
SILENCE_SECONDS, TICK_SECONDS = 25.0, 5.0


def end_when_unacknowledged(transport: asyncio.BaseTransport | None) -> None:
    """Let the kernel end a TCP connection whose peer acknowledges nothing."""
    found = transport.get_extra_info("socket") if transport is not None else None
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # it has ended already
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
        found.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (UNACKNOWLEDGED - KEEPALIVE_IDLE) // KEEPALIVE_INTERVAL
        )
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED * 1000)


class WatchGuard:
    """The connections of watches. While there is one, a server that is silent is probed; without an answer all of them end.

    ``probe`` sends a request and returns whether an answer came; ``ended`` is called after the connections were ended.
    """

    def __init__(self, probe: Callable[[], Awaitable[bool]], ended: Callable[[], None]) -> None:
        self._probe = probe
        self._ended = ended
        self._transports: set[asyncio.BaseTransport] = set()
        self._task: asyncio.Task[None] | None = None
        self._heard = 0.0

    def hear(self) -> None:
        """Note that the server has sent something just now."""
        self._heard = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def guarding(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Guard the connection of a watch within this context."""
        if transport is None:  # the answer came as a whole
            yield
            return
        end_when_unacknowledged(transport)
        self.hear()
        self._transports.add(transport)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            yield
        finally:
            self._transports.discard(transport)
            if not self._transports:
                self.stop()

    def stop(self) -> None:
        """Probe no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if asyncio.get_running_loop().time() - self._heard < SILENCE_SECONDS:
                continue
            guarded = tuple(self._transports)
            if await self._probe():
                self.hear()
                continue
            LOG.warning("the API server has not answered on open connections: they are closed and opened again")
            for transport in guarded:
                if isinstance(transport, asyncio.WriteTransport):
                    transport.abort()
            self._ended()
