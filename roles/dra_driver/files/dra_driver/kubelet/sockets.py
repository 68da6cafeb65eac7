# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Unix sockets where the kubelet expects them: short enough, in folders that exist, never another instance's.

Facts: the kernel's limit leaves 107 bytes for a path; grpcio silently unlinks whatever is at the path that it binds to,
and unlinks it again when the server stops, even if a newer server owns it by then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import IO

from ..core.errors import AcceleratorError

LIMIT = 107


class SocketError(AcceleratorError):
    """A socket cannot be served at its path."""

    default_code = "socket-unusable"


def check_length(path: str, setting: str) -> None:
    """Refuse a path that is too long for a unix socket. ``setting`` is what would have to be shortened."""
    length = len(os.fsencode(path))
    if length > LIMIT:
        raise SocketError(
            f"The socket path {path} has {length} bytes; the kernel takes {LIMIT}", hint=f"Shorten {setting}."
        )


def make_room(path: str) -> None:
    """Make the socket's folder and remove a stale socket. Raises SocketError for anything that is no socket."""
    target = Path(path)
    try:
        target.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        status = target.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise SocketError(f"The folder of the socket {path} cannot be used: {error.strerror}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise SocketError(f"{path} is there and is no socket", hint="Find out what put it there, and remove it.")
    remove(path)


def remove(path: str) -> None:
    """Remove a socket; it need not be there."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()


def restrict(path: str) -> None:
    """Let only the socket's owner connect. grpcio makes it with whatever the umask leaves."""
    Path(path).chmod(0o600)


def lock_instance(directory: str) -> IO[bytes]:
    """Take the lock that makes this process the only one with this state; it holds until the file is closed.

    Raises SocketError when another process has it.
    """
    path = Path(directory) / "driver.lock"
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise SocketError(f"The lock {path} cannot be made: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read(32).decode(errors="replace").strip()
        file.close()
        raise SocketError(
            f"Another driver process ({owner or 'unknown'}) uses {directory}",
            hint="Stop it first; one process serves a driver's state.",
            code="already-running",
        ) from error
    file.truncate(0)
    file.write(f"pid {os.getpid()}\n".encode())
    file.flush()
    return file
