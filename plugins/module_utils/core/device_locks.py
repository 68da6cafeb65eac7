# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Locks that the node driver shares with whoever changes the layout of its devices: a module, or the layout command.

One file for each device, in the driver's state folder: whoever holds its lock may change the device, and what it saw of
the device stays so until then. Two more are about the vendor's library: the driver holds ``library`` as long as it has
the library open, and lets go of it while somebody holds ``request``. A lock ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .errors import AcceleratorError, InUse
from .repair_marks import report_resets

FOLDER = "locks"
LIBRARY = "library"
REQUEST = "request"
POLL_SECONDS = 0.1
TEXT_BYTES = 128
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class DeviceLocks:
    """The locks in one driver's state folder, for one holder at a time in this object.

    ``holder`` says for others who this is. Where the folder is not there no driver has ever run, and nothing is locked. Who takes the same
    locks again and again ``keeps_open`` their files, until ``drop_all``.
    """

    def __init__(self, state_directory: str, holder: str, *, keeps_open: bool = False) -> None:
        self.state_directory = state_directory
        self._folder = f"{state_directory}/{FOLDER}"
        # Of one length, so that taking a lock again and again leaves the disk nothing to do.
        text = f"{holder} (pid {os.getpid()})".encode()
        self._text = text[: TEXT_BYTES - 1].ljust(TEXT_BYTES - 1) + b"\n"
        self._keeps_open = keeps_open
        self._held: dict[str, int] = {}
        self._kept: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Take a lock if nobody has it, and return whether it was to be had; does not wait. Raises AcceleratorError."""
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
            os.close(descriptor)  # the folder was removed and made anew meanwhile
        self._held[name] = descriptor
        with contextlib.suppress(OSError):  # a full disk, or a folder that only the driver may write
            if os.pread(descriptor, TEXT_BYTES, 0) != self._text:
                os.pwrite(descriptor, self._text, 0)
        return True

    def drop(self, name: str) -> None:
        """Give a lock back; one that is not held is left alone."""
        descriptor = self._held.pop(name, None)
        if descriptor is None:
            return
        if self._keeps_open:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        self._leave(name, descriptor)

    def drop_all(self) -> None:
        """Give back all that are held, and keep no file open."""
        for name in tuple(self._held):
            self.drop(name)
        while self._kept:
            os.close(self._kept.popitem()[1])

    def _leave(self, name: str, descriptor: int) -> None:
        """Do without the lock of an open file."""
        if self._keeps_open:
            self._kept[name] = descriptor
        else:
            os.close(descriptor)

    def holds(self, name: str) -> bool:
        """Whether this object has a lock."""
        return name in self._held

    def is_taken(self, name: str) -> bool:
        """Whether somebody, who may be this object, holds a lock; nothing is made and nothing written for a look. Raises AcceleratorError."""
        if name in self._held:
            return True
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):  # one that was never made was never taken
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
        """Say who holds a lock, as far as it is written there."""
        try:
            return Path(self._path(name)).read_text(encoding="utf-8", errors="replace").strip() or "somebody"
        except OSError:
            return "somebody"

    @contextlib.contextmanager
    def hold(
        self,
        names: Iterable[str],
        seconds: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> Iterator[None]:
        """Hold several locks, in sorted order, so that two who want the same never wait for each other.

        Raises InUse, which names who holds one, when they are not to be had within the time.
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
        """Return the error for a lock that was not to be had."""
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
            # A confined program may only read there. A lock that was never made was never taken.
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
        except OSError as error:
            raise _unusable(path, error) from error

    def _open_or_make(self, path: str) -> int | None:
        """Open a lock's file, which every claim does, and make its folder where it is missing; None without a driver's folder."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except (FileNotFoundError, NotADirectoryError):
            if not Path(self.state_directory).is_dir():
                return None
        Path(self._folder).mkdir(mode=0o750, exist_ok=True)
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
        hint="Check the folder and its disk.",
        code="lock-unusable",
    )


@contextlib.contextmanager
def library_alone(locks: DeviceLocks, wake: Callable[[], object], seconds: float) -> Iterator[None]:
    """Have the node driver let go of the vendor's library meanwhile, as a reset of a device needs it.

    ``wake`` makes the driver look; where none runs there is nothing to wait for. The driver takes up again afterwards,
    also when this process dies. Raises InUse when it does not let go within the time.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(wake)  # last: when both locks are given back
        stack.enter_context(locks.hold([REQUEST], seconds))
        wake()
        stack.enter_context(locks.hold([LIBRARY], seconds))
        stack.callback(report_resets, locks.state_directory)  # first: before the driver opens the library
        yield
