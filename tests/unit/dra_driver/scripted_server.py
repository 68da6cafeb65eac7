# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A socket server with a script for each connection, byte by byte, for answers that no HTTP server sends."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

#: The actions of a server on one connection: it gets the requests one after the other, and sends bytes.
Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One connection, as the server sees it."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server, self._reader, self._writer = server, reader, writer

    async def request(self) -> str:
        """Return the next request with head and body, or "" after the last one."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            return ""
        length = [line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length")]
        body = await self._reader.readexactly(int(length[0])) if length else b""
        self._server.requests.append(head + body.decode())
        return head + body.decode()

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


class Server:
    """A server with a script for each connection. The last script is also for all later ones."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self.requests: list[str] = []
        self.connections = 0
        self.open = self.most = 0

    async def start(self, context: ssl.SSLContext | None = None) -> str:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        port = self._listening.sockets[0].getsockname()[1]
        return f"{'https' if context else 'http'}://127.0.0.1:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self._scripts[min(self.connections, len(self._scripts) - 1)]
        self.connections += 1
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await script(Peer(self, reader, writer))
        finally:
            self.open -= 1
            writer.close()

    def stop(self) -> None:
        self._listening.close()


def answering(*pieces: bytes) -> Script:
    """Return a script that answers each request with these bytes."""

    async def script(peer: Peer) -> None:
        while await peer.request():
            await peer.send(*pieces)

    return script


async def silent(peer: Peer) -> None:
    while await peer.request():
        pass
