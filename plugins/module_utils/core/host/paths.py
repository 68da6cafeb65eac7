# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Determine whether a path exists. After an error such as EACCES or EIO this is not known, and the functions do not guess."""

from __future__ import annotations

import errno
import os

#: Errors after which it is certain that a path leads to no file. After any other, such as EACCES or EIO, this is not known.
MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


def path_exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a path leads to a file.

    Raises OSError if this is not known, which ``os.path.exists`` returns as False.
    """
    try:
        os.stat(path)  # noqa: PTH116  at each claim: no objects
    except ValueError:  # a null byte
        return False
    except OSError as error:
        if error.errno not in MISSING:
            raise
        return False
    return True


def is_missing(path: str) -> bool:
    """Return whether it is certain that nothing exists at this path, not even a link."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno in MISSING
    return False
