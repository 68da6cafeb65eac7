# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Changes of what a store holds: how each is made in its tables, and in memory.

The tables are described in core/prepared.py. Nothing here begins or ends a transaction, but for a store that nobody else has open.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ..core.prepared import CLAIM_COLUMNS, DEVICE_COLUMNS, FORM, NO_CHECKSUM, SCHEMA, SCHEMA_VERSION, checksum
from .forms import IDENTITY_KEY, VERSION_KEY, Content
from .records import ClaimRecord


@dataclass(frozen=True)
class Change:
    """What one transaction does: put a record, delete one, and set (or with None delete) values by key.

    One that is not ``durable`` outlives the end of this process and no power cut, unless one that is came after it: enough for what
    tells of things that a power cut takes along as well, and it costs no wait for the disk.
    """

    put: ClaimRecord | None = None
    delete: str | None = None
    meta: Mapping[str, str | None] = field(default_factory=dict)
    durable: bool = True

    def soon(self) -> Change:
        """The same change, not waiting for the disk."""
        return Change(self.put, self.delete, self.meta, durable=False) if self.durable else self


def fill(content: Content, connection: sqlite3.Connection) -> None:
    """Make the tables of an empty database, with what they are to hold. What has no identity gets one."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA user_version = {FORM}")
    for statement in SCHEMA:
        connection.execute(statement)
    for record in content.claims.values():
        write(connection, Change(put=record), {})
    own = {VERSION_KEY: str(SCHEMA_VERSION), IDENTITY_KEY: content.identity or _new_identity()}
    write(connection, Change(meta={**content.meta, **own}), {})
    connection.execute("COMMIT")


def identify(connection: sqlite3.Connection) -> str:
    """Give an identity to a store that a release wrote which knows of none, and return it."""
    identity = _new_identity()
    connection.execute("BEGIN IMMEDIATE")
    write(connection, Change(meta={IDENTITY_KEY: identity}), {})
    connection.execute("COMMIT")
    return identity


def _new_identity() -> str:
    return secrets.token_hex(8)


def sign(connection: sqlite3.Connection) -> None:
    """Give a checksum to the rows that a release wrote which knows of none."""
    connection.create_function("checksum_of", 2, checksum, deterministic=True)
    connection.execute("BEGIN IMMEDIATE")
    for table, names in (("meta", "key, value"), ("claims", "uid, document")):
        statement = f"UPDATE {table} SET checksum = checksum_of({names}) WHERE checksum = '{NO_CHECKSUM}'"  # noqa: S608
        connection.execute(statement)
    connection.execute("COMMIT")


def write(connection: sqlite3.Connection, change: Change, held: Mapping[str, ClaimRecord]) -> None:
    """Execute a change of tables that hold some claims."""
    record = change.put
    # Of rows that keep their places none is taken out of an index and put into it again: each index is a page more to write.
    former = held.get(record.uid) if record is not None else None
    stays = record is not None and former is not None and _places(record) == _places(former)
    for uid in filter(None, (change.delete, former.uid if former is not None and not stays else None)):
        connection.execute("DELETE FROM claims WHERE uid = ?", (uid,))
    if record is not None:
        document = record.to_document()
        claim, devices = (_PUT_CLAIM, _PUT_DEVICE) if stays else (_INSERT_CLAIM, _INSERT_DEVICE)
        connection.execute(claim, (checksum(record.uid, document), *_claim_values(record), document))
        connection.executemany(devices, [(record.uid, *_device_values(device)) for device in record.devices])
    for key, value in change.meta.items():
        if value is None:
            connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            row = (checksum(key, value), key, value)
            connection.execute("INSERT OR REPLACE INTO meta (checksum, key, value) VALUES (?, ?, ?)", row)


def _insert(table: str, columns: Sequence[str], verb: str = "INSERT") -> str:
    return f"{verb} INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _put(table: str, columns: Sequence[str], key: Sequence[str], indexed: str = "") -> str:
    """A row with such a key is there, or should be, and what is ``indexed`` stays."""
    others = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in (*key, indexed))
    return f"{_insert(table, columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {others}"


#: What a claim's row has between its checksum and its document, and a device's behind the claim's UID.
_claim_values, _device_values = attrgetter(*CLAIM_COLUMNS[1:-1]), attrgetter(*DEVICE_COLUMNS[1:])
_INSERT_CLAIM = _insert("claims", CLAIM_COLUMNS, "INSERT OR REPLACE")
_INSERT_DEVICE = _insert("devices", DEVICE_COLUMNS, "INSERT OR REPLACE")
_PUT_CLAIM = _put("claims", CLAIM_COLUMNS, ("uid",))
_PUT_DEVICE = _put("devices", DEVICE_COLUMNS, ("claim_uid", "request", "name", "share_id"), "device_uuid")


def _places(record: ClaimRecord) -> list[tuple[str, ...]]:
    """What stands of a claim's devices in the indexes."""
    return [(each.request, each.name, each.share_id, each.device_uuid) for each in record.devices]


def apply(change: Change, claims: dict[str, ClaimRecord], meta: dict[str, str]) -> None:
    """Make a change of what is in memory."""
    if change.delete is not None:
        claims.pop(change.delete, None)
    if change.put is not None:
        claims[change.put.uid] = change.put
    for key, value in change.meta.items():
        if value is None:
            meta.pop(key, None)
        else:
            meta[key] = value
