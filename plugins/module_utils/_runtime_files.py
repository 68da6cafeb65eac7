# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The files of a container runtime that are changed, the record of that, and the folders of CDI files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ansible.module_utils.basic import AnsibleModule

from ._containerd import Change
from .core.errors import AcceleratorError
from .core.system import System


class AnyRecord(Protocol):
    """What a record of changes has, whichever runtime's."""

    @property
    def files(self) -> Mapping[str, Any]:
        """What is ours of each file."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders that we made."""

    @property
    def restart(self) -> bool:
        """Whether a restart is owed."""

    def to_text(self) -> str:
        """The record as it is written."""


Kept = TypeVar("Kept", bound=AnyRecord)


class Files(Generic[Kept]):
    """Writes and removes a runtime's files, the record and the CDI folders.

    ``read`` makes a record of its file's text, or an empty one of None. ``scratch`` is a folder on the files' own file system in which
    they are made before they are moved; without one they are made beside the file.
    """

    def __init__(
        self,
        module: AnsibleModule,
        system: System,
        record_path: str,
        read: Callable[[str | None, str], Kept],
        scratch: str = "",
    ) -> None:
        self.module = module
        self.system = system
        self.record_path = record_path
        self.scratch = scratch
        self._read = read

    def record(self) -> Kept:
        """Return what is ours. Raises AcceleratorError for a record that cannot be read."""
        return self._read(self.text(self.record_path), self.record_path)

    def keep(self, record: Kept) -> None:
        """Write the record; one that says nothing goes, and so does its folder if nothing else is in it."""
        if record:
            self.system.write_atomic(self.record_path, record.to_text().encode(), mode=0o600)
        elif self.system.remove(self.record_path):
            self.remove_folder(str(Path(self.record_path).parent))

    def settle(self, *, restart: bool) -> None:
        """Write down whether a restart is owed."""
        self.keep(self._with(self.record(), restart=restart))

    def forget(self) -> None:
        """Remove the record."""
        self.keep(self._read(None, self.record_path))

    def refuse_read_only(self, changes: Sequence[Change]) -> None:
        """Reject changes on a file system that is mounted read-only. Check mode rejects them too. Raises AcceleratorError."""
        for each in changes:
            place = Path(self.system.real_path(each.path))
            while not place.exists():
                place = place.parent
            if os.statvfs(place).f_flag & os.ST_RDONLY:
                raise AcceleratorError(
                    f"{each.path} has to change and is on a read-only file system",
                    hint="Start the runtime with a configuration file on a writable file system, or enable CDI in the image of the node. "
                    "Nothing was changed.",
                    code="read-only",
                )

    def make(self, changes: Sequence[Change]) -> None:
        """Write or remove the changed files."""
        for each in changes:
            self.put(each.path, each.after)

    def undo(self, changes: Sequence[Change], record: Kept) -> None:  # noqa: ARG002
        """Put every file back as it was before the changes; ``record`` is what was ours then."""
        for each in reversed(changes):
            self.put(each.path, each.before)

    def leftovers(self, path: str) -> tuple[str, ...]:
        """Return the paths that go with a file."""
        return (path,)

    def put(self, path: str, text: str | None) -> None:
        """Write a file, or remove it if ``text`` is None; a power cut leaves the previous content or the new one.

        Owner, mode, SELinux label, and other extended attributes stay. A symbolic link stays, and its target is written or removed. A file with
        this text is not written. Raises OSError.
        """
        path = self.system.real_path(path)
        scratch = self._scratch_for(path)
        # A killed run can have left a temporary file.
        self.system.remove_temporaries(f"{scratch or Path(path).parent}/{Path(path).name}")
        if text is None:
            self.system.remove(path)
            return
        if self.text(path) == text:
            return
        existed = self.system.exists(path)
        try:
            self.system.write_atomic(path, text.encode(), like=path if existed else "", scratch=scratch)
        except OSError as error:
            raise OSError(error.errno, f"{path} cannot be replaced: {error.strerror}") from error
        if not existed:
            self.module.set_default_selinux_context(path, changed=False)

    def _scratch_for(self, path: str) -> str:
        """Return the scratch directory for a file; empty if there is none on the file system of the file."""
        parent = self.system.path(path).parent
        if not self.scratch or not parent.is_dir():
            return ""
        return self.scratch if self.system.path(self.scratch).stat().st_dev == parent.stat().st_dev else ""

    def text(self, path: str) -> str | None:
        """Return the text of a file, or None if it does not exist."""
        try:
            return self.system.read_text(path)
        except FileNotFoundError:
            return None

    def missing(self, folders: Sequence[str]) -> list[str]:
        """Return which folders are not there, those above them included, the outermost first."""
        found: list[str] = []
        for folder in folders:
            for path in [*reversed(Path(folder).parents), Path(folder)]:
                if not path.exists() and str(path) not in found:
                    found.append(str(path))
        return found

    def make_folders(self, paths: Sequence[str]) -> None:
        """Make folders that everybody may read, after writing down that they are ours."""
        if paths:
            record = self.record()
            self.keep(self._with(record, folders=tuple(dict.fromkeys([*record.folders, *paths]))))
        for path in paths:
            Path(path).mkdir(mode=0o755, exist_ok=True)
            Path(path).chmod(0o755)

    def remove_folders(self, paths: Sequence[str]) -> None:
        """Remove folders that are ours, as far as they are empty."""
        for path in sorted(paths, key=len, reverse=True):
            self.remove_folder(path)
        record = self.record()
        self.keep(self._with(record, folders=tuple(path for path in record.folders if path not in paths)))

    def emptied(self, folders: Sequence[str], changes: Sequence[Change]) -> list[str]:
        """Return which folders are empty once the changes are made, the innermost first."""
        gone = {path for each in changes if each.after is None for path in self.leftovers(each.path)}
        found: list[str] = []
        for folder in sorted(folders, key=len, reverse=True):
            if Path(folder).is_dir() and all(str(path) in gone for path in Path(folder).iterdir()):
                found.append(folder)
                gone.add(folder)
        return found

    def remove_folder(self, path: str) -> bool:
        """Remove a folder if it is empty; whether it was."""
        try:
            Path(path).rmdir()
        except OSError:
            return False
        return True

    @staticmethod
    def _with(record: Kept, **values: Any) -> Kept:
        made: Kept = dataclasses.replace(record, **values)  # type: ignore[type-var]
        return made
