# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The stages of work on claims, by name, and the place where a test can kill the process between two of them.

With the environment variable ``DRA_ACCELERATORS_STOP_AT=<stage>`` the process sends itself SIGKILL the first time that
it reaches the stage: nothing is flushed, closed or cleaned up, as in a crash. ``<stage>:<n>`` stops at the n-th time.
Without the variable nothing happens. Tests of recovery use it; it is of no use on a node in service.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Callable

VARIABLE = "DRA_ACCELERATORS_STOP_AT"

PREPARE = (
    "claim-fetched",
    "planned",
    "recorded-preparing",
    "partitioning-changed",
    "partition-created",
    "cdi-written",
    "recorded-prepared",
)
UNPREPARE = (
    "unprepare-started",
    "partition-destroyed",
    "partitioning-restored",
    "cdi-removed",
    "record-removed",
)
RECOVERY = ("recovery-planned", "recovery-step-done")
STAGES = PREPARE + UNPREPARE + RECOVERY


def _kill_own_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class StopPoint:
    """Counts how often each stage was reached and stops the process at the one that was asked for.

    ``wanted`` is "" (never), "<stage>" or "<stage>:<n>". Raises ValueError for a stage that does not exist.
    """

    def __init__(self, wanted: str = "", stop: Callable[[], None] = _kill_own_process) -> None:
        stage, _colon, number = wanted.partition(":")
        if stage and stage not in STAGES:
            raise ValueError(f"{VARIABLE} is {wanted!r}; expected one of {', '.join(STAGES)}, or one of them with :<n>")
        self._stage = stage
        self._number = int(number or 1)
        self._stop = stop
        self._seen: Counter[str] = Counter()

    def reached(self, stage: str) -> None:
        """Say that a stage is complete. The work that follows belongs to the next one."""
        if not self._stage:
            return
        self._seen[stage] += 1
        if stage == self._stage and self._seen[stage] == self._number:
            self._stop()

    @classmethod
    def from_environment(cls) -> StopPoint:
        """Read the environment variable."""
        return cls(os.environ.get(VARIABLE, ""))
