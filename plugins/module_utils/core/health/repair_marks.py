# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Report device resets and repairs by other programs to the node driver, with marks.

The driver cannot see a reset by another program, because the driver has the vendor library closed at that time. A mark
is an empty file in the driver's state directory. Each mark has a unique name, so that the driver can store the names of
the applied marks. The driver applies each mark before it opens the library again. It removes the mark after it
has written the new health state to disk.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..host.system import System, path_exists

FOLDER = "repairs"
RESET = "reset"
REPAIRED = "repaired"
#: The marks of an earlier release lack the last part.
_NAME = re.compile(r"(?P<uuid>.+)\.(?P<what>reset|repaired)(?:\.[0-9a-f]+)?")

#: The UUIDs of the devices that this process has reset and not yet reported. The driver does not report its own resets.
_RESETS: set[str] = set()


def note_resets(uuids: Iterable[str]) -> None:
    """Remember the devices that this process has reset, until ``report_resets``."""
    _RESETS.update(uuids)


def report_resets(directory: str) -> None:
    """Report all resets of this process to the driver with this state directory.

    Marks that cannot be written are omitted.
    """
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
    """Report a reset or repair of devices. The marks are on the disk afterwards. Raises OSError.

    Without a state directory nothing is written, because no driver has run on this node.
    """
    named = tuple(uuids)
    if named and path_exists(directory):
        folder = Path(directory, FOLDER)
        folder.mkdir(mode=0o750, exist_ok=True)
        for uuid in named:
            (folder / f"{uuid}.{what}.{secrets.token_hex(8)}").touch(mode=0o600)
        for path in (str(folder), directory):
            System().sync(path)


def read(directory: str) -> tuple[Mark, ...]:
    """Return all marks, sorted by name. Raises OSError."""
    found = (_NAME.fullmatch(name) for name in System().list_directory(f"{directory}/{FOLDER}"))
    return tuple(Mark(each[0], each["uuid"], each["what"]) for each in found if each is not None)


def remove(directory: str, name: str) -> None:
    """Remove one mark, if it exists. Raises OSError."""
    System().remove(str(Path(directory, FOLDER, name)))
