# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Has CRI-O or Docker Engine read CDI files, and takes that back: makes the changes, restarts it, and undoes what does not work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ._changed_texts import Record, recorded
from ._containerd import Change
from ._runtime_files import Files
from .core.errors import AcceleratorError

CHANGED = "its settings were changed"


class RestartError(AcceleratorError):
    """A container runtime does not run with its settings."""

    default_code = "restart-failed"


class Engine(Protocol):
    """A container runtime that reads CDI files from folders that it is told."""

    name: str
    service: str

    def plan(self, wanted: Sequence[str]) -> list[Change]:
        """Return the changes that have it read the folders; none where its files say so."""

    def plan_back(self, record: Record) -> list[Change]:
        """Return the changes that take back what is ours."""

    def without(self, text: str, before: str | None) -> str | None:
        """Return the text of one of its files without our part."""

    def shown(self, changes: Sequence[Change]) -> dict[str, str]:
        """Return the changes as Ansible shows them."""

    def process(self) -> tuple[bool, float]:
        """Return whether it runs, and since when."""

    def behind(self, wanted: Sequence[str]) -> str:
        """Return why it does not read the folders although its files say so; empty where it does."""

    def refuse_restart(self) -> int:
        """See that a restart takes nothing with it that was not asked for; return how many containers it stops."""

    def restart(self, wanted: Sequence[str] | None) -> str:
        """Restart it until it says that it reads the folders; returns what is wrong. None: until it answers."""


def present(files: Files[Record], engine: Engine, wanted: Sequence[str], *, check: bool) -> dict[str, Any]:
    """Have the runtime read the folders. Raises AcceleratorError."""
    changes = engine.plan(wanted)
    files.refuse_read_only(changes)
    reason = CHANGED if changes else engine.behind(wanted)
    stops = engine.refuse_restart() if reason else 0
    # The process knows its settings, so the restart that was owed has happened by other hands.
    owed = not reason and files.record().restart
    if owed and not check:
        files.settle(restart=False)
    folders = files.missing([*(str(Path(each.path).parent) for each in changes), *wanted])
    if not check:
        files.make_folders(folders)
        if changes:
            try:
                carry_out(files, engine, changes, wanted)
            except BaseException:
                files.remove_folders(folders)
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
        "settled": not (changes or reason or folders or owed),
        "stops": stops,
        "files": [each.path for each in changes],
        "folders": folders,
        "restarted": bool(reason),
        "reason": reason,
        "enabled": True,
        **({} if check and reason else {"verified": True}),
        "diff": engine.shown(changes),
    }


def carry_out(files: Files[Record], engine: Engine, changes: Sequence[Change], wanted: Sequence[str] | None) -> None:
    """Make the changes and restart the runtime; all is undone if it does not come back as it should. Raises AcceleratorError."""
    before = files.record()
    record = recorded(before, changes, engine.without)
    # The record comes first: a run that is killed from here on is made up for by the next one.
    files.keep(Record({**before.files, **record.files}, record.folders, restart=True))
    try:
        files.make(changes)
    except BaseException:
        # The runtime was not restarted: it runs with its files as they were.
        files.undo(changes, before)
        files.keep(before)
        raise
    problem = engine.restart(wanted)
    if problem:
        files.undo(changes, before)
        again = engine.restart(None)
        files.keep(Record(before.files, before.folders, restart=bool(again)))
        raise RestartError(
            f"The changes of {', '.join(each.path for each in changes)} were taken back: {engine.name} did not come back with them. "
            f"{problem} "
            + (
                f"It does not run with its files as they were either: {again}"
                if again
                else "It runs with its files as they were"
            ),
            hint=f"Mend what {engine.name} complains of, then run this again.",
        )
    files.keep(Record(record.files, record.folders, restart=False))


def absent(files: Files[Record], engine: Engine, *, check: bool) -> dict[str, Any]:
    """Take back what is ours. Raises AcceleratorError."""
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
        "settled": not (changes or record),
        "stops": stops,
        "files": [each.path for each in changes],
        "folders": folders,
        "restarted": bool(reason),
        "reason": reason,
        "diff": engine.shown(changes),
    }
