# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read and change chips through the node's DCMI helper, which opens the vendor's library on the host.

Each call uses a separate connection, so that calls for different chips run in parallel, and a restart of the helper
affects only the running calls. One more connection stays open while the source is open. It transfers fault events, and
without it the helper ends its processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any, Callable, cast

from ....errors import AcceleratorError, BackendUnavailable
from ....host.system import System
from ....model import Process
from ..readings import Condition, Identity, SliceReadings, Told, Work
from . import messages
from .boundary import HELPER_UNIT
from .dcmi import Spot

#: The timeouts, in seconds, of a connection and of a reply. The helper has shorter deadlines for each call.
CONNECT_SECONDS, REPLY_SECONDS = 10.0, 600.0
_RETRY_SECONDS = 1.0
_LONGEST_PATH = 107


class Helper:
    """The source that uses the DCMI helper. Safe for threads."""

    def __init__(self, system: System) -> None:
        self.name = "DCMI"
        self._system = system
        self._lock = threading.Lock()
        self._session: socket.socket | None = None
        self._callback: Callable[[Told], object] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the helper is connected."""
        return self._session is not None

    def open(self) -> None:
        """Make the helper open the library. A second call finds added and removed chips. Raises BackendUnavailable."""
        self.close()
        session, lines = self._start_session()
        with self._lock:
            self._session = session
        threading.Thread(target=self._listen, args=(session, lines), name="dcmi-events", daemon=True).start()

    def close(self) -> None:
        """Close the connection, and reject further calls."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            _shut(session)

    def driver_version(self) -> str:
        """Return the driver's version."""
        return str(self._call("driver_version"))

    def spots(self) -> tuple[Spot, ...]:
        """Return the positions of the chips."""
        return tuple(self._call("spots"))

    def uuid(self, spot: Spot) -> str:
        """Return the UUID of the chip at a position."""
        return str(self._call("uuid", spot))

    def identity(self, spot: Spot) -> Identity:
        """Return the fixed facts of a chip."""
        return cast("Identity", self._call("identity", spot))

    def link(self, one: Spot, other: Spot) -> str | None:
        """Return the link between two chips."""
        return cast("str | None", self._call("link", one, other))

    def slices(self, spot: Spot) -> SliceReadings | None:
        """Return the resources that vNPUs of a chip share, and its vNPUs."""
        return cast("SliceReadings | None", self._call("slices", spot))

    def free(self, spot: Spot) -> Mapping[str, Fraction]:
        """Return the free resources of a chip for vNPUs."""
        return cast("Mapping[str, Fraction]", self._call("free", spot))

    def template_table(self, spot: Spot) -> str | None:
        """Return the table of a card's templates, as npu-smi prints it."""
        return cast("str | None", self._call("template_table", spot))

    def is_shared(self, spot: Spot) -> bool | None:
        """Return whether several containers can use a chip at a time."""
        return cast("bool | None", self._call("is_shared", spot))

    def processes(self, spot: Spot) -> tuple[Process, ...]:
        """Return the processes that have a chip, or one of its vNPUs, open."""
        return tuple(self._call("processes", spot))

    def condition(self, spot: Spot, without: Collection[str] = ()) -> Condition:
        """Return the health of a chip."""
        return cast("Condition", self._call("condition", spot, without))

    def work(self, spot: Spot) -> Work:
        """Return the telemetry of a chip."""
        return cast("Work", self._call("work", spot))

    def work_of_slice(self, spot: Spot, slice_id: int) -> Work:
        """Return the telemetry of a vNPU."""
        return cast("Work", self._call("work_of_slice", spot, slice_id))

    def create(self, spot: Spot, template: str, slice_id: int, group: int | None) -> None:
        """Create a vNPU."""
        self._call("create", spot, template, slice_id, group)

    def destroy(self, spot: Spot, slice_id: int) -> None:
        """Destroy a vNPU."""
        self._call("destroy", spot, slice_id)

    def reset(self, spot: Spot) -> None:
        """Reset a chip."""
        self._call("reset", spot)

    def rescan(self, spot: Spot) -> None:
        """Make the driver find a chip again after its reset."""
        self._call("rescan", spot)

    def associated_card(self, spot: Spot) -> int | None:
        """Return the card that is reset together with that of a chip."""
        return cast("int | None", self._call("associated_card", spot))

    def is_started(self, spot: Spot) -> bool:
        """Return whether a chip has started after its reset."""
        return bool(self._call("is_started", spot))

    def hindrance(self, spot: Spot) -> str:
        """Return the modes of the host that prevent vNPUs."""
        return str(self._call("hindrance", spot))

    def subscribe(self, callback: Callable[[Told], object]) -> bool:
        """Call a function for each fault event, on the thread of this object."""
        self._callback = callback
        return True

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._connect() as connection:
            try:
                connection.settimeout(REPLY_SECONDS)
                connection.sendall(messages.request(method, arguments))
                with connection.makefile("rb") as lines:
                    line = lines.readline(messages.LONGEST_REPLY)
            except OSError as error:
                raise _unreachable(error) from error
        if not line:
            raise _unreachable("the connection was closed without a reply")
        return messages.parse_reply(line)

    def _start_session(self) -> tuple[socket.socket, Any]:
        session = self._connect()
        try:
            session.settimeout(REPLY_SECONDS)
            session.sendall(messages.request(messages.OPEN, ()))
            lines = session.makefile("rb")
            line = lines.readline(messages.LONGEST_REPLY)
            if not line:
                raise _unreachable("the connection was closed without a reply")
            self.name = str(messages.parse_reply(line))
            session.settimeout(None)
        except OSError as error:
            session.close()
            raise _unreachable(error) from error
        except BackendUnavailable:
            session.close()
            raise
        except AcceleratorError as error:
            session.close()
            raise BackendUnavailable(error.message, hint=error.hint) from error
        return session, lines

    def _listen(self, session: socket.socket, lines: Any) -> None:
        """Deliver events until the source is closed; open another session after a restart of the helper."""
        while True:
            with contextlib.suppress(OSError, ValueError, AcceleratorError):
                for line in lines:
                    event, callback = messages.parse_reply(line), self._callback
                    if callback is not None:
                        callback(event)
            while True:
                with self._lock:
                    if self._session is not session:
                        return
                time.sleep(_RETRY_SECONDS)
                with contextlib.suppress(BackendUnavailable):
                    following, lines = self._start_session()
                    break
            with self._lock:
                is_wanted = self._session is session
                if is_wanted:
                    self._session = following
            _shut(session if is_wanted else following)
            if not is_wanted:
                return
            session = following

    def _connect(self) -> socket.socket:
        path, folder = str(self._system.path(messages.SOCKET)), -1
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if len(os.fsencode(path)) > _LONGEST_PATH:
                folder = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)  # noqa: PTH120
                path = f"/proc/self/fd/{folder}/{os.path.basename(path)}"  # noqa: PTH119
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise _unreachable(error) from error
        finally:
            if folder >= 0:
                os.close(folder)
        return connection


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _unreachable(reason: object) -> BackendUnavailable:
    return BackendUnavailable(
        f"The DCMI helper at {messages.SOCKET} does not answer: {reason}",
        hint=f"Read `journalctl --unit {HELPER_UNIT}`.",
    )
