# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""An HTTP client for one server, with a few persistent connections and little overhead per request.

A claim waits for one request. With a general HTTP client, this request takes as long as the rest of the claim's work.
This client supports only the required features: one server, no redirects, no cookies, no proxies, and responses that fit into
memory. httptools, the parser of Node.js, parses the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from ..deadlines import within
from .liveness import end_when_unacknowledged

# Seconds. A load balancer or firewall may have dropped a connection that was idle for longer, without notice.
IDLE_SECONDS = 120.0
# Seconds. Without any part of a response after this time, the connection counts as half-open, even if the caller gives
# up.
SILENT_SECONDS = 4.0
# Seconds. After this time without a connection, the next address of the server is tried in parallel, according to RFC
# 8305.
NEXT_ADDRESS_SECONDS = 0.25
# Methods that are sent again if the server closes the connection without a response. The server has not seen the
# request, or the request is idempotent.
_REPEATABLE = frozenset({"GET", "PUT", "DELETE"})
_TARGET = re.compile(r"/[!-~]*")
_VALUE = re.compile(r"[ -~]*")
_CLOSED = "the server has closed the connection"
# The zlib parameter for the gzip format.
_GZIP = 16 + zlib.MAX_WBITS
#: The maximum size of a response in bytes, compressed and decompressed. A page of 500 objects of usual size has 5 MiB.
#: A decoded response needs about ten times its size.
MOST_BYTES = 32 * 1024 * 1024
#: Compressed responses above this size in bytes are decompressed in a thread.
THREAD_BYTES = 128 * 1024


class InvalidHttpResponse(OSError):
    """The received data is not an HTTP response."""


class AnswerTooLarge(InvalidHttpResponse):
    """The response has more than MOST_BYTES bytes."""


@dataclass(frozen=True)
class Answer:
    """The response of a server. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    payload: bytes


class _Connection(asyncio.Protocol):
    """One connection. It has one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        #: Whether any part of the response has arrived.
        self.has_begun = False
        #: Whether another request can follow the last response.
        self.is_reusable = False
        #: The time of the last use, by the loop's clock.
        self.used = 0.0
        self._answer: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._lasts_until_end = False

    def ask(self, request: bytes, answer: asyncio.Future[Answer]) -> None:
        """Send a request. Its response or its error is set in the future. No other request may be in progress."""
        self._answer, self.has_begun, self.is_reusable, self._lasts_until_end = answer, False, False, False
        if self._transport is None:  # the server closed the connection before this request
            self._fail(ConnectionResetError(_CLOSED))
            return
        self._transport.write(request)

    def end(self) -> None:
        """Close the connection at once, even during a request."""
        self.is_open = self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  of a stream
        self._transport, self.is_open = transport, True
        end_when_unacknowledged(transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # no request is in progress
            self.end()
            return
        self.has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(InvalidHttpResponse(f"the answer is not HTTP: {error}"))
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = self.is_reusable = False
        if exc is None and self._lasts_until_end:
            self.on_message_complete()
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError(_CLOSED))
        self._transport = None
        del self._parser  # ends a reference cycle with the parser

    def _fail(self, error: OSError) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)

    # ------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        self._headers, self._body, self._size = {}, [], 0
        if self._answer is None:  # data after the response must not reach the next request
            self.end()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        # A server of HTTP/1.0, and some proxies, send no length and close the connection at the end of the response.
        self._lasts_until_end = not {"content-length", "transfer-encoding"} & self._headers.keys()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MOST_BYTES:
            self._body = []
            self._fail(AnswerTooLarge(f"the answer has more than {MOST_BYTES} bytes"))
            self.end()
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._lasts_until_end = False
        if status < 200:  # an interim response: the final response follows
            return
        answer, self._answer = self._answer, None
        self.is_reusable = self.is_open and self._parser.should_keep_alive()
        if answer is not None and not answer.done():
            answer.set_result(Answer(status, self._headers, b"".join(self._body)))


class Exchange:
    """A client with a limited number of connections to one server. Use it within one event loop.

    ``headers`` are sent with every request. ``server`` is ``https://host:port``, optionally with a path prefix. Without
    a ``context``, plain HTTP is used. ``server_name`` is the expected name in the certificate, "" for the host's name.
    Raises ValueError for an invalid server or header.
    """

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext | None,
        *,
        server_name: str = "",
        headers: Mapping[str, str] | None = None,
        connections: int,
    ) -> None:
        parts = urlsplit(server)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._context = context
        self._server_name = server_name or self._host
        fixed = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "gzip", **(headers or {})}
        self._head = "".join(f"{name}: {_checked(_VALUE, value)}\r\n" for name, value in fixed.items())
        self._idle: list[_Connection] = []
        self._free = connections
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_closed = False

    async def ask(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        seconds: float,
    ) -> Answer:
        """Send a request and return the response, with any status.

        ``target`` is a quoted path with an optional query. ``seconds`` is the timeout, including the wait for a free
        connection. Raises OSError without a response, asyncio.TimeoutError after the timeout, and ValueError for an
        invalid request.
        """
        request = self._request(method, target, headers or {}, body)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        await self._take_turn(until)
        try:
            while True:
                connection = self._kept(loop.time())
                is_new = connection is None
                if connection is None:
                    connection = await self._connect(until)
                try:
                    return await self._ask(connection, request, until)
                except ConnectionError:
                    # Servers close idle connections. A reused connection can be closed at the moment of its use.
                    if is_new or connection.has_begun or method not in _REPEATABLE:
                        raise
        finally:
            self._give_turn()

    def close(self) -> None:
        """Close idle connections at once, and each other connection after its response."""
        self._is_closed = True
        self._end_idle()

    def _end_idle(self) -> None:
        """Close all idle connections. Each connection to a server that has become silent would cost a timeout."""
        for connection in self._idle:
            connection.end()
        self._idle.clear()

    def _request(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
        lines = f"{method} {self._prefix}{_checked(_TARGET, target)} HTTP/1.1\r\n{self._head}"
        for name, value in headers.items():
            lines += f"{name}: {_checked(_VALUE, value)}\r\n"
        if body is None:
            return f"{lines}\r\n".encode("ascii")
        return f"{lines}Content-Length: {len(body)}\r\n\r\n".encode("ascii") + body

    async def _ask(self, connection: _Connection, request: bytes, until: float) -> Answer:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        timer, began = loop.call_at(until, _expire, answer), loop.time()
        connection.ask(request, answer)
        try:
            found = await answer
        except BaseException as error:  # also after a cancellation, because the next response would have no request
            is_silent = not connection.has_begun and (
                isinstance(error, (OSError, asyncio.TimeoutError)) or loop.time() - began >= SILENT_SECONDS
            )
            connection.end()
            if is_silent and not isinstance(error, ConnectionError):
                self._end_idle()
            raise
        finally:
            timer.cancel()
        if connection.is_reusable and not self._is_closed:
            connection.used = loop.time()
            self._idle.append(connection)
        else:
            connection.end()
        encoding = found.headers.get("content-encoding")
        if encoding is None:
            return found
        if len(found.payload) > THREAD_BYTES:
            return Answer(found.status, found.headers, await asyncio.to_thread(_unpacked, encoding, found.payload))
        return Answer(found.status, found.headers, _unpacked(encoding, found.payload))

    def _kept(self, now: float) -> _Connection | None:
        """Return the most recently used connection that is still usable, or None."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.used < IDLE_SECONDS:
                return connection
            connection.end()
        return None

    async def _connect(self, until: float) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection()
        connecting = loop.create_connection(
            lambda: connection,
            self._host,
            self._port,
            ssl=self._context,
            server_hostname=self._server_name if self._context is not None else None,
            happy_eyeballs_delay=NEXT_ADDRESS_SECONDS,
        )
        try:
            await within(connecting, until - loop.time())
        except BaseException:  # a cancelled caller does not use the new connection
            connection.end()
            raise
        return connection

    async def _take_turn(self, until: float) -> None:
        """Wait until a connection may be used."""
        if self._free > 0:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        timer = loop.call_at(until, _expire, turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # cancelled after it got its turn
                self._give_turn()
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            raise
        finally:
            timer.cancel()

    def _give_turn(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def _expire(awaited: asyncio.Future[Any]) -> None:
    """Set a TimeoutError in a future that is not done."""
    if not awaited.done():
        awaited.set_exception(asyncio.TimeoutError())


def _checked(allowed: re.Pattern[str], text: str) -> str:
    """Return the text if a request's head may contain it.

    Raises ValueError: a line end would start another header.
    """
    if allowed.fullmatch(text) is None:
        raise ValueError(f"a request cannot be made of {text[:100]!r}")
    return text


def _unpacked(encoding: str, payload: bytes) -> bytes:
    """Return the decompressed content of a response. Raises InvalidHttpResponse."""
    if encoding.lower() == "identity":
        return payload
    if encoding.lower() != "gzip":
        raise InvalidHttpResponse(f"the answer comes as {encoding}, which was not asked for")
    unpacking = zlib.decompressobj(_GZIP)
    try:
        content = unpacking.decompress(payload, MOST_BYTES)
    except zlib.error as error:
        raise InvalidHttpResponse(f"the answer cannot be unpacked: {error}") from error
    if unpacking.unconsumed_tail:
        raise AnswerTooLarge(f"the answer has more than {MOST_BYTES} bytes when it is unpacked")
    if not unpacking.eof:
        raise InvalidHttpResponse("the answer cannot be unpacked: its end is missing")
    return content
