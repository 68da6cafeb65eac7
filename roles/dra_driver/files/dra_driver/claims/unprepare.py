# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Undo claims, and retry later what a device does not allow now. The caller holds the device locks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..core.errors import AcceleratorError, BackendUnavailable, DeviceFaulty, FabricRejected
from ..core.model import NO_ANSWER, Device
from ..logs import fields
from .claim_fabric import is_activated_by_driver, pending_deactivation, to_deactivate
from .configs import Restoration, pending_restorations, restorations, restorations_to_meta
from .hardware_executor import Facts, HardwareExecutor, UndoResult
from .partitions.ownership import RESTORING_KEY, Ownership
from .pending_cleanups import PendingDeactivation, cleanups_to_meta, fabric_cleanups_in
from .plan import PARTITIONING_KEY, plan_cleanup, plan_undo
from .store.records import ClaimRecord
from .store.store import Store
from .store.tables import Change

LOG = logging.getLogger(__name__)

# Runs a blocking function on a thread.
Thread = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class UnprepareRunner:
    """Undo claims: revert their changes on the hardware, and remove their records from the store in one transaction."""

    hardware: HardwareExecutor
    store: Store
    ownership: Ownership
    boot_id: str
    run_on_thread: Thread

    @property
    def fabric_cleanups(self) -> tuple[PendingDeactivation, ...]:
        """Return the fabric partitions to deactivate when the fabric manager accepts it."""
        return fabric_cleanups_in(self.store.meta, self.boot_id)

    @property
    def pending_uuids(self) -> frozenset[str]:
        """Return the UUIDs of devices with a pending cleanup, on the device or in the fabric."""
        return self.pending_uuids_on_device.union(*(cleanup.device_uuids for cleanup in self.fabric_cleanups))

    @property
    def pending_uuids_on_device(self) -> frozenset[str]:
        """Return the UUIDs of devices with partitions to destroy or settings to restore when they answer again."""
        settings = frozenset(each.device_uuid for each in self._pending_settings())
        return settings.union(cleanup.device_uuid for cleanup in self.ownership.cleanups)

    @property
    def pending(self) -> tuple[str, ...]:
        """Return descriptions of the pending cleanup of ended claims."""
        devices = (f"partitions or settings of device {uuid}" for uuid in sorted(self.pending_uuids_on_device))
        return (*devices, *(cleanup.describe() for cleanup in self.fabric_cleanups))

    def needs_hardware(self, record: ClaimRecord) -> bool:
        """Return whether undoing a claim changes a partition, the partitioning mode, a fabric partition, or a device's driver.

        Then the claim stays until this change is possible. Settings that cannot be restored become a pending cleanup.
        """
        return (
            self.needs_library(record)
            or is_activated_by_driver(record)
            or any(device.passthrough for device in record.devices)
        )

    def needs_library(self, record: ClaimRecord) -> bool:
        """Return whether undoing a claim calls the vendor's library: to destroy a partition or to disable partitioning."""
        return any(
            device.created or any(f"{PARTITIONING_KEY}{uuid}" in self.store.meta for uuid in device.device_uuids)
            for device in record.devices
        )

    def cleared(self, keys: Iterable[str]) -> dict[str, None]:
        """Return changes of the meta table that remove those of the ``keys`` that exist."""
        return {key: None for key in keys if key in self.store.meta}

    async def undo(self, record: ClaimRecord) -> UndoResult:
        """Undo a claim and delete its record. Raises AcceleratorError, for example InUse if a process uses a partition.

        The record stays unchanged until the commit, so an undo that a crash interrupts is repeated.
        """
        is_from_previous_boot = self.ownership.is_from_previous_boot(record)
        settings = (
            ()
            if is_from_previous_boot
            else restorations(record, self.store.claims.values(), self.store.meta, self.boot_id)
        )
        revert = partial(
            self._revert_claim,
            record,
            dict(self.store.meta),
            settings,
            needs_hardware=self.needs_hardware(record),
            is_from_previous_boot=is_from_previous_boot,
        )
        undone: UndoResult = await self.run_on_thread(self._undo, record, revert)
        return undone

    async def clean_up(self, device: Device) -> None:
        """Complete the pending cleanup of a device that answers.

        Raises AcceleratorError: InUse if a process uses a partition, and the code settings-owed if a setting cannot be
        restored.
        """
        if device.uuid not in self.pending_uuids_on_device:
            return
        cleanups = [cleanup for cleanup in self.ownership.cleanups if cleanup.device_uuid == device.uuid]
        settings = tuple(each for each in self._pending_settings() if each.device_uuid == device.uuid)
        plan = replace(plan_cleanup(device, cleanups, self.store.meta), restorations=settings)
        undone: UndoResult = await self.run_on_thread(self.hardware.undo, plan)
        completed = [cleanup.key for cleanup in cleanups if cleanup not in undone.cleanups]
        ended = self.cleared([*completed, *_obsolete_keys(undone)])
        if ended:
            await self.store.commit(Change(meta=ended))
            LOG.info(
                "completed the pending cleanup of a device",
                extra=fields(device=device.describe(), partitions=len(completed), settings=len(undone.restored)),
            )
        if undone.unrestored:
            names = ", ".join(each.name for each in undone.unrestored)
            raise AcceleratorError(
                f"{names} of {device.describe()}, which a claim had set, cannot be set back",
                hint="Check the driver's log. The driver retries it, and a reboot resets all settings.",
                code="settings-owed",
            )

    async def clean_up_fabric(self, uuids: Collection[str]) -> None:
        """Deactivate the fabric partitions with a pending cleanup that contain one of these devices.

        The caller holds the locks of the devices. Raises FabricRejected, BackendUnavailable.
        """
        for cleanup in self.fabric_cleanups:
            if cleanup.device_uuids.isdisjoint(uuids):
                continue
            try:
                await self.run_on_thread(self.hardware.fabric.deactivate, cleanup.number)
            except FabricRejected as error:
                hint = f"No other partition with its devices is activated before that. {error.hint}"
                raise FabricRejected(f"The {cleanup.describe()} is pending: {error.message}", hint=hint) from error
            await self.store.commit(Change(meta={cleanup.key: None}))
            LOG.info("pending cleanup is done", extra=fields(cleanup=cleanup.describe()))

    def _pending_settings(self) -> tuple[Restoration, ...]:
        return pending_restorations(self.store.meta, self.boot_id, self.store.claims.values())

    def _undo(self, record: ClaimRecord, revert: Callable[[], UndoResult]) -> UndoResult:
        """Undo a claim and delete its record in one transaction, on one thread."""
        undone = revert()
        cleanup = pending_deactivation(record, undone.rejection)
        if cleanup is not None:
            LOG.warning("the %s is pending: %s", cleanup.describe(), undone.rejection, extra=fields(uid=record.uid))
        meta = {
            **(cleanup.to_meta(self.boot_id) if cleanup is not None else {}),
            **self.cleared([*_obsolete_keys(undone), f"{RESTORING_KEY}{record.uid}"]),
            **cleanups_to_meta(
                undone.cleanups, None if self.hardware.backend.partitions_outlive_boot else self.boot_id
            ),
            **restorations_to_meta(undone.unrestored, self.boot_id),
        }
        self.store.write(Change(delete=record.uid, meta=meta))
        return undone

    def _revert_claim(
        self,
        record: ClaimRecord,
        meta: Mapping[str, str],
        settings: tuple[Restoration, ...],
        *,
        needs_hardware: bool,
        is_from_previous_boot: bool,
    ) -> UndoResult:
        """Stop a claim's companions, revert its changes on the hardware, and remove its files."""
        undone = UndoResult(unrestored=settings)
        if record.shared:
            self.hardware.stop_companions(record.uid)
            self.hardware.stop_unused_shared_companions(record, tuple(self.store.claims.values()))
        if needs_hardware or settings:
            try:
                undone = self._on_hardware(
                    record, partial(self._revert_hardware, record, meta, settings, is_from_previous_boot)
                )
            except BackendUnavailable:
                if needs_hardware and not is_from_previous_boot:
                    raise
        self.hardware.remove_cdi(record.uid)
        return undone

    def _on_hardware(self, record: ClaimRecord, steps: Callable[[], UndoResult]) -> UndoResult:
        """Run steps on the device's thread, if they need only one device."""
        if any(device.passthrough or device.fabric for device in record.devices):
            return steps()  # the steps close the library for all devices, or call the fabric manager
        try:
            return self.hardware.on_device_thread(record.device_uuids, steps)
        except DeviceFaulty as error:
            if error.code != NO_ANSWER:
                raise
            return steps()  # each call of this device fails at once now, and becomes a pending cleanup

    def _revert_hardware(
        self,
        record: ClaimRecord,
        meta: Mapping[str, str],
        settings: tuple[Restoration, ...],
        is_from_previous_boot: bool,
    ) -> UndoResult:
        """Revert a claim's changes on the hardware. A device without partitioning counts as one on which it was disabled."""
        try:
            found = self.hardware.facts(record.device_uuids)
        except BackendUnavailable as error:
            if is_from_previous_boot or self.needs_library(record):
                raise
            # The fabric and sysfs work without the vendor's driver, which may be unloaded.
            LOG.warning("claim is undone without the vendor's library: %s", error, extra=fields(uid=record.uid))
            found = Facts({}, dict.fromkeys(record.device_uuids, str(error)))
        plan = plan_undo(record, found.devices, meta, tuple(found.faults), is_from_previous_boot=is_from_previous_boot)
        reachable = tuple(each for each in settings if each.device_uuid in found.devices)
        others = [other for other in self.store.claims.values() if not self.ownership.is_from_previous_boot(other)]
        partition = None if is_from_previous_boot else to_deactivate(record, others)
        undone = self.hardware.undo(replace(plan, restorations=reachable, fabric_partition=partition))
        off = [uuid for uuid, device in found.devices.items() if not device.partitioning.enabled]
        # The settings of a device that was removed are removed with it.
        unreachable = tuple(each for each in settings if each.device_uuid in found.faults)
        return replace(
            undone,
            partitioning_disabled=(*undone.partitioning_disabled, *off),
            restored=tuple(each for each in settings if each not in (*undone.unrestored, *unreachable)),
            unrestored=(*undone.unrestored, *unreachable),
        )


def _obsolete_keys(undone: UndoResult) -> list[str]:
    """Return the keys of the meta table that are obsolete after an undo."""
    return [
        *(f"{PARTITIONING_KEY}{uuid}" for uuid in undone.partitioning_disabled),
        *(each.key for each in undone.restored),
    ]
