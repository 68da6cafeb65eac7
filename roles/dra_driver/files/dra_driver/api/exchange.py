# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Requests to one HTTP server over a few connections that are kept open, with as few steps as a request can have.

A claim waits for one request, and a general client takes as long to make it and to read the answer as the rest of what a claim needs. What is
known here is left out: one server, no redirects, no cookies, no proxies, answers that fit into memory. The protocol itself is httptools',
which is the parser of Node.js.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from ..deadlines import within
from .liveness import end_when_unacknowledged

# A connection that has been idle for longer may have been forgotten by somebody in between, who says nothing of it. In seconds.
IDLE_SECONDS = 120.0
# A request without any part of an answer after so long is taken for one on a half-open connection, also if its caller gives up.
SILENT_SECONDS = 4.0
# A server of several addresses is tried at the next one as well after so long, as RFC 8305 has it.
NEXT_ADDRESS_SECONDS = 0.25
# What may be asked again where the server has ended a connection instead of answering: it has not seen the request, or does the same twice.
_REPEATABLE = frozenset({"GET", "PUT", "DELETE"})
_TARGET = re.compile(r"/[!-~]*")
_VALUE = re.compile(r"[ -~]*")
# What zlib calls a stream of gzip's own form.
_GZIP = 16 + zlib.MAX_WBITS
#: The maximum size of an answer in bytes, compressed and decompressed. A page of 500 objects of the usual size has 5 MiB.
MOST_BYTES = 256 * 1024 * 1024


class NoHttp(OSError):
    """What came is no answer of an HTTP server."""


@dataclass(frozen=True)
class Answer:
    """What a server has answered; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    payload: bytes


class _Connection(asyncio.Protocol):
    """One connection: a request, its answer, the next request."""

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        self._heard = heard
        self.is_open = False
        #: Whether anything of the answer has come.
        self.has_begun = False
        #: Whether another request may follow the last answer.
        self.is_reusable = False
        #: When it was last used, by the loop's clock.
        self.used = 0.0
        self._answer: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._lasts_until_end = False

    def ask(self, request: bytes, answer: asyncio.Future[Answer]) -> None:
        """Send a request; its answer, or what went wrong, is set in the future. Nobody else may be waiting."""
        assert self._transport is not None  # noqa: S101  who has no transport is not open
        self._answer, self.has_begun, self.is_reusable, self._lasts_until_end = answer, False, False, False
        self._transport.write(request)

    def end(self) -> None:
        """Close it at once, whatever is under way."""
        self.is_open = self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  of a stream
        self._transport, self.is_open = transport, True
        end_when_unacknowledged(transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nobody has asked
            self.end()
            return
        self.has_begun = True
        self._heard()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(NoHttp(f"the answer is not HTTP: {error}"))
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = self.is_reusable = False
        if exc is None and self._lasts_until_end:
            self.on_message_complete()
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the server has closed the connection"))
        self._transport = None
        del self._parser  # it knows this object, and this object it

    def _fail(self, error: OSError) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)

    # ------------------------------------------------------------------ what the parser calls

    def on_message_begin(self) -> None:
        self._headers, self._body, self._size = {}, [], 0
        if self._answer is None:  # something comes behind the answer, which is not for who asks next
            self.end()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        # So do servers of HTTP/1.0, and some that stand in between.
        self._lasts_until_end = not {"content-length", "transfer-encoding"} & self._headers.keys()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MOST_BYTES:
            self._body = []
            self._fail(NoHttp(f"the answer has more than {MOST_BYTES} bytes"))
            self.end()
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._lasts_until_end = False
        if status < 200:  # the answer is still to come
            return
        answer, self._answer = self._answer, None
        self.is_reusable = self.is_open and self._parser.should_keep_alive()
        if answer is not None and not answer.done():
            answer.set_result(Answer(status, self._headers, b"".join(self._body)))


class Exchange:
    """A few connections to a server. Use it within one event loop.

    ``headers`` go with every request. ``server`` is ``https://host:port``, with a path before those of requests if need be; without a
    ``context`` it is plain HTTP. ``server_name`` is whose certificate is expected, "" for the host's. ``heard`` is called for each part
    of an answer.
    """

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext | None,
        *,
        server_name: str = "",
        headers: Mapping[str, str] | None = None,
        connections: int,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self._heard = heard
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
        """Send a request and return the answer, whatever its status. ``target`` is a path, with a query if there is one, quoted.

        Raises OSError where there is none, asyncio.TimeoutError where it has not come within so many seconds, the wait for a free connection
        included, and ValueError for what cannot be sent.
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
                    # A server ends connections that are idle; one that was kept may be over at the moment it is used.
                    if is_new or connection.has_begun or method not in _REPEATABLE:
                        raise
        finally:
            self._give_turn()

    def close(self) -> None:
        """Keep no connection any more: those that are idle are closed, and each of the others after its answer."""
        self._is_closed = True
        self._end_idle()

    def _end_idle(self) -> None:
        """End all idle connections: those to a server that has become silent on one would cost a timeout each."""
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
        except BaseException as error:  # also a cancellation: the next answer has no request
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
        if "content-encoding" in found.headers:
            return Answer(found.status, found.headers, _unpacked(found.headers["content-encoding"], found.payload))
        return found

    def _kept(self, now: float) -> _Connection | None:
        """The connection that was used last, if one is left that can be used."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.used < IDLE_SECONDS:
                return connection
            connection.end()
        return None

    async def _connect(self, until: float) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection(self._heard)
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
        except BaseException:  # a caller that is cancelled as the connection opens does not get it
            connection.end()
            raise
        return connection

    async def _take_turn(self, until: float) -> None:
        """Wait until there may be another connection."""
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
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # cancelled just as its turn came
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
    """The time is over."""
    if not awaited.done():
        awaited.set_exception(asyncio.TimeoutError())


def _checked(allowed: re.Pattern[str], text: str) -> str:
    """Return a text that may stand in a request's head. Raises ValueError: a line's end in it would begin another header."""
    if allowed.fullmatch(text) is None:
        raise ValueError(f"a request cannot be made of {text[:100]!r}")
    return text


def _unpacked(encoding: str, payload: bytes) -> bytes:
    """Return an answer's content. Raises NoHttp."""
    if encoding.lower() == "identity":
        return payload
    if encoding.lower() != "gzip":
        raise NoHttp(f"the answer comes as {encoding}, which was not asked for")
    unpacking = zlib.decompressobj(_GZIP)
    try:
        content = unpacking.decompress(payload, MOST_BYTES)
    except zlib.error as error:
        raise NoHttp(f"the answer cannot be unpacked: {error}") from error
    if unpacking.unconsumed_tail:
        raise NoHttp(f"the answer has more than {MOST_BYTES} bytes when it is unpacked")
    if not unpacking.eof:
        raise NoHttp("the answer cannot be unpacked: its end is missing")
    return content
