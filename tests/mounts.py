# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Mounts, by the calls of the kernel: made, changed and taken away by tests that are root."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def mount(kind: str, target: str | Path, options: str = "", source: str = "none", flags: int = 0) -> None:
    """Mount. Raises OSError."""
    words = [word.encode() or None for word in (source, str(target), kind, options)]
    if _LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mounting {kind or source} on {target}: {os.strerror(number)}")


def bind(source: str | Path, target: str | Path) -> None:
    """Show a file or folder at another place."""
    mount("", target, source=str(source), flags=0x1000)


def remount(target: str | Path, *, read_only: bool) -> None:
    """Let nobody write to what is mounted there, or let them again."""
    mount("", target, flags=0x20 | (0x1 if read_only else 0))


def unmount(target: str | Path) -> None:
    """Take away what is mounted there, also where somebody still has a file of it open. Raises OSError."""
    if _LIBC.umount2(str(target).encode(), 2) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unmounting {target}: {os.strerror(number)}")


def mount_image(image: Path, target: Path) -> None:
    """Mount a file system of its own, ext4 in a file, by a loop device. Raises OSError, CalledProcessError."""
    for name, kind, number in (
        ("loop-control", stat.S_IFCHR, os.makedev(10, 237)),
        *((f"loop{minor}", stat.S_IFBLK, os.makedev(7, minor)) for minor in range(64)),
    ):
        if not Path("/dev", name).exists():
            os.mknod(f"/dev/{name}", kind | 0o600, number)
    subprocess.run(["mount", "-o", "loop", image, target], check=True)


def abort(target: Path) -> None:
    """Have the file system there be read-only from here on, as the kernel does when its disk fails, whatever is open on it."""
    mount("", target, "abort", flags=0x20)


def detach(target: Path, seconds: float = 10) -> None:
    """Take away what is mounted there, nobody having a file of it open any more. Raises OSError."""
    deadline = time.monotonic() + seconds
    while _LIBC.umount2(str(target).encode(), 0) != 0:
        number = ctypes.get_errno()
        if time.monotonic() > deadline:
            raise OSError(number, f"unmounting {target}: {os.strerror(number)}")
        time.sleep(0.02)
