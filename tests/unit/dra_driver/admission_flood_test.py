# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Callers without a certificate send large and slow bodies to the webhook: the event loop and real requests continue."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiohttp import web
from dra_driver.controller import admission_queue
from dra_driver.controller.admission import rules_for
from dra_driver.controller.admission_queue import REQUESTS_OF_ADDRESS, USUAL_BYTES
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.webhook import PATH, application

from tests.unit.undecodable import OWN

# 4 MiB that are neither valid for the fast decoder nor shallow: the slowest that the webhook accepts.
LARGE = b'{"a":"\\ud800","b":[' + b",".join([b'[{"a":[]}]'] * 350_000) + b"]}"
REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {"uid": "1", "operation": "CREATE", "object": {"kind": "ResourceClaim", "spec": {}}},
}
ATTACKER, SERVER = "127.0.0.2", "127.0.0.3"


@pytest.fixture(autouse=True)
def time_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests take longer than the API server waits: the tests check the order, on hosts of any speed."""
    monkeypatch.setattr(admission_queue, "REQUEST_SECONDS", 30.0)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[int, Callable[[str], aiohttp.ClientSession]]]:
    """Serve the webhook. Yield its port, and a function that creates a client with an address."""
    runner = web.AppRunner(application(rules_for([OWN], {}), ControllerMetrics()), shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    sessions: list[aiohttp.ClientSession] = []

    def session(address: str) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(local_addr=(address, 0), limit=0)
        sessions.append(aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector))
        return sessions[-1]

    try:
        yield port, session
    finally:
        for each in sessions:
            await each.close()
        await runner.cleanup()


def test_flood_of_large_bodies_delays_neither_loop_nor_usual_requests() -> None:
    assert len(LARGE) < 4 * 1024 * 1024

    async def scenario() -> None:
        async with served() as (_port, session):
            attacker, server = session(ATTACKER), session(SERVER)

            async def send() -> int:
                async with attacker.post(PATH, data=LARGE) as answer:
                    return answer.status

            flood = [asyncio.create_task(send()) for _each in range(8)]
            await asyncio.sleep(0.3)
            for _each in range(10):
                async with server.post(PATH, data=json.dumps(REVIEW)) as answer:
                    assert (await answer.json())["response"]["allowed"] is True
            assert not all(each.done() for each in flood), "the usual requests waited for the flood to end"
            for each in flood:
                each.cancel()
            await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(scenario())


def test_incomplete_body_ends_and_other_addresses_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "REQUEST_SECONDS", 4.0)

    async def scenario() -> None:
        async with served() as (port, session):
            head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{{".encode()
            slow = [await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKER, 0)) for _each in range(40)]
            for _reader, writer in slow:
                writer.write(head)
            ended = [asyncio.create_task(reader.readline()) for reader, _writer in slow[:4]]
            await asyncio.sleep(0.2)
            async with session(SERVER).post(PATH, data=json.dumps(REVIEW)) as answer:
                assert answer.status == 200
            assert not any(each.done() for each in ended), "the request waited for the slow ones to end"
            for each in ended:
                assert b" 503 " in await asyncio.wait_for(each, 10)
            for _reader, writer in slow:
                writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("length", [1000, 1024 * 1024])
def test_slow_bodies_from_many_addresses_leave_room_for_others(length: int) -> None:
    """A user with several pods has as many addresses, but no client certificate: slow bodies leave room for other callers."""

    async def scenario() -> None:
        async with served() as (port, session):
            head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{{".encode()
            addresses = [f"127.0.1.{number}" for number in range(1, 41 if length < USUAL_BYTES else 4)]
            slow = [
                await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
                for address in addresses
                for _each in range(REQUESTS_OF_ADDRESS)
            ]
            for _reader, writer in slow:
                writer.write(head)
            ended = [asyncio.create_task(reader.readline()) for reader, _writer in slow]
            await asyncio.sleep(0.2)
            padded = json.dumps(REVIEW) + " " * max(length - 2000, 0)
            async with session(SERVER).post(PATH, data=padded) as answer:
                assert answer.status == 200
            assert not any(each.done() for each in ended), "the request waited for the slow ones to end"
            for _reader, writer in slow:
                writer.close()
            await asyncio.gather(*ended, return_exceptions=True)

    asyncio.run(scenario())
