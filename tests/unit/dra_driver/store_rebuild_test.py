# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A rebuild of the store is atomic: after an interruption at any step there is the old state, or the complete new one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dra_driver.claims.store import files as store_files
from dra_driver.claims.store.files import BACKUPS, StoreError
from dra_driver.claims.store.schema import StoreDamaged
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.tables import Change
from previous_store import PreviousStore
from store_model import commit, record


class Steps:
    """Count the steps that reach the disk, and act at the step with the given number."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, act: Callable[[str], None]) -> None:
        self.count = 0
        self._at = at
        self._act = act
        for name in ("rename", "unlink", "open", "fsync", "mkdir", "link"):
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        steps = self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
                steps.step(f"sqlite:{statement.split()[0]}")
                return super().execute(statement, *arguments)

        real = sqlite3.connect

        def connect(path: Any, **options: Any) -> sqlite3.Connection:
            return real(path, factory=Connection, **options)

        patch.setattr(sqlite3, "connect", connect)

    def step(self, name: str) -> None:
        self.count += 1
        if self.count == self._at:
            self._act(name)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.step(name)
            return real(*arguments, **options)

        return counted


def damaged(directory: Path) -> str:
    """Create an unreadable store that had three claims, with an unreadable log."""
    path = directory / "state.db"
    store = Store.open(str(path))
    commit(store, *(Change(put=record(f"old{number}")) for number in range(3)))
    store.close()
    path.write_bytes(b"no database" * 1000)
    (directory / "state.db-wal").write_bytes(b"log")
    return str(path)


def make_new(path: str) -> None:
    Store.open(path).close()


def rebuild(path: str) -> None:
    Store.rebuild(path, [record("u1", "prepared"), record("u2", "prepared")], {"mark": "x"}).close()


def make_format_1_store(directory: Path) -> str:
    """Create a store of format 1, in the database and in a log next to it."""
    path = directory / "state.db"
    store = PreviousStore.make(directory / "made.db", [record("u1", "prepared")], {"mark": "x"})
    store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.put(record("u2", "prepared"))
    for suffix in ("", "-wal"):
        shutil.copyfile(directory / f"made.db{suffix}", f"{path}{suffix}")
    store.close()
    (directory / "made.db").unlink()
    return str(path)


def damage_while_open(path: str) -> Store:
    """Return an open store with u1 whose file is unreadable at the next change."""
    Path(path).unlink()
    store = Store.rebuild(path, [record("u1", "prepared")], {"mark": "x"})
    store._connection.close()
    Path(path).write_bytes(b"no database" * 1000)
    store._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    return store


def check_after_interruption(path: str, way: str) -> None:
    """Assert that the old store will be replaced again, or that the new one is complete: never a valid store without the claims."""
    wanted = {"new": set(), "rebuild": {"u1", "u2"}, "open": {"u1", "u2"}, "forward": {"u1", "u2"}}[way]
    was_complete = store_files._is_complete(f"{path}.new")
    try:
        store = Store.open(path)
    except StoreDamaged:
        assert Path(path).read_bytes().startswith(b"no database")
        assert not was_complete, "the complete new store was deleted"
        return
    assert set(store.claims) == wanted
    assert way != "forward" or store.meta["mark"] == "x"
    store.close()


def interrupted(way: str, directory: Path, at: int, act: Callable[[str], None]) -> bool:
    """Run one way with an interruption at one step. Return whether that step was reached."""
    directory.mkdir()
    path = (
        str(directory / "state.db")
        if way == "new"
        else make_format_1_store(directory)
        if way == "forward"
        else damaged(directory)
    )
    store = damage_while_open(path) if way == "open" else None
    failed = False
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch, at, act)
        try:
            if store is not None:
                commit(store, Change(put=record("u2")))
            else:
                (rebuild if way == "rebuild" else make_new)(path)
        except StoreError:
            failed = True
        reached = steps.count >= at
        steps.count = at  # the open connection counts further steps
    if store is not None:
        assert set(store.claims) == ({"u1"} if failed else {"u1", "u2"})
        commit(store, Change(put=record("u2")))  # the next change succeeds
        assert set(store.claims) == {"u1", "u2"}
        store.close()
    return reached


@pytest.mark.prove
@pytest.mark.parametrize("way", ["new", "rebuild", "open", "forward"])
def test_rebuild_on_a_failing_disk_is_complete_or_absent(tmp_path: Path, way: str) -> None:
    def fail(name: str) -> None:
        if name.startswith("sqlite"):
            raise sqlite3.OperationalError("database or disk is full")
        raise OSError(errno.ENOSPC, "No space left on device")

    reached = 0
    while interrupted(way, tmp_path / str(reached), reached + 1, fail):
        path = str(tmp_path / str(reached) / "state.db")
        check_after_interruption(path, way)
        assert not [left for left in (tmp_path / str(reached)).iterdir() if ".new" in left.name]
        reached += 1
    assert reached >= 20


@pytest.mark.parametrize("way", ["new", "rebuild", "open", "forward"])
def test_rebuild_by_a_killed_process_is_complete_or_absent(tmp_path: Path, way: str) -> None:
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        import store_rebuild_test

        def die(name):
            os.kill(os.getpid(), signal.SIGKILL)

        folder, reached = Path(sys.argv[1]), 0
        while True:
            child = os.fork()
            if child == 0:
                store_rebuild_test.interrupted(sys.argv[3], folder / str(reached), reached + 1, die)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            if os.WIFEXITED(status):
                break
            reached += 1
        sys.stdout.write(f"{os.WEXITSTATUS(status)} {reached}")
        """
    )
    arguments = [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent), way]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    status, reached = done.stdout.split()
    assert status == "0", done.stderr
    assert int(reached) >= 20
    for number in range(int(reached)):
        path = str(tmp_path / str(number) / "state.db")
        check_after_interruption(path, way)
        assert len(list((tmp_path / str(number)).glob("*.form-1-*"))) <= BACKUPS
        Path(path).unlink(missing_ok=True)
        rebuild(path)  # independent of files next to it
        with contextlib.closing(Store.open(path)) as store:
            assert set(store.claims) == {"u1", "u2"}
