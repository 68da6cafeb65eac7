# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Connections on which the API server has become silent: noticed in time, and all of them are replaced together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from dra_driver.api import client as client_module
from dra_driver.api import liveness
from dra_driver.api.client import ApiClient, ApiUnreachable
from dra_driver.api.exchange import Exchange
from dra_driver.core.api_connection import INSECURE_EXTENSION
from scripted_server import Peer, Server, answering, silent

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
#: Clients of one server in a test of their probes' times.
CLIENTS = 200
WATCH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "1"}}}).encode() + b"\n"
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


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


def client_of(folder: Path, url: str) -> ApiClient:
    document = {
        "clusters": [{"name": "c", "cluster": {"server": url, "extensions": [INSECURE_EXTENSION]}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(document), encoding="utf-8")
    return ApiClient(str(path))


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENCE_SECONDS", (0.2, 0.3))
    monkeypatch.setattr(liveness, "PROBE_SECONDS", 0.4)
    monkeypatch.setattr(liveness, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(client_module, "REQUEST_SECONDS", 0.3)


def test_request_without_answer_ends_all_idle_connections() -> None:
    """Eight connections become silent. One request pays for it, the next ones use new connections."""

    async def scenario() -> None:
        server = Server(*[once_and_silent] * 8, answering(OK))
        exchange = Exchange(await server.start(), None, connections=8)
        await asyncio.gather(*(exchange.ask("GET", "/a", seconds=20) for _each in range(8)))
        assert server.connections == 8
        with pytest.raises(asyncio.TimeoutError):
            await exchange.ask("GET", "/a", seconds=0.2)
        for _each in range(8):
            assert (await exchange.ask("GET", "/a", seconds=0.5)).status == 200
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
        assert (await exchange.ask("GET", "/a", seconds=0.5)).status == 200
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
        assert events == ["ADDED"]
        assert server.requests[1].startswith("GET /livez ")
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


def answer_with(status: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\n{}" % status


async def watch_until(client: ApiClient, until: Callable[[], bool]) -> list[str]:
    """Return the types of a watch's events once a condition holds; fails if the watch ends earlier."""
    events: list[str] = []

    async def follow() -> None:
        async for event in client.watch("/api/v1/nodes", resource_version="1"):
            events.append(event.type)

    following = asyncio.ensure_future(follow())
    while not until():
        assert not following.done(), following
        await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.wait((following,))
    return events


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("status", [b"200 OK", b"401 Unauthorized", b"403 Forbidden", b"404 Not Found", b"500 Error"])
def test_watch_stays_open_whatever_status_the_probe_gets(tmp_path: Path, status: bytes) -> None:
    """A quiet watch stays open: nothing has changed."""

    async def scenario() -> None:
        server = Server(one_event_and_silent, answering(answer_with(status)))
        client = client_of(tmp_path, await server.start())
        assert await watch_until(client, lambda: len(server.requests) > 4) == ["ADDED"]
        assert all(each.startswith("GET /livez ") for each in server.requests[1:])
        assert server.connections == 2, "all probes use one connection"
        await client.close()
        server.stop()

    run(scenario)


@pytest.mark.usefixtures("short_times")
def test_probe_does_not_wait_for_a_connection_for_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only connection for requests is in use by one that takes long; the server is alive."""
    monkeypatch.setattr(client_module, "CONNECTIONS", 1)
    monkeypatch.setattr(client_module, "REQUEST_SECONDS", 20)

    async def scenario() -> None:
        server = Server(one_event_and_silent, silent, answering(OK))
        client = client_of(tmp_path, await server.start())
        asking: list[asyncio.Task[object]] = []

        def is_probed_twice() -> bool:
            if not asking and server.requests:
                asking.append(asyncio.ensure_future(client.get("/slow")))
            return len([each for each in server.requests if each.startswith("GET /livez ")]) > 1

        assert await watch_until(client, is_probed_twice) == ["ADDED"]
        for task in asking:
            assert not task.done()
            task.cancel()
            await asyncio.wait((task,))
        await client.close()
        server.stop()

    run(scenario)


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("source", ["event", "answer"])
def test_client_does_not_probe_while_the_server_sends_data(tmp_path: Path, source: str) -> None:
    async def scenario() -> None:
        sent = 0

        async def events(peer: Peer) -> None:
            nonlocal sent
            await peer.request()
            await peer.send(WATCH_HEAD, CHUNK)
            while sent < 20 and source == "event":
                await asyncio.sleep(0.05)
                await peer.send(CHUNK)
                sent += 1
            await silent(peer)

        async def ask() -> None:
            nonlocal sent
            for _each in range(20 if source == "answer" else 0):
                await client.get("/a")
                sent += 1
                await asyncio.sleep(0.05)

        server = Server(events, answering(OK))
        client = client_of(tmp_path, await server.start())
        asking = asyncio.ensure_future(ask())
        await watch_until(client, lambda: sent == 20)
        await asking
        assert not [each for each in server.requests if each.startswith("GET /livez ")]
        await client.close()
        server.stop()

    run(scenario)


@pytest.mark.usefixtures("short_times")
def test_watch_stays_open_if_only_the_probe_is_not_answered(tmp_path: Path) -> None:
    """The server does not answer /livez, but sends an event meanwhile."""

    async def scenario() -> None:
        probed = asyncio.Event()
        probes = 0

        async def event_after_each_probe(peer: Peer) -> None:
            await peer.request()
            await peer.send(WATCH_HEAD, CHUNK)
            while await probed.wait():
                probed.clear()
                await peer.send(CHUNK)

        async def no_answer(peer: Peer) -> None:
            nonlocal probes
            while await peer.request():
                probes += 1
                probed.set()

        server = Server(event_after_each_probe, no_answer)
        client = client_of(tmp_path, await server.start())
        assert len(await watch_until(client, lambda: probes == 3)) >= 3
        await client.close()
        server.stop()

    run(scenario)


def test_nodes_do_not_probe_at_the_same_time() -> None:
    """Of 200 clients that got the last event at the same time, at most a fifth waits equally long, to a tenth of the range."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        moments: list[float] = []
        waits: list[float] = []
        done = asyncio.Event()
        began = loop.time()

        def draw(near: float, far: float) -> float:
            waits.append(random.uniform(near, far))
            return waits[-1]

        async def probe(_seconds: float) -> None:
            moments.append(loop.time() - began)
            if len(moments) == CLIENTS:
                done.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(liveness, "random", SimpleNamespace(uniform=draw))
            patch.setattr(liveness, "SILENCE_SECONDS", tuple(each / 10 for each in liveness.SILENCE_SECONDS))
            near, far = liveness.SILENCE_SECONDS
            here, there = socket.socketpair()
            _reader, writer = await asyncio.open_connection(sock=here)
            guards = [liveness.WatchGuard(probe, lambda: None) for _each in range(CLIENTS)]
            with contextlib.ExitStack() as stack:
                for guard in guards:
                    stack.enter_context(guard.guarding(writer.transport))
                await done.wait()
            writer.close()
            there.close()
        tenth, first = (far - near) / 10, waits[:CLIENTS]
        assert all(len([each for each in first if wait <= each < wait + tenth]) <= CLIENTS / 5 for wait in first)
        assert all(moment > wait - 0.05 for moment, wait in zip(sorted(moments), sorted(first), strict=True))

    run(scenario)


def test_client_at_rest_sends_nothing_but_a_probe_after_each_silence(tmp_path: Path) -> None:
    """The requests of a client with three watches on which nothing happens, in hundredths of the real times."""

    async def scenario() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(liveness, "SILENCE_SECONDS", tuple(each / 100 for each in liveness.SILENCE_SECONDS))
            server = Server(*[one_event_and_silent] * 3, answering(OK))
            client = client_of(tmp_path, await server.start())
            began = asyncio.get_running_loop().time()

            def is_over() -> bool:
                return asyncio.get_running_loop().time() - began > 3  # 5 minutes

            await asyncio.gather(*(watch_until(client, is_over) for _each in range(3)))
            minutes = (asyncio.get_running_loop().time() - began) * 100 / 60
            probes = [each for each in server.requests if each.startswith("GET /livez ")]
            assert len(server.requests) == 3 + len(probes), "three watches, and probes"
            assert 1 <= len(probes) <= 2 * minutes, "at most two requests a minute"
            await client.close()
            server.stop()

    run(scenario)


def test_kernel_ends_connections_that_nobody_acknowledges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the real sockets of both kinds of connections."""
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
    monkeypatch.setattr(liveness, "end_when_unacknowledged", note)

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
