# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Marks by which other programs report to the node driver that a device was reset or repaired.

The driver cannot see a reset by another program: it happens while the driver has the vendor's library closed. A mark is an empty file
in the driver's state directory. Each mark has a name of its own, so that the driver can keep the names of the marks that it has applied.
The driver applies a mark before it opens the library again. It removes the mark after the change is on disk.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = "repairs"
RESET = "reset"
REPAIRED = "repaired"
#: The marks of an earlier release lack the last part.
_NAME = re.compile(r"(?P<uuid>.+)\.(?P<what>reset|repaired)(?:\.[0-9a-f]+)?")

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


@dataclass(frozen=True)
class Mark:
    """One mark: its file name, the device's UUID, and RESET or REPAIRED."""

    name: str
    uuid: str
    what: str


def mark(directory: str, uuids: Iterable[str], what: str) -> None:
    """Report a reset or repair of devices. Without a state directory no driver has ever run. Raises OSError."""
    if Path(directory).is_dir():
        folder = Path(directory, FOLDER)
        folder.mkdir(mode=0o750, exist_ok=True)
        for uuid in uuids:
            (folder / f"{uuid}.{what}.{secrets.token_hex(8)}").touch(mode=0o600)


def read(directory: str) -> tuple[Mark, ...]:
    """Return all marks, sorted by name. Raises OSError."""
    folder = Path(directory, FOLDER)
    found = (_NAME.fullmatch(path.name) for path in sorted(folder.iterdir())) if folder.is_dir() else ()
    return tuple(Mark(each[0], each["uuid"], each["what"]) for each in found if each is not None)


def remove(directory: str, name: str) -> None:
    """Remove one mark, if it exists. Raises OSError."""
    Path(directory, FOLDER, name).unlink(missing_ok=True)
