# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Apply changes to a store: to its tables, and to its content in memory.

The tables are described in core/store/prepared_claims.py. Only functions for a store without other users begin and end transactions
here.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ...core.store.prepared_claims import (
    CLAIM_COLUMNS,
    DEVICE_COLUMNS,
    FORM,
    NO_CHECKSUM,
    SCHEMA,
    SCHEMA_VERSION,
    checksum,
)
from .records import ClaimRecord
from .schema import IDENTITY_KEY, VERSION_KEY, Content


@dataclass(frozen=True)
class Change:
    """The content of one transaction.

    ``put`` is a record to insert or update, and ``delete`` the UID of a record to delete. ``meta`` are values of the meta
    table by key; None deletes the key. A change that is not ``durable`` survives the end of this process, but a power
    failure only if a durable change follows. This needs no wait for the disk, and is enough for data about changes that a
    power failure reverts.
    """

    put: ClaimRecord | None = None
    delete: str | None = None
    meta: Mapping[str, str | None] = field(default_factory=dict)
    durable: bool = True

    def without_sync(self) -> Change:
        """Return the same change without a wait for the disk."""
        return Change(self.put, self.delete, self.meta, durable=False) if self.durable else self


def create_tables(content: Content, connection: sqlite3.Connection) -> None:
    """Create the tables of an empty database and fill them. Content without an identity gets one."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA user_version = {FORM}")
    for statement in SCHEMA:
        connection.execute(statement)
    for record in content.claims.values():
        write(connection, Change(put=record), {})
    own = {VERSION_KEY: str(SCHEMA_VERSION), IDENTITY_KEY: content.identity or _new_identity()}
    write(connection, Change(meta={**content.meta, **own}), {})
    connection.execute("COMMIT")


def add_identity(connection: sqlite3.Connection) -> str:
    """Add an identity to a store of a release that had none, and return it."""
    identity = _new_identity()
    connection.execute("BEGIN IMMEDIATE")
    write(connection, Change(meta={IDENTITY_KEY: identity}), {})
    connection.execute("COMMIT")
    return identity


def _new_identity() -> str:
    return secrets.token_hex(8)


def add_checksums(connection: sqlite3.Connection) -> None:
    """Add checksums to the rows of a release that had none."""
    connection.create_function("checksum_of", 2, checksum, deterministic=True)
    connection.execute("BEGIN IMMEDIATE")
    for table, names in (("meta", "key, value"), ("claims", "uid, document")):
        statement = f"UPDATE {table} SET checksum = checksum_of({names}) WHERE checksum = '{NO_CHECKSUM}'"  # noqa: S608
        connection.execute(statement)
    connection.execute("COMMIT")


def write(connection: sqlite3.Connection, change: Change, current: Mapping[str, ClaimRecord]) -> None:
    """Execute a change on tables that contain the claims ``current``."""
    record = change.put
    # Rows with unchanged index entries are updated, not replaced, because each changed index is one more page to write.
    previous = current.get(record.uid) if record is not None else None
    index_is_unchanged = (
        record is not None and previous is not None and _index_values(record) == _index_values(previous)
    )
    for uid in filter(None, (change.delete, previous.uid if previous is not None and not index_is_unchanged else None)):
        connection.execute("DELETE FROM claims WHERE uid = ?", (uid,))
    if record is not None:
        document = record.document
        claim, devices = (_UPSERT_CLAIM, _UPSERT_DEVICE) if index_is_unchanged else (_INSERT_CLAIM, _INSERT_DEVICE)
        connection.execute(claim, (checksum(record.uid, document), *_claim_values(record), document))
        connection.executemany(devices, [(record.uid, *_device_values(device)) for device in record.devices])
    for key, value in change.meta.items():
        if value is None:
            connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            row = (checksum(key, value), key, value)
            connection.execute("INSERT OR REPLACE INTO meta (checksum, key, value) VALUES (?, ?, ?)", row)


def _insert_statement(table: str, columns: Sequence[str], verb: str = "INSERT") -> str:
    return f"{verb} INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _upsert_statement(table: str, columns: Sequence[str], key: Sequence[str], indexed: str = "") -> str:
    """Return a statement that inserts or updates a row with this key, and leaves ``indexed`` unchanged."""
    others = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in (*key, indexed))
    return f"{_insert_statement(table, columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {others}"


#: Return the columns of a claim's row between checksum and document, and of a device's row after the claim's UID.
_claim_values, _device_values = attrgetter(*CLAIM_COLUMNS[1:-1]), attrgetter(*DEVICE_COLUMNS[1:])
_INSERT_CLAIM = _insert_statement("claims", CLAIM_COLUMNS, "INSERT OR REPLACE")
_INSERT_DEVICE = _insert_statement("devices", DEVICE_COLUMNS, "INSERT OR REPLACE")
_UPSERT_CLAIM = _upsert_statement("claims", CLAIM_COLUMNS, ("uid",))
_UPSERT_DEVICE = _upsert_statement(
    "devices", DEVICE_COLUMNS, ("claim_uid", "request", "name", "share_id"), "device_uuid"
)


def _index_values(record: ClaimRecord) -> list[tuple[str, ...]]:
    """Return the indexed values of a claim's devices."""
    return [(each.request, each.name, each.share_id, each.device_uuid) for each in record.devices]


def apply_to_content(change: Change, claims: dict[str, ClaimRecord], meta: dict[str, str]) -> None:
    """Apply a change to the content in memory."""
    if change.delete is not None:
        claims.pop(change.delete, None)
    if change.put is not None:
        claims[change.put.uid] = change.put
    for key, value in change.meta.items():
        if value is None:
            meta.pop(key, None)
        else:
            meta[key] = value
