# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""One answer for those who ask the same thing within a moment."""

from __future__ import annotations

import time
from typing import Callable, Generic, TypeVar

Answer = TypeVar("Answer")


class Lately(Generic[Answer]):
    """Calls a function, unless what it answered is not older than so many seconds. What it raises is not kept. Safe for threads.

    Two threads that come together both call it. An answer counts as old as the beginning of its call.
    """

    def __init__(
        self, function: Callable[[], Answer], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._function = function
        self._seconds = seconds
        self._clock = clock
        self._last: tuple[float, Answer] | None = None

    def __call__(self) -> Answer:
        """Return the answer of within those seconds, or of now."""
        last, now = self._last, self._clock()
        if last is not None and now - last[0] < self._seconds:
            return last[1]
        answer = self._function()
        self._last = (now, answer)
        return answer

    @property
    def is_due(self) -> bool:
        """Whether who asks now has the function called; never where nothing is kept."""
        last = self._last
        return self._seconds > 0 and (last is None or self._clock() - last[0] >= self._seconds)
