# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What chips tell of without being asked: DCMI's fault events. And the file in which slices are kept, which changes with them.

A chip tells of no slice that somebody else makes or destroys. The driver writes each of them to a file at once, so the file
tells, unless the machine does not keep its slices.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Callable

from ..model import Notice
from ..system import System
from .readings import Source, Told

#: In this file the vendor's driver writes down each slice that comes or goes, to make it again after a start of the machine.
PATH = "/etc/vnpu.cfg"
#: How often the file is looked at, in seconds.
PERIOD = 1.0
#: A change of the file that is seen so soon after one of ours is ours.
OURS = 2.0
#: More than that is not kept for who does not listen.
MOST = 256

_Stamp = tuple[int, int, int]


class Watch:
    """Collects what is told for whoever waits."""

    def __init__(self, source: Source, system: System, named: Callable[[int], str]) -> None:
        self.source = source
        self._system = system
        self._named = named
        self._changed = threading.Condition()
        self._told: deque[Told] = deque(maxlen=MOST)
        self._closing = True
        self._changing = 0
        self._own = float("-inf")
        self._file: _Stamp | None = None

    def begin(self) -> None:
        """Allow waiting."""
        with self._changed:
            self._closing = False
            self._told.clear()
            self._file = self._stamp()
        self.source.subscribe(self._hear)

    def close(self) -> None:
        """Have all waiting end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def own_change(self) -> Iterator[None]:
        """Make or destroy a slice without being told of it."""
        with self._changed:
            self._changing += 1
        try:
            yield
        finally:
            with self._changed:
                self._changing -= 1
                self._own = time.monotonic()

    def wait(self, seconds: float) -> tuple[Notice, ...]:
        """Wait until something is told, for so many seconds at most."""
        until = time.monotonic() + seconds
        with self._changed:
            while not self._closing:
                if self._told:
                    told = tuple(self._told)
                    self._told.clear()
                    return tuple(self._notice(each) for each in told)
                if self._others_changed():
                    return (Notice("", f"Slices were made or destroyed by somebody else: {PATH} has changed"),)
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, PERIOD))
        return ()

    def _hear(self, told: Told) -> None:
        with self._changed:
            self._told.append(told)
            self._changed.notify_all()

    def _others_changed(self) -> bool:
        """Whether the file has changed since it was seen last, and not by us. With the condition held."""
        stamp = self._stamp()
        if stamp == self._file:
            return False
        self._file = stamp
        return not self._changing and time.monotonic() - self._own >= OURS

    def _notice(self, told: Told) -> Notice:
        uuid = self._named(told.logic_id)
        how = {True: "tells of", False: "no longer tells of", None: "has told of"}[told.begins]
        name = f" ({told.name})" if told.name else ""
        # Codes are a state: what holds is found by the look that follows.
        return Notice(uuid, f"NPU {uuid or told.logic_id} {how} error {told.code:#010x}{name}")

    def _stamp(self) -> _Stamp | None:
        try:
            seen = self._system.path(PATH).stat()
        except OSError:
            return None
        return (seen.st_ino, seen.st_mtime_ns, seen.st_size)
