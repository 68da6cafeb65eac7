# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Connections on which the API server has become silent are detected in time and replaced."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from dra_driver.api import client as client_module
from dra_driver.api import liveness, watching
from dra_driver.api.client import ApiClient, ApiUnreachable
from dra_driver.api.exchange import Exchange
from dra_driver.api.watching import Watched
from dra_driver.core.api_connection import INSECURE_EXTENSION
from scripted_server import Peer, Server, answering, silent

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
#: The number of clients of one server in a test of the times at which they reopen their watches.
CLIENTS = 200
WATCH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "1"}}}).encode() + b"\n"
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
MARK = json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}).encode() + b"\n"
BOOKMARK = b"%x\r\n%s\r\n" % (len(MARK), MARK)
LIST = json.dumps({"items": [], "metadata": {"resourceVersion": "7"}}).encode()


async def once_and_silent(peer: Peer) -> None:
    await peer.request()
    await peer.send(OK)
    await silent(peer)


async def one_event_and_silent(peer: Peer) -> None:
    await peer.request()
    await peer.send(WATCH_HEAD, CHUNK)
    await silent(peer)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))  # type: ignore[arg-type]


def client_of(directory: Path, url: str) -> ApiClient:
    document = {
        "clusters": [{"name": "c", "cluster": {"server": url, "extensions": [INSECURE_EXTENSION]}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = directory / "kubeconfig"
    path.write_text(json.dumps(document), encoding="utf-8")
    return ApiClient(str(path))


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENCE_SECONDS", (0.2, 0.3))
    monkeypatch.setattr(client_module, "REQUEST_SECONDS", 0.3)


def test_request_without_answer_ends_all_idle_connections() -> None:
    """Eight connections become silent: one request is delayed, and the next ones use new connections."""

    async def scenario() -> None:
        server = Server(*[once_and_silent] * 8, answering(OK))
        exchange = Exchange(await server.start(), None, connections=8)
        await asyncio.gather(*(exchange.ask("GET", "/a", seconds=20) for _each in range(8)))
        assert server.connections == 8
        with pytest.raises(asyncio.TimeoutError):
            await exchange.ask("GET", "/a", seconds=0.2)
        for _each in range(8):
            assert (await exchange.ask("GET", "/a", seconds=20)).status == 200
        exchange.close()
        server.stop()

    run(scenario)


def test_caller_timeout_on_a_silent_connection_ends_the_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.api.exchange.SILENT_SECONDS", 0.1)

    async def scenario() -> None:
        server = Server(*[once_and_silent] * 2, answering(OK))
        exchange = Exchange(await server.start(), None, connections=8)
        await asyncio.gather(*(exchange.ask("GET", "/a", seconds=20) for _each in range(2)))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(exchange.ask("GET", "/a", seconds=20), 0.3)
        assert (await exchange.ask("GET", "/a", seconds=20)).status == 200
        exchange.close()
        server.stop()

    run(scenario)


@pytest.mark.usefixtures("short_times")
def test_watch_of_a_silent_server_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = Server(one_event_and_silent, silent)
        client = client_of(tmp_path, await server.start())
        events = []
        with pytest.raises(ApiUnreachable):
            async for event in client.watch("/api/v1/nodes", resource_version="1"):
                events.append(event.type)
        assert events == ["ADDED"] and len(server.requests) == 1
        await client.close()
        server.stop()

    run(scenario)


@pytest.mark.usefixtures("short_times")
def test_watch_without_a_head_of_an_answer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEAD_SECONDS", 0.2)

    async def scenario() -> None:
        server = Server(silent)
        client = client_of(tmp_path, await server.start())
        with pytest.raises(ApiUnreachable):
            async for _event in client.watch("/api/v1/nodes", resource_version="1"):
                pass
        await client.close()
        server.stop()

    run(scenario)


def test_silent_watch_ends_while_other_connections_get_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a load balancer, another API server can answer the other requests: the silent watch ends nevertheless."""
    monkeypatch.setattr(liveness, "SILENCE_SECONDS", (0.2, 0.3))

    async def scenario() -> None:
        server = Server(one_event_and_silent, answering(OK))
        client = client_of(tmp_path, await server.start())

        async def watch() -> None:
            async for _event in client.watch("/api/v1/nodes", resource_version="1"):
                pass

        watching = asyncio.ensure_future(watch())
        while not watching.done():
            await client.get("/a")
            await asyncio.sleep(0.02)
        assert isinstance(watching.exception(), ApiUnreachable)
        assert len([each for each in server.requests if "watch=1" in each]) == 1
        await client.close()
        server.stop()

    run(scenario)


def test_watch_with_bookmarks_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENCE_SECONDS", (1.0, 1.0))

    async def scenario() -> None:
        async def bookmarks(peer: Peer) -> None:
            await peer.request()
            await peer.send(WATCH_HEAD)
            for _each in range(20):
                await asyncio.sleep(0.1)
                await peer.send(BOOKMARK)
            await peer.send(b"0\r\n\r\n")

        server = Server(bookmarks)
        client = client_of(tmp_path, await server.start())
        events = [event.type async for event in client.watch("/api/v1/nodes", resource_version="1")]
        assert events == ["BOOKMARK"] * 20 and len(server.requests) == 1
        await client.close()
        server.stop()

    run(scenario)


async def watched_nodes(client: ApiClient) -> Watched[str]:
    async def path() -> str:
        return "/api/v1/nodes"

    return Watched(client, "Nodes", path, lambda item: str(item["metadata"]["name"]))


def lists_then_watches(watch: Callable[[Peer], Awaitable[None]]) -> Callable[[Peer], Awaitable[None]]:
    """Answer a list with resource version 7, and serve a watch with a script."""

    async def script(peer: Peer) -> None:
        while request := await peer.request():
            if "watch=1" in request:
                await watch(peer)
                return
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(LIST), LIST))

    return script


async def accepted_and_silent(peer: Peer) -> None:
    await peer.send(WATCH_HEAD, BOOKMARK)
    await silent(peer)


@pytest.mark.usefixtures("short_times")
def test_watched_silent_watch_is_opened_again_from_its_last_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A silent watch counts as ended normally: no list, no longer wait, and the objects stay current."""
    monkeypatch.setattr(watching, "LASTING_SECONDS", 0.1)
    monkeypatch.setattr(watching, "RETRY_FIRST", 0.1)

    async def scenario() -> None:
        server = Server(lists_then_watches(accepted_and_silent))
        client = client_of(tmp_path, await server.start())
        watched = await watched_nodes(client)
        task = asyncio.ensure_future(watched.run())
        await until(lambda: len(server.requests) > 5)
        assert watched.current and "cannot be watched" not in caplog.text
        task.cancel()
        await asyncio.wait((task,))
        versions = [re.findall(r"resourceVersion=(\d+)", each)[0] for each in server.requests[1:]]
        assert versions == ["7"] + ["9"] * (len(versions) - 1), "no list, and the version of the last bookmark"
        await client.close()
        server.stop()

    run(scenario)


@pytest.mark.usefixtures("short_times")
def test_watched_silent_server_is_not_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resumed watch gets no answer, so the objects are not current."""
    monkeypatch.setattr(watching, "LASTING_SECONDS", 0.1)
    monkeypatch.setattr(watching, "RETRY_FIRST", 0.1)
    monkeypatch.setattr(client_module, "HEAD_SECONDS", 0.2)

    async def scenario() -> None:
        listing = lists_then_watches(accepted_and_silent)
        server = Server(listing, listing, silent)
        client = client_of(tmp_path, await server.start())
        watched = await watched_nodes(client)
        task = asyncio.ensure_future(watched.run())
        await until(lambda: watched.current)
        await until(lambda: not watched.current)
        task.cancel()
        await asyncio.wait((task,))
        await client.close()
        server.stop()

    run(scenario)


def test_clients_open_silent_watches_at_different_times() -> None:
    """Of 200 clients that got the last event at the same time, at most a fifth wait equally long, to a tenth of the range."""
    near, far = liveness.SILENCE_SECONDS
    waits = [random.uniform(near, far) for _each in range(CLIENTS)]
    tenth = (far - near) / 10
    assert all(len([each for each in waits if wait <= each < wait + tenth]) <= CLIENTS / 5 for wait in waits)


@pytest.mark.parametrize("ending", ["silence", "idle limit"])
def test_client_at_rest_sends_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Count the requests of a watch without events and bookmarks, in hundredths of the real times.

    The other case is a load balancer that ends a connection after 20 s without data.
    """
    monkeypatch.setattr(liveness, "SILENCE_SECONDS", tuple(each / 100 for each in liveness.SILENCE_SECONDS))
    monkeypatch.setattr(watching, "RETRY_FIRST", watching.RETRY_FIRST / 100)
    monkeypatch.setattr(watching, "LASTING_SECONDS", watching.LASTING_SECONDS / 100)

    async def scenario() -> None:
        async def idle(peer: Peer) -> None:
            await peer.send(WATCH_HEAD)
            if ending == "silence":
                await silent(peer)
            await asyncio.sleep(0.2)

        server = Server(lists_then_watches(idle))
        client = client_of(tmp_path, await server.start())
        watched = await watched_nodes(client)
        task = asyncio.ensure_future(watched.run())
        await until(lambda: len(server.requests) > 1)
        before = len(server.requests)
        await asyncio.sleep(6)  # 10 minutes
        sent = len(server.requests) - before
        least, most = (4, 8) if ending == "silence" else (15, 30)
        assert least <= sent <= most, "requests in ten minutes"
        assert watched.current
        task.cancel()
        await asyncio.wait((task,))
        await client.close()
        server.stop()

    run(scenario)


async def until(condition: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not hold within 20 s"
        await asyncio.sleep(0.01)


def test_kernel_ends_connections_without_acknowledgments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify the options of the real sockets of both kinds of connections."""
    seen: list[socket.socket] = []
    settle = liveness.end_when_unacknowledged

    def note(transport: asyncio.BaseTransport | None) -> None:
        settle(transport)
        assert transport is not None
        seen.append(transport.get_extra_info("socket"))
        assert seen[-1].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert seen[-1].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30000
        assert seen[-1].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15

    monkeypatch.setattr("dra_driver.api.exchange.end_when_unacknowledged", note)
    monkeypatch.setattr("dra_driver.api.client.end_when_unacknowledged", note)

    async def scenario() -> None:
        server = Server(one_event_and_silent, answering(OK))
        client = client_of(tmp_path, await server.start())
        async for _event in client.watch("/api/v1/nodes", resource_version="1"):
            break
        await client.get("/a")
        assert len(seen) == 2
        await client.close()
        server.stop()

    run(scenario)
