# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A client of the Kubernetes API that sends and returns plain JSON over connections that it keeps open.

Typed models are not used on purpose: they drop every field that they do not know, so that an older client would delete
what a newer server holds, and they cost four times the memory.
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

from ..core.decoding import SkippedObject, UndecodableObject, decode, describe_skipped
from ..core.errors import AcceleratorError
from ..deadlines import within
from ..logs import StateLog
from .exchange import Exchange, NoHttp
from .kubeconfig import Access, InvalidKubeconfig, load_access
from .liveness import PROBE_PATH, WatchGuard
from .token import refusal

LOG = logging.getLogger(__name__)
Json = dict[str, Any]

REQUEST_SECONDS = 15.0
#: The most bytes of one event of a watch: the API server keeps no object above 1.5 MiB.
LONGEST_EVENT = 16 * 1024 * 1024
# A watch that says nothing for longer than its own time limit plus this has lost its connection.
WATCH_GRACE_SECONDS = 30.0
# A watch whose answer has not begun after so long has none: a busy server lets a request wait for 15 s.
HEAD_SECONDS = 30.0
LONGEST_RETRY_AFTER = 300.0
# The limit for consecutive refusals of a page of a list, and for restarts of a list after its snapshot has expired.
PAGE_REFUSALS, LIST_RESTARTS = 5, 3
# So many requests are answered side by side. Each needs a connection of its own, and to open one costs both sides more than a request: who
# asks for much at once, after a start or when many pods come together, waits less for few that are used again than for many new ones.
CONNECTIONS = 16
# Claims and templates are read without opaque parameters: only prepare and explain need them, which GET one claim.
_CLAIMS = re.compile(r"/resourceclaim(?:s|templates)(?P<name>/[^/]+)?(?:/status)?$")


class ApiUnreachable(AcceleratorError):
    """The API server did not answer."""

    default_code = "api-unreachable"


class ApiError(AcceleratorError):
    """The API server answered with an error.

    ``status`` is the HTTP status, ``reason`` Kubernetes' own word, ``retry_after`` how many seconds the server wants to be
    left alone (None: it did not say).
    """

    default_code = "api-error"

    def __init__(
        self, message: str, *, status: int, reason: str = "", hint: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after

    @property
    def is_not_found(self) -> bool:
        """Return whether the API server says that the object does not exist.

        A server that does not serve the path, such as an older one during an upgrade of the control plane, or a load balancer, answers
        with status 404 and no reason, which does not mean that the object is missing. Facts: k8s.io/apiserver/pkg/server/mux/pathrecorder.go
        (NotFoundHandler), k8s.io/apimachinery/pkg/api/errors (NewNotFound).
        """
        return self.status == 404 and self.reason == "NotFound"

    @property
    def is_of_server(self) -> bool:
        """Return whether the same request for other objects fails as well: the identity, its rights, or the server is the cause."""
        return self.status in (401, 403, 429) or self.status >= 500 or (self.status == 404 and not self.is_not_found)


@dataclass(frozen=True)
class _Connections:
    """The connections to the server: of requests, of watches, which stay open for minutes, and one for liveness probes.

    ``access`` is the access with which the connections were opened. Its token can be outdated.
    """

    access: Access
    requests: Exchange
    watches: aiohttp.ClientSession
    probes: Exchange


@dataclass(frozen=True)
class WatchEvent:
    """One event of a watch: type ADDED, MODIFIED, DELETED or BOOKMARK, and the object."""

    type: str
    object: Json


class ApiClient:
    """Requests to one API server. All methods raise ApiUnreachable or ApiError. Use it within one event loop."""

    def __init__(
        self,
        kubeconfig: str,
        *,
        user_agent: str = "dra-accelerators-driver",
        observer: Callable[[str, str, str, float], None] | None = None,
    ) -> None:
        self._kubeconfig = kubeconfig
        # Told of each request its verb, its path, the HTTP status or "unreachable", and how long it took.
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
        self._guard = WatchGuard(self._probe, self._retire)
        #: Drivers whose opaque parameters are decoded in a claim that is read individually. Each driver adds its name.
        self.opaque_of: set[str] = set()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Json:
        """GET an object or a list."""
        return await self.request("GET", path, params=params)

    async def list_all(self, path: str, params: Mapping[str, str] | None = None, *, page: int) -> list[Json]:
        """Return all objects of a list, read with up to ``page`` objects per request."""
        found: list[Json] = []
        async for answer, is_first in self.pages(path, params, page=page):
            if is_first:
                found.clear()
            found += answer.get("items") or ()
        return found

    async def pages(
        self, path: str, params: Mapping[str, str] | None = None, *, page: int
    ) -> AsyncIterator[tuple[Json, bool]]:
        """GET a list in answers of up to ``page`` objects, each with whether it is the first one of the list.

        A later page that the server refuses with Retry-After is requested again after that time: the pages before it stay valid. If the
        snapshot of the list has expired (410), the list begins again with a first page, and the caller drops all earlier pages.
        """
        query, refusals, restarts = {**(params or {}), "limit": str(page)}, 0, 0
        while True:
            is_first = "continue" not in query
            try:
                answer = await self.get(path, query)
            except ApiError as error:
                if not is_first and error.status == 410 and restarts < LIST_RESTARTS:
                    restarts += 1
                    del query["continue"]
                    continue
                refusals += 1
                if is_first or error.retry_after is None or refusals > PAGE_REFUSALS:
                    raise
                await asyncio.sleep(error.retry_after)
                continue
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
        """Send one request and return the JSON object of the answer ({} for an empty one)."""
        connections, access = await self._connected()
        headers = {"Content-Type": content_type} if body is not None else {}
        self._authorise(access, headers)
        data = json.dumps(body, separators=(",", ":")).encode() if body is not None else None
        target = f"{path}?{urlencode(params)}" if params else path
        began, code = time.perf_counter(), "unreachable"
        try:
            answer = await connections.requests.ask(method, target, headers=headers, body=data, seconds=REQUEST_SECONDS)
            status, payload, asked_for = answer.status, answer.payload, answer.headers.get("retry-after", "")
            code = str(status)
        except (asyncio.TimeoutError, OSError) as error:
            raise self._unreachable(access, error) from error
        except ValueError as error:
            raise ApiError(
                f"{method} {path!r} cannot be asked for: {error}", status=400, reason="BadRequest"
            ) from error
        finally:
            self._observe(method, path, code, time.perf_counter() - began)
        if status >= 300:  # nobody but a server that is none of Kubernetes' leads elsewhere
            if status == 401:
                self._access = None  # the next request reads the kubeconfig again
            raise _error(method, path, status, payload, asked_for, headers)
        return self._decoded(payload, path, is_read=method == "GET")

    async def watch(
        self,
        path: str,
        *,
        resource_version: str,
        params: Mapping[str, str] | None = None,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[WatchEvent]:
        """Yield the changes after ``resource_version`` until the server ends the watch (some minutes).

        ``opened`` is called once the server has accepted the watch, before the first event.
        An expired resource version raises ApiError with status 410: list again, then watch from there. An object that cannot be
        decoded is reported as DELETED, with only its metadata: a list omits it as well.
        """
        connections, access = await self._connected()
        # Many nodes that start together should not come back together.
        seconds = random.randint(240, 480)  # noqa: S311  no secret is made of it
        query = {
            **(params or {}),
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
        }
        headers: dict[str, str] = {}
        self._authorise(access, headers)
        limit = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=seconds + WATCH_GRACE_SECONDS)
        answered = False
        try:
            asking = connections.watches.get(
                access.server + path,
                params=query,
                headers=headers,
                timeout=limit,
                server_hostname=access.server_name or None,
            )
            # The head of the answer is sent at once, even if nothing changes for hours.
            begun = await within(asking, HEAD_SECONDS)
            transport = begun.connection.transport if begun.connection is not None else None
            async with begun as response:
                with self._guard.guarding(transport):
                    answered = True
                    self._observe("WATCH", path, str(response.status), 0.0)
                    if response.status >= 400:
                        if response.status == 401:
                            self._access = None
                        asked_for = response.headers.get("Retry-After", "")
                        raise _error("WATCH", path, response.status, await response.read(), asked_for, headers)
                    opened()
                    async for line in _lines(response.content, self._guard.hear):
                        event, skipped = self._decoded_event(line, path)
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

    def _decoded(self, payload: bytes, path: str, *, is_read: bool) -> Json:
        return self._decoded_event(payload, path, is_read=is_read)[0]

    def _decoded_event(self, payload: bytes, path: str, *, is_read: bool = False) -> tuple[Json, bool]:
        """Decode an answer and return whether objects were left out of it. Raises ApiError.

        ``is_read``: the answer to a GET. The answer to a write has all opaque parameters of the claim, and a write that succeeded must
        not fail because of them.
        """
        if not payload.strip():
            return {}, False
        claims = _CLAIMS.search(path)
        opaque_of = (self.opaque_of if claims["name"] and is_read else ()) if claims else None
        try:
            decoded = decode(payload, opaque_of=opaque_of)
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
        """Log skipped objects, once as long as they are the same."""
        log = self._skipped.setdefault(path, StateLog(LOG))
        log.report(describe_skipped(skipped), level=logging.WARNING, path=path)

    async def _probe(self, seconds: float) -> None:
        """Wait for any answer of the server, on a connection for probes. Raises OSError and asyncio.TimeoutError.

        The status does not matter: a server that answers 401, 403 or 404 is alive. Without a valid kubeconfig or token no probe is
        possible, and the open connections stay.
        """
        try:
            connections, access = await self._connected()
        except InvalidKubeconfig:
            return
        headers: dict[str, str] = {}
        self._authorise(access, headers)
        began, code = time.perf_counter(), "unreachable"
        try:
            code = str((await connections.probes.ask("GET", PROBE_PATH, headers=headers, seconds=seconds)).status)
        except OSError:  # also a certificate that is not valid, which is a ValueError too
            raise
        except ValueError:
            return
        finally:
            self._observe("GET", PROBE_PATH, code, time.perf_counter() - began)

    async def close(self) -> None:
        """Close all connections. The next request opens new ones with freshly read credentials."""
        self._guard.stop()
        self._retire()
        for session in tuple(self._retired):
            await self._close_retired(session)

    def _retire(self) -> None:
        """Open new connections for later requests. Requests in progress complete on the previous connections."""
        connections, self._connections = self._connections, None
        self._access = None
        self._close_later(connections)

    def _close_later(self, connections: _Connections | None) -> None:
        if connections is not None:
            connections.requests.close()
            connections.probes.close()
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
                        probes=self._exchange(access, context, 1),
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
                heard=self._guard.hear,
            )
        except ValueError as error:
            raise InvalidKubeconfig(f"The server {access.server!r} is no address: {error}") from error

    def _watching(self, context: ssl.SSLContext | None) -> aiohttp.ClientSession:
        """Return a session with as many connections as are asked for."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=120, ssl=context if context is not None else True)
        # No cookies, as Go's client: whoever is asked for is said by what authorises the request alone.
        cookies = aiohttp.DummyCookieJar()
        # No compression: a small stream could be unpacked to any size.
        headers = {**self._headers, "Accept-Encoding": "identity"}
        return aiohttp.ClientSession(
            connector=connector, headers=headers, cookie_jar=cookies, trust_env=False, auto_decompress=False
        )

    async def reload_if_changed(self) -> bool:
        """Read the kubeconfig again if it or a file that it names has changed. Return whether something has changed.

        A new token keeps the open connections and their watches: the API server authenticates a watch only when it begins.
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


async def _lines(stream: aiohttp.StreamReader, heard: Callable[[], None] = lambda: None) -> AsyncIterator[bytes]:
    # StreamReader.readline refuses lines beyond its buffer; a slice of 128 devices is one long line.
    buffer = bytearray()
    async for chunk in stream.iter_any():
        heard()
        buffer += chunk
        if len(buffer) > LONGEST_EVENT:
            raise NoHttp(f"an event of the watch has more than {LONGEST_EVENT} bytes")
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
        message, reason = str(document.get("message") or message), str(document.get("reason") or "")
    hints = {
        401: refusal(headers.get("Authorization", "").partition(" ")[2], time.time()),
        403: "This identity lacks a right; run the role that grants what is needed again: dra_driver, or dra_controller.",
    }
    return ApiError(
        f"{method} {path} was answered with {status}: {message}",
        status=status,
        reason=reason,
        hint=hints.get(status, ""),
        # Kubernetes sends seconds, never a date. Hours would be a mistake of somebody in between.
        retry_after=min(float(retry_after), LONGEST_RETRY_AFTER) if retry_after.isdigit() else None,
    )


__all__ = ["ApiClient", "ApiError", "ApiUnreachable", "InvalidKubeconfig", "Json", "WatchEvent"]
