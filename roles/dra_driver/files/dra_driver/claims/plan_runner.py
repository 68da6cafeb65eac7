# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Complete a plan with facts from the hardware, execute it, and record its start and completion.

These facts are the state of passthrough devices, the fabric partition, and the current settings. The execution and
its two records run on one thread, because a switch between threads takes as long as most steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import AcceleratorError
from ..core.model import Device, Partition
from ..metrics import Stopwatch
from .configs import fit_settings, previous_setting_entries, refuse_contradiction, settings_by_uuid
from .hardware_executor import HardwareExecutor
from .plan import PARTITIONING_KEY, PreparePlan
from .store.files import StoreError
from .store.records import ClaimRecord
from .store.store import Store
from .store.tables import Change
from .unprepare import UnprepareRunner


class PlanCompletion:
    """Complete plans. ``run_on_thread`` runs blocking calls on a thread of the driver's pool."""

    def __init__(
        self,
        hardware: HardwareExecutor,
        store: Store,
        boot_id: str,
        unprepare_runner: UnprepareRunner,
        run_on_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self._hardware = hardware
        self._store = store
        self._boot_id = boot_id
        self._unprepare_runner = unprepare_runner
        self._run_on_thread = run_on_thread

    async def complete(self, plan: PreparePlan, facts: Mapping[str, Device]) -> tuple[PreparePlan, dict[str, str]]:
        """Return the complete plan and the entries for the store's meta table. Raises AcceleratorError."""
        self._hardware.refuse_unstartable_companions(plan.record)
        if plan.record.passthrough_devices:
            plan = await self._run_on_thread(self._hardware.with_handovers, plan)
        # A prepared claim keeps the partition in its record, which is deactivated with the claim.
        if self._hardware.needs_fabric_partition(plan.record):
            await self._unprepare_runner.clean_up_fabric(plan.record.device_uuids)
            others = [record for record in self._store.claims.values() if record.uid != plan.record.uid]
            plan = await self._run_on_thread(self._hardware.with_fabric, plan, facts, others)
        plan, meta_entries = await self._with_settings(plan)
        return plan, {**self.partitioning_entries(plan), **meta_entries}

    async def _with_settings(self, plan: PreparePlan) -> tuple[PreparePlan, dict[str, str]]:
        """Return the plan with settings that fit its devices, and the previous settings, for the store's meta table."""
        if not settings_by_uuid(plan.record):
            return plan, {}
        refuse_contradiction(plan.record, self._store.claims.values())
        knobs = await self._run_on_thread(self._hardware.knobs, plan.record)
        record = fit_settings(plan.record, knobs)
        return replace(plan, record=record), previous_setting_entries(record, knobs, self._store.meta, self._boot_id)

    def partitioning_entries(self, plan: PreparePlan) -> dict[str, str]:
        """Return the entries of the store's meta table for devices whose partitioning a plan enables."""
        return {f"{PARTITIONING_KEY}{mode.device_uuid}": self._boot_id for mode in plan.mode_changes if mode.enabled}


class FilesUnwritable(AcceleratorError):
    """The files for containers could not be written: disk full, read-only, I/O error."""

    default_code = "files-unwritable"


@dataclass
class Work:
    """A plan in execution, with the facts on which it is based.

    ``initial_meta`` is written to the store's meta table before the hardware changes. ``has_begun`` is set before the
    first change that a rollback may have to undo. ``release_device`` is called when the hardware part is complete.
    """

    plan: PreparePlan
    facts: Mapping[str, Device]
    initial_meta: Mapping[str, str]
    watch: Stopwatch
    has_begun: bool = False
    release_device: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class PlanRunner:
    """Execute plans. Every function blocks and is called on a thread, with the locks of the plan's devices held."""

    hardware: HardwareExecutor
    store: Store
    boot_id: str

    def execute(self, work: Work) -> ClaimRecord:
        """Execute a plan and return the prepared claim's record, which is on disk then. Raises AcceleratorError."""
        plan, watch = work.plan, work.watch
        # A claim with files only needs no earlier record: at the next start the files show that it is prepared.
        if plan.changes_hardware or work.initial_meta:
            with watch.stage("record"):
                self.store.write(Change(put=plan.record, meta=work.initial_meta, durable=self._needs_durable_record))
        work.has_begun = True
        self.hardware.report_stage("recorded-preparing")
        with watch.stage("hardware"):
            record, created = self.hardware.execute(plan)
        work.release_device()
        done = record.as_prepared(record.devices, self.boot_id)
        # Record and files are written in parallel, because both take about the same time. If only one of them exists
        # after a crash, the next start completes or removes the claim. The kubelet gets the answer after both.
        with watch.stage("record"):
            pending_write = self.store.begin(Change(put=done))
        try:
            self.hardware.report_stage("recording-prepared")
            with watch.stage("files"):
                self._write_files(done, work.facts, created, plan.pod_claim)
        except BaseException:
            with contextlib.suppress(StoreError):  # if the write failed, there is nothing to revert
                pending_write.wait()
                self.store.write(Change(put=record))
            raise
        with watch.stage("record"):
            pending_write.wait()
        return done

    @property
    def _needs_durable_record(self) -> bool:
        """Return whether the record must be on disk before the hardware changes.

        This is not necessary if a power failure reverts the changes for a claim. It always reverts settings, passthrough
        to a virtual machine, and the partitioning mode, which is changed only if this needs no reset.
        """
        return self.hardware.backend.partitions_outlive_boot

    def execute_without_records(self, plan: PreparePlan, facts: Mapping[str, Device]) -> ClaimRecord:
        """Execute the hardware part of a plan, and write the files for containers. The caller writes the record. Raises AcceleratorError."""
        record, created = self.hardware.execute(plan)
        self._write_files(record.as_prepared(record.devices, self.boot_id), facts, created, plan.pod_claim)
        return record

    def _write_files(
        self, record: ClaimRecord, facts: Mapping[str, Device], created: Mapping[str, Partition], pod_claim: str | None
    ) -> None:
        try:
            self.hardware.write_cdi(record, facts, created, pod_claim)
        except OSError as error:
            raise FilesUnwritable(
                f"Cannot write the CDI and container files of claim {record.describe()}: {error}",
                hint="Check that the disk is not full or read-only. The claim is prepared with the next request of the kubelet.",
            ) from error
