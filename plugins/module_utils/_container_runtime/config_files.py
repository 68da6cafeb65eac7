# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Change the files of a container runtime, keep the record of these changes, and create directories for CDI files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ansible.module_utils.basic import AnsibleModule

from .._host.file_restore import call_for_problem, describe_not_restored, restore_all
from ..core.errors import AcceleratorError
from ..core.host.system import System, path_exists
from .containerd.config import Change


class AnyRecord(Protocol):
    """The common attributes of the records of all runtimes."""

    @property
    def files(self) -> Mapping[str, Any]:
        """Return the changes of this collection by file."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the directories that this collection created."""

    @property
    def restart(self) -> bool:
        """Return whether a restart is pending."""

    def to_text(self) -> str:
        """Return the text of the record."""


RecordT = TypeVar("RecordT", bound=AnyRecord)


class RuntimeFileStore(Generic[RecordT]):
    """Write and remove a runtime's files, the record, and the CDI directories.

    ``read`` parses the text of the record; for None it returns an empty record. New content is first written to a
    temporary file in the directory ``scratch``, and then renamed. If ``scratch`` is empty or on a different file system,
    the temporary file is next to the changed file.
    """

    def __init__(
        self,
        module: AnsibleModule,
        system: System,
        record_path: str,
        read: Callable[[str | None, str], RecordT],
        scratch: str = "",
    ) -> None:
        self.module = module
        self.system = system
        self.record_path = record_path
        self.scratch = scratch
        self._read = read

    def record(self) -> RecordT:
        """Return the record. Raises AcceleratorError if it cannot be read."""
        return self._read(self.text(self.record_path), self.record_path)

    def write_record(self, record: RecordT) -> None:
        """Write the record. An empty record is deleted, and so is its directory if it is empty."""
        if record:
            self.system.write_atomic(self.record_path, record.to_text().encode(), mode=0o600)
        elif self.system.remove_temporaries(self.record_path) + self.system.remove(self.record_path):
            self.remove_folder(str(Path(self.record_path).parent))

    def set_restart_pending(self, is_pending: bool) -> None:
        """Record whether a restart is pending."""
        self.write_record(self._replace_fields(self.record(), restart=is_pending))

    def remove_record(self) -> None:
        """Remove the record."""
        self.write_record(self._read(None, self.record_path))

    def refuse_read_only(self, changes: Sequence[Change]) -> None:
        """Reject changes on a file system that is mounted read-only. Check mode rejects them too. Raises AcceleratorError."""
        for each in changes:
            existing = Path(self.system.real_path(each.path))
            while not existing.exists():
                existing = existing.parent
            if os.statvfs(existing).f_flag & os.ST_RDONLY:
                raise AcceleratorError(
                    f"{each.path} must be changed, and is on a read-only file system",
                    hint="Start the runtime with a configuration file on a writable file system, or enable CDI in the image of the node. "
                    "Nothing was changed.",
                    code="read-only",
                )

    def apply_changes(self, changes: Sequence[Change]) -> None:
        """Write or remove the changed files."""
        for each in changes:
            self.put(each.path, each.after)

    def undo(
        self, changes: Sequence[Change], record: RecordT, restart: Callable[[], str] | None = None
    ) -> tuple[dict[str, str], str]:
        """Restore every file to its state before the changes, then call ``restart``, then restore ``record``.

        A failed step does not end the rollback. If a file cannot be restored, the record stays for the next run. If
        ``restart`` returns a problem, the record states that a restart is pending. Returns the reasons by path, and the
        problem of the restart.
        """
        problems = restore_all((each.path, partial(self.undo_change, each, record)) for each in reversed(changes))
        restart_error = call_for_problem(restart) if restart else ""
        if not problems:
            kept = self._replace_fields(record, restart=bool(restart_error)) if restart else record
            problems = restore_all([(self.record_path, partial(self.write_record, kept))])
        return problems, restart_error

    def undo_after_error(self, changes: Sequence[Change], record: RecordT) -> None:
        """Restore every file and the record after an error that the caller reports. Warns about files that cannot be restored."""
        problems, _restart_error = self.undo(changes, record)
        if problems:
            self.module.warn(f"{describe_not_restored(problems)}. The next run restores them.")

    def discard_folders(self, paths: Sequence[str]) -> None:
        """Remove the created directories after an error that the caller reports. Warns if the record cannot be updated."""
        problems = restore_all([(self.record_path, partial(self.remove_folders, paths))])
        for path, text in problems.items():
            self.module.warn(
                f"The record of changes {path} cannot be updated: {text}. It still lists directories that this run created. A run with state "
                "absent corrects the record."
            )

    def undo_change(self, change: Change, record: RecordT) -> None:  # noqa: ARG002
        """Restore one file. Raises OSError.

        ``record`` is the record before the changes. This class does not need it. Subclasses use it.
        """
        self.put(change.path, change.before)

    def paths_removed_with(self, path: str) -> tuple[str, ...]:
        """Return the paths that are removed when this file is removed: the file and, in subclasses, its backup."""
        return (path,)

    def put(self, path: str, text: str | None) -> None:
        """Write a file, or remove it if ``text`` is None. After a power loss, the file has the previous content or the new one.

        Owner, mode, SELinux label, and other extended attributes stay. A symbolic link stays, and its target is written
        or removed. A file that already has this text is not written. Raises OSError.
        """
        path = self.system.real_path(path)
        existed = self.system.exists(path)
        if existed and self.text(path) == text:
            return
        try:
            self.system.replace_text(path, text, scratch=self._scratch_for(path))
        except OSError as error:
            raise OSError(error.errno, f"{path} cannot be replaced: {error.strerror}") from error
        if text is not None and not existed:
            self.module.set_default_selinux_context(path, changed=False)

    def _scratch_for(self, path: str) -> str:
        """Return the scratch directory for a file. Empty if it is not on the file system of the file."""
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
        """Return the missing directories, including missing parents, the outermost first."""
        found: list[str] = []
        for folder in folders:
            for path in [*reversed(Path(folder).parents), Path(folder)]:
                if not path_exists(path) and str(path) not in found:
                    found.append(str(path))
        return found

    def make_folders(self, paths: Sequence[str]) -> None:
        """Create world-readable directories (0755), after recording them as created by this collection."""
        if paths:
            record = self.record()
            self.write_record(self._replace_fields(record, folders=tuple(dict.fromkeys([*record.folders, *paths]))))
        for path in paths:
            self.system.make_directory(path)
            Path(path).chmod(0o755)

    def remove_folders(self, paths: Sequence[str]) -> None:
        """Remove each of these directories if it is empty. Delete all of these paths from the record, also those of directories that remain."""
        for path in sorted(paths, key=len, reverse=True):
            self.remove_folder(path)
        record = self.record()
        self.write_record(
            self._replace_fields(record, folders=tuple(path for path in record.folders if path not in paths))
        )

    def find_emptied_directories(self, folders: Sequence[str], changes: Sequence[Change]) -> list[str]:
        """Return the directories that are empty after the changes, the innermost first."""
        removed = {path for each in changes if each.after is None for path in self.paths_removed_with(each.path)}
        found: list[str] = []
        for folder in sorted(folders, key=len, reverse=True):
            if Path(folder).is_dir() and all(str(path) in removed for path in Path(folder).iterdir()):
                found.append(folder)
                removed.add(folder)
        return found

    def remove_folder(self, path: str) -> bool:
        """Remove a directory if it is empty. Return whether it was removed."""
        try:
            Path(path).rmdir()
        except OSError:
            return False
        return True

    @staticmethod
    def _replace_fields(record: RecordT, **values: Any) -> RecordT:
        """Return a copy of the record with these fields replaced."""
        replaced: RecordT = dataclasses.replace(record, **values)  # type: ignore[type-var]
        return replaced
