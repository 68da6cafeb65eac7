# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define the common part of the records of installed packages. No side effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._host import change_record
from .kept_packages import Kept, kept_of

_STATE = "/var/lib/dra-accelerators"


def _state_directory(name: str) -> str:
    """Return the directory of a package group's record and kept packages."""
    return f"{_STATE}/{name}"


def record_path(name: str) -> str:
    """Return the path of a package group's record."""
    return f"{_state_directory(name)}/record.json"


def kept_path(name: str) -> str:
    """Return the directory of the packages that are kept for a rollback."""
    return f"{_state_directory(name)}/packages"


@dataclass(frozen=True)
class PackageRecord:
    """The record of an installation: current and previous packages, added packages, and the operation in progress."""

    now: Kept | None = None
    former: Kept | None = None
    added: tuple[str, ...] = ()
    doing: str = ""

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def versions(self) -> tuple[Kept | None, ...]:
        """Return the versions that a rollback or a removal can restore."""
        return (self.now, self.former)

    def to_text(self) -> str:
        """Return the text of the record, or an empty string for an empty record."""
        return change_record.to_text(self.to_dict()) if self else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the data in the format of the record."""
        return {
            "now": self.now.to_dict() if self.now else {},
            "former": self.former.to_dict() if self.former else {},
            "added": list(self.added),
            "doing": self.doing,
        }


def common_fields(content: Any) -> dict[str, Any]:
    """Return the common fields from the content of a record. Raises KeyError or TypeError for incomplete data."""
    return {
        "now": kept_of(content["now"]),
        "former": kept_of(content["former"]),
        "added": tuple(str(name) for name in content["added"]),
        "doing": str(content["doing"]),
    }
