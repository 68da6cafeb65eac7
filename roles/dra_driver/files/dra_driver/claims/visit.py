# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepares a claim of one device on one visit of that device's thread: look, decide, write down, change, write files.

From thread to thread and back takes a claim as long as most of what it does there. What asks others than the device, or takes its time, is no
matter for a visit: settings, companions, what goes to a virtual machine. Then the visit ends with the plan, and others carry that out.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..core.errors import DeviceFaulty
from ..core.model import Device
from ..metrics import Stopwatch
from .allocation import Allocation
from .asking import answer_of, refuse_missing
from .doing import Doing, Work
from .plan import PreparePlan, refuse_faulty
from .records import ClaimRecord

if TYPE_CHECKING:
    from .service import ClaimService


class Visit:
    """The visit for one claim. The locks of the device are held; ``facts`` and ``plan`` are there once it was made."""

    facts: Mapping[str, Device]
    plan: PreparePlan

    def __init__(
        self, service: ClaimService, doing: Doing, allocation: Allocation, device_uuid: str, watch: Stopwatch
    ) -> None:
        self._service = service
        self._doing = doing
        self._allocation = allocation
        self._uuid = device_uuid
        self._watch = watch
        self._work: Work | None = None
        self._came_of_it: ClaimRecord | Exception | None = None

    async def make(self) -> None:
        """Visit the device. Raises what keeps a claim from being planned; what came of the plan ``tried`` tells."""
        backend = self._service.hands.backend
        call = backend.visit(self._uuid, partial(contextvars.copy_context().run, self._there))
        try:
            await answer_of(call, self._service.thread)
        except Exception as error:
            if self._work is None:
                if isinstance(error, DeviceFaulty):  # it hangs, as it does for whoever only looks
                    refuse_faulty(self._allocation.claim, [self._uuid], {self._uuid: str(error)})
                raise
            self._came_of_it = error

    async def tried(self) -> ClaimRecord:
        """Return the record of the prepared claim. Where the plan failed nothing of it stays. Raises AcceleratorError."""
        if self._work is None:
            return await self._service.carry_out(self.plan, self.facts, self._watch)
        return await self._service.carried_out(self._work, self._outcome())

    async def _outcome(self) -> ClaimRecord:
        if isinstance(self._came_of_it, ClaimRecord):
            return self._came_of_it
        assert self._came_of_it is not None  # noqa: S101  a visit with work has an outcome
        raise self._came_of_it

    def _there(self) -> None:
        service, reference = self._service, self._allocation.claim
        with self._watch.stage("facts"):
            found = service.hands.facts([self._uuid])
        refuse_faulty(reference, [self._uuid], found.faults)
        refuse_missing([self._uuid], found.devices)
        self.facts = found.devices
        self.plan = service.plan(self._allocation, found.devices)
        if not _is_for_a_visit(self.plan) or service.hands.needs_fabric_partition(self.plan.record):
            return
        record = self.plan.record
        self._watch.kind = record.kind
        service.ownership.note(record)
        leave = partial(service.hands.backend.leave, self._uuid)
        self._work = work = Work(
            self.plan, self.facts, service.completion.partitioning_notes(self.plan), self._watch, leave=leave
        )
        self._came_of_it = self._doing.carry_out(work)


def _is_for_a_visit(plan: PreparePlan) -> bool:
    return not any(each.settings or each.sharing or each.passthrough for each in plan.record.devices)
