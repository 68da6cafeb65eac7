# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A store has an identity: the driver detects that a store was replaced, and that records can be missing."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from dra_driver.claims.store.schema import IDENTITY_KEY, StoreDamaged
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.tables import Change
from previous_store import PreviousStore
from store_model import commit, record


def identity(path: Path) -> str:
    """Return the identity of the store at a path, as on the disk after it was opened and closed."""
    with contextlib.closing(Store.open(str(path))) as store:
        found = store.identity
        assert IDENTITY_KEY not in store.meta, "it is no entry like those of claims"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT value FROM meta WHERE key = ?", (IDENTITY_KEY,)).fetchall() == [(found,)]
    return found


def without_entry(path: Path) -> None:
    """Create a store as earlier releases did, without an identity."""
    identity(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM meta WHERE key = ?", (IDENTITY_KEY,))
        connection.commit()


@pytest.mark.parametrize(
    "made",
    [identity, without_entry, lambda path: PreviousStore.make(path, [record("u1")], {"mark": "x"}).close()],
    ids=["by this release", "by the one before", "in a previous format"],
)
def test_store_keeps_its_identity(tmp_path: Path, made: Callable[[Path], object]) -> None:
    paths = [tmp_path / name for name in ("one.db", "another.db")]
    for path in paths:
        made(path)
    first, other = map(identity, paths)
    assert first and other and first != other
    store = Store.open(str(paths[0]))
    commit(store, Change(put=record("u2"), meta={"mark": "x"}), Change(delete="u2"))
    store.close()
    assert identity(paths[0]) == first


def test_store_recreated_at_the_same_path_has_a_new_identity(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    first = identity(path)
    path.unlink()
    second = identity(path)
    with contextlib.closing(Store.open(str(path))) as store:
        commit(store, Change(put=record("u1"), meta={"mark": "x"}))
        claims, meta = store.claims, store.meta
    with contextlib.closing(Store.rebuild(str(path), claims.values(), meta)) as rebuilt:
        assert (rebuilt.claims, rebuilt.meta) == (claims, meta)
    assert len({first, second, identity(path)}) == 3


def test_store_sound_content_of_a_damaged_one_has_no_identity(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with contextlib.closing(Store.open(str(path))) as store:
        commit(store, Change(put=record("u1"), meta={"mark": "x"}))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE claims SET document = replace(document, 'GPU-0', 'GPU-1')")
        connection.commit()
    with pytest.raises(StoreDamaged) as caught:
        Store.open(str(path))
    assert caught.value.valid_part.meta == {"mark": "x"} and not caught.value.valid_part.identity


def test_store_rewritten_from_memory_keeps_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with contextlib.closing(Store.open(str(path))) as store:
        first = store.identity
        with store._writing:
            store._replace_from_memory("a test found it damaged", [Change(put=record("u1"))])
    assert identity(path) == first
