# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Two instances of one driver on one node: whole drivers with one store, one hardware, and one API server."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER
from claim_steps import SMALL
from dra_driver.core.errors import BackendUnavailable
from dra_driver.kubelet.sockets import PATH_BYTES, SocketError, lock_instance, paths_of, status_paths
from dra_driver.supervisors.active_instance import ActiveInstanceLock
from dra_driver.supervisors.status import Role
from store_model import write_entry
from vendor_scene import Scene, run

OLD, NEW = "11111111-aaaa", "22222222-bbbb"
GPU_1_SMALL = "gpu-1-mig-1g10gb-19-0"


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.1)
    monkeypatch.setattr("dra_driver.publish.publisher.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.SETTLE_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.active_instance.STANDBY_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.active_instance.CHECK_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.vendor.REGISTER_SECONDS", 5.0)
    monkeypatch.setattr("dra_driver.vendor.WITHDRAWAL_SECONDS", 0.05)
    return tmp_path_factory.mktemp("o")


async def role(scene: Scene) -> str:
    return str((await scene.status())["role"])


async def until_role(scene: Scene, wanted: Role) -> None:
    async def role_problem() -> str:
        return "" if await role(scene) == wanted else "not yet"

    assert await scene.eventually(role_problem) == ""


def overlap(folder: Path, scenario: Any) -> None:
    """Run a scenario with an old instance that serves one claim, and a new one that is not started."""

    async def whole(old: Scene) -> None:
        old.instance = OLD
        await old.api.start()
        await old.start()
        await old.register()
        await old.until(old.devices)
        assert await old.prepare("before", SMALL) == ""
        new = old.beside(NEW)
        try:
            await scenario(old, new)
        finally:
            if hasattr(new, "task"):
                await new.stop()

    run(folder, whole)


async def come_up(new: Scene) -> None:
    """Start and register the new instance, and wait until it serves."""
    await new.start()
    await new.register()
    await until_role(new, Role.SERVING)


def test_handover_new_instance_takes_over_without_api_writes(short: Path) -> None:
    async def scenario(old: Scene, new: Scene) -> None:
        writes, slices = len(old.api.slice_writes()), json.dumps(old.api.slices)
        await come_up(new)
        assert await role(old) == Role.STANDBY
        assert not Path(old.paths.service).exists() and not Path(old.paths.registration).exists()
        assert await new.prepare("after", GPU_1_SMALL) == ""
        assert await new.unprepare("before") == ""
        assert [key[0] for key in new.partitions()] == [19]
        await new.until(lambda: new.driver.status().published)
        assert (len(old.api.slice_writes()), json.dumps(old.api.slices)) == (writes, slices)
        await old.stop()
        assert Path(new.paths.service).is_socket() and Path(new.paths.registration).is_socket()
        assert (await new.status())["ready"]

    overlap(short, scenario)


def test_handover_calls_wait_and_none_fails(short: Path) -> None:
    """One call runs at the old instance when the new one requests the handover, and another call waits at the new one: none fails."""

    async def scenario(old: Scene, new: Scene) -> None:
        entered, gate = threading.Event(), threading.Event()
        create = old.backend.create_partition

        def slowly(*arguments: Any) -> Any:
            entered.set()
            assert gate.wait(20)
            return create(*arguments)

        old.backend.create_partition = slowly  # type: ignore[method-assign]
        under_way = asyncio.ensure_future(old.prepare("under-way", GPU_1_SMALL))
        await asyncio.to_thread(entered.wait, 5)
        await new.start()
        await new.register()
        waiting = asyncio.ensure_future(new.prepare("waiting", "gpu-1-mig-1g10gb-19-1"))
        await until_role(old, Role.STANDBY)  # it has accepted the request, and completes its call
        assert not waiting.done() and not under_way.done()
        assert await role(new) == Role.WAITING
        gate.set()
        assert await under_way == ""
        assert await waiting == ""
        assert len(new.partitions()) == 3

    overlap(short, scenario)


def test_standby_instance_serves_again_without_a_request(short: Path) -> None:
    async def scenario(old: Scene, new: Scene) -> None:
        await come_up(new)
        assert await new.prepare("after", GPU_1_SMALL) == ""
        # The old instance is killed and restarted: only its note shows the handover. Two requesting instances would
        # alternate forever.
        old.task.cancel()
        note = short / f"kubelet/plugins/{DRIVER}/handed-over"
        text = note.read_text()
        await asyncio.gather(old.task, return_exceptions=True)
        note.write_text(text)
        await old.start()
        await until_role(old, Role.STANDBY)
        assert await role(new) == Role.SERVING
        await new.stop()
        await until_role(old, Role.SERVING)
        assert await old.eventually(lambda: old.unprepare("after")) == ""
        assert not note.exists()

    overlap(short, scenario)


def test_stopped_instance_requests_the_handover_at_its_start(short: Path) -> None:
    async def scenario(old: Scene, new: Scene) -> None:
        await come_up(new)
        await old.stop()
        assert not (short / f"kubelet/plugins/{DRIVER}/handed-over").exists()
        await come_up(old)
        await until_role(new, Role.STANDBY)
        assert await old.unprepare("before") == ""

    overlap(short, scenario)


@pytest.mark.parametrize("trouble", ["hardware", "store"])
def test_failed_instance_requests_no_handover_and_serves_when_needed(
    short: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.store_recovery.RETRY_SECONDS", 0.05)

    async def scenario(old: Scene, new: Scene) -> None:
        path = short / f"kubelet/plugins/{DRIVER}/state.db"

        def write_version(version: str) -> None:
            write_entry(path, "schema_version", version)

        if trouble == "store":
            write_version("2")
        else:
            new.backend.present = False
        await new.start(serves=False)

        async def reported() -> str:
            text = " ".join((await new.status())["problems"])
            return "" if ("newer release" if trouble == "store" else "not loaded") in text else "not yet"

        assert await new.eventually(reported) == ""
        assert await role(old) == Role.SERVING and await role(new) == Role.WAITING
        assert not Path(new.paths.registration).exists(), "the kubelet would send it the next calls"
        assert await old.prepare("after", GPU_1_SMALL) == ""
        await old.stop()
        await until_role(new, Role.SERVING)
        if trouble == "store":
            write_version("1")
        else:
            new.backend.present = True
        await asyncio.wait_for(new.started.wait(), 30)
        assert await new.eventually(lambda: new.unprepare("after")) == ""

    overlap(short, scenario)


def test_handover_work_without_an_end_ends_the_process(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that does not end would continue on devices of the other instance: the process ends."""
    monkeypatch.setattr("dra_driver.serving.DRAIN_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.vendor.HAND_OVER_SECONDS", 0.05)

    async def scenario(old: Scene, new: Scene) -> None:
        entered, gate = threading.Event(), threading.Event()

        def never(*_arguments: Any) -> Any:
            entered.set()
            gate.wait(20)
            raise BackendUnavailable("it hung")

        old.backend.create_partition = never  # type: ignore[method-assign]
        under_way = asyncio.ensure_future(old.prepare("under-way", GPU_1_SMALL))
        await asyncio.to_thread(entered.wait, 5)
        await new.start()
        await new.register()
        await old.until(old.task.done, 15)
        assert "still under way" in str(old.task.exception())
        under_way.cancel()
        gate.set()
        await until_role(new, Role.SERVING)

    overlap(short, scenario)


def test_start_removes_sockets_of_killed_instances(short: Path) -> None:
    async def scenario(old: Scene, new: Scene) -> None:
        killed = old.beside("33333333-0a1b-0a1b-0a1b-0a1b2c3d4e5f").paths
        for path in (killed.service, killed.registration, killed.status):
            with socket.socket(socket.AF_UNIX) as stale:
                stale.bind(path)
        precious = Path(killed.registration.replace(DRIVER, "another.driver"))
        precious.touch()
        await come_up(new)
        assert not any(Path(path).exists() for path in (killed.service, killed.registration, killed.status))
        assert precious.exists() and Path(new.paths.status).is_socket() and Path(old.paths.status).is_socket()

    overlap(short, scenario)


def test_handover_requests_of_several_instances_are_served_in_turn(short: Path) -> None:
    async def main() -> None:
        first, second, third = (ActiveInstanceLock(str(short / "state"), name, "boot") for name in ("", "b", "c"))
        assert first.try_acquire()
        second_asks, third_asks = (
            asyncio.ensure_future(second.request_handover()),
            asyncio.ensure_future(third.request_handover()),
        )
        assert "instance" in await asyncio.wait_for(first.wait_for_request(), 30)
        assert not second_asks.done() and not third_asks.done()
        first.hand_over()
        assert not first.try_acquire(), "a requesting instance precedes a standby one"
        done, _pending = await asyncio.wait((second_asks, third_asks), return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1 and second.is_held != third.is_held
        holder = second if second.is_held else third
        await asyncio.wait_for(holder.wait_for_request(), 30)
        holder.hand_over()
        await asyncio.gather(second_asks, third_asks)
        assert second.is_held != third.is_held
        assert first.was_handed_over is False and holder.was_handed_over
        assert (
            ActiveInstanceLock(str(short / "state"), "b" if holder is second else "c", "another boot").was_handed_over
            is False
        )

    asyncio.run(main())


def test_start_of_the_same_instance_is_rejected(short: Path) -> None:
    first, second = (ActiveInstanceLock(str(short / "state"), OLD, "boot") for _number in range(2))
    assert first.try_acquire()
    with pytest.raises(SocketError, match=f"pid .* of instance {OLD}") as found:
        second.try_acquire()
    assert found.value.code == "already-running"


def test_sockets_of_instances_have_distinct_names() -> None:
    directory, registry = "/var/lib/kubelet/plugins/gpu.nvidia.com", "/var/lib/kubelet/plugins_registry"
    uid = "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"
    alone = paths_of(directory, registry, DRIVER, "")
    assert (alone.service, alone.registration) == (f"{directory}/dra.sock", f"{registry}/{DRIVER}-reg.sock")
    one = paths_of(directory, registry, DRIVER, uid)
    assert (one.service, one.registration) == (f"{directory}/dra-{uid}.sock", f"{registry}/{DRIVER}-{uid}-reg.sock")
    far = "/var/lib/rancher/k3s/agent/kubelet/data/plugins_registry"
    long = paths_of(directory, far, DRIVER, uid)
    assert (
        len(long.registration) <= PATH_BYTES
        and long.registration != paths_of(directory, far, DRIVER, "x" + uid[1:]).registration
    )
    assert uid not in long.service and uid not in long.status


def test_running_instance_is_found_by_its_status_socket(short: Path) -> None:
    for name in ("status.sock", "status-1.sock", "dra-1.sock", "state.db"):
        (short / name).touch()
    assert [Path(path).name for path in status_paths(str(short))] == ["status-1.sock", "status.sock"]
    assert status_paths(str(short / "none")) == ()


@pytest.mark.parametrize("way", ["acquire_or_wait_for_disk", "request_handover", "wait_until_free"])
def test_lock_that_a_full_disk_does_not_take_is_retried(short: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The file is created, but its content cannot be written: the process, which serves all vendors, continues and retries."""
    monkeypatch.setattr("dra_driver.supervisors.active_instance.DISK_SECONDS", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def scenario() -> None:
        instance_lock = ActiveInstanceLock(str(short / "state"), "", "boot")
        # The kernel refuses to write any file, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            taking = asyncio.ensure_future(getattr(instance_lock, way)())
            assert await asyncio.wait({taking}, timeout=0.1) == (set(), {taking})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await asyncio.wait_for(taking, 30)
        assert instance_lock.is_held and (short / "state/driver.lock").read_text() == f"pid {os.getpid()}\n"
        instance_lock.release()

    asyncio.run(scenario())


def test_lock_that_cannot_be_created_is_retried(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.active_instance.DISK_SECONDS", 0.01)
    (short / "state").write_text("a file at the path of the directory")

    async def scenario() -> None:
        instance_lock = ActiveInstanceLock(str(short / "state"), "", "boot")
        beginning = asyncio.ensure_future(instance_lock.acquire_or_wait_for_disk())
        assert await asyncio.wait({beginning}, timeout=0.1) == (set(), {beginning})
        (short / "state").unlink()
        assert await asyncio.wait_for(beginning, 30) is True
        instance_lock.release()

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["acquire_or_wait_for_disk", "request_handover", "wait_until_free", "wait_for_request"])
@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_unusable_successor_lock_is_retried(
    short: Path, monkeypatch: pytest.MonkeyPatch, way: str, obstacle: str
) -> None:
    """The lock's directory cannot be created on a full disk, or the disk fails: the process, which serves all vendors, continues and retries."""
    monkeypatch.setattr("dra_driver.supervisors.active_instance.DISK_SECONDS", 0.01)
    state, locks = short / "state", short / "state/locks"
    state.mkdir()
    if obstacle == "file":
        locks.touch()
    else:
        locks.mkdir()
        (locks / "successor.lock").symlink_to("successor.lock")
    is_asked = way == "wait_for_request"

    async def scenario() -> None:
        holder = ActiveInstanceLock(str(state), OLD, "boot")
        instance_lock = holder if is_asked else ActiveInstanceLock(str(state), NEW, "boot")
        if way == "request_handover":
            holder._file = lock_instance(str(state), OLD)
        task = asyncio.ensure_future(getattr(instance_lock, way)())
        if obstacle == "link" or way == "request_handover":
            assert await asyncio.wait({task}, timeout=0.2) == (set(), {task})
        locks.unlink() if obstacle == "file" else (locks / "successor.lock").unlink()
        holder.release()
        successor = ActiveInstanceLock(str(state), NEW, "boot")
        if is_asked:
            assert successor._request_locks.take("successor")
        await asyncio.wait_for(task, 30)
        assert instance_lock.is_held is not is_asked
        instance_lock.release()

    asyncio.run(scenario())
