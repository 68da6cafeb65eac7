# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A client for the Kubernetes API that sends and returns plain JSON over persistent connections.

Typed models are avoided on purpose. They drop unknown fields, so an older client would delete data of a newer server.
They also need four times the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp

from ..core.decoding import Decoded, SkippedObject, UndecodableObject, decode, describe_skipped, status_reason
from ..deadlines import within
from ..logs import StateLog
from . import liveness
from .errors import ApiError, ApiUnreachable, TooLarge
from .exchange import AnswerTooLarge, Exchange, InvalidHttpResponse
from .kubeconfig import Access, InvalidKubeconfig, load_access
from .liveness import end_when_unacknowledged
from .throttling import is_temporary, pause_after
from .token import refusal

LOG = logging.getLogger(__name__)
Json = dict[str, Any]

REQUEST_SECONDS = 15.0
# The range of a watch's duration, in seconds. It is random, so that nodes that started together do not reconnect
# together.
WATCH_SECONDS = (240, 480)
#: The maximum number of bytes of one watch event. The API server stores no object above 1.5 MiB.
LONGEST_EVENT = 16 * 1024 * 1024
# The timeout, in seconds, for the response headers of a watch. A busy server lets a request wait for 15 s.
HEAD_SECONDS = 30.0
LONGEST_RETRY_AFTER = 300.0
#: Responses and events above this size in bytes are decoded in a thread, while the event loop continues.
THREAD_BYTES = 1024 * 1024
# The limits for consecutive failures of a page of a list, and for restarts of a list after its snapshot has expired.
PAGE_REFUSALS, LIST_RESTARTS = 5, 3
# The maximum number of concurrent requests. Each needs a connection, and opening one costs both sides more than a
# request. For many requests at once, such as after a start or for many new pods, a few reused connections are faster
# than many new ones.
CONNECTIONS = 16
# Requests for the Lease have a separate connection, so that its renewal does not wait for slow requests.
_LEASES = "/apis/coordination.k8s.io/"
# Claims and templates are read without opaque parameters. Only prepare and explain need these, and they GET a single
# claim.
_CLAIMS = re.compile(r"/resourceclaim(?:s|templates)(?P<name>/[^/]+)?(?:/status)?$")


@dataclass(frozen=True)
class _Connections:
    """The connections to the server: for requests, for watches, which stay open for minutes, and for the Lease.

    ``access`` is the access with which the connections were opened. Its token can be outdated.
    """

    access: Access
    requests: Exchange
    watches: aiohttp.ClientSession
    leases: Exchange


@dataclass(frozen=True)
class WatchEvent:
    """One event of a watch: type ADDED, MODIFIED, DELETED, or BOOKMARK, and the object."""

    type: str
    object: Json


class ApiClient:
    """A client for one API server. All methods raise ApiUnreachable or ApiError. Use it within one event loop."""

    def __init__(
        self,
        kubeconfig: str,
        *,
        user_agent: str = "dra-accelerators-driver",
        observer: Callable[[str, str, str, float], None] | None = None,
    ) -> None:
        self._kubeconfig = kubeconfig
        # Called for each request with its verb, its path, the HTTP status or "unreachable", and its duration in
        # seconds.
        self._observe = observer or (lambda _verb, _path, _code, _seconds: None)
        self._user_agent = user_agent
        self._connections: _Connections | None = None
        self._access: Access | None = None
        self._fingerprint: tuple[tuple[str, int, int], ...] | None = None
        self._token = ""
        self._token_stamp = 0
        self._gate = asyncio.Lock()
        self._retired: list[aiohttp.ClientSession] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._skipped: dict[str, StateLog] = {}
        #: Drivers whose opaque parameters are decoded in a claim that is read individually. Each driver adds its name.
        self.opaque_of: set[str] = set()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Json:
        """GET an object or a list, and return it."""
        return await self.request("GET", path, params=params)

    async def find(self, path: str) -> Json | None:
        """GET an object, and return it; None if the API server reports that it does not exist."""
        try:
            return await self.get(path)
        except ApiError as error:
            if not error.is_not_found:
                raise
            return None

    async def list_all(self, path: str, params: Mapping[str, str] | None = None, *, page: int) -> list[Json]:
        """Return all objects of a list, read with up to ``page`` objects per request."""
        found: list[Json] = []
        async for answer, is_first in self.pages(path, params, page=page):
            if is_first:
                found.clear()
            found += answer["items"] or ()
        return found

    async def pages(
        self, path: str, params: Mapping[str, str] | None = None, *, page: int
    ) -> AsyncIterator[tuple[Json, bool]]:
        """GET a list in pages of up to ``page`` objects, and yield each page with whether it is the first one of the list.

        If a later page fails with a temporary error, it is requested again after a pause, and the earlier pages stay
        valid. If the snapshot of the list has expired (410), the list starts again with a first page, and the caller
        discards all earlier pages. A page that is too large is requested again with half of its objects, as are all
        later pages.
        """
        query, refusals, restarts = dict(params or {}), 0, 0
        while True:
            is_first, query["limit"] = "continue" not in query, str(page)
            try:
                answer = await self.get(path, query)
            except TooLarge:
                if page == 1:
                    raise
                page //= 2
                continue
            except (ApiError, ApiUnreachable) as error:
                is_expired = isinstance(error, ApiError) and error.status == 410
                if not is_first and is_expired and restarts < LIST_RESTARTS:
                    restarts += 1
                    del query["continue"]
                    continue
                refusals += 1
                if is_first or not is_temporary(error) or refusals > PAGE_REFUSALS:
                    raise
                await asyncio.sleep(pause_after(error, refusals))
                continue
            list_items(answer, path)
            yield answer, is_first
            refusals, rest = 0, str((answer.get("metadata") or {}).get("continue") or "")
            if not rest:
                return
            query["continue"] = rest

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """Send one request and return the JSON object in the response; {} for an empty response."""
        connections, access = await self._connected()
        headers = {"Content-Type": content_type} if body is not None else {}
        self._authorise(access, headers)
        data = json.dumps(body, separators=(",", ":")).encode() if body is not None else None
        target = f"{path}?{urlencode(params)}" if params else path
        exchange = connections.leases if path.startswith(_LEASES) else connections.requests
        began, code = time.perf_counter(), "unreachable"
        try:
            answer = await exchange.ask(method, target, headers=headers, body=data, seconds=REQUEST_SECONDS)
            status, payload, asked_for = answer.status, answer.payload, answer.headers.get("retry-after", "")
            code = str(status)
        except AnswerTooLarge as error:
            raise TooLarge(f"{method} {path} cannot be read: {error}", status=502) from error
        except (asyncio.TimeoutError, OSError) as error:
            raise self._unreachable(access, error) from error
        except ValueError as error:
            raise ApiError(f"Cannot send {method} {path!r}: {error}", status=400, reason="BadRequest") from error
        finally:
            self._observe(method, path, code, time.perf_counter() - began)
        if status >= 300:  # the API server does not redirect
            if status == 401:
                self._access = None  # the next request reads the kubeconfig again
            raise _error(method, path, status, payload, asked_for, headers)
        return (await self._decoded(payload, path, is_read=method == "GET"))[0]

    async def watch(
        self,
        path: str,
        *,
        resource_version: str,
        params: Mapping[str, str] | None = None,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[WatchEvent]:
        """Yield the changes after ``resource_version`` until the server ends the watch after some minutes.

        ``opened`` is called once the server has accepted the watch, before the first event. A watch that receives
        nothing, not even a bookmark, for a time in ``liveness.SILENCE_SECONDS`` raises ApiUnreachable. An expired
        resource version raises ApiError with status 410; the caller lists again and watches from there. An object that
        cannot be decoded is reported as DELETED, with its metadata only, because a list omits it as well.
        """
        connections, access = await self._connected()
        seconds = random.randint(*WATCH_SECONDS)  # noqa: S311  no secret is made of it
        query = {
            **(params or {}),
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
        }
        headers: dict[str, str] = {}
        self._authorise(access, headers)
        silence = random.uniform(*liveness.SILENCE_SECONDS)  # noqa: S311  no secret is made of it
        limit = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=silence)
        answered = False
        try:
            asking = connections.watches.get(
                access.server + path,
                params=query,
                headers=headers,
                timeout=limit,
                server_hostname=access.server_name or None,
                allow_redirects=False,
            )
            # The server sends the response headers at once, even if nothing changes for hours.
            begun = await within(asking, HEAD_SECONDS)
            transport = begun.connection.transport if begun.connection is not None else None
            async with begun as response:
                end_when_unacknowledged(transport)
                answered = True
                self._observe("WATCH", path, str(response.status), 0.0)
                if response.status >= 300:  # the API server does not redirect
                    if response.status == 401:
                        self._access = None
                    asked_for = response.headers.get("Retry-After", "")
                    raise _error("WATCH", path, response.status, await response.read(), asked_for, headers)
                opened()
                async for line in _lines(response.content):
                    event, skipped = await self._decoded(line, path)
                    if event.get("type") == "ERROR":
                        status = event.get("object", {})
                        raise ApiError(
                            f"The watch of {path} ended: {status.get('message', 'no reason given')}",
                            status=int(status.get("code", 500)),
                            reason=str(status.get("reason", "")),
                        )
                    kind = "DELETED" if skipped else str(event.get("type"))
                    yield WatchEvent(type=kind, object=event.get("object") or {})
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if not answered:
                self._observe("WATCH", path, "unreachable", 0.0)
            raise self._unreachable(access, error) from error

    async def _decoded(self, payload: bytes, path: str, *, is_read: bool = False) -> tuple[Json, bool]:
        """Decode a response and return whether objects were left out of it. Raises ApiError.

        ``is_read`` means the response to a GET. The response to a write has all opaque parameters of the claim, and a
        successful write must not fail because of them.
        """
        if not payload.strip():
            return {}, False
        claims = _CLAIMS.search(path)
        opaque_of = (tuple(self.opaque_of) if claims["name"] and is_read else ()) if claims else None

        def decoding() -> Decoded:
            return decode(payload, opaque_of=opaque_of)

        try:
            decoded = await asyncio.to_thread(decoding) if len(payload) > THREAD_BYTES else decoding()
        except UndecodableObject as error:
            raise ApiError(error.message, status=502, hint=error.hint) from error
        except ValueError as error:
            raise ApiError(f"The API server's answer for {path} is not JSON: {error}", status=502) from error
        if not isinstance(decoded.value, dict):
            raise ApiError(f"The API server's answer for {path} is not a JSON object", status=502)
        if decoded.skipped:
            self._warn_skipped(path, decoded.skipped)
        return decoded.value, bool(decoded.skipped)

    def _warn_skipped(self, path: str, skipped: tuple[SkippedObject, ...]) -> None:
        """Log the skipped objects unless they are the same as before."""
        log = self._skipped.setdefault(path, StateLog(LOG))
        log.report(describe_skipped(skipped), level=logging.WARNING, path=path)

    async def close(self) -> None:
        """Close all connections. The next request opens new ones with freshly read credentials."""
        connections, self._connections = self._connections, None
        self._access = None
        self._close_later(connections)
        for session in tuple(self._retired):
            await self._close_retired(session)

    def _close_later(self, connections: _Connections | None) -> None:
        """Close connections that are no longer used for new requests. Requests in progress complete on them."""
        if connections is not None:
            connections.requests.close()
            connections.leases.close()
            self._retired.append(connections.watches)
            asyncio.get_running_loop().call_later(REQUEST_SECONDS, self._begin_closing, connections.watches)

    def _begin_closing(self, session: aiohttp.ClientSession) -> None:
        task = asyncio.get_running_loop().create_task(self._close_retired(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_retired(self, session: aiohttp.ClientSession) -> None:
        if session in self._retired:
            self._retired.remove(session)
            await session.close()

    async def _connected(self) -> tuple[_Connections, Access]:
        if self._connections is not None and self._access is not None:
            return self._connections, self._access
        async with self._gate:
            if self._connections is None or self._access is None:
                access = await asyncio.to_thread(load_access, self._kubeconfig)
                if self._connections is None or not access.has_same_server_as(self._connections.access):
                    context = access.ssl_context()
                    opened = _Connections(
                        access=access,
                        requests=self._exchange(access, context, CONNECTIONS),
                        watches=self._watching(context),
                        leases=self._exchange(access, context, 1),
                    )
                    self._close_later(self._connections)
                    self._connections = opened
                self._access = access
                self._fingerprint = access.fingerprint()
                self._token_stamp = 0
            return self._connections, self._access

    @property
    def _headers(self) -> dict[str, str]:
        return {"User-Agent": self._user_agent, "Accept": "application/json"}

    def _exchange(self, access: Access, context: ssl.SSLContext | None, connections: int) -> Exchange:
        try:
            return Exchange(
                access.server,
                context,
                server_name=access.server_name,
                headers=self._headers,
                connections=connections,
            )
        except ValueError as error:
            raise InvalidKubeconfig(f"The server {access.server!r} is no address: {error}") from error

    def _watching(self, context: ssl.SSLContext | None) -> aiohttp.ClientSession:
        """Return a session without a limit for connections."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=120, ssl=context if context is not None else True)
        # No cookies, as in the Go client. Only the Authorization header or the client certificate identifies the
        # caller.
        cookies = aiohttp.DummyCookieJar()
        # No compression, because a small stream could expand to any size.
        headers = {**self._headers, "Accept-Encoding": "identity"}
        return aiohttp.ClientSession(
            connector=connector, headers=headers, cookie_jar=cookies, trust_env=False, auto_decompress=False
        )

    async def reload_if_changed(self) -> bool:
        """Read the kubeconfig again if it or a file that it names has changed, and return whether it has changed.

        A new token keeps the open connections and their watches, because the API server authenticates a watch only at
        its start.
        """
        access = self._access
        if access is None or access.fingerprint() == self._fingerprint:
            return False
        self._access = None
        with contextlib.suppress(InvalidKubeconfig):  # the next request raises it
            await self._connected()
        return True

    def _authorise(self, access: Access, headers: dict[str, str]) -> None:
        token = access.token
        if access.token_file:
            with contextlib.suppress(OSError):
                stamp = os.stat(access.token_file).st_mtime_ns  # noqa: PTH116  at each claim: no objects
                if stamp != self._token_stamp:
                    self._token = Path(access.token_file).read_text(encoding="utf-8").strip()
                    self._token_stamp = stamp
            token = self._token
        if token:
            headers["Authorization"] = f"Bearer {token}"

    @staticmethod
    def _unreachable(access: Access, error: BaseException) -> ApiUnreachable:
        reason = str(error) or type(error).__name__
        return ApiUnreachable(
            f"The API server {access.server} did not answer: {reason}",
            hint="Check that it runs, that this node reaches it and that the kubeconfig names it rightly.",
        )


def list_items(answer: Json, path: str) -> list[Json]:
    """Return the objects in the response to a GET of a list.

    Raises ApiError if the response is not a list of an API server.
    """
    if "items" not in answer:
        raise ApiError(
            f"The answer for the list {path} is not from an API server: it has no items",
            status=502,
            hint="Check that a load balancer in front of the API server has a healthy API server.",
        )
    items: list[Json] = answer["items"] or []
    return items


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    # StreamReader.readline rejects lines beyond its buffer. A slice with 128 devices is one long line.
    buffer = bytearray()
    async for chunk in stream.iter_any():
        buffer += chunk
        if len(buffer) > LONGEST_EVENT:
            raise InvalidHttpResponse(f"an event of the watch has more than {LONGEST_EVENT} bytes")
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if line.strip():
                yield line


def _error(
    method: str, path: str, status: int, payload: bytes, retry_after: str, headers: Mapping[str, str]
) -> ApiError:
    message, reason = payload[:300].decode(errors="replace").strip(), ""
    with contextlib.suppress(ValueError, AttributeError):
        document = decode(payload).value
        message, reason = str(document.get("message") or message), status_reason(document, path)
    hints = {
        401: refusal(headers.get("Authorization", "").partition(" ")[2], time.time()),
        403: "This identity lacks a permission. Run the role that grants it again: dra_driver or dra_controller.",
    }
    return ApiError(
        f"{method} {path} was answered with {status}: {message}",
        status=status,
        reason=reason,
        hint=hints.get(status, ""),
        # Kubernetes sends seconds, never a date. Hours would be a mistake of a proxy.
        retry_after=min(float(retry_after), LONGEST_RETRY_AFTER) if retry_after.isdecimal() else None,
    )


__all__ = [
    "ApiClient",
    "ApiError",
    "ApiUnreachable",
    "InvalidKubeconfig",
    "Json",
    "TooLarge",
    "WatchEvent",
    "list_items",
]
