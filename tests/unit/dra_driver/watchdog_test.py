# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The driver notifies systemd only while its own socket answers. The ids of operations follow the work into threads."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from claim_steps import SMALL
from dra_driver import logs
from dra_driver.api.events import OPERATION
from dra_driver.core.errors import AcceleratorError
from dra_driver.supervisors import sockets
from dra_driver.supervisors.watchdog import Watchdog, interval
from vendor_scene import Scene, run


@pytest.fixture()
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short path, because it contains sockets."""
    return tmp_path_factory.mktemp("s")


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "120000000"}, 40.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": "7"}, 40.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": "8"}, None),
    ],
)
def test_watchdog_interval_follows_the_environment(environment: dict[str, str], seconds: float | None) -> None:
    assert interval(environment, 7) == seconds


def test_watchdog_live_socket_passes_and_dead_socket_fails(home: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        watchdog = Watchdog([scene.driver.check_own_socket], lambda _message: None)
        assert await watchdog.check(20)
        # The server has stopped without the driver's knowledge: the kubelet cannot reach it.
        assert scene.driver._server is not None and scene.driver._server._service_server is not None
        await scene.driver._server._service_server.stop(0)
        assert not await watchdog.check(20)
        # A known problem of the sockets is being repaired.
        scene.driver._serving.conditions.report(sockets.PART, "another program has it")
        assert await watchdog.check(20)

    run(home, scenario)


def test_watchdog_notifies_systemd_while_all_sockets_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    reported: list[str] = []
    dead: list[bool] = []

    async def alive() -> None:
        if dead:
            raise AcceleratorError("it is stuck")

    async def main() -> None:
        task = asyncio.ensure_future(Watchdog([alive], reported.append).run())
        while len(reported) < 3:
            await asyncio.sleep(0.005)
        dead.append(True)
        await asyncio.sleep(0.05)
        before = len(reported)
        await asyncio.sleep(0.1)
        assert len(reported) == before
        dead.clear()
        while len(reported) == before:
            await asyncio.sleep(0.005)
        task.cancel()

    asyncio.run(main())
    assert set(reported) == {"WATCHDOG=1"}


def test_operation_id_is_in_threads_and_events(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[str]] = {}

    def recorded(method: str) -> None:
        seen.setdefault(method, set()).add(logs.current_operation())

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        create = scene.backend.create_partition

        def creating(*arguments: object) -> object:
            recorded("thread")
            return create(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(scene.backend, "create_partition", creating)
        assert await Scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        (identifier,) = seen["thread"]
        assert len(identifier) == 8
        assert await scene.prepare("b", "gpu-9")  # refused, with an Event
        await Scene.until(lambda: scene.api.events)
        assert len(scene.api.events[0]["metadata"]["annotations"][OPERATION]) == 8

    run(home, scenario)
