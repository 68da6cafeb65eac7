# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read files, directories, links, and device nodes below the root directory of a host."""

from __future__ import annotations

import errno
import fnmatch
import os
import posixpath
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from .paths import MISSING, path_exists

#: Errors after which it is certain that a path is no symbolic link. EINVAL is for any other kind of file, ENODEV for a device that is being removed.
NO_LINK = MISSING | {errno.EINVAL, errno.ENODEV}
# The value that ``fingerprint`` returns for one path.
Stamp = Optional[tuple[int, int]]
_READ_BYTES = 65536


@dataclass(frozen=True)
class DeviceNumber:
    """The identity of a device node: type c or b, major and minor."""

    type: str
    major: int
    minor: int


class HostReads:
    """Read access to a host below a root directory. All given paths are absolute and relative to that root."""

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def path(self, path: str) -> Path:
        """Return the path, from this process's view, of an absolute path on the host."""
        return Path(self.root, path.lstrip("/")) if self.root != "/" else Path(path)

    def _path_text(self, path: str) -> str:
        """Return the result of ``path`` as a string. For each claim, this is faster than a Path."""
        return f"{self.root.rstrip('/')}/{path.lstrip('/')}" if self.root != "/" else path

    def read_bytes(self, path: str) -> bytes:
        """Return a file's content. Raises OSError as open does."""
        # Runs at each claim, mostly for files of a few bytes: avoid objects and further system calls.
        descriptor = os.open(self._path_text(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = [os.read(descriptor, _READ_BYTES)]
            while parts[-1]:
                parts.append(os.read(descriptor, _READ_BYTES))
        finally:
            os.close(descriptor)
        return b"".join(parts)

    def read_text(self, path: str) -> str:
        """Return a file's content as text; bytes that are not UTF-8 are replaced. Raises OSError."""
        return self.read_bytes(path).decode("utf-8", "replace")

    def boot_id(self) -> str:
        """Return the kernel's identity of this boot."""
        return self.read_text("/proc/sys/kernel/random/boot_id").strip()

    def exists(self, path: str) -> bool:
        """Return whether a path leads to a file.

        Raises OSError if this is not known, so that an existing record never counts as missing.
        """
        return path_exists(self._path_text(path))

    def list_directory(self, path: str) -> tuple[str, ...]:
        """Return the names in a directory, sorted; empty if the directory does not exist."""
        try:
            return tuple(sorted(os.listdir(self.path(path))))  # noqa: PTH208 names alone, no objects
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def real_path(self, path: str) -> str:
        """Return the path with all links resolved, as seen below the root."""
        resolved = os.path.realpath(self.path(path))
        if self.root == "/":
            return resolved
        root = os.path.realpath(self.root)
        return "/" + os.path.relpath(resolved, root) if resolved.startswith(root + os.sep) else resolved

    def link_target(self, path: str) -> str:
        """Return the target of a symbolic link, in one step; "" without a link. Raises OSError if this is not known."""
        try:
            return os.readlink(self.path(path))  # noqa: PTH115  a text, as the kernel gives it
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            return ""

    def is_link(self, path: str) -> bool:
        """Return whether the path itself is a symbolic link."""
        return self.path(path).is_symlink()

    def is_socket(self, path: str) -> bool:
        """Return whether the path is a socket."""
        return self.path(path).is_socket()

    def device_number(self, path: str) -> DeviceNumber | None:
        """Return type, major, and minor of a device node; None if the path is not a device node."""
        try:
            found = os.stat(self._path_text(path))  # noqa: PTH116  at each claim: no objects
        except OSError:
            return None
        if stat.S_ISCHR(found.st_mode):
            kind = "c"
        elif stat.S_ISBLK(found.st_mode):
            kind = "b"
        else:
            return None
        return DeviceNumber(kind, os.major(found.st_rdev), os.minor(found.st_rdev))

    def inode(self, path: str) -> int | None:
        """Return the inode number of a path; None if it does not exist."""
        try:
            return self.path(path).stat().st_ino
        except OSError:
            return None

    def find_nodes(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the paths of the device nodes that match shell patterns with wildcards only in the last part."""
        return tuple(
            path
            for folder, last in map(posixpath.split, patterns)
            for path in (f"{folder}/{name}" for name in self.list_directory(folder) if fnmatch.fnmatchcase(name, last))
            if self.device_number(path) is not None
        )

    def can_read(self, path: str) -> bool:
        """Return whether this process can open a file for reading, without opening it. Device cgroups apply (access(2))."""
        return os.access(self._path_text(path), os.R_OK)

    def fingerprint(self, paths: Iterable[str]) -> tuple[Stamp, ...]:
        """Return values that change if something changes at these paths, with one stat each and no read.

        For a directory the value changes when a name is created or removed in it. For any other file it contains the
        kind and a device node's numbers. For a missing file the value is None. File contents do not affect it.
        """
        prefix = "" if self.root == "/" else self.root.rstrip("/")
        found: list[Stamp] = []
        for path in paths:
            try:
                seen = os.stat(prefix + path)  # noqa: PTH116 called for each claim: no objects
            except OSError:
                found.append(None)
                continue
            is_directory = stat.S_ISDIR(seen.st_mode)
            found.append((seen.st_ino, seen.st_mtime_ns) if is_directory else (seen.st_mode, seen.st_rdev))
        return tuple(found)
