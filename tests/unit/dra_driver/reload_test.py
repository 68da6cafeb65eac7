# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A running driver applies a new configuration: sockets stay, no call fails, and nothing else restarts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from backend_model import DRIVER
from claim_steps import SMALL
from dra_driver.commands.reload import reload
from dra_driver.config import RELOADABLE, Configuration, InvalidConfiguration, load, parse
from dra_driver.supervisors.configuration import ConfigurationSupervisor
from vendor_scene import Scene, run

WHOLE = [{"match": {"index": 1}, "mode": "whole"}, {"match": {}, "mode": "dynamic"}]


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.1)
    return tmp_path_factory.mktemp("r")


@contextlib.asynccontextmanager
async def reloading(scene: Scene) -> AsyncIterator[Path]:
    """Start a driver with a configuration file and reloads as in the node's process. Yields the file."""
    path = scene.folder / "driver.yaml"
    document = {
        "node_name": "node-1",
        "backends": ["nvidia"],
        "kubelet_root": str(scene.folder / "kubelet"),
        "layout": [{"match": {}, "mode": "dynamic"}],
        "inventory_interval": 1,
    }
    path.write_text(yaml.safe_dump(document))
    await scene.api.start()
    scene.settings = document
    await scene.start()
    configuration = load(str(path))
    scene.driver._configuration = configuration
    supervisor = ConfigurationSupervisor(configuration, lambda: load(str(path)), scene.driver.apply_configuration)
    scene.driver._refused = lambda: supervisor.refused
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, supervisor.request_reload)
    task = loop.create_task(supervisor.run())
    await scene.register()
    await scene.until(lambda: "gpu-1" in scene.devices())
    try:
        yield path
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def change(path: Path, **settings: Any) -> None:
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **settings}))


def test_reload_new_layout_is_applied_and_no_call_fails(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        async with reloading(scene) as path:
            assert await scene.prepare("held", SMALL) == ""
            before = [each.stat().st_ino for each in sorted((scene.folder / "kubelet").rglob("*.sock"))]
            answers: list[str] = []

            async def calls() -> None:
                for number in range(200):
                    answers.append(await scene.prepare(f"c{number}", "gpu-0-mig-1g10gb-19-3"))
                    answers.append(await scene.unprepare(f"c{number}"))

            calling = asyncio.ensure_future(calls())
            change(path, layout=WHOLE)
            assert await asyncio.to_thread(reload, str(path), 20.0) == ()
            while not calling.done() and len(answers) < 40:
                await asyncio.sleep(0.02)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            assert set(answers) == {""} and len(answers) >= 10
            await scene.until(lambda: "gpu-1-mig-1g10gb-19-0" not in scene.devices())
            assert "gpu-1" in scene.devices() and SMALL in scene.devices()
            after = [each.stat().st_ino for each in sorted((scene.folder / "kubelet").rglob("*.sock"))]
            assert after == before, "the kubelet has nothing to notice"
            assert await scene.unprepare("held") == ""
            status = await scene.status()
            assert status["ready"] and status["configuration"] == load(str(path)).digest

    run(short, scenario)


def test_reload_setting_that_needs_a_restart_is_named_and_nothing_changes(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        async with reloading(scene) as path:
            digest = load(str(path)).digest
            change(path, pool_name="another", layout=WHOLE)
            (problem,) = await asyncio.to_thread(reload, str(path), 20.0)
            assert DRIVER in problem and "pool_name cannot change while the driver runs" in problem
            status = await scene.status()
            assert status["ready"] and status["configuration"] == digest
            assert "gpu-1-mig-1g10gb-19-0" in scene.devices()
            path.write_text("inventory_intervall: 3\n")
            with pytest.raises(InvalidConfiguration, match="inventory_intervall"):
                await asyncio.to_thread(reload, str(path), 20.0)
            assert (await scene.status())["ready"]

    run(short, scenario)


def test_reload_unchanged_file_scans_the_hardware(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        async with reloading(scene) as path:
            serving = scene.driver._serving
            change(path, inventory_interval=1.0)
            assert await asyncio.to_thread(reload, str(path), 20.0) == ()
            assert scene.driver._serving is serving

    run(short, scenario)


def test_reload_without_a_driver_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "driver.yaml"
    path.write_text(yaml.safe_dump({"node_name": "n", "backends": ["nvidia"], "kubelet_root": str(tmp_path)}))
    (problem,) = reload(str(path), 0.5)
    assert "does not answer" in problem


def test_reload_each_setting_is_applied_or_named() -> None:
    base = parse({"node_name": "n"})
    assert set(RELOADABLE) <= {each.name for each in fields(Configuration)}
    assert base.needing_restart(parse({"node_name": "n", "inventory_interval": 3, "log": {"level": "debug"}})) == ()
    assert base.needing_restart(parse({"node_name": "m", "cdi_directory": "/x"})) == ("node_name", "cdi_directory")
