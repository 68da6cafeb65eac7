# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The files of a store. A new store is written next to the old store, and is renamed when it is complete and synced.

An empty database never replaces a database with claims. The newest three damaged stores are renamed and kept for diagnosis. A store
with an older schema is kept as a backup, for a downgrade to the release that wrote it. During the replacement of a damaged store, no
store exists for a moment. After a crash at this moment, the next start uses the complete new store.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from ..core.errors import AcceleratorError
from .forms import Content, StoreDamaged, of_content, read, sound_content
from .records import OtherRelease

# What SQLite keeps beside a database.
COMPANIONS = ("-wal", "-shm", "-journal")
# The numbers of kept backups of older schemas, and of kept damaged stores.
BACKUPS = 2
DAMAGED = 3
# Space reserved for SQLite's log, so that claims can be released on a full disk. A longer log is truncated to this size. SQLite
# writes the log back to the database after 4 MiB.
LOG_BYTES = 8 * 1024 * 1024
# With less free space the driver records no new claim.
LEAST_BYTES = 1024 * 1024
# Seconds that SQLite waits for another program that reads.
BUSY_SECONDS = 10.0
#: What to do about a store that the disk does not take.
REMEDY = "Check that its folder exists, is writable and that the disk is not full."
#: Writes everything into an empty database.
Fill = Callable[[sqlite3.Connection], None]


class StoreError(AcceleratorError):
    """The store could not be written: disk full, read-only, I/O error."""

    default_code = "store-unwritable"


def unwritable(path: str, error: BaseException) -> StoreError:
    """Return the error that tells of one of the disk's."""
    return StoreError(
        f"The store {path} cannot be used: {error}",
        hint=REMEDY,
    )


def connect(path: str) -> sqlite3.Connection:
    """Open a store with a write-ahead log that is synced at each commit. Raises StoreError, StoreDamaged."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
    except sqlite3.Error as error:
        raise unwritable(path, error) from error
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # a message of SQLite's may quote what is no text
        connection.close()
        if isinstance(error, sqlite3.OperationalError) and not of_content(error):
            raise unwritable(path, error) from error
        raise StoreDamaged(f"The store {path} is no database: {error}") from error
    return connection


def reserve_log(path: str) -> bool:
    """Reserve disk space for the log of an open store. Return False if the disk is full, or SQLite has not created the log yet."""
    try:
        descriptor = os.open(f"{os.path.realpath(path)}-wal", os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size < LOG_BYTES:
                if _bytes_free(path) < LOG_BYTES - size + LEAST_BYTES:
                    return False  # ext4 keeps the part that it could reserve, which would fill the disk
                os.posix_fallocate(descriptor, size, LOG_BYTES - size)  # SQLite ignores zeros behind the last frame
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def refuse_full_disk(path: str) -> None:
    """Raise StoreError if the disk has no free space except the reserved space of the store."""
    try:
        free = _bytes_free(path)
    except OSError:
        return  # the write reports it
    if free < LEAST_BYTES:
        raise StoreError(
            f"The store {path} cannot record a new claim: its disk is full. It has {free} bytes free, expected {LEAST_BYTES} or more",
            hint="Free space on this disk. Claims can still be released.",
        )


def _bytes_free(path: str) -> int:
    found = os.statvfs(os.path.dirname(path))  # noqa: PTH120  at each claim: no objects
    return found.f_bfree * found.f_frsize


def replace(path: str, fill: Fill) -> str | None:
    """Replace a damaged or missing store by a new store. Return the new name of the damaged store. Raises StoreError.

    The new store is complete and synced before the old one is renamed. The old log is renamed before the new store gets its
    name, because SQLite would apply the log to it.
    """
    take_new(path)  # otherwise the only complete store would be deleted
    with _built(path, new_store(path), fill):
        former = _put_in_place(path)
        _remove_old_damaged(path, former)
    return former


def take_new(path: str) -> bool:
    """Rename the new store of an interrupted ``replace`` to ``path`` if no store exists. Return whether this was done. Raises StoreError.

    Only a complete new store is used: it contains the claims, pending cleanups, and settings that no CDI file has.
    """
    if os.path.lexists(path) or not _is_complete(new_store(path)):
        return False
    try:
        _put_in_place(path)
    except OSError as error:
        raise unwritable(path, error) from error
    return True


def new_store(path: str) -> str:
    """Return the path of the new store that replaces the store at ``path``."""
    return f"{path}.new"


def drop_new(path: str) -> None:
    """Delete the new store of an interrupted replacement if the old store still exists. Raises StoreError."""
    try:
        if os.path.lexists(new_store(path)):
            _remove_database(new_store(path))
    except OSError as error:
        raise unwritable(path, error) from error


def _is_complete(path: str) -> bool:
    """Return whether a file is a complete store. It is written in one transaction."""
    if not Path(path).is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=5)) as connection:
            connection.row_factory = sqlite3.Row
            read(connection, path)
    except OtherRelease:
        return True  # the check at opening reports the cause
    except (StoreDamaged, sqlite3.Error):
        return False
    return True


def _put_in_place(path: str) -> str | None:
    """Rename the old store and its log, then the new store to ``path``. Return the old store's new name. Raises OSError."""
    target = Path(path)
    _sync(str(target.parent))
    former = set_aside(path)
    _sync(str(target.parent))
    Path(new_store(path)).rename(target)
    _sync(str(target.parent))
    return former


def exchange(path: str, former: sqlite3.Connection, form: int, fill: Fill) -> str:
    """Put a new store where one of an older form is, and return the name under which that stays. Raises StoreError.

    ``former`` is a connection to the old one, which is closed. At each moment the path leads to the old store or to the
    new one, and either is whole: all that the old one's log holds is in the database before the log goes.
    """
    target, new = Path(path), new_store(path)
    with _built(path, new, fill):
        if former.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            raise sqlite3.OperationalError("another program reads it, so that its log cannot be written back")
        former.close()
        for suffix in COMPANIONS:
            Path(path + suffix).unlink(missing_ok=True)
        backup = _free_name(f"{path}.form-{form}-")
        Path(backup).hardlink_to(target)
        _sync(str(target.parent))
        Path(new).rename(target)
        _sync(str(target.parent))
    return backup


@contextlib.contextmanager
def _built(path: str, new: str, fill: Fill) -> Iterator[None]:
    """Write a new store and sync it. If the block fails, remove the new store, unless it is the only store. Raises StoreError."""
    is_complete = False
    try:
        Path(path).parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        _remove_database(new)
        Path(new).touch(mode=0o644)  # its error names the cause, such as a read-only file system; SQLite's does not
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            fill(connection)
        _sync(new)
        is_complete = True
        yield
    except (sqlite3.Error, OSError) as error:
        if not is_complete or os.path.lexists(path):  # otherwise ``take_new`` uses the new store
            with contextlib.suppress(OSError):
                _remove_database(new)
        raise unwritable(path, error) from error


def remove_old_backups(path: str) -> None:
    """Keep the newest backups of older forms, by when they became backups: that was the last change of the file itself."""
    every = Path(path).parent.glob(f"{Path(path).name}.form-*-*")
    for backup in sorted(every, key=lambda each: each.lstat().st_ctime_ns)[:-BACKUPS]:
        backup.unlink(missing_ok=True)


def _remove_old_damaged(path: str, newest: str | None) -> None:
    """Keep three damaged stores and their logs: the newest store, and two more by the time of their renaming."""
    others: dict[str, int] = {}
    for file in Path(path).parent.glob(f"{Path(path).name}.damaged-*"):
        store = re.sub(f"({'|'.join(COMPANIONS)})$", "", str(file))
        if store != newest:
            others[store] = max(others.get(store, 0), file.lstat().st_ctime_ns)
    for store in sorted(others, key=lambda each: others[each])[: -(DAMAGED - 1)]:
        _remove_database(store)


def refuse_header(path: str) -> None:
    """Raise StoreDamaged where SQLite would take a turned bit for the word of another program that it may not write.

    Bytes 18 and 19 of a database say how it is written and read: by a rollback journal (1) or a log (2). SQLite opens
    one with a higher number to write for reading only, which looks like a disk that is read-only.
    """
    try:
        with Path(path).open("rb") as file:
            ways = file.read(20)[18:]
    except OSError as error:
        raise unwritable(path, error) from error
    if any(way > 2 for way in ways):
        raise StoreDamaged(
            f"The store {path} is damaged: it says that it is written in ways {ways!r}", sound=_sound(path)
        )


def _sound(path: str) -> Content:
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=5)) as connection,
    ):
        connection.row_factory = sqlite3.Row
        return sound_content(connection)
    return Content()


def set_aside(path: str) -> str | None:
    """Rename a damaged store, with its log files, out of the way and return its new name; None if there was none."""
    target = _free_name(f"{path}.damaged-")
    found = False
    # The database goes first: without its log it would be a whole one that lacks what was written last.
    for suffix in ("", *COMPANIONS):
        with contextlib.suppress(FileNotFoundError):
            Path(path + suffix).rename(f"{target}{suffix}")
            found = True
    return target if found else None


def _free_name(start: str) -> str:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    target = ""
    for number in range(1000):
        target = f"{start}{stamp}" + (f"-{number}" if number else "")
        if not any(Path(target + suffix).exists() for suffix in ("", *COMPANIONS)):
            break
    return target


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
