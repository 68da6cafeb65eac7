# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The answer of the program that measures MPS servers, and its deadlines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "silicon"))

import mps_servers
from mps_servers import answer_of, server, work

HUNG = """#!/bin/sh
env > "$0.environment.${1:-command}"
exec sleep 60
"""
DEAD = """#!/bin/sh
exit 1
"""
WORKS = """#!/bin/sh
[ "$1" = -f ] || exit 0
exec sleep 60
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SECONDS", "COMMAND_SECONDS"):
        monkeypatch.setattr(mps_servers, name, 0.5)
    return tmp_path / "nvidia-cuda-mps-control"


def write(tool: Path, text: str) -> None:
    tool.write_text(text)
    tool.chmod(0o755)


@pytest.mark.parametrize(("limited", "answer"), [(1000, "divided once"), (760, "divided once"), (500, "divided twice")])
def test_answer_of_half_the_work_is_divided_twice(limited: int, answer: str) -> None:
    assert answer_of(limited, 1000) == answer


@pytest.mark.parametrize("text", [HUNG, DEAD])
def test_daemon_that_does_not_answer_is_ended_with_an_error(tool: Path, text: str) -> None:
    write(tool, text)
    with pytest.raises(TimeoutError, match="does not answer"), server("GPU-1", 50):
        pytest.fail("the daemon does not answer")


def test_variables_of_the_caller_do_not_reach_the_daemon(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PROTOCOL_VERSION", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    write(tool, HUNG)
    with pytest.raises(TimeoutError), server("GPU-1", 50):
        pytest.fail("the daemon does not answer")
    daemon = Path(f"{tool}.environment.-f").read_text().splitlines()
    assert "CUDA_VISIBLE_DEVICES=GPU-1" in daemon and not any("PROTOCOL" in line for line in daemon)
    assert "CUDA_VISIBLE_DEVICES" not in Path(f"{tool}.environment.command").read_text()


def test_client_that_hangs_is_ended_with_an_error(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tool, WORKS)
    monkeypatch.setattr(mps_servers, "CLIENT", "import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="a client of MPS has ended"):
        work("GPU-1", 50)
