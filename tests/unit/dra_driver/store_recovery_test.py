# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Opening a store after a killed writer, without write access, and with damaged, lost, or old files, and the report of each case."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from claim_steps import SMALL, prepare, run, unprepare
from dra_driver.claims.store.files import StoreError
from dra_driver.claims.store.records import ClaimRecord
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.tables import Change
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.host.system import System
from dra_driver.core.settings.settings_record import record_path, recorded_values
from dra_driver.core.store.prepared_claims import prepared_claims
from dra_driver.supervisors.driver_state import Conditions
from dra_driver.supervisors.store_recovery import StoreSupervisor
from machine_model import Claims, Node, copy_of
from store_rebuild_test import Steps

from tests.cluster.manifests import settings

KIND = "k8s.gpu.nvidia.com/claim"


def supervisor(
    directory: Path, conditions: Conditions, problems: list[str], settings_record: str = ""
) -> StoreSupervisor:
    return StoreSupervisor(
        str(directory / "state" / "state.db"),
        system=System(str(directory / "root")),
        cdi_directory="/var/run/cdi",
        cdi_kind=KIND,
        boot_id="boot-1",
        conditions=conditions,
        report_problem=lambda reason, message: problems.append(f"{reason}: {message}"),
        settings_record=settings_record,
    )


def test_start_removes_only_partial_files_of_a_killed_writer(tmp_path: Path) -> None:
    directory = tmp_path / "root/var/run/cdi"
    directory.mkdir(parents=True)
    ours = [".k8s.gpu.nvidia.com-claim_u1.json.abc123.tmp", ".k8s.gpu.nvidia.com-claim_u2.json.x.tmp"]
    others = [
        "k8s.gpu.nvidia.com-claim_u1.json",
        ".other.com-claim_u1.json.abc.tmp",
        ".k8s.gpu.nvidia.com-claim_u1.json",
    ]
    for name in (*ours, *others):
        (directory / name).write_text("{}")

    async def main() -> None:
        store, _rebuilt = await supervisor(tmp_path, Conditions(), []).open()
        store.close()

    asyncio.run(main())
    assert sorted(path.name for path in directory.iterdir()) == sorted(others)


def test_store_that_cannot_be_written_is_a_condition_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.store_recovery.RETRY_SECONDS", 0.01)
    (tmp_path / "state").write_text("a file at the path of the directory")
    conditions = Conditions("store")

    async def main() -> None:
        opening = asyncio.ensure_future(supervisor(tmp_path, conditions, []).open())
        while not any("state.db" in problem for problem in conditions.problems):
            await asyncio.sleep(0.01)
        (tmp_path / "state").unlink()
        store, rebuilt = await asyncio.wait_for(opening, 8)
        assert (conditions.problems, rebuilt) == ((), False)
        store.close()

    asyncio.run(main())


def reopened(directory: Path, problems: list[str]) -> tuple[dict[str, ClaimRecord], dict[str, str], bool]:
    """Return the claims and the notes of a store as the next driver reads them, and whether it was rebuilt."""

    async def main() -> tuple[dict[str, ClaimRecord], dict[str, str], bool]:
        store, rebuilt = await supervisor(directory, Conditions("store"), problems).open()
        try:
            return store.claims, store.meta, rebuilt
        finally:
            store.close()

    return asyncio.run(main())


OTHER = SMALL.replace("gpu-0", "gpu-1").removesuffix("0") + "3"


def test_store_that_is_older_than_the_cdi_files_is_brought_up_to_date(tmp_path: Path) -> None:
    """SQLite truncates a damaged log silently, or a copy of the disk is old: claims from CDI files of this boot are added."""

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
    # Two claims have ended since. One of them is dropped, because a new claim has its place. The other one is undone,
    # not restored.
    assert rebuilt
    assert {uid: record.prepared for uid, record in found.items()} == {"0uid-a": True, "0uid-c": True, "0uid-d": False}
    assert any(key.startswith("partitioning-enabled:") for key in meta)
    assert "StoreRebuilt" in problems[0] and "0uid-c" in problems[0] and list((tmp_path / "state").glob("*.damaged-*"))
    assert reopened(tmp_path, problems)[2] is False and len(problems) == 1


def test_lost_store_sets_settings_to_the_default(tmp_path: Path) -> None:
    """Without the store the previous value is unknown: the current value is the claim's own, so the default is restored."""

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


def test_damaged_store_keeps_its_sound_entries(tmp_path: Path) -> None:
    """A bit of one entry has flipped: the other entries, and a claim without a file, are unchanged."""

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
    recorded = {json.loads(value)["before"] for key, value in meta.items() if key.endswith("powerLimit")}
    assert recorded == {650.0, None} and json.loads(meta[turned])["before"] is None, "the default if it is unknown"
    assert reopened(tmp_path, problems)[2] is False and len(problems) == 1


class Killed(BaseException):
    """Simulated end of the process."""


def test_rebuild_cut_short_at_each_step_loses_nothing_that_was_sound(tmp_path: Path) -> None:
    """A half-prepared claim, a pending cleanup, and previous values of settings are in no CDI file: an interrupted rebuild keeps them."""

    async def before(node: Node, claims: Claims) -> None:
        with node.gpus.state() as state:
            for gpu in state.values():
                gpu["knobs"]["powerLimit"] = 650.0
        assert await prepare(node, claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)])) == ""
        half = replace(node.store.claims["0uid-a"], uid="half", state="preparing")
        await node.store.commit(Change(put=half, meta={"debt:x": "boot-1", "turned": "650"}))

    (tmp_path / "first").mkdir()
    run(tmp_path / "first", before)
    path = "state/state.db"
    with contextlib.closing(sqlite3.connect(tmp_path / "first" / path)) as connection:
        connection.execute("UPDATE meta SET value = '658' WHERE key = 'turned'")
        connection.commit()

    def kill(_step: str) -> None:
        raise Killed

    cut, interrupted, absent = 0, True, 0
    while interrupted:
        cut += 1
        directory = copy_of(tmp_path / "first", tmp_path / str(cut))
        with pytest.MonkeyPatch.context() as patch:
            Steps(patch, cut, kill)
            try:
                reopened(directory, [])
                interrupted = False
            except Killed:
                pass
        is_absent = not (directory / path).exists()
        if is_absent:
            with pytest.raises(AcceleratorError, match="does not exist, although the driver has had claims"):
                prepared_claims(str(directory / path))
        absent += is_absent
        problems: list[str] = []
        found, meta, _rebuilt = reopened(directory, problems)
        assert {uid: record.prepared for uid, record in found.items()} == {"0uid-a": True, "half": False}
        assert meta["debt:x"] == "boot-1" and "turned" not in meta
        recorded = [json.loads(value)["before"] for key, value in meta.items() if key.endswith("powerLimit")]
        assert recorded == [650.0]
        assert (problems or not is_absent) and all(each.startswith("StoreRebuilt") for each in problems)
        assert len(prepared_claims(str(directory / path))) == 2
    assert cut >= 20 and absent >= 4


def test_lost_store_without_cdi_files_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/state.db.damaged-20260101T000000").write_bytes(b"no database")
    problems: list[str] = []
    assert reopened(tmp_path, problems)[2] is True
    assert "is lost" in problems[0] and "damaged-20260101T000000" in problems[0]


def test_incomplete_new_store_of_a_first_start_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/state.db.new").write_bytes(b"")
    problems: list[str] = []
    assert reopened(tmp_path, problems)[2] is False and problems == []
    assert not (tmp_path / "state/state.db.new").exists()


def test_file_of_the_previous_boot_does_not_make_the_store_old(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert await prepare(node, claims.allocate("a", "gpu-0")) == ""

    run(tmp_path, scenario, boot_id="boot-0")
    asyncio.run(emptied(tmp_path))
    assert reopened(tmp_path, []) == ({}, {"schema_version": "1"}, False)


async def emptied(directory: Path) -> None:
    """Delete all claims from a store."""
    store = Store.open(str(directory / "state/state.db"))
    for uid in list(store.claims):
        await store.commit(Change(delete=uid))
    store.close()


def test_claim_of_files_alone_that_the_store_lacks_is_prepared(tmp_path: Path) -> None:
    """The driver was killed between the file and the record of a claim: the store does not count as old."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0")
        assert await prepare(node, claim) == ""
        await node.store.commit(Change(delete=claim.uid))

    run(tmp_path, scenario)
    problems: list[str] = []
    found, _meta, rebuilt = reopened(tmp_path, problems)
    assert (list(found), rebuilt, problems) == (["0uid-a"], False, [])


def test_store_that_differs_from_the_file_is_rebuilt_from_it(tmp_path: Path) -> None:
    """A bit of the store has flipped, but its record can be read: the store is rebuilt from the file."""

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
    """The last record was lost, or the driver was killed before the write: the file has all data, so the claim is prepared."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0")
        assert await prepare(node, claim) == ""
        await node.store.commit(Change(put=node.store.claims[claim.uid].as_preparing()))

    run(tmp_path, scenario)
    problems: list[str] = []
    found, _meta, rebuilt = reopened(tmp_path, problems)
    assert found["0uid-a"].prepared and not rebuilt and problems == []


def test_lost_store_is_rebuilt_and_reported(tmp_path: Path) -> None:
    async def before(node: Node, claims: Claims) -> None:
        assert await prepare(node, claims.allocate("a", SMALL)) == ""

    run(tmp_path, before)
    (tmp_path / "state/state.db").unlink()
    problems: list[str] = []

    async def main() -> None:
        store, rebuilt = await supervisor(tmp_path, Conditions("store"), problems).open()
        assert rebuilt
        assert list(store.claims) == ["0uid-a"]
        assert any(key.startswith("partitioning-enabled:") for key in store.meta)
        store.close()

    asyncio.run(main())
    assert "StoreRebuilt" in problems[0]


def test_store_that_cannot_be_opened_is_reported_on_the_node_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.store_recovery.RETRY_SECONDS", 0.0)
    (tmp_path / "state").write_text("a file at the path of the directory")
    problems: list[str] = []

    async def main() -> None:
        opening = asyncio.ensure_future(supervisor(tmp_path, Conditions("store"), problems).open())
        while not problems:
            await asyncio.sleep(0)
        (tmp_path / "state").unlink()
        store, _rebuilt = await opening
        store.close()

    asyncio.run(main())
    assert (
        problems[0].startswith("StoreUnusable: The store ")
        and "is writable, and that the disk is not full" in problems[0]
    )
    assert "serves no claim until then" in problems[0] and len(set(problems)) == 1


def test_open_store_errors_are_reported_on_the_node(tmp_path: Path) -> None:
    """A disk that is full during a claim, and pages that break while the store is open, are reported, both from another thread."""
    problems: list[str] = []

    async def main() -> None:
        supervising = supervisor(tmp_path, Conditions("store"), problems)
        store, _rebuilt = await supervising.open()
        supervising.follow(store)
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


@pytest.mark.parametrize("content", ["", "{", '{"version": 1, "boot_id": "boot-1", "devices": {"GPU-1": {}}}'])
def test_damaged_record_of_settings_is_reported_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """Claims continue without the node's values. The file stays for diagnosis."""
    monkeypatch.setattr("dra_driver.supervisors.store_recovery.WATCH_SECONDS", 0.0)
    path = record_path("nvidia")
    file = tmp_path / "root" / path.lstrip("/")
    file.parent.mkdir(parents=True)
    (tmp_path / "state").mkdir()
    problems: list[str] = []

    async def main() -> None:
        supervising = supervisor(tmp_path, Conditions("store"), problems, settings_record=path)
        watching = asyncio.ensure_future(supervising.watch())
        await asyncio.sleep(0.1)
        assert problems == [], "without a record nothing is lost"
        complete = file.with_name("complete")
        complete.write_text(content)
        complete.rename(file)
        while len(problems) < 3:
            await asyncio.sleep(0)
        file.unlink()
        await asyncio.sleep(0.1)
        reported = len(problems)
        await asyncio.sleep(0.1)
        assert len(problems) == reported
        watching.cancel()

    asyncio.run(main())
    assert (
        problems[0].startswith(f"SettingsRecordDamaged: The record {path} of")
        and f"Move the file to {path}.damaged" in problems[0]
    )
    logged = [each for each in caplog.records if each.levelname == "ERROR" and path in each.getMessage()]
    assert len(logged) == 1
    assert recorded_values(System(str(tmp_path / "root")), path, "GPU-1") == {}


def test_full_or_read_only_disk_is_reported_before_the_next_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.store_recovery.WATCH_SECONDS", 0.0)
    states = ["/data is read-only", "", ""]
    problems: list[str] = []

    def check_writable(directory: str) -> str:
        assert directory == str(tmp_path / "state")
        return states.pop(0)

    async def main() -> None:
        watching = asyncio.ensure_future(supervisor(tmp_path, Conditions("store"), problems).watch())
        with pytest.raises(IndexError):  # no states are left
            await watching

    monkeypatch.setattr("dra_driver.supervisors.store_recovery.unwritable", check_writable)
    asyncio.run(main())
    (problem,) = problems
    assert problem.startswith("StoreUnusable: ") and "/data is read-only" in problem and "Check that" in problem
