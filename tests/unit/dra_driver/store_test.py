# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The store keeps confirmed changes through kills, full disks, and damage."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
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
from dra_driver.claims.store import files as store_files
from dra_driver.claims.store import store as store_module
from dra_driver.claims.store.files import LOG_BYTES, StoreError, set_aside
from dra_driver.claims.store.records import ClaimRecord, DeviceRecord, NewerRelease, record_of_document
from dra_driver.claims.store.schema import StoreDamaged
from dra_driver.claims.store.store import Store, refuse_other_releases
from dra_driver.claims.store.tables import Change
from dra_driver.core.store.prepared_claims import checksum, prepared_claims
from dra_driver.supervisors.store_recovery import unwritable
from hypothesis import given
from hypothesis import strategies as st
from store_model import commit, record, write_entry


def test_reopened_store_has_committed_changes(tmp_path: Path) -> None:
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
    """Readers without write access see the same: a confined service early at boot, with a closed store in a read-only directory."""
    import ctypes

    path = tmp_path / "state.db"
    store = Store.open(str(path))
    commit(store, Change(put=record("closed")))
    store.close()
    program = textwrap.dedent(
        """
        import sys
        from dra_driver.core.store.prepared_claims import prepared_claims
        sys.stdout.write(" ".join(claim.uid for claim in prepared_claims(sys.argv[1])))
        """
    )

    def confined() -> None:
        library = ctypes.CDLL(None, use_errno=True)
        assert library.unshare(0x00020000) == 0  # a new mount namespace
        assert library.mount(None, b"/", None, 0x40000 | 0x4000, None) == 0  # private
        directory = str(tmp_path).encode()
        assert library.mount(directory, directory, None, 4096, None) == 0
        assert library.mount(None, directory, None, 4096 | 32 | 1, None) == 0  # bind, read-only

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


def test_killed_process_keeps_confirmed_changes(tmp_path: Path) -> None:
    """A process commits changes, confirms them, and is killed: each confirmed change is in the store."""
    program = textwrap.dedent(
        """
        import asyncio, os, signal, sys
        sys.path.insert(0, sys.argv[2])
        from store_model import record
        from dra_driver.claims.store.store import Store
        from dra_driver.claims.store.tables import Change

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
    output = done.stdout.split()
    assert len(output) == 41
    store = Store.open(path)
    assert set(store.claims) == set(output)
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        "text",
        "flipped",
        "no-version",
        "no-table",
        "find_inconsistency",
        "bad-document",
        "no-text",
        "folder",
    ],
)
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.db"
    store = Store.open(str(path))
    commit(store, *(Change(put=record(f"u{number}", devices=2)) for number in range(50)))
    store.close()
    content = bytearray(path.read_bytes())
    statements = {
        "no-text": "UPDATE claims SET document = CAST(x'7bff' AS TEXT) WHERE uid = 'u7'",
        "no-version": "UPDATE meta SET checksum = 'none', value = 'one' WHERE key = 'schema_version'",
        "no-table": "DROP TABLE claims",
        "find_inconsistency": "UPDATE claims SET state = 'prepared' WHERE uid = 'u7'",
        "bad-document": "UPDATE claims SET document = '{}' WHERE uid = 'u7'",
    }
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "text":
        path.write_text("this is no database, and it is long enough to be read as one" * 100)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
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


def test_damage_while_open_is_repaired_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store.open(str(path))
    commit(store, *(Change(put=record(f"u{number}", devices=2)) for number in range(50)))
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    # A change by another connection makes this one drop its cache.
    import dra_driver.claims.store.store as module

    with store._writing:  # the thread continues after it has confirmed a change
        store._connection.close()
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
        commit(
            store, Change(put=record("large", devices=500))
        )  # one transaction, no part of which fits into the free space
    assert set(store.claims) == {"before"}
    store._connection.execute("PRAGMA max_page_count = 100000")
    commit(store, Change(put=record("after")))
    assert set(store.claims) == {"before", "after"}
    store.close()


def full_disk(patch: pytest.MonkeyPatch, bytes_free: int = 0) -> None:
    """Report a full disk. Files can be written up to their current length."""
    found = list(os.statvfs("/"))
    found[1:5] = [1, bytes_free, bytes_free, bytes_free]  # f_frsize, f_blocks, f_bfree, f_bavail
    patch.setattr(os, "statvfs", lambda _path: os.statvfs_result(found))


def test_claims_are_released_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has reserved space: on a full disk SQLite writes within its length, which the kernel's file size limit enforces."""
    store = Store.open(str(tmp_path / "state.db"))
    commit(store, *(Change(put=record(f"u{number}")) for number in range(60)))
    log = Path(f"{store.path}-wal")
    size = log.stat().st_size
    assert size >= LOG_BYTES and log.stat().st_blocks * 512 >= LOG_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        full_disk(patch)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            with pytest.raises(StoreError, match=r"has 0 bytes free.*Claims can still be released"):
                store.write(Change(put=record("new")))
            store.write(Change(put=record("u1", "prepared")))
            for number in range(60):
                store.write(Change(delete=f"u{number}", meta={f"pending:{number}": "x" * 100}))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not store.claims and log.stat().st_size == size
    store.write(Change(put=record("new")))
    store.close()
    again = Store.open(str(tmp_path / "state.db"))
    assert set(again.claims) == {"new"} and len(again.meta) > 60
    again.close()


@pytest.mark.parametrize(
    ("blocks", "is_full"),
    [
        # (f_frsize, f_bfree, f_bavail) as measured when no file could grow.
        ((4096, 4096, 0), True),  # ext4: its own reserve
        ((4096, 29184, 0), True),  # btrfs: space for metadata
        ((4096, 13000, 0), True),  # ext4 for programs of other users than root
        ((4096, 300, 300), False),
        ((4096, 255, 255), True),
    ],
)
def test_free_blocks_that_no_file_can_have_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, int, int], is_full: bool
) -> None:
    found = list(os.statvfs(tmp_path))
    found[1], found[3], found[4] = blocks
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(found))
    with pytest.raises(StoreError, match="disk is full") if is_full else contextlib.nullcontext():
        store_files.refuse_full_disk(str(tmp_path / "state.db"))
    assert ("is full" in unwritable(str(tmp_path))) is is_full


def test_log_space_is_reserved_again_after_a_restart_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite deletes the log of a closed store. The disk then has the reserved space free, and nothing else."""
    Store.open(str(tmp_path / "state.db")).close()
    log = Path(f"{tmp_path}/state.db-wal")
    assert not log.exists()
    full_disk(monkeypatch, LOG_BYTES)
    store = Store.open(str(tmp_path / "state.db"))
    assert log.stat().st_size == LOG_BYTES and log.stat().st_blocks * 512 >= LOG_BYTES
    store.write(Change(meta={"key": "value"}))
    store.close()


def test_failed_reservation_of_log_space_uses_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system such as ext4 can keep a partial reservation, which would fill the disk: the log is truncated."""
    Store.open(str(tmp_path / "state.db")).close()

    def reserve_part(descriptor: int, offset: int, length: int) -> None:
        os.ftruncate(descriptor, offset + length // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", reserve_part)
    store = Store.open(str(tmp_path / "state.db"))
    assert Path(f"{store.path}-wal").stat().st_size == 0
    store.write(Change(meta={"key": "value"}))
    store.close()


def test_log_does_not_stay_longer_than_its_reserved_space(tmp_path: Path) -> None:
    """A reader keeps SQLite from writing the log back. Afterwards the log is truncated."""
    store = Store.open(str(tmp_path / "state.db"))
    store.write(Change(put=record("u1")))
    log = Path(f"{store.path}-wal")
    with contextlib.closing(sqlite3.connect(store.path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM meta").fetchall()
        number = 0
        while log.stat().st_size <= 2 * LOG_BYTES:
            number += 1
            store.write(Change(meta={f"key{number}": "x" * 500_000}))
    for number in range(3):
        store.write(Change(meta={f"key{number}": None}))
    assert log.stat().st_size <= LOG_BYTES + 65536
    store.close()


def test_damaged_stores_are_kept_three_times(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    names = []
    for number in range(6):
        path.write_bytes(b"no database %d" % number)
        Path(f"{path}-wal").write_bytes(b"log")
        store = Store.rebuild(str(path), [], {})
        names.append(Path(str(store.previous)).name)
        store.close()
    found = {each.name for each in tmp_path.glob("state.db.damaged-*")}
    assert found == {f"{name}{suffix}" for name in names[-3:] for suffix in ("", "-wal")}


def test_open_with_a_file_as_directory_raises_store_error(tmp_path: Path) -> None:
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


def test_file_without_tables_is_damage_and_no_new_store(tmp_path: Path) -> None:
    """An interrupted creation in earlier releases left a file without tables: it is damage. As an empty store it would lose the claims."""
    path = tmp_path / "state.db"
    path.write_bytes(b"")
    with pytest.raises(StoreDamaged):
        Store.open(str(path))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    with pytest.raises(StoreDamaged):
        Store.open(str(path))


texts = st.text(max_size=12)


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
                settings=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2),
                cdi_id=texts,
            ),
            max_size=3,
        ).map(tuple),
    )
)
def test_documents_are_read_back_unchanged(value: ClaimRecord) -> None:
    assert record_of_document(value.document) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"version": 0}',
        '{"version": true}',
        '{"version": 2}',
        '{"version": 1, "devices": 3}',
        '{"version": 1, "devices": [{"x": 1}]}',
    ],
)
def test_invalid_documents_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="document"):
        record_of_document(text)


def test_record_of_a_newer_release_is_rejected_by_name_and_kept(tmp_path: Path) -> None:
    with pytest.raises(NewerRelease, match=r"newer release .*version 7; this release knows 6"):
        record_of_document('{"version": 7, "anything": 1}')
    path = tmp_path / "state.db"
    store = Store.open(str(path))
    commit(store, Change(put=record("u1")))
    store.close()
    document = '{"version": 7}'
    for table, name, value in (("meta", "schema_version", "99"), ("claims", "u1", document)):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            if table == "meta":
                write_entry(path, name, value)
            else:
                write_entry(path, "schema_version", "1")
                row = (checksum(name, value), value, name)
                connection.execute("UPDATE claims SET checksum = ?, document = ? WHERE uid = ?", row)
            connection.commit()
        before = path.read_bytes()
        with pytest.raises(NewerRelease, match="Install the newer release again"):
            Store.open(str(path))
        with pytest.raises(NewerRelease):
            refuse_other_releases(str(path))
        assert path.read_bytes() == before


def test_record_is_written_in_the_oldest_possible_version() -> None:
    plain = record()
    turned = replace(plain, devices=tuple(replace(device, settings={"powerLimit": 300}) for device in plain.devices))
    assert json.loads(plain.document)["version"] == 1 and "settings" not in plain.document
    assert json.loads(turned.document)["version"] == 2
    assert record_of_document(turned.document) == turned


def test_wrong_types_in_a_document_are_refused() -> None:
    text = record().document
    for wrong in ('"profile_id":"19"', '"created":1', '"profile_id":[]'):
        name: Any = wrong.partition(":")[0]
        broken = text.replace(f"{name}:19", wrong).replace(f"{name}:true", wrong)
        assert broken != text
        with pytest.raises(ValueError, match="document"):
            record_of_document(broken)


class ReadError:
    """Fail the n-th access to a file, or the n-th read of a database, once, as a disk with a short outage does."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        for name in ("lstat", "stat"):
            patch.setattr(os, name, self.failing(getattr(os, name), OSError(errno.EIO, "Input/output error")))
        for module in (store_module, store_files):
            patch.setattr(module, "read", self.failing(module.read, sqlite3.OperationalError("disk I/O error")))

    def failing(self, call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def called(*arguments: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise error
            return call(*arguments, **more)

        return called


@pytest.mark.parametrize("name", ["state.db", "state.db.new"])
def test_read_error_at_each_step_of_opening_loses_no_claim(tmp_path: Path, name: str) -> None:
    """A read error in a store, or in the complete new store of an interrupted rebuild, loses no claim."""
    failed, number, is_over = 0, 0, False
    while not is_over:
        number += 1
        path = str(tmp_path / str(number) / "state.db")
        store = Store.open(path)
        store.write(Change(put=record(), meta={"debt:x": "boot-1"}))
        store.close()
        Path(path).rename(Path(path).with_name(name))
        with pytest.MonkeyPatch.context() as patch:
            fault = ReadError(patch, number)
            try:
                Store.open(path).close()
            except StoreError:
                failed += 1
            except StoreDamaged as error:
                pytest.fail(f"at {number}: {error}")
        is_over = fault.left > 0
        again = Store.open(path)
        assert set(again.claims) == {"u1"} and again.meta["debt:x"] == "boot-1", number
        again.close()
        assert [each.name for each in Path(path).parent.glob("*damaged*")] == [], number
    assert failed >= 2
