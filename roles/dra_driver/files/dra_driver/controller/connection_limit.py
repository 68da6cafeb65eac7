# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Limit the connections of a server that clients without a certificate can reach, and close idle ones.

The limit applies when the server accepts a connection, before the TLS handshake. At the limit a new connection replaces
the one that has received nothing for the longest time: of an address that has more than half of all connections,
otherwise of all. So clients that open many connections do not keep the API server out. Its running requests, which take
milliseconds, are not the ones that end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

#: The connections of one server. Three API servers with the usual 200 mutating requests each need 600.
MOST_CONNECTIONS = 1024
#: A connection that has received nothing for so long is closed, and how often this is checked. In seconds. The API server closes its own
#: connections after 90 s without a request (k8s.io/apimachinery/pkg/util/net/http.go), so that none is closed while it sends a request.
IDLE_SECONDS, CHECK_SECONDS = 120.0, 5.0
BACKLOG = 128


class ConnectionLimit:
    """The accepted connections of one server."""

    def __init__(self) -> None:
        self._open: set[_Connection] = set()
        #: The clients with a running request.
        self._answered: Counter[Any] = Counter()

    @contextlib.contextmanager
    def answering(self, client: Any) -> Iterator[None]:
        """Return a context manager in which the connection of a client, by its address and port, is not idle, however long the answer takes."""
        self._answered[client] += 1
        try:
            yield
        finally:
            self._answered[client] -= 1
            self._answered += Counter()  # removes clients with 0

    def add(self, connection: _Connection) -> None:
        """Count a connection. At the limit, close another one for it."""
        if len(self._open) >= MOST_CONNECTIONS:
            address, number = Counter(each.address for each in self._open).most_common(1)[0]
            candidates = [each for each in self._open if each.address == address or number <= MOST_CONNECTIONS // 2]
            self._end(min(candidates, key=lambda each: (each.client in self._answered, each.received)))
        self._open.add(connection)

    def remove(self, connection: _Connection) -> None:
        """Remove a closed connection from the count."""
        self._open.discard(connection)

    async def close_idle(self) -> None:
        """Close idle connections, until canceled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            oldest = time.monotonic() - IDLE_SECONDS
            for connection in [each for each in self._open if each.received < oldest]:
                if connection.client not in self._answered:
                    self._end(connection)

    def _end(self, connection: _Connection) -> None:
        """End a connection in both directions. The event loop, which uses it, then closes it."""
        self._open.discard(connection)
        with contextlib.suppress(OSError):  # the client has closed it already
            connection.shutdown(socket.SHUT_RDWR)


class _Connection(socket.socket):
    """An accepted connection: the client's address, with and without its port, and the time of its last data, by the monotonic clock."""

    def __init__(self, accepted: socket.socket, client: Any, limit: ConnectionLimit) -> None:
        super().__init__(fileno=accepted.detach())
        self.address, self.client = str(client[0]), client
        self.received = time.monotonic()
        self._limit = limit

    def recv(self, *arguments: Any) -> bytes:
        self.received = time.monotonic()
        return super().recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self.received = time.monotonic()
        return super().recv_into(*arguments)

    def close(self) -> None:
        self._limit.remove(self)
        super().close()


class _Listener(socket.socket):
    """A listening socket whose connections are counted."""

    def __init__(self, listening: socket.socket, limit: ConnectionLimit) -> None:
        super().__init__(fileno=listening.detach())
        self._limit = limit

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        connection = _Connection(accepted, address, self._limit)
        self._limit.add(connection)
        return connection, address


async def listen(host: str, port: int, limit: ConnectionLimit) -> list[socket.socket]:
    """Return a listening socket for each address of the host; without a host, for all addresses. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, *_rest, address in dict.fromkeys(found):
            made = socket.create_server((address[0], address[1]), family=family, backlog=BACKLOG)
            listeners.append(_Listener(made, limit))
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners
