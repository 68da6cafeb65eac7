# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Kills a program at each of its steps: changes of files, and changes of a modeled node that the model reports with ``step``.

The program runs in a forked process, which gets SIGKILL directly before a step. So no ``finally`` and no ``except`` runs.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_STEP = "dra_accelerators.step"
#: Audit events of Python whose first argument is the changed path or descriptor.
_CHANGES = frozenset(
    f"os.{call}"
    for call in (
        "rename",
        "remove",
        "mkdir",
        "rmdir",
        "symlink",
        "link",
        "chmod",
        "chown",
        "truncate",
        "utime",
        "setxattr",
    )
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def step(what: str) -> None:
    """Report a change of a modeled node, directly before it."""
    sys.audit(_STEP, what)


def kill_before(number: int, work: Callable[[], object], root: Path, save: Callable[[], object] = lambda: None) -> str:
    """Run ``work`` in another process, and kill it directly before its step ``number``. Return the step; empty if there are fewer.

    Steps on files are those below ``root``. ``save`` writes the model's state, which the process loses otherwise, to a file.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # The process is killed or exits; it waits for no lock of another thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run(number, work, f"{root}/", save, writer)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        said = file.read()
    _pid, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, said
    return said if killed else ""


def _run(number: int, work: Callable[[], object], root: str, save: Callable[[], object], writer: int) -> NoReturn:
    left = number
    code = 1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        what = _step_of(event, arguments, root) if left >= 0 else ""
        if not what:
            return
        left -= 1
        if left < 0:
            os.write(writer, what.encode())
            save()
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        work()
        left = -1
        save()
        code = 0
    finally:
        if sys.exc_info()[0] is not None:
            os.write(writer, traceback.format_exc().encode())
        os._exit(code)


def _step_of(event: str, arguments: tuple[Any, ...], root: str) -> str:
    """Return a step as text; empty for an event that changes nothing below the root."""
    if event == _STEP:
        return str(arguments[0])
    if event == "open":
        if not isinstance(arguments[2], int) or not arguments[2] & _WRITING:
            return ""
    elif event not in _CHANGES:
        return ""
    # For a symbolic link the path is the second argument.
    path = arguments[1] if event == "os.symlink" else arguments[0]
    if isinstance(path, int):
        return event
    text = os.fsdecode(path)
    return f"{event} {text.removeprefix(root)}" if text.startswith(root) else ""
