# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the store of prepared claims without changing it, also while the driver runs."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from ..claims.store.records import ClaimRecord
from ..claims.store.schema import StoreDamaged, read
from ..core.errors import AcceleratorError
from ..core.host.system import path_exists


@dataclass(frozen=True)
class Stored:
    """The content of a store. ``problem`` is the reason why it could not be read, or a description of its damage."""

    records: tuple[ClaimRecord, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def read_store(path: str) -> Stored:
    """Return the content of a store. A read error is returned as ``problem``."""
    try:
        if not path_exists(path):
            return Stored(problem=f"there is no store at {path}")
        try:
            return _read(path, path)
        except sqlite3.OperationalError:
            # SQLite creates files next to a store that no driver has open, which fails in a read-only directory. So a
            # copy is read.
            with tempfile.TemporaryDirectory() as folder:
                copy = str(Path(folder) / "state.db")
                for suffix in ("", "-wal"):
                    if path_exists(path + suffix):
                        shutil.copyfile(path + suffix, copy + suffix)
                return _read(copy, path)
    except (sqlite3.Error, OSError, ValueError, AcceleratorError) as error:
        return Stored(problem=f"the store {path} cannot be read: {error}")


def _read(file: str, path: str) -> Stored:
    with contextlib.closing(sqlite3.connect(f"file:{quote(file)}?mode=ro", uri=True, timeout=5)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN")
        try:
            content, problem = read(connection, path).content, ""
        except StoreDamaged as error:
            content, problem = error.valid_part, error.message
    records = sorted(content.claims.values(), key=lambda record: (record.created_at, record.uid))
    return Stored(tuple(records), content.meta, problem)
