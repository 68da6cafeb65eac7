# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Track which partitions belong to the driver, also while claims change during a hardware scan."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from ...core.model import OwnedPartition
from ..pending_cleanups import PendingDestruction, cleanups_in, obsolete_cleanup_entries
from ..store.records import ClaimRecord
from ..store.store import Store

# A key of the store's meta table, with the claim's UID. The value is the boot in which the driver restores the claim's
# devices.
RESTORING_KEY = "restoring:"


class Observation:
    """Collect the driver's partitions during a hardware scan."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._lock = threading.Lock()
        self._found: dict[str, set[OwnedPartition]] = {}
        self._note_all()

    def note(self, record: ClaimRecord) -> None:
        """Add the partitions that were created, or will be created, for a claim."""
        for device_record in record.devices:
            if device_record.created and device_record.key is not None:
                self._add(device_record.device_uuid, device_record.key)

    def owned(self) -> Mapping[str, frozenset[OwnedPartition]]:
        """Return all partitions that belonged to the driver at any time since the scan began, by device."""
        self._note_all()
        with self._lock:
            return {uuid: frozenset(keys) for uuid, keys in self._found.items()}

    def _note_all(self) -> None:
        for record in self._ownership.records:
            if not self._ownership.is_from_previous_boot(record):
                self.note(record)
        for cleanup in self._ownership.cleanups:
            self._add(cleanup.device_uuid, cleanup.partition)

    def _add(self, device_uuid: str, partition: OwnedPartition) -> None:
        with self._lock:
            self._found.setdefault(device_uuid, set()).add(partition)


class Ownership:
    """The partitions of claims and of pending cleanups. Thread-safe; scans begin and end on the event loop.

    ``boot_id`` is not set (None) if partitions survive a reboot.
    """

    def __init__(self, store: Store, boot_id: str | None) -> None:
        self._store = store
        self._boot_id = boot_id
        self._observations: list[Observation] = []

    @property
    def records(self) -> tuple[ClaimRecord, ...]:
        """Return the claims that are prepared or being prepared."""
        return tuple(self._store.claims.values())

    @property
    def cleanups(self) -> tuple[PendingDestruction, ...]:
        """Return the partitions to destroy when their devices answer again."""
        return cleanups_in(self._store.meta, self._boot_id)

    def is_from_previous_boot(self, record: ClaimRecord) -> bool:
        """Return whether the partitions of a claim were created in a previous boot, and not restored in this boot.

        These partitions no longer exist. A partition at the same placement belongs to the layout or to an administrator.
        """
        if self._boot_id is None:
            return False
        return self._boot_id not in (record.boot_id, self._store.meta.get(f"{RESTORING_KEY}{record.uid}"))

    def obsolete_cleanup_entries(self) -> dict[str, None]:
        """Return the removal of pending cleanups that a reboot completed, as changes of the meta table."""
        return obsolete_cleanup_entries(self._store.meta, self._boot_id)

    def note(self, record: ClaimRecord) -> None:
        """Report to running scans that a claim's partitions are about to be created, because a scan can find them.

        It is not enough to compare the store before and after a scan: a claim can be prepared and unprepared in
        between.
        """
        for observation in tuple(self._observations):
            observation.note(record)

    @contextlib.contextmanager
    def observe(self) -> Iterator[Observation]:
        """Collect the driver's partitions during a hardware scan."""
        observation = Observation(self)
        self._observations.append(observation)
        try:
            yield observation
        finally:
            self._observations.remove(observation)
