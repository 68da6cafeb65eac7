# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The stored claims of a driver, and the state that its tasks share to work on them."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.discovery.device_locks import DeviceLocks
from ..core.repartition.record import Watch
from .locking import DeviceGuard
from .partitions.ownership import Ownership
from .refusals import Refusals
from .store.records import ClaimRecord
from .store.store import Store


@dataclass(frozen=True)
class ClaimState:
    """The stored claims with their partitions, the device locks, the refusals, and the repartition record."""

    store: Store
    ownership: Ownership
    locks: DeviceLocks
    guard: DeviceGuard
    refusals: Refusals
    repartition: Watch

    @classmethod
    def create(cls, store: Store, *, driver: str, directory: str, partitions_boot_id: str | None) -> ClaimState:
        """Return the state for an open store.

        ``partitions_boot_id`` is not set (None) if partitions survive a reboot.
        """
        locks = DeviceLocks(directory, f"the driver {driver}", keeps_open=True)
        return cls(
            store=store,
            ownership=Ownership(store, partitions_boot_id),
            locks=locks,
            guard=DeviceGuard(locks),
            refusals=Refusals(),
            repartition=Watch(directory),
        )

    def records(self) -> tuple[ClaimRecord, ...]:
        """Return the records of all claims."""
        return tuple(self.store.claims.values())

    def device_uuids(self) -> frozenset[str]:
        """Return the devices of all claims."""
        return frozenset(uuid for record in self.records() for each in record.devices for uuid in each.device_uuids)
