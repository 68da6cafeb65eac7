# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Maintain claims between calls of the kubelet: remove stale files and companions, restart companions, and complete pending cleanup."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..core.host.companions import device_of, device_owners
from ..logs import fields
from .locking import NamedLocks
from .lost_claims import LostClaimRecovery
from .operations import ClaimOperations
from .pending_cleanups import PendingDeactivation
from .plan import PARTITIONING_KEY, Inventory, must_disable_partitioning
from .store.tables import Change

LOG = logging.getLogger(__name__)


class Housekeeping:
    """Maintain the claims of one driver between calls of the kubelet. ``claim_locks`` are locks by the claims' UIDs."""

    def __init__(
        self,
        service: ClaimOperations,
        claim_locks: NamedLocks,
        lost_claims: LostClaimRecovery,
        inventory: Callable[[], Inventory],
        boot_id: str,
    ) -> None:
        self._service = service
        self._hardware = service.hardware
        self._store = service.store
        self._claim_locks = claim_locks
        self._lost_claims = lost_claims
        self._inventory = inventory
        self._boot_id = boot_id

    def is_busy(self, uid: str) -> bool:
        """Return whether a call works on a claim now, or waits for its lock."""
        return self._claim_locks.is_used(uid)

    async def stale_files(self) -> tuple[str, ...]:
        """Return the UIDs of unknown claims with a CDI file or files for containers. Raises OSError."""
        # Claims that are being prepared can be among them. ``remove_files`` checks each claim again under its lock.
        found = {
            *await self._service.run_on_thread(self._hardware.cdi_uids),
            *await self._service.run_on_thread(self._hardware.files.uids),
        }
        return tuple(sorted(found - self._store.claims.keys()))

    async def remove_files(self, uid: str) -> None:
        """Remove the files of an unknown claim. Raises OSError."""
        async with self._claim_locks.hold([uid]):
            if uid not in self._store.claims:
                await self._service.run_on_thread(self._hardware.remove_cdi, uid)
                await self._service.run_on_thread(self._hardware.files.remove, uid)

    async def restore(self, uid: str) -> bool:
        """Restore a prepared claim. Return False, and do nothing, if the claim has ended. Raises AcceleratorError.

        The reconciler releases a claim that has ended.
        """
        if await self._has_ended(uid):
            LOG.warning("claim has ended, it is not restored", extra=fields(uid=uid))
            return False
        await self._service.restore(uid)
        return True

    async def _has_ended(self, uid: str) -> bool:
        """Return whether a claim with no CDI file of this boot has ended, according to the API server.

        An old copy of the store contains such claims. While the API server does not answer, the claim counts as not ended.
        """
        record = self._store.claims.get(uid)
        if record is None or not record.name:
            return False
        if record.boot_id == self._boot_id and self._hardware.system.exists(self._hardware.cdi_path(uid)):
            return False
        return not await self._lost_claims.may_exist_here(record.reference, self._inventory().pool)

    async def stop_orphaned_companions(self, uid: str) -> None:
        """Stop the companions of an unknown claim, of a claim without companions, or of a device without claims.

        Raises AcceleratorError.
        """
        device = device_of(uid)
        if device:
            async with self._service.lock_devices([device]):
                if uid not in self._device_owners():
                    await self._service.run_on_thread(self._hardware.stop_companions, uid)
            return
        async with self._claim_locks.hold([uid]):
            record = self._store.claims.get(uid)
            if record is None or not record.shared:
                await self._service.run_on_thread(self._hardware.stop_companions, uid)

    async def ensure_companions(self, uid: str) -> None:
        """Start the stopped companions of a prepared claim, and verify that all have their settings.

        Raises AcceleratorError.
        """
        async with self._claim_locks.hold([uid]):
            record = self._store.claims.get(uid)
            if record is not None and record.prepared:
                for companion in self._hardware.companions(record):
                    await self._service.run_on_thread(self._hardware.companion_services.start, companion)
                    await self._service.run_on_thread(self._hardware.companion_services.check, companion)

    def _device_owners(self) -> set[str]:
        """Return the owners of the companions that claims share with each other."""
        return {owner for record in self._store.claims.values() for owner in device_owners(record.shared)}

    async def orphaned_companions(self) -> tuple[str, ...]:
        """Return the UIDs and owners of companions without a claim. Raises AcceleratorError."""
        if not self._hardware.backend.has_companions:
            return ()  # the node's companions belong to the driver of another vendor
        # A claim is in the store before its companions start, and until after they have ended.
        found = await self._service.run_on_thread(self._hardware.companion_services.claims)
        with_companions = {uid for uid, record in self._store.claims.items() if record.shared} | self._device_owners()
        without_companions = found - with_companions
        known = without_companions & self._store.claims.keys()
        unknown = sorted(without_companions - known)
        gone = await self._lost_claims.uids_without_claim(unknown, self._inventory().pool)
        return tuple(sorted([*known, *gone]))

    async def disable_partitioning(self, device_uuid: str) -> None:
        """Disable partitioning if the driver left it enabled on an empty device. Raises AcceleratorError."""
        key = f"{PARTITIONING_KEY}{device_uuid}"
        async with self._service.lock_devices([device_uuid]):
            found = (await self._service.run_on_thread(self._hardware.facts, [device_uuid])).devices
            if device_uuid in found and must_disable_partitioning(found[device_uuid], self._store.meta):
                await self._service.run_on_thread(self._hardware.backend.set_partitioning, device_uuid, False)
                await self._store.commit(Change(meta={key: None}))

    async def settle(self, device_uuid: str) -> None:
        """Complete the pending cleanup of a device that answers again.

        Raises AcceleratorError; InUse if it is still in use.
        """
        async with self._service.lock_devices([device_uuid]):
            found = (await self._service.run_on_thread(self._hardware.facts, [device_uuid])).devices
            if device_uuid in found:
                await self._service.unprepare_runner.clean_up(found[device_uuid])

    async def complete_fabric_cleanup(self, cleanup: PendingDeactivation) -> None:
        """Deactivate a fabric partition with a pending cleanup. Raises FabricRejected, BackendUnavailable, InUse."""
        async with self._service.lock_devices(cleanup.device_uuids):
            await self._service.unprepare_runner.clean_up_fabric(cleanup.device_uuids)
