# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Connections of clients without a certificate: limited in number, closed when idle, and no obstacle to the API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from admission_flood_test import ATTACKER, REVIEW, SERVER
from dra_driver.controller import connection_limit
from dra_driver.controller.admission import rules_for
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.health_server import keep_serving
from dra_driver.controller.webhook import PATH, application
from scrapes_test import free_port, write_certificate

from tests.unit.undecodable import OWN

MOST = 16
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def webhook(directory: Path) -> AsyncIterator[tuple[int, aiohttp.ClientSession]]:
    """Serve the webhook as the controller does. Yield its port, and a client with the API server's address."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*write_certificate(directory, "webhook"))
    port = free_port()
    serving = asyncio.create_task(
        keep_serving(
            lambda: application(rules_for([OWN], {}), ControllerMetrics()), f"127.0.0.1:{port}", "the webhook", context
        )
    )
    connector = aiohttp.TCPConnector(local_addr=(SERVER, 0), limit=0, ssl=False, keepalive_timeout=90)
    try:
        async with aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=connector) as session:
            while True:
                try:
                    await review(session)
                    break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)
            yield port, session
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


async def review(session: aiohttp.ClientSession) -> None:
    async with session.post(PATH, data=json.dumps(REVIEW)) as answer:
        assert (await answer.json())["response"]["allowed"] is True


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


async def is_ended(stream: Stream) -> bool:
    try:
        return await asyncio.wait_for(stream[0].read(1), 0.05) == b""
    except asyncio.TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("with_handshake", [False, True])
@pytest.mark.parametrize("addresses", [1, 8])
def test_many_idle_connections_do_not_keep_the_api_server_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_handshake: bool, addresses: int
) -> None:
    monkeypatch.setattr(connection_limit, "MOST_CONNECTIONS", MOST)
    context = ssl.create_default_context() if with_handshake else None
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def scenario() -> None:
        async with webhook(tmp_path) as (port, server):
            opened: list[Stream] = []
            for number in range(4 * MOST):
                source = ATTACKER if addresses == 1 else f"127.0.1.{1 + number % addresses}"
                with contextlib.suppress(OSError):
                    opened.append(await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), ssl=context))
            # The earlier connection, and new ones in parallel.
            await asyncio.gather(*(review(server) for _each in range(4)))
            ended = [await is_ended(each) for each in opened]
            assert ended.count(False) <= MOST - 1, "the connections are limited"
            await asyncio.gather(*(review(server) for _each in range(4)))
            for _reader, writer in opened:
                writer.close()

    run(scenario)


def test_idle_connections_are_closed_and_those_in_use_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "IDLE_SECONDS", 2.0)
    monkeypatch.setattr(connection_limit, "CHECK_SECONDS", 0.05)

    async def scenario() -> None:
        async with webhook(tmp_path) as (port, server):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _each in range(4)]
            begun = await asyncio.open_connection("127.0.0.1", port)
            begun[1].write(b"\x16")  # the first byte of a handshake
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            requested = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            requested[1].write(f"GET {PATH} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            assert b" 405 " in await requested[0].readline()
            while (await requested[0].readline()).strip():
                pass
            await requested[0].read(len("405: Method Not Allowed"))
            began, ports = time.monotonic(), set()
            while time.monotonic() - began < 4.0:
                await review(server)
                (connections,) = server.connector._conns.values()  # type: ignore[union-attr]
                ports |= {each[0].transport.get_extra_info("sockname") for each in connections}
                await asyncio.sleep(0.05)
            assert len(ports) == 1, "the connection in use was replaced"
            assert [await is_ended(each) for each in (*silent, begun, requested)] == [True] * 6
            for _reader, writer in (*silent, begun, requested):
                writer.close()

    run(scenario)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "[::1]", "", "0.0.0.0", "[::]"])
def test_each_form_of_an_address_is_served(address: str) -> None:
    async def scenario() -> None:
        port = free_port()
        serving = asyncio.create_task(
            keep_serving(lambda: application(rules_for([OWN], {}), ControllerMetrics()), f"{address}:{port}", "it")
        )
        dialed = {"[::1]": "::1", "[::]": "::1"}.get(address, "127.0.0.1")
        while True:
            try:
                _reader, writer = await asyncio.open_connection(dialed, port)
                break
            except OSError:
                assert not serving.done()
                await asyncio.sleep(0.02)
        writer.close()
        serving.cancel()
        await asyncio.wait((serving,))

    run(scenario)
