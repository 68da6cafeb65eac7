# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Progress lines: the current step, its elapsed time, and its usual duration."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from .pins import USUAL_SECONDS

_lock = threading.Lock()
_started = time.monotonic()


def say(message: str) -> None:
    """Print one line on stderr with the seconds since the program started."""
    with _lock:
        print(f"[{time.monotonic() - _started:6.1f} s] {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(kind: str, name: str = "") -> Iterator[None]:
    """Report a step: a line when it starts (with its usual duration), one every 30 s, and one when it ends."""
    title = f"{kind} {name}".strip()
    usual = USUAL_SECONDS.get(kind)
    say(f"{title}: started" + (f" (usually {usual} s)" if usual else ""))
    begun = time.monotonic()
    finished = threading.Event()

    def remind() -> None:
        while not finished.wait(30):
            say(f"{title}: still running after {time.monotonic() - begun:.0f} s")

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
    except BaseException:
        say(f"{title}: FAILED after {time.monotonic() - begun:.1f} s")
        raise
    finally:
        finished.set()
        reminder.join()
    say(f"{title}: done in {time.monotonic() - begun:.1f} s")
