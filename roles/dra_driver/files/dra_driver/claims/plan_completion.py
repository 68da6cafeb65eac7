# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Complete a plan with the facts that only the hardware has: drivers to hand over, the fabric partition, and settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from ..core.model import Device
from .claim_settings import fit_settings, marks, refuse_contradiction, wanted_of
from .hardware_executor import HardwareExecutor
from .plan import PARTITIONING_KEY, PreparePlan
from .store import Store
from .unprepare import UnprepareRunner


class PlanCompletion:
    """Complete plans. ``thread`` runs blocking calls on a thread of the driver's pool."""

    def __init__(
        self,
        hardware: HardwareExecutor,
        store: Store,
        boot_id: str,
        undoing: UnprepareRunner,
        thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self._hardware = hardware
        self._store = store
        self._boot_id = boot_id
        self._undoing = undoing
        self._thread = thread

    async def complete(self, plan: PreparePlan, facts: Mapping[str, Device]) -> tuple[PreparePlan, dict[str, str]]:
        """Return the complete plan and the entries for the store's meta table. Raises AcceleratorError."""
        self._hardware.refuse_sharing(plan.record)
        if plan.record.away:
            plan = await self._thread(self._hardware.with_handovers, plan)
        # A prepared claim keeps the partition in its record, which is deactivated with the claim.
        if self._hardware.needs_fabric_partition(plan.record):
            await self._undoing.pay_fabric(plan.record.device_uuids)
            others = [record for record in self._store.claims.values() if record.uid != plan.record.uid]
            plan = await self._thread(self._hardware.with_fabric, plan, facts, others)
        plan, notes = await self._with_settings(plan)
        return plan, {**self.partitioning_notes(plan), **notes}

    async def _with_settings(self, plan: PreparePlan) -> tuple[PreparePlan, dict[str, str]]:
        """Return the plan with settings that fit its devices, and the previous settings, for the store's meta table."""
        if not wanted_of(plan.record):
            return plan, {}
        refuse_contradiction(plan.record, self._store.claims.values())
        knobs = await self._thread(self._hardware.knobs, plan.record)
        record = fit_settings(plan.record, knobs)
        return replace(plan, record=record), marks(record, knobs, self._store.meta, self._boot_id)

    def partitioning_notes(self, plan: PreparePlan) -> dict[str, str]:
        """Return the entries of the store's meta table for devices whose partitioning a plan enables."""
        return {f"{PARTITIONING_KEY}{mode.device_uuid}": self._boot_id for mode in plan.mode_changes if mode.enabled}
