# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepare a claim of one device in a single run on that device's thread: read, plan, record, change, and write files.

A change between threads costs a claim as much as most of the steps. Slow steps, and steps that need more than the
device, are not part of a visit: settings, companions, and passthrough to a virtual machine. With these the visit ends
after the plan, and other code executes it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from functools import partial

from ..core.errors import DeviceFaulty
from ..core.model import Device
from ..metrics import Stopwatch
from .allocation import Allocation
from .device_reads import answer_of, refuse_missing
from .operations import ClaimOperations
from .plan import PreparePlan, refuse_faulty
from .plan_runner import PlanRunner, Work
from .records import ClaimRecord


class SingleDevicePrepare:
    """The visit for one claim. The locks of the device are held. ``facts`` and ``plan`` are set by ``make``."""

    facts: Mapping[str, Device]
    plan: PreparePlan

    def __init__(
        self, service: ClaimOperations, doing: PlanRunner, allocation: Allocation, device_uuid: str, watch: Stopwatch
    ) -> None:
        self._service = service
        self._runner = doing
        self._allocation = allocation
        self._uuid = device_uuid
        self._watch = watch
        self._work: Work | None = None
        self._came_of_it: ClaimRecord | Exception | None = None

    async def make(self) -> None:
        """Run the visit. Raises the errors of planning. ``tried`` returns or raises the result of the plan."""
        backend = self._service.hardware.backend
        call = backend.visit(self._uuid, partial(contextvars.copy_context().run, self._there))
        try:
            await answer_of(call, self._service.thread)
        except Exception as error:
            if self._work is None:
                if isinstance(error, DeviceFaulty):  # the device hangs; other reads fail in the same way
                    refuse_faulty(self._allocation.claim, [self._uuid], {self._uuid: str(error)})
                raise
            self._came_of_it = error

    async def tried(self) -> ClaimRecord:
        """Return the record of the prepared claim. After a failure the claim is undone. Raises AcceleratorError."""
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
            found = service.hardware.facts([self._uuid])
        refuse_faulty(reference, [self._uuid], found.faults)
        refuse_missing([self._uuid], found.devices)
        self.facts = found.devices
        self.plan = service.plan(self._allocation, found.devices)
        if not _is_for_a_visit(self.plan) or service.hardware.needs_fabric_partition(self.plan.record):
            return
        record = self.plan.record
        self._watch.kind = record.kind
        service.ownership.note(record)
        leave = partial(service.hardware.backend.leave, self._uuid)
        self._work = work = Work(
            self.plan, self.facts, service.completion.partitioning_notes(self.plan), self._watch, leave=leave
        )
        self._came_of_it = self._runner.carry_out(work)


def _is_for_a_visit(plan: PreparePlan) -> bool:
    return not any(each.settings or each.sharing or each.passthrough for each in plan.record.devices)
