# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Opens the store of prepared claims, whatever state it is found in."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Callable

from ..claims.plan import PARTITIONING_KEY
from ..claims.records import ClaimRecord, NewerRelease
from ..claims.recovery import records_in_files
from ..claims.store import Store, StoreDamaged, StoreError
from ..core.cdi import remove_leftovers
from ..core.system import System
from ..logs import StateLog, fields
from .shared import Conditions

LOG = logging.getLogger(__name__)

PART = "store"
# What one claim's record and its log may take; with less left on the disk none can be written down.
LEAST_BYTES = 1024 * 1024
RETRY_SECONDS = 5.0


def unwritable(directory: str) -> str:
    """Say why nothing could be written down in a folder at this moment, by what its file system says; "" where it could be."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        return f"{directory} cannot be looked at: {error.strerror}"
    if found.f_flag & os.ST_RDONLY:
        return f"{directory} is read-only"
    if found.f_bavail * found.f_frsize < LEAST_BYTES:
        return f"the disk of {directory} is full"
    return ""


class StoreKeeper:
    """The store at ``path``; when it is damaged or lost it is rebuilt from the claims' CDI files."""

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
    ) -> None:
        self._path = path
        self._system = system
        self._cdi_directory = cdi_directory
        self._cdi_kind = cdi_kind
        self._boot_id = boot_id
        self._conditions = conditions
        self._report_problem = report_problem

    async def open(self) -> tuple[Store, bool]:
        """Return the store, and whether it had to be rebuilt; tries until it can be read and written.

        What a newer release has written is left as it is, and the driver waits for that release, or for what it has written to be gone.
        """
        state = StateLog(LOG)
        self._tidy()
        while True:
            try:
                found = self._open()
            except (StoreError, NewerRelease) as error:
                state.report(str(error), level=logging.ERROR)
                self._conditions.report(PART, str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._conditions.report(PART)
                return found

    def _tidy(self) -> None:
        """Remove half-written CDI files of a process that was killed. This one alone writes them now."""
        try:
            removed = remove_leftovers(self._system, self._cdi_directory, self._cdi_kind)
        except OSError as error:
            LOG.warning("half-written files in %s cannot be removed: %s", self._cdi_directory, error)
        else:
            if removed:
                LOG.info("removed half-written CDI files", extra=fields(folder=self._cdi_directory, files=removed))

    def _open(self) -> tuple[Store, bool]:
        try:
            if not Path(self._path).exists() and self._recorded():
                raise StoreDamaged(f"The store {self._path} is not there, but prepared claims are")
            return Store.open(self._path), False
        except StoreDamaged as error:
            LOG.error("%s; it is rebuilt from CDI files", error)  # noqa: TRY400  the file is at fault, not the code
            store = self._rebuild()
            aside = store.former or "nothing"
            message = f"{error}. {aside} was set aside; {len(store.claims)} claims were found again"
            LOG.warning("%s", message)
            self._report_problem("StoreRebuilt", message)
            return store, True

    def _recorded(self) -> tuple[ClaimRecord, ...]:
        return records_in_files(self._system, self._cdi_directory, self._cdi_kind)

    def _rebuild(self) -> Store:
        records = self._recorded()
        # Who switched partitioning on is lost. Where only claims' partitions are, it was the driver.
        marks = {
            f"{PARTITIONING_KEY}{held.device_uuid}": self._boot_id
            for record in records
            for held in record.devices
            if held.created
        }
        return Store.rebuild(self._path, records, marks)
