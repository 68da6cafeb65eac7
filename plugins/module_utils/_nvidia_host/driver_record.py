# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read and write the record of the NVIDIA driver on a node: installed, previous, and additional packages. No side effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._host import change_record
from .._packages.package_record import PackageRecord, common_fields, record_path
from .driver_catalog import GROUP

RECORD = record_path(GROUP)


@dataclass(frozen=True)
class Record(PackageRecord):
    """The record of the driver.

    ``boot`` is the boot ID of a change that needs a reboot. ``daemon`` is the state of the persistence daemon before it
    was disabled: ``enabled``, ``active``, or both.
    """

    boot: str = ""
    daemon: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the data in the format of the record."""
        return {**super().to_dict(), "boot": self.boot, "daemon": self.daemon}


def read_record(text: str | None) -> Record:
    """Read the record, or return an empty one if there is no text. Raises AcceleratorError."""
    if text is None:
        return Record()
    hint = (
        "dpkg lists the installed packages. Remove the record; then no driver counts as installed by this collection."
    )
    return change_record.read(text, RECORD, _record_of, of="the installed driver", hint=hint)


def _record_of(content: Any) -> Record:
    daemon = str(content.get("daemon") or "")  # missing in records of releases that did not disable the daemon
    return Record(**common_fields(content), boot=str(content["boot"]), daemon=daemon)
