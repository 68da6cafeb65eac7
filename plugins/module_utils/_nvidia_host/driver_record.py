# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read and write the record of the NVIDIA driver on a node: installed, previous, and additional packages. No side effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._host import change_record
from .._packages.kept_packages import Kept, kept_of

FOLDER = "/var/lib/dra-accelerators/nvidia"
RECORD = f"{FOLDER}/record.json"
KEPT = f"{FOLDER}/packages"


@dataclass(frozen=True)
class Record:
    """The installed driver, the previous driver, the added packages, the boot ID of the change, and the operation in progress.

    ``daemon`` is the state of the persistence daemon before it was disabled: ``enabled``, ``active``, or both.
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
        """Return the text of the record, or an empty string for an empty record."""
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
        return change_record.to_text(content)


def read_record(text: str | None) -> Record:
    """Read the record, or return an empty one if there is no text. Raises AcceleratorError."""
    if text is None:
        return Record()
    hint = (
        "dpkg lists the installed packages. Remove the record; then no driver counts as installed by this collection."
    )
    return change_record.read(text, RECORD, _record_of, of="the installed driver", hint=hint)


def _record_of(content: Any) -> Record:
    added = tuple(str(name) for name in content["added"])
    daemon = str(content.get("daemon") or "")  # missing in records of releases that did not disable the daemon
    return Record(
        kept_of(content["now"]), kept_of(content["former"]), added, str(content["boot"]), str(content["doing"]), daemon
    )
