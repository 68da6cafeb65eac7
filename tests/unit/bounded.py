# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run a parser on untrusted input with bounds: only documented errors, bounded memory, bounded processor time."""

from __future__ import annotations

import contextlib
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

#: Processor time that one call may use, in seconds. A correct parser needs milliseconds; the bound ends endless loops and
#: backtracking regular expressions.
PROCESSOR_SECONDS = 10.0
#: Memory that one call may allocate: a fixed part in bytes, and a multiple of the input's length.
FIXED_BYTES, BYTES_PER_CHARACTER = 8 * 1024 * 1024, 400
#: The longest error text that a parser may return for untrusted input, in characters.
LONGEST_ERROR = 8192


class TookTooLong(BaseException):
    """A parser used more than PROCESSOR_SECONDS. No parser catches it."""


@contextlib.contextmanager
def _processor_limit() -> Iterator[None]:
    def expire(_signal: int, _frame: object) -> None:
        raise TookTooLong(f"the call used more than {PROCESSOR_SECONDS} s of processor time")

    previous = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, PROCESSOR_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def run_bounded(
    parse: Callable[..., Any], *arguments: Any, errors: tuple[type[Exception], ...], size: int
) -> Any | None:
    """Call ``parse`` and return its result, or None if it raised one of the documented ``errors``.

    ``size`` is the length of the input in characters. Raises AssertionError if the call used too much memory or
    returned a longer error text than LONGEST_ERROR, and TookTooLong if it used too much processor time. Undocumented
    exceptions are not caught.
    """
    result = None
    tracemalloc.start()
    try:
        with _processor_limit():
            try:
                result = parse(*arguments)
            except errors as error:
                assert len(str(error)) <= LONGEST_ERROR, f"an error of {len(str(error))} characters: {str(error)[:300]}"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    allowed = FIXED_BYTES + BYTES_PER_CHARACTER * size
    assert peak <= allowed, f"{peak} bytes for an input of {size} characters; at most {allowed} are allowed"
    return result
