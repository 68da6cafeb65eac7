# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Provide the device locks that the node driver shares with modules and the layout command, which change device layouts.

The driver's state directory has one lock file for each device. The holder of a device's lock can change the device, and
the device's state does not change under it. Two more locks protect the vendor library: the driver holds ``library``
while the library is open, and closes it while another process holds ``request``. A lock ends with the process that
holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..errors import AcceleratorError, InUse
from ..health.repair_marks import report_resets
from ..host.system import System, path_exists

FOLDER = "locks"
LIBRARY = "library"
REQUEST = "request"
POLL_SECONDS = 0.1
TEXT_BYTES = 128
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class DeviceLocks:
    """The locks in one driver's state directory. One object represents one holder.

    ``holder`` is the name that other processes see. If the directory does not exist, no driver has ever run, and locks
    are not needed. With ``keeps_open`` the files stay open until ``drop_all``, for callers that take the same locks
    repeatedly.
    """

    def __init__(self, state_directory: str, holder: str, *, keeps_open: bool = False) -> None:
        self.state_directory = state_directory
        self._folder = f"{state_directory}/{FOLDER}"
        # The text has a fixed length, so that a repeated lock does not change the file.
        text = f"{holder} (pid {os.getpid()})".encode()
        self._text = text[: TEXT_BYTES - 1].ljust(TEXT_BYTES - 1) + b"\n"
        self._keeps_open = keeps_open
        self._held: dict[str, int] = {}
        self._kept: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Take a lock without waiting; return False if it is in use. Raises AcceleratorError."""
        if name in self._held:
            return False
        while True:
            descriptor = self._kept.pop(name, None)
            if descriptor is None:
                descriptor = self._open(name)
            if descriptor is None:
                return True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._leave(name, descriptor)
                return False
            if self._is_current(descriptor, name):
                break
            os.close(descriptor)  # the directory was removed and created again in the meantime
        self._held[name] = descriptor
        with contextlib.suppress(OSError):  # a full disk, or a directory that only the driver can write
            if os.pread(descriptor, TEXT_BYTES, 0) != self._text:
                os.pwrite(descriptor, self._text, 0)
        return True

    def drop(self, name: str) -> None:
        """Release a lock if this object holds it."""
        descriptor = self._held.pop(name, None)
        if descriptor is None:
            return
        if self._keeps_open:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        self._leave(name, descriptor)

    def drop_all(self) -> None:
        """Release all locks and close all files."""
        for name in tuple(self._held):
            self.drop(name)
        while self._kept:
            os.close(self._kept.popitem()[1])

    def _leave(self, name: str, descriptor: int) -> None:
        """Release an open file's lock: close the file, or keep it open without the lock."""
        if self._keeps_open:
            self._kept[name] = descriptor
        else:
            os.close(descriptor)

    def holds(self, name: str) -> bool:
        """Return whether this object holds a lock."""
        return name in self._held

    def is_taken(self, name: str) -> bool:
        """Return whether any process, this one included, holds a lock.

        Creates and writes nothing. Raises AcceleratorError.
        """
        if name in self._held:
            return True
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):  # a lock that was never created was never held
            return False
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def holder_of(self, name: str) -> str:
        """Return the recorded holder of a lock."""
        try:
            return Path(self._path(name)).read_text(encoding="utf-8", errors="replace").strip() or "another process"
        except OSError:
            return "another process"

    @contextlib.contextmanager
    def hold(
        self,
        names: Iterable[str],
        seconds: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> Iterator[None]:
        """Hold several locks. They are taken in sorted order, so that two callers cannot deadlock.

        Raises InUse, which names the holder, if a lock is not free within ``seconds``.
        """
        deadline = clock() + seconds
        taken: list[str] = []
        try:
            for name in sorted(set(names)):
                while not self.take(name):
                    if clock() >= deadline:
                        raise self.refusal(name, seconds)
                    sleep(POLL_SECONDS)
                taken.append(name)
            yield
        finally:
            for name in taken:
                self.drop(name)

    def refusal(self, name: str, seconds: float) -> InUse:
        """Return the error for a lock that is in use."""
        what = "The vendor's library" if name in (LIBRARY, REQUEST) else f"Device {name}"
        return InUse(
            f"{what} is being worked on by {self.holder_of(name)}, for more than {seconds:g} s",
            hint="Try again when that has ended.",
            code="device-locked",
        )

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}.lock"

    def _open(self, name: str) -> int | None:
        path = self._path(name)
        try:
            try:
                return self._open_or_make(path)
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise
            # A confined program can only read there. A lock that was never created was never held.
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
        except OSError as error:
            raise _unusable(path, error) from error

    def _open_or_make(self, path: str) -> int | None:
        """Open or create a lock file, and create its directory if needed.

        Return None if the driver's state directory does not exist.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except (FileNotFoundError, NotADirectoryError):
            if not path_exists(self.state_directory):
                return None
        System().make_directory(self._folder, 0o750)
        return os.open(path, flags, 0o600)

    def _is_current(self, descriptor: int, name: str) -> bool:
        try:
            there = os.stat(self._path(name))  # noqa: PTH116  at each claim: no objects
        except OSError:
            return False
        mine = os.fstat(descriptor)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _unusable(path: str, error: OSError) -> AcceleratorError:
    return AcceleratorError(
        f"The lock {path} cannot be used: {error.strerror}",
        hint="Check the directory and its disk.",
        code="lock-unusable",
    )


@contextlib.contextmanager
def library_alone(locks: DeviceLocks, wake: Callable[[], object], seconds: float) -> Iterator[None]:
    """Make the node driver close the vendor library while the block runs, as a device reset requires.

    ``wake`` makes the driver check the locks. Without a running driver there is no wait. The driver opens the library
    again afterwards, also if this process is killed. Raises InUse if the driver does not close the library within
    ``seconds``.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(wake)  # runs last, after both locks are released
        stack.enter_context(locks.hold([REQUEST], seconds))
        wake()
        stack.enter_context(locks.hold([LIBRARY], seconds))
        stack.callback(report_resets, locks.state_directory)  # runs first, before the driver opens the library
        yield
