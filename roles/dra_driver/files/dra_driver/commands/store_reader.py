# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Reads the store of prepared claims without changing it, whether or not the driver runs."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from ..claims.forms import StoreDamaged, read
from ..claims.records import ClaimRecord
from ..core.errors import AcceleratorError


@dataclass(frozen=True)
class Stored:
    """What a store holds; ``problem`` says why it could not be read, or that some of it is not as it was written."""

    records: tuple[ClaimRecord, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def read_store(path: str) -> Stored:
    """Read a store; what cannot be read is said."""
    if not Path(path).exists():
        return Stored(problem=f"there is no store at {path}")
    try:
        try:
            return _read(path, path)
        except sqlite3.OperationalError:
            # SQLite wants to make files beside a store that no driver has open, and may not where the folder is read-only.
            with tempfile.TemporaryDirectory() as folder:
                copy = str(Path(folder) / "state.db")
                for suffix in ("", "-wal"):
                    if Path(path + suffix).exists():
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
            content, problem = error.sound, error.message
    records = sorted(content.claims.values(), key=lambda record: (record.created_at, record.uid))
    return Stored(tuple(records), content.meta, problem)
