# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Wait for the events of chips: DCMI's fault events, and changes of the driver's file of vNPUs.

A chip has no event for vNPUs that other programs create or destroy. The driver writes each of them to a file at once,
so the file shows them unless the host does not keep its vNPUs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Callable

from ....host.system import System
from ....model import Notice
from ..readings import Source, Told

#: The vendor's driver records each created or destroyed vNPU in this file, to restore them after a reboot.
PATH = "/etc/vnpu.cfg"
#: The interval, in seconds, at which the file is checked.
PERIOD_SECONDS = 1.0
#: Seconds. A change of the file this soon after a change by this process belongs to that change.
OWN_CHANGE_SECONDS = 2.0
#: The maximum number of events that are kept while no caller waits.
MOST_EVENTS = 256

_Stamp = tuple[int, int, int]


class Watch:
    """Collect the events for callers that wait. ``uuid_of`` returns the UUID of the chip with a logic ID."""

    def __init__(self, source: Source, system: System, uuid_of: Callable[[int], str]) -> None:
        self.source = source
        self._system = system
        self._uuid_of = uuid_of
        self._changed = threading.Condition()
        self._events: deque[Told] = deque(maxlen=MOST_EVENTS)
        self._closing = True
        self._own_changes_running = 0
        self._own_change_ended = float("-inf")
        self._file: _Stamp | None = None

    def begin(self) -> None:
        """Allow waiting."""
        with self._changed:
            self._closing = False
            self._events.clear()
            self._file = self._stamp()
        self.source.subscribe(self._add_event)

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def own_change(self) -> Iterator[None]:
        """Suppress the events of a vNPU change inside the context."""
        with self._changed:
            self._own_changes_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._own_changes_running -= 1
                self._own_change_ended = time.monotonic()

    def wait(self, seconds: float) -> tuple[Notice, ...]:
        """Wait up to ``seconds`` for events, and return them."""
        until = time.monotonic() + seconds
        with self._changed:
            while not self._closing:
                if self._events:
                    events = tuple(self._events)
                    self._events.clear()
                    return tuple(self._notice(each) for each in events)
                if self._was_changed_by_others():
                    return (Notice("", f"Another program created or destroyed slices: {PATH} has changed"),)
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, PERIOD_SECONDS))
        return ()

    def _add_event(self, event: Told) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _was_changed_by_others(self) -> bool:
        """Return whether another program has changed the file since the last check. Call this with the condition held."""
        stamp = self._stamp()
        if stamp == self._file:
            return False
        self._file = stamp
        return not self._own_changes_running and time.monotonic() - self._own_change_ended >= OWN_CHANGE_SECONDS

    def _notice(self, event: Told) -> Notice:
        uuid = self._uuid_of(event.logic_id)
        how = {True: "reports", False: "no longer reports", None: "has reported"}[event.begins]
        name = f" ({event.name})" if event.name else ""
        # Codes are a state: the scan that follows finds the current ones.
        return Notice(uuid, f"NPU {uuid or event.logic_id} {how} error {event.code:#010x}{name}")

    def _stamp(self) -> _Stamp | None:
        try:
            seen = self._system.path(PATH).stat()
        except OSError:
            return None
        return (seen.st_ino, seen.st_mtime_ns, seen.st_size)
