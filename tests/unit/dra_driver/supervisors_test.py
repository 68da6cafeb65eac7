# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Each supervisor alone: shared values, sockets, the pool's publisher, recovery, and lending."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from claim_steps import SMALL, prepare, run, unprepare
from dra_driver.claims.locking import DeviceGuard
from dra_driver.core.discovery.device_locks import LIBRARY, REQUEST, DeviceLocks
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, InUse
from dra_driver.core.model import Fault
from dra_driver.kubelet.sockets import DirectoryReplaced, SocketError
from dra_driver.publish.publisher import Content
from dra_driver.supervisors.driver_state import Conditions, Shared, Snapshot, keep_running
from dra_driver.supervisors.health import HardwareState
from dra_driver.supervisors.library_release import LibraryLock
from dra_driver.supervisors.pool_updates import content_of
from dra_driver.supervisors.recovery import Recovery
from dra_driver.supervisors.sockets import SocketSupervisor
from dra_driver.supervisors.status import status_of
from machine_model import POOL, Claims, Node

# ---------------------------------------------------------------- shared


def test_shared_follower_sees_the_latest_and_the_last_value() -> None:
    async def main() -> None:
        shared = Shared(0)
        seen: list[int] = []

        async def follow() -> None:
            async for value in shared.follow():
                seen.append(value)
                await asyncio.sleep(0)

        follower = asyncio.ensure_future(follow())
        await asyncio.sleep(0.01)
        for value in range(1, 100):
            shared.put(value)
            if value % 10 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        follower.cancel()
        assert seen[0] == 0
        assert seen[-1] == shared.value == 99
        assert seen == sorted(set(seen))

    asyncio.run(main())


def test_conditions_are_separate_for_each_part() -> None:
    conditions = Conditions("store", "hardware")
    assert [problem.partition(":")[0] for problem in conditions.problems] == ["store", "hardware"]
    conditions.report("store")
    conditions.report("hardware", "no driver")
    assert conditions.problems == ("hardware: no driver",)
    conditions.report("hardware")
    assert conditions.problems == ()


def test_keep_restarts_work_after_an_unexpected_exception(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.001)

    async def main() -> None:
        runs: list[int] = []

        async def work() -> None:
            runs.append(len(runs))
            raise KeyError("surprise")

        task = asyncio.ensure_future(keep_running("work", work))
        while len(runs) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    reported = caplog.records[0]
    assert "work failed" in reported.getMessage()
    assert reported.exc_info is not None and isinstance(reported.exc_info[1], KeyError)


def test_keep_restarts_work_canceled_by_other_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library cancels its own task, for which a part waits: the part restarts, because neither it nor the driver was stopped."""
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.001)
    runs: list[int] = []

    async def main() -> None:
        async def work() -> None:
            runs.append(len(runs))
            other = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(other.cancel)
            await other

        task = asyncio.ensure_future(keep_running("work", work))
        while len(runs) < 3 and not task.done():
            await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert caplog.records[0].getMessage() == "work failed and restarts"


def test_keep_ends_before_its_canceled_caller() -> None:
    ended: list[bool] = []

    async def main() -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                ended.append(True)
                raise KeyError("while it ends")

        task = asyncio.ensure_future(keep_running("work", work))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True]

    asyncio.run(main())


def test_keep_replaced_directory_ends_the_process() -> None:
    async def work() -> None:
        raise DirectoryReplaced("the directory is removed")

    with pytest.raises(DirectoryReplaced):
        asyncio.run(keep_running("work", work))


# ---------------------------------------------------------------- sockets


class Server:
    """A server that fails the configured number of starts."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.stops = 0
        self.registered = False

    async def start(self) -> None:
        if self.failures:
            self.failures -= 1
            raise SocketError("the directory is read-only")

    async def stop(self) -> None:
        self.stops += 1

    async def watch_sockets(self) -> None:
        await asyncio.Event().wait()


def test_sockets_creation_failure_is_a_condition_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.sockets.RETRY_SECONDS", 0.05)
    conditions = Conditions("sockets")

    async def main() -> None:
        server = Server(2)
        sockets = SocketSupervisor(server, driver="d", conditions=conditions)  # type: ignore[arg-type]
        starting = asyncio.ensure_future(sockets.start())
        await asyncio.sleep(0.02)
        assert conditions.problems == ("sockets: the directory is read-only",)
        await asyncio.wait_for(starting, 8)
        assert (conditions.problems, server.stops) == ((), 2)

    asyncio.run(main())


# ---------------------------------------------------------------- pool and status


def test_pool_is_unchanged_before_the_first_scan_and_empty_without_hardware(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert node.survey is not None
        assert content_of(Snapshot()) is None
        assert content_of(Snapshot(given_up="no driver")) == Content()
        content = content_of(Snapshot(survey=node.survey))
        assert content is not None
        assert content.offers == node.survey.offers

    run(tmp_path, scenario)


def test_status_lists_faults_without_a_problem_of_the_driver(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.backend.faults[1] = Fault("gpu-lost", "It fell off the bus")
        await node.scan()
        assert node.survey is not None
        snapshot = Snapshot(survey=node.survey, scanned_at=5.0)
        status = status_of("d", HardwareState(snapshot), (), boot_id="b", published=True, registered=True)
        assert (status.ready, status.problems, status.published) == (True, (), True)
        assert [device.fault for device in status.devices] == ["", "gpu-lost: It fell off the bus"]
        assert json.loads(json.dumps(status.to_dict()))["devices"][1]["uuid"] == node.gpus.template(1).uuid
        unknown = status_of("d", HardwareState(), ("hardware: none",), boot_id="b", published=True, registered=False)
        assert (unknown.ready, unknown.published, len(unknown.problems)) == (False, False, 2)

    run(tmp_path, scenario)


# ---------------------------------------------------------------- recovery


def recovery(node: Node, snapshots: Shared[Snapshot], conditions: Conditions) -> Recovery:
    return Recovery(
        node.service,
        snapshots=snapshots,
        conditions=conditions,
        reporter=node.reports,
        scan=node.scan,
        report_stage=lambda stage: None,
        boot_id=node.boot_id,
    )


def snapshot_of(node: Node) -> Snapshot:
    assert node.survey is not None
    return Snapshot(survey=node.survey, inventory=node.survey.inventory(POOL), scanned_at=1.0)


async def until(condition: Any) -> None:
    deadline = asyncio.get_running_loop().time() + 8
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def test_claims_are_served_while_the_hardware_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.claims.operations.READY_SECONDS", 0.01)

    async def scenario(node: Node, claims: Claims) -> None:
        node.service.set_ready("the driver is starting")
        snapshots, conditions = Shared(Snapshot()), Conditions("claims")
        work = asyncio.ensure_future(recovery(node, snapshots, conditions).run())
        await asyncio.sleep(0.02)
        assert "starting" in await prepare(node, claims.allocate("a", "gpu-1"))
        snapshots.put(snapshot_of(node))
        await until(lambda: not conditions.problems)
        assert await prepare(node, claims.allocate("a", "gpu-1")) == ""
        snapshots.put(Snapshot(given_up="no driver"))
        await asyncio.sleep(0.02)
        assert "no driver" in await prepare(node, claims.allocate("b", SMALL))
        work.cancel()

    run(tmp_path, scenario)


@pytest.mark.parametrize("state", ["no hardware", "faulty device"])
def test_recovery_repairs_hooks_of_claims_that_cannot_be_restored(tmp_path: Path, state: str) -> None:
    """A restarted container runs the hooks of the existing file: the hooks are repaired even if the driver cannot restore the claim."""

    async def scenario(node: Node, claims: Claims) -> None:
        reference = claims.allocate("c", "gpu-1-mig-1g10gb-19-2")
        assert await prepare(node, reference) == ""
        document = node.cdi(reference.uid)
        hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook"]}
        document["containerEdits"]["hooks"] = [dict(hook)]
        document["devices"][0]["containerEdits"]["hooks"] = [dict(hook), {**hook, "env": ["A=b"]}]
        node.system.write_atomic(
            node.service.hardware.cdi_path(reference.uid), json.dumps(document).encode(), mode=0o644
        )
        broken = node.service.hardware.cdi_path("broken")
        node.system.write_atomic(broken, b'{"devices": [')
        snapshots = Shared(Snapshot(given_up="no driver"))
        if state == "faulty device":
            node.backend.faults[1] = Fault("gpu-lost", "It fell off the bus")
            await node.scan()
            snapshots.put(snapshot_of(node))
        work = asyncio.ensure_future(recovery(node, snapshots, Conditions("claims")).run())
        await until(lambda: reference.uid not in node.service.hardware.invalid_cdi_uids())
        repaired = node.cdi(reference.uid)
        for edits in (repaired["containerEdits"], repaired["devices"][0]["containerEdits"]):
            for found in edits["hooks"]:
                found["env"] = None if found["env"] != ["A=b"] else ["A=b"]
        assert repaired["containerEdits"]["hooks"] == [{**hook, "env": None}]
        assert repaired["devices"][0]["containerEdits"]["hooks"] == [{**hook, "env": None}, {**hook, "env": ["A=b"]}]
        work.cancel()

    run(tmp_path, scenario)


def test_recovery_runs_cleanup_and_restores_claims_when_the_device_recovers(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        snapshots = Shared(Snapshot())
        work = asyncio.ensure_future(recovery(node, snapshots, Conditions("claims")).run())
        pending, kept = claims.allocate("owed", SMALL), claims.allocate("kept", "gpu-0-mig-1g10gb-19-1")
        assert await prepare(node, pending) == ""
        assert await prepare(node, kept) == ""
        await node.scan()
        snapshots.put(snapshot_of(node))
        node.backend.faults[0] = Fault("unknown-error", "999")
        await node.scan()
        snapshots.put(snapshot_of(node))
        await asyncio.sleep(0.02)
        assert await unprepare(node, pending) == ""
        node.service.hardware.remove_cdi(kept.uid)
        assert "999" in await prepare(node, kept)
        assert len(node.partitions()) == 2
        node.backend.faults.clear()
        await node.scan()
        snapshots.put(snapshot_of(node))
        await until(lambda: len(node.partitions()) == 1 and node.cdi_files() == (kept.uid,))
        assert node.service.unprepare_runner.ownership.cleanups == ()
        work.cancel()

    run(tmp_path, scenario)


# ---------------------------------------------------------------- guard and lending


def test_library_release_waits_for_running_claims_and_blocks_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.claims.locking.LENT_SECONDS", 0.05)

    async def main() -> None:
        locks, module = DeviceLocks(str(tmp_path), "the driver"), DeviceLocks(str(tmp_path), "a module")
        guard = DeviceGuard(locks)
        library_lock = LibraryLock(locks, guard)
        library_lock.acquire()
        library_lock.acquire()  # already taken by this process
        events: list[str] = []

        async def note(what: str) -> None:
            events.append(what)

        release = asyncio.Event()

        async def claim() -> None:
            async with guard.hold(["GPU-1"]):
                await release.wait()
                events.append("claim")

        working = asyncio.ensure_future(claim())
        await asyncio.sleep(0)
        assert not library_lock.is_requested
        assert module.take(REQUEST)
        assert library_lock.is_requested
        giving = asyncio.ensure_future(library_lock.lend(lambda: note("close"), lambda: note("open")))
        await asyncio.sleep(0.05)
        assert events == []
        release.set()
        await until(lambda: module.take(LIBRARY))
        assert events == ["claim", "close"]
        with pytest.raises(BackendUnavailable, match="a module"):
            async with guard.hold(["GPU-2"]):
                raise AssertionError("no call enters")
        with pytest.raises(AcceleratorError, match="a module"):
            library_lock.acquire()
        module.drop_all()
        await asyncio.wait_for(giving, 8)
        assert events == ["claim", "close", "open"]
        assert not module.take(LIBRARY)
        async with guard.hold(["GPU-2"]):
            assert module.is_taken("GPU-2")
        assert not module.is_taken("GPU-2")
        await working

    asyncio.run(main())


@pytest.mark.parametrize("seconds", ["DRAIN_SECONDS", "LEND_SECONDS"])
def test_library_release_ends_for_any_behavior_of_the_other_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    monkeypatch.setattr(f"dra_driver.supervisors.library_release.{seconds}", 0.05)

    async def main() -> None:
        locks, module = DeviceLocks(str(tmp_path), "the driver"), DeviceLocks(str(tmp_path), "a module")
        guard = DeviceGuard(locks)
        library_lock = LibraryLock(locks, guard)
        library_lock.acquire()
        events: list[str] = []

        async def note(what: str) -> None:
            events.append(what)

        assert module.take(REQUEST)  # and keeps it, without taking the library
        if seconds == "DRAIN_SECONDS":  # a claim that does not end
            async with guard.hold(["GPU-1"]):
                await asyncio.wait_for(library_lock.lend(lambda: note("close"), lambda: note("open")), 8)
                assert events == []
        else:
            await asyncio.wait_for(library_lock.lend(lambda: note("close"), lambda: note("open")), 8)
            assert events == ["close", "open"]
        async with guard.hold(["GPU-2"]):
            pass

    asyncio.run(main())


def test_device_guard_lock_of_another_program_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.claims.locking.LOCK_SECONDS", 0.05)

    async def main() -> None:
        guard = DeviceGuard(DeviceLocks(str(tmp_path), "the driver"))
        layout = DeviceLocks(str(tmp_path), "a layout")
        assert layout.take("GPU-2")
        with pytest.raises(InUse, match="a layout"):
            async with guard.hold(["GPU-1", "GPU-2"]):
                raise AssertionError("it was not to be had")
        assert not layout.is_taken("GPU-1")
        layout.drop_all()
        async with guard.hold(["GPU-1", "GPU-2"]):  # the locks that it took are free again
            assert layout.is_taken("GPU-1") and layout.is_taken("GPU-2")

    asyncio.run(main())
