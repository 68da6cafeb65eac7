# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Opens the store of prepared claims, whatever state it is found in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Callable

from ..claims.forms import StoreDamaged
from ..claims.plan import PARTITIONING_KEY
from ..claims.records import ClaimRecord, OtherRelease
from ..claims.recovery import amended, completed, found_again, records_in_files
from ..claims.settings import forgotten
from ..claims.store import Store
from ..claims.store_files import LEAST_BYTES, REMEDY, StoreError, new_store, take_new
from ..claims.store_tables import Change
from ..core.cdi import remove_leftovers
from ..core.errors import AcceleratorError
from ..core.prepared import store_leftovers
from ..core.system import System
from ..logs import StateLog, fields
from .shared import Conditions

LOG = logging.getLogger(__name__)

PART = "store"
# The Event on the node while nothing can be read or written down. The recorder raises its count now and then.
UNUSABLE = "StoreUnusable"
RETRY_SECONDS = 5.0
# How often the folder's file system is looked at while no claim comes that would show what is wrong with it.
WATCH_SECONDS = 30.0


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


def _hand_over(loop: asyncio.AbstractEventLoop, tell: Callable[[str, str], None], reason: str, message: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody tells anything any more
        loop.call_soon_threadsafe(tell, reason, message)


class StoreKeeper:
    """The store at ``path``; when it is damaged or lost it is rebuilt from what of it is sound, and the claims' CDI files."""

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

        What another release has written that none leads to this one from is left as it is: the driver waits for that release, or for what
        it has written to be gone.
        """
        state = StateLog(LOG)
        self._tidy()
        while True:
            try:
                found = await self._open()
            except (StoreError, OtherRelease) as error:
                state.report(str(error), level=logging.ERROR)
                self._conditions.report(PART, str(error))
                self._report_problem(
                    UNUSABLE, f"{str(error).rstrip('.')}. The driver goes on trying, and serves no claim until then"
                )
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._conditions.report(PART)
                return found

    async def watch(self) -> None:
        """Tell on the node, until cancelled, while nothing could be written down: without claims nothing else would show it."""
        folder = str(Path(self._path).parent)
        state = StateLog(LOG)
        while True:
            problem = await asyncio.to_thread(unwritable, folder)
            if problem:
                text = f"The store {self._path} cannot be written: {problem}. {REMEDY}"
                state.report(text, level=logging.ERROR)
                self._report_problem(UNUSABLE, text)
            else:
                state.report(f"the store {self._path} can be written", level=logging.DEBUG)
            await asyncio.sleep(WATCH_SECONDS)

    def follow(self, store: Store) -> None:
        """Tell on the node what happens to an open store: that it cannot be written, or had to be written anew.

        The store tells it on whichever thread writes; Events are this event loop's.
        """
        loop = asyncio.get_running_loop()

        def failed(error: AcceleratorError) -> None:
            _hand_over(loop, self._report_problem, UNUSABLE, str(error))

        def replaced(message: str) -> None:
            _hand_over(loop, self._report_problem, "StoreRebuilt", message)

        store.failed, store.replaced = failed, replaced

    def _tidy(self) -> None:
        """Remove half-written CDI files of a process that was killed. This one alone writes them now."""
        try:
            removed = remove_leftovers(self._system, self._cdi_directory, self._cdi_kind)
        except OSError as error:
            LOG.warning("half-written files in %s cannot be removed: %s", self._cdi_directory, error)
        else:
            if removed:
                LOG.info("removed half-written CDI files", extra=fields(folder=self._cdi_directory, files=removed))

    async def _open(self) -> tuple[Store, bool]:
        resumed = take_new(self._path)
        told = self._recorded()
        try:
            if not os.path.lexists(self._path) and (traces := self._traces(told)):
                raise StoreDamaged(
                    f"The store {self._path} is lost. It existed, as these show: {', '.join(traces[:3])}"
                )
            store = Store.open(self._path)
        except StoreDamaged as error:
            # What is sound was committed. Without it claims without a file would be lost, what claims have set would go to
            # the device's default, and what is owed would be forgotten. Entries of former boots are void, as ever.
            return self._rebuild(
                str(error), found_again(error.sound.claims, told, self._boot_id), error.sound.meta
            ), True
        current = amended(store.claims, told, self._boot_id)
        if current is not None:
            store.close()
            lost = ", ".join(sorted(uid for uid in current if current[uid] != store.claims.get(uid)))
            reason = f"The store {self._path} is older than, or contradicts, the CDI files of the claims {lost}"
            return self._rebuild(reason, current, store.meta), True
        for record in completed(store.claims, told, self._boot_id):
            LOG.info("the claim's CDI file is written: it is prepared", extra=fields(claim=record.describe()))
            await store.commit(Change(put=record))
        if resumed and store_leftovers(self._path):
            self._report_problem(
                "StoreRebuilt",
                f"The interrupted replacement of the store {self._path} is completed: the new store has all data that was "
                f"recovered from the old store, with {len(store.claims)} claims",
            )
        return store, resumed

    def _traces(self, told: Iterable[ClaimRecord]) -> tuple[str, ...]:
        """Return the files of a lost store, and claims with CDI files. An incomplete new store does not count."""
        files = (file for file in store_leftovers(self._path) if not file.startswith(new_store(self._path)))
        return (*files, *(f"CDI file of claim {record.describe()}" for record in told))

    def _recorded(self) -> tuple[ClaimRecord, ...]:
        return records_in_files(self._system, self._cdi_directory, self._cdi_kind)

    def _rebuild(self, reason: str, records: Mapping[str, ClaimRecord], meta: Mapping[str, str]) -> Store:
        LOG.error("%s; it is rebuilt from what of it is sound, and from CDI files", reason)
        # Who switched partitioning on may be lost. Where only claims' partitions are, it was the driver.
        marks = {
            f"{PARTITIONING_KEY}{held.device_uuid}": self._boot_id
            for record in records.values()
            for held in record.devices
            if held.created
        }
        before = forgotten(records.values(), meta, self._boot_id)
        store = Store.rebuild(self._path, records.values(), {**meta, **marks, **before})
        message = f"{reason}. {store.former or 'nothing'} was set aside; {len(store.claims)} claims were found again"
        LOG.warning("%s", message)
        self._report_problem("StoreRebuilt", message)
        return store
