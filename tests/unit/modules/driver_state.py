# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node driver's files on a node: its store with the files next to it, and the locks of devices."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from ansible_collections.dra.accelerators.plugins.module_utils.core.discovery.device_locks import (
    LIBRARY,
    REQUEST,
    DeviceLocks,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.store.prepared_claims import SCHEMA

FOLDER = "/kubelet/plugins/gpu.nvidia.com"
REGISTRY = "/kubelet/plugins_registry"


def make_state(root: Path, *, store: bool) -> Path:
    directory = root / FOLDER.lstrip("/")
    directory.mkdir(parents=True)
    (root / "kubelet/plugins_registry").mkdir()
    if store:
        with contextlib.closing(sqlite3.connect(directory / "state.db")) as database:
            database.execute("PRAGMA journal_mode = WAL")
            for statement in SCHEMA:
                database.execute(statement)
        for name in ("driver.lock", "state.db.damaged-20260101T000000", "state.db.form-1-20260101T000000"):
            (directory / name).touch()
    return directory


def make_locks(directory: Path, *others: str) -> None:
    locks = DeviceLocks(str(directory), "the driver")
    with locks.hold([LIBRARY, REQUEST, "GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071"], 0):
        pass
    for name in others:
        (directory / "locks" / name).touch()
