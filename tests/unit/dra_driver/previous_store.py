# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The store of the previous release, which knows only format 1: its original tables and statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

from dra_driver.claims.store.records import ClaimRecord, record_of_document

TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE claims (
        uid TEXT PRIMARY KEY,
        namespace TEXT NOT NULL,
        name TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('preparing', 'prepared')),
        boot_id TEXT NOT NULL,
        created_at REAL NOT NULL,
        document TEXT NOT NULL
    )""",
    """CREATE TABLE devices (
        claim_uid TEXT NOT NULL REFERENCES claims (uid) ON DELETE CASCADE,
        request TEXT NOT NULL,
        pool TEXT NOT NULL,
        name TEXT NOT NULL,
        device_uuid TEXT NOT NULL,
        kind TEXT NOT NULL,
        profile TEXT,
        profile_id INTEGER,
        placement_start INTEGER,
        placement_size INTEGER,
        partition_uuid TEXT,
        instance_id INTEGER,
        created INTEGER NOT NULL DEFAULT 0,
        share_id TEXT NOT NULL DEFAULT '',
        admin INTEGER NOT NULL DEFAULT 0,
        cdi_id TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (claim_uid, request, name, share_id)
    )""",
    "CREATE INDEX devices_by_device ON devices (device_uuid)",
)
COLUMNS = (
    "claim_uid, request, pool, name, device_uuid, kind, profile, profile_id, placement_start, placement_size, "
    "partition_uuid, instance_id, created, share_id, admin, cdi_id"
)


class PreviousStore:
    """A store as that release opens it."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        self.connection.row_factory = sqlite3.Row
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("PRAGMA foreign_keys = ON")

    @classmethod
    def make(cls, path: Path, records: Iterable[ClaimRecord], meta: Mapping[str, str]) -> PreviousStore:
        """Create a store with these records."""
        store = cls(path)
        for statement in TABLES:
            store.connection.execute(statement)
        for record in records:
            store.put(record)
        for key, value in {**meta, "schema_version": "1"}.items():
            store.set(key, value)
        return store

    def content(self) -> tuple[dict[str, ClaimRecord], dict[str, str]]:
        """Return the content, with the checks of that release."""
        assert self.connection.execute("PRAGMA quick_check").fetchone()[0] == "ok"
        meta = {row["key"]: row["value"] for row in self.connection.execute("SELECT key, value FROM meta")}
        assert meta.get("schema_version", "none") == "1"
        claims = {}
        for row in self.connection.execute("SELECT uid, state, document FROM claims"):
            record = record_of_document(row["document"])
            assert (record.uid, record.state) == (row["uid"], row["state"])
            claims[record.uid] = record
        return claims, meta

    def put(self, record: ClaimRecord) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.delete(record.uid)
        self.connection.execute(
            "INSERT INTO claims (uid, namespace, name, state, boot_id, created_at, document) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                record.uid,
                record.namespace,
                record.name,
                record.state,
                record.boot_id,
                record.created_at,
                record.document,
            ),
        )
        names = COLUMNS.split(", ")
        for device in record.devices:
            values = {**vars(device), "claim_uid": record.uid}
            statement = f"INSERT INTO devices ({COLUMNS}) VALUES ({', '.join('?' * len(names))})"
            self.connection.execute(statement, [values[name] for name in names])
        self.connection.execute("COMMIT")

    def delete(self, uid: str) -> None:
        self.connection.execute("DELETE FROM claims WHERE uid = ?", (uid,))

    def set(self, key: str, value: str | None) -> None:
        if value is None:
            self.connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            self.connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, value))

    def close(self) -> None:
        self.connection.close()


def make_previous(path: Path) -> None:
    """Convert the closed store at a path into one of the previous release."""
    store = PreviousStore(path)
    claims, meta = store.content()
    store.close()
    path.unlink()
    PreviousStore.make(path, claims.values(), meta).close()
