# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The driver's memory of claims: SQLite, written ahead and synced, so that a power cut loses nothing it answered for.

A claim is written as *preparing* before its first side effect and as *prepared* after its last one. One thread writes;
changes that wait while it syncs go into its next transaction together, so that 64 claims at once cost a few syncs and
not 128. Reads are served from memory: the store is the only writer of its file, which a lock guards elsewhere.

A whole store, new or rebuilt, is made beside the old one and takes its place when it is complete and synced (_replace):
at no moment is there an empty database where claims were.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..core.errors import AcceleratorError
from ..core.prepared import DEVICE_COLUMNS, SCHEMA, SCHEMA_VERSION
from .records import ClaimRecord, NewerRelease, record_of_document

LOG = logging.getLogger(__name__)

# Changes in one transaction. More would make the first of them wait for the last one's statements.
GROUP_LIMIT = 128
# What SQLite keeps beside a database.
COMPANIONS = ("-wal", "-shm", "-journal")


class StoreError(AcceleratorError):
    """The store could not be written: disk full, read-only, I/O error."""

    default_code = "store-unwritable"


class StoreDamaged(AcceleratorError):
    """The file is no store of this schema, or its content makes no sense."""

    default_code = "store-damaged"


@dataclass(frozen=True)
class Change:
    """What one transaction does: put a record, delete one, and set (or with None delete) values by key."""

    put: ClaimRecord | None = None
    delete: str | None = None
    meta: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Content:
    """Everything in a store."""

    claims: dict[str, ClaimRecord]
    meta: dict[str, str]


@dataclass
class _Pending:
    change: Change
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class Store:
    """The claims that are prepared or being prepared on this node.

    ``claims`` and ``meta`` are the committed content; read them on the event loop, change them through commit() only.
    ``former`` is the name under which a damaged store was set aside when this one was rebuilt.
    """

    def __init__(
        self, path: str, connection: sqlite3.Connection, content: Content, *, former: str | None = None
    ) -> None:
        self.path = path
        self.former = former
        self.claims: dict[str, ClaimRecord] = dict(content.claims)
        self.meta: dict[str, str] = dict(content.meta)
        self._connection = connection
        self._shadow = Content(dict(content.claims), dict(content.meta))
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._ended: BaseException | None = None
        self._over = threading.Event()  # nothing is taken from the queue any more
        # Told how each transaction ended, and how long it took, on the thread that writes.
        self.observer: Callable[[str, float], None] = lambda _outcome, _seconds: None
        self._thread = threading.Thread(target=self._write_loop, name="store-writer", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: str) -> Store:
        """Open or make the store. Raises StoreDamaged, NewerRelease, or StoreError when the folder cannot be written.

        Only where there is no file a new store is made; an empty file is a damaged store.
        """
        if not os.path.lexists(path):
            _replace(path, Content({}, {}))
        elif not os.path.isfile(path):  # noqa: PTH113  what SQLite would call unopenable for ever
            raise StoreDamaged(f"The store {path} is no file")
        connection = _connect(path)
        try:
            content = _read(connection, path)
        except BaseException:
            connection.close()
            raise
        return cls(path, connection, content)

    @classmethod
    def rebuild(cls, path: str, records: Iterable[ClaimRecord], meta: Mapping[str, str]) -> Store:
        """Make a new store that holds the records; what is at the path is set aside. Raises StoreError.

        An interrupted one has changed nothing, or has left no file at the path, or is complete: do it again.
        """
        former = _replace(path, Content({record.uid: record for record in records}, dict(meta)))
        connection = _connect(path)
        return cls(path, connection, _read(connection, path), former=former)

    async def commit(self, change: Change) -> None:
        """Write one change and return when it is on disk. Raises StoreError; the change has then not been made.

        Cancelling the caller does not undo a change that is under way.
        """
        loop = asyncio.get_running_loop()
        pending = _Pending(change, loop, loop.create_future())
        self._queue.put(pending)
        if self._over.is_set():  # nobody will take it: closed, or the thread has come to an unforeseen end
            self._refuse_queued()
        await pending.future

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join(timeout=10)
        self._connection.close()

    def _write_loop(self) -> None:
        try:
            self._write_groups()
        except BaseException as error:
            self._ended = error
            LOG.critical("the store %s can no longer be written", self.path, exc_info=True)
        self._over.set()  # before what waits is refused: who comes later sees it, though the thread still lives
        self._refuse_queued()

    def _refuse_queued(self) -> None:
        """Fail what nobody will write any more."""
        reason = repr(self._ended) if self._ended else "it is closed"
        left: list[_Pending] = []
        with contextlib.suppress(queue.Empty):
            while True:
                pending = self._queue.get_nowait()
                if pending is not None:
                    left.append(pending)
        self._answer(left, StoreError(f"The store {self.path} can no longer be written: {reason}"))

    def _write_groups(self) -> None:
        while True:
            first = self._queue.get()
            if first is None:
                return
            group, last = [first], False
            while len(group) < GROUP_LIMIT:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    last = True
                    break
                group.append(following)
            self._write_group(group)
            if last:
                return

    def _write_group(self, group: list[_Pending]) -> None:
        began, outcome = time.perf_counter(), "failure"
        try:
            try:
                self._write_now([pending.change for pending in group])
                outcome = "success"
            finally:
                self.observer(outcome, time.perf_counter() - began)
        except AcceleratorError as error:
            self._answer(group, error)
        except Exception as error:
            # A change that cannot be written down, whatever is wrong with it, is not its neighbours' fault.
            if len(group) == 1:
                LOG.exception("a change could not be written to the store %s", self.path)
                self._answer(group, StoreError(f"The store {self.path} could not write a change: {error!r}"))
                return
            for pending in group:
                self._write_group([pending])
        except BaseException as error:
            self._answer(group, StoreError(f"The store {self.path} can no longer be written: {error!r}"))
            raise
        else:
            self._answer(group, None)

    def _answer(self, group: Iterable[_Pending], error: AcceleratorError | None) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Pending]] = {}
        for pending in group:
            by_loop.setdefault(pending.loop, []).append(pending)
        for loop, members in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._settle, members, error)

    def _settle(self, group: list[_Pending], error: AcceleratorError | None) -> None:
        for pending in group:
            if error is None:
                _apply(pending.change, self.claims, self.meta)
            if pending.future.done():
                continue
            if error is None:
                pending.future.set_result(None)
            else:
                pending.future.set_exception(StoreError(error.message, hint=error.hint))

    def _write_now(self, changes: list[Change]) -> None:
        try:
            self._transaction(changes)
        except sqlite3.DatabaseError as error:
            if isinstance(error, (sqlite3.OperationalError, sqlite3.IntegrityError)) and "malformed" not in str(error):
                raise _unwritable(self.path, error) from error
            self._start_again(error, changes)
        for change in changes:
            _apply(change, self._shadow.claims, self._shadow.meta)

    def _transaction(self, changes: Iterable[Change]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                _write(self._connection, change)
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def _start_again(self, error: sqlite3.DatabaseError, changes: list[Change]) -> None:
        # The file was damaged while it was open. Memory holds everything that was committed: write it anew.
        LOG.error("the store %s is damaged (%s); it is set aside and written anew from memory", self.path, error)
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        content = Content(dict(self._shadow.claims), dict(self._shadow.meta))
        for change in changes:
            _apply(change, content.claims, content.meta)
        former = _replace(self.path, content)
        self._connection = _connect(self.path)
        LOG.warning("the store %s was written anew; the damaged one is %s", self.path, former)


def refuse_newer(path: str) -> None:
    """See whether this release could read a store, without changing it: another instance may have it open.

    Raises NewerRelease. Whatever else is wrong with it is found, and mended, by whoever opens it.
    """
    if not os.path.lexists(path):
        return
    with (
        contextlib.suppress(sqlite3.Error, ValueError),
        contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=5)) as connection,
    ):
        connection.execute("BEGIN")
        _refuse_newer(path, dict(connection.execute("SELECT key, value FROM meta")).get("schema_version", "none"))
        for (document,) in connection.execute("SELECT document FROM claims"):
            record_of_document(document)


def _refuse_newer(path: str, version: str) -> None:
    if version.isdigit() and int(version) > SCHEMA_VERSION:
        raise NewerRelease(f"The store {path}", int(version), SCHEMA_VERSION)


def _replace(path: str, content: Content) -> str | None:
    """Put a new store with this content where the old one is, and return the name under which that was set aside.

    The new one is complete and on the disk before the old one is touched, and the old one's log, which SQLite would
    take for the new one's, is away before the new one comes. Raises StoreError.
    """
    target, new = Path(path), f"{path}.new"
    try:
        target.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        _remove_database(new)
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            _fill(connection, content)
        _sync(new)
        former = set_aside(path)
        _sync(str(target.parent))
        Path(new).rename(target)
        _sync(str(target.parent))
    except (sqlite3.Error, OSError) as error:
        with contextlib.suppress(OSError):
            _remove_database(new)
        raise _unwritable(path, error) from error
    return former


def _fill(connection: sqlite3.Connection, content: Content) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        connection.execute(statement)
    for record in content.claims.values():
        _write(connection, Change(put=record))
    _write(connection, Change(meta={**content.meta, "schema_version": str(SCHEMA_VERSION)}))
    connection.execute("COMMIT")


def _remove_database(path: str) -> None:
    for suffix in ("", *COMPANIONS):
        with contextlib.suppress(FileNotFoundError):
            Path(path + suffix).unlink()


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: str) -> str | None:
    """Rename a damaged store, with its log files, out of the way and return its new name; None if there was none."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    target: str | None = None
    for number in range(1000):
        target = f"{path}.damaged-{stamp}" + (f"-{number}" if number else "")
        if not Path(target).exists():
            break
    found = False
    # The database goes first: without its log it would be a whole one that lacks what was written last.
    for suffix in ("", *COMPANIONS):
        with contextlib.suppress(FileNotFoundError):
            Path(path + suffix).rename(f"{target}{suffix}")
            found = True
    return target if found else None


def _connect(path: str) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    except sqlite3.Error as error:
        raise _unwritable(path, error) from error
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except sqlite3.OperationalError as error:
        connection.close()
        raise _unwritable(path, error) from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise StoreDamaged(f"The store {path} is no database: {error}") from error
    return connection


#: What an operational error says that is the content's, and not the disk's.
_OF_CONTENT = ("no such", "Could not decode to UTF-8")


def _read(connection: sqlite3.Connection, path: str) -> Content:
    try:
        check = connection.execute("PRAGMA quick_check").fetchone()[0]
        if check != "ok":
            raise StoreDamaged(f"The store {path} is damaged: {check}")
        meta = {row["key"]: row["value"] for row in connection.execute("SELECT key, value FROM meta")}
        version = meta.get("schema_version", "none")
        _refuse_newer(path, version)
        if version != str(SCHEMA_VERSION):
            raise StoreDamaged(f"The store {path} has schema version {version}; this release writes {SCHEMA_VERSION}")
        claims = {}
        for row in connection.execute("SELECT uid, state, document FROM claims"):
            record = record_of_document(row["document"])
            if (record.uid, record.state) != (row["uid"], row["state"]):
                raise StoreDamaged(f"The store {path} contradicts itself about claim {row['uid']}")
            claims[record.uid] = record
    except sqlite3.OperationalError as error:
        if not any(words in str(error) for words in _OF_CONTENT):
            raise _unwritable(path, error) from error
        raise StoreDamaged(f"The store {path} lacks a table or a column, or holds what is no text: {error}") from error
    except (sqlite3.DatabaseError, ValueError) as error:
        raise StoreDamaged(f"The store {path} cannot be read: {error}") from error
    return Content(claims, meta)


def _write(connection: sqlite3.Connection, change: Change) -> None:
    for uid in filter(None, (change.delete, change.put.uid if change.put else None)):
        connection.execute("DELETE FROM claims WHERE uid = ?", (uid,))
    if change.put is not None:
        record = change.put
        connection.execute(
            "INSERT INTO claims (uid, namespace, name, state, boot_id, created_at, document) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                record.uid,
                record.namespace,
                record.name,
                record.state,
                record.boot_id,
                record.created_at,
                record.to_document(),
            ),
        )
        connection.executemany(_INSERT_DEVICE, [_device_row(record.uid, vars(device)) for device in record.devices])
    for key, value in change.meta.items():
        if value is None:
            connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, value))


_INSERT_DEVICE = f"INSERT INTO devices ({', '.join(DEVICE_COLUMNS)}) VALUES ({', '.join('?' * len(DEVICE_COLUMNS))})"  # noqa: S608


def _device_row(claim_uid: str, device: Mapping[str, Any]) -> tuple[Any, ...]:
    values = {**device, "claim_uid": claim_uid}
    return tuple(values[column] for column in DEVICE_COLUMNS)


def _apply(change: Change, claims: dict[str, ClaimRecord], meta: dict[str, str]) -> None:
    if change.delete is not None:
        claims.pop(change.delete, None)
    if change.put is not None:
        claims[change.put.uid] = change.put
    for key, value in change.meta.items():
        if value is None:
            meta.pop(key, None)
        else:
            meta[key] = value


def _unwritable(path: str, error: BaseException) -> StoreError:
    return StoreError(
        f"The store {path} cannot be used: {error}",
        hint="Check that its folder exists, is writable and that the disk is not full.",
    )
