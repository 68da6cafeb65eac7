# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the tables of a store in any known form, migrate the rows to the current form, and verify their checksums.

This module writes nothing. A step converts the rows of form n to rows of form n + 1. A store of an older form is read,
migrated in memory, and verified like any other. Then files.py writes it as a new store next to the old one.

How to change the tables:

1. Describe the new form in core/store/prepared_claims.py, raise FORM there, and add the step from the previous form to STEPS.
2. If the previous release can read the new form, and can detect missing data, keep the schema version. Nodes can then be
   upgraded and downgraded with their claims. Form 2 is an example.
3. If it cannot, raise the schema version in two releases. The first one reads the new form and still writes the old
   one. The second one writes the new form. Otherwise a downgrade by one release is impossible.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import AcceleratorError
from ...core.store.prepared_claims import (
    CLAIMS_TABLE,
    DEVICES_TABLE,
    FORM,
    META_TABLE,
    NO_CHECKSUM,
    SCHEMA,
    SCHEMA_VERSION,
    checksum,
    find_inconsistency,
    has_valid_checksum,
)
from .records import ClaimRecord, NewerRelease, OlderRelease, record_of_document

VERSION_KEY = "schema_version"
# The unique ID of a store. A store that is created again after a loss has another ID.
IDENTITY_KEY = "identity"
# The oldest schema version that this release can read.
OLDEST_VERSION = 1

Row = dict[str, Any]
#: The rows of each table.
Tables = Mapping[str, list[Row]]
#: Converts rows to the next form, without changing its arguments.
Step = Callable[[Tables], Tables]


@dataclass(frozen=True)
class Content:
    """The content of a store.

    ``identity`` is "" if the store has none: an older release wrote it, or it is not written yet.
    """

    claims: dict[str, ClaimRecord] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    identity: str = ""


class StoreDamaged(AcceleratorError):
    """The file is not a store of this schema, or its content is invalid. ``valid_part`` is the part with valid checksums."""

    default_code = "store-damaged"

    def __init__(self, message: str, *, valid_part: Content | None = None) -> None:
        super().__init__(message)
        self.valid_part = valid_part or Content()


@dataclass(frozen=True)
class StoredContent:
    """A store's content, its form in the file, and whether it has rows without a checksum."""

    content: Content
    form: int
    unsigned: bool


def with_checksums(tables: Tables) -> Tables:
    """Migrate form 1 to 2. Rows without a checksum are accepted as valid, because nothing can verify them."""
    return {
        **tables,
        "meta": [{**row, "checksum": checksum(row["key"], row["value"])} for row in tables["meta"]],
        "claims": [{**row, "checksum": checksum(row["uid"], row["document"])} for row in tables["claims"]],
    }


#: The migration steps, by the form that each starts with.
STEPS: Mapping[int, Step] = {1: with_checksums}
#: The SQL schema of each previous form that a store can have.
PREVIOUS_SCHEMAS: Mapping[int, tuple[str, ...]] = {
    1: (
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
        *SCHEMA[2:],
    )
}


def migrated_tables(tables: Tables, form: int, steps: Mapping[int, Step], to: int) -> Tables:
    """Return rows of an older form migrated to form ``to``. Raises OlderRelease if a step is missing."""
    for number in range(form, to):
        if number not in steps:
            raise OlderRelease("The store's tables", form, f"{min(steps, default=to)} to {to}")
        tables = steps[number](tables)
    return tables


def form_of(connection: sqlite3.Connection) -> int:
    """Return the form in a store's header. Form 1 did not set it."""
    return max(1, int(connection.execute("PRAGMA user_version").fetchone()[0]))


def refuse_other_versions(path: str, meta: Iterable[Row]) -> None:
    """Raise NewerRelease or OlderRelease for a schema version that this release cannot read, and StoreDamaged for an invalid one.

    A version that does not match its checksum is damage, not another release: one changed bit makes a 1 a 3 or a 9. The
    format and the checksum of this row are the same in all future forms.
    """
    row = next((row for row in meta if row["key"] == VERSION_KEY), None)
    if row is None or not str(row["value"]).isascii() or not str(row["value"]).isdecimal():
        raise StoreDamaged(f"The store {path} has schema version {row and row['value']!r}; expected {SCHEMA_VERSION}")
    if not has_valid_checksum(row.get("checksum", NO_CHECKSUM), row["key"], row["value"]):
        raise StoreDamaged(f"The schema version {row['value']} in the store {path} does not match its checksum")
    version = int(row["value"])
    if version > SCHEMA_VERSION:
        raise NewerRelease(f"The store {path}", version, SCHEMA_VERSION)
    if version < OLDEST_VERSION:
        raise OlderRelease(f"The store {path}", version, f"{OLDEST_VERSION} to {SCHEMA_VERSION}")


def read(connection: sqlite3.Connection, path: str) -> StoredContent:
    """Read and verify a store.

    Raises StoreDamaged with the valid part, NewerRelease, OlderRelease, OperationalError.
    """
    try:
        return _read(connection, path)
    except (StoreDamaged, sqlite3.DatabaseError, ValueError, KeyError) as error:
        if isinstance(error, sqlite3.OperationalError) and not is_content_error(error):
            raise
        message = error.message if isinstance(error, StoreDamaged) else f"The store {path} cannot be read: {error}"
        raise StoreDamaged(message, valid_part=valid_content(connection)) from error


#: The text of operational errors that mean damaged content, not a disk error.
_CONTENT_ERRORS = ("no such", "Could not decode to UTF-8", "unsupported file format", "malformed")


def is_content_error(error: sqlite3.OperationalError) -> bool:
    """Return whether an error means damaged content, so that neither a retry nor more disk space helps."""
    return any(words in str(error) for words in _CONTENT_ERRORS)


#: The text of SQLite errors of a file that cannot be read now. sqlite3 of Python 3.10 has no error codes.
_READ_ERRORS = ("disk I/O error", "unable to open database file", "database is locked", "out of memory")
#: The same errors in the result of ``PRAGMA integrity_check``, by their primary code: NOMEM, IOERR, and CANTOPEN.
_UNREAD_PAGE = re.compile(r"unable to get the page\. error code=(\d+)")
_READ_CODES = (7, 10, 14)


def is_read_error(error: BaseException) -> bool:
    """Return whether SQLite could not read the file. Such an error does not show that the content is damaged."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _READ_ERRORS)


def _refuse_unread_page(check: str) -> None:
    """Raise OperationalError if the integrity check could not read a page: the result is not about the content."""
    if any(int(code) & 0xFF in _READ_CODES for code in _UNREAD_PAGE.findall(check)):
        raise sqlite3.OperationalError(f"disk I/O error: {check}")


def _read(connection: sqlite3.Connection, path: str) -> StoredContent:
    # quick_check would not detect an index that has lost a row. Such a row would be neither found nor removed.
    check = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    _refuse_unread_page(check)
    if check != "ok":
        raise StoreDamaged(f"The store {path} is damaged: {check}")
    meta = _rows(connection, "meta")
    refuse_other_versions(path, meta)
    form = form_of(connection)
    if missing := _missing_statement(connection, form):
        raise StoreDamaged(f"The store {path} is of form {form}, but this part of its schema is missing: {missing}")
    tables = {"meta": meta, **{name: _rows(connection, name) for name in (CLAIMS_TABLE, DEVICES_TABLE)}}
    tables = dict(migrated_tables(tables, form, STEPS, FORM))
    unsigned = any(row["checksum"] == NO_CHECKSUM for name in (META_TABLE, CLAIMS_TABLE) for row in tables[name])
    return StoredContent(_verified_content(tables, path), form, unsigned)


def _rows(connection: sqlite3.Connection, table: str) -> list[Row]:
    return [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]  # noqa: S608


def _missing_statement(connection: sqlite3.Connection, form: int) -> str:
    """Return the first statement of a form's schema that is missing in a store; "" if none is missing or the form is not known."""
    wanted = SCHEMA if form == FORM else PREVIOUS_SCHEMAS.get(form, ())
    there = {" ".join(str(row[0]).split()) for row in connection.execute("SELECT sql FROM sqlite_master")}
    return next((text for text in (" ".join(each.split()) for each in wanted) if text not in there), "")


def _verified_content(tables: Tables, path: str) -> Content:
    """Return the content of a store's rows in the present form. Raises StoreDamaged, ValueError, NewerRelease."""
    device_rows: dict[str, list[Row]] = {}
    for row in tables[DEVICES_TABLE]:
        device_rows.setdefault(row["claim_uid"], []).append(row)
    meta = {}
    for row in tables[META_TABLE]:
        if not has_valid_checksum(row["checksum"], row["key"], row["value"]):
            raise StoreDamaged(f"The entry {row['key']!r} in the store {path} does not match its checksum")
        meta[row["key"]] = row["value"]
    content = Content(meta=meta, identity=meta.pop(IDENTITY_KEY, ""))
    for row in tables[CLAIMS_TABLE]:
        if not has_valid_checksum(row["checksum"], row["uid"], row["document"]):
            raise StoreDamaged(f"The claim {row['uid']!r} in the store {path} does not match its checksum")
        record = record_of_document(row["document"])
        if wrong := find_inconsistency(row, device_rows.pop(row["uid"], ())):
            raise StoreDamaged(f"The store {path} contradicts itself about claim {row['uid']}: {wrong}")
        content.claims[record.uid] = record
    if device_rows:
        raise StoreDamaged(
            f"The store {path} holds devices of claims that it does not hold: {sorted(map(str, device_rows))}"
        )
    return content


def valid_content(connection: sqlite3.Connection) -> Content:
    """Return the rows of a damaged store that can be read and match their checksums.

    Raises NewerRelease for rows of a newer release, and OperationalError after a read error, because rows that were not
    read are not lost.

    Rows without a checksum are left out, because nothing shows that they are valid. The identity is left out too: a
    store that can have lost data gets a new one.
    """
    content = Content()
    for row in _readable_rows(connection, META_TABLE):
        if row.get("checksum") != NO_CHECKSUM and has_valid_checksum(
            row.get("checksum"), row.get("key"), row.get("value")
        ):
            content.meta[row["key"]] = row["value"]
    for key in (VERSION_KEY, IDENTITY_KEY):
        content.meta.pop(key, None)
    for row in _readable_rows(connection, CLAIMS_TABLE):
        if row.get("checksum") != NO_CHECKSUM and has_valid_checksum(
            row.get("checksum"), row.get("uid"), row.get("document")
        ):
            with contextlib.suppress(ValueError):
                content.claims[row["uid"]] = record_of_document(row["document"])
    return content


def _readable_rows(connection: sqlite3.Connection, table: str) -> Iterator[Row]:
    """Yield the rows of a table: from the start to the first unreadable row, and then from the end back to the last unreadable one."""
    connection.text_factory = lambda data: data.decode(errors="replace")  # invalid UTF-8 then fails the checksum
    try:
        for order in ("ASC", "DESC"):
            try:
                for row in connection.execute(f"SELECT * FROM {table} NOT INDEXED ORDER BY rowid {order}"):  # noqa: S608
                    yield dict(row)
            except (sqlite3.Error, ValueError) as error:  # ValueError: the name of a column is not UTF-8
                if is_read_error(error):
                    raise
    finally:
        connection.text_factory = str
