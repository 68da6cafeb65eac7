# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node driver's store, as modules find it on a node."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from ansible_collections.dra.accelerators.plugins.module_utils.core.store.prepared_claims import (
    SCHEMA,
    SCHEMA_VERSION,
)


def claim(
    path: Path,
    device_uuid: str,
    partition: dict[str, Any] | None = None,
    *,
    created: bool = False,
    boot_id: str = "boot",
    settings: dict[str, Any] | None = None,
    meta: dict[str, str] | None = None,
) -> None:
    """Write the store as the driver does, with one prepared claim, its settings, and further rows of the table meta."""
    with sqlite3.connect(path) as connection:
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO meta (key, value) VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
        connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", (meta or {}).items())
        device = {"request": "gpu", "name": "gpu-0", "share_id": "", "settings": settings}
        document = json.dumps({"devices": [device]} if settings else {})
        connection.execute(
            "INSERT INTO claims VALUES ('none', 'uid-1', 'team-a', 'training', 'prepared', ?, 1.0, ?)",
            (boot_id, document),
        )
        place = partition["placement"] if partition else {}
        connection.execute(
            "INSERT INTO devices (claim_uid, request, pool, name, device_uuid, kind, profile, placement_start, "
            "placement_size, partition_uuid, created) VALUES ('uid-1', 'gpu', 'node', 'gpu-0', ?, ?, ?, ?, ?, ?, ?)",
            (
                device_uuid,
                "partition" if partition else "device",
                partition["profile"] if partition else None,
                place.get("start"),
                place.get("size"),
                partition["uuid"] if partition else None,
                created,
            ),
        )
