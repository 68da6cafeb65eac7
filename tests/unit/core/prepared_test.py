# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The reader of the node driver's store."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from dra_driver.core import prepared
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.model import Placement
from dra_driver.core.prepared import (
    ClaimFiles,
    PreparedPartition,
    knobs_before_claims,
    observe,
    prepared_claims,
    prepared_partitions,
)


def store(path: Path, version: int = prepared.SCHEMA_VERSION) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    for statement in prepared.SCHEMA:
        connection.execute(statement)
    connection.execute("INSERT INTO meta (key, value) VALUES ('schema_version', ?)", (str(version),))
    connection.commit()
    return connection


def fill(connection: sqlite3.Connection) -> None:
    claims = [
        ("uid-2", "team", "b", "preparing", "boot", 2.0, "{}"),
        ("uid-1", "team", "a", "prepared", "boot", 1.0, "{}"),
    ]
    columns = ", ".join(prepared.CLAIM_COLUMNS[1:])
    connection.executemany(f"INSERT INTO claims ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", claims)
    devices = [
        ("uid-1", "r", "node", "gpu-0-mig", "GPU-0", "partition", "1g.10gb", 19, 6, 1, "MIG-1", 13, 1, "", 0, "k=a"),
        ("uid-1", "s", "node", "gpu-1", "GPU-1", "device", None, None, None, None, None, None, 0, "", 1, "k=b"),
    ]
    connection.executemany(f"INSERT INTO devices VALUES ({','.join('?' * len(prepared.DEVICE_COLUMNS))})", devices)
    connection.commit()


def test_a_store_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert prepared_claims(str(tmp_path / "state.db")) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["state.db.new", "state.db-wal", "state.db.damaged-20260101T000000", "state.db.form-1-1"]
)
def test_missing_store_with_leftovers_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    for read in (
        prepared_claims,
        lambda path: observe(path, lambda: None),
        lambda path: knobs_before_claims(path, "b"),
    ):
        with pytest.raises(AcceleratorError, match=f"does not exist.* found .*{name}") as caught:
            read(str(tmp_path / "state.db"))
        assert caught.value.code == "store-unreadable" and "Start the node driver" in caught.value.hint


@pytest.mark.parametrize(("driver", "kind"), [("gpu.nvidia.com", ""), ("my-gpus", "k8s.gpu.nvidia.com/claim")])
def test_missing_store_with_cdi_files_of_claims_is_refused(tmp_path: Path, driver: str, kind: str) -> None:
    folder, path = tmp_path / "cdi", tmp_path / driver / "state.db"
    for directory in (folder, path.parent):
        directory.mkdir()
    ours = json.dumps({"annotations": {"dra.accelerators/prepared-claim": "{}"}})
    # Files of another driver with the same name, of another vendor, and of pods without a claim.
    (folder / "k8s.gpu.nvidia.com-claim_1.json").write_text("{}")
    (folder / "k8s.gpu.nvidia.com-claim_2.json").write_text("no JSON")
    (folder / "k8s.npu.huawei.com-claim_3.json").write_text(ours)
    (folder / "k8s.gpu.nvidia.com-device_plugin.json").write_text(ours)
    files = ClaimFiles(str(folder), kind)
    assert prepared_claims(str(path), files) == ()
    (folder / "k8s.gpu.nvidia.com-claim_4.json").write_text(ours)
    with pytest.raises(AcceleratorError, match=r"found \S*claim_4\.json\. Start"):
        prepared_claims(str(path), files)


def test_claims_and_their_devices_are_read_while_the_driver_writes(tmp_path: Path) -> None:
    path = tmp_path / "state with space?.db"
    connection = store(path)
    fill(connection)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("DELETE FROM devices")
    first, second = prepared_claims(str(path))
    connection.rollback()
    assert (first.uid, first.state, first.describe(), second.name) == ("uid-1", "prepared", "team/a", "b")
    partition, whole = first.devices
    assert partition.placement == Placement(6, 1) and partition.created and partition.partition_uuid == "MIG-1"
    assert whole.placement is None and whole.admin and whole.partition_uuid is None and second.devices == ()
    assert prepared_partitions((first,)) == (
        PreparedPartition("team/a", "GPU-0", "MIG-1", 19, Placement(6, 1), created=True),
        PreparedPartition("team/a", "GPU-1"),
    )


def test_claims_that_come_and_go_during_a_look_are_known(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    connection = store(path)
    fill(connection)

    def look() -> str:
        connection.execute("DELETE FROM claims WHERE uid = 'uid-1'")
        connection.execute("INSERT INTO claims VALUES ('none', 'uid-3', 'team', 'c', 'preparing', 'boot', 3.0, '{}')")
        connection.commit()
        return "seen"

    seen, claims = observe(str(path), look)
    assert seen == "seen"
    assert {claim.uid: len(claim.devices) for claim in claims} == {"uid-1": 2, "uid-2": 0, "uid-3": 0}


def test_columns_are_those_of_the_schema(tmp_path: Path) -> None:
    connection = store(tmp_path / "state.db")
    for table, columns in (
        (prepared.META_TABLE, prepared.META_COLUMNS),
        (prepared.CLAIMS_TABLE, prepared.CLAIM_COLUMNS),
        (prepared.DEVICES_TABLE, prepared.DEVICE_COLUMNS),
    ):
        assert tuple(row[1] for row in connection.execute(f"PRAGMA table_info({table})")) == columns


def test_a_claim_s_devices_go_with_it(tmp_path: Path) -> None:
    connection = store(tmp_path / "state.db")
    connection.execute("PRAGMA foreign_keys = ON")
    fill(connection)
    connection.execute("DELETE FROM claims WHERE uid = 'uid-1'")
    assert connection.execute("SELECT count(*) FROM devices").fetchone() == (0,)


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to look at" * 50])
def test_a_damaged_store_is_said_to_be_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(content)
    with pytest.raises(AcceleratorError, match=r"state\.db cannot be read") as error:
        prepared_claims(str(path))
    assert error.value.code == "store-unreadable"
    assert path.read_bytes() == content


def test_a_newer_store_is_not_guessed_at(tmp_path: Path) -> None:
    store(tmp_path / "state.db", version=2)
    with pytest.raises(AcceleratorError, match="schema version 2, this program knows 1"):
        prepared_claims(str(tmp_path / "state.db"))
