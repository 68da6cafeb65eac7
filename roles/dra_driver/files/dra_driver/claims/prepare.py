# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parts of the Prepare call: outdated calls, claims with a single device, and devices that reject a partition.

Outdated calls: a Prepare can wait until the driver is ready. In the meantime the kubelet can unprepare the claim. The
Prepare would then block the devices of a claim without a pod. So a successful Unprepare ends the earlier calls.

Claims with a single device: all steps run on that device's thread, because a change between threads costs as much as
most steps. Settings, companions, and passthrough to a virtual machine are slow or need more than the device. Plans with
these are executed on other threads.

Rejections: a device may reject a partition although the counters allow it. Then the driver tries these steps in order:

1. Read the device again, because another program may have created a partition. If partitions have numbers instead of
   placements, try other numbers. A placement is never replaced, because the scheduler counts placements by the device's
   name.
2. Destroy the driver's leftover partitions, and temporarily the partitions of claims whose pod is not bound yet, so that
   the free capacity is contiguous.
3. Refuse the claim, and taint the device for some time.
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
from .refusals import PartitionRefused, Refusals, find_removable_partitions
from .store.records import ClaimRecord, ClaimReference

LOG = logging.getLogger(__name__)

#: The number of other partition numbers to try. A further rejection has another cause than the number.
MOST_NUMBERS = 2


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
    """The Prepare calls in progress, by the UID of the claim."""

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
    def outdate_earlier_calls(self, uid: str) -> Iterator[None]:
        """Mark the earlier calls for a claim as outdated if the context ends without an exception."""
        earlier = tuple(self._calls.get(uid, ()))
        yield
        for call in earlier:
            call.is_outdated = True

    def __len__(self) -> int:
        return len(self._calls)


class SingleDevicePrepare:
    """Prepare one claim with a single device, whose locks are held. ``run`` sets ``facts`` and ``plan``."""

    facts: Mapping[str, Device]
    plan: PreparePlan

    def __init__(
        self, service: ClaimOperations, runner: PlanRunner, allocation: Allocation, device_uuid: str, watch: Stopwatch
    ) -> None:
        self._service = service
        self._runner = runner
        self._allocation = allocation
        self._uuid = device_uuid
        self._watch = watch
        self._work: Work | None = None
        self._error: Exception | None = None
        self._record: ClaimRecord | None = None

    async def run(self) -> None:
        """Read, plan, and execute on the device's thread. Raises the errors of reading and planning.

        ``result`` returns the record, or raises the error of the execution.
        """
        backend = self._service.hardware.backend
        call = backend.start_on_device(self._uuid, partial(contextvars.copy_context().run, self._run_on_device))
        try:
            await answer_of(call, self._service.run_on_thread)
        except Exception as error:
            if self._work is None:
                if isinstance(error, DeviceFaulty):  # the device hangs; other reads fail in the same way
                    refuse_faulty(self._allocation.claim, [self._uuid], {self._uuid: str(error)})
                raise
            self._error = error

    async def result(self) -> ClaimRecord:
        """Return the record of the prepared claim. After a failure the claim is undone. Raises AcceleratorError."""
        if self._work is None:
            return await self._service.execute(self.plan, self.facts, self._watch)
        return await self._service.finish(self._work, self._executed())

    async def _executed(self) -> ClaimRecord:
        if self._error is not None:
            raise self._error
        assert self._record is not None  # noqa: S101  an execution without an error has a record
        return self._record

    def _run_on_device(self) -> None:
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
        self._record = self._runner.execute(work)


def _runs_on_one_thread(plan: PreparePlan) -> bool:
    """Return whether a plan has no step that is slow or that needs more than the device."""
    return not any(each.settings or each.sharing or each.passthrough for each in plan.record.devices)


class PlacementRetry:
    """Prepare claims, with the steps that follow when a device rejects a partition. The caller holds the locks of the devices."""

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
        first_result: Callable[[], Awaitable[ClaimRecord]] | None = None,
    ) -> ClaimRecord:
        """Prepare a claim as planned, or by one of the steps after a rejection.

        ``first_result`` returns the result of an attempt with this plan that has already started. Raises
        AcceleratorError: PartitionRefused if no step is left.
        """
        refused: set[tuple[str, Placement]] = set()
        cleared: list[ClaimRecord] = []
        has_cleared = False
        try:
            while True:
                try:
                    if first_result is not None:
                        pending_result, first_result = first_result, None
                        record = await pending_result()
                    else:
                        record = await self._service.execute(plan, facts, watch)
                except PartitionRefused as refusal:
                    LOG.warning("a partition is refused that should fit: %s", refusal, extra=_log_fields(plan, refusal))
                    facts = await self._service.facts(plan.record.reference, facts)
                    placement = refusal.device_record.placement
                    if placement is not None and placement.is_number and len(refused) < MOST_NUMBERS:
                        refused.add((refusal.device_record.device_uuid, placement))
                        plan = self._service.plan(allocation, facts, refused)
                        continue
                    if not has_cleared:
                        has_cleared = True
                        cleared += await self._destroy_unused_partitions(plan, refusal, facts)
                        facts = await self._service.facts(plan.record.reference, facts)
                        if cleared:
                            plan = self._service.plan(allocation, facts, refused)
                            continue
                    raise self._final_refusal(refusal, facts) from None  # the rejection's text is logged
                self._clear_refusals(plan)
                return record
        finally:
            for waiting in cleared:
                await self._restore_moved_claim(waiting)

    def _clear_refusals(self, plan: PreparePlan) -> None:
        """Remove the recorded rejections of the partitions that a plan has created."""
        for name in {device.name for device in plan.partitions_to_create}:
            offer = self._inventory().offers.get(name)  # a scan may have removed it
            if offer is not None:
                self._refusals.remove_disproved(offer)

    async def _destroy_unused_partitions(
        self, plan: PreparePlan, refusal: PartitionRefused, facts: Mapping[str, Device]
    ) -> tuple[ClaimRecord, ...]:
        """Destroy the partitions on the rejecting device that may be destroyed. Return the affected claims."""
        service, store = self._service, self._service.store
        others = [record for record in store.claims.values() if record.uid != plan.record.uid]
        found = find_removable_partitions(facts, refusal.device_record.device_uuid, others, service.prepared_ahead)
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
            await service.run_on_thread(service.hardware.destroy, found.destructions)
        except AcceleratorError as error:
            LOG.warning("cannot destroy all of these partitions: %s", error)
        return (*found.leftovers, *found.movable)

    async def _restore_moved_claim(self, record: ClaimRecord) -> None:
        """Restore a claim whose partitions were temporarily destroyed. Leftover claims are not restored."""
        service = self._service
        now = service.store.claims.get(record.uid)
        if now is None or not now.prepared:
            return
        try:
            await service.restore_locked(now, Stopwatch(service.metrics, "restore", record.kind))
        except AcceleratorError as error:
            # Its pod is not bound yet. The next call of the kubelet for the claim retries this.
            LOG.warning("claim %s is not prepared any more: %s", record.describe(), error)
            service.reporter.failed(record.reference, "Restore", error)

    def _final_refusal(self, refusal: PartitionRefused, facts: Mapping[str, Device]) -> PartitionRefused:
        """Record a final rejection, and return an error with its consequences."""
        device_record = refusal.device_record
        self._service.metrics.finding("partition-refused")
        hint = f"{refusal.hint} Delete a pod that is already bound to this node: its claim is then allocated again, on another node."
        offer = self._inventory().offers.get(device_record.name)
        if offer is not None:
            seconds = self._refusals.add(offer, facts[device_record.device_uuid])
            hint += (
                f" New claims are kept from it for {seconds:.0f} s, or until a partition of the device is destroyed."
            )
        return PartitionRefused(
            DoesNotFit(refusal.message, blockers=refusal.blockers, hint=hint.strip()), device_record
        )


def _log_fields(plan: PreparePlan, refusal: PartitionRefused) -> dict[str, dict[str, Any]]:
    return fields(claim=plan.record.describe(), device=refusal.device_record.name)
