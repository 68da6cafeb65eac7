# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Detect half-open connections to the API server within 60 s.

The kernel ends a connection if the peer's kernel acknowledges nothing. The driver detects a server whose kernel acknowledges, but whose
program sends nothing: it sends a request on a connection for that purpose, as client-go does with HTTP/2 pings. Missing bookmarks are no
proof: the API server sends no bookmarks while nothing changes. Facts: tcp(7), TCP_USER_TIMEOUT;
k8s.io/apiserver/pkg/storage/cacher/cache_watcher.go; k8s.io/apimachinery/pkg/util/net/http.go (30 s without a frame, then 15 s for the ping).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterator

LOG = logging.getLogger(__name__)

#: The first keepalive probe after an idle time, the next ones, and the time without an acknowledgement that ends a connection. In seconds.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, UNACKNOWLEDGED = 15, 5, 30
#: The driver probes a server that has sent nothing for a random time in this range. Otherwise all nodes that got the same event would
#: send their probes at the same time. In seconds.
SILENCE_SECONDS = (30.0, 40.0)
#: Time in which the server has to send something after the first probe, and the pause after a probe that failed. In seconds.
PROBE_SECONDS, RETRY_SECONDS = 15.0, 2.0
#: The default ClusterRole system:public-info-viewer allows this path to all clients, and the default FlowSchema ``probes`` exempts it from
#: priority and fairness: an overloaded server answers as well.
PROBE_PATH = "/livez"


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
    """Closes the connections of watches if the API server is silent.

    While at least one watch is open, the guard probes a server that has sent nothing on any connection for ``SILENCE_SECONDS``.
    If the server sends nothing on any connection within ``PROBE_SECONDS`` more, the guard closes the connections of all watches.

    Args:
        probe: sends one request and waits for any answer, for the given number of seconds. Raises OSError or asyncio.TimeoutError.
        ended: the guard calls it after it has closed the connections.
    """

    def __init__(self, probe: Callable[[float], Awaitable[None]], ended: Callable[[], None]) -> None:
        self._probe = probe
        self._ended = ended
        self._transports: set[asyncio.BaseTransport] = set()
        self._task: asyncio.Task[None] | None = None
        self._heard = 0.0

    def hear(self) -> None:
        """Note that the server has sent data just now."""
        self._heard = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def guarding(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Guard the connection of a watch within this context."""
        if transport is None:  # the answer is complete
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
        """Stop the probes."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _run(self) -> None:
        while True:
            await self._wait_for_silence()
            guarded = tuple(self._transports)
            if await self._sends_anything():
                continue
            LOG.warning("the API server has not answered on open connections: they are closed and opened again")
            for transport in guarded:
                if isinstance(transport, asyncio.WriteTransport):
                    transport.abort()
            self._ended()
            self.hear()  # the new connections get the whole time

    async def _wait_for_silence(self) -> None:
        """Return once the server has sent nothing for a random time in SILENCE_SECONDS."""
        loop = asyncio.get_running_loop()
        silence = random.uniform(*SILENCE_SECONDS)  # noqa: S311  not a secret
        while (left := self._heard + silence - loop.time()) > 0:
            await asyncio.sleep(left)

    async def _sends_anything(self) -> bool:
        """Probe the server, and return whether it sends anything on any connection within PROBE_SECONDS."""
        loop = asyncio.get_running_loop()
        heard, until = self._heard, loop.time() + PROBE_SECONDS
        while self._heard == heard and (left := until - loop.time()) > 0:
            try:
                await self._probe(left)
                self.hear()
            except (asyncio.TimeoutError, OSError):
                await asyncio.sleep(max(min(RETRY_SECONDS, until - loop.time()), 0.0))
        return self._heard != heard
