# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Sample where a Python process uses processor time: read the stacks of all its threads about 2,000 times a second,
from inside.

A sample finds each thread in a function. It counts if the thread's processor clock has advanced since the last sample
and the thread does not wait. Time in a C library counts for the calling function, or is not attributed if the library
has its own threads. The interpreter's switch interval is reduced to microseconds: otherwise samples would occur only
when a thread pauses itself, and find only waiting threads. Functions of many short calls are over-represented. The
total time of the threads is exact.
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

#: Seconds between two samples, and the interpreter's switch interval in seconds.
INTERVAL, SWITCH = 0.0005, 0.00001
#: Functions in which a thread waits for work. The last two wait in C, for a gRPC message and for a change to the
#: store.
WAITING = (
    "selectors.py: EpollSelector.select",
    "thread.py: _worker",
    "threading.py: Condition.wait",
    "threading.py: Thread.run",
    "store.py: Store._write_groups",
)


class Sampler(threading.Thread):
    """Take samples until the process ends, and write the result so far into a file every second."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="sampler", daemon=True)
        self._path = path
        self._samples: Counter[str] = Counter()
        self._threads: Counter[str] = Counter()
        self._clocks: dict[int, float] = {}

    def run(self) -> None:
        sys.setswitchinterval(SWITCH)
        written = 0.0
        while True:
            time.sleep(INTERVAL)
            self._take_samples()
            if time.monotonic() - written > 1:
                self._write()
                written = time.monotonic()

    def _take_samples(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for number, frame in sys._current_frames().items():
            if number == self.ident:
                continue
            try:
                clock = time.clock_gettime(time.pthread_getcpuclockid(number))
            except OSError:
                continue  # the thread has ended
            used = clock - self._clocks.get(number, clock)
            self._clocks[number] = clock
            self._threads[names.get(number, "unknown")] += used
            if used > 0 and not (name := _name(frame)).endswith(WAITING):
                self._samples[name] += 1

    def _write(self) -> None:
        seconds = time.process_time() - time.thread_time()
        new = self._path.with_suffix(".new")
        result = {"seconds": seconds, "samples": self._samples, "threads": self._threads}
        new.write_text(json.dumps(result), encoding="utf-8")
        os.replace(new, self._path)


def _name(frame: FrameType) -> str:
    """Return the function with the last two parts of its file's path."""
    parts = Path(frame.f_code.co_filename).parts[-2:]
    return f"{'/'.join(parts)}: {frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}"
