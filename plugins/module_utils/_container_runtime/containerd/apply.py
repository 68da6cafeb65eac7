# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Enable and disable CDI in containerd, including that of k3s and RKE2: change the files, restart it, and roll back a failed change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..._host.file_restore import call_for_problem, describe_not_restored, describe_restored_state
from ...core.errors import AcceleratorError
from ..apply import CHANGED
from ..config_files import RuntimeFileStore
from .config import Change, Settings
from .daemon import ContainerdError, Daemon
from .plan import (
    BACKUP,
    Entry,
    Record,
    changes_diff,
    fingerprint,
    plan_absent,
    plan_present,
    recorded,
    refuse_other_changes,
)


class CopiedFiles(RuntimeFileStore[Record]):
    """containerd's files, with a backup of each file that existed before."""

    def copy(self, changes: Sequence[Change], record: Record) -> None:
        """Copy each existing file before its first change, with its owner, mode, extended attributes, and time.

        The copy is synced to disk. ``record`` is the record before the changes.
        """
        for each in changes:
            known = record.files.get(each.path)
            if self._needs_copy(each, known):
                times = self.system.path(each.path).stat()
                backup = each.path + BACKUP
                if known is None:
                    self._rename_old_backup(backup, each.path)
                self.system.write_atomic(backup, self.system.read_bytes(each.path), like=each.path)
                os.utime(self.system.path(backup), ns=(times.st_atime_ns, times.st_mtime_ns))

    def _needs_copy(self, change: Change, known: Entry | None) -> bool:
        """Return whether the file has no change of this collection yet, and no copy. A run can end between its record and the copy."""
        if change.before is None or known is None:
            return change.before is not None
        return fingerprint(change.before) == known.backup and self.text(change.path + BACKUP) != change.before

    def _rename_old_backup(self, backup: str, path: str) -> None:
        """Rename a backup that differs from its file. The record has no entry for it, so an earlier installation left it."""
        if not self.system.exists(backup) or self.system.read_bytes(backup) == self.system.read_bytes(path):
            return
        number = 1
        while self.system.exists(f"{backup}.{number}"):
            number += 1
        self.system.move(backup, f"{backup}.{number}")
        self.module.warn(
            f"{backup} is a copy of an older {path}, and no record of changes contains it. It was renamed to {backup}.{number}. "
            "Delete it if you do not need it."
        )

    def undo_change(self, change: Change, record: Record) -> None:
        """Restore the text that this run has read. Restore its time, too, if ``record`` (before the changes) has no entry.

        A backup with different content is from an earlier installation and is not used.
        """
        backup = change.path + BACKUP
        old = None if change.before is None else change.before.encode()
        if change.path in record.files or not self.system.exists(backup) or self.system.read_bytes(backup) != old:
            self.put(change.path, change.before)
        else:
            times = self.system.path(backup).stat()
            if self.text(change.path) != change.before:
                self.put(change.path, change.before)
                os.utime(self.system.path(change.path), ns=(times.st_atime_ns, times.st_mtime_ns))
            self.system.remove(backup)

    def paths_removed_with(self, path: str) -> tuple[str, ...]:
        """Return a file and its backup."""
        return (path, path + BACKUP)


@dataclass(frozen=True)
class CdiRequest:
    """The CDI directories that containerd must read, and the preferred drop-in directory."""

    folders: Sequence[str]
    drop_ins: str


def apply_and_restart(
    files: CopiedFiles, daemon: Daemon, settings: Settings, changes: Sequence[Change], wanted: Sequence[str] | None
) -> Settings:
    """Apply the changes, verify them with the daemon's dump, and restart it. Roll back all changes if one of these steps fails.

    ``wanted`` are the directories that must be read afterwards, or None for a removal.
    """
    before = files.record()
    record = recorded(before, changes)
    # The record is written first, so that the next run repairs an interrupted run.
    files.write_record(Record({**before.files, **record.files}, record.folders, restart=True))
    paths = ", ".join(each.path for each in changes)
    problem = ""
    try:
        if wanted is not None:
            files.copy(changes, before)
        files.apply_changes(changes)
        after = daemon.settings()
        if wanted is not None and not after.reads(wanted):
            problem = "its configuration dump does not show CDI as enabled after the change"
    except ContainerdError as error:
        after, problem = settings, str(error)
    except BaseException:
        # containerd was not restarted and still uses its previous settings.
        files.undo_after_error(changes, before)
        raise
    if not problem:
        problem = call_for_problem(partial(daemon.restart, after))
        if problem:
            raise ContainerdError(
                f"containerd does not run with the changes of {paths}. {problem} "
                + describe_restored_state(*files.undo(changes, before, partial(daemon.restart, settings))),
                hint="Fix the error that containerd reports, and run the playbook again.",
                code="restart-failed",
            )
    else:
        left, _restart_error = files.undo(changes, before)
        raise ContainerdError(
            f"containerd cannot work with the changes of {paths}: {problem}. {describe_not_restored(left) or 'The previous files were restored'}",
            hint="containerd was not restarted.",
            code="no-proof",
        )
    files.write_record(Record(record.files, record.folders, restart=False))
    return after


def present(files: CopiedFiles, daemon: Daemon, wish: CdiRequest, *, check: bool) -> dict[str, Any]:
    """Enable CDI and return the module result. Raises AcceleratorError."""
    enabled = True
    settings = daemon.settings()
    imported = daemon.imported()
    changes = plan_present(daemon, settings, imported, wish.folders, wish.drop_ins)
    files.refuse_read_only(changes)
    record = files.record()
    paths = [daemon.config, *(each.path for each in imported)]
    reason = CHANGED if changes else daemon.restart_reason(settings, paths, restart_pending=record.restart)
    # The process has the settings, so a process other than this collection has done the pending restart.
    restart_was_done = record.restart and not reason
    if restart_was_done and not check:
        files.set_restart_pending(False)
    folders = files.missing([*(str(Path(each.path).parent) for each in changes), *wish.folders])
    if not check:
        files.make_folders(folders)
        if changes:
            try:
                enabled = apply_and_restart(files, daemon, settings, changes, wish.folders).enabled
            except BaseException:
                files.discard_folders(folders)
                raise
        elif reason:
            problem = daemon.restart(settings)
            if problem:
                raise ContainerdError(
                    f"containerd failed to restart, which was necessary because {reason}: {problem}",
                    hint="This run did not change its files. Fix the error that containerd reports, and run the playbook again.",
                    code="restart-failed",
                )
            files.set_restart_pending(False)
    verified = None if check and reason else daemon.answer(daemon.settings()) is not None
    if verified is False:
        files.module.warn(daemon.unverified_warning())
    return {
        "changed": bool(changes or reason or folders),
        "up_to_date": not (changes or reason or folders or restart_was_done),
        "files": [each.path for each in changes],
        "directories": folders,
        "restarted": bool(reason),
        "reason": reason,
        "enabled": enabled,
        **({} if verified is None else {"verified": verified}),
        "diff": changes_diff(changes),
    }


def absent(files: CopiedFiles, daemon: Daemon, wish: CdiRequest, *, check: bool) -> dict[str, Any]:
    """Revert this collection's changes, and return the module result. Raises AcceleratorError."""
    record = files.record()
    settings = None
    try:
        settings = daemon.settings()
    except AcceleratorError as error:
        # A removed containerd needs no verification and no restart.
        if error.code != "command-missing":
            raise
    imported = daemon.imported() if settings else []
    drop_in_folders = {wish.drop_ins, *([daemon.drop_in_folder(wish.drop_ins)] if settings else [])}
    changes = plan_absent(daemon, record, sorted(each for each in drop_in_folders if each))
    files.refuse_read_only(changes)
    if settings and changes:
        refuse_other_changes(daemon, settings, imported, changes)
    folders = files.find_emptied_directories(list(record.folders), changes)
    active = settings is not None and daemon.process()[0]
    reason = CHANGED if active and (changes or record.restart) else ""
    if not check and (changes or record):
        if changes and settings and active:
            apply_and_restart(files, daemon, settings, changes, None)
        else:
            files.apply_changes(changes)
            if reason and settings:
                problem = daemon.restart(settings)
                if problem:
                    raise ContainerdError(f"containerd failed to restart: {problem}", code="restart-failed")
        for path in record.files:
            daemon.system.remove(path + BACKUP)
        files.remove_folders(folders)
        files.remove_record()
    result: dict[str, Any] = {
        "changed": bool(changes or record),
        "up_to_date": not (changes or record),
        "files": [each.path for each in changes],
        "directories": folders,
        "restarted": bool(reason),
        "reason": reason,
        "diff": changes_diff(changes),
    }
    if settings and not changes:
        result["enabled"] = settings.enabled
    return result
