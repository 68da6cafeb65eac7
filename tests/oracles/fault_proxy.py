# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A proxy between a client and a real API server that injects one fault at one request."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from typing import Self

#: Ends of an answer: none and a closed connection, none and an open connection, half of it, or no JSON; for a watch
#: also its regular end, and an ERROR event with status 410.
RESET, SILENT, HALF, NOT_JSON, ENDED, EXPIRED = "reset", "silent", "half", "not JSON", "ended", "expired"
FORWARDED = ("Authorization", "Content-Type", "Accept")
REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}


@dataclass(frozen=True)
class Fault:
    """One fault: an answer with a status, or an end of the answer. With ``is_sent`` the API server gets the request."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    text: str = ""
    end: str = ""
    is_sent: bool = False
    is_of_watch: bool = False


SOON = MappingProxyType({"Retry-After": "1"})
FAULTS = {
    "401": Fault(401),
    "403": Fault(403),
    "404 of a load balancer": Fault(404, text="<html>404 Not Found</html>"),
    "409": Fault(409),
    "410": Fault(410),
    "422": Fault(422),
    "429": Fault(429),
    "429 Retry-After": Fault(429, SOON),
    "500": Fault(500),
    "503": Fault(503, text="upstream connect error"),
    "503 Retry-After": Fault(503, SOON),
    "connection lost": Fault(end=RESET),
    "answer lost": Fault(end=RESET, is_sent=True),
    "silent": Fault(end=SILENT),
    "answer silent": Fault(end=SILENT, is_sent=True),
    "truncated": Fault(end=HALF, is_sent=True),
    "not JSON": Fault(end=NOT_JSON, is_sent=True),
    "watch ended": Fault(end=ENDED, is_of_watch=True),
    "watch expired": Fault(end=EXPIRED, is_of_watch=True),
}


#: A request with this name has its own kind: it reads the controller's sign, not a list of waiting claims.
SIGN = "waiting-claims"


def kind_of_request(method: str, target: str, body: bytes = b"") -> str:
    """Return the verb and the resource of a request, with ``*`` for names: ``patch
    resource.k8s.io/resourceclaims/*/status``.

    The kind of an Event contains its action.
    """
    path, _mark, query = target.partition("?")
    words = path.strip("/").split("/")
    if words[0] == "api" and len(words) > 2:
        group, words = "", words[2:]
    elif words[0] == "apis" and len(words) > 3:
        group, words = f"{words[1]}/", words[3:]
    else:
        return f"{method.lower()} {path}"
    if words[0] == "namespaces" and len(words) > 2:
        words = words[2:]
    if len(words) > 1 and words[1] != SIGN:
        words[1] = "*"
    if method == "POST" and words == ["events"]:
        return f"post events ({json.loads(body).get('action')})"
    verb = method.lower()
    if method == "GET" and len(words) == 1:
        verb = "watch" if "watch=1" in query.split("&") else "list"
    return f"{verb} {group}{'/'.join(words)}{' (dry run)' if 'dryRun=All' in query.split('&') else ''}"


class FaultProxy:
    """A proxy on its own port while its context is active. ``url`` and ``token`` are an administrator's access through
    it.

    ``requests`` lists the phase of the test (``phase``) and the kind of each request in order. ``injected`` lists
    those with a fault.
    """

    def __init__(self, kubeconfig: Path) -> None:
        document = json.loads(kubeconfig.read_text())
        cluster = document["clusters"][0]["cluster"]
        # A handler that closes its connection raises ConnectionResetError.
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
        self.token = document["users"][0]["user"]["token"]
        self.phase = ""
        self.requests: list[tuple[str, str]] = []
        self.injected: list[tuple[str, str]] = []
        self.url = ""
        self._server = str(cluster["server"])
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._choose: Callable[[int, tuple[str, str]], Fault | None] = lambda _number, _request: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def arm(self, choose: Callable[[int, tuple[str, str]], Fault | None]) -> None:
        """Clear the list of requests. ``choose`` returns the fault for a request, from its number (from 1), phase, and
        kind.
        """
        self._call(self._arm(choose))

    async def _arm(self, choose: Callable[[int, tuple[str, str]], Fault | None]) -> None:
        self.requests.clear()
        self.injected.clear()
        self._choose = choose

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_exception: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._context, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        application = web.Application(client_max_size=1 << 24)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        kind = kind_of_request(request.method, request.raw_path, body)
        found = (self.phase, kind)
        self.requests.append(found)
        fault = self._choose(len(self.requests), found)
        if fault is not None:
            self.injected.append(found)
        fault = fault or Fault()
        if fault.status:
            status = {
                "kind": "Status",
                "code": fault.status,
                "reason": REASONS.get(fault.status, ""),
                "message": "injected",
            }
            text = fault.text or json.dumps(status)
            return web.Response(status=fault.status, text=text, headers=fault.headers)
        is_watch = kind.startswith("watch ")
        if fault.end in (RESET, SILENT) and not (fault.is_sent or is_watch):
            return await self._end(request, fault)
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        target = self._server + request.raw_path
        async with self._session.request(request.method, target, data=body or None, headers=headers) as answer:
            if is_watch and answer.status == 200:
                return await self._stream(request, answer, fault)
            data = await answer.read()
        if fault.end in (RESET, SILENT):
            return await self._end(request, fault)
        if fault.end == NOT_JSON:
            data = b"<html>OK</html>"
        response = web.StreamResponse(status=answer.status)
        for name in ("Content-Type", "Content-Encoding", "Retry-After"):
            if name in answer.headers:
                response.headers[name] = answer.headers[name]
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[: len(data) // 2] if fault.end == HALF else data)
        if fault.end == HALF:
            return await self._end(request, Fault(end=RESET))
        await response.write_eof()
        return response

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse, fault: Fault) -> web.StreamResponse:
        """Send the events of a watch until one side ends it. A fault follows the acceptance of the watch, or replaces
        its first event.
        """
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        if fault.end == EXPIRED:
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
        if fault.end in (EXPIRED, ENDED):
            await response.write_eof()
            return response
        if fault.end == NOT_JSON:
            await response.write(b"<html>OK</html>\n")
        if fault.end == SILENT or (fault.end == RESET and not fault.is_sent):
            return await self._end(request, fault)
        while request.transport is not None and not request.transport.is_closing():
            try:
                data = await asyncio.wait_for(answer.content.readany(), 0.2)
            except asyncio.TimeoutError:
                continue
            if fault.end in (HALF, RESET):
                await response.write(data[: len(data) // 2])
                return await self._end(request, Fault(end=RESET))
            if not data:
                break
            await response.write(data)
        return response

    @staticmethod
    async def _end(request: web.Request, fault: Fault) -> web.StreamResponse:
        """Close the connection at once, or keep it open without data until the client closes it."""
        transport = request.transport
        while fault.end == SILENT and transport is not None and not transport.is_closing():
            await asyncio.sleep(0.05)
        if transport is not None and not transport.is_closing():
            found: socket.socket = transport.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        raise ConnectionResetError
