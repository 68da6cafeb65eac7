# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What is ours in a runtime's files, with the texts of before, for the way back. No side effects.

The texts lie in the record and not beside the files: CRI-O reads every file of its folder, whatever its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _record
from ._containerd import MARK, Change
from ._docker import fingerprint


@dataclass(frozen=True)
class Entry:
    """One file that we changed: its text before us (None: it was not there), and the digest of what was written."""

    before: str | None
    written: str


@dataclass(frozen=True)
class Record:
    """What is ours on the node, and whether a restart is still owed."""

    files: Mapping[str, Entry] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    restart: bool = False

    def __bool__(self) -> bool:
        return bool(self.files or self.folders or self.restart)

    def to_text(self) -> str:
        """Return the record as it is written."""
        files = {path: {"before": each.before, "written": each.written} for path, each in sorted(self.files.items())}
        return _record.to_text({"files": files, "folders": list(self.folders), "restart": self.restart})


def read_record(text: str | None, path: str) -> Record:
    """Read a record; an empty one where there is none. Raises AcceleratorError."""
    if text is None:
        return Record()
    hint = f"Look at the runtime's files for lines that name {MARK}, take them back by hand if they are to go, and remove the record."
    return _record.read(text, path, _record_of, of="changed for the container runtime", hint=hint)


def _record_of(content: Any) -> Record:
    files = {
        str(path): Entry(None if each["before"] is None else str(each["before"]), str(each["written"]))
        for path, each in content["files"].items()
    }
    return Record(files, tuple(str(each) for each in content["folders"]), bool(content["restart"]))


#: Makes of a file's present text and its text before us the text without our part; None for a file that would say nothing.
Without = Callable[[str, "str | None"], "str | None"]


def text_before(text: str, entry: Entry, without: Without) -> str | None:
    """Return a file's text without us: byte for byte where nobody has changed it since, else without our part."""
    return entry.before if fingerprint(text) == entry.written else without(text, entry.before)


def recorded(record: Record, changes: Sequence[Change], without: Without) -> Record:
    """Return the record after these changes, with the restart still owed. What was there before us is kept from the first time."""
    files = dict(record.files)
    for each in changes:
        if each.after is None:
            files.pop(each.path, None)
            continue
        known = files.get(each.path)
        before = each.before
        if known is not None and before is not None:
            before = text_before(before, known, without)
        files[each.path] = Entry(before, fingerprint(each.after))
    return Record(files, record.folders, restart=True)


def back(record: Record, texts: Mapping[str, str], without: Without) -> list[Change]:
    """Return the changes that take back what is ours; ``texts`` are those of the files that are there."""
    changes = []
    for path, entry in sorted(record.files.items()):
        text = texts.get(path)
        if text is None:
            continue
        after = text_before(text, entry, without)
        if after != text:
            changes.append(Change(path, text, after))
    return changes
