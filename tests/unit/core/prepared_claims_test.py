# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The reader of the node driver's store."""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.model import Placement
from dra_driver.core.store import prepared_claims as store_prepared_claims
from dra_driver.core.store.prepared_claims import (
    ClaimFiles,
    PreparedPartition,
    knobs_before_claims,
    observe,
    prepared_claims,
    prepared_partitions,
)


def store(path: Path, version: int = store_prepared_claims.SCHEMA_VERSION) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    for statement in store_prepared_claims.SCHEMA:
        connection.execute(statement)
    connection.execute("INSERT INTO meta (key, value) VALUES ('schema_version', ?)", (str(version),))
    connection.commit()
    return connection


def fill(connection: sqlite3.Connection) -> None:
    claims = [
        ("uid-2", "team", "b", "preparing", "boot", 2.0, "{}"),
        ("uid-1", "team", "a", "prepared", "boot", 1.0, "{}"),
    ]
    columns = ", ".join(store_prepared_claims.CLAIM_COLUMNS[1:])
    connection.executemany(f"INSERT INTO claims ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", claims)
    devices = [
        ("uid-1", "r", "node", "gpu-0-mig", "GPU-0", "partition", "1g.10gb", 19, 6, 1, "MIG-1", 13, 1, "", 0, "k=a"),
        ("uid-1", "s", "node", "gpu-1", "GPU-1", "device", None, None, None, None, None, None, 0, "", 1, "k=b"),
    ]
    connection.executemany(
        f"INSERT INTO devices VALUES ({','.join('?' * len(store_prepared_claims.DEVICE_COLUMNS))})", devices
    )
    connection.commit()


def test_missing_store_has_no_claims(tmp_path: Path) -> None:
    assert prepared_claims(str(tmp_path / "state.db")) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["state.db.new", "state.db-wal", "state.db.damaged-20260101T000000", "state.db.form-1-1"]
)
def test_missing_store_with_leftovers_is_rejected(tmp_path: Path, name: str) -> None:
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
def test_missing_store_with_cdi_files_of_claims_is_rejected(tmp_path: Path, driver: str, kind: str) -> None:
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
    unread = folder / "k8s.gpu.nvidia.com-claim_5.json"
    unread.symlink_to(unread.name)
    with pytest.raises(AcceleratorError, match=r"found \S*claim_5\.json\. Start"):
        prepared_claims(str(path), files)
    unread.unlink()
    (folder / "k8s.gpu.nvidia.com-claim_4.json").write_text(ours)
    with pytest.raises(AcceleratorError, match=r"found \S*claim_4\.json\. Start"):
        prepared_claims(str(path), files)


def test_read_error_is_not_a_missing_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error must not make the devices of its claims count as free. Path.exists raises it only in some releases of Python."""
    path = tmp_path / "state.db"
    store(path).close()
    stat_file = os.stat

    def stat(file: Any, **more: Any) -> os.stat_result:
        if str(file) == str(path):
            raise OSError(errno.EIO, "Input/output error")
        return stat_file(file, **more)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(AcceleratorError, match="Input/output error") as caught:
        prepared_claims(str(path))
    assert caught.value.code == "store-unreadable"


def test_missing_store_with_cdi_files_in_configured_directory_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules read the driver's directories from a file of systemd-tmpfiles that the role writes: a missing store with CDI files is refused."""
    listed, folder, path = tmp_path / "dra.conf", tmp_path / "cdi", tmp_path / "gpu.nvidia.com/state.db"
    monkeypatch.setattr(store_prepared_claims, "DIRECTORIES_FILE", str(listed))
    folder.mkdir()
    (folder / "k8s.gpu.nvidia.com-claim_4.json").write_text(
        json.dumps({"annotations": {"dra.accelerators/prepared-claim": "{}"}})
    )
    assert prepared_claims(str(path)) == ()
    listed.write_text(f"# d\n\nd {folder} 0755 root root -\nd {tmp_path}/none 0700 root root -\n")
    for read in (prepared_claims, lambda each: prepared_claims(each, ClaimFiles(kind="k8s.gpu.nvidia.com/claim"))):
        with pytest.raises(AcceleratorError, match=r"found \S*claim_4\.json\. Start"):
            read(str(path))


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EUCLEAN])
@pytest.mark.parametrize("unread", ["gpu.nvidia.com", "cdi"])
def test_missing_store_with_unreadable_directory_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: str, number: int
) -> None:
    """A store that is missing during a rebuild must not count as one that has never existed: an unreadable directory is refused."""
    path = tmp_path / "gpu.nvidia.com/state.db"
    path.parent.mkdir()

    def listdir(directory: str | Path) -> list[str]:
        if Path(directory).name == unread:
            raise OSError(number, os.strerror(number), str(directory))
        return []

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(AcceleratorError, match=re.escape(os.strerror(number))) as caught:
        prepared_claims(str(path), ClaimFiles(directory=str(tmp_path / "cdi")))
    assert caught.value.code == "store-unreadable"


def test_role_writes_cdi_directory_where_modules_read_it() -> None:
    role = Path(__file__).resolve().parents[3] / "roles/dra_driver"
    assert (
        f"- path: {store_prepared_claims.DIRECTORIES_FILE}\n    content: \"{{{{ lookup('ansible.builtin.template', 'tmpfiles.conf.j2')"
        in (role / "vars/main.yml").read_text("utf-8")
    )
    assert "\nd {{ dra_driver_cdi_directory | " in (role / "templates/tmpfiles.conf.j2").read_text("utf-8")


def test_claims_and_devices_are_read_during_writes(tmp_path: Path) -> None:
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


def test_observe_claims_changed_during_scan_are_returned(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    connection = store(path)
    fill(connection)

    def scan() -> str:
        connection.execute("DELETE FROM claims WHERE uid = 'uid-1'")
        connection.execute("INSERT INTO claims VALUES ('none', 'uid-3', 'team', 'c', 'preparing', 'boot', 3.0, '{}')")
        connection.commit()
        return "seen"

    seen, claims = observe(str(path), scan)
    assert seen == "seen"
    assert {claim.uid: len(claim.devices) for claim in claims} == {"uid-1": 2, "uid-2": 0, "uid-3": 0}


def test_columns_match_the_schema(tmp_path: Path) -> None:
    connection = store(tmp_path / "state.db")
    for table, columns in (
        (store_prepared_claims.META_TABLE, store_prepared_claims.META_COLUMNS),
        (store_prepared_claims.CLAIMS_TABLE, store_prepared_claims.CLAIM_COLUMNS),
        (store_prepared_claims.DEVICES_TABLE, store_prepared_claims.DEVICE_COLUMNS),
    ):
        assert tuple(row[1] for row in connection.execute(f"PRAGMA table_info({table})")) == columns


def test_deleted_claim_deletes_its_devices(tmp_path: Path) -> None:
    connection = store(tmp_path / "state.db")
    connection.execute("PRAGMA foreign_keys = ON")
    fill(connection)
    connection.execute("DELETE FROM claims WHERE uid = 'uid-1'")
    assert connection.execute("SELECT count(*) FROM devices").fetchone() == (0,)


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to look at" * 50])
def test_damaged_store_raises_store_unreadable(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(content)
    with pytest.raises(AcceleratorError, match=r"state\.db cannot be read") as error:
        prepared_claims(str(path))
    assert error.value.code == "store-unreadable"
    assert path.read_bytes() == content


def test_newer_store_schema_is_rejected(tmp_path: Path) -> None:
    store(tmp_path / "state.db", version=2)
    with pytest.raises(AcceleratorError, match="schema version 2, this program knows 1"):
        prepared_claims(str(tmp_path / "state.db"))
