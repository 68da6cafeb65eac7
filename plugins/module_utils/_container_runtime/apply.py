# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Enable and disable CDI in CRI-O or Docker Engine: change the files, restart the runtime, and roll back a failed change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from .._host.file_restore import call_for_problem, describe_restored_state
from ..core.errors import AcceleratorError
from .config_files import RuntimeFileStore
from .containerd.config import Change
from .restore_record import Record, recorded

CHANGED = "its settings were changed"


class RestartError(AcceleratorError):
    """A container runtime does not run with its settings."""

    default_code = "restart-failed"


class Engine(Protocol):
    """A container runtime with configurable CDI directories."""

    name: str
    service: str

    def plan(self, wanted: Sequence[str]) -> list[Change]:
        """Return the changes that make the runtime read the directories, or an empty list if its files need no change."""

    def plan_revert(self, record: Record) -> list[Change]:
        """Return the changes that revert this collection's changes."""

    def remove_own_changes(self, text: str, previous: str | None) -> str | None:
        """Return the text with this collection's changes removed, or None for an empty file.

        ``previous`` is the text before the first change, or None if the file did not exist.
        """

    def diff(self, changes: Sequence[Change]) -> dict[str, str]:
        """Return the diff of the changes in Ansible's diff format."""

    def process(self) -> tuple[bool, float]:
        """Return whether the runtime is running, and its start time."""

    def restart_reason(self, wanted: Sequence[str], *, restart_pending: bool) -> str:
        """Return why the running process must be restarted to read the configured directories, or "".

        ``restart_pending``: an earlier run ended between its change of a file and the restart. The modification times
        of the files are then irrelevant.
        """

    def refuse_restart(self) -> int:
        """Return the number of containers that a restart stops. Raises AcceleratorError if the restart is not allowed."""

    def restart(self, wanted: Sequence[str] | None) -> str:
        """Restart the runtime and wait until it reads the directories, or, for None, until it responds. Return the problem, or ""."""


def present(files: RuntimeFileStore[Record], engine: Engine, wanted: Sequence[str], *, check: bool) -> dict[str, Any]:
    """Make the runtime read the directories, and return the module result. Raises AcceleratorError."""
    changes = engine.plan(wanted)
    files.refuse_read_only(changes)
    record = files.record()
    reason = CHANGED if changes else engine.restart_reason(wanted, restart_pending=record.restart)
    stops = engine.refuse_restart() if reason else 0
    # The process has the settings, so a process other than this collection has done the pending restart.
    is_record_outdated = not reason and record.restart
    if is_record_outdated and not check:
        files.set_restart_pending(False)
    directories = files.missing([*(str(Path(each.path).parent) for each in changes), *wanted])
    if not check:
        files.make_folders(directories)
        if changes:
            try:
                apply_and_restart(files, engine, changes, wanted)
            except BaseException:
                files.discard_folders(directories)
                raise
        elif reason:
            problem = engine.restart(wanted)
            if problem:
                raise RestartError(
                    f"{engine.name} failed to restart, which was necessary because {reason}: {problem}",
                    hint="This run did not change its files. Fix the error that it reports, and run the playbook again.",
                )
            files.set_restart_pending(False)
    return {
        "changed": bool(changes or reason or directories),
        "up_to_date": not (changes or reason or directories or is_record_outdated),
        "stops": stops,
        "files": [each.path for each in changes],
        "directories": directories,
        "restarted": bool(reason),
        "reason": reason,
        "enabled": True,
        **({} if check and reason else {"verified": True}),
        "diff": engine.diff(changes),
    }


def apply_and_restart(
    files: RuntimeFileStore[Record], engine: Engine, changes: Sequence[Change], wanted: Sequence[str] | None
) -> None:
    """Apply the changes and restart the runtime. Roll back all changes if the restart fails. Raises AcceleratorError."""
    before = files.record()
    record = recorded(before, changes, engine.remove_own_changes)
    # The record is written first, so that the next run repairs an interrupted run.
    files.write_record(Record({**before.files, **record.files}, record.folders, restart=True))
    try:
        files.apply_changes(changes)
    except BaseException:
        # The runtime was not restarted and still uses its previous settings.
        files.undo_after_error(changes, before)
        raise
    problem = call_for_problem(partial(engine.restart, wanted))
    if problem:
        raise RestartError(
            f"{engine.name} failed to restart with the changes of {', '.join(each.path for each in changes)}: {problem} "
            + describe_restored_state(*files.undo(changes, before, partial(engine.restart, None))),
            hint=f"Fix the error that {engine.name} reports, and run the playbook again.",
        )
    files.write_record(Record(record.files, record.folders, restart=False))


def absent(files: RuntimeFileStore[Record], engine: Engine, *, check: bool) -> dict[str, Any]:
    """Revert this collection's changes, and return the module result. Raises AcceleratorError."""
    record = files.record()
    changes = engine.plan_revert(record) if record.files else []
    files.refuse_read_only(changes)
    directories = files.find_emptied_directories(record.folders, changes)
    reason = CHANGED if (changes or record.restart) and engine.process()[0] else ""
    stops = engine.refuse_restart() if reason else 0
    if not check and record:
        if reason and changes:
            apply_and_restart(files, engine, changes, None)
        else:
            files.apply_changes(changes)
            problem = engine.restart(None) if reason else ""
            if problem:
                raise RestartError(f"{engine.name} failed to restart: {problem}")
        files.remove_folders(directories)
        files.remove_record()
    return {
        "changed": bool(changes or record),
        "up_to_date": not (changes or record),
        "stops": stops,
        "files": [each.path for each in changes],
        "directories": directories,
        "restarted": bool(reason),
        "reason": reason,
        "diff": engine.diff(changes),
    }
