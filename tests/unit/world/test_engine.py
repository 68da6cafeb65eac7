# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Only the manually started Docker Engine is stopped, and no other process that now has its PID."""

from __future__ import annotations

from pathlib import Path

import pytest
from world_cli import engine


@pytest.mark.parametrize(
    ("written", "command", "expected"),
    [
        ("4711\n", b"/usr/sbin/dockerd\0", 4711),
        ("4711\n", b"dockerd\0--debug\0", 4711),
        ("4711\n", b"/usr/bin/vim\0dockerd\0", None),
        ("4711\n", b"", None),
        ("4711\n", None, None),
        ("", b"/usr/sbin/dockerd\0", None),
        (None, b"/usr/sbin/dockerd\0", None),
    ],
)
def test_only_started_processes_are_recognized(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: str | None,
    command: bytes | None,
    expected: int | None,
) -> None:
    monkeypatch.setenv("DRA_ACCELERATORS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache/world").mkdir(parents=True)
    if written is not None:
        (tmp_path / "cache/world/dockerd.pid").write_text(written)
    if command is not None:
        (tmp_path / "proc/4711").mkdir(parents=True)
        (tmp_path / "proc/4711/cmdline").write_bytes(command)
    assert engine.pid_of_started_engine(tmp_path / "proc") == expected
