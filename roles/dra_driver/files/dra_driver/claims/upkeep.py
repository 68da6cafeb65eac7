# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keeps true what no call comes for: files and companions that no claim has, companions that have ended, what is owed on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .adopting import Adopting
from .debts import FabricDebt
from .locks import NamedLocks
from .plan import PARTITIONING_KEY, Inventory, mode_goes_off
from .store_tables import Change

if TYPE_CHECKING:
    from .service import ClaimService


class Upkeep:
    """What is seen to between the kubelet's calls, of the claims of one driver. ``claims`` are the locks of claims."""

    def __init__(
        self, service: ClaimService, claims: NamedLocks, adopting: Adopting, inventory: Callable[[], Inventory]
    ) -> None:
        self._service = service
        self._hands = service.hands
        self._store = service.store
        self._claims = claims
        self._adopting = adopting
        self._inventory = inventory

    def is_busy(self, uid: str) -> bool:
        """Return whether a call works on a claim at this moment, or waits to."""
        return self._claims.is_used(uid)

    async def stale_files(self) -> tuple[str, ...]:
        """Return the UIDs of claims that are not there and have a CDI file, or files for containers. Raises OSError."""
        # One of a claim that is being prepared at this moment may be among them: it is asked for again when that is over.
        found = {
            *await self._service.thread(self._hands.cdi_uids),
            *await self._service.thread(self._hands.files.uids),
        }
        return tuple(sorted(found - self._store.claims.keys()))

    async def remove_files(self, uid: str) -> None:
        """Remove the files of a claim that is not there. Raises OSError."""
        async with self._claims.hold([uid]):
            if uid not in self._store.claims:
                await self._service.thread(self._hands.remove_cdi, uid)
                await self._service.thread(self._hands.files.remove, uid)

    async def has_ended(self, uid: str, boot_id: str) -> bool:
        """Return whether a claim with no CDI file of this boot has ended, according to the API server.

        An old copy of the store contains such claims. False while the API server does not answer.
        """
        record = self._store.claims.get(uid)
        if record is None or not record.name:
            return False
        if record.boot_id == boot_id and self._hands.system.exists(self._hands.cdi_path(uid)):
            return False
        return not await self._adopting.may_be_here(record.reference, self._inventory().pool)

    async def end_companions(self, uid: str) -> None:
        """End the companions of a claim that is not there, or has none. Raises AcceleratorError."""
        async with self._claims.hold([uid]):
            record = self._store.claims.get(uid)
            if record is None or not record.shared:
                await self._service.thread(self._hands.stop_companions, uid)

    async def keep_companions(self, uid: str) -> None:
        """Start those companions of a prepared claim that do not run, and see that all hold what they were told.

        Raises AcceleratorError.
        """
        async with self._claims.hold([uid]):
            record = self._store.claims.get(uid)
            if record is not None and record.prepared:
                for companion in self._hands.companions(record):
                    await self._service.thread(self._hands.keeper.start, companion)
                    await self._service.thread(self._hands.keeper.check, companion)

    async def orphans(self) -> tuple[str, ...]:
        """Return the UIDs that companions run for and no claim has. Raises AcceleratorError."""
        if not self._hands.backend.has_companions:
            return ()  # what runs is of another driver's claims, in this process or not
        # A claim is in the store before its companions start, and until after they have ended.
        found = await self._service.thread(self._hands.keeper.claims)
        shared = {uid for uid, record in self._store.claims.items() if record.shared}
        unknown = found - shared
        known = unknown & self._store.claims.keys()
        return tuple(
            sorted([*known, *await self._adopting.of_no_claim(sorted(unknown - known), self._inventory().pool)])
        )

    async def switch_off(self, device_uuid: str) -> None:
        """Switch partitioning off where the driver left it on with nothing on it. Raises AcceleratorError."""
        key = f"{PARTITIONING_KEY}{device_uuid}"
        async with self._service.holding([device_uuid]):
            found = (await self._service.thread(self._hands.facts, [device_uuid])).devices
            if device_uuid in found and mode_goes_off(found[device_uuid], self._store.meta):
                await self._service.thread(self._hands.backend.set_partitioning, device_uuid, False)
                await self._store.commit(Change(meta={key: None}))

    async def settle(self, device_uuid: str) -> None:
        """Pay what is owed on a device that answers again. Raises AcceleratorError: InUse where it is still in use."""
        async with self._service.holding([device_uuid]):
            found = (await self._service.thread(self._hands.facts, [device_uuid])).devices
            if device_uuid in found:
                await self._service.undoing.pay(found[device_uuid])

    async def settle_fabric(self, debt: FabricDebt) -> None:
        """Deactivate a partition of the fabric that is owed. Raises FabricRejected, BackendUnavailable, InUse."""
        async with self._service.holding(debt.device_uuids):
            await self._service.undoing.pay_fabric(debt.device_uuids)
