# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a store's tables hold: read in whatever form they are, brought forward to the present one, and held against their checksums.

Nothing here writes. A step makes the rows of form n + 1 out of those of form n and does nothing else; a store of an older
form is read, stepped forward in memory, examined like any other, and only then written anew beside the old one (store_files.py).

How a change of the tables comes into being:

1. Describe the new form in core/prepared.py, raise FORM there, and add the step from the former one to STEPS.
2. Can the former release read the new form, and see in what it wrote itself that something is missing? Then the schema
   version stays, and nodes go back and forth with their claims. Form 2 is of this kind.
3. Where it cannot, the schema version rises, but in two releases: the first one learns to read the new form and still
   writes the old one, the second one writes it. Else nobody could go back by one.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import AcceleratorError
from ..core.prepared import (
    CLAIMS_TABLE,
    DEVICES_TABLE,
    FORM,
    META_TABLE,
    NO_CHECKSUM,
    SCHEMA,
    SCHEMA_VERSION,
    checksum,
    contradiction,
    fits,
)
from .records import ClaimRecord, NewerRelease, OlderRelease, record_of_document

VERSION_KEY = "schema_version"
# A name of this store alone: one that was lost and made anew has another one.
IDENTITY_KEY = "identity"
# The oldest schema version that can be read here.
OLDEST_VERSION = 1

Row = dict[str, Any]
#: The rows of each table.
Tables = Mapping[str, list[Row]]
#: Makes the rows of the next form. It changes nothing that it is given.
Step = Callable[[Tables], Tables]


@dataclass(frozen=True)
class Content:
    """Everything in a store. ``identity`` is "" of one that has none: it was written by a release before, or is to be written."""

    claims: dict[str, ClaimRecord] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    identity: str = ""


class StoreDamaged(AcceleratorError):
    """The file is no store of this schema, or its content makes no sense. ``sound`` is what of it is as it was written."""

    default_code = "store-damaged"

    def __init__(self, message: str, *, sound: Content | None = None) -> None:
        super().__init__(message)
        self.sound = sound or Content()


@dataclass(frozen=True)
class Found:
    """A store's content, the form in which it was found, and whether rows of it have no checksum."""

    content: Content
    form: int
    unsigned: bool


def with_checksums(tables: Tables) -> Tables:
    """Form 1 to 2. What was written without a checksum is taken as it is: nobody can tell any more."""
    return {
        **tables,
        "meta": [{**row, "checksum": checksum(row["key"], row["value"])} for row in tables["meta"]],
        "claims": [{**row, "checksum": checksum(row["uid"], row["document"])} for row in tables["claims"]],
    }


#: By the form that it begins with.
STEPS: Mapping[int, Step] = {1: with_checksums}
#: The tables of each form in which a store can be found, as SQLite keeps them.
FORMER_SCHEMAS: Mapping[int, tuple[str, ...]] = {
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


def brought_forward(tables: Tables, form: int, steps: Mapping[int, Step], to: int) -> Tables:
    """Return the rows of an older form as those of form ``to``. Raises OlderRelease where no step begins with that form."""
    for number in range(form, to):
        if number not in steps:
            raise OlderRelease("The store's tables", form, f"{min(steps, default=to)} to {to}")
        tables = steps[number](tables)
    return tables


def form_of(connection: sqlite3.Connection) -> int:
    """Return the form that a store says it has. Those of form 1 said nothing."""
    return max(1, int(connection.execute("PRAGMA user_version").fetchone()[0]))


def refuse_other_versions(path: str, meta: Iterable[Row]) -> None:
    """Raise NewerRelease or OlderRelease for a schema version that this release cannot read, StoreDamaged for what is none.

    A version that does not fit its checksum is no other release's: a turned bit makes a 3 or a 9 of a 1. How this one row
    is written and held against its checksum stays the same in all forms to come.
    """
    row = next((row for row in meta if row["key"] == VERSION_KEY), None)
    if row is None or not str(row["value"]).isascii() or not str(row["value"]).isdigit():
        raise StoreDamaged(f"The store {path} has schema version {row and row['value']!r}; expected {SCHEMA_VERSION}")
    if not fits(row.get("checksum", NO_CHECKSUM), row["key"], row["value"]):
        raise StoreDamaged(f"The store {path} has a schema version, {row['value']}, that is not as it was written")
    version = int(row["value"])
    if version > SCHEMA_VERSION:
        raise NewerRelease(f"The store {path}", version, SCHEMA_VERSION)
    if version < OLDEST_VERSION:
        raise OlderRelease(f"The store {path}", version, f"{OLDEST_VERSION} to {SCHEMA_VERSION}")


def read(connection: sqlite3.Connection, path: str) -> Found:
    """Read and examine a store. Raises StoreDamaged with what of it is sound, NewerRelease, OlderRelease, OperationalError."""
    try:
        return _read(connection, path)
    except (StoreDamaged, sqlite3.DatabaseError, ValueError, KeyError) as error:
        if isinstance(error, sqlite3.OperationalError) and not of_content(error):
            raise
        message = error.message if isinstance(error, StoreDamaged) else f"The store {path} cannot be read: {error}"
        raise StoreDamaged(message, sound=sound_content(connection)) from error


#: What an operational error says that is the content's, and not the disk's.
_OF_CONTENT = ("no such", "Could not decode to UTF-8", "unsupported file format", "malformed")


def of_content(error: sqlite3.OperationalError) -> bool:
    """Whether an error is the content's: neither another try nor more room helps against it."""
    return any(words in str(error) for words in _OF_CONTENT)


def _read(connection: sqlite3.Connection, path: str) -> Found:
    # Not quick_check: it passes over an index that has lost a row, which is then neither found nor removed.
    check = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if check != "ok":
        raise StoreDamaged(f"The store {path} is damaged: {check}")
    meta = _rows(connection, "meta")
    refuse_other_versions(path, meta)
    form = form_of(connection)
    if lacking := _lacking(connection, form):
        raise StoreDamaged(f"The store {path} is of form {form} and lacks what that has: {lacking}")
    tables = {"meta": meta, **{name: _rows(connection, name) for name in (CLAIMS_TABLE, DEVICES_TABLE)}}
    tables = dict(brought_forward(tables, form, STEPS, FORM))
    unsigned = any(row["checksum"] == NO_CHECKSUM for name in (META_TABLE, CLAIMS_TABLE) for row in tables[name])
    return Found(_examined(tables, path), form, unsigned)


def _rows(connection: sqlite3.Connection, table: str) -> list[Row]:
    return [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]  # noqa: S608


def _lacking(connection: sqlite3.Connection, form: int) -> str:
    """Return the first statement of a form's schema that a store was not made with; "" where none lacks, or nobody knows."""
    wanted = SCHEMA if form == FORM else FORMER_SCHEMAS.get(form, ())
    there = {" ".join(str(row[0]).split()) for row in connection.execute("SELECT sql FROM sqlite_master")}
    return next((text for text in (" ".join(each.split()) for each in wanted) if text not in there), "")


def _examined(tables: Tables, path: str) -> Content:
    """Return the content of a store's rows in the present form. Raises StoreDamaged, ValueError, NewerRelease."""
    held: dict[str, list[Row]] = {}
    for row in tables[DEVICES_TABLE]:
        held.setdefault(row["claim_uid"], []).append(row)
    meta = {}
    for row in tables[META_TABLE]:
        if not fits(row["checksum"], row["key"], row["value"]):
            raise StoreDamaged(f"The store {path} holds an entry, {row['key']!r}, that is not as it was written")
        meta[row["key"]] = row["value"]
    content = Content(meta=meta, identity=meta.pop(IDENTITY_KEY, ""))
    for row in tables[CLAIMS_TABLE]:
        if not fits(row["checksum"], row["uid"], row["document"]):
            raise StoreDamaged(f"The store {path} holds a claim, {row['uid']!r}, that is not as it was written")
        record = record_of_document(row["document"])
        if wrong := contradiction(row, held.pop(row["uid"], ())):
            raise StoreDamaged(f"The store {path} contradicts itself about claim {row['uid']}: {wrong}")
        content.claims[record.uid] = record
    if held:
        raise StoreDamaged(f"The store {path} holds devices of claims that it does not hold: {sorted(map(str, held))}")
    return content


def sound_content(connection: sqlite3.Connection) -> Content:
    """Return what of a damaged store can be read and fits its checksum. Raises NewerRelease for what a newer release wrote.

    A row without a checksum is not among it: in a file that is damaged nothing speaks for it. Nor is the identity: what may have lost
    something is another store.
    """
    content = Content()
    for row in _readable_rows(connection, META_TABLE):
        if row.get("checksum") != NO_CHECKSUM and fits(row.get("checksum"), row.get("key"), row.get("value")):
            content.meta[row["key"]] = row["value"]
    for key in (VERSION_KEY, IDENTITY_KEY):
        content.meta.pop(key, None)
    for row in _readable_rows(connection, CLAIMS_TABLE):
        if row.get("checksum") != NO_CHECKSUM and fits(row.get("checksum"), row.get("uid"), row.get("document")):
            with contextlib.suppress(ValueError):
                content.claims[row["uid"]] = record_of_document(row["document"])
    return content


def _readable_rows(connection: sqlite3.Connection, table: str) -> Iterator[Row]:
    """The rows of a table up to the first place that cannot be read, and from the end back to the last one."""
    connection.text_factory = lambda data: data.decode(errors="replace")  # what is no text then fits no checksum
    try:
        for order in ("ASC", "DESC"):
            with contextlib.suppress(sqlite3.Error, ValueError):  # the name of a column may be no text either
                for row in connection.execute(f"SELECT * FROM {table} NOT INDEXED ORDER BY rowid {order}"):  # noqa: S608
                    yield dict(row)
    finally:
        connection.text_factory = str
