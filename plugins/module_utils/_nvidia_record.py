# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What is remembered on a node of NVIDIA's driver: what was installed, what before that, and what came along. No side effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _record
from ._package_files import Kept, kept_of

FOLDER = "/var/lib/dra-accelerators/nvidia"
RECORD = f"{FOLDER}/record.json"
KEPT = f"{FOLDER}/packages"


@dataclass(frozen=True)
class Record:
    """What this collection has installed, what was there before that, which packages came with it, in which boot, and what was begun.

    ``daemon`` is how the persistence daemon was before it was switched off: words of ``enabled`` and ``active``.
    """

    now: Kept | None = None
    former: Kept | None = None
    added: tuple[str, ...] = ()
    boot: str = ""
    doing: str = ""
    daemon: str = ""

    def __bool__(self) -> bool:
        return bool(self.now or self.former or self.added or self.boot or self.doing or self.daemon)

    def to_text(self) -> str:
        """Return the record as it is written; empty where it says nothing."""
        if not self:
            return ""
        content = {
            "now": self.now.to_dict() if self.now else {},
            "former": self.former.to_dict() if self.former else {},
            "added": list(self.added),
            "boot": self.boot,
            "doing": self.doing,
            "daemon": self.daemon,
        }
        return _record.to_text(content)


def read_record(text: str | None) -> Record:
    """Read the record; an empty one where there is none. Raises AcceleratorError."""
    if text is None:
        return Record()
    hint = "What is installed dpkg says. Remove the record; then no driver counts as this collection's."
    return _record.read(text, RECORD, _record_of, of="installed", hint=hint)


def _record_of(content: Any) -> Record:
    added = tuple(str(name) for name in content["added"])
    daemon = str(content.get("daemon") or "")  # not in a record of a release that let it run
    return Record(
        kept_of(content["now"]), kept_of(content["former"]), added, str(content["boot"]), str(content["doing"]), daemon
    )
