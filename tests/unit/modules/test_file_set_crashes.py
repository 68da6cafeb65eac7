# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module file_set, killed before any of its steps, and the next run. The table in docs/crash-points.md names these tests."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

from tests.unit.crash_steps import at_each_step, kill_before

Run = Callable[..., dict[str, Any]]
TOKENS = ("token-of-before", "token-of-now")


def prepare(directory: Path) -> list[dict[str, Any]]:
    """Create the previous entries, and return a set that changes, creates, and removes entries of each kind."""
    (directory / "etc").mkdir(parents=True)
    for name, text, mode in (
        ("settings", "level: info\n", 0o640),
        ("token", f"{TOKENS[0]}\n", 0o600),
        ("old", "x\n", 0o644),
        ("shown", "x\n", 0o600),
    ):
        (directory / "etc" / name).write_text(text)
        (directory / "etc" / name).chmod(mode)
    (directory / "current").symlink_to("releases/1")
    (directory / "linked").symlink_to("etc/old")
    (directory / "empty").mkdir()
    return [
        {"path": str(directory / "etc/settings"), "content": "level: debug\n", "mode": "0644"},
        {"path": str(directory / "etc/token"), "secret_content": f"{TOKENS[1]}\n", "mode": "0600", "group": "4711"},
        {"path": str(directory / "etc/shown"), "mode": "0644"},
        {"path": str(directory / "etc/old"), "state": "absent"},
        {"path": str(directory / "new/one"), "content": "new\n", "mode": "0600"},
        {"path": str(directory / "units"), "state": "directory", "mode": "0750"},
        {"path": str(directory / "linked"), "content": "file\n"},
        {"path": str(directory / "current"), "state": "link", "target": "releases/2"},
        {"path": str(directory / "empty"), "state": "absent"},
    ]


def entries(directory: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, group, and content (of a link: its target) of each entry below a directory."""
    found = {}
    for path in directory.rglob("*"):
        status = path.lstat()
        if path.is_symlink():
            text = str(path.readlink())
        else:
            text = path.read_text() if path.is_file() else ""
        found[str(path.relative_to(directory))] = (status.st_mode, status.st_gid, text)
    return found


def test_file_set_killed_before_any_step_next_run_completes_it(run_here: Run, tmp_path: Path) -> None:
    """After the kill each path has its previous entry or the new one, except for attributes that are changed in place."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for number in itertools.chain([1 << 20], itertools.count()):
        directory = tmp_path / str(number)
        files = prepare(directory)
        before = before or entries(directory)
        step = kill_before(number, lambda files=files: run_here("file_set", {"files": files}), directory)
        found = entries(directory)
        if not after:
            after = found
            assert not step and {"new/one", "units"} <= set(after) - set(before)
            continue
        if not step:
            assert number > 20 and found == after
            return
        for path, (mode, _group, text) in found.items():
            assert mode & 0o077 == 0 or not any(token in text for token in TOKENS), (step, path)
        for path in (set(before) | set(after)) - {"units", "new"}:
            assert found.get(path) in (before.get(path), after.get(path)), (step, path)
        done = run_here("file_set", {"files": files})
        assert not done.get("failed") and entries(directory) == after, (step, done)
        assert not run_here("file_set", {"files": files})["changed"], step


def test_unlocked_file_of_writer_is_not_removed_under_its_lock(run_here: Run, tmp_path: Path) -> None:
    """The writer has created its temporary file, and locks it as soon as the lock is free: the file is removed under the lock."""
    file, temporary = tmp_path / "etc/settings", tmp_path / "etc/.settings.1-0.tmp"
    file.parent.mkdir()
    temporary.touch()

    def lock(_number: int) -> None:
        if temporary.exists():
            descriptor = os.open(temporary, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)

    files = [{"path": str(file), "content": "new\n"}]
    steps = at_each_step(lambda: run_here("file_set", {"files": files}), tmp_path, lock)
    assert "os.remove etc/.settings.1-0.tmp" in steps and not temporary.exists() and file.read_text() == "new\n"


def test_link_is_created_if_temporary_link_is_removed(run_here: Run, tmp_path: Path) -> None:
    files = [{"path": str(tmp_path / "current"), "state": "link", "target": "releases/2"}]

    def remove(number: int) -> None:
        if number < 5:
            System(str(tmp_path)).remove_temporaries("/current")

    steps = at_each_step(lambda: run_here("file_set", {"files": files}), tmp_path, remove)
    assert len([step for step in steps if "os.symlink" in step]) > 1, steps
    assert (tmp_path / "current").readlink() == Path("releases/2")
