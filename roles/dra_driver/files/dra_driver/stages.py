# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The stages of work on claims, by name, and whoever wants to know that one is complete.

Nobody does in service. Tests of recovery listen, and end the process between two stages.
"""

from __future__ import annotations

from typing import Callable

PREPARE = (
    "claim-fetched",
    "planned",
    "recorded-preparing",
    "partitioning-changed",
    "partition-created",
    "settings-applied",
    "fabric-activated",
    "handed-over",
    "companion-started",
    "recording-prepared",
    "cdi-written",
    "recorded-prepared",
)
UNPREPARE = (
    "unprepare-started",
    "companions-stopped",
    "taken-back",
    "fabric-deactivated",
    "partition-destroyed",
    "partitioning-restored",
    "settings-restored",
    "cdi-removed",
    "record-removed",
)
RECOVERY = ("recovery-planned", "recovery-step-done")
STAGES = PREPARE + UNPREPARE + RECOVERY

Listener = Callable[[str], None]

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Have a function called with the name of each stage as it completes, in the thread that completed it."""
    _listeners.append(listener)


def reached(stage: str) -> None:
    """Say that a stage is complete. The work that follows belongs to the next one."""
    for listener in _listeners:
        listener(stage)
