# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Sync the directory's data to the disk, then write the file ``complete`` with the size of each file in the directory.

    python stamp.py DIRECTORY

Without this order a power failure can leave ``complete`` next to empty files. ``node_info`` compares the sizes with the
files, and a directory with a difference is created again. ``__pycache__`` is left out, because Python writes there
later. Uses the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import sys
from pathlib import Path

NAME = "complete"
LEFT_OUT = "__pycache__"


def sizes(directory: Path) -> dict[str, int]:
    """Return the size in bytes of each file and symbolic link, by its path in the directory, sorted. Raises OSError."""
    found: dict[str, int] = {}
    folders = [directory]
    while folders:
        for path in folders.pop().iterdir():
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                folders += [path] if path.name != LEFT_OUT else []
            elif path != directory / NAME:
                found[path.relative_to(directory).as_posix()] = status.st_size
    return dict(sorted(found.items()))


def sync_file_system(directory: Path) -> None:
    """Write everything on the directory's file system to the disk (syncfs(2)). Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))
    finally:
        os.close(descriptor)


def write_stamp(directory: Path) -> None:
    """Sync the directory's files, then write the stamp and sync it. Raises OSError."""
    target, new = directory / NAME, directory / f"{NAME}.new"
    new.unlink(missing_ok=True)
    text = json.dumps({"sizes": sizes(directory)})
    sync_file_system(directory)
    with new.open("w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(target)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> int:
    """Write the stamp and return the exit status."""
    try:
        write_stamp(Path(arguments[0]))
    except OSError as error:
        sys.stderr.write(
            f"Cannot write {arguments[0]}/{NAME}: {error}. Correct the file system, then run this again.\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
