# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Marks by which other programs report to the node driver that a device was reset or repaired.

The driver cannot see a reset by others: they make it while the driver has the vendor's library closed. A mark is an empty
file in the driver's state folder. The driver removes it, with the faults that the reset or repair ends, before it opens the
library again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

FOLDER = "repairs"
RESET = "reset"
REPAIRED = "repaired"

#: The devices that this process has reset and not yet reported; the driver itself needs no mark.
_RESETS: set[str] = set()


def note_resets(uuids: Iterable[str]) -> None:
    """Remember the devices that this process has reset, until ``report_resets``."""
    _RESETS.update(uuids)


def report_resets(directory: str) -> None:
    """Report all resets of this process to the driver with this state folder. A mark that cannot be written is left out."""
    with contextlib.suppress(OSError):
        mark(directory, _RESETS, RESET)
    _RESETS.clear()


def mark(directory: str, uuids: Iterable[str], what: str) -> None:
    """Report a reset or repair of devices. Without a state folder no driver has ever run. Raises OSError."""
    if Path(directory).is_dir():
        folder = Path(directory, FOLDER)
        folder.mkdir(mode=0o750, exist_ok=True)
        for uuid in uuids:
            (folder / f"{uuid}.{what}").touch(mode=0o600)


def take(directory: str) -> tuple[tuple[str, str], ...]:
    """Remove all marks and return them, each with the device's UUID, and RESET or REPAIRED. Raises OSError."""
    folder = Path(directory, FOLDER)
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        uuid, _dot, what = path.name.rpartition(".")
        path.unlink()
        if uuid and what in (RESET, REPAIRED):
            found.append((uuid, what))
    return tuple(found)
