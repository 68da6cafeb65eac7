# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Create the temporary files of atomic writes, and recognize those that a killed writer left.

A writer holds a lock on its temporary file. A temporary file without a lock belongs to no running writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
from collections.abc import Iterator

#: Flags that create a file and fail if it exists.
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
#: Numbers the temporary files of this process.
_NUMBERS = itertools.count()
#: The part of a temporary file's name that differs between writers: process and number, in earlier releases the process or random characters.
_WRITER = re.compile(r"\d+(-\d+)?|[a-z0-9_]{8}")


def create_temporary(folder: str, name: str) -> tuple[int, str]:
    """Create a file in the directory of the file ``name``, readable by its owner only; return its descriptor and path.

    Raises OSError. The file is locked while its writer lives (``check_orphaned``).
    """
    while True:
        path = f"{folder}/.{name}.{os.getpid()}-{next(_NUMBERS)}.tmp"
        with contextlib.suppress(FileExistsError):  # a file that a killed process with the same PID left
            descriptor = os.open(path, NEW_FILE, 0o600)
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor, path
            os.close(descriptor)  # removed by another writer before it was locked


@contextlib.contextmanager
def check_orphaned(path: str) -> Iterator[bool]:
    """Yield whether the writer of a temporary file was killed: no process in any PID namespace holds the file's lock.

    The with block holds the lock. So a writer that has just created the file waits, and creates it again if the block removes it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        yield error.errno == errno.ELOOP  # a link has no lock; its writer creates it again
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Without a link, the file was removed, and a running writer can have created it again with the same name.
            is_orphaned = os.fstat(descriptor).st_nlink > 0
        except OSError:
            is_orphaned = False
        yield is_orphaned
    finally:
        os.close(descriptor)


def is_temporary_name(candidate: str, name: str) -> bool:
    """Return whether ``candidate`` is the name of a temporary file of the file ``name``."""
    start, end = f".{name}.", ".tmp"
    has_form = candidate.startswith(start) and candidate.endswith(end)
    return has_form and _WRITER.fullmatch(candidate[len(start) : -len(end)]) is not None
