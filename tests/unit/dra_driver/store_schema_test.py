# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Stores of another format or release, and flipped bits: a read returns the written values, or detects the damage."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dra_driver.claims.store import schema as store_schema
from dra_driver.claims.store import store as store_module
from dra_driver.claims.store import tables as store_tables
from dra_driver.claims.store.files import BACKUPS, StoreError
from dra_driver.claims.store.records import NewerRelease, OlderRelease
from dra_driver.claims.store.schema import (
    IDENTITY_KEY,
    Content,
    StoreDamaged,
    Tables,
    migrated_tables,
    with_checksums,
)
from dra_driver.claims.store.store import Store, refuse_other_releases
from dra_driver.claims.store.tables import Change
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.store.prepared_claims import FORM, NO_CHECKSUM, SCHEMA, SCHEMA_VERSION, checksum, prepared_claims
from hypothesis import example, given, settings
from hypothesis import strategies as st
from previous_store import PreviousStore
from store_model import commit, record, write_entry

SETTING = "setting:GPU-0:powerLimit"
META = {SETTING: '{"before": 650.0, "boot": "boot-1"}', "partitioning-enabled:GPU-0": "boot-1"}
CLAIMS = {"u1": record("u1", "prepared", devices=2), "u2": record("u2")}
EVERYTHING = (CLAIMS, {**META, "schema_version": "1"})


def make(path: Path) -> None:
    """Create a store with all kinds of entries, and close it."""
    store = Store.open(str(path))
    commit(store, *(Change(put=each) for each in CLAIMS.values()), Change(meta={**META, "gone": "x"}))
    commit(store, Change(put=record("gone")))
    commit(store, Change(delete="gone", meta={"gone": None}))
    store.close()


def reopened(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    with contextlib.closing(Store.open(str(path))) as store:
        return store.claims, store.meta


def query(path: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found = connection.execute(statement, values).fetchall()
        connection.commit()
    return found


# ---------------------------------------------------------------- formats and releases


def test_migrate_store_of_form_1_keeps_a_backup(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    PreviousStore.make(path, CLAIMS.values(), META).close()
    assert reopened(path) == EVERYTHING
    assert query(path, "PRAGMA user_version") == [(FORM,)]
    assert not query(path, "SELECT 1 FROM meta, claims WHERE ? IN (meta.checksum, claims.checksum)", NO_CHECKSUM)
    (backup,) = tmp_path.glob("state.db.form-1-*")
    with contextlib.closing(PreviousStore(backup)) as previous:
        assert previous.content() == EVERYTHING
    assert reopened(path) == EVERYTHING
    assert len(list(tmp_path.glob("*.form-*"))) == 1, "there was nothing left to migrate"


def test_migrate_includes_the_entries_of_the_log(tmp_path: Path) -> None:
    """The previous release was killed, and its last entries are only in the log: the migration and its backup have them."""
    path = tmp_path / "state.db"
    previous = PreviousStore.make(tmp_path / "made.db", [CLAIMS["u1"]], META)
    previous.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    previous.put(CLAIMS["u2"])
    for suffix in ("", "-wal"):
        Path(f"{path}{suffix}").write_bytes((tmp_path / f"made.db{suffix}").read_bytes())
    previous.close()
    assert reopened(path) == EVERYTHING
    (backup,) = tmp_path.glob("state.db.form-1-*")
    with contextlib.closing(PreviousStore(backup)) as previous:
        assert previous.content() == EVERYTHING


def test_migrate_limits_the_number_of_backups(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for number in range(BACKUPS + 3):
        path.unlink(missing_ok=True)
        PreviousStore.make(path, [], {"number": str(number)}).close()
        assert reopened(path)[1]["number"] == str(number)
    backups = sorted(tmp_path.glob("state.db.form-1-*"))
    kept = {query(backup, "SELECT value FROM meta WHERE key = 'number'")[0][0] for backup in backups}
    assert kept == {str(number) for number in range(3, BACKUPS + 3)}


def test_migrate_waits_for_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.claims.store.files.BUSY_SECONDS", 0.05)
    path = tmp_path / "state.db"
    previous = PreviousStore.make(path, CLAIMS.values(), META)
    with contextlib.closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM meta").fetchall()
        previous.set("later", "x")
        previous.close()
        with pytest.raises(StoreError, match="another program reads it"):
            Store.open(str(path))
        assert {each.name for each in tmp_path.iterdir()} == {"state.db", "state.db-wal", "state.db-shm"}
    assert reopened(path)[1]["later"] == "x"


def test_downgrade_and_upgrade_keep_the_store_usable(tmp_path: Path) -> None:
    """After a downgrade by one release and an upgrade, entries of that release have no checksum, and do not count as damage."""
    path = tmp_path / "state.db"
    make(path)
    changed = replace(CLAIMS["u2"], state="prepared")
    with contextlib.closing(PreviousStore(path)) as previous:
        claims, meta = previous.content()
        identity = meta.pop(IDENTITY_KEY)
        assert (claims, meta) == EVERYTHING
        previous.delete("u1")
        previous.put(changed)
        previous.put(record("u3", "prepared"))
        previous.set(SETTING, None)
        previous.set("partitioning-enabled:GPU-0", "boot-2")
        previous.set("partitioning-enabled:GPU-1", "boot-2")
        expected = previous.content()
        assert expected[1].pop(IDENTITY_KEY) == identity, "that release knows nothing of it, and leaves it"
        rows = previous.connection.execute("SELECT checksum FROM claims UNION ALL SELECT checksum FROM meta").fetchall()
    assert sum(row[0] == NO_CHECKSUM for row in rows) == 4
    assert [claim.uid for claim in prepared_claims(str(path))] == ["u2", "u3"]
    assert reopened(path) == expected
    assert query(path, "SELECT value FROM meta WHERE key = ?", IDENTITY_KEY) == [(identity,)]
    assert expected[1].keys() == {"schema_version", "partitioning-enabled:GPU-0", "partitioning-enabled:GPU-1"}
    # From now on a flipped bit in it is detected.
    query(path, "UPDATE meta SET value = 'boot-3' WHERE key = 'partitioning-enabled:GPU-1'")
    with pytest.raises(StoreDamaged, match="partitioning-enabled:GPU-1"):
        Store.open(str(path))


def test_migrate_store_rebuilt_by_the_previous_release(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    make(path)
    claims, meta = reopened(path)
    path.unlink()
    PreviousStore.make(path, claims.values(), meta).close()
    assert reopened(path) == EVERYTHING


@pytest.mark.parametrize(("version", "error"), [("2", NewerRelease), ("99", NewerRelease), ("0", OlderRelease)])
@pytest.mark.parametrize("form", [1, 2])
def test_open_version_without_a_migration_is_rejected_by_name(
    tmp_path: Path, version: str, error: type[AcceleratorError], form: int
) -> None:
    path = tmp_path / "state.db"
    if form == 1:
        PreviousStore.make(path, CLAIMS.values(), META).close()
        query(path, "UPDATE meta SET value = ? WHERE key = 'schema_version'", version)
    else:
        make(path)
        write_entry(path, "schema_version", version)
    before = path.read_bytes()
    for refuse in (Store.open, refuse_other_releases):
        with pytest.raises(error, match=rf"state\.db was written by .* release .*\(version {version}; this release"):
            refuse(str(path))
    assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} <= {"state.db", "state.db-wal", "state.db-shm"}


def test_open_version_with_a_flipped_bit_is_damage(tmp_path: Path) -> None:
    """A version that a flipped bit created is damage. Otherwise the driver would wait forever for a release that does not exist."""
    path = tmp_path / "state.db"
    make(path)
    query(path, "UPDATE meta SET value = '3' WHERE key = 'schema_version'")
    with pytest.raises(StoreDamaged, match=r"schema version 3 in the store .* does not match its checksum") as found:
        Store.open(str(path))
    assert found.value.valid_part == Content(CLAIMS, META)


def test_migrate_runs_steps_in_order_without_changing_their_input() -> None:
    def noting(number: int) -> Callable[[Tables], Tables]:
        return lambda tables: {**tables, "meta": [*tables["meta"], {"key": number}]}

    steps = {number: noting(number) for number in (2, 3, 4)}
    tables: Tables = {"meta": [{"key": 0}]}
    assert migrated_tables(tables, 2, steps, 5) == {"meta": [{"key": key} for key in (0, 2, 3, 4)]}
    assert migrated_tables(tables, 4, steps, 5) == {"meta": [{"key": 0}, {"key": 4}]}
    assert (
        migrated_tables(tables, 5, steps, 5) == migrated_tables(tables, 7, steps, 5) == tables == {"meta": [{"key": 0}]}
    )
    with pytest.raises(OlderRelease, match=r"\(version 1; this release reads 2 to 5\)"):
        migrated_tables(tables, 1, steps, 5)


def test_migrate_has_steps_from_each_form_to_the_current_one() -> None:
    assert (
        sorted(store_schema.STEPS)
        == list(range(min(store_schema.STEPS), FORM))
        == sorted(store_schema.PREVIOUS_SCHEMAS)
    )
    tables: Tables = {"meta": [{"key": "a", "value": "b"}], "claims": [{"uid": "u", "document": "{}"}], "devices": []}
    assert with_checksums(tables) == {
        "meta": [{"key": "a", "value": "b", "checksum": checksum("a", "b")}],
        "claims": [{"uid": "u", "document": "{}", "checksum": checksum("u", "{}")}],
        "devices": [],
    }
    assert "checksum" not in tables["meta"][0]


@pytest.fixture
def release_to_come(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a release with format 3, whose meta table records the writer of an entry."""
    table = SCHEMA[0].replace("value TEXT NOT NULL", "value TEXT NOT NULL, author TEXT NOT NULL DEFAULT ''")
    schema = (table, *SCHEMA[1:])
    assert schema != SCHEMA

    def with_authors(tables: Tables) -> Tables:
        recorded = {"key": "authors", "value": "known", "checksum": checksum("authors", "known")}
        return {**tables, "meta": [*tables["meta"], recorded]}

    with monkeypatch.context() as patch:
        patch.setattr(store_schema, "STEPS", {**store_schema.STEPS, FORM: with_authors})
        patch.setattr(store_schema, "PREVIOUS_SCHEMAS", {**store_schema.PREVIOUS_SCHEMAS, FORM: SCHEMA})
        for module in (store_schema, store_module, store_tables):
            patch.setattr(module, "FORM", FORM + 1)
        for module in (store_schema, store_tables):
            patch.setattr(module, "SCHEMA", schema)
        yield


@pytest.mark.parametrize("form", [1, 2])
def test_migrate_to_a_future_form_works_from_each_form(
    tmp_path: Path, form: int, release_to_come: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.db"
    if form == 1:
        PreviousStore.make(path, CLAIMS.values(), META).close()
    else:
        with monkeypatch.context() as patch:
            for module in (store_schema, store_module, store_tables):
                patch.setattr(module, "FORM", FORM)
            for module in (store_schema, store_tables):
                patch.setattr(module, "SCHEMA", SCHEMA)
            make(path)
    claims, meta = reopened(path)
    assert (claims, meta) == (CLAIMS, {**EVERYTHING[1], "authors": "known"})
    assert [backup.name.split("-")[1] for backup in tmp_path.glob("state.db.form-*")] == [str(form)]
    assert query(path, "PRAGMA user_version") == [(FORM + 1,)]
    # This release, which does not know that format.
    monkeypatch.undo()
    assert reopened(path) == (claims, meta)
    store = Store.open(str(path))
    commit(store, Change(delete="u1", meta={"later": "x"}))
    store.close()
    assert reopened(path) == ({"u2": CLAIMS["u2"]}, {**meta, "later": "x"})


# ---------------------------------------------------------------- flipped bits


@pytest.mark.parametrize(
    ("statement", "sound_claims", "sound_meta"),
    [
        ("UPDATE meta SET value = replace(value, '650', '651') WHERE key LIKE 'setting:%'", 2, 1),
        ("UPDATE meta SET key = 'setting:GPU-1:powerLimit' WHERE key LIKE 'setting:%'", 2, 1),
        ("UPDATE meta SET value = CAST(value AS BLOB) WHERE key LIKE 'setting:%'", 2, 1),
        ("UPDATE claims SET document = replace(document, 'boot-1', 'boot-3') WHERE uid = 'u1'", 1, 2),
        ("UPDATE claims SET uid = 'u3' WHERE uid = 'u2'", 1, 2),
        ("UPDATE claims SET boot_id = 'boot-3' WHERE uid = 'u1'", 2, 2),
        ("UPDATE claims SET checksum = '00000000' WHERE uid = 'u1'", 1, 2),
        ("UPDATE devices SET placement_start = 4 WHERE claim_uid = 'u1' AND request = 'r0'", 2, 2),
        ("UPDATE devices SET claim_uid = 'u3' WHERE claim_uid = 'u2'", 2, 2),
        ("DELETE FROM devices WHERE claim_uid = 'u2'", 2, 2),
        ("DROP INDEX devices_by_device", 2, 2),
    ],
)
def test_open_changed_row_is_damage_and_other_rows_are_sound(
    tmp_path: Path, statement: str, sound_claims: int, sound_meta: int
) -> None:
    path = tmp_path / "state.db"
    make(path)
    query(path, statement)
    with pytest.raises(StoreDamaged) as found:
        Store.open(str(path))
    sound = found.value.valid_part
    assert (len(sound.claims), len(sound.meta)) == (sound_claims, sound_meta)
    assert sound.claims.items() <= CLAIMS.items() and sound.meta.items() <= META.items()


@pytest.mark.parametrize("column", ["placement_start = 4", "device_uuid = 'GPU-1'", "created = 0"])
def test_readers_reject_a_placement_with_a_flipped_bit(tmp_path: Path, column: str) -> None:
    """Programs that read the store destroy partitions without a claim: they refuse a record with a flipped bit."""
    path = tmp_path / "state.db"
    make(path)
    assert len(prepared_claims(str(path))) == 2
    query(path, f"UPDATE devices SET {column} WHERE claim_uid = 'u1' AND request = 'r0'")
    with pytest.raises(AcceleratorError, match="claim u1 was changed") as found:
        prepared_claims(str(path))
    assert found.value.code == "store-unreadable"


def test_open_unreadable_page_keeps_rows_before_and_after_it(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store.open(str(path))
    claims = {f"u{number:02}": record(f"u{number:02}", "prepared", devices=3) for number in range(60)}
    for each in claims.values():
        commit(store, Change(put=each))
    commit(store, Change(meta=META))
    store.close()
    content = path.read_bytes()
    (page,) = (start for start in range(0, len(content), 4096) if b'"uid":"u30"' in content[start : start + 4096])
    path.write_bytes(content[:page] + os.urandom(4096) + content[page + 4096 :])
    with pytest.raises(StoreDamaged) as found:
        Store.open(str(path))
    sound = found.value.valid_part
    assert sound.meta == META and sound.claims.items() < claims.items()
    assert {"u00", "u59"} <= sound.claims.keys() and len(sound.claims) >= 50


@pytest.fixture(scope="module")
def at_rest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("at-rest") / "state.db"
    make(path)
    return path, path.read_bytes()


#: Byte and bit. The header and the schema are selected more often than their share of the file.
BITS = st.tuples(st.one_of(st.integers(0, 99), st.integers(0, 4095), st.integers(0, 10**6)), st.integers(0, 7))


# Bits that have crashed the driver: names in the schema that are not text, and a write version that SQLite treats as
# read-only.
@example((3576, 7))
@example((3913, 7))
@example((18, 2))
@example((47, 0))
@settings(max_examples=120, deadline=None)
@given(BITS)
def test_open_any_flipped_bit_changes_nothing_or_is_detected(
    at_rest: tuple[Path, bytes], place: tuple[int, int]
) -> None:
    """A flipped bit changes nothing or is detected, also in later writes of the store."""
    path, content = at_rest
    for left in path.parent.iterdir():
        left.unlink()
    altered = bytearray(content)
    altered[place[0] % len(content)] ^= 1 << place[1]
    path.write_bytes(altered)
    try:
        store = Store.open(str(path))
    except StoreDamaged as error:
        assert error.valid_part.claims.items() <= CLAIMS.items() and error.valid_part.meta.items() <= META.items()
        return
    assert (store.claims, store.meta) == EVERYTHING
    changed = replace(CLAIMS["u1"], name="changed")
    commit(store, Change(put=changed), Change(delete="u2", meta={SETTING: None, "partitioning-enabled:GPU-0": "b"}))
    store.close()
    assert reopened(path) == (
        {"u1": changed},
        {"schema_version": str(SCHEMA_VERSION), "partitioning-enabled:GPU-0": "b"},
    )


@given(st.text(), st.text(), st.integers(0, 2**20), st.integers(0, 2**20))
def test_checksum_detects_flipped_bits_and_moved_text(key: str, value: str, where: int, length: int) -> None:
    data = bytearray((key + value).encode())
    if data:
        data[where // 8 % len(data)] ^= 1 << where % 8
        with contextlib.suppress(UnicodeDecodeError):
            text = data.decode()
            cut = len(key.encode())
            with contextlib.suppress(UnicodeDecodeError):
                assert checksum(data[:cut].decode(), data[cut:].decode()) != checksum(key, value)
            assert checksum(text) != checksum(key + value)
    cut = length % (len(key + value) + 1)
    moved = ((key + value)[:cut], (key + value)[cut:])
    assert moved == (key, value) or checksum(*moved) != checksum(key, value)
    assert len(checksum(key, value)) == 8 and NO_CHECKSUM not in checksum(key, value)
