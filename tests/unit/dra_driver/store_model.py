# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Records for tests of the store, and functions that commit them."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

from dra_driver.claims.store.records import ClaimRecord, DeviceRecord
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.tables import Change
from dra_driver.core.store.prepared_claims import checksum


def record(uid: str = "u1", state: str = "preparing", devices: int = 1) -> ClaimRecord:
    return ClaimRecord(
        uid=uid,
        namespace="default",
        name=f"claim-{uid}",
        state=state,
        boot_id="boot-1",
        created_at=12.5,
        devices=tuple(
            DeviceRecord(
                request=f"r{number}",
                pool="node-1",
                name=f"gpu-0-mig-1g10gb-19-{number}",
                device_uuid="GPU-0",
                kind="partition",
                profile="1g.10gb",
                profile_id=19,
                placement_start=number,
                placement_size=1,
                created=True,
                cdi_id=f"k8s.gpu.nvidia.com/claim={uid}-gpu-0-mig-1g10gb-19-{number}",
            )
            for number in range(devices)
        ),
    )


def commit(store: Store, *changes: Change) -> None:
    async def main() -> None:
        await asyncio.gather(*(store.commit(change) for change in changes))

    asyncio.run(main())


def write_entry(path: Path, key: str, value: str) -> None:
    """Write an entry of the meta table as a driver does, independent of a running driver."""
    with contextlib.closing(sqlite3.connect(path, timeout=10)) as connection:
        row = (checksum(key, value), key, value)
        connection.execute("INSERT OR REPLACE INTO meta (checksum, key, value) VALUES (?, ?, ?)", row)
        connection.commit()
