# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Tells how far a repartitioning of this node is: an Event on the Node for each step, by the driver's own rights.

Whoever changes the devices writes its steps down beside the driver's store. An Event has a name that follows from its step, so that a
driver which was started anew tells nothing twice: the API server has it already.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Callable, Protocol

from ..core.model import Device
from ..core.repartition_record import APPLYING, DRAINING, PUBLISHING, REVERTING, Record, Watch
from ..core.repartition_steps import ABANDONED, ENDED, FAILED, RELEASED, Follow, Taken
from .shared import Shared

#: How often the list of steps is looked at.
SECONDS = 1.0
#: Steps that are older are told no more: an API server keeps Events for an hour unless it was told otherwise.
OLDEST_SECONDS = 3000.0


@dataclass(frozen=True)
class Told:
    """What one Event says of a step: whether it is a warning, its reason, and the text after the devices."""

    warning: bool
    reason: str
    text: str


WORDS: Mapping[str, Told] = {
    DRAINING: Told(
        False, "RepartitionBegun", "no new claim is prepared, and who has a part that goes is asked to leave"
    ),
    APPLYING: Told(False, "RepartitionChanging", "nobody has what goes any more, and the layout is changed"),
    PUBLISHING: Told(False, "RepartitionApplied", "the new layout is there and was looked at; it is published next"),
    REVERTING: Told(True, "RepartitionFailed", "a step has failed, and the former layout is put back"),
    RELEASED: Told(False, "RepartitionDone", "what is there now is published, and claims are prepared again"),
    FAILED: Told(
        True, "RepartitionUndone", "a step has failed; the former layout is there, and claims are prepared again"
    ),
    ENDED: Told(False, "RepartitionEnded", "a later run has ended it; what is there now is published"),
    ABANDONED: Told(
        True,
        "RepartitionAbandoned",
        "nobody has ended it in its time, so claims are prepared again; run the playbook repartition again, which finishes or reverts it",
    ),
}


class Teller(Protocol):
    """Who writes Events on the node."""

    def step(self, reason: str, message: str, *, name: str, warning: bool) -> bool:
        """Write one of this name, unless there is one. False: too many were written in a short time."""


class Counts(Protocol):
    """Who counts."""

    def repartition_step(self, step: str) -> None:
        """A step was told."""


def due(steps: Collection[Taken], told: Collection[Taken], now: float) -> tuple[Taken, ...]:
    """Return the steps that are to be told, in their order. Pure."""
    return tuple(each for each in steps if each not in told and 0 <= now - each.at <= OLDEST_SECONDS)


def abandoned(expired: Record) -> Taken:
    """Return the step of an operation that was not completed within its time. Pure."""
    return Taken(expired.until, expired.operation, expired.devices, ABANDONED)


def message_of(taken: Taken, devices: Mapping[str, Device]) -> str:
    """Say a step in words, with the devices as people know them."""
    named = ", ".join(devices[uuid].describe() if uuid in devices else uuid for uuid in taken.devices)
    why = f" {taken.reason.rstrip('.')}." if taken.reason else ""
    return f"{named}: operation {taken.operation}: {WORDS[taken.step].text}.{why}"


def name_of(node: str, driver: str, taken: Taken) -> str:
    """Return the name of a step's Event: the same for the same step, and another one for any other."""
    text = "\n".join((driver, repr(taken.at), taken.operation, taken.step))
    return f"{node[:200].rstrip('-.')}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class StepTeller:
    """One vendor's devices. ``told`` are the steps that were told, ``devices`` gives those of the last look by UUID."""

    def __init__(
        self,
        *,
        driver: str,
        node: str,
        directory: str,
        repartition: Watch,
        told: Shared[frozenset[Taken]],
        devices: Callable[[], Mapping[str, Device]],
        teller: Teller,
        counts: Counts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver = driver
        self._node = node
        self._follow = Follow(directory)
        self._repartition = repartition
        self._told = told
        self._devices = devices
        self._teller = teller
        self._counts = counts
        self._clock = clock
        self._began = clock()  # what came before was counted before

    async def run(self) -> None:
        """Tell of steps until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(SECONDS)

    def look(self) -> None:
        """Tell what has not been told."""
        now, steps = self._clock(), self._follow.steps()
        expired = self._repartition.expired()
        known = (*steps, *([abandoned(expired)] if expired is not None else []))
        told = self._told.value & frozenset(known)
        for each in due(known, told, now):
            words = WORDS[each.step]
            text = message_of(each, self._devices())
            if not self._teller.step(
                words.reason, text, name=name_of(self._node, self._driver, each), warning=words.warning
            ):
                break
            if each.at >= self._began:
                self._counts.repartition_step(each.step)
            told |= {each}
        if told != self._told.value:
            self._told.put(told)
