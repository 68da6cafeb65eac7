# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Cache the result of a function for a short time."""

from __future__ import annotations

import time
from typing import Callable, Generic, TypeVar

Result = TypeVar("Result")


class TtlCache(Generic[Result]):
    """Call a function and cache its result for a number of seconds. Exceptions are not cached. Thread-safe.

    Concurrent callers without a cached result each call the function. The age of a result counts from the start of its
    call.
    """

    def __init__(
        self, function: Callable[[], Result], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._function = function
        self._seconds = seconds
        self._clock = clock
        self._cached: tuple[float, Result] | None = None  # the time of the call, and its result

    def __call__(self) -> Result:
        """Return the cached result if it is recent enough, else a new one."""
        cached, now = self._cached, self._clock()
        if cached is not None and now - cached[0] < self._seconds:
            return cached[1]
        result = self._function()
        self._cached = (now, result)
        return result

    @property
    def is_due(self) -> bool:
        """Return whether the next call invokes the function; False if caching is off."""
        cached = self._cached
        return self._seconds > 0 and (cached is None or self._clock() - cached[0] >= self._seconds)
