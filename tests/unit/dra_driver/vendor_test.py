# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the whole driver of one vendor with real sockets, store, and HTTP. Only the hardware is a model."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER
from claim_steps import SMALL
from dra_driver.claims.store.records import DOCUMENT_VERSION
from dra_driver.core.discovery.device_locks import DeviceLocks
from dra_driver.core.host.system import DeviceNumber, System
from dra_driver.kubelet.sockets import SocketError
from dra_driver.logs import current_operation
from store_model import write_entry
from vendor_scene import Scene, run


def test_driver_started_first_becomes_ready(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.backend.present = False
        await scene.start()  # no API server, no GPU driver, no kubelet directories
        error = await scene.prepare("a", SMALL)
        assert "not loaded" in error
        await scene.stop()
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.api.slices) == 1)
        assert scene.devices() == []
        scene.backend.present = True
        await scene.until(lambda: "gpu-1" in scene.devices())
        assert await scene.prepare("a", SMALL) == ""
        assert await scene.unprepare("a") == ""

    run(short, scenario)


def test_status_comes_from_the_running_process(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.settings = {"inventory_interval": 300}  # so that only requested scans occur
        assert not (await scene.status())["ready"]
        scene.backend.present = False
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: scene.api.slices)
        reported = await scene.status()
        assert not reported["ready"]
        assert (reported["looked_at"], reported["published"], reported["devices"]) == (0.0, False, [])
        assert any("not loaded" in problem for problem in reported["problems"])
        assert any("kubelet" in problem for problem in reported["problems"])
        scene.backend.present = True
        await scene.register()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        reported = await scene.status()
        assert (reported["ready"], reported["problems"], reported["pid"]) == (True, [], os.getpid())
        assert reported["published"]
        assert [device["fault"] for device in reported["devices"]] == ["", ""]
        seen = reported["looked_at"]
        scene.driver.request_scan()

        async def scan_problem() -> str:
            return "" if (await scene.status())["looked_at"] > seen else "not yet"

        assert await Scene.eventually(scan_problem) == ""
        await scene.stop()
        reported = await scene.status()
        assert (reported["ready"], reported["pid"]) == (False, 0)
        assert "does not answer" in reported["problems"][0]

    run(short, scenario)


class DeniedNodes(System):
    """The node's files in a container whose device rules lack the major number of the MIG capabilities."""

    def list_directory(self, path: str) -> tuple[str, ...]:
        found = {"/dev": ("nvidia0", "nvidiactl", "sg0"), "/dev/nvidia-caps": ("nvidia-cap1", "nvidia-cap12")}
        return found.get(path) or super().list_directory(path)

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber("c", 234 if "caps" in path else 195, 0)

    def can_read(self, path: str) -> bool:
        return "caps" not in path


@pytest.mark.parametrize("rules", ["", "0a1b2c3d4e5f6a7b"])
def test_pod_without_a_device_node_is_not_ready(short: Path, rules: str) -> None:
    """After a reboot the vendor driver can have another major number than the container's device rules: the pod is not ready."""

    async def scenario(scene: Scene) -> None:
        scene.settings = {"device_rules": rules}
        await scene.api.start()
        await scene.start()
        await scene.register()
        await scene.until(lambda: scene.api.slices)
        scene.driver._system = DeniedNodes(scene.driver._system.root)
        problems = [each for each in (await scene.status())["problems"] if each.startswith("device-nodes: ")]
        assert len(problems) == bool(rules)
        if rules:
            assert "/dev/nvidia-caps/nvidia-cap1 (1 device nodes)" in problems[0]
            assert "dra.accelerators.site with --limit" in problems[0]
        await scene.stop()

    run(short, scenario)


def test_restart_with_a_claim_changes_nothing(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        assert await scene.prepare("a", SMALL) == ""
        before = ([path.read_bytes() for path in scene.cdi()], scene.partitions(), len(scene.api.slice_writes()))
        await scene.stop()
        await scene.start()
        while "is starting" in (error := await scene.prepare("a")):
            await asyncio.sleep(0.1)  # the kubelet also retries
        assert error == ""
        await asyncio.sleep(0.3)
        assert (
            [path.read_bytes() for path in scene.cdi()],
            scene.partitions(),
            len(scene.api.slice_writes()),
        ) == before
        # The driver's own partition does not count as an administrator's: the offer does not change.
        assert "gpu-0" in scene.devices()
        assert await scene.unprepare("a") == ""
        assert scene.partitions() == []

    run(short, scenario)


def test_reboot_restores_claims_and_drops_deleted_ones(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        assert await scene.prepare("stays", SMALL) == ""
        assert await scene.prepare("gone", "gpu-1-mig-2g20gb-14-2") == ""
        await scene.stop()
        scene.backend.gpus.reboot()
        for path in scene.cdi():
            path.unlink()
        (path.parent / "k8s.gpu.nvidia.com-claim_stale.json").write_text("{}")
        del scene.api.claims["gone"]
        scene.boot = "boot-2"
        await scene.start()
        await scene.until(lambda: scene.partitions() == [(19, 0, 1)] and len(scene.cdi()) == 1)
        assert await scene.prepare("stays") == ""
        assert await scene.unprepare("stays") == ""
        assert (scene.partitions(), scene.cdi()) == ([], [])

    run(short, scenario)


@pytest.mark.parametrize("damage", ["text", "deleted"])
def test_damaged_store_is_set_aside_and_rebuilt(short: Path, damage: str) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        assert await scene.prepare("a", SMALL) == ""
        assert await scene.prepare("b", "gpu-1") == ""
        await scene.stop()
        path = short / f"kubelet/plugins/{DRIVER}/state.db"
        if damage == "text":
            path.write_text("rubbish " * 1000)
        else:
            path.unlink()
        await scene.start()
        await scene.until(lambda: any(event["reason"] == "StoreRebuilt" for event in scene.api.events))
        assert bool(list(path.parent.glob("state.db.damaged-*"))) == (damage != "deleted")
        assert await scene.prepare("a") == ""
        assert "default/b" in await scene.prepare("late", "gpu-1")
        assert await scene.unprepare("a") == ""
        assert await scene.unprepare("b") == ""
        assert (scene.partitions(), scene.cdi()) == ([], [])
        assert not any(device.partitioning.enabled for device in scene.backend.gpus.devices())

    run(short, scenario)


@pytest.mark.parametrize("comes", ["prepare", "unprepare"])
def test_pool_follows_a_recovered_claim(short: Path, comes: str) -> None:
    """Until then the partition counts as an administrator's. Prepare or unprepare updates the published devices without a scan or an event."""

    async def scenario(scene: Scene) -> None:
        scene.settings = {"inventory_interval": 300}
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        before = scene.specs()
        assert await scene.prepare("a", SMALL) == ""
        await scene.until(lambda: "devices" in scene.api.claims["a"]["status"])
        await scene.stop()
        shutil.rmtree(short / f"kubelet/plugins/{DRIVER}")
        for path in scene.cdi():
            path.unlink()
        await scene.start()
        await scene.until(lambda: "gpu-0" not in scene.devices())
        assert SMALL in scene.devices()
        assert await (scene.prepare("a") if comes == "prepare" else scene.unprepare("a")) == ""
        await scene.until(lambda: scene.specs() == before)
        assert scene.partitions() == ([(19, 0, 1)] if comes == "prepare" else [])

    run(short, scenario)


@pytest.mark.parametrize("what", ["store", "file"])
def test_driver_with_a_store_of_a_newer_release_waits(short: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a downgrade the driver serves nothing, and removes nothing. The right release finds all claims unchanged."""
    monkeypatch.setattr("dra_driver.supervisors.store_recovery.RETRY_SECONDS", 0.05)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        assert await scene.prepare("a", SMALL) == ""
        await scene.stop()
        path = short / f"kubelet/plugins/{DRIVER}/state.db"
        (file,) = scene.cdi()
        text = file.read_text()

        def write_version(version: str) -> None:
            write_entry(path, "schema_version", version)

        if what == "store":
            write_version("2")
        else:
            path.rename(short / "kept.db")
            file.write_text(re.sub(r'(\\"version\\"):\d+', rf"\1:{DOCUMENT_VERSION + 1}", text))
        await scene.start(serves=False)

        async def reported() -> str:
            return "" if "newer release" in " ".join((await scene.status())["problems"]) else "not yet"

        assert await scene.eventually(reported) == ""
        assert len(scene.partitions()) == len(scene.cdi()) == 1
        assert not list(path.parent.glob("state.db.damaged-*"))
        if what == "store":
            write_version("1")
        else:
            file.write_text(text)
        await asyncio.wait_for(scene.started.wait(), 5)
        assert await scene.eventually(lambda: scene.prepare("a")) == ""
        assert await scene.unprepare("a") == ""
        assert (scene.partitions(), scene.cdi()) == ([], [])

    run(short, scenario)


def test_claim_waits_for_the_layout_of_its_device_only(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.claims.locking.LOCK_SECONDS", 0.2)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        layout = DeviceLocks(str(short / f"kubelet/plugins/{DRIVER}"), "a layout")
        assert layout.take(scene.backend.gpus.template(0).uuid)
        assert "a layout" in await scene.prepare("a", SMALL)
        assert await scene.prepare("b", "gpu-1") == ""
        layout.drop_all()
        assert await scene.prepare("a", SMALL) == ""
        assert layout.take(scene.backend.gpus.template(0).uuid)
        assert "a layout" in await scene.unprepare("a")
        layout.drop_all()
        assert await scene.unprepare("a") == ""

    run(short, scenario)


def test_failed_prepare_is_an_event_on_the_claim(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        assert await scene.prepare("a", "gpu-1") == ""
        assert await scene.prepare("b", "gpu-1-mig-1g10gb-19-0")
        await scene.until(lambda: scene.api.events)
        (event,) = scene.api.events
        assert event["reason"] == "PrepareFailed"
        assert event["involvedObject"]["name"] == "b"
        assert "default/a" in event["message"]
        assert "It is freed when" in event["message"]

    run(short, scenario)


class Heard(logging.Handler):
    """Record each log line with its operation and claim."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        claim = str(getattr(record, "fields", {}).get("claim", ""))
        self.lines.append((current_operation(), claim, record.getMessage()))

    def operations(self, words: str = "", claim: str = "") -> set[str]:
        """Return the operations of the lines about a claim that contain this text."""
        return {operation for operation, about, line in list(self.lines) if about == claim and words in line}


def test_operation_lines_threads_and_events_have_one_id(short: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Claims that are prepared in parallel have different operation ids, and so does each request for the same claim."""
    caplog.set_level(logging.INFO)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        real = scene.backend.create_partition

        def telling(uuid: str, *arguments: Any) -> Any:
            logging.getLogger("silicon").info("made on %s, %s", uuid, threading.current_thread().name)
            return real(uuid, *arguments)

        scene.backend.create_partition = telling  # type: ignore[method-assign]
        names = {"a": SMALL, "b": "gpu-1-mig-1g10gb-19-0"}
        answers = await asyncio.gather(*(scene.prepare(name, device) for name, device in names.items()))
        assert answers == ["", ""]
        assert await scene.prepare("late", "gpu-1")
        await scene.until(lambda: scene.api.events)
        reported = {name: heard.operations(claim=f"default/{name}") for name in (*names, "late")}
        assert all(len(ids) == 1 and "" not in ids for ids in reported.values()), reported
        assert len(set.union(*reported.values())) == 3
        for number, name in enumerate(names):
            uuid = scene.backend.gpus.template(number).uuid
            assert heard.operations(f"made on {uuid}") == reported[name]
        assert not heard.operations(threading.current_thread().name), "it was not another thread"
        (event,) = scene.api.events
        assert {event["metadata"]["annotations"]["dra-accelerators/operation"]} == reported["late"]
        assert await scene.prepare("late")
        assert len(heard.operations(claim="default/late")) == 2

    heard = Heard()
    logging.getLogger().addHandler(heard)
    try:
        run(short, scenario)
    finally:
        logging.getLogger().removeHandler(heard)


def test_unexpected_exception_ends_no_part(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        real = scene.backend.discover
        failures = [KeyError("surprise"), ZeroDivisionError("surprise")]

        def surprising(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return real(*arguments)

        scene.backend.discover = surprising  # type: ignore[method-assign]
        await scene.start()
        await scene.until(scene.devices)
        assert await scene.prepare("a", "gpu-1") == ""

    run(short, scenario)


def test_second_process_is_refused(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        second = Scene(short)
        second.api = scene.api
        with pytest.raises((asyncio.TimeoutError, SocketError)):
            await asyncio.wait_for(second.start(), 0.5)
        assert isinstance(second.task.exception(), SocketError)
        await second.stop()
        await scene.until(scene.devices)
        assert await scene.prepare("a", "gpu-1") == ""

    run(short, scenario)


def test_deleted_claim_is_dropped_only_when_unused(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.reconciler.RECONCILE_SECONDS", 0.1)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        assert await scene.prepare("a", "gpu-1") == ""
        gpu = scene.backend.gpus.template(1).uuid
        with scene.backend.gpus.state() as state:
            state[gpu]["pids"] = [4711]
        del scene.api.claims["a"]
        await asyncio.sleep(1)
        assert len(scene.cdi()) == 1
        with scene.backend.gpus.state() as state:
            state[gpu]["pids"] = []
        await scene.until(lambda: scene.cdi() == [])

    run(short, scenario)
