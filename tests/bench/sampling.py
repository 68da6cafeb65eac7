# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Where a process of Python spends its processor time: a look at all its threads, thousands of times a second, from inside.

A look finds each thread in a function; one counts whose thread's own processor clock has gone on since the last look, and that does not wait. What a
library does outside Python counts for the function that has called it, and for nobody where it has threads of its own. The interpreter
is told to let go of a computing thread within microseconds: a look that came when a thread pauses by itself would find waiting alone.
A function of many short calls is seen more often than its time is worth; what the threads have used is exact.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

#: Between two looks, and as long as a thread may keep the interpreter from one, in seconds.
INTERVAL, SWITCH = 0.0005, 0.00001
#: Functions in which a thread waits for work; the last two wait in C, for a message to gRPC and for a change to the store.
WAITING = (
    "selectors.py: EpollSelector.select",
    "thread.py: _worker",
    "threading.py: Condition.wait",
    "threading.py: Thread.run",
    "store.py: Store._write_groups",
)


class Sampler(threading.Thread):
    """Looks until the process ends, and writes what it has seen so far into a file every second."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="sampler", daemon=True)
        self._path = path
        self._looks: Counter[str] = Counter()
        self._threads: Counter[str] = Counter()
        self._clocks: dict[int, float] = {}

    def run(self) -> None:
        sys.setswitchinterval(SWITCH)
        written = 0.0
        while True:
            time.sleep(INTERVAL)
            self._look()
            if time.monotonic() - written > 1:
                self._write()
                written = time.monotonic()

    def _look(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for number, frame in sys._current_frames().items():
            if number == self.ident:
                continue
            try:
                clock = time.clock_gettime(time.pthread_getcpuclockid(number))
            except OSError:
                continue  # it has ended
            taken = clock - self._clocks.get(number, clock)
            self._clocks[number] = clock
            self._threads[names.get(number, "unknown")] += taken
            if taken > 0 and not (name := _name(frame)).endswith(WAITING):
                self._looks[name] += 1

    def _write(self) -> None:
        seconds = time.process_time() - time.thread_time()
        new = self._path.with_suffix(".new")
        seen = {"seconds": seconds, "looks": self._looks, "threads": self._threads}
        new.write_text(json.dumps(seen), encoding="utf-8")
        os.replace(new, self._path)


def _name(frame: FrameType) -> str:
    """The function, with the last two parts of its file's path."""
    parts = Path(frame.f_code.co_filename).parts[-2:]
    return f"{'/'.join(parts)}: {frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}"
