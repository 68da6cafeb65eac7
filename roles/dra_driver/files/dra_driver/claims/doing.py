# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Carries a plan out on one thread: writes down what is begun, does it, and writes down that it is done.

To go from one thread to another costs a claim as much as most of what is done there, so it is not done in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core.errors import AcceleratorError
from ..core.model import Device, Partition
from ..metrics import Stopwatch
from .execute import Hands
from .plan import PreparePlan
from .records import ClaimRecord
from .store import Store
from .store_files import StoreError
from .store_tables import Change


class FilesUnwritable(AcceleratorError):
    """What containers are to have of a claim's devices could not be written: disk full, read-only, I/O error."""

    default_code = "files-unwritable"


def _stay() -> None:
    """For work that has no device to itself."""


@dataclass
class Work:
    """A plan that is carried out, with the facts that it was made from.

    ``before`` goes into the store's meta table first; ``has_begun`` is set once there is something that may have to be undone.
    ``leave`` is called when no device is needed any more.
    """

    plan: PreparePlan
    facts: Mapping[str, Device]
    before: Mapping[str, str]
    watch: Stopwatch
    has_begun: bool = False
    leave: Callable[[], None] = _stay


@dataclass(frozen=True)
class Doing:
    """Who carries plans out. Every function blocks and is called on a thread, with the locks of the plan's devices held."""

    hands: Hands
    store: Store
    boot_id: str

    def carry_out(self, work: Work) -> ClaimRecord:
        """Do what a plan says and return the prepared claim's record, which is on disk then. Raises AcceleratorError."""
        plan, watch = work.plan, work.watch
        # Files alone need no word in the store before: they tell a start what is prepared.
        if plan.changes_hardware or work.before:
            with watch.stage("record"):
                self.store.write(Change(put=plan.record, meta=work.before, durable=self._outlives_boot))
        work.has_begun = True
        self.hands.reached("recorded-preparing")
        with watch.stage("hardware"):
            record, made = self.hands.carry_out(plan)
        work.leave()
        done = record.as_prepared(record.devices, self.boot_id)
        # The disk takes as long for the record as the files take. Whichever is there alone after a crash, a start makes the claim whole or
        # forgets it; nobody is answered before both are there.
        with watch.stage("record"):
            recorded = self.store.begin(Change(put=done))
        try:
            self.hands.reached("recording-prepared")
            with watch.stage("files"):
                self._write_files(done, work.facts, made, plan.pod_claim)
        except BaseException:
            with contextlib.suppress(StoreError):  # what cannot be written down is nothing that has to be taken back
                recorded.wait()
                self.store.write(Change(put=record))
            raise
        with watch.stage("record"):
            recorded.wait()
        return done

    @property
    def _outlives_boot(self) -> bool:
        """Whether what a claim changes is still there after a power cut.

        Where it is not, the word of it need not be either: partitions go with the boot, and with them the mode (it is changed where no
        reset is needed, and there it does not persist), knobs, and what a virtual machine was given.
        """
        return self.hands.backend.partitions_outlive_boot

    def make(self, plan: PreparePlan, facts: Mapping[str, Device]) -> ClaimRecord:
        """Do the hardware's part of a plan, and write the files for containers. Raises AcceleratorError."""
        record, made = self.hands.carry_out(plan)
        self._write_files(record.as_prepared(record.devices, self.boot_id), facts, made, plan.pod_claim)
        return record

    def _write_files(
        self, record: ClaimRecord, facts: Mapping[str, Device], made: Mapping[str, Partition], pod_claim: str | None
    ) -> None:
        try:
            self.hands.write_cdi(record, facts, made, pod_claim)
        except OSError as error:
            raise FilesUnwritable(
                f"What containers are to have of the claim's devices cannot be written: {error}",
                hint="Check that the disk is not full or read-only; the claim is prepared when the kubelet asks again.",
            ) from error
