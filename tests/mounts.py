# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Create, change, and remove mounts with the system calls of the kernel, for tests that run as root."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def mount(kind: str, target: str | Path, options: str = "", source: str = "none", flags: int = 0) -> None:
    """Mount ``source`` on ``target`` with a file system type (``kind``), options, and MS_* flags. Raises OSError."""
    arguments = [each.encode() or None for each in (source, str(target), kind, options)]
    if _LIBC.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mounting {kind or source} on {target}: {os.strerror(number)}")


def bind(source: str | Path, target: str | Path) -> None:
    """Bind-mount a file or directory at another path."""
    mount("", target, source=str(source), flags=0x1000)


def remount(target: str | Path, *, read_only: bool) -> None:
    """Make a mounted file system read-only or writable again."""
    mount("", target, flags=0x20 | (0x1 if read_only else 0))


def unmount(target: str | Path) -> None:
    """Detach a mount at once, although processes may still have files on it open (MNT_DETACH). Raises OSError."""
    if _LIBC.umount2(str(target).encode(), 2) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unmounting {target}: {os.strerror(number)}")


def mount_image(image: Path, target: Path) -> None:
    """Mount the file system in an image file through a loop device. Raises OSError, CalledProcessError."""
    for name, kind, number in (
        ("loop-control", stat.S_IFCHR, os.makedev(10, 237)),
        *((f"loop{minor}", stat.S_IFBLK, os.makedev(7, minor)) for minor in range(64)),
    ):
        if not Path("/dev", name).exists():
            os.mknod(f"/dev/{name}", kind | 0o600, number)
    subprocess.run(["mount", "-o", "loop", image, target], check=True)


def abort(target: Path) -> None:
    """Make the file system read-only like the kernel after a disk failure, with files still open for writing."""
    mount("", target, "abort", flags=0x20)


def detach(target: Path, seconds: float = 10) -> None:
    """Remove a mount as soon as no process has files on it open. Raises OSError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while _LIBC.umount2(str(target).encode(), 0) != 0:
        number = ctypes.get_errno()
        if time.monotonic() > deadline:
            raise OSError(number, f"unmounting {target}: {os.strerror(number)}")
        time.sleep(0.02)
