# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Add this directory's helpers and the core's boards to the import path, and shorten the drivers' retry intervals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "core")]


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a path short enough for sockets, and shorten the driver's retry intervals."""
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.1)
    monkeypatch.setattr("dra_driver.publish.publisher.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.CHECK_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.CHECK_INTERVAL", (0.05, 0.1))
    monkeypatch.setattr("dra_driver.api.watching.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.SETTLE_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.claims.operations.READY_SECONDS", 0.1)
    return tmp_path_factory.mktemp("v")
