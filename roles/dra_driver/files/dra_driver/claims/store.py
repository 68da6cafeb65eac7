# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The driver's memory of claims: SQLite, written ahead and synced, so that a power cut loses nothing it answered for.

A claim is written as *preparing* before its first side effect and as *prepared* after its last one. One at a time writes;
changes that wait while it syncs go into the next transaction together, so that 64 claims at once cost a few syncs and
not 128. Who has a thread of its own writes on that, and for whoever waits beside it; the event loop has a thread that does it. Who has
something else to do writes, and leaves it to that thread to wait for the disk.
Reads are served from memory: the store is the only writer of its file, which a lock guards elsewhere. What is in memory is never
changed but replaced, so that any thread reads a whole state, and nobody is woken to bring it up to date.

Each row of claims and of the meta table has a checksum (core/prepared.py), which is held against it when the store is
opened: SQLite notices that a file's pages are broken, not that a bit of a value has turned. What does not fit makes the
store a damaged one, which is rebuilt out of the rows that do, and of CDI files. A store of an older form is brought forward
(forms.py), and whole stores are made beside the old one (store_files.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace as replaced
from functools import partial
from urllib.parse import quote

from ..core.errors import AcceleratorError
from ..core.prepared import FORM
from .forms import Content, StoreDamaged, read
from .records import ClaimRecord
from .store_files import (
    StoreError,
    connect,
    drop_new,
    exchange,
    refuse_full_disk,
    refuse_header,
    remove_old_backups,
    replace,
    reserve_log,
    take_new,
    unwritable,
)
from .store_tables import Change, apply, fill, identify, sign, write

LOG = logging.getLogger(__name__)

# Changes in one transaction. More would make the first of them wait for the last one's statements.
GROUP_LIMIT = 128
# How long a store that is closed waits for what is being written.
CLOSE_SECONDS = 10.0
# The reason for the replacement of a store after its log could not be synced.
LOST_LOG = "the disk failed to write its log"
# Has each commit wait for the disk, or leaves that to the next one that does.
_DURABLE, _SOON = "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL"


class Pending:
    """A change that is to be written; ``future`` is who waits for it on an event loop, if anybody does.

    ``began`` is when the transaction began of one that is in SQLite's log already, and not on disk.
    """

    def __init__(self, change: Change, future: asyncio.Future[None] | None = None) -> None:
        self.change = change
        self.future = future
        self.began = 0.0
        self.error: AcceleratorError | None = None
        self._open = threading.Lock()
        self._open.acquire()

    def answer(self, error: AcceleratorError | None) -> None:
        """Let a thread go on that waits."""
        self.error = error
        self._open.release()

    def wait(self) -> None:
        """Wait on a thread until it is written. Raises StoreError."""
        with self._open:
            if self.error is not None:
                raise StoreError(self.error.message, hint=self.error.hint)


class Store:
    """The claims that are prepared or being prepared on this node.

    ``claims`` and ``meta`` are the committed content, each as it was at the moment of reading; they change by commit() and write() only.
    ``former`` is the name under which a damaged store was set aside when this one was rebuilt. ``identity`` tells this store from any
    other: as long as it is the same no record was lost.
    """

    def __init__(
        self, path: str, connection: sqlite3.Connection, content: Content, *, former: str | None = None
    ) -> None:
        self.path = path
        self.former = former
        self.identity = content.identity
        self._content = Content(dict(content.claims), dict(content.meta))
        self._connection = connection
        self._waits_for_disk = True
        self._log_is_lost = False  # a part of SQLite's log is not on disk, so no later part is durable
        self._queue: queue.SimpleQueue[Pending] = queue.SimpleQueue()
        self._unsynced: queue.SimpleQueue[Pending] = queue.SimpleQueue()
        #: The connection for whose log disk space is reserved.
        self._reserved = connection if reserve_log(path) else None
        self._log: tuple[sqlite3.Connection, int] | None = None  # a connection's log, for the store's own thread
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # there is something to do, or never again
        self._writing = threading.Lock()
        self._ended: BaseException | None = None
        self._over = threading.Event()  # nothing is taken from the queue any more
        # Told how each transaction ended, and how long it took, on the thread that writes.
        self.observer: Callable[[str, float], None] = lambda _outcome, _seconds: None
        # Told, on that thread, of a transaction that could not be written; and that the store was damaged and is another one now.
        self.failed: Callable[[AcceleratorError], None] = lambda _error: None
        self.replaced: Callable[[str], None] = lambda _message: None
        self._thread = threading.Thread(target=self._write_loop, name="store-writer", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: str) -> Store:
        """Open or make the store, and bring it forward where it is of an older form.

        Raises StoreDamaged, NewerRelease or OlderRelease, or StoreError when it cannot be written. A new store is created only if
        there is neither a file nor the new store of an interrupted rebuild. An empty file is a damaged store.
        """
        if not os.path.lexists(path):
            if not take_new(path):
                replace(path, partial(fill, Content()))
        elif not os.path.isfile(path):  # noqa: PTH113  what SQLite would call unopenable for ever
            raise StoreDamaged(f"The store {path} is no file")
        drop_new(path)
        refuse_header(path)
        connection = connect(path)
        try:
            found = read(connection, path)
            if found.form < FORM:
                backup = exchange(path, connection, found.form, partial(fill, found.content))
                connection = connect(path)
                LOG.info(
                    "the store %s was brought from form %s to %s; %s is what it was", path, found.form, FORM, backup
                )
                found = read(connection, path)
                remove_old_backups(path)
            elif found.unsigned:
                sign(connection)
            identity = found.content.identity or identify(connection)
        except (sqlite3.Error, OSError) as error:
            connection.close()
            raise unwritable(path, error) from error
        except BaseException:
            connection.close()
            raise
        return cls(path, connection, replaced(found.content, identity=identity))

    @classmethod
    def rebuild(cls, path: str, records: Iterable[ClaimRecord], meta: Mapping[str, str]) -> Store:
        """Make a new store that holds the records; what is at the path is set aside. Raises StoreError.

        After an interruption, either the old store is unchanged, or ``open`` uses the new store.
        """
        content = Content({record.uid: record for record in records}, dict(meta))
        former = replace(path, partial(fill, content))
        store = cls.open(path)
        store.former = former
        return store

    @property
    def claims(self) -> Mapping[str, ClaimRecord]:
        """The claims by UID."""
        return self._content.claims

    @property
    def meta(self) -> Mapping[str, str]:
        """The values by key."""
        return self._content.meta

    async def commit(self, change: Change) -> None:
        """Write one change and return when it is on disk. Raises StoreError; the change has then not been made.

        Cancelling the caller does not undo a change that is under way.
        """
        self._refuse_new_claim(change)
        future = asyncio.get_running_loop().create_future()
        self._hand_over(Pending(change, future))
        await future

    def begin(self, change: Change) -> Pending:
        """Write one change from any thread but an event loop's, and return while it is on its way to the disk.

        ``wait`` of what is returned returns when it is there, or raises StoreError: the store may have the change then nonetheless, and
        who began it takes it back.
        """
        self._refuse_new_claim(change)
        pending = Pending(change)
        self._write_here(pending, in_time=False)
        return pending

    def _refuse_new_claim(self, change: Change) -> None:
        """Raise StoreError for a new claim if the disk is full, because the reserved space is for releases."""
        if change.put is not None and change.put.uid not in self.claims:
            refuse_full_disk(self.path)

    def _hand_over(self, pending: Pending) -> None:
        """Give a change to the store's own thread."""
        self._queue.put(pending)
        self._wake.put(True)
        if self._over.is_set():  # nobody will take it: closed, or writing has come to an unforeseen end
            self._refuse_queued()

    def _write_here(self, pending: Pending, *, in_time: bool) -> None:
        """Write a change and what is queued, unless somebody writes; with ``in_time`` it is on disk then."""
        if self._over.is_set() or not self._writing.acquire(blocking=False):
            self._hand_over(pending)
            return
        try:
            if self._over.is_set():  # closed at this very moment
                self._hand_over(pending)
            else:
                self._write_group([*self._next_group(), pending], in_time=in_time)
        except BaseException as error:  # noqa: BLE001  whoever waits was told
            self._give_up(error)
        finally:
            self._writing.release()
        if not self._queue.empty():  # what came meanwhile is for the thread whose work it is
            self._wake.put(True)

    def write(self, change: Change) -> None:
        """Write one change from any thread but an event loop's, and return when it is on disk. Raises StoreError, as ``commit`` does."""
        self._refuse_new_claim(change)
        pending = Pending(change)
        self._write_here(pending, in_time=True)
        pending.wait()

    def close(self) -> None:
        """Write what is queued and close the file."""
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
        except BaseException as error:  # noqa: BLE001  whoever waits was told
            self._give_up(error)
        self._over.set()  # before what waits is refused: who comes later sees it, though the thread still lives
        self._refuse_queued()
        self._forget_log()

    def _give_up(self, error: BaseException) -> None:
        self._ended = error
        LOG.critical("the store %s can no longer be written", self.path, exc_info=error)
        self._over.set()
        self._refuse_queued()
        self.failed(
            StoreError(f"The store {self.path} can no longer be written: {error!r}", hint="Restart the driver.")
        )
        self._wake.put(False)

    def _refuse_queued(self) -> None:
        """Fail what nobody will write any more."""
        reason = repr(self._ended) if self._ended else "it is closed"
        left = [*_all_of(self._queue), *_all_of(self._unsynced)]
        self._answer(left, StoreError(f"The store {self.path} can no longer be written: {reason}"))

    def _write_queued(self) -> None:
        while not self._queue.empty():
            with self._writing:
                self._write_group(self._next_group())

    def _next_group(self) -> list[Pending]:
        return _all_of(self._queue, GROUP_LIMIT)

    def _write_group(self, group: list[Pending], *, in_time: bool = True) -> None:
        """Write changes in one transaction, and answer those who wait: with ``in_time`` all, else who need not wait for the disk."""
        if not group:
            return
        began, outcome = time.perf_counter(), "failure"
        late = [] if in_time else [pending for pending in group if pending.change.durable]
        try:
            try:
                self._write_now([pending.change if in_time else pending.change.soon() for pending in group])
                outcome = "success"
            finally:
                if not late or outcome == "failure":
                    self.observer(outcome, time.perf_counter() - began)
        except AcceleratorError as error:
            self._answer(group, error)
            self.failed(error)
        except Exception as error:
            # A change that cannot be written down, whatever is wrong with it, is not its neighbours' fault.
            if len(group) == 1:
                LOG.exception("a change could not be written to the store %s", self.path)
                self._answer(group, StoreError(f"The store {self.path} could not write a change: {error!r}"))
                return
            for position, pending in enumerate(group):
                try:
                    self._write_group([pending], in_time=in_time)
                except BaseException as unforeseen:
                    left = StoreError(f"The store {self.path} can no longer be written: {unforeseen!r}")
                    self._answer(group[position + 1 :], left)
                    raise
        except BaseException as error:
            self._answer(group, StoreError(f"The store {self.path} can no longer be written: {error!r}"))
            raise
        else:
            self._answer([pending for pending in group if pending not in late], None)
            self._have_synced(late, began)
            # What a claim waits for is written without a wait for the disk, or another thread has that: it finds the store ready for it.
            # Where that fails whoever comes next does it, and is told; a message of SQLite's may quote what is no text.
            with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):
                self._wait_for_disk(False)

    def _have_synced(self, late: Sequence[Pending], began: float) -> None:
        """Have the store's own thread wait for the disk, and answer."""
        for pending in late:
            pending.began = began
            self._unsynced.put(pending)
        if late:
            self._wake.put(True)
            if self._over.is_set():
                self._refuse_queued()

    def _sync(self) -> None:
        """Wait until SQLite's log is on disk, and answer those who wait for that alone; on the store's own thread."""
        group = _all_of(self._unsynced)
        if not group:
            return
        try:
            error = self._wait_for_log()
            now, outcome = time.perf_counter(), "failure" if error else "success"
            for began in sorted({pending.began for pending in group}):
                self.observer(outcome, now - began)
        except BaseException as unforeseen:
            self._answer(group, StoreError(f"The store {self.path} can no longer be written: {unforeseen!r}"))
            raise
        self._answer(group, error)
        if error is not None:
            self.failed(error)

    def _wait_for_log(self) -> AcceleratorError | None:
        """Wait until SQLite's log is on disk. Return the error if it is not.

        After a failed sync the kernel treats the lost pages as written, and the next sync succeeds. So only a new store is durable.
        """
        if not self._log_is_lost:
            try:
                os.fdatasync(self._log_file())
            except FileNotFoundError:
                pass  # another thread has replaced the store from memory, and the new store is on disk
            except OSError as problem:
                self._log_is_lost = True
                return unwritable(self.path, problem)
        if self._log_is_lost:  # a commit of another thread can have failed just now
            try:
                with self._writing:
                    if self._log_is_lost:
                        self._start_again(LOST_LOG, [])
            except AcceleratorError as error:
                return error
        return None

    def _log_file(self) -> int:
        """The log of the present connection, which SQLite names after the file that a path leads to. Raises OSError."""
        if self._log is None or self._log[0] is not self._connection:
            self._forget_log()
            connection = self._connection
            descriptor = os.open(f"{os.path.realpath(self.path)}-wal", os.O_RDONLY | os.O_CLOEXEC)
            self._log = (connection, descriptor)
        return self._log[1]

    def _forget_log(self) -> None:
        if self._log is not None:
            os.close(self._log[1])
            self._log = None

    def _answer(self, group: Iterable[Pending], error: AcceleratorError | None) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for pending in group:
            if pending.future is not None:
                by_loop.setdefault(pending.future.get_loop(), []).append(pending.future)
        for loop, futures in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(_settle, futures, error)
        for pending in group:
            pending.answer(error)

    def _write_now(self, changes: list[Change]) -> None:
        if self._log_is_lost:
            self._start_again(LOST_LOG, changes)
            return
        try:
            self._transaction(changes)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if isinstance(error, (sqlite3.OperationalError, sqlite3.IntegrityError)) and "malformed" not in str(error):
                self._log_is_lost = self._log_is_lost or "disk I/O error" in str(error)
                raise unwritable(self.path, error) from error
            self._start_again(f"the file was damaged while it was open ({error})", changes)

    def _with(self, changes: Iterable[Change]) -> Content:
        """What is in memory, with changes."""
        content = Content(dict(self.claims), dict(self.meta), self.identity)
        for change in changes:
            apply(change, content.claims, content.meta)
        return content

    def _transaction(self, changes: Sequence[Change]) -> None:
        self._wait_for_disk(any(change.durable for change in changes))
        content = Content(dict(self.claims), dict(self.meta))
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                write(self._connection, change, content.claims)
                apply(change, content.claims, content.meta)
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        self._content = content

    def _wait_for_disk(self, durable: bool) -> None:
        """Have what is committed from now on wait for the disk, or not; SQLite's log stays whole and in order either way."""
        if durable != self._waits_for_disk:
            self._connection.execute(_DURABLE if durable else _SOON)
            self._waits_for_disk = durable

    def _start_again(self, reason: str, changes: list[Change]) -> None:
        """Replace the store by a new store with the content in memory, which has all committed changes, and with ``changes``."""
        LOG.error("the store %s is replaced from memory: %s", self.path, reason)
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        content = self._with(changes)
        former = replace(self.path, partial(fill, content))
        self._connection = connect(self.path)
        self._waits_for_disk, self._log_is_lost, self._content = True, False, content
        LOG.warning("the store %s was replaced; the previous store is %s", self.path, former)
        self.replaced(
            f"The store {self.path} was replaced from memory: {reason}. No data is lost. The previous store is "
            f"{former or 'lost'}. Check the kernel log for faults of the disk"
        )


def _all_of(waiting: queue.SimpleQueue[Pending], at_most: int = sys.maxsize) -> list[Pending]:
    """Take what waits at this moment."""
    found: list[Pending] = []
    with contextlib.suppress(queue.Empty):  # where somebody else takes from it as well
        while len(found) < at_most and not waiting.empty():
            found.append(waiting.get_nowait())
    return found


def _settle(futures: Iterable[asyncio.Future[None]], error: AcceleratorError | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(StoreError(error.message, hint=error.hint))


def refuse_other_releases(path: str) -> None:
    """See whether this release could read a store, without changing it: another instance may have it open.

    Raises NewerRelease or OlderRelease. Whatever else is wrong with it is found, and mended, by whoever opens it.
    """
    if not os.path.lexists(path):
        return
    with (
        contextlib.suppress(sqlite3.Error, ValueError, StoreDamaged),
        contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=5)) as connection,
    ):
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN")
        read(connection, path)
