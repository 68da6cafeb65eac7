# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Waits with a timeout: results, timeouts, and cancellations that arrive as the awaited work ends."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api_model import kubeconfig
from dra_driver.api.client import ApiClient, ApiUnreachable
from dra_driver.api.exchange import Exchange
from dra_driver.claims.locking import DeviceGuard
from dra_driver.core.discovery.device_locks import DeviceLocks
from dra_driver.deadlines import within
from dra_driver.supervisors.driver_state import Shared
from machine_model import Claims, Node
from scripted_server import Server, silent

#: A wait sees the end of its work within this number of rounds of the event loop.
ROUNDS = range(6)


async def cancel_after(rounds: int, waiting: Awaitable[Any], end_work: Callable[[], object]) -> bool:
    """End the work that a coroutine waits for, and cancel the coroutine some rounds later. Return whether it was cancelled."""
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0.01)
    end_work()
    for _round in range(rounds):
        await asyncio.sleep(0)
    if task.done():
        return True
    task.cancel()
    await asyncio.wait((task,), timeout=5)
    assert task.done()
    return task.cancelled()


@contextmanager
def loop_errors() -> Iterator[list[str]]:
    """Collect the messages of errors that asyncio logs because no code handles them."""
    found: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: found.append(str(context["message"])))
    yield found


@pytest.mark.parametrize("rounds", ROUNDS)
def test_within_cancelled_as_work_ends_raises_cancelled_error(rounds: int) -> None:
    async def main() -> None:
        event = asyncio.Event()
        assert await cancel_after(rounds, within(event.wait(), 60), event.set)

    asyncio.run(main())


@pytest.mark.parametrize("rounds", ROUNDS)
def test_within_cancelled_as_work_fails_raises_cancelled_error(rounds: int) -> None:
    async def main() -> None:
        event = asyncio.Event()

        async def fail() -> None:
            await event.wait()
            raise OSError("refused")

        async def suppressing() -> None:
            try:
                await within(fail(), 60)
            except OSError:
                await asyncio.sleep(0)

        with loop_errors() as errors:
            assert await cancel_after(rounds, suppressing(), event.set)
        assert not errors

    asyncio.run(main())


@pytest.mark.parametrize("rounds", ROUNDS)
def test_shared_changed_cancelled_as_value_changes_raises_cancelled_error(rounds: int) -> None:
    async def main() -> None:
        shared = Shared(0)
        assert await cancel_after(rounds, shared.changed(60), lambda: shared.put(1))

    asyncio.run(main())


@pytest.mark.parametrize("rounds", ROUNDS)
def test_wait_until_ready_cancelled_as_driver_is_ready_raises_cancelled_error(rounds: int, tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, Claims())
        node.service.set_ready("the driver is starting")
        assert await cancel_after(rounds, node.service.wait_until_ready(), node.service.set_ready)
        node.close()

    asyncio.run(main())


@pytest.mark.parametrize("rounds", ROUNDS)
def test_lent_cancelled_as_last_holder_leaves_raises_cancelled_error(rounds: int, tmp_path: Path) -> None:
    async def main() -> None:
        guard = DeviceGuard(DeviceLocks(str(tmp_path), "the driver"))
        await guard.enter([], [])

        async def lend() -> None:
            async with guard.lent("a reset", 60):
                await asyncio.sleep(0)

        assert await cancel_after(rounds, lend(), lambda: guard.leave([]))

    asyncio.run(main())


def test_ask_cancelled_as_connection_opens_closes_connection() -> None:
    async def main() -> None:
        server = Server(silent)
        exchange = Exchange(await server.start(), None, connections=1)
        for rounds in range(30):
            asking = asyncio.ensure_future(exchange.ask("GET", "/a", seconds=30))
            for _round in range(rounds):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait((asking,), timeout=5)
            assert asking.cancelled()
        deadline = asyncio.get_running_loop().time() + 30
        while server.open:
            gc.collect()  # it closes the sockets that a cancelled asyncio.create_connection drops
            assert asyncio.get_running_loop().time() < deadline, f"{server.open} connections are open"
            await asyncio.sleep(0.01)
        assert server.connections
        exchange.close()
        server.stop()

    asyncio.run(main())


def test_within_timeout_cancels_work_and_raises_timeout_error() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        with pytest.raises(asyncio.TimeoutError):
            await within(task, 0.001)
        assert task.cancelled()
        with pytest.raises(asyncio.TimeoutError):
            await within(asyncio.gather(asyncio.Event().wait(), asyncio.Event().wait()), 0.001)

    asyncio.run(main())


def test_within_work_that_ends_at_its_cancellation_returns_result() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "a result"
        return ""

    assert asyncio.run(within(stubborn(), 0.001)) == "a result"


def test_work_that_other_code_has_cancelled_does_not_cancel_the_caller() -> None:
    async def main() -> None:
        work = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_later(0.05, work.cancel)
        with pytest.raises(asyncio.TimeoutError):
            await within(work, 30)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_watch_whose_lookup_of_the_server_is_cancelled_fails_and_is_not_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name servers do not answer while the client opens new connections, for example after a token renewal: the watch fails with an error."""
    monkeypatch.setattr("dra_driver.api.client.REQUEST_SECONDS", 0.1)
    real, began = socket.getaddrinfo, threading.Event()

    def look_up(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "api.example":
            began.set()
            time.sleep(2)
            host = "127.0.0.1"
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(kubeconfig("http://api.example:1")))

    async def main() -> None:
        client = ApiClient(str(file))

        async def watch() -> None:
            async for _event in client.watch("/apis", resource_version="1"):
                pass

        watching = asyncio.ensure_future(watch())
        await asyncio.to_thread(began.wait)
        file.write_text(json.dumps(kubeconfig("http://api.example:2")))
        assert await client.reload_if_changed()
        with pytest.raises(ApiUnreachable):
            await watching
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))
