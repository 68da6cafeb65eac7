# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Device events start a scan of the hardware, and periodic scans read everything again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER, ModelBackend, ModelGpus
from dra_driver.claims.partitions.ownership import Ownership
from dra_driver.claims.store.store import Store
from dra_driver.core.discovery.device_locks import DeviceLocks
from dra_driver.core.model import Notice
from dra_driver.supervisors import driver_state
from dra_driver.supervisors import hardware_notices as module
from dra_driver.supervisors.driver_state import Conditions, Shared, Snapshot
from dra_driver.supervisors.hardware import PART, HardwareWatch
from dra_driver.supervisors.hardware_notices import DeviceEventListener
from dra_driver.supervisors.library_release import LibraryLock
from machine_model import POOL

LONG = 60.0


def hardware_watch(
    backend: ModelBackend,
    store: Store,
    full_interval: float,
    scan_requested: asyncio.Event,
    snapshots: Shared[Snapshot],
) -> HardwareWatch:
    library_lock: Any = LibraryLock(DeviceLocks("/nonexistent", "the driver"), None)  # type: ignore[arg-type]
    return HardwareWatch(
        backend,
        driver=DRIVER,
        pool=POOL,
        rules=(),
        interval=LONG,
        full_interval=full_interval,
        ownership=Ownership(store, "boot-1"),
        snapshots=snapshots,
        conditions=Conditions(PART),
        library_lock=library_lock,
        scan_requested=scan_requested,
        report_problem=lambda reason, message: None,
    )


async def listening(backend: ModelBackend, reported: list[str]) -> None:
    scan_requested = asyncio.Event()
    heard: list[Notice] = []
    task = asyncio.ensure_future(
        DeviceEventListener(backend, driver=DRIVER, scan_requested=scan_requested, on_events=heard.extend).run()
    )
    try:
        for message in reported:
            backend.notices.put(Notice("GPU-1", message))
            await asyncio.wait_for(scan_requested.wait(), LONG)
            scan_requested.clear()
        assert [notice.message for notice in heard] == reported
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_notice_requests_a_scan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    asyncio.run(listening(ModelBackend(ModelGpus(tmp_path / "gpus.json")), ["Xid 79", "Xid 31"]))
    assert [record.message for record in caplog.records if "Xid" in record.message] == ["Xid 79", "Xid 31"]


def test_listener_waits_for_a_closed_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_state, "RETRY_FIRST", 0.01)
    backend = ModelBackend(ModelGpus(tmp_path / "gpus.json"))
    backend.present = False
    requested = []
    real = backend.wait_for_change

    def wait(seconds: float) -> Any:
        requested.append(seconds)
        backend.present = len(requested) > 3
        return real(seconds)

    backend.wait_for_change = wait  # type: ignore[method-assign]
    asyncio.run(listening(backend, ["Xid 79"]))
    assert len(requested) > 3


def test_first_scan_and_due_scans_read_all_devices(tmp_path: Path) -> None:
    backend = ModelBackend(ModelGpus(tmp_path / "gpus.json"))
    store = Store.open(str(tmp_path / "state.db"))

    async def scans(full_interval: float) -> list[bool]:
        watch = hardware_watch(backend, store, full_interval, asyncio.Event(), Shared(Snapshot()))
        backend.calls.clear()
        for _scan in range(3):
            await watch.scan()
        watch.close()
        return [arguments[0] for name, arguments in backend.calls if name == "discover"]

    assert asyncio.run(scans(LONG)) == [True, False, False]
    assert asyncio.run(scans(0)) == [True, True, True]
    store.close()


def test_storm_of_events_is_counted_and_costs_few_scans(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that fails repeatedly makes its GPU send the same Xid several hundred times per second: few scans run."""
    monkeypatch.setattr(module, "REPEAT_SECONDS", 0.5)
    caplog.set_level("INFO")
    backend = ModelBackend(ModelGpus(tmp_path / "gpus.json"))
    heard: list[Notice] = []

    async def storm() -> tuple[int, int]:
        """Return the number of requested scans, and of the pauses between log lines that fit into the storm."""
        scans = 0
        scan_requested = asyncio.Event()
        task = asyncio.ensure_future(
            DeviceEventListener(backend, driver=DRIVER, scan_requested=scan_requested, on_events=heard.extend).run()
        )
        began = asyncio.get_running_loop().time()
        sent = 0
        while sent <= 100 or asyncio.get_running_loop().time() < began + 1.7:
            if backend.notices.empty():
                backend.notices.put(Notice("GPU-1", "Xid 13"))
                sent += 1
            if scan_requested.is_set():
                scan_requested.clear()
                scans += 1
            if sent == 30:
                backend.notices.put(Notice("GPU-2", "Xid 79"))
                sent += 1
            await asyncio.sleep(0)
        while len(heard) < sent:
            await asyncio.sleep(0.01)
        scans += scan_requested.is_set()
        scan_requested.clear()
        await asyncio.wait_for(scan_requested.wait(), LONG)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(heard) == sent
        return scans + 1, int((asyncio.get_running_loop().time() - began) / 0.5)

    scans, pauses = asyncio.run(storm())
    lines = [record.message for record in caplog.records if "Xid" in record.message]
    assert 3 <= scans <= pauses + 3 and len(lines) <= pauses + 3, (scans, pauses, lines)
    assert lines[:2] == ["Xid 13", "Xid 79"], "an event of another device is neither delayed nor counted"
    counts = [int(line.split()[2]) for line in lines if "more times in the last" in line]
    counts += [1 for line in lines if "once more in the last" in line]
    assert sum(counts) + lines.count("Xid 13") + lines.count("Xid 79") == len(heard), "every event is in a log line"


def test_scans_that_are_requested_without_end_have_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.hardware.MIN_PAUSE_SECONDS", 0.3)
    backend = ModelBackend(ModelGpus(tmp_path / "gpus.json"))
    store = Store.open(str(tmp_path / "state.db"))

    async def scans() -> int:
        scan_requested = asyncio.Event()
        snapshots = Shared(Snapshot())
        watch = hardware_watch(backend, store, LONG, scan_requested, snapshots)
        work = asyncio.ensure_future(watch.run())
        until = asyncio.get_running_loop().time() + 1.0
        while asyncio.get_running_loop().time() < until:
            scan_requested.set()
            await asyncio.sleep(0.005)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        watch.close()
        return len([name for name, _arguments in backend.calls if name == "discover"])

    assert 2 <= asyncio.run(scans()) <= 5
    store.close()
