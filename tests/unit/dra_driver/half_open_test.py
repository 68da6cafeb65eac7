# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Connections on which the API server has become silent: noticed in time, and all of them are replaced together."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from dra_driver.api import client as client_module
from dra_driver.api import liveness
from dra_driver.api.client import ApiClient, ApiUnreachable
from dra_driver.api.exchange import Exchange
from dra_driver.core.api_connection import INSECURE_EXTENSION
from scripted_server import Peer, Server, answering, silent

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"
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
    monkeypatch.setattr(liveness, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(liveness, "TICK_SECONDS", 0.05)
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


def test_caller_that_gives_up_on_a_silent_connection_ends_the_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert "GET /version" in server.requests[1]
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


@pytest.mark.usefixtures("short_times")
def test_watch_goes_on_while_the_server_answers_anything(tmp_path: Path) -> None:
    """A quiet watch is no reason to begin anew: nothing has changed."""

    async def scenario() -> None:
        quiet_until = asyncio.Event()

        async def event_later(peer: Peer) -> None:
            await peer.request()
            await peer.send(WATCH_HEAD, CHUNK)
            await quiet_until.wait()
            await peer.send(CHUNK, b"0\r\n\r\n")

        probes = 0

        async def answer(peer: Peer) -> None:
            nonlocal probes
            while await peer.request():
                probes += 1
                if probes == 3:
                    quiet_until.set()
                await peer.send(NOT_FOUND)

        server = Server(event_later, answer)
        client = client_of(tmp_path, await server.start())
        events = [event.type async for event in client.watch("/api/v1/nodes", resource_version="1")]
        assert events == ["ADDED", "ADDED"]
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
