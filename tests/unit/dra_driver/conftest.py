# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Makes this folder's helpers, and the core's boards, importable by the tests beside them, and has drivers try again soon."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "core")]


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose path leaves room for sockets; what a driver waits for before it tries again is short as well."""
    monkeypatch.setattr("dra_driver.supervisors.shared.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.shared.RETRY_LIMIT", 0.1)
    monkeypatch.setattr("dra_driver.publish.publisher.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.CHECK_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.api.watching.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.SETTLE_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.claims.service.READY_SECONDS", 0.1)
    return tmp_path_factory.mktemp("v")
