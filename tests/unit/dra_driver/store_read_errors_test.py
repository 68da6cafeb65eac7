# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A temporarily unreadable store is neither damaged nor incomplete: the driver retries and renames nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dra_driver.claims.startup_recovery import records_in_files
from dra_driver.claims.store import files as store_files
from dra_driver.claims.store.files import StoreError, new_store_path, use_new_store
from dra_driver.claims.store.schema import StoreDamaged, read, valid_content
from dra_driver.claims.store.store import Store
from dra_driver.commands.store_reader import read_store
from dra_driver.config import default_path
from dra_driver.core.discovery.device_locks import DeviceLocks
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.health import repair_marks
from dra_driver.core.host.cdi import spec_path
from dra_driver.core.host.system import System
from dra_driver.layout_command import run_layout
from dra_driver.settings_command import run_settings
from store_model import record

READ_ERROR = "Tree 2 page 3: unable to get the page. error code="


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def store_with_a_claim(path: str) -> None:
    Store.rebuild(path, [record()], {"setting": "1"}).close()


class UnreadConnection(sqlite3.Connection):
    """Answer one statement as SQLite does after a read error."""

    statement = ""
    answer: str | Exception = ""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if not self.statement or not sql.startswith(self.statement):
            return super().execute(sql, *values)
        if isinstance(self.answer, Exception):
            raise self.answer
        return super().execute("SELECT ?", (self.answer,))


@contextlib.contextmanager
def unread(path: str, statement: str, answer: str | Exception) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, factory=UnreadConnection)) as connection:
        connection.row_factory = sqlite3.Row
        connection.statement, connection.answer = statement, answer
        yield connection


def test_new_store_that_cannot_be_opened_is_not_incomplete(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    store_with_a_claim(path)
    Path(path).rename(new_store_path(path))
    with no_free_descriptor(), pytest.raises(StoreError, match="unable to open"):
        use_new_store(path)
    assert os.listdir(tmp_path) == ["state.db.new"]
    assert use_new_store(path)


@pytest.mark.parametrize("journal", [False, True])
def test_new_store_on_a_read_only_file_system_is_not_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: bool
) -> None:
    """The store is incomplete only with the journal of an interrupted transaction. SQLite reports this error in both cases."""

    def refuse(_connection: sqlite3.Connection, _path: str) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    path = str(tmp_path / "state.db")
    store_with_a_claim(path)
    Path(path).rename(new_store_path(path))
    if journal:
        Path(f"{new_store_path(path)}-journal").touch()
    with monkeypatch.context() as patch:
        patch.setattr(store_files, "read", refuse)
        if journal:
            assert not use_new_store(path)
        else:
            with pytest.raises(StoreError, match="readonly database"):
                use_new_store(path)
    assert Path(new_store_path(path)).exists()


@contextlib.contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> Iterator[None]:
    """Let ``os.stat`` and ``os.open`` fail for all files with this name."""
    calls = {"stat": os.stat, "open": os.open}

    def call_of(function: str) -> Any:
        def call(path: Any, *options: Any, **more: Any) -> Any:
            if not isinstance(path, int) and os.path.basename(path).startswith(name):
                raise OSError(number, os.strerror(number), str(path))
            return calls[function](path, *options, **more)

        return call

    with monkeypatch.context() as patch:
        for function in calls:
            patch.setattr(os, function, call_of(function))
        yield


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_file_that_cannot_be_read_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """An unreadable configuration, CDI file, lock, or mark does not count as missing, because each of them has an effect."""
    config, layout, settings = (str(tmp_path / name) for name in ("driver.yaml", "layout.json", "settings.json"))
    for file in (layout, settings):
        Path(file).write_text("[]")
    error = os.strerror(number)
    with unreadable(monkeypatch, "driver.yaml", number):
        with pytest.raises(OSError, match=error):
            run_layout(layout, config, apply=False, wait=0, as_json=True)
        with pytest.raises(OSError, match=error):
            run_settings(settings, config, apply=False, wait=0, as_json=True)
        with pytest.raises(OSError, match=error):
            default_path()
    with unreadable(monkeypatch, "state.db", number):
        assert error in read_store(str(tmp_path / "state.db")).problem
    with unreadable(monkeypatch, "state", number):
        with pytest.raises(OSError, match=error):
            repair_marks.mark(str(tmp_path / "state"), ["GPU-1"], repair_marks.RESET)
        # A confined program without permission to create the lock reads it.
        expected: Any = (
            contextlib.nullcontext() if number == errno.EACCES else pytest.raises(AcceleratorError, match=error)
        )
        with expected, DeviceLocks(str(tmp_path / "state"), "a test").hold(["GPU-1"], 1.0):
            pass
    kind = "k8s.gpu.example.com/claim"
    file = Path(spec_path(str(tmp_path), kind, "u1"))
    file.write_text("{}")
    with unreadable(monkeypatch, file.name, number), pytest.raises(StoreError, match=error):
        records_in_files(System(), str(tmp_path), kind)


def test_rebuild_opens_the_complete_new_store(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    store_with_a_claim(path)
    Path(path).rename(new_store_path(path))
    store = Store.rebuild(path, [], {})
    assert (len(store.claims), store.meta["setting"]) == (1, "1")
    store.close()


@pytest.mark.parametrize("code", [10, 266, 8458, 14, 7])
def test_integrity_check_that_cannot_read_a_page_is_a_read_error(tmp_path: Path, code: int) -> None:
    path = str(tmp_path / "state.db")
    store_with_a_claim(path)
    with (
        unread(path, "PRAGMA integrity_check", f"{READ_ERROR}{code}") as connection,
        pytest.raises(sqlite3.OperationalError),
    ):
        read(connection, path)


def test_integrity_check_that_finds_wrong_content_is_damage(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    store_with_a_claim(path)
    with unread(path, "PRAGMA integrity_check", f"{READ_ERROR}11") as connection, pytest.raises(StoreDamaged) as caught:
        read(connection, path)
    assert len(caught.value.valid_part.claims) == 1


@pytest.mark.parametrize("text", ["disk I/O error", "unable to open database file"])
def test_read_error_in_sound_content_loses_no_row(tmp_path: Path, text: str) -> None:
    path = str(tmp_path / "state.db")
    store_with_a_claim(path)
    with (
        unread(path, "SELECT * FROM claims NOT", sqlite3.OperationalError(text)) as connection,
        pytest.raises(sqlite3.OperationalError, match=text),
    ):
        valid_content(connection)
