# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Begun store changes: the caller waits for the disk later, and other callers do not wait."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
from dra_driver.claims.store.files import StoreError
from dra_driver.claims.store.records import ClaimRecord
from dra_driver.claims.store.store import PendingChange, Store
from dra_driver.claims.store.tables import Change
from dra_driver.core.errors import AcceleratorError
from hypothesis import given
from hypothesis import strategies as st
from store_model import commit, record


class Disk:
    """A disk that blocks or fails syncs until the test releases it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.free, self.error = threading.Event(), threading.Event(), 0
        self.synced: list[str] = []
        real = os.fdatasync

        def fdatasync(descriptor: int) -> None:
            self.asked.set()
            assert self.free.wait(60)
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            real(descriptor)
            self.synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

        monkeypatch.setattr(os, "fdatasync", fdatasync)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.free.set()


def outcome(pending: PendingChange) -> list[object]:
    """Return a list that receives the outcome of ``wait``: None or the error. It is empty while the call blocks."""
    found: list[object] = []

    def wait() -> None:
        try:
            pending.wait()
        except StoreError as error:
            found.append(error)
        else:
            found.append(None)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.2)
    return found


def test_begin_change_is_visible_at_once_and_done_when_on_disk(tmp_path: Path, disk: Disk) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    reported: list[str] = []
    store.observer = lambda result, _seconds: reported.append(result)
    pending = store.begin(Change(put=record("a")))
    assert set(store.claims) == {"a"}
    assert disk.asked.wait(60)
    assert (outcome(pending), reported) == ([], [])
    # SQLite waits for the disk in this call. Other callers' changes reach the disk at the same time.
    store.write(Change(put=record("b")))
    assert (set(store.claims), reported) == ({"a", "b"}, ["success"])
    disk.free.set()
    pending.wait()
    assert disk.synced == [str(tmp_path / "state.db-wal")]
    assert reported == ["success", "success"]
    store.close()
    again = Store.open(str(tmp_path / "state.db"))
    assert set(again.claims) == {"a", "b"}
    again.close()


def test_begin_many_changes_during_a_sync_share_the_next_sync(tmp_path: Path, disk: Disk) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    first = store.begin(Change(put=record("first")))
    assert disk.asked.wait(60)
    others = [store.begin(Change(put=record(f"u{number}"))) for number in range(20)]
    disk.free.set()
    for pending in (first, *others):
        pending.wait()
    assert len(disk.synced) == 2
    store.close()


def test_begin_change_without_durability_is_done_at_once(tmp_path: Path, disk: Disk) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    store.begin(Change(put=record("a"), durable=False)).wait()
    assert not disk.asked.is_set()
    store.close()


def test_begin_failed_sync_raises_for_waiters_and_the_change_can_be_reverted(tmp_path: Path, disk: Disk) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    failures: list[AcceleratorError] = []
    reported: list[str] = []
    store.report_failure, store.observer = failures.append, lambda result, _seconds: reported.append(result)
    disk.error = errno.EIO
    disk.free.set()
    pending = store.begin(Change(put=record("a")))
    with pytest.raises(StoreError, match="Input/output error"):
        pending.wait()
    store.write(Change(delete="a"))
    assert (len(failures), reported, set(store.claims)) == (1, ["failure", "success"], set())
    disk.error = 0
    store.begin(Change(put=record("b"))).wait()
    store.close()
    again = Store.open(str(tmp_path / "state.db"))
    assert set(again.claims) == {"b"}
    again.close()


def after_power_cut(store: Store, target: Path, lost: tuple[int, int, int]) -> Store:
    """Return the store after a power cut in which one range of one file, by inode, did not reach the disk."""
    target.mkdir()
    for suffix in [""] + ["-wal"] * Path(f"{store.path}-wal").exists():
        source = Path(store.path + suffix)
        data = bytearray(source.read_bytes())
        inode, start, end = lost
        if source.stat().st_ino == inode:
            data[start:end] = bytes(end - start)
        (target / f"state.db{suffix}").write_bytes(data)
    return Store.open(str(target / "state.db"))


@pytest.mark.parametrize("way", ["begin", "write", "not-durable", "loop"])
def test_change_after_a_failed_sync_outlives_a_power_cut(tmp_path: Path, disk: Disk, way: str) -> None:
    """The kernel does not rewrite the pages of a failed sync, and SQLite drops the frames after a lost one: later changes survive."""
    disk.free.set()
    store = Store.open(str(tmp_path / "state.db"))
    replaced: list[str] = []
    store.report_replacement = replaced.append
    store.begin(Change(put=record("a"))).wait()
    log = Path(f"{store.path}-wal")
    with log.open("rb") as kept:  # so that no other file gets its inode
        before = kept.read()
        disk.error = errno.EIO
        with pytest.raises(StoreError, match="Input/output error"):
            store.begin(Change(put=record("b"))).wait()
        kept.seek(0)
        differs = [at for at, pair in enumerate(zip_longest(before, kept.read())) if pair[0] != pair[1]]
        lost = (os.fstat(kept.fileno()).st_ino, differs[0], differs[-1] + 1)
        disk.error = 0
        if way == "begin":
            store.begin(Change(put=record("c"))).wait()
        elif way == "loop":
            commit(store, Change(put=record("c")))
        else:
            store.write(Change(put=record("c"), durable=way == "write"))
        again = after_power_cut(store, tmp_path / "after", lost)
    # No caller got a confirmation for "b", and its change was not undone.
    assert set(again.claims) == {"a", "b", "c"} == set(store.claims)
    (message,) = replaced
    assert "failed to write its log" in message and "state.db.damaged-" in message and "kernel log" in message
    for each in (store, again):
        each.close()


def test_log_that_a_killed_driver_could_not_sync_is_on_disk_before_a_change_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the killed process knew of the failed sync. The log is complete in the page cache, but has a hole on the disk."""
    program = """
import os, shutil, signal, sys
sys.path.insert(0, sys.argv[2])
from store_model import record
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.files import StoreError
from dra_driver.claims.store.tables import Change
store = Store.open(sys.argv[1])
store.write(Change(put=record("a")))
shutil.copy(f"{sys.argv[1]}-wal", f"{sys.argv[1]}-synced")
def fail(descriptor):
    raise OSError(5, "Input/output error")
os.fdatasync = fail
try:
    store.begin(Change(put=record("b"))).wait()
except StoreError:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "state.db"
    words = [sys.executable, "-c", program, path, str(Path(__file__).parent)]
    assert subprocess.run(words, check=False).returncode == -9
    log, synced = Path(f"{path}-wal"), Path(f"{path}-synced")
    pairs = zip_longest(synced.read_bytes(), log.read_bytes())
    differs = [at for at, pair in enumerate(pairs) if pair[0] != pair[1]]
    synced.unlink()
    inode, start, end = log.stat().st_ino, differs[0], differs[-1] + 1
    again: list[tuple[int, int]] = []
    on_disk: set[int] = set()
    pwrite, fsync = os.pwrite, os.fsync

    def write(descriptor: int, data: bytes, offset: int) -> int:
        if os.fstat(descriptor).st_ino == inode:
            again.append((offset, offset + len(data)))
        return pwrite(descriptor, data, offset)

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        if os.fstat(descriptor).st_ino == inode:
            for first, last in again:
                on_disk.update(range(max(first, start), min(last, end)))

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fsync", sync)
    store = Store.open(str(path))
    store.write(Change(put=record("c")))
    lost = (inode, start, end) if len(on_disk) < end - start else (0, 0, 0)
    after = after_power_cut(store, tmp_path / "after", lost)
    assert set(after.claims) == {"a", "b", "c"}
    for each in (store, after):
        each.close()


def test_log_that_cannot_be_synced_at_the_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(str(tmp_path / "node" / "state.db"))
    store.write(Change(put=record("a")))
    shutil.copytree(tmp_path / "node", tmp_path / "killed")
    path = str(tmp_path / "killed" / "state.db")
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith("-wal"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            Store.open(path)
    again = Store.open(path)
    assert set(again.claims) == {"a"}
    for each in (store, again):
        each.close()


def test_log_is_lost_if_it_cannot_be_written_back_to_the_database(tmp_path: Path) -> None:
    """SQLite syncs its log before it writes it back. Here the kernel's file size limit fails the database, not the log."""
    store = Store.open(str(tmp_path / "state.db"))
    replaced: list[str] = []
    store.report_replacement = replaced.append
    store.write(Change(meta={"large": "x" * (6 << 20)}))
    store.write(Change(put=record("a")))
    size = Path(store.path).stat().st_size
    assert size > 6 << 20
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        for number in range(10):  # more than 1000 pages
            store.write(Change(meta={f"key{number}": "x" * 400_000}, durable=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not replaced
    store.write(Change(put=record("b")))
    (message,) = replaced
    assert "failed to write its log" in message
    assert set(store.claims) == {"a", "b"} and "key9" in store.meta
    store.close()
    again = Store.open(store.path)
    assert (again.claims, again.meta) == (store.claims, store.meta)
    again.close()


def test_power_failure_before_the_sync_loses_only_unconfirmed_changes(tmp_path: Path, disk: Disk) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    store.write(Change(put=record("answered")))
    log = Path(f"{store.path}-wal")
    before = log.read_bytes()
    pending = store.begin(Change(put=record("begun")))
    assert disk.asked.wait(60) and outcome(pending) == []
    differs = [at for at, pair in enumerate(zip_longest(before, log.read_bytes())) if pair[0] != pair[1]]
    again = after_power_cut(store, tmp_path / "after", (log.stat().st_ino, differs[0], differs[-1] + 1))
    assert set(again.claims) == {"answered"}
    disk.free.set()
    pending.wait()
    for each in (store, again):
        each.close()


def test_nothing_is_acknowledged_while_a_lost_log_cannot_be_replaced(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.free.set()
    store = Store.open(str(tmp_path / "state.db"))
    disk.error = errno.EIO
    with pytest.raises(StoreError):
        store.begin(Change(put=record("a"))).wait()
    disk.error = 0

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        for change in (Change(put=record("b")), Change(put=record("c"), durable=False)):
            with pytest.raises(StoreError, match="Input/output error"):
                store.begin(change).wait()
            with pytest.raises(StoreError, match="Input/output error"):
                store.write(change)
    assert set(store.claims) == {"a"}
    store.write(Change(put=record("d")))
    assert set(store.claims) == {"a", "d"}
    store.close()
    again = Store.open(str(tmp_path / "state.db"))
    assert set(again.claims) == {"a", "d"}
    again.close()


def test_store_with_an_unwritable_log_is_rewritten(tmp_path: Path) -> None:
    """SQLite reports a disk error in a commit, here the kernel's file size limit: the store is written to a new file."""
    store = Store.open(str(tmp_path / "state.db"))
    replaced: list[str] = []
    store.report_replacement = replaced.append
    store.write(Change(put=record("a")))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(StoreError, match="disk I/O error"):
            store.write(Change(put=record("large", devices=500)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.write(Change(put=record("b")))
    assert set(store.claims) == {"a", "b"} and len(replaced) == 1
    store.close()


def test_lost_log_stays_lost_when_the_disk_is_also_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync of one thread fails while another thread's transaction finds no space: the log still counts as lost."""
    store = Store.open(str(tmp_path / "state.db"))
    replaced: list[str] = []
    store.report_replacement = replaced.append

    def fails(_changes: object) -> None:
        store._log_is_lost = True
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_transaction", fails)
        with pytest.raises(StoreError, match="disk is full"):
            store.write(Change(put=record("a")))
    store.write(Change(put=record("b")))
    assert set(store.claims) == {"b"} and len(replaced) == 1
    store.close()


def test_begin_sync_thread_ends_fails_all_waiters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(str(tmp_path / "state.db"))

    def ends(_descriptor: int) -> None:
        raise SystemExit("out of memory")

    monkeypatch.setattr(os, "fdatasync", ends)
    for uid in "ab":
        with pytest.raises(StoreError, match="can no longer be written"):
            store.begin(Change(put=record(uid))).wait()
    store.close()


def test_begin_during_another_write_is_written_by_the_store_thread(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    with store._writing:
        pending = store.begin(Change(put=record("a")))
        assert outcome(pending) == []
    pending.wait()
    assert set(store.claims) == {"a"}
    store.close()


def test_begin_unserializable_change_raises_at_wait(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    pending = store.begin(Change(put=replace(record("bad"), created_at=float("nan"))))
    with pytest.raises(StoreError, match="could not write a change"):
        pending.wait()
    assert not store.claims
    store.close()


def test_close_syncs_begun_changes(tmp_path: Path, disk: Disk) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    pending = store.begin(Change(put=record("a")))
    assert disk.asked.wait(60)
    closing = threading.Thread(target=store.close)
    closing.start()
    disk.free.set()
    closing.join(60)
    pending.wait()
    assert len(disk.synced) == 1
    with pytest.raises(StoreError, match="closed"):
        store.begin(Change(put=record("b"))).wait()


def test_begin_during_close_is_rejected_without_a_new_file(tmp_path: Path) -> None:
    class Late:
        """A sync that completes only after the store is closed. Its caller saw the store open."""

        def __init__(self) -> None:
            self.real = store._writing

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            taken = self.real.acquire(blocking, timeout)
            store._writer_ended.set()
            return taken

        def release(self) -> None:
            self.real.release()

    store = Store.open(str(tmp_path / "state.db"))
    store.write(Change(put=record("a")))
    store.close()
    before = sorted(path.name for path in tmp_path.iterdir())
    store._writing = Late()  # type: ignore[assignment]
    for write in (store.write, lambda change: store.begin(change).wait()):
        store._writer_ended.clear()
        with pytest.raises(StoreError, match="it is closed"):
            write(Change(put=record("b")))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_rewrite_before_the_sync_keeps_begun_changes(tmp_path: Path, disk: Disk) -> None:
    """The store is rewritten before the sync of a begun change: the new file has the change and is synced as a whole."""
    path = tmp_path / "state.db"
    store = Store.open(str(path))
    first = store.begin(Change(put=record("a")))
    assert disk.asked.wait(60)  # from here on the store's own thread waits for the disk
    second = store.begin(Change(put=record("b")))
    with store._writing:
        store._replace_from_memory("a test found it damaged", [])
    disk.free.set()
    first.wait()
    second.wait()
    # While the store's thread reserves space for the new log, it also writes other callers' changes, and SQLite waits
    # for the disk.
    names = [f"c{number}" for number in range(100)]
    for name in names:
        store.begin(Change(put=record(name))).wait()
        if f"{path}-wal" in disk.synced:
            break
    assert f"{path}-wal" in disk.synced
    store.close()
    again = Store.open(str(path))
    assert set(again.claims) == {"a", "b", *names[: names.index(name) + 1]}
    again.close()


def _record(uid: str, number: int, backwards: bool, uuid: str, made: str | None, state: str) -> ClaimRecord:
    found = record(uid, state, number)
    devices = [replace(each, device_uuid=uuid, partition_uuid=made) for each in found.devices]
    return replace(found, devices=tuple(reversed(devices) if backwards else devices))


RECORDS = st.builds(
    _record,
    st.sampled_from("abc"),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(("GPU-0", "GPU-1")),
    st.sampled_from((None, "MIG-1", "MIG-2")),
    st.sampled_from(("preparing", "prepared")),
)
CHANGES = st.one_of(
    st.builds(lambda each, durable: Change(put=each, durable=durable), RECORDS, st.booleans()),
    st.builds(lambda uid: Change(delete=uid), st.sampled_from("abc")),
)


@given(groups=st.lists(st.lists(CHANGES, min_size=1, max_size=4), max_size=8))
def test_tables_equal_memory_after_any_changes(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[Change]]
) -> None:
    """After any changes the tables equal the memory. Opening a store compares the columns of each row with its document."""
    path = str(tmp_path_factory.mktemp("store") / "state.db")
    store = Store.open(path)
    expected: dict[str, ClaimRecord] = {}
    for group in groups:
        with store._writing:
            store._write_changes(group)
        for change in group:
            if change.put is not None:
                expected[change.put.uid] = change.put
            else:
                expected.pop(str(change.delete), None)
    assert store.claims == expected
    store.close()
    again = Store.open(path)
    assert again.claims == expected
    again.close()


def test_prepared_claim_keeps_its_rows_unless_its_devices_change(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))

    def written(change: Change) -> list[str]:
        statements: list[str] = []
        store._connection.set_trace_callback(statements.append)
        commit(store, change)
        store._connection.set_trace_callback(None)
        return [each.partition(" ")[0] for each in statements if "claims" in each or "devices" in each]

    begun = record("a")
    made = replace(begun.devices[0], partition_uuid="MIG-1", instance_id=7)
    elsewhere = replace(made, device_uuid="GPU-1")
    assert written(Change(put=begun)) == ["INSERT", "INSERT"]
    assert written(Change(put=begun.as_prepared([made], "boot-1"))) == ["INSERT", "INSERT"]
    assert "DELETE" in written(Change(put=begun.as_prepared([elsewhere], "boot-1")))
    store.close()
    again = Store.open(str(tmp_path / "state.db"))
    assert again.claims == {"a": begun.as_prepared([elsewhere], "boot-1")}
    again.close()
