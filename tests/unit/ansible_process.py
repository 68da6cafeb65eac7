# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run Ansible for tests without a start of Python for each command and each module."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

#: The interpreter for modules of hosts that are this machine. It works only in commands of ``run_ansible``.
PYTHON = Path(__file__).with_name("forked_python")
SERVER = Path(__file__).with_name("python_server.py")


@cache
def _servers() -> Path:
    """Start the processes for the commands and modules of this test process; return the directory of their sockets."""
    directory = Path(tempfile.mkdtemp(prefix="forked-python-"))
    atexit.register(shutil.rmtree, directory)
    for kind in ("commands", "modules"):
        server = subprocess.Popen(
            [sys.executable, SERVER, kind, directory / kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline(), f"{SERVER} {kind} did not start"
        atexit.register(server.wait, 60)
        atexit.register(server.stdin.close)
    return directory


def run_ansible(
    words: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``ansible``, ``ansible-inventory``, or ``ansible-playbook`` with its arguments, as subprocess.run does.

    Directories of plugins in ``env``, such as ANSIBLE_CALLBACK_PLUGINS, have no effect: Ansible reads them at its import.
    """
    environment = {**(os.environ if env is None else env), "FORKED_PYTHON": str(_servers())}
    return subprocess.run(
        [PYTHON, *words], env=environment, cwd=cwd, check=check, capture_output=True, text=True, start_new_session=True
    )
