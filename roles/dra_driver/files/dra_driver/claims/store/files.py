# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The files of a store. A new store is written next to the old store, and is renamed when it is complete and synced.

An empty database never replaces a database with claims. The newest three damaged stores are renamed and kept for diagnosis. A store
with an older schema is kept as a backup, for a downgrade to the release that wrote it. During the replacement of a damaged store, no
store exists for a moment. After a crash at this moment, the next start uses the complete new store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import sqlite3
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from ...core.errors import AcceleratorError
from ...core.host.system import System
from .records import OtherRelease
from .schema import Content, StoreDamaged, is_content_error, is_read_error, read, valid_content

LOG = logging.getLogger(__name__)

# Request numbers and a flag of linux/fs.h and linux/btrfs.h. A number contains the size of the argument.
_LONG = struct.calcsize("@l")
_FS_IOC_GETFLAGS = 0x80006601 | _LONG << 16
_FS_IOC_SETFLAGS = 0x40006602 | _LONG << 16
_FS_NOCOW_FL = 0x00800000
_BTRFS_IOC_FS_INFO = 0x8400941F
# The suffixes of the files that SQLite writes next to a database.
SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")
# The numbers of kept backups of older schemas, and of kept damaged stores.
BACKUPS = 2
DAMAGED = 3
# Space reserved for SQLite's log, so that claims can be released on a full disk. A longer log is truncated to this size. The
# log is written back to the database after about 4 MiB (store.py).
LOG_BYTES = 8 * 1024 * 1024
# With less free space the driver records no new claim.
LEAST_BYTES = 1024 * 1024
_PART_BYTES = 64 * 1024
# Seconds that SQLite waits for another program's read to end.
BUSY_SECONDS = 10.0
# Seconds that a read-only check waits for another program.
READ_ONLY_SECONDS = 5.0
#: The remedy for a store that cannot be written.
REMEDY = "Check that its directory exists and is writable, and that the disk is not full."
#: Writes the complete content into an empty database.
WriteContent = Callable[[sqlite3.Connection], None]


class StoreError(AcceleratorError):
    """The store could not be written: disk full, read-only, I/O error."""

    default_code = "store-unwritable"


def store_error(path: str, error: BaseException) -> StoreError:
    """Return the StoreError for an error of the disk or of SQLite."""
    return StoreError(f"The store {path} cannot be used: {error}", hint=REMEDY)


def connect_read_only(path: str) -> sqlite3.Connection:
    """Open a store without changing it. Raises sqlite3.Error."""
    connection = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=READ_ONLY_SECONDS)
    connection.row_factory = sqlite3.Row
    return connection


def connect(path: str) -> sqlite3.Connection:
    """Open a store with a write-ahead log that is synced at each commit. Raises StoreError, StoreDamaged."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
    except sqlite3.Error as error:
        raise store_error(path, error) from error
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        # SQLite ignores the errors of its automatic checkpoints, also of a failed sync of its log.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # SQLite's message may have invalid UTF-8
        connection.close()
        if isinstance(error, sqlite3.OperationalError) and not is_content_error(error):
            raise store_error(path, error) from error
        raise StoreDamaged(f"The store {path} is no database: {error}") from error
    return connection


def exists(path: str) -> bool:
    """Return whether a file exists. Raises StoreError after a read error, so that no new store replaces an unreadable one."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise store_error(path, error) from error
    return True


def is_file(path: str) -> bool:
    """Return whether a path leads to a regular file. Raises StoreError after a read error."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116  paths are texts here
    except FileNotFoundError:
        return False  # a symbolic link without a target
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise store_error(path, error) from error


def disable_copy_on_write(path: str) -> None:
    """Make btrfs write the files of a new store in place. Other file systems do so already, or have no such setting.

    Copied pages need free space. On a full disk, a write to the memory-mapped file next to the database would end the
    driver with SIGBUS.
    """
    directory = os.path.dirname(path)  # noqa: PTH120  paths are texts here
    try:
        System().make_directory(directory, 0o750)
        if not _is_btrfs(directory):
            return
        for file in (directory, path):
            if exists(file) and not _writes_in_place(file):
                LOG.warning(
                    "%s is written with copy-on-write, and btrfs cannot change this. On a full disk, claims cannot be released, and the "
                    "driver can end with SIGBUS. Keep space free on this disk, or drain the node, stop the driver, and delete the store",
                    file,
                )
    except (OSError, StoreError) as error:
        LOG.debug("copy-on-write of %s is unchanged: %s", directory, error)  # the write reports the cause


def _is_btrfs(directory: str) -> bool:
    """Return whether a directory is on btrfs: only btrfs answers this request."""
    with _opened(directory) as descriptor:
        try:
            fcntl.ioctl(descriptor, _BTRFS_IOC_FS_INFO, bytearray(1024))
        except OSError:
            return False
    return True


def _writes_in_place(path: str) -> bool:
    """Disable copy-on-write for a directory or an empty file on btrfs. Return whether it is disabled."""
    with _opened(path) as descriptor:
        (flags,) = struct.unpack("@l", fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, bytes(_LONG)))
        if not flags & _FS_NOCOW_FL:
            with contextlib.suppress(OSError):
                fcntl.ioctl(descriptor, _FS_IOC_SETFLAGS, struct.pack("@l", flags | _FS_NOCOW_FL))
        (flags,) = struct.unpack("@l", fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, bytes(_LONG)))
    return bool(flags & _FS_NOCOW_FL)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def reserve_log(path: str) -> bool:
    """Reserve disk space for the log of an open store. Return False if the disk is full, or SQLite has not created the log yet.

    A restart needs no more free space than the log had, which SQLite deletes when the store is closed. No other thread may write the store.
    """
    try:
        descriptor = os.open(f"{os.path.realpath(path)}-wal", os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size < LOG_BYTES:
                found = _file_system(path)
                # An upper limit: root can also use the blocks that are reserved for root.
                if found.f_bfree * found.f_frsize < LOG_BYTES - size:
                    return False
                try:
                    os.posix_fallocate(descriptor, size, LOG_BYTES - size)  # SQLite ignores zeros behind the last frame
                except OSError:
                    os.ftruncate(
                        descriptor, size
                    )  # ext4 keeps the part that it could reserve, which would fill the disk
                    raise
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def sync_log(path: str) -> None:
    """Write the log of a store again, unchanged, and sync it. Raises StoreError. No program may write the store.

    After a failed sync, a part of the log can exist in the kernel's memory only, and later syncs report success. A previous process
    can have ended after such a failure. The log's blocks are written in place, so no disk space is needed.
    """
    try:
        descriptor = os.open(f"{os.path.realpath(path)}-wal", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise store_error(path, error) from error
    try:
        offset = 0
        while part := os.pread(descriptor, _PART_BYTES, offset):
            if part.strip(b"\0"):  # the reserved space stays unwritten
                os.pwrite(descriptor, part, offset)
            offset += len(part)
        os.fsync(descriptor)
    except OSError as error:
        raise store_error(path, error) from error
    finally:
        os.close(descriptor)


def refuse_full_disk(path: str) -> None:
    """Raise StoreError if the disk has no free space except the reserved space of the store."""
    try:
        found = _file_system(path)
    except OSError:
        return  # the write reports it
    free = bytes_available(found)
    if free < LEAST_BYTES:
        raise StoreError(
            f"The store {path} cannot record a new claim: its disk is full. It has {free} bytes free, expected {LEAST_BYTES} or more",
            hint="Free space on this disk. Claims can still be released.",
        )


def bytes_available(file_system: os.statvfs_result) -> int:
    """Return how many bytes new files can have on a file system.

    The free blocks, ``f_bfree``, include blocks that no file can have: up to 4096 blocks of ext4's own reserve, and the space that btrfs
    keeps for metadata. ``f_bavail`` excludes these, and on ext4 also the blocks reserved for root, 5 % by default: they remain for releases.
    """
    return file_system.f_bavail * file_system.f_frsize


def _file_system(path: str) -> os.statvfs_result:
    return os.statvfs(os.path.dirname(path))  # noqa: PTH120  at each claim: no objects


def replace_store(path: str, write_content: WriteContent) -> str | None:
    """Replace a damaged or missing store by a new store. Return the new name of the damaged store. Raises StoreError.

    The new store is complete and synced before the old one is renamed. The old log is renamed before the new store, because
    SQLite would apply the log to the new store.
    """
    use_new_store(path)  # otherwise the only complete store would be deleted
    with _write_new_store(path, new_store_path(path), write_content):
        previous = _put_in_place(path)
        _remove_old_damaged(path, previous)
    return previous


def use_new_store(path: str) -> bool:
    """Complete an interrupted ``replace_store``, and return whether this was done. Raises StoreError.

    A complete new store is renamed to ``path``, if there is no store or a damaged one, which is set aside. The new store
    contains pending cleanups and settings that no CDI file contains.
    """
    if not _is_complete(new_store_path(path)) or (exists(path) and _is_complete(path)):
        return False
    try:
        _put_in_place(path)
    except OSError as error:
        raise store_error(path, error) from error
    return True


def new_store_path(path: str) -> str:
    """Return the path of the new store that replaces the store at ``path``."""
    return f"{path}.new"


def delete_new_store(path: str) -> None:
    """Delete the new store of an interrupted replacement if the old store still exists. Raises StoreError."""
    try:
        if exists(new_store_path(path)):
            _remove_database(new_store_path(path))
    except OSError as error:
        raise store_error(path, error) from error


def _is_complete(path: str) -> bool:
    """Return whether a file is a complete store. It is written in one transaction. Raises StoreError after a read error."""
    if not is_file(path):
        return False
    try:
        with contextlib.closing(connect_read_only(path)) as connection:
            read(connection, path)
    except OtherRelease:
        return True  # the check at opening reports the cause
    except StoreDamaged:
        return False
    except sqlite3.Error as error:
        # SQLite has to roll back an interrupted transaction first. Without its journal the file system refuses the write.
        if "readonly database" in str(error) and exists(f"{path}-journal"):
            return False
        raise store_error(path, error) from error
    return True


def _put_in_place(path: str) -> str | None:
    """Rename the old store and its log, then the new store to ``path``. Return the old store's new name. Raises OSError."""
    target = Path(path)
    _sync(str(target.parent))
    previous = set_aside(path)
    _sync(str(target.parent))
    Path(new_store_path(path)).rename(target)
    _sync(str(target.parent))
    return previous


def replace_older_form(path: str, previous: sqlite3.Connection, form: int, write_content: WriteContent) -> str:
    """Replace a store of an older form by a new store, and return the path of the old one. Raises StoreError.

    ``previous`` is the connection to the old store, which is closed. At each moment the path leads to the complete old
    store or to the complete new one: the old log is written back to the database before it is deleted.
    """
    target, new = Path(path), new_store_path(path)
    with _write_new_store(path, new, write_content):
        if previous.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            raise sqlite3.OperationalError("another program reads it, so that its log cannot be written back")
        previous.close()
        for suffix in SQLITE_SUFFIXES:
            Path(path + suffix).unlink(missing_ok=True)
        backup = _free_name(f"{path}.form-{form}-")
        Path(backup).hardlink_to(target)
        _sync(str(target.parent))
        Path(new).rename(target)
        _sync(str(target.parent))
    return backup


@contextlib.contextmanager
def _write_new_store(path: str, new: str, write_content: WriteContent) -> Iterator[None]:
    """Write a new store and sync it. If the block fails, remove the new store, unless it is the only store. Raises StoreError."""
    is_complete = False
    try:
        System().make_directory(str(Path(path).parent), 0o750)
        _remove_database(new)
        Path(new).touch(mode=0o644)  # its error names the cause, such as a read-only file system; SQLite's does not
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            write_content(connection)
        _sync(new)
        is_complete = True
        yield
    except (sqlite3.Error, OSError) as error:
        if not is_complete or os.path.lexists(path):  # otherwise ``use_new_store`` uses the new store
            with contextlib.suppress(OSError):
                _remove_database(new)
        raise store_error(path, error) from error


def remove_old_backups(path: str) -> None:
    """Keep the newest backups of older forms, by the time of their renaming (the last change of the inode)."""
    every = Path(path).parent.glob(f"{Path(path).name}.form-*-*")
    for backup in sorted(every, key=lambda each: each.lstat().st_ctime_ns)[:-BACKUPS]:
        backup.unlink(missing_ok=True)


def _remove_old_damaged(path: str, newest: str | None) -> None:
    """Keep three damaged stores and their logs: the newest store, and two more by the time of their renaming."""
    others: dict[str, int] = {}
    for file in Path(path).parent.glob(f"{Path(path).name}.damaged-*"):
        store = re.sub(f"({'|'.join(SQLITE_SUFFIXES)})$", "", str(file))
        if store != newest:
            others[store] = max(others.get(store, 0), file.lstat().st_ctime_ns)
    for store in sorted(others, key=lambda each: others[each])[: -(DAMAGED - 1)]:
        _remove_database(store)


def refuse_unknown_format(path: str) -> None:
    """Raise StoreDamaged for a changed bit that SQLite would treat as a format that it must not write.

    Bytes 18 and 19 of a database are the versions of its write and read format: rollback journal (1) or log (2). SQLite
    opens a database with a higher write version as read-only, which looks like a read-only disk.
    """
    try:
        with Path(path).open("rb") as file:
            format_versions = file.read(20)[18:]
    except OSError as error:
        raise store_error(path, error) from error
    if any(version > 2 for version in format_versions):
        raise StoreDamaged(
            f"The store {path} is damaged: its format versions are {format_versions!r}",
            valid_part=_valid_content_of(path),
        )


def _valid_content_of(path: str) -> Content:
    try:
        with contextlib.closing(connect_read_only(path)) as connection:
            return valid_content(connection)
    except sqlite3.Error as error:
        if is_read_error(error):
            raise store_error(path, error) from error
        return Content()


def set_aside(path: str) -> str | None:
    """Rename a damaged store with its log files, and return its new name; None if no store existed."""
    target = _free_name(f"{path}.damaged-")
    found = False
    # The database is renamed first: without its log it would be a valid database that lacks the last writes.
    for suffix in ("", *SQLITE_SUFFIXES):
        with contextlib.suppress(FileNotFoundError):
            Path(path + suffix).rename(f"{target}{suffix}")
            found = True
    return target if found else None


def _free_name(start: str) -> str:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    target = ""
    for number in range(1000):
        target = f"{start}{stamp}" + (f"-{number}" if number else "")
        if not any(exists(target + suffix) for suffix in ("", *SQLITE_SUFFIXES)):
            break
    return target


def _remove_database(path: str) -> None:
    for suffix in ("", *SQLITE_SUFFIXES):
        with contextlib.suppress(FileNotFoundError):
            Path(path + suffix).unlink()


def _sync(path: str) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)
