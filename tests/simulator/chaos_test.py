# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run a short part of the chaos test (tests/chaos): the same program as `make chaos`, for a few seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import ANY

import pytest

from tests.simulator.nvml_builds import ROOT

PROGRAM = (sys.executable, "-m", "tests.chaos")
#: Faults to inject: kills at the stages that leave the most state behind, and other faults.
FAULTS = (
    "kill",
    "store",
    "call",
    "clock-health",
    "exceptions",
    "hand-over",
    "leftovers",
    "reboot",
    "fuzz-requests",
    "fuzz-configurations",
)
CASES = ("--runs=3", "--kinds=three", "--cases=2", "--requests=250", "--seconds=1", "--seed=1")


@pytest.mark.parametrize("vendor", ["nvidia", "ascend", "ascend-910a"])
def test_short_run_of_every_fault_leaves_no_state(vendor: str) -> None:
    command = [*PROGRAM, f"--vendor={vendor}", f"--faults={','.join(FAULTS)}", *CASES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\S+) .*?(\d+) +0 +0 +0 +0 ", done.stdout.partition("Chaos of seed")[2], re.MULTILINE)
    assert [name for name, runs in rows if int(runs)] == list(FAULTS), done.stdout


def test_parallel_nodes_with_too_few_runs_fail() -> None:
    asked = ["--faults=kill,leftovers", "--kinds=whole,static", "--runs=2", "--cases=1", "--parallel=2", "--seed=1"]
    done = subprocess.run(
        [*PROGRAM, *asked, "--least=3"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = done.stdout.partition("Chaos of seed")[2].splitlines()[2:]
    assert [line.split() for line in found] == [
        ["kill", "whole", "2", "0", "0", "0", "0", ANY, "short", "of", "3"],
        ["kill", "static", "2", "0", "0", "0", "0", ANY, "short", "of", "3"],
        ["leftovers", "1", "0", "0", "0", "0", ANY],
    ], done.stdout


def marked(mark: str) -> list[int]:
    """Return the processes with a mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_all_nodes_end_when_their_parent_ends(tmp_path: Path, number: signal.Signals) -> None:
    mark = f"CHAOS_TEST={uuid.uuid4()}"
    command = [*PROGRAM, "--faults=kill", "--kinds=whole,static", "--runs=100000", "--parallel=2"]
    # A killed program leaves empty directories behind, which must not be in the host's /tmp.
    environment = {**os.environ, **dict([mark.split("=")]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            begun: set[str] = set()
            while len(begun) < 2 and (line := program.stdout.readline()):
                if "the driver writes to" in line:
                    begun.add(line.partition("]")[0])
            assert len(begun) == 2
            program.send_signal(number)
            program.wait(60)
        finally:
            program.kill()
    deadline = time.monotonic() + 60
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


#: The record of chip 2 and its neighbor, with the claim and without it.
WITHOUT: Mapping[str, Any] = {"claims": {}, "made again": {"2": ["2:136"], "3": []}}
WITH: Mapping[str, Any] = {"claims": {"a": "prepared"}, "made again": {"2": ["2:136", "2:138"]}}


@pytest.mark.parametrize(
    ("stage", "noted", "differs"),
    [
        ("", {"2": ["2:136"]}, False),  # killed in the library: no record of the existing vNPU any more
        ("", {"2": ["2:136", "2:138"]}, False),
        ("", {"2": ["2:138"]}, True),  # the neighbor's
        ("", {"2": ["2:136", "2:138", "2:139"]}, True),  # of no claim
        ("", {"2": ["2:136"], "3": ["3:148"]}, True),
        ("partition-destroyed", {"2": ["2:136"]}, True),  # the driver is in no library call at a stage
        ("partition-destroyed", {"2": ["2:136", "2:138"]}, False),
    ],
)
def test_killed_library_may_leave_notes_of_either_state(
    monkeypatch: pytest.MonkeyPatch, stage: str, noted: Any, differs: bool
) -> None:
    for folder in ("roles/simulator/files", "tests/unit/dra_driver", "tests/unit/core"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    from tests.chaos.kill import Case, Undisturbed, unexpected_difference

    case = Case("unprepare", stage, 0.5, "", 0.0, is_repeated=True, was_prepared=False)
    usual: Any = Undisturbed(cast("Any", None), (), dict(WITHOUT), dict(WITH), {})
    found = {"claims": {"a": "prepared"}, "made again": noted}
    assert ("made again" in unexpected_difference(found, WITH, usual, case)) == differs
    assert "claims" in unexpected_difference(found, WITHOUT, usual, case), "all other state must be unchanged"
