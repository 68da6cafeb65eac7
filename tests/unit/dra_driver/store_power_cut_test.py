# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Power cuts under the driver's store, on ext4 and XFS: each confirmed claim exists afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.tables import Change
from store_model import record

from tests.prove.power_cuts import KINDS, Disk


@pytest.mark.prove
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_power_cut_keeps_answered_claims(tmp_path: Path, kind: str) -> None:
    """The power fails after each answer while the driver runs, also after the file system has committed its journal."""
    disk = Disk(tmp_path, kind)
    names = [f"u{number}" for number in range(4)]

    async def commit(path: str) -> None:
        store = Store.open(path)
        for number, name in enumerate(names):
            await store.commit(Change(put=record(name, devices=2)))
            disk.cut(number * 2)
            disk.commit_journal()
            disk.cut(number * 2 + 1)
        store.close()

    with disk.mounted() as node:
        asyncio.run(commit(str(node / "state.db")))
        for number in range(len(names) * 2):
            with disk.after(number) as after:
                store = Store.open(str(after / "state.db"))
                assert sorted(store.claims) == names[: number // 2 + 1]
                store.close()
