# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the parts share, the store's keeper, the pool's keeper, recovery and lending: each alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claim_steps import prepare, run, unprepare
from dra_driver.claims.guard import DeviceGuard
from dra_driver.claims.records import ClaimRecord
from dra_driver.claims.store import Change, Store
from dra_driver.claims.store_files import StoreError
from dra_driver.core.device_locks import LIBRARY, REQUEST, DeviceLocks
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, InUse
from dra_driver.core.model import Fault
from dra_driver.core.system import System
from dra_driver.kubelet.sockets import FolderReplaced, SocketError
from dra_driver.publish.publisher import Content
from dra_driver.supervisors.health import Picture
from dra_driver.supervisors.lending import Lending
from dra_driver.supervisors.pool import content_of
from dra_driver.supervisors.recovery import Recovery
from dra_driver.supervisors.shared import Conditions, Shared, Snapshot, keep
from dra_driver.supervisors.sockets import SocketKeeper
from dra_driver.supervisors.status import status_of
from dra_driver.supervisors.storage import StoreKeeper
from faults_test import SMALL
from machine_model import POOL, Claims, Node

from tests.cluster.manifests import settings

KIND = "k8s.gpu.nvidia.com/claim"


# ---------------------------------------------------------------- shared


def test_who_follows_sees_the_latest_value_and_misses_no_last_one() -> None:
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


def test_each_part_reports_its_own_condition() -> None:
    conditions = Conditions("store", "hardware")
    assert [problem.partition(":")[0] for problem in conditions.problems] == ["store", "hardware"]
    conditions.report("store")
    conditions.report("hardware", "no driver")
    assert conditions.problems == ("hardware: no driver",)
    conditions.report("hardware")
    assert conditions.problems == ()


def test_what_fails_unforeseen_begins_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("dra_driver.supervisors.shared.RETRY_LIMIT", 0.001)

    async def main() -> None:
        runs: list[int] = []

        async def work() -> None:
            runs.append(len(runs))
            raise KeyError("surprise")

        task = asyncio.ensure_future(keep("work", work))
        while len(runs) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    told = caplog.records[0]
    assert "work failed" in told.getMessage()
    assert told.exc_info is not None and isinstance(told.exc_info[1], KeyError)


def test_a_folder_that_is_another_one_ends_the_process() -> None:
    async def work() -> None:
        raise FolderReplaced("the folder is gone")

    with pytest.raises(FolderReplaced):
        asyncio.run(keep("work", work))


# ---------------------------------------------------------------- storage


def keeper(folder: Path, conditions: Conditions, problems: list[str]) -> StoreKeeper:
    return StoreKeeper(
        str(folder / "state" / "state.db"),
        system=System(str(folder / "root")),
        cdi_directory="/var/run/cdi",
        cdi_kind=KIND,
        boot_id="boot-1",
        conditions=conditions,
        report_problem=lambda reason, message: problems.append(f"{reason}: {message}"),
    )


def test_half_written_files_of_a_killed_writer_go_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "root/var/run/cdi"
    folder.mkdir(parents=True)
    ours = [".k8s.gpu.nvidia.com-claim_u1.json.abc123.tmp", ".k8s.gpu.nvidia.com-claim_u2.json.x.tmp"]
    others = [
        "k8s.gpu.nvidia.com-claim_u1.json",
        ".other.com-claim_u1.json.abc.tmp",
        ".k8s.gpu.nvidia.com-claim_u1.json",
    ]
    for name in (*ours, *others):
        (folder / name).write_text("{}")

    async def main() -> None:
        store, _rebuilt = await keeper(tmp_path, Conditions(), []).open()
        store.close()

    asyncio.run(main())
    assert sorted(path.name for path in folder.iterdir()) == sorted(others)


def test_store_that_cannot_be_written_is_a_condition_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.storage.RETRY_SECONDS", 0.01)
    (tmp_path / "state").write_text("in the way of the folder")
    conditions = Conditions("store")

    async def main() -> None:
        opening = asyncio.ensure_future(keeper(tmp_path, conditions, []).open())
        while not any("state.db" in problem for problem in conditions.problems):
            await asyncio.sleep(0.01)
        (tmp_path / "state").unlink()
        store, rebuilt = await asyncio.wait_for(opening, 8)
        assert (conditions.problems, rebuilt) == ((), False)
        store.close()

    asyncio.run(main())


def reopened(folder: Path, problems: list[str]) -> tuple[dict[str, ClaimRecord], dict[str, str], bool]:
    """The claims and the notes of a store as the next driver finds it, and whether it was rebuilt."""

    async def main() -> tuple[dict[str, ClaimRecord], dict[str, str], bool]:
        store, rebuilt = await keeper(folder, Conditions("store"), problems).open()
        try:
            return store.claims, store.meta, rebuilt
        finally:
            store.close()

    return asyncio.run(main())


OTHER = SMALL.replace("gpu-0", "gpu-1").removesuffix("0") + "3"


def test_store_that_is_older_than_the_cdi_files_is_brought_up_to_date(tmp_path: Path) -> None:
    """SQLite cuts a damaged log without a word, and a copy of the disk is old: what files of this boot tell was prepared since."""

    async def before(node: Node, claims: Claims) -> None:
        for name, device in (("a", "gpu-0"), ("b", SMALL.replace("gpu-0", "gpu-1")), ("d", OTHER)):
            assert await prepare(node, claims.allocate(name, device)) == ""

    async def since(node: Node, claims: Claims) -> None:
        for name in ("b", "d"):
            assert await unprepare(node, claims.allocate(name)) == ""
        assert await prepare(node, claims.allocate("c", SMALL.replace("gpu-0", "gpu-1"))) == ""

    run(tmp_path, before)
    content = (tmp_path / "state/state.db").read_bytes()
    run(tmp_path, since)
    for path in (tmp_path / "state").glob("state.db*"):
        path.unlink()
    (tmp_path / "state/state.db").write_bytes(content)
    problems: list[str] = []
    found, meta, rebuilt = reopened(tmp_path, problems)
    # Of the two that have gone one is not there again: its place is the new one's. The other is to be undone, and not made again.
    assert rebuilt
    assert {uid: record.prepared for uid, record in found.items()} == {"0uid-a": True, "0uid-c": True, "0uid-d": False}
    assert any(key.startswith("partitioning-enabled:") for key in meta)
    assert "StoreRebuilt" in problems[0] and "0uid-c" in problems[0] and list((tmp_path / "state").glob("*.damaged-*"))
    assert reopened(tmp_path, problems)[2] is False and len(problems) == 1


def test_what_a_lost_store_knew_of_settings_goes_to_the_default(tmp_path: Path) -> None:
    """What was there before the claim is not what a driver reads that comes back: that is the claim's own."""

    async def before(node: Node, claims: Claims) -> None:
        assert await prepare(node, claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)])) == ""

    async def since(node: Node, claims: Claims) -> None:
        assert await prepare(node, claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)])) == ""
        assert await unprepare(node, claims.allocate("a")) == ""
        with node.gpus.state() as state:
            assert {gpu["knobs"]["powerLimit"] for gpu in state.values()} == {700.0}

    run(tmp_path, before)
    (tmp_path / "state/state.db").unlink()
    assert list(reopened(tmp_path, [])[0]) == ["0uid-a"]
    run(tmp_path, since)


def test_what_of_a_damaged_store_is_sound_outlives_it(tmp_path: Path) -> None:
    """A bit of one entry has turned: the others, and a claim without a file, are what they were."""

    async def before(node: Node, claims: Claims) -> None:
        with node.gpus.state() as state:
            for gpu in state.values():
                gpu["knobs"]["powerLimit"] = 650.0
        for name, device in (("a", "gpu-0"), ("b", "gpu-1")):
            assert await prepare(node, claims.allocate(name, device, config=[settings(powerLimit=300)])) == ""
        await node.store.commit(Change(put=replace(node.store.claims["0uid-a"], uid="half", state="preparing")))

    run(tmp_path, before)
    with contextlib.closing(sqlite3.connect(tmp_path / "state/state.db")) as connection:
        (turned,) = connection.execute("SELECT min(key) FROM meta WHERE key LIKE 'setting:%powerLimit'").fetchone()
        connection.execute("UPDATE meta SET value = replace(value, '650', '658') WHERE key = ?", (turned,))
        connection.commit()
    problems: list[str] = []
    found, meta, rebuilt = reopened(tmp_path, problems)
    assert rebuilt and turned in problems[0] and problems[0].startswith("StoreRebuilt")
    assert (sorted(found), found["half"].state) == (["0uid-a", "0uid-b", "half"], "preparing")
    noted = {json.loads(value)["before"] for key, value in meta.items() if key.endswith("powerLimit")}
    assert noted == {650.0, None} and json.loads(meta[turned])["before"] is None, "the default, where nobody knows"
    assert reopened(tmp_path, problems)[2] is False and len(problems) == 1


def test_file_of_a_former_boot_makes_no_store_old(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert await prepare(node, claims.allocate("a", "gpu-0")) == ""

    run(tmp_path, scenario, boot_id="boot-0")
    asyncio.run(emptied(tmp_path))
    assert reopened(tmp_path, []) == ({}, {"schema_version": "1"}, False)


async def emptied(folder: Path) -> None:
    """Take all claims out of a store."""
    store = Store.open(str(folder / "state/state.db"))
    for uid in list(store.claims):
        await store.commit(Change(delete=uid))
    store.close()


def test_claim_of_files_alone_that_the_store_lacks_is_prepared(tmp_path: Path) -> None:
    """The driver was killed between its file and its record: no store is old for that."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0")
        assert await prepare(node, claim) == ""
        await node.store.commit(Change(delete=claim.uid))

    run(tmp_path, scenario)
    problems: list[str] = []
    found, _meta, rebuilt = reopened(tmp_path, problems)
    assert (list(found), rebuilt, problems) == (["0uid-a"], False, [])


def test_store_that_says_something_else_than_the_file_is_rebuilt_from_it(tmp_path: Path) -> None:
    """A bit of the store has turned, and its record can still be read."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""
        record = node.store.claims[claim.uid]
        await node.store.commit(Change(put=replace(record, devices=(replace(record.devices[0], placement_start=4),))))

    run(tmp_path, scenario)
    problems: list[str] = []
    found, _meta, rebuilt = reopened(tmp_path, problems)
    assert rebuilt and found["0uid-a"].devices[0].placement_start == 0 and "contradicts" in problems[0]


def test_claim_whose_file_is_written_is_prepared(tmp_path: Path) -> None:
    """Its last record was lost, or the driver was killed before it could be written: everything that it needs is there."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0")
        assert await prepare(node, claim) == ""
        await node.store.commit(Change(put=node.store.claims[claim.uid].as_preparing()))

    run(tmp_path, scenario)
    problems: list[str] = []
    found, _meta, rebuilt = reopened(tmp_path, problems)
    assert found["0uid-a"].prepared and not rebuilt and problems == []


def test_lost_store_is_rebuilt_and_told(tmp_path: Path) -> None:
    async def before(node: Node, claims: Claims) -> None:
        assert await prepare(node, claims.allocate("a", SMALL)) == ""

    run(tmp_path, before)
    (tmp_path / "state/state.db").unlink()
    problems: list[str] = []

    async def main() -> None:
        store, rebuilt = await keeper(tmp_path, Conditions("store"), problems).open()
        assert rebuilt
        assert list(store.claims) == ["0uid-a"]
        assert any(key.startswith("partitioning-enabled:") for key in store.meta)
        store.close()

    asyncio.run(main())
    assert "StoreRebuilt" in problems[0]


def test_a_store_that_cannot_be_opened_is_told_on_the_node_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.storage.RETRY_SECONDS", 0.0)
    (tmp_path / "state").write_text("a file where the folder should be")
    problems: list[str] = []

    async def main() -> None:
        opening = asyncio.ensure_future(keeper(tmp_path, Conditions("store"), problems).open())
        while not problems:
            await asyncio.sleep(0)
        (tmp_path / "state").unlink()
        store, _rebuilt = await opening
        store.close()

    asyncio.run(main())
    assert (
        problems[0].startswith("StoreUnusable: The store ")
        and "is writable and that the disk is not full" in problems[0]
    )
    assert "serves no claim until then" in problems[0] and len(set(problems)) == 1


def test_what_happens_to_an_open_store_is_told_on_the_node(tmp_path: Path) -> None:
    """A disk that is full by the time of a claim, and pages that break while the store is open: both from another thread."""
    problems: list[str] = []

    async def main() -> None:
        keeping = keeper(tmp_path, Conditions("store"), problems)
        store, _rebuilt = await keeping.open()
        keeping.follow(store)
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match="full"):
            await store.commit(Change(meta={"long": "x" * 100_000}))
        while not problems:
            await asyncio.sleep(0)
        store._connection.execute("PRAGMA max_page_count = 100000")
        path = tmp_path / "state" / "state.db"
        store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store._connection.execute("PRAGMA journal_mode = DELETE")
        path.write_bytes(b"rubbish " * 4096)
        await store.commit(Change(meta={"kept": "yes"}))
        while len(problems) < 2:
            await asyncio.sleep(0)
        store.close()

    asyncio.run(main())
    assert problems[0].startswith("StoreUnusable: ") and "full" in problems[0] and "Check that" in problems[0]
    assert problems[1].startswith("StoreRebuilt: ") and "state.db.damaged-" in problems[1]


def test_a_disk_that_is_full_or_read_only_is_told_before_a_claim_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.storage.WATCH_SECONDS", 0.0)
    states = ["/data is read-only", "", ""]
    problems: list[str] = []

    def look(folder: str) -> str:
        assert folder == str(tmp_path / "state")
        return states.pop(0)

    async def main() -> None:
        watching = asyncio.ensure_future(keeper(tmp_path, Conditions("store"), problems).watch())
        with pytest.raises(IndexError):  # the states have come to an end
            await watching

    monkeypatch.setattr("dra_driver.supervisors.storage.unwritable", look)
    asyncio.run(main())
    (problem,) = problems
    assert problem.startswith("StoreUnusable: ") and "/data is read-only" in problem and "Check that" in problem


# ---------------------------------------------------------------- sockets


class Server:
    """Fails to start as often as it is told to."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.stops = 0
        self.registered = False

    async def start(self) -> None:
        if self.failures:
            self.failures -= 1
            raise SocketError("the folder is read-only")

    async def stop(self) -> None:
        self.stops += 1

    async def watch_sockets(self) -> None:
        await asyncio.Event().wait()


def test_sockets_that_cannot_be_made_are_a_condition_until_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.sockets.RETRY_SECONDS", 0.05)
    conditions = Conditions("sockets")

    async def main() -> None:
        server = Server(2)
        sockets = SocketKeeper(server, driver="d", conditions=conditions)  # type: ignore[arg-type]
        starting = asyncio.ensure_future(sockets.start())
        await asyncio.sleep(0.02)
        assert conditions.problems == ("sockets: the folder is read-only",)
        await asyncio.wait_for(starting, 8)
        assert (conditions.problems, server.stops) == ((), 2)

    asyncio.run(main())


# ---------------------------------------------------------------- pool and status


def test_the_pool_is_left_alone_before_the_first_look_and_empty_while_the_hardware_is_given_up(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert node.survey is not None
        assert content_of(Snapshot()) is None
        assert content_of(Snapshot(given_up="no driver")) == Content()
        content = content_of(Snapshot(survey=node.survey))
        assert content is not None
        assert content.offers == node.survey.offers

    run(tmp_path, scenario)


def test_status_tells_of_faults_and_a_faulty_device_is_not_the_drivers_problem(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.backend.faults[1] = Fault("gpu-lost", "It fell off the bus")
        await node.look()
        assert node.survey is not None
        snapshot = Snapshot(survey=node.survey, looked_at=5.0)
        status = status_of("d", Picture(snapshot), (), boot_id="b", published=True, registered=True)
        assert (status.ready, status.problems, status.published) == (True, (), True)
        assert [device.fault for device in status.devices] == ["", "gpu-lost: It fell off the bus"]
        assert json.loads(json.dumps(status.to_dict()))["devices"][1]["uuid"] == node.gpus.template(1).uuid
        unknown = status_of("d", Picture(), ("hardware: none",), boot_id="b", published=True, registered=False)
        assert (unknown.ready, unknown.published, len(unknown.problems)) == (False, False, 2)

    run(tmp_path, scenario)


# ---------------------------------------------------------------- recovery


def recovery(node: Node, snapshots: Shared[Snapshot], conditions: Conditions) -> Recovery:
    return Recovery(
        node.service,
        snapshots=snapshots,
        conditions=conditions,
        reporter=node.reports,
        look=node.look,
        reached=lambda stage: None,
        boot_id=node.boot_id,
    )


def snapshot_of(node: Node) -> Snapshot:
    assert node.survey is not None
    return Snapshot(survey=node.survey, inventory=node.survey.inventory(POOL), looked_at=1.0)


async def until(condition: Any) -> None:
    deadline = asyncio.get_running_loop().time() + 8
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def test_claims_are_served_while_the_hardware_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.claims.service.READY_SECONDS", 0.01)

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


def test_debts_are_paid_and_claims_restored_when_their_device_answers_again(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        snapshots = Shared(Snapshot())
        work = asyncio.ensure_future(recovery(node, snapshots, Conditions("claims")).run())
        owed, kept = claims.allocate("owed", SMALL), claims.allocate("kept", "gpu-0-mig-1g10gb-19-1")
        assert await prepare(node, owed) == ""
        assert await prepare(node, kept) == ""
        await node.look()
        snapshots.put(snapshot_of(node))
        node.backend.faults[0] = Fault("unknown-error", "999")
        await node.look()
        snapshots.put(snapshot_of(node))
        await asyncio.sleep(0.02)
        assert await unprepare(node, owed) == ""
        node.service.hands.remove_cdi(kept.uid)
        assert "999" in await prepare(node, kept)
        assert len(node.partitions()) == 2
        node.backend.faults.clear()
        await node.look()
        snapshots.put(snapshot_of(node))
        await until(lambda: len(node.partitions()) == 1 and node.cdi_files() == (kept.uid,))
        assert node.service.undoing.debts == ()
        work.cancel()

    run(tmp_path, scenario)


# ---------------------------------------------------------------- guard and lending


def test_lending_waits_for_claims_under_way_and_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.claims.guard.LENT_SECONDS", 0.05)

    async def main() -> None:
        locks, module = DeviceLocks(str(tmp_path), "the driver"), DeviceLocks(str(tmp_path), "a module")
        guard = DeviceGuard(locks)
        lending = Lending(locks, guard)
        lending.take()
        lending.take()  # it is ours already
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
        assert not lending.is_asked_for
        assert module.take(REQUEST)
        assert lending.is_asked_for
        giving = asyncio.ensure_future(lending.give_way(lambda: note("close"), lambda: note("open")))
        await asyncio.sleep(0.05)
        assert events == []
        release.set()
        await until(lambda: module.take(LIBRARY))
        assert events == ["claim", "close"]
        with pytest.raises(BackendUnavailable, match="a module"):
            async with guard.hold(["GPU-2"]):
                raise AssertionError("nobody gets in")
        with pytest.raises(AcceleratorError, match="a module"):
            lending.take()
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
def test_lending_ends_whatever_the_other_side_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    monkeypatch.setattr(f"dra_driver.supervisors.lending.{seconds}", 0.05)

    async def main() -> None:
        locks, module = DeviceLocks(str(tmp_path), "the driver"), DeviceLocks(str(tmp_path), "a module")
        guard = DeviceGuard(locks)
        lending = Lending(locks, guard)
        lending.take()
        events: list[str] = []

        async def note(what: str) -> None:
            events.append(what)

        assert module.take(REQUEST)  # and keeps it, without ever taking the library
        if seconds == "DRAIN_SECONDS":  # a claim that does not end
            async with guard.hold(["GPU-1"]):
                await asyncio.wait_for(lending.give_way(lambda: note("close"), lambda: note("open")), 8)
                assert events == []
        else:
            await asyncio.wait_for(lending.give_way(lambda: note("close"), lambda: note("open")), 8)
            assert events == ["close", "open"]
        async with guard.hold(["GPU-2"]):
            pass

    asyncio.run(main())


def test_a_lock_that_another_program_keeps_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.claims.guard.LOCK_SECONDS", 0.05)

    async def main() -> None:
        guard = DeviceGuard(DeviceLocks(str(tmp_path), "the driver"))
        layout = DeviceLocks(str(tmp_path), "a layout")
        assert layout.take("GPU-2")
        with pytest.raises(InUse, match="a layout"):
            async with guard.hold(["GPU-1", "GPU-2"]):
                raise AssertionError("it was not to be had")
        assert not layout.is_taken("GPU-1")

    asyncio.run(main())
