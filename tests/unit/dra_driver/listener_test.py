# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What devices tell has the hardware looked at, and everything is read again now and then."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER, ModelBackend, ModelGpus
from dra_driver.claims.ownership import Ownership
from dra_driver.claims.store import Store
from dra_driver.core.model import Notice
from dra_driver.supervisors import shared
from dra_driver.supervisors.hardware import PART, HardwareWatch
from dra_driver.supervisors.listener import Listener
from dra_driver.supervisors.shared import Conditions, Shared, Snapshot
from machine_model import POOL

LONG = 60.0


async def listening(backend: ModelBackend, told: list[str]) -> None:
    soon = asyncio.Event()
    heard: list[Notice] = []
    task = asyncio.ensure_future(Listener(backend, driver=DRIVER, soon=soon, heard=heard.extend).run())
    try:
        for message in told:
            backend.notices.put(Notice("GPU-1", message))
            await asyncio.wait_for(soon.wait(), LONG)
            soon.clear()
        assert [notice.message for notice in heard] == told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_every_notice_asks_for_a_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    asyncio.run(listening(ModelBackend(ModelGpus(tmp_path / "gpus.json")), ["Xid 79", "Xid 31"]))
    assert [record.message for record in caplog.records if "Xid" in record.message] == ["Xid 79", "Xid 31"]


def test_a_library_that_is_not_open_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "RETRY_FIRST", 0.01)
    backend = ModelBackend(ModelGpus(tmp_path / "gpus.json"))
    backend.present = False
    asked = []
    real = backend.wait_for_change

    def wait(seconds: float) -> Any:
        asked.append(seconds)
        backend.present = len(asked) > 3
        return real(seconds)

    backend.wait_for_change = wait  # type: ignore[method-assign]
    asyncio.run(listening(backend, ["Xid 79"]))
    assert len(asked) > 3


def test_everything_is_read_first_and_again_when_it_is_due(tmp_path: Path) -> None:
    backend = ModelBackend(ModelGpus(tmp_path / "gpus.json"))
    store = Store.open(str(tmp_path / "state.db"))

    async def looks(full_interval: float) -> list[bool]:
        watch = HardwareWatch(
            backend,
            driver=DRIVER,
            pool=POOL,
            rules=(),
            interval=LONG,
            full_interval=full_interval,
            ownership=Ownership(store, "boot-1"),
            snapshots=Shared(Snapshot()),
            conditions=Conditions(PART),
            lending=None,  # type: ignore[arg-type]  no look needs it
            soon=asyncio.Event(),
            report_problem=lambda reason, message: None,
        )
        backend.calls.clear()
        for _look in range(3):
            await watch.look()
        watch.close()
        return [arguments[0] for name, arguments in backend.calls if name == "discover"]

    assert asyncio.run(looks(LONG)) == [True, False, False]
    assert asyncio.run(looks(0)) == [True, True, True]
    store.close()
