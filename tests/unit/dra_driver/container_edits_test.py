# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Missing required files of containers are detected before the hardware changes, and reported before a claim needs them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from backend_model import DRIVER
from claim_steps import SMALL
from dra_driver.claims.locking import DeviceGuard
from dra_driver.claims.partitions.ownership import Ownership
from dra_driver.core.discovery.device_locks import DeviceLocks
from dra_driver.core.errors import BackendUnavailable
from dra_driver.supervisors.driver_state import Conditions, Shared, Snapshot
from dra_driver.supervisors.hardware import HardwareWatch
from dra_driver.supervisors.library_release import LibraryLock
from machine_model import Claims, Node


def missing() -> BackendUnavailable:
    return BackendUnavailable("/dev/nvidia-uvm is no device node of this machine", hint="Load nvidia-uvm.")


def test_prepare_missing_container_files_changes_no_hardware(tmp_path: Path) -> None:
    async def main() -> None:
        claims = Claims()
        node = Node(tmp_path, claims)
        await node.start()
        try:
            claim = claims.allocate("a", SMALL)
            node.backend.failures["driver_edits"] = [missing()]
            node.backend.calls.clear()
            error = (await node.service.prepare([claim]))[claim.uid].error
            assert "/dev/nvidia-uvm" in error and "Load nvidia-uvm" in error
            assert not {"create_partition", "set_partitioning"} & {name for name, _arguments in node.backend.calls}
            assert not node.store.claims and not node.partitions()
            assert (await node.service.prepare([claim]))[claim.uid].error == ""
        finally:
            node.close()

    asyncio.run(main())


def test_scan_missing_files_are_reported_once_and_when_they_exist(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> list[tuple[str, str]]:
        node = Node(tmp_path, Claims())
        await node.start()
        reported: list[tuple[str, str]] = []
        locks = DeviceLocks(str(tmp_path / "state"), "the driver")
        watch = HardwareWatch(
            node.backend,
            driver=DRIVER,
            pool="node-1",
            rules=(),
            interval=1.0,
            full_interval=300.0,
            ownership=Ownership(node.store, "boot"),
            snapshots=Shared(Snapshot()),
            conditions=Conditions(),
            library_lock=LibraryLock(locks, DeviceGuard(locks)),
            scan_requested=asyncio.Event(),
            report_problem=lambda reason, message: reported.append((reason, message)),
        )
        node.backend.failures["driver_edits"] = [missing(), missing()]
        try:
            for _scan in range(4):
                await watch.scan()
        finally:
            watch.close()
            node.close()
        return reported

    ((reason, message),) = asyncio.run(main())
    assert reason == "DriverIncomplete" and "/dev/nvidia-uvm" in message
    lines = [record.message for record in caplog.records if record.name.endswith("hardware")]
    assert [line.partition(":")[0] for line in lines if "devices answer" not in line] == [
        "claims are refused until it is there",
        "what every container needs is there",
    ]
