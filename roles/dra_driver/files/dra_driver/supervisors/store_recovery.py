# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Open the store of prepared claims, and rebuild it if it is damaged, lost, or outdated."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Callable

from ..claims.configs import default_setting_entries
from ..claims.plan import PARTITIONING_KEY
from ..claims.startup_recovery import claims_with_complete_files, corrected_content, rebuilt_content, records_in_files
from ..claims.store.files import LEAST_BYTES, REMEDY, StoreError, bytes_available, exists, new_store_path, use_new_store
from ..claims.store.records import ClaimRecord, OtherRelease
from ..claims.store.schema import StoreDamaged
from ..claims.store.store import Store
from ..claims.store.tables import Change
from ..core.errors import AcceleratorError
from ..core.host.cdi import remove_temporary_specs
from ..core.host.system import System
from ..core.settings.settings_record import record_damage
from ..core.store.prepared_claims import store_leftovers
from ..logs import StateLog, fields
from .driver_state import Conditions

LOG = logging.getLogger(__name__)

PART = "store"
# The Event on the node while the store cannot be read or written. The recorder increases its count from time to time.
UNUSABLE = "StoreUnusable"
# The Event on the node while the settings that were applied to the node are unknown.
SETTINGS_DAMAGED = "SettingsRecordDamaged"
RETRY_SECONDS = 5.0
# Seconds between checks of the file system, so that problems are found without a claim.
WATCH_SECONDS = 30.0


def unwritable(directory: str) -> str:
    """Return why files in a directory cannot be written, according to its file system; "" if they can."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        return f"{directory} cannot be examined: {error.strerror}"
    if found.f_flag & os.ST_RDONLY:
        return f"{directory} is read-only"
    if bytes_available(found) < LEAST_BYTES:
        return f"the disk of {directory} is full"
    return ""


def _hand_over(loop: asyncio.AbstractEventLoop, report: Callable[[str, str], None], reason: str, message: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed, so no Event is written
        loop.call_soon_threadsafe(report, reason, message)


class StoreSupervisor:
    """Manage the store at ``path``.

    A damaged or lost store is rebuilt from its valid rows and the claims' CDI files.
    """

    def __init__(
        self,
        path: str,
        *,
        system: System,
        cdi_directory: str,
        cdi_kind: str,
        boot_id: str,
        conditions: Conditions,
        report_problem: Callable[[str, str], None],
        settings_record: str = "",
    ) -> None:
        self._path = path
        self._settings_record = settings_record
        self._system = system
        self._cdi_directory = cdi_directory
        self._cdi_kind = cdi_kind
        self._boot_id = boot_id
        self._conditions = conditions
        self._report_problem = report_problem

    async def open(self) -> tuple[Store, bool]:
        """Return the store, and whether it was rebuilt. Retries until it can be read and written.

        A store of an incompatible release is not changed. The driver waits for that release, or until the store is
        removed.
        """
        state = StateLog(LOG)
        self._tidy()
        while True:
            try:
                found = await self._open()
            except (StoreError, OtherRelease, OSError) as error:
                state.report(str(error), level=logging.ERROR)
                self._conditions.report(PART, str(error))
                self._report_problem(
                    UNUSABLE, f"{str(error).rstrip('.')}. The driver retries, and serves no claim until then"
                )
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._conditions.report(PART)
                return found

    async def watch(self) -> None:
        """Report on the node, until canceled, while the store cannot be written or the record of the node's settings is damaged.

        Without claims no other part would report it.
        """
        folder = str(Path(self._path).parent)
        state, settings = StateLog(LOG), StateLog(LOG)
        while True:
            problem = await asyncio.to_thread(unwritable, folder)
            if problem:
                text = f"The store {self._path} cannot be written: {problem}. {REMEDY}"
                state.report(text, level=logging.ERROR)
                self._report_problem(UNUSABLE, text)
            else:
                state.report(f"the store {self._path} can be written", level=logging.DEBUG)
            damage = (
                await asyncio.to_thread(record_damage, self._system, self._settings_record)
                if self._settings_record
                else ""
            )
            settings.report(
                damage or "the record of the node's settings is valid", level=logging.ERROR if damage else logging.DEBUG
            )
            if damage:
                self._report_problem(SETTINGS_DAMAGED, damage)
            await asyncio.sleep(WATCH_SECONDS)

    def follow(self, store: Store) -> None:
        """Report on the node if an open store cannot be written, or was replaced by a new one.

        The store calls back on the thread that writes. Events must be written on this event loop.
        """
        loop = asyncio.get_running_loop()

        def failed(error: AcceleratorError) -> None:
            _hand_over(loop, self._report_problem, UNUSABLE, str(error))

        def replaced(message: str) -> None:
            _hand_over(loop, self._report_problem, "StoreRebuilt", message)

        store.report_failure, store.report_replacement = failed, replaced

    def _tidy(self) -> None:
        """Remove incomplete CDI files of a killed process. No other process writes them now."""
        try:
            removed = remove_temporary_specs(self._system, self._cdi_directory, self._cdi_kind)
        except OSError as error:
            LOG.warning("half-written files in %s cannot be removed: %s", self._cdi_directory, error)
        else:
            if removed:
                LOG.info("removed half-written CDI files", extra=fields(folder=self._cdi_directory, files=removed))

    async def _open(self) -> tuple[Store, bool]:
        resumed = use_new_store(self._path)
        file_records = self._recorded()
        try:
            if not exists(self._path) and (traces := self._traces(file_records)):
                raise StoreDamaged(
                    f"The store {self._path} is lost. It existed, as these show: {', '.join(traces[:3])}"
                )
            store = Store.open(self._path)
        except StoreDamaged as error:
            # The valid part was committed. Without it, claims without a file would be lost, settings of claims would be
            # reset to the device's defaults, and pending cleanups would be lost. Entries of previous boots are void, as
            # in any store.
            return self._rebuild(
                str(error), rebuilt_content(error.valid_part.claims, file_records, self._boot_id), error.valid_part.meta
            ), True
        current = corrected_content(store.claims, file_records, self._boot_id)
        if current is not None:
            store.close()
            lost = ", ".join(sorted(uid for uid in current if current[uid] != store.claims.get(uid)))
            reason = f"The store {self._path} is older than, or contradicts, the CDI files of the claims {lost}"
            return self._rebuild(reason, current, store.meta), True
        for record in claims_with_complete_files(store.claims, file_records, self._boot_id):
            LOG.info("the claim's CDI file is written: it is prepared", extra=fields(claim=record.describe()))
            await store.commit(Change(put=record))
        if resumed and store_leftovers(self._path):
            self._report_problem(
                "StoreRebuilt",
                f"The interrupted replacement of the store {self._path} is completed: the new store has all data that was "
                f"recovered from the old store, with {len(store.claims)} claims",
            )
        return store, resumed

    def _traces(self, file_records: Iterable[ClaimRecord]) -> tuple[str, ...]:
        """Return evidence that a lost store existed: its files, and claims with CDI files.

        An incomplete new store does not count.
        """
        files = (file for file in store_leftovers(self._path) if not file.startswith(new_store_path(self._path)))
        return (*files, *(f"CDI file of claim {record.describe()}" for record in file_records))

    def _recorded(self) -> tuple[ClaimRecord, ...]:
        return records_in_files(self._system, self._cdi_directory, self._cdi_kind)

    def _rebuild(self, reason: str, records: Mapping[str, ClaimRecord], meta: Mapping[str, str]) -> Store:
        LOG.error("%s; it is rebuilt from what of it is sound, and from CDI files", reason)
        # The mark of who enabled partitioning may be lost. On devices with partitions for claims, it was the driver.
        marks = {
            f"{PARTITIONING_KEY}{held.device_uuid}": self._boot_id
            for record in records.values()
            for held in record.devices
            if held.created
        }
        before = default_setting_entries(records.values(), meta, self._boot_id)
        store = Store.rebuild(self._path, records.values(), {**meta, **marks, **before})
        message = f"{reason}. {store.previous or 'nothing'} was set aside; {len(store.claims)} claims were found again"
        LOG.warning("%s", message)
        self._report_problem("StoreRebuilt", message)
        return store
