# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Cache the result of a function for a short time."""

from __future__ import annotations

import time
from typing import Callable, Generic, TypeVar

Answer = TypeVar("Answer")


class TtlCache(Generic[Answer]):
    """Call a function and cache its result for a number of seconds. Exceptions are not cached. Thread-safe.

    Concurrent callers without a cached result each call the function. The age of a result counts from the start of its
    call.
    """

    def __init__(
        self, function: Callable[[], Answer], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._function = function
        self._seconds = seconds
        self._clock = clock
        self._last: tuple[float, Answer] | None = None

    def __call__(self) -> Answer:
        """Return the cached result if it is recent enough, else a new one."""
        last, now = self._last, self._clock()
        if last is not None and now - last[0] < self._seconds:
            return last[1]
        answer = self._function()
        self._last = (now, answer)
        return answer

    @property
    def is_due(self) -> bool:
        """Return whether the next call invokes the function; False if caching is off."""
        last = self._last
        return self._seconds > 0 and (last is None or self._clock() - last[0] >= self._seconds)
