# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The socket server of the DCMI helper.

A connection sends one request. After ``open`` it stays open and receives fault events. Only processes of root are
served. This process itself never loads the library. ``python -I run.py dra_driver.core.vendors.ascend.dcmi.helper_server`` runs the
helper until SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ....errors import AcceleratorError, BackendUnavailable, NotPermitted, unexpected
from ....host.system import System
from . import messages
from .boundary import refuse_container
from .helper_workers import MOST, Workers, worker_command

LOG = logging.getLogger(__name__)

#: The maximum number of connections at a time.
CONNECTIONS = 256
REQUEST_SECONDS = 30.0
#: Seconds after which the processes end if no client uses the library.
LINGER_SECONDS = 5.0
_TICK_SECONDS = 1.0
_CREDENTIALS = struct.Struct("3i")


class Server:
    """Serve clients until ``stop``. ``allowed`` are the user IDs of clients."""

    def __init__(
        self, path: str, workers: Callable[[Callable[[bytes], None]], Workers], allowed: frozenset[int]
    ) -> None:
        self._path = path
        self._workers = workers(self._hear)
        self._allowed = allowed
        self._lock = threading.Lock()
        self._sessions: set[socket.socket] = set()
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        self._running = 0
        self._used = time.monotonic()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Serve no more clients."""
        self._stopping.set()

    def serve(self) -> None:
        """Listen until ``stop``. Raises AcceleratorError if another helper listens, and OSError."""
        listener = _listen(self._path)
        try:
            with listener:
                listener.settimeout(_TICK_SECONDS)
                _notify_ready()
                LOG.info("listening socket=%s", self._path)
                while not self._stopping.is_set():
                    with contextlib.suppress(socket.timeout):
                        connection = listener.accept()[0]
                        self._accept(connection)
                    self._end_idle()
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108
            self._workers.kill()
            for each in self._opened():
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _opened(self) -> tuple[socket.socket, ...]:
        with self._lock:
            return tuple(self._sessions)

    def _accept(self, connection: socket.socket) -> None:
        if not self._places.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._serve, args=(connection,), name="client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(REQUEST_SECONDS)
                reply, opened = self._reply(connection)
                connection.sendall(reply)
                if opened:
                    self._keep(connection)
        finally:
            self._places.release()

    def _keep(self, connection: socket.socket) -> None:
        """Send events to a client until it closes the connection. The processes run at least until then."""
        connection.settimeout(None)
        with self._lock:
            self._sessions.add(connection)
        try:
            while connection.recv(messages.LONGEST_REQUEST):
                pass
        finally:
            with self._lock:
                self._sessions.discard(connection)
                self._used = time.monotonic()

    def _reply(self, connection: socket.socket) -> tuple[bytes, bool]:
        """Return the reply to the request of a connection, and whether the connection stays open."""
        try:
            pid, uid, _gid = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            # Read before a rejection, because a client that still writes would get a broken pipe instead of the reply.
            line = connection.makefile("rb").readline(messages.LONGEST_REQUEST)
            if uid not in self._allowed:
                LOG.warning("a client was refused pid=%d uid=%d", pid, uid)
                raise NotPermitted(f"User {uid} is not allowed to use the DCMI helper", hint="Run the program as root.")
            method = messages.parse_request(line)[0]
            with self._lock:
                self._running += 1
            try:
                reply = self._workers.ask(line)
            finally:
                with self._lock:
                    self._running -= 1
                    self._used = time.monotonic()
            return reply, method == messages.OPEN and reply.startswith(b'{"result"')
        except AcceleratorError as error:
            return messages.failure(error), False
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  the helper serves other clients
            return messages.failure(unexpected(error, "A request to the DCMI helper")), False

    def _hear(self, line: bytes) -> None:
        """Send an event to all clients with an open connection. A client that does not read in time loses the event."""
        for each in self._opened():
            with contextlib.suppress(OSError):
                each.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _end_idle(self) -> None:
        with self._lock:
            is_idle = not self._sessions and not self._running and time.monotonic() - self._used >= LINGER_SECONDS
            if is_idle:
                self._used = time.monotonic()
        if is_idle:
            self._workers.end_idle()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the helper until SIGTERM or SIGINT and return the exit status."""
    parser = argparse.ArgumentParser(description="Opens DCMI on the host for the node driver.")
    parser.add_argument("--socket", default=messages.SOCKET, help="the socket to listen on (default %(default)s)")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=0,
        metavar="N",
        help="how many processes, one for each NPU, may use DCMI at the same time (default 0: all)",
    )
    parser.add_argument("--root", default="/", help="the root directory of the machine (default %(default)s)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    try:
        refuse_container(System(options.root))
    except BackendUnavailable as error:
        LOG.warning("%s", error)  # clients get the same error
    server = Server(
        options.socket,
        lambda hear: Workers(worker_command(options.root), hear, options.concurrency or MOST),
        frozenset({0, os.geteuid()}),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: server.stop())
    try:
        server.serve()
    except AcceleratorError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    LOG.info("stopped")
    return 0


def _notify_ready() -> None:
    """Notify systemd that the socket is served (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.sendto(b"READY=1", f"\0{path[1:]}" if path.startswith("@") else path)


def _listen(path: str) -> socket.socket:
    """Return the listening socket. Raises AcceleratorError if another helper uses it, and OSError."""
    folder = Path(path).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108  of a helper that was killed
        else:
            raise AcceleratorError(f"Another DCMI helper listens on {path}", code="helper-running")
    listener, temporary = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # noqa: PTH108
    previous = os.umask(0o177)
    try:
        listener.bind(temporary)
    finally:
        os.umask(previous)
    listener.listen(CONNECTIONS)
    os.rename(temporary, path)  # noqa: PTH104  a client that finds the socket is served
    return listener


if __name__ == "__main__":
    raise SystemExit(main())
