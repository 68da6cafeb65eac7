# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Record the changes to a container runtime's files with their previous texts, and plan their removal. No side effects.

The previous texts are in the record, not in the runtime's directories: CRI-O reads every file there, whatever its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._host import change_record
from .containerd.config import MARK, Change
from .docker.runtimes import fingerprint


@dataclass(frozen=True)
class Entry:
    """One changed file: the text before the first change (None if the file did not exist), and the digest of the written text."""

    before: str | None
    written: str


@dataclass(frozen=True)
class Record:
    """The changes on the node, and whether a restart of the runtime is pending."""

    files: Mapping[str, Entry] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    restart: bool = False

    def __bool__(self) -> bool:
        return bool(self.files or self.folders or self.restart)

    def to_text(self) -> str:
        """Return the text of the record."""
        files = {path: {"before": each.before, "written": each.written} for path, each in sorted(self.files.items())}
        return change_record.to_text({"files": files, "folders": list(self.folders), "restart": self.restart})


def read_record(text: str | None, path: str) -> Record:
    """Read a record, or return an empty one if there is no text. Raises AcceleratorError."""
    if text is None:
        return Record()
    hint = f"To revert the changes, remove the lines with {MARK} from the runtime's files manually. Then delete the record."
    return change_record.read(text, path, _record_of, of="changes for the container runtime", hint=hint)


def _record_of(content: Any) -> Record:
    files = {
        str(path): Entry(None if each["before"] is None else str(each["before"]), str(each["written"]))
        for path, each in content["files"].items()
    }
    return Record(files, tuple(str(each) for each in content["folders"]), bool(content["restart"]))


#: Returns a file's text without this collection's changes, from the current and the previous text; None for an empty file.
Without = Callable[[str, "str | None"], "str | None"]


def text_before(text: str, entry: Entry, without: Without) -> str | None:
    """Return a file's text without this collection's changes.

    An unmodified file gets its previous text byte for byte. From other files only the changes are removed.
    """
    return entry.before if fingerprint(text) == entry.written else without(text, entry.before)


def recorded(record: Record, changes: Sequence[Change], without: Without) -> Record:
    """Return the record after these changes, with a pending restart. The text before the first change is kept."""
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


def revert_changes(record: Record, texts: Mapping[str, str], without: Without) -> list[Change]:
    """Return the changes that undo this collection's changes. ``texts`` are the existing files by path."""
    changes = []
    for path, entry in sorted(record.files.items()):
        text = texts.get(path)
        if text is None:
            continue
        after = text_before(text, entry, without)
        if after != text:
            changes.append(Change(path, text, after))
    return changes
