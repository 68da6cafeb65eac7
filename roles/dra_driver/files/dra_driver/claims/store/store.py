# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Store the driver's claims in SQLite, with a write-ahead log and syncs: no answered claim is lost in a power cut.

A claim is written in the state *preparing* before its first side effect, and as *prepared* after the last one.

One thread writes at a time. Changes that arrive during a sync share the next transaction, so 64 concurrent claims need
only a few syncs. A thread that calls ``write`` or ``begin`` writes its own change, together with the queued changes. The
store's own thread writes the changes that the event loop queues with ``commit``, and waits for the disk after ``begin``.

Reads are served from memory. The store is the only writer of its file; the lock of the driver's instance ensures that
(``lock_instance`` in kubelet/sockets.py). The content in memory is replaced, never modified, so each thread reads a
consistent state.

Each row of the tables ``claims`` and ``meta`` has a checksum (core/store/prepared_claims.py), which is verified when the store is
opened: SQLite detects damaged pages, but not a changed bit in a value. A store with a row that does not match its
checksum is damaged, and is rebuilt from the valid rows and from the claims' CDI files. schema.py migrates a store of an
older form. files.py writes a complete new store next to the old one, and replaces the old one with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ...core.errors import AcceleratorError
from ...core.store.prepared_claims import FORM
from .files import (
    StoreError,
    connect,
    connect_read_only,
    delete_new_store,
    disable_copy_on_write,
    exists,
    is_file,
    refuse_full_disk,
    refuse_unknown_format,
    remove_old_backups,
    replace_older_form,
    replace_store,
    reserve_log,
    store_error,
    sync_log,
    use_new_store,
)
from .records import ClaimRecord
from .schema import Content, StoreDamaged, read
from .tables import Change, add_checksums, add_identity, apply_to_content, create_tables, write

LOG = logging.getLogger(__name__)

# The maximum number of changes in one transaction. With more, the first change would wait for the statements of the
# last one.
GROUP_LIMIT = 128
# Write the log back to the database after this number of pages, as SQLite's automatic checkpoint does.
CHECKPOINT_PAGES = 1000
# The maximum time that ``close`` waits for running writes.
CLOSE_SECONDS = 10.0
# The reason for the replacement of a store after its log could not be synced.
LOST_LOG = "the disk failed to write its log"
# With FULL, each commit waits for the disk. With NORMAL, only the next commit with FULL or a sync does.
_DURABLE, _NOT_DURABLE = "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL"


class PendingChange:
    """A change to write. ``future`` is set if a caller on an event loop waits for it.

    ``began`` is the start time of the transaction (``time.perf_counter``) if the change is in SQLite's log, but not on
    disk yet.
    """

    def __init__(self, change: Change, future: asyncio.Future[None] | None = None) -> None:
        self.change = change
        self.future = future
        self.began = 0.0
        self.error: AcceleratorError | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def answer(self, error: AcceleratorError | None) -> None:
        """Wake the thread that waits for this change."""
        self.error = error
        self._answered.release()

    def wait(self) -> None:
        """Block the thread until the change is written. Raises StoreError."""
        with self._answered:
            if self.error is not None:
                raise StoreError(self.error.message, hint=self.error.hint)


class Store:
    """The claims of this node that are prepared or being prepared.

    ``claims`` and ``meta`` are the committed content at the time of reading. Only commit(), begin(), and write() change
    it. ``previous`` is the path of the damaged store that this one replaced, if it was rebuilt. ``identity`` is unique
    for each store: while it stays the same, no record was lost.
    """

    def __init__(
        self, path: str, connection: sqlite3.Connection, content: Content, *, previous: str | None = None
    ) -> None:
        self.path = path
        self.previous = previous
        self.identity = content.identity
        self._content = Content(dict(content.claims), dict(content.meta))
        self._connection = connection
        self._waits_for_disk = True
        self._pages = 0  # estimated pages in SQLite's log since the last checkpoint
        self._log_is_lost = False  # part of SQLite's log is not on disk, so no later part is durable
        self._queue: queue.SimpleQueue[PendingChange] = queue.SimpleQueue()
        self._unsynced: queue.SimpleQueue[PendingChange] = queue.SimpleQueue()
        #: The connection with reserved disk space for its log.
        self._reserved = connection if reserve_log(path) else None
        self._log: tuple[sqlite3.Connection, int] | None = None  # a connection and its log, for the store's own thread
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there is work. False: end the thread
        self._writing = threading.Lock()
        self._writer_error: BaseException | None = None
        self._writer_ended = threading.Event()  # set when no thread reads the queue any more
        # Called on the writing thread after each transaction, with the outcome and the duration in seconds.
        self.observer: Callable[[str, float], None] = lambda _outcome, _seconds: None
        # Called on the writing thread, with the error, if a transaction could not be written.
        self.report_failure: Callable[[AcceleratorError], None] = lambda _error: None
        # Called on the writing thread, with a message, if a new store replaced a damaged one.
        self.report_replacement: Callable[[str], None] = lambda _message: None
        self._thread = threading.Thread(target=self._write_loop, name="store-writer", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: str) -> Store:
        """Open the store. Create it if it does not exist, and migrate an older form.

        Raises StoreDamaged, NewerRelease or OlderRelease, or StoreError when it cannot be written. A new store is
        created only if there is neither a file nor the new store of an interrupted rebuild. An empty file is a damaged
        store, and the complete new store of an interrupted rebuild replaces a damaged one.
        """
        disable_copy_on_write(path)
        if use_new_store(path):
            pass
        elif not exists(path):
            replace_store(path, partial(create_tables, Content()))
        elif not is_file(path):  # SQLite's error for it looks temporary
            raise StoreDamaged(f"The store {path} is no file")
        delete_new_store(path)
        refuse_unknown_format(path)
        sync_log(path)
        connection = connect(path)
        try:
            found = read(connection, path)
            if found.form < FORM:
                backup = replace_older_form(path, connection, found.form, partial(create_tables, found.content))
                connection = connect(path)
                LOG.info(
                    "the store %s was migrated from form %s to %s; the backup is %s", path, found.form, FORM, backup
                )
                found = read(connection, path)
                remove_old_backups(path)
            elif found.unsigned:
                add_checksums(connection)
            identity = found.content.identity or add_identity(connection)
        except (sqlite3.Error, OSError) as error:
            connection.close()
            raise store_error(path, error) from error
        except BaseException:
            connection.close()
            raise
        return cls(path, connection, dataclasses.replace(found.content, identity=identity))

    @classmethod
    def rebuild(cls, path: str, records: Iterable[ClaimRecord], meta: Mapping[str, str]) -> Store:
        """Create a new store with the records, and set the file at the path aside. Raises StoreError.

        After an interruption, either the old store is unchanged, or ``open`` uses the new store. The complete new store
        of an interrupted rebuild is opened instead: it has all data that was recovered.
        """
        if use_new_store(path):
            return cls.open(path)
        content = Content({record.uid: record for record in records}, dict(meta))
        previous = replace_store(path, partial(create_tables, content))
        store = cls.open(path)
        store.previous = previous
        return store

    @property
    def claims(self) -> Mapping[str, ClaimRecord]:
        """Return the claims by UID."""
        return self._content.claims

    @property
    def meta(self) -> Mapping[str, str]:
        """Return the values by key."""
        return self._content.meta

    async def commit(self, change: Change) -> None:
        """Write one change and return when it is on disk. Raises StoreError; then the store does not have the change.

        If the caller is canceled, the change is written nevertheless.
        """
        self._refuse_new_claim(change)
        future = asyncio.get_running_loop().create_future()
        self._queue_change(PendingChange(change, future))
        await future

    def begin(self, change: Change) -> PendingChange:
        """Write one change and return before it is on disk. Do not call this on an event loop.

        ``wait`` of the returned object returns when the change is on disk, or raises StoreError. After an error the
        change can be in the store nevertheless, and the caller must revert it.
        """
        self._refuse_new_claim(change)
        pending = PendingChange(change)
        self._write_or_queue(pending, wait_for_sync=False)
        return pending

    def _refuse_new_claim(self, change: Change) -> None:
        """Raise StoreError for a new claim if the disk is full, because the reserved space is for releases."""
        if change.put is not None and change.put.uid not in self.claims:
            refuse_full_disk(self.path)

    def _queue_change(self, pending: PendingChange) -> None:
        """Queue a change for the store's own thread."""
        self._queue.put(pending)
        self._wake.put(True)
        if self._writer_ended.is_set():  # the thread has ended: the store is closed, or writing failed
            self._fail_queued()

    def _write_or_queue(self, pending: PendingChange, *, wait_for_sync: bool) -> None:
        """Write a change and the queued ones, or queue it if another thread is writing.

        With ``wait_for_sync``, a written change is on disk at return.
        """
        if self._writer_ended.is_set() or not self._writing.acquire(blocking=False):
            self._queue_change(pending)
            return
        try:
            if self._writer_ended.is_set():  # closed since the first check
                self._queue_change(pending)
            else:
                self._write_group([*self._next_group(), pending], wait_for_sync=wait_for_sync)
        except BaseException as error:  # noqa: BLE001  the waiting callers get the error
            self._give_up(error)
        finally:
            self._writing.release()
        if not self._queue.empty():  # changes that were queued since then are written by the store's own thread
            self._wake.put(True)

    def write(self, change: Change) -> None:
        """Write one change and return when it is on disk.

        Do not call this on an event loop. Raises StoreError, as ``commit`` does.
        """
        self._refuse_new_claim(change)
        pending = PendingChange(change)
        self._write_or_queue(pending, wait_for_sync=True)
        pending.wait()

    def close(self) -> None:
        """Write the queued changes and close the file."""
        self._wake.put(False)
        self._thread.join(timeout=CLOSE_SECONDS)
        is_free = self._writing.acquire(timeout=CLOSE_SECONDS)
        self._connection.close()
        if is_free:
            self._writing.release()

    def _write_loop(self) -> None:
        try:
            while self._wake.get():
                self._sync()
                self._write_queued()
                if self._reserved is not self._connection:
                    with self._writing:
                        self._reserved = self._connection if reserve_log(self.path) else None
            self._sync()
            self._write_queued()
        except BaseException as error:  # noqa: BLE001  the waiting callers get the error
            self._give_up(error)
        self._writer_ended.set()  # set first, so that changes queued from now on are refused as well
        self._fail_queued()
        self._close_log_file()

    def _give_up(self, error: BaseException) -> None:
        self._writer_error = error
        LOG.critical("the store %s can no longer be written", self.path, exc_info=error)
        self._writer_ended.set()
        self._fail_queued()
        self.report_failure(
            StoreError(f"The store {self.path} can no longer be written: {error!r}", hint="Restart the driver.")
        )
        self._wake.put(False)

    def _fail_queued(self) -> None:
        """Fail all changes in the queues, because no thread will write them."""
        reason = repr(self._writer_error) if self._writer_error else "it is closed"
        left = [*_take_queued(self._queue), *_take_queued(self._unsynced)]
        self._notify_callers(left, StoreError(f"The store {self.path} can no longer be written: {reason}"))

    def _write_queued(self) -> None:
        while not self._queue.empty():
            with self._writing:
                self._write_group(self._next_group())

    def _next_group(self) -> list[PendingChange]:
        return _take_queued(self._queue, GROUP_LIMIT)

    def _write_group(self, group: list[PendingChange], *, wait_for_sync: bool = True) -> None:
        """Write changes in one transaction and notify their callers.

        Without ``wait_for_sync``, the callers of durable changes are notified after the next sync.
        """
        if not group:
            return
        began, outcome = time.perf_counter(), "failure"
        unsynced = [] if wait_for_sync else [pending for pending in group if pending.change.durable]
        try:
            try:
                self._write_changes(
                    [pending.change if wait_for_sync else pending.change.without_sync() for pending in group]
                )
                outcome = "success"
            finally:
                if not unsynced or outcome == "failure":
                    self.observer(outcome, time.perf_counter() - began)
        except AcceleratorError as error:
            self._notify_callers(group, error)
            self.report_failure(error)
        except Exception as error:
            # One invalid change must not fail the other changes, so each is written alone.
            if len(group) == 1:
                LOG.exception("a change could not be written to the store %s", self.path)
                self._notify_callers(group, StoreError(f"The store {self.path} could not write a change: {error!r}"))
                return
            for position, pending in enumerate(group):
                try:
                    self._write_group([pending], wait_for_sync=wait_for_sync)
                except BaseException as unforeseen:
                    left = StoreError(f"The store {self.path} can no longer be written: {unforeseen!r}")
                    self._notify_callers(group[position + 1 :], left)
                    raise
        except BaseException as error:
            self._notify_callers(group, StoreError(f"The store {self.path} can no longer be written: {error!r}"))
            raise
        else:
            self._notify_callers([pending for pending in group if pending not in unsynced], None)
            self._queue_for_sync(unsynced, began)
            # The next change is usually written without a wait for the disk, so that mode is set here and not in its
            # transaction. If this fails, the next transaction sets it and reports the error. SQLite's message can
            # contain bytes that are not UTF-8.
            with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):
                self._wait_for_disk(False)

    def _queue_for_sync(self, unsynced: Sequence[PendingChange], began: float) -> None:
        """Queue durable changes for the store's own thread, which syncs the log and notifies the callers."""
        for pending in unsynced:
            pending.began = began
            self._unsynced.put(pending)
        if unsynced:
            self._wake.put(True)
            if self._writer_ended.is_set():
                self._fail_queued()

    def _sync(self) -> None:
        """Sync SQLite's log and notify the callers that wait only for that. Called on the store's own thread."""
        group = _take_queued(self._unsynced)
        if not group:
            return
        try:
            error = self._wait_for_log()
            now, outcome = time.perf_counter(), "failure" if error else "success"
            for began in sorted({pending.began for pending in group}):
                self.observer(outcome, now - began)
        except BaseException as unforeseen:
            self._notify_callers(group, StoreError(f"The store {self.path} can no longer be written: {unforeseen!r}"))
            raise
        self._notify_callers(group, error)
        if error is not None:
            self.report_failure(error)

    def _wait_for_log(self) -> AcceleratorError | None:
        """Sync SQLite's log to disk. Return the error if that fails.

        After a failed sync the kernel treats the lost pages as written, and the next sync succeeds. So only a new store
        is durable.
        """
        if not self._log_is_lost:
            try:
                os.fdatasync(self._log_file())
            except FileNotFoundError:
                pass  # another thread has replaced the store from memory, and the new store is on disk
            except OSError as problem:
                self._log_is_lost = True
                return store_error(self.path, problem)
        if self._log_is_lost:  # a commit of another thread can have failed just now
            try:
                with self._writing:
                    if self._log_is_lost:
                        self._replace_from_memory(LOST_LOG, [])
            except AcceleratorError as error:
                return error
        return None

    def _log_file(self) -> int:
        """Return a file descriptor of the current connection's log.

        SQLite names the log after the resolved path. Raises OSError.
        """
        if self._log is None or self._log[0] is not self._connection:
            self._close_log_file()
            connection = self._connection
            descriptor = os.open(f"{os.path.realpath(self.path)}-wal", os.O_RDONLY | os.O_CLOEXEC)
            self._log = (connection, descriptor)
        return self._log[1]

    def _close_log_file(self) -> None:
        if self._log is not None:
            os.close(self._log[1])
            self._log = None

    def _notify_callers(self, group: Iterable[PendingChange], error: AcceleratorError | None) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for pending in group:
            if pending.future is not None:
                by_loop.setdefault(pending.future.get_loop(), []).append(pending.future)
        for loop, futures in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed, so no caller waits there
                loop.call_soon_threadsafe(_set_results, futures, error)
        for pending in group:
            pending.answer(error)

    def _write_changes(self, changes: list[Change]) -> None:
        if self._log_is_lost:
            self._replace_from_memory(LOST_LOG, changes)
            return
        try:
            self._transaction(changes)
            self._checkpoint(changes)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if isinstance(error, (sqlite3.OperationalError, sqlite3.IntegrityError)) and "malformed" not in str(error):
                self._log_is_lost = self._log_is_lost or "disk I/O error" in str(error)
                raise store_error(self.path, error) from error
            self._replace_from_memory(f"the file was damaged while it was open ({error})", changes)

    def _content_with(self, changes: Iterable[Change]) -> Content:
        """Return the content in memory with the changes applied."""
        content = Content(dict(self.claims), dict(self.meta), self.identity)
        for change in changes:
            apply_to_content(change, content.claims, content.meta)
        return content

    def _transaction(self, changes: Sequence[Change]) -> None:
        self._wait_for_disk(any(change.durable for change in changes))
        content = Content(dict(self.claims), dict(self.meta))
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                write(self._connection, change, content.claims)
                apply_to_content(change, content.claims, content.meta)
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        self._content = content

    def _checkpoint(self, changes: Iterable[Change]) -> None:
        """Write SQLite's log back to the database if it is long. The changes are committed in any case.

        SQLite syncs the log first. After an I/O error, a part of the log can be lost.
        """
        self._pages += sum(map(_pages_of, changes))
        if self._pages < CHECKPOINT_PAGES:
            return
        try:
            _busy, logged, written = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.OperationalError as error:
            self._log_is_lost = self._log_is_lost or "disk I/O error" in str(error)
            level = logging.WARNING if self._log_is_lost else logging.DEBUG  # a full disk is reported by new claims
            LOG.log(level, "the log of the store %s cannot be written back to the database: %s", self.path, error)
        else:
            if logged == written:  # else another program reads, and the next transaction tries again
                self._pages = 0

    def _wait_for_disk(self, durable: bool) -> None:
        """Set whether commits wait for the disk from now on. SQLite's log stays complete and in order in both cases."""
        if durable != self._waits_for_disk:
            self._connection.execute(_DURABLE if durable else _NOT_DURABLE)
            self._waits_for_disk = durable

    def _replace_from_memory(self, reason: str, changes: list[Change]) -> None:
        """Replace the store by a new store with the content in memory, which has all committed changes, and with ``changes``."""
        LOG.error("the store %s is replaced from memory: %s", self.path, reason)
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        content = self._content_with(changes)
        previous = replace_store(self.path, partial(create_tables, content))
        self._connection = connect(self.path)
        self._waits_for_disk, self._log_is_lost, self._content, self._pages = True, False, content, 0
        LOG.warning("the store %s was replaced; the previous store is %s", self.path, previous)
        self.report_replacement(
            f"The store {self.path} was replaced from memory: {reason}. No data is lost. The previous store is "
            f"{previous or 'lost'}. Check the kernel log for faults of the disk"
        )


def _pages_of(change: Change) -> int:
    """Estimate how many pages SQLite writes to its log for a change. Each table, index, and large value adds pages."""
    size = sum(len(value or "") for value in change.meta.values())
    devices = len(change.put.devices) if change.put is not None else 0
    return 12 + devices + size // 4096


def _take_queued(waiting: queue.SimpleQueue[PendingChange], at_most: int = sys.maxsize) -> list[PendingChange]:
    """Remove the currently queued changes from the queue, up to ``at_most``, and return them."""
    found: list[PendingChange] = []
    with contextlib.suppress(queue.Empty):  # another thread can read the queue as well
        while len(found) < at_most and not waiting.empty():
            found.append(waiting.get_nowait())
    return found


def _set_results(futures: Iterable[asyncio.Future[None]], error: AcceleratorError | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(StoreError(error.message, hint=error.hint))


def refuse_other_releases(path: str) -> None:
    """Check that this release can read a store, without changing it: another instance may use it.

    Raises NewerRelease or OlderRelease. Other problems are ignored: the instance that opens the store finds and repairs
    them.
    """
    if not exists(path):
        return
    with (
        contextlib.suppress(sqlite3.Error, ValueError, StoreDamaged),
        contextlib.closing(connect_read_only(path)) as connection,
    ):
        connection.execute("BEGIN")
        read(connection, path)
