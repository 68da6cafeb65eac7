# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The interface for nox users: its sessions are targets of the Makefile, or pytest with their directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from steps import ROOT

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def nox(tmp_path: Path, *words: str) -> str:
    """Run nox with a `make` that only prints its arguments."""
    stand_in = tmp_path / "make"
    stand_in.write_text('#!/bin/sh\necho "make: $*"\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NOX_ENVDIR": str(tmp_path / "nox")}
    command = [sys.executable, "-m", "nox", "--noxfile", ROOT / "noxfile.py", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_session_is_a_target_of_the_makefile(tmp_path: Path) -> None:
    sessions = [each["name"] for each in json.loads(nox(tmp_path, "--list", "--json"))]
    called = re.findall(r"^make: (\S+)$", nox(tmp_path, "--sessions", *sessions), re.MULTILINE)
    assert len(called) == len(set(called)) == len(sessions)
    assert set(called) <= TARGETS


def test_arguments_are_pytests(tmp_path: Path) -> None:
    words = ["--collect-only", "-q", "-k", "no_test_has_this_name or test_every_session_is"]
    printed = subprocess.run(
        [sys.executable, "-m", "nox", "--noxfile", ROOT / "noxfile.py", "--sessions", "simulator", "--", *words],
        env={**os.environ, "NOX_ENVDIR": str(tmp_path / "nox")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    output = printed.stdout + printed.stderr
    assert re.search(rf"-m pytest tests/simulator {re.escape(shlex.join(words))}", output), output
