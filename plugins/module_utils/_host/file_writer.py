# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Write the changes of a set of files, and restore the previous entries if a change fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..core.host.system import System
from .file_restore import describe_not_restored, reason, restore_all
from .file_set import (
    ABSENT,
    DIRECTORY,
    FILE,
    LINK,
    OTHER,
    Change,
    DesiredEntry,
    FileSetError,
    owner_of,
    plan,
    read_entry,
    restoring_entries,
    restoring_options,
)

NEW_MODE = {FILE: 0o644, DIRECTORY: 0o755}


class Unfinished(FileSetError):
    """A change failed. ``left`` are the changes whose previous entries could not be restored, including the failed change."""

    default_code = "os-error"

    def __init__(self, message: str, left: Sequence[Change]) -> None:
        super().__init__(message)
        self.left = tuple(left)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the entries that restore the previous state, without secret entries."""
        return {**super().to_dict(), "changed": bool(self.left), "previous": restoring_options(self.left)}


class FileWriter:
    """Writes each entry atomically. After a killed run or a power failure, a path has the previous entry or the new entry.

    ``label`` gives a new entry its default SELinux context.
    """

    def __init__(self, system: System, label: Callable[[str], object]) -> None:
        self.system = system
        self.label = label
        #: The directories that this object has created.
        self._created: set[str] = set()

    def write(self, changes: Sequence[Change]) -> None:
        """Apply all changes, or restore the previous entries. Raises Unfinished."""
        for number, change in enumerate(changes):
            try:
                self.make(change)
            except BaseException as error:
                left, problems = self._restore(changes[: number + 1])
                if not isinstance(error, (OSError, FileSetError)):
                    raise
                state = describe_not_restored(problems) or "Every path has its previous entry again"
                raise Unfinished(f"Cannot change {change.wanted.path}: {reason(error)}. {state}.", left) from error

    def _restore(self, changes: Sequence[Change]) -> tuple[list[Change], dict[str, str]]:
        """Restore the previous entries. Return the changes that could not be undone, and the reasons by path."""
        problems = restore_all((each.wanted.path, partial(self._undo, each)) for each in reversed(changes))
        left = [
            replace(each, parents=tuple(parent for parent in each.parents if parent in self._created))
            for each in changes
            if each.wanted.path in problems
        ]
        return left, problems

    def _undo(self, change: Change) -> None:
        """Restore the previous entries of one change. Raises OSError, FileSetError."""
        if change.before.kind == OTHER and read_entry(change.wanted.path).kind != OTHER:
            raise FileSetError("A special file cannot be created again")
        for entry in restoring_entries([change]):
            if self._is_ours(change, entry):
                for undo in plan([entry], {entry.path: read_entry(entry.path)}):
                    self.make(undo)

    def _is_ours(self, change: Change, entry: DesiredEntry) -> bool:
        """Return whether the restoration may create or remove this entry. A directory is removed only if this object created it.

        Another program can have created it after the plan was made, or replaced it.
        """
        if entry.kind != ABSENT or (entry.path == change.wanted.path and change.wanted.kind != DIRECTORY):
            return True
        return entry.path in self._created and read_entry(entry.path).kind == DIRECTORY

    def make(self, change: Change) -> None:
        """Apply one change and sync it. Raises OSError, FileSetError."""
        wanted, path = change.wanted, change.wanted.path
        for parent in change.parents:
            self._make_directory(parent, NEW_MODE[DIRECTORY], (-1, -1))
        if wanted.kind == ABSENT:
            if change.before.kind == DIRECTORY:
                Path(path).rmdir()
            else:
                Path(path).unlink()
        elif wanted.kind == LINK:
            self._make_link(path, change)
        elif wanted.kind == DIRECTORY and change.rewrites:
            self._make_directory(path, NEW_MODE[DIRECTORY] if wanted.mode is None else wanted.mode, owner_of(wanted))
            return
        elif change.rewrites or (wanted.kind == FILE and change.before.hard_links > 1):
            self._make_file(path, change)
            return
        else:
            self._set_attributes(path, wanted)
            return
        self.system.sync(os.path.dirname(path))  # noqa: PTH120  a text

    def _make_file(self, path: str, change: Change) -> None:
        """Replace a file with one rename. Other hard links of the previous file keep its content and its attributes."""
        wanted, before = change.wanted, change.before
        content = before.content if wanted.content is None else wanted.content
        like = path if before.kind == FILE else ""
        self.system.write_atomic(path, content, wanted.mode, like=like, owner=owner_of(wanted))
        if not like:
            self.label(path)

    def _make_link(self, path: str, change: Change) -> None:
        """Create the link under a temporary name and rename it, so that the path always has an entry.

        A link has no lock: another writer of the same path can remove the temporary one. Then it is created again.
        """
        folder, name = os.path.split(path)
        temporary = f"{folder}/.{name}.{os.getpid()}.tmp"
        is_renamed = False
        while not is_renamed:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            Path(temporary).symlink_to(change.wanted.target)
            try:
                os.lchown(temporary, *owner_of(change.wanted))
                Path(temporary).replace(path)
                is_renamed = True
            except FileNotFoundError:
                continue
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
                raise
        if change.before.kind != LINK:
            self.label(path)

    def _make_directory(self, path: str, mode: int, owner: tuple[int, int]) -> None:
        """Create a directory with its mode in one step, because the next run does not correct a parent directory of a killed run."""
        umask = os.umask(0)
        try:
            Path(path).mkdir(mode=mode)
            self._created.add(path)
        finally:
            os.umask(umask)
        if owner != (-1, -1):
            os.chown(path, *owner)
        if mode & 0o7000:
            Path(path).chmod(mode)
        self.label(path)
        self.system.sync(path)
        self.system.sync(os.path.dirname(path))  # noqa: PTH120  a text

    def _set_attributes(self, path: str, wanted: DesiredEntry) -> None:
        """Change owner and mode in place. The mode is set last: a change of the owner deletes the set-user-ID bit."""
        mode = Path(path).lstat().st_mode & 0o7777 if wanted.mode is None else wanted.mode
        os.chown(path, *owner_of(wanted), follow_symlinks=False)
        Path(path).chmod(mode)
        self.system.sync(path)
