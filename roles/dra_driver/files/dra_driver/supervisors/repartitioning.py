# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Report the progress of a repartitioning of this node: one Event on the Node for each step, with the driver's own permissions.

The program that changes the devices writes its steps to a file next to the driver's store. The name of an Event is
computed from its step. So a restarted driver does not repeat Events, because the API server already has them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Callable, Protocol

from ..core.model import Device
from ..core.repartition.progress import ABANDONED, ENDED, FAILED, RELEASED, StartedStep, StepReader
from ..core.repartition.record import APPLYING, DRAINING, PUBLISHING, REVERTING, Record, Watch
from .driver_state import Shared

#: Seconds between reads of the list of steps.
SECONDS = 1.0
#: Older steps are not reported: an API server keeps Events for one hour by default.
OLDEST_SECONDS = 3000.0


@dataclass(frozen=True)
class StepEvent:
    """The Event for a step: whether it is a warning, its reason, and the text after the devices."""

    warning: bool
    reason: str
    text: str


WORDS: Mapping[str, StepEvent] = {
    DRAINING: StepEvent(
        False, "RepartitionBegun", "no new claim is prepared, and pods with affected partitions must end first"
    ),
    APPLYING: StepEvent(False, "RepartitionChanging", "the affected partitions are free, and the layout is changed"),
    PUBLISHING: StepEvent(False, "RepartitionApplied", "the new layout is applied and verified; it is published next"),
    REVERTING: StepEvent(True, "RepartitionFailed", "a step failed, and the previous layout is restored"),
    RELEASED: StepEvent(False, "RepartitionDone", "the new layout is published, and claims are prepared again"),
    FAILED: StepEvent(
        True, "RepartitionUndone", "a step failed; the previous layout is restored, and claims are prepared again"
    ),
    ENDED: StepEvent(False, "RepartitionEnded", "a later run ended it; the current layout is published"),
    ABANDONED: StepEvent(
        True,
        "RepartitionAbandoned",
        "it did not end in time, so claims are prepared again; run the playbook repartition again, which finishes or reverts it",
    ),
}


class OperationReporter(Protocol):
    """Writes Events on the node."""

    def step(self, reason: str, message: str, *, name: str, warning: bool) -> bool:
        """Write an Event with this name, unless it exists. Return False if the rate limit is reached."""


class Counts(Protocol):
    """Counts the reported steps."""

    def repartition_step(self, step: str) -> None:
        """Count one step."""


def due(steps: Collection[StartedStep], reported: Collection[StartedStep], now: float) -> tuple[StartedStep, ...]:
    """Return the steps to report, in their order."""
    return tuple(each for each in steps if each not in reported and 0 <= now - each.at <= OLDEST_SECONDS)


def abandoned(expired: Record) -> StartedStep:
    """Return the step of an operation that was not completed within its time."""
    return StartedStep(expired.until, expired.operation, expired.devices, ABANDONED)


def message_of(taken: StartedStep, devices: Mapping[str, Device]) -> str:
    """Return the text of a step's Event, with the devices by their descriptions."""
    named = ", ".join(devices[uuid].describe() if uuid in devices else uuid for uuid in taken.devices)
    why = f" {taken.reason.rstrip('.')}." if taken.reason else ""
    return f"{named}: operation {taken.operation}: {WORDS[taken.step].text}.{why}"


def name_of(node: str, driver: str, taken: StartedStep) -> str:
    """Return the name of a step's Event, which is unique for the step."""
    text = "\n".join((driver, repr(taken.at), taken.operation, taken.step))
    return f"{node[:200].rstrip('-.')}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class StepReporter:
    """Report the steps of one vendor's devices.

    ``reported`` are the steps that were reported. ``devices`` returns the devices of the last scan by UUID.
    """

    def __init__(
        self,
        *,
        driver: str,
        node: str,
        directory: str,
        repartition: Watch,
        reported: Shared[frozenset[StartedStep]],
        devices: Callable[[], Mapping[str, Device]],
        reporter: OperationReporter,
        counts: Counts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver = driver
        self._node = node
        self._follow = StepReader(directory)
        self._repartition = repartition
        self._reported = reported
        self._devices = devices
        self._reporter = reporter
        self._counts = counts
        self._clock = clock
        self._began = clock()  # earlier steps were counted by an earlier process

    async def run(self) -> None:
        """Report steps until canceled."""
        while True:
            self.report_steps()
            await asyncio.sleep(SECONDS)

    def report_steps(self) -> None:
        """Report the steps that were not reported yet."""
        now, steps = self._clock(), self._follow.steps()
        expired = self._repartition.expired()
        known = (*steps, *([abandoned(expired)] if expired is not None else []))
        reported = self._reported.value & frozenset(known)
        for each in due(known, reported, now):
            words = WORDS[each.step]
            text = message_of(each, self._devices())
            if not self._reporter.step(
                words.reason, text, name=name_of(self._node, self._driver, each), warning=words.warning
            ):
                break
            if each.at >= self._began:
                self._counts.repartition_step(each.step)
            reported |= {each}
        if reported != self._reported.value:
            self._reported.put(reported)
