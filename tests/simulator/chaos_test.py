# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A little of the chaos (tests/chaos): the same program as `make chaos`, with cases for seconds."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.simulator.nvml_builds import ROOT

#: What is killed at its stages that leave the most behind, and what else is tried.
FAULTS = ("kill", "store", "call", "hand-over", "leftovers", "reboot", "fuzz-requests", "fuzz-configurations")
CASES = ("--runs=3", "--kinds=three", "--cases=2", "--requests=250", "--seconds=1", "--seed=1")


@pytest.mark.parametrize("vendor", ["nvidia", "ascend", "ascend-910a"])
def test_a_little_of_everything_leaves_nothing(vendor: str) -> None:
    command = [sys.executable, "-m", "tests.chaos", f"--vendor={vendor}", f"--faults={','.join(FAULTS)}", *CASES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\S+) .*?(\d+) +0 +0 +0 +0 ", done.stdout.partition("Chaos of seed")[2], re.MULTILINE)
    assert [name for name, runs in rows if int(runs)] == list(FAULTS), done.stdout
