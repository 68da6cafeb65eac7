# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The store keeps what it answered for through kills, full disks and damage."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dra_driver.claims.records import ClaimRecord, DeviceRecord, record_of_document
from dra_driver.claims.store import Change, Store, StoreDamaged, StoreError, set_aside
from dra_driver.core.prepared import prepared_claims
from hypothesis import given, settings
from hypothesis import strategies as st


def record(uid: str = "u1", state: str = "preparing", devices: int = 1) -> ClaimRecord:
    return ClaimRecord(
        uid=uid,
        namespace="default",
        name=f"claim-{uid}",
        state=state,
        boot_id="boot-1",
        created_at=12.5,
        devices=tuple(
            DeviceRecord(
                request=f"r{number}",
                pool="node-1",
                name=f"gpu-0-mig-1g10gb-19-{number}",
                device_uuid="GPU-0",
                kind="partition",
                profile="1g.10gb",
                profile_id=19,
                placement_start=number,
                placement_size=1,
                created=True,
                cdi_id=f"k8s.gpu.nvidia.com/claim={uid}-gpu-0-mig-1g10gb-19-{number}",
            )
            for number in range(devices)
        ),
    )


def commit(store: Store, *changes: Change) -> None:
    async def main() -> None:
        await asyncio.gather(*(store.commit(change) for change in changes))

    asyncio.run(main())


def test_what_is_committed_is_there_after_opening_again(tmp_path: Path) -> None:
    path = str(tmp_path / "state" / "state.db")
    store = Store.open(path)
    done = replace(record(state="prepared", devices=3))
    commit(store, Change(put=record(), meta={"mark": "1", "other": "2"}))
    commit(store, Change(put=done, meta={"other": None}))
    assert store.claims == {"u1": done}
    store.close()
    again = Store.open(path)
    assert again.claims == {"u1": done}
    assert again.meta == {"schema_version": "1", "mark": "1"}
    commit(again, Change(delete="u1"))
    again.close()
    last = Store.open(path)
    assert last.claims == {}
    last.close()


def test_readers_see_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    store = Store.open(path)
    commit(store, Change(put=record(devices=2)))
    (claim,) = prepared_claims(path)
    assert (claim.uid, claim.state, claim.describe()) == ("u1", "preparing", "default/claim-u1")
    assert [(device.name, device.created, device.placement) for device in claim.devices] == [
        (device.name, True, device.placement) for device in record(devices=2).devices
    ]
    store.close()


def test_readers_that_may_not_write_see_the_same(tmp_path: Path) -> None:
    """A confined service early at boot: nobody has the store open, and its folder is read-only."""
    import ctypes

    path = tmp_path / "state.db"
    store = Store.open(str(path))
    commit(store, Change(put=record("closed")))
    store.close()
    program = textwrap.dedent(
        """
        import sys
        from dra_driver.core.prepared import prepared_claims
        sys.stdout.write(" ".join(claim.uid for claim in prepared_claims(sys.argv[1])))
        """
    )

    def confined() -> None:
        library = ctypes.CDLL(None, use_errno=True)
        assert library.unshare(0x00020000) == 0  # a mount namespace of its own
        assert library.mount(None, b"/", None, 0x40000 | 0x4000, None) == 0  # private
        folder = str(tmp_path).encode()
        assert library.mount(folder, folder, None, 4096, None) == 0
        assert library.mount(None, folder, None, 4096 | 32 | 1, None) == 0  # bind, read-only

    if os.geteuid() == 0:
        options: dict[str, Any] = {"preexec_fn": confined}
    else:
        tmp_path.chmod(0o555)
        options = {}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False, **options
    )
    tmp_path.chmod(0o755)
    assert (done.stdout, done.returncode) == ("closed", 0), done.stderr


def test_many_changes_at_once_share_transactions(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    transactions = []
    real = store._transaction
    store._transaction = lambda changes: (transactions.append(len(list(changes))), real(changes))  # type: ignore
    commit(store, *(Change(put=record(f"u{number}")) for number in range(64)))
    assert sum(transactions) == 64
    assert len(transactions) <= 10
    assert len(store.claims) == 64
    store.close()


def test_killed_process_loses_nothing_it_answered_for(tmp_path: Path) -> None:
    """A process commits, says so, and is killed; whatever it said is there."""
    program = textwrap.dedent(
        """
        import asyncio, os, signal, sys
        sys.path.insert(0, sys.argv[2])
        from store_test import record
        from dra_driver.claims.store import Change, Store

        async def main():
            store = Store.open(sys.argv[1])
            for number in range(1000):
                await store.commit(Change(put=record(f"u{number}", devices=2)))
                sys.stdout.write(f"u{number} ")
                sys.stdout.flush()
                if number == 40:
                    os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
        """
    )
    path = str(tmp_path / "state.db")
    done = subprocess.run(
        [sys.executable, "-c", program, path, str(Path(__file__).parent)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    said = done.stdout.split()
    assert len(said) == 41
    store = Store.open(path)
    assert set(store.claims) == set(said)
    store.close()


@pytest.mark.parametrize(
    "damage", ["truncated", "text", "flipped", "newer", "no-table", "contradiction", "bad-document"]
)
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.db"
    store = Store.open(str(path))
    commit(store, *(Change(put=record(f"u{number}", devices=2)) for number in range(50)))
    store.close()
    content = bytearray(path.read_bytes())
    statements = {
        "newer": "UPDATE meta SET value = '99' WHERE key = 'schema_version'",
        "no-table": "DROP TABLE claims",
        "contradiction": "UPDATE claims SET state = 'prepared' WHERE uid = 'u7'",
        "bad-document": "UPDATE claims SET document = '{}' WHERE uid = 'u7'",
    }
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "text":
        path.write_text("this is no database, and it is long enough to be read as one" * 100)
    elif damage == "flipped":
        content[8192:16384] = bytes(byte ^ 0xFF for byte in content[8192:16384])
        path.write_bytes(content)
    else:
        connection = sqlite3.connect(path)
        connection.execute(statements[damage])
        connection.commit()
        connection.close()
    with pytest.raises(StoreDamaged):
        Store.open(str(path))
    aside = set_aside(str(path))
    assert aside is not None
    assert Path(aside).exists()
    fresh = Store.rebuild(str(path), [record("u1", "prepared")], {"mark": "x"})
    assert (set(fresh.claims), fresh.meta["mark"]) == ({"u1"}, "x")
    fresh.close()


def test_setting_aside_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    names = set()
    for text in ("one", "two", "three"):
        path.write_text(text)
        names.add(set_aside(str(path)))
    assert sorted(Path(str(name)).read_text() for name in names) == ["one", "three", "two"]
    assert set_aside(str(path)) is None


def test_damage_while_open_is_mended_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store.open(str(path))
    commit(store, *(Change(put=record(f"u{number}", devices=2)) for number in range(50)))
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    # Another connection's change makes this one drop what it has cached.
    store._connection.close()
    import dra_driver.claims.store as module

    store._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    store._connection.row_factory = sqlite3.Row
    commit(store, Change(put=record("new")))
    assert set(store.claims) == {*(f"u{number}" for number in range(50)), "new"}
    store.close()
    again = module.Store.open(str(path))
    assert again.claims == store.claims
    again.close()
    assert list(tmp_path.glob("state.db.damaged-*"))


def test_full_disk_is_an_error_and_nothing_changes(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    commit(store, Change(put=record("before")))
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="full"):
        commit(store, *(Change(put=record(f"u{number}", devices=9)) for number in range(64)))
    assert set(store.claims) == {"before"}
    store._connection.execute("PRAGMA max_page_count = 100000")
    commit(store, Change(put=record("after")))
    assert set(store.claims) == {"before", "after"}
    store.close()


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        Store.open(str(tmp_path / "state" / "state.db"))


def test_copy_taken_while_open_is_whole(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "a" / "state.db"))
    commit(store, Change(put=record("u1")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    commit(store, Change(put=record("u2")))
    other = Store.open(str(tmp_path / "b" / "state.db"))
    assert set(other.claims) == {"u1"}
    other.close()
    store.close()


def test_a_file_without_tables_is_damage_and_no_new_store(tmp_path: Path) -> None:
    """What an interrupted creation left in earlier releases: opened as an empty store, it would cost the claims."""
    path = tmp_path / "state.db"
    path.write_bytes(b"")
    with pytest.raises(StoreDamaged):
        Store.open(str(path))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    with pytest.raises(StoreDamaged):
        Store.open(str(path))


class Steps:
    """Counts the steps that reach the disk, and does something at the one with the given number."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, act: Callable[[str], None]) -> None:
        self.count = 0
        self._at = at
        self._act = act
        for name in ("rename", "unlink", "open", "fsync", "mkdir"):
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        steps = self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
                steps.step(f"sqlite:{statement.split()[0]}")
                return super().execute(statement, *arguments)

        real = sqlite3.connect

        def connect(path: Any, **options: Any) -> sqlite3.Connection:
            return real(path, factory=Connection, **options)

        patch.setattr(sqlite3, "connect", connect)

    def step(self, name: str) -> None:
        self.count += 1
        if self.count == self._at:
            self._act(name)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.step(name)
            return real(*arguments, **options)

        return counted


def damaged(folder: Path) -> str:
    """A store that held three claims and cannot be read any more, its log included."""
    path = folder / "state.db"
    store = Store.open(str(path))
    commit(store, *(Change(put=record(f"old{number}")) for number in range(3)))
    store.close()
    path.write_bytes(b"no database" * 1000)
    (folder / "state.db-wal").write_bytes(b"log")
    return str(path)


def make_new(path: str) -> None:
    Store.open(path).close()


def rebuild(path: str) -> None:
    Store.rebuild(path, [record("u1", "prepared"), record("u2", "prepared")], {"mark": "x"}).close()


def damage_while_open(path: str) -> Store:
    """An open store that holds u1 and finds its file unreadable at the next change."""
    Path(path).unlink()
    store = Store.rebuild(path, [record("u1", "prepared")], {"mark": "x"})
    store._connection.close()
    Path(path).write_bytes(b"no database" * 1000)
    store._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    return store


def check_after_interruption(path: str, way: str) -> None:
    """The old state, so that it is begun anew, or the complete new one; never a valid store without the claims."""
    wanted = {"new": set(), "rebuild": {"u1", "u2"}, "open": {"u1", "u2"}}[way]
    if not Path(path).exists():
        return  # with claims' CDI files about, the driver takes this for a damaged store
    try:
        store = Store.open(path)
    except StoreDamaged:
        assert Path(path).read_bytes().startswith(b"no database")
        return
    assert set(store.claims) == wanted
    store.close()


def interrupted(way: str, folder: Path, at: int, act: Callable[[str], None]) -> bool:
    """Do it with an interruption at one step; returns whether that step was reached."""
    folder.mkdir()
    path = str(folder / "state.db") if way == "new" else damaged(folder)
    store = damage_while_open(path) if way == "open" else None
    failed = False
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch, at, act)
        try:
            if store is not None:
                commit(store, Change(put=record("u2")))
            else:
                (make_new if way == "new" else rebuild)(path)
        except StoreError:
            failed = True
        reached = steps.count >= at
        steps.count = at  # the connection that was opened counts on
    if store is not None:
        assert set(store.claims) == ({"u1"} if failed else {"u1", "u2"})
        commit(store, Change(put=record("u2")))  # the next change finds its way
        assert set(store.claims) == {"u1", "u2"}
        store.close()
    return reached


@pytest.mark.parametrize("way", ["new", "rebuild", "open"])
def test_store_made_anew_on_a_failing_disk_is_whole_or_not_there(tmp_path: Path, way: str) -> None:
    def fail(name: str) -> None:
        if name.startswith("sqlite"):
            raise sqlite3.OperationalError("database or disk is full")
        raise OSError(errno.ENOSPC, "No space left on device")

    reached = 0
    while interrupted(way, tmp_path / str(reached), reached + 1, fail):
        path = str(tmp_path / str(reached) / "state.db")
        check_after_interruption(path, way)
        if way != "open":
            (make_new if way == "new" else rebuild)(path) if not Path(path).exists() else None
        assert not [left for left in (tmp_path / str(reached)).iterdir() if ".new" in left.name]
        reached += 1
    assert reached >= 20


@pytest.mark.parametrize("way", ["new", "rebuild", "open"])
def test_store_made_anew_by_a_killed_process_is_whole_or_not_there(tmp_path: Path, way: str) -> None:
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        import store_test

        def die(name):
            os.kill(os.getpid(), signal.SIGKILL)

        folder, reached = Path(sys.argv[1]), 0
        while True:
            child = os.fork()
            if child == 0:
                store_test.interrupted(sys.argv[3], folder / str(reached), reached + 1, die)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            if os.WIFEXITED(status):
                break
            reached += 1
        sys.stdout.write(f"{os.WEXITSTATUS(status)} {reached}")
        """
    )
    arguments = [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent), way]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    status, reached = done.stdout.split()
    assert status == "0", done.stderr
    assert int(reached) >= 20
    for number in range(int(reached)):
        path = str(tmp_path / str(number) / "state.db")
        check_after_interruption(path, way)
        Path(path).unlink(missing_ok=True)
        rebuild(path)  # whatever was left beside it
        with contextlib.closing(Store.open(path)) as store:
            assert set(store.claims) == {"u1", "u2"}


def test_a_change_that_cannot_be_written_down_fails_alone(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))

    async def main() -> list[Any]:
        changes = (Change(put=record("u1")), Change(put=replace(record("bad"), created_at=float("nan"))))
        async with asyncio.timeout(10) if hasattr(asyncio, "timeout") else contextlib.AsyncExitStack():
            return await asyncio.gather(
                *(store.commit(change) for change in (*changes, Change(put=record("u2")))), return_exceptions=True
            )

    good, bad, also_good = asyncio.run(main())
    assert (good, also_good) == (None, None)
    assert isinstance(bad, StoreError)
    commit(store, Change(put=record("later")))
    assert set(store.claims) == {"u1", "u2", "later"}
    store.close()


def test_when_the_writer_ends_nothing_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(str(tmp_path / "state.db"))

    def ends(changes: Any) -> None:
        raise SystemExit("out of memory")

    monkeypatch.setattr(store, "_write_now", ends)

    async def main() -> None:
        for number in range(3):
            with pytest.raises(StoreError, match="can no longer be written"):
                await asyncio.wait_for(store.commit(Change(put=record(f"u{number}"))), 10)

    asyncio.run(main())
    store.close()


def test_a_closed_store_refuses_changes(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    store.close()

    async def main() -> None:
        with pytest.raises(StoreError, match="closed"):
            await asyncio.wait_for(store.commit(Change(put=record())), 10)

    asyncio.run(main())


texts = st.text(max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        ClaimRecord,
        uid=texts,
        namespace=texts,
        name=texts,
        state=st.sampled_from(["preparing", "prepared"]),
        boot_id=texts,
        created_at=st.floats(0, 1e12),
        devices=st.lists(
            st.builds(
                DeviceRecord,
                request=texts,
                pool=texts,
                name=texts,
                device_uuid=texts,
                kind=texts,
                profile=st.none() | texts,
                profile_id=st.none() | st.integers(0, 99),
                placement_start=st.none() | st.integers(0, 11),
                placement_size=st.none() | st.integers(1, 12),
                partition_uuid=st.none() | texts,
                instance_id=st.none() | st.integers(0, 99),
                created=st.booleans(),
                share_id=texts,
                admin=st.booleans(),
                cdi_id=texts,
            ),
            max_size=3,
        ).map(tuple),
    )
)
def test_documents_come_back_as_they_were(value: ClaimRecord) -> None:
    assert record_of_document(value.to_document()) == value


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"version": 2}', '{"version": 1, "devices": 3}', '{"version": 1, "devices": [{"x": 1}]}']
)
def test_documents_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="document"):
        record_of_document(text)


def test_wrong_types_in_a_document_are_refused() -> None:
    text = record().to_document()
    for wrong in ('"profile_id":"19"', '"created":1', '"profile_id":[]'):
        name: Any = wrong.partition(":")[0]
        broken = text.replace(f"{name}:19", wrong).replace(f"{name}:true", wrong)
        assert broken != text
        with pytest.raises(ValueError, match="document"):
            record_of_document(broken)
