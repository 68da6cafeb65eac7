# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Create the Unix sockets that the kubelet connects to, without replacing the socket of another instance.

Facts: the kernel limits a path to 107 bytes. grpcio silently unlinks any file at the path that it binds to. It unlinks
the path again when the server stops, even if a newer server owns it by then. Therefore grpcio gets a private name
(``private_path``), and the socket is renamed to its final path. The kubelet ignores names that begin with a dot.

An old and a new instance of one driver have separate sockets, as kubelets since 1.33 expect it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from ..core.errors import AcceleratorError
from ..core.store.state_files import LOCK

#: The maximum length of a socket's path.
PATH_BYTES = 107
# The kernel accepts a connection for a socket that a process serves, so a short timeout is enough.
CONNECT_SECONDS = 2.0
#: Device and inode of a file.
Identity = tuple[int, int]
# The maximum length of the owner's description in the lock file.
OWNER_BYTES = 128
# Separates the PID and the instance in this description.
INSTANCE_SEPARATOR = " of instance "
LOCK_UNUSABLE = "lock-unusable"
# The suffix of a registration socket's name: "", a pod's UID, or a digest of the instance.
INSTANCE_SUFFIX_PATTERN = "(-[0-9a-f]{8}(-[0-9a-f-]{27})?)?"


@dataclass(frozen=True)
class SocketPaths:
    """The paths of one instance's sockets: for claims, for its registration, and for its status."""

    service: str
    registration: str
    status: str


class SocketError(AcceleratorError):
    """A socket cannot be served at its path."""

    default_code = "socket-unusable"


class DirectoryReplaced(SocketError):
    """The directory of a socket was removed or replaced, and this process cannot reach the new one."""

    default_code = "directory-replaced"


def paths_of(directory: str, registry: str, driver: str, instance: str) -> SocketPaths:
    """Return the socket paths of an instance.

    ``instance`` is "" for the only instance, or for one that is not a pod. ``directory`` is the driver's own directory,
    and ``registry`` the one that the kubelet watches. If a path would be too long, a digest replaces the instance's
    name.
    """
    named = _paths(directory, registry, driver, instance)
    if (
        instance
        and max(len(os.fsencode(path)) for path in (named.service, named.registration, named.status)) > PATH_BYTES
    ):
        return _paths(directory, registry, driver, hashlib.sha256(instance.encode()).hexdigest()[:8])
    return named


def _paths(directory: str, registry: str, driver: str, instance: str) -> SocketPaths:
    suffix = f"-{instance}" if instance else ""
    return SocketPaths(
        service=f"{directory}/dra{suffix}.sock",
        registration=f"{registry}/{driver}{suffix}-reg.sock",
        status=f"{directory}/status{suffix}.sock",
    )


def status_paths(directory: str) -> tuple[str, ...]:
    """Return the status sockets of all instances of the driver in a directory, also of ended ones."""
    try:
        names = os.listdir(directory)  # noqa: PTH208  only the names are read
    except OSError:
        return ()
    return tuple(
        f"{directory}/{name}"
        for name in sorted(names)
        if name == "status.sock" or (name.startswith("status-") and name.endswith(".sock"))
    )


def remove_unserved(directory: str, registry: str, driver: str, own: SocketPaths) -> list[str]:
    """Remove the sockets that no process serves, such as those of a killed pod. Return their paths.

    Otherwise the kubelet would continue to dial them.
    """
    removed = []
    folders = (
        (directory, re.compile(r"(dra|status)(-[A-Za-z0-9-]+)?\.sock")),
        (registry, re.compile(rf"{re.escape(driver)}{INSTANCE_SUFFIX_PATTERN}-reg\.sock")),
    )
    for folder, pattern in folders:
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(folder)):  # noqa: PTH208  only the names are read
                path = f"{folder}/{name}"
                if not pattern.fullmatch(name) or path in (own.service, own.registration, own.status):
                    continue
                if stat.S_ISSOCK(Path(path).lstat().st_mode) and server_of(path) is None:
                    remove(path)
                    removed.append(path)
    return removed


def check_length(path: str, setting: str) -> None:
    """Raise SocketError if a path is too long for a Unix socket. The error names ``setting`` as the one to shorten."""
    length = len(os.fsencode(path))
    if length > PATH_BYTES:
        raise SocketError(
            f"The socket path {path} has {length} bytes; the kernel takes {PATH_BYTES}", hint=f"Shorten {setting}."
        )


def prepare_path(path: str) -> None:
    """Create the socket's directory, and remove a socket that no process serves.

    Raises SocketError if the path is not a socket, or if another process serves the socket.
    """
    target = Path(path)
    try:
        target.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        status = target.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        kind = DirectoryReplaced if error.errno == errno.EROFS else SocketError
        raise kind(f"The directory of the socket {path} cannot be used: {error.strerror}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise SocketError(f"{path} is there and is no socket", hint="Find out what put it there, and remove it.")
    server = server_of(path)
    if server is not None:
        raise SocketError(
            f"The socket {path} is served by {server}",
            hint="Another driver publishes under this name on this node. Stop it, or give one of them another driver_name.",
            code="socket-taken",
        )
    remove(path)


def server_of(path: str) -> str | None:
    """Return a description of the process that serves a socket; None if no process does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError as error:
            return f"a process that does not respond ({error.strerror or error})"
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = struct.unpack("3i", credentials)[0]
    if pid <= 0:  # of a PID namespace that this process cannot see
        return "a process of another container"
    name = "unknown"
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return f"process {pid} ({name})"


def remove(path: str, identity: Identity | None = None) -> None:
    """Remove a socket if it exists. With ``identity``, remove it only if it is still the same socket."""
    if identity is not None and identity_of(path) != identity:
        return
    with contextlib.suppress(OSError):
        Path(path).unlink()


def identity_of(path: str) -> Identity | None:
    """Return device and inode of a file or directory; None if it does not exist.

    A later file at the same path has another identity.
    """
    try:
        status = Path(path).lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def private_path(path: str) -> str:
    """Return the temporary path at which a socket is created, in the same directory. Each socket has a different one.

    If a process is killed before the rename, the temporary socket stays. grpcio removes it at the next start.
    """
    return str(Path(path).parent / f".{hashlib.sha256(path.encode()).hexdigest()[:6]}")


def move_to_path(private: str, path: str) -> Identity | None:
    """Restrict a socket to its owner, move it to its path, and return its identity. Raises OSError."""
    restrict_to_owner(private)
    Path(private).rename(path)
    return identity_of(path)


class GrpcServer(Protocol):
    """A server that has not started yet, such as grpc's."""

    def add_insecure_port(self, address: str) -> int:
        """Add an address to listen on."""

    async def start(self) -> None:
        """Start to serve."""


async def listen(server: GrpcServer, path: str) -> Identity | None:
    """Start a server that listens only at a path, and return the socket's identity.

    Raises SocketError, DirectoryReplaced.
    """
    prepare_path(path)
    private = private_path(path)
    try:
        server.add_insecure_port(f"unix:{private}")
        await server.start()
        return move_to_path(private, path)
    except (RuntimeError, OSError) as error:
        remove(private)
        read_only = not os.access(Path(path).parent, os.W_OK)  # read-only even for root: this process cannot reach it
        raise (DirectoryReplaced if read_only else SocketError)(
            f"The socket {path} cannot be served: {error}",
            hint="The driver must run as root. Check the socket's directory.",
        ) from error


def restrict_to_owner(path: str) -> None:
    """Allow only the socket's owner to connect. grpcio creates the socket with the mode of the umask."""
    Path(path).chmod(0o600)


def lock_instance(directory: str, instance: str = "") -> IO[bytes]:
    """Lock the state directory, so that this process is the only one that uses it.

    The lock is released when the file is closed. Raises SocketError. The code is already-running if another process of
    this instance has the lock, another-instance if a process of another instance has it, and LOCK_UNUSABLE if the file
    cannot be created or written.
    """
    path = Path(directory) / LOCK
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read(OWNER_BYTES).decode(errors="replace").strip()
        file.close()
        is_other = owner.partition(INSTANCE_SEPARATOR)[2] != instance
        raise SocketError(
            f"Another driver process ({owner or 'unknown'}) uses {directory}",
            hint="Stop it first; one process serves a driver's state.",
            code="another-instance" if is_other else "already-running",
        ) from error
    try:
        # The file is overwritten before it is truncated, because a full disk has no block for an emptied file.
        file.seek(0)
        file.truncate(file.write(f"pid {os.getpid()}{INSTANCE_SEPARATOR + instance if instance else ''}\n".encode()))
    except OSError as error:
        file.close()
        raise _unusable(path, error) from error
    return file


def _unusable(path: Path, error: OSError) -> SocketError:
    return SocketError(
        f"The lock {path} cannot be written: {error.strerror}",
        hint="Check that its directory is writable and that the disk is not full. The driver tries again.",
        code=LOCK_UNUSABLE,
    )
