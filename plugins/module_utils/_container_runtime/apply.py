# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Enable and disable CDI in CRI-O or Docker Engine: change the files, restart the runtime, and roll back a failed change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from .._host.file_restore import after_undo, problem_of
from ..core.errors import AcceleratorError
from .config_files import Files
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
        """Return the changes that make the runtime read the directories. Empty if its files already contain them."""

    def plan_back(self, record: Record) -> list[Change]:
        """Return the changes that revert this collection's changes."""

    def without(self, text: str, before: str | None) -> str | None:
        """Return the text of a file without this collection's part."""

    def shown(self, changes: Sequence[Change]) -> dict[str, str]:
        """Return the diff of the changes in Ansible's form."""

    def process(self) -> tuple[bool, float]:
        """Return whether the runtime is running, and its start time."""

    def behind(self, wanted: Sequence[str], *, restart_pending: bool) -> str:
        """Return why the running process does not read the directories in its files. Empty if it does.

        ``restart_pending``: an earlier run ended between its change of a file and the restart. The modification times
        of the files are then irrelevant.
        """

    def refuse_restart(self) -> int:
        """Return the number of containers that a restart stops. Raises AcceleratorError if the restart is not allowed."""

    def restart(self, wanted: Sequence[str] | None) -> str:
        """Restart the runtime and wait until it reads the directories, or, for None, until it responds. Return the problem, or ""."""


def present(files: Files[Record], engine: Engine, wanted: Sequence[str], *, check: bool) -> dict[str, Any]:
    """Make the runtime read the directories, and return the module result. Raises AcceleratorError."""
    changes = engine.plan(wanted)
    files.refuse_read_only(changes)
    record = files.record()
    reason = CHANGED if changes else engine.behind(wanted, restart_pending=record.restart)
    stops = engine.refuse_restart() if reason else 0
    # The process has the settings, so a process other than this collection has done the pending restart.
    owed = not reason and record.restart
    if owed and not check:
        files.settle(restart=False)
    folders = files.missing([*(str(Path(each.path).parent) for each in changes), *wanted])
    if not check:
        files.make_folders(folders)
        if changes:
            try:
                carry_out(files, engine, changes, wanted)
            except BaseException:
                files.discard_folders(folders)
                raise
        elif reason:
            problem = engine.restart(wanted)
            if problem:
                raise RestartError(
                    f"{engine.name} was to be restarted, because {reason}, and did not come back: {problem}",
                    hint="Its files were not changed by this run. Mend what it complains of, then run this again.",
                )
            files.settle(restart=False)
    return {
        "changed": bool(changes or reason or folders),
        "up_to_date": not (changes or reason or folders or owed),
        "stops": stops,
        "files": [each.path for each in changes],
        "directories": folders,
        "restarted": bool(reason),
        "reason": reason,
        "enabled": True,
        **({} if check and reason else {"verified": True}),
        "diff": engine.shown(changes),
    }


def carry_out(files: Files[Record], engine: Engine, changes: Sequence[Change], wanted: Sequence[str] | None) -> None:
    """Apply the changes and restart the runtime. Roll back all changes if the restart fails. Raises AcceleratorError."""
    before = files.record()
    record = recorded(before, changes, engine.without)
    # The record is written first, so that the next run repairs an interrupted run.
    files.keep(Record({**before.files, **record.files}, record.folders, restart=True))
    try:
        files.make(changes)
    except BaseException:
        # The runtime was not restarted and still uses its previous settings.
        files.undo_after_error(changes, before)
        raise
    problem = problem_of(partial(engine.restart, wanted))
    if problem:
        raise RestartError(
            f"{engine.name} did not come back with the changes of {', '.join(each.path for each in changes)}. {problem} "
            + after_undo(*files.undo(changes, before, partial(engine.restart, None))),
            hint=f"Mend what {engine.name} complains of, then run this again.",
        )
    files.keep(Record(record.files, record.folders, restart=False))


def absent(files: Files[Record], engine: Engine, *, check: bool) -> dict[str, Any]:
    """Revert this collection's changes, and return the module result. Raises AcceleratorError."""
    record = files.record()
    changes = engine.plan_back(record) if record.files else []
    files.refuse_read_only(changes)
    folders = files.emptied(record.folders, changes)
    reason = CHANGED if (changes or record.restart) and engine.process()[0] else ""
    stops = engine.refuse_restart() if reason else 0
    if not check and record:
        if reason and changes:
            carry_out(files, engine, changes, None)
        else:
            files.make(changes)
            problem = engine.restart(None) if reason else ""
            if problem:
                raise RestartError(f"{engine.name} did not come back: {problem}")
        files.remove_folders(folders)
        files.forget()
    return {
        "changed": bool(changes or record),
        "up_to_date": not (changes or record),
        "stops": stops,
        "files": [each.path for each in changes],
        "directories": folders,
        "restarted": bool(reason),
        "reason": reason,
        "diff": engine.shown(changes),
    }
