# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run Ansible's commands for tests, without a start of Python for each."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

SERVER = Path(__file__).with_name("ansible_server.py")


@cache
def _server() -> subprocess.Popen[str]:
    """Start the process that runs the commands of this test process."""
    started = subprocess.Popen(
        [sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(_stop, started)
    return started


def _stop(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.close()
    started.wait(timeout=60)


def run_ansible(
    words: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``ansible``, ``ansible-inventory``, or ``ansible-playbook`` with its arguments.

    The parameters and the result are those of subprocess.run.
    """
    command = [os.fspath(word) for word in words]
    process = _server()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        output.touch()
        errors.touch()
        request = {
            "words": command,
            "environment": dict(os.environ if env is None else env),
            "directory": os.fspath(cwd or Path.cwd()),
            "output": str(output),
            "errors": str(errors),
        }
        process.stdin.write(f"{json.dumps(request)}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {SERVER} has ended while it ran {command}; run the test alone")
        done = subprocess.CompletedProcess(
            command,
            int(answer),
            output.read_text(encoding="utf-8", errors="replace"),
            errors.read_text(encoding="utf-8", errors="replace"),
        )
    if check:
        done.check_returncode()
    return done
