# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parts of Prepare: the calls that have not ended, claims of one device, and devices that may reject a partition.

Calls: a Prepare can wait for the driver to become ready. If the kubelet gives up in the meantime, deletes the pod, and
unprepares the claim, the Prepare would block the devices of a claim that has no pod. So a successful Unprepare ends the
calls that arrived before it.

Claims of one device: all steps run on that device's thread, because a change between threads costs a claim as much as
most of the steps. Settings, companions, and passthrough to a virtual machine are slow or need more than the device. With
these, the run ends after the plan, and other code executes it.

Rejections: a device may reject a partition although the counters allow it. Then the driver tries these steps in order.
It reads the device again, because another program may have created a partition. If partitions have numbers instead of
placements, it tries other numbers. It destroys the driver's leftover partitions, and temporarily those of claims whose
pod is not bound yet, so that the free capacity is contiguous. If all steps fail, the claim is refused, and the device is
tainted for a while. A placement is never replaced by another one, because the scheduler counts placements by the
device's name.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..core.errors import AcceleratorError, DeviceFaulty, DoesNotFit
from ..core.model import Device, Placement
from ..logs import fields
from ..metrics import Stopwatch
from .allocation import Allocation
from .device_reads import answer_of, refuse_missing
from .operations import ClaimOperations
from .plan import Inventory, PreparePlan, refuse_faulty
from .plan_runner import PlanRunner, Work
from .refusals import PartitionRefused, Refusals, clearance
from .store.records import ClaimRecord, ClaimReference


class CallOutdated(AcceleratorError):
    """A claim was unprepared after the Prepare call for it had arrived."""

    default_code = "call-outdated"


class PrepareCall:
    """One Prepare call for one claim."""

    def __init__(self, reference: ClaimReference) -> None:
        self._reference = reference
        self.is_outdated = False

    def refuse_outdated(self) -> None:
        """Raise CallOutdated if the claim was unprepared since the call. The lock of the claim is held."""
        if self.is_outdated:
            raise CallOutdated(
                f"Claim {self._reference.describe()} is not prepared: it was unprepared after this call had arrived",
                hint="If a pod still needs the claim, the kubelet calls again.",
            )


class PrepareCalls:
    """The calls of Prepare that have not ended, in any order."""

    def __init__(self) -> None:
        self._calls: dict[str, set[PrepareCall]] = {}

    @contextmanager
    def begin(self, reference: ClaimReference) -> Iterator[PrepareCall]:
        """Register a call from its arrival, before its first wait, to its end."""
        call = PrepareCall(reference)
        calls = self._calls.setdefault(reference.uid, set())
        calls.add(call)
        try:
            yield call
        finally:
            calls.discard(call)
            if not calls:
                self._calls.pop(reference.uid, None)

    @contextmanager
    def ending_earlier(self, uid: str) -> Iterator[None]:
        """Unprepare a claim within this context: if it succeeds, the calls that had arrived before it are outdated."""
        earlier = tuple(self._calls.get(uid, ()))
        yield
        for call in earlier:
            call.is_outdated = True

    def __len__(self) -> int:
        return len(self._calls)


class SingleDevicePrepare:
    """One run for one claim. The locks of the device are held. ``facts`` and ``plan`` are set by ``make``."""

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
        """Read, plan, and execute on the device's thread. Raises the errors of planning. ``tried`` returns or raises the result of the plan."""
        backend = self._service.hardware.backend
        call = backend.start_together(self._uuid, partial(contextvars.copy_context().run, self._there))
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
        assert self._came_of_it is not None  # noqa: S101  a run with work has an outcome
        raise self._came_of_it

    def _there(self) -> None:
        service, reference = self._service, self._allocation.claim
        with self._watch.stage("facts"):
            found = service.hardware.facts([self._uuid])
        refuse_faulty(reference, [self._uuid], found.faults)
        refuse_missing([self._uuid], found.devices)
        self.facts = found.devices
        self.plan = service.plan(self._allocation, found.devices)
        if not _runs_on_one_thread(self.plan) or service.hardware.needs_fabric_partition(self.plan.record):
            return
        record = self.plan.record
        self._watch.kind = record.kind
        service.ownership.note(record)
        release_device = partial(service.hardware.backend.leave, self._uuid)
        self._work = work = Work(
            self.plan,
            self.facts,
            service.completion.partitioning_entries(self.plan),
            self._watch,
            release_device=release_device,
        )
        self._came_of_it = self._runner.carry_out(work)


def _runs_on_one_thread(plan: PreparePlan) -> bool:
    return not any(each.settings or each.sharing or each.passthrough for each in plan.record.devices)


LOG = logging.getLogger(__name__)

#: How many other numbers are tried. A further rejection is not due to the number.
MOST_NUMBERS = 2


class PlacementRetry:
    """Prepare claims of one driver. The caller holds the locks of a claim's devices."""

    def __init__(self, service: ClaimOperations, refusals: Refusals, inventory: Callable[[], Inventory]) -> None:
        self._service = service
        self._refusals = refusals
        self._inventory = inventory

    async def prepare(
        self,
        allocation: Allocation,
        plan: PreparePlan,
        facts: Mapping[str, Device],
        watch: Stopwatch,
        tried: Callable[[], Awaitable[ClaimRecord]] | None = None,
    ) -> ClaimRecord:
        """Prepare a claim as planned, or by one of the other steps.

        ``tried`` returns the result of an attempt with this plan that has already started. Raises AcceleratorError;
        PartitionRefused if no step is left.
        """
        refused: set[tuple[str, Placement]] = set()
        cleared: list[ClaimRecord] = []
        has_cleared = False
        try:
            while True:
                try:
                    if tried is not None:
                        first, tried = tried, None
                        record = await first()
                    else:
                        record = await self._service.carry_out(plan, facts, watch)
                except PartitionRefused as refusal:
                    LOG.warning("a partition is refused that should fit: %s", refusal, extra=_about(plan, refusal))
                    facts = await self._service.facts(plan.record.reference, facts)
                    placement = refusal.held.placement
                    if placement is not None and placement.is_number and len(refused) < MOST_NUMBERS:
                        refused.add((refusal.held.device_uuid, placement))
                        plan = self._service.plan(allocation, facts, refused)
                        continue
                    if not has_cleared:
                        has_cleared = True
                        cleared += await self._clear(plan, refusal, facts)
                        facts = await self._service.facts(plan.record.reference, facts)
                        if cleared:
                            plan = self._service.plan(allocation, facts, refused)
                            continue
                    raise self._refused(refusal, facts) from None  # the rejection's text is logged
                self._note_made(plan)
                return record
        finally:
            for waiting in cleared:
                await self._bring_back(waiting)

    def _note_made(self, plan: PreparePlan) -> None:
        for name in {device.name for device in plan.creates}:
            offer = self._inventory().offers.get(name)  # a scan may have removed it
            if offer is not None:
                self._refusals.made(offer)

    async def _clear(
        self, plan: PreparePlan, refusal: PartitionRefused, facts: Mapping[str, Device]
    ) -> tuple[ClaimRecord, ...]:
        """Destroy the partitions on the rejecting device that may be destroyed. Return the affected claims."""
        service, store = self._service, self._service.store
        others = [record for record in store.claims.values() if record.uid != plan.record.uid]
        found = clearance(facts, refusal.held.device_uuid, others, service.ahead)
        if not found:
            return ()
        # From now on a call of the kubelet for one of these claims restores it first, once the locks of its devices are
        # free.
        service.suspect.update(record.uid for record in found.movable)
        names = [record.describe() for record in (*found.leftovers, *found.movable)]
        LOG.warning("destroying unused partitions to make free space contiguous", extra=fields(claims=names))
        try:
            for record in found.leftovers:
                await service.undo(record)
            await service.thread(service.hardware.destroy, found.destructions)
        except AcceleratorError as error:
            LOG.warning("cannot destroy all of these partitions: %s", error)
        return (*found.leftovers, *found.movable)

    async def _bring_back(self, record: ClaimRecord) -> None:
        """Restore a claim whose partitions were temporarily destroyed. Leftover claims are not restored."""
        service = self._service
        now = service.store.claims.get(record.uid)
        if now is None or not now.prepared:
            return
        try:
            await service.make_again(now, Stopwatch(service.metrics, "restore", record.kind))
        except AcceleratorError as error:
            # Its pod is not bound yet. The next call of the kubelet for the claim retries this.
            LOG.warning("claim %s is not prepared any more: %s", record.describe(), error)
            service.reporter.failed(record.reference, "Restore", error)

    def _refused(self, refusal: PartitionRefused, facts: Mapping[str, Device]) -> PartitionRefused:
        """Record a final rejection, and return an error with its consequences."""
        held = refusal.held
        self._service.metrics.finding("partition-refused")
        hint = f"{refusal.hint} Delete a pod that is already bound to this node: its claim is then allocated again, on another node."
        offer = self._inventory().offers.get(held.name)
        if offer is not None:
            seconds = self._refusals.note(offer, facts[held.device_uuid])
            hint += (
                f" New claims are kept from it for {seconds:.0f} s, or until a partition of the device is destroyed."
            )
        return PartitionRefused(DoesNotFit(refusal.message, blockers=refusal.blockers, hint=hint.strip()), held)


def _about(plan: PreparePlan, refusal: PartitionRefused) -> dict[str, dict[str, Any]]:
    return fields(claim=plan.record.describe(), device=refusal.held.name)
