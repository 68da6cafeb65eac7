# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The names of the stages of claim operations, and the listeners for completed stages.

In production there are no listeners. Recovery tests add one to end the process between two stages.
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
    """Add a function that is called with the name of each completed stage, in the thread that completed it."""
    _listeners.append(listener)


def report_stage(stage: str) -> None:
    """Report to the listeners that a stage is complete. Later work belongs to the next stage."""
    for listener in _listeners:
        listener(stage)
