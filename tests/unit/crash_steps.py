# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Stop a program at each of its steps: changes of files, and changes of a modeled node that the model reports with ``step``.

The program runs in a forked process. It can get SIGKILL directly before a step: then no ``finally`` and no ``except``
runs.
"""

from __future__ import annotations

import errno
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
    """Run ``work`` in another process, and kill it directly before its step ``number``. Return the step, or "" if there are fewer steps.

    Steps on files are those below ``root``. ``save`` writes the model's state, which the process loses otherwise, to a
    file.
    """

    def act(count: int) -> None:
        if count == number:
            save()
            os.kill(os.getpid(), signal.SIGKILL)

    def complete() -> None:
        work()
        save()

    steps, was_killed = _run(complete, f"{root}/", act)
    return steps[-1] if was_killed else ""


def at_each_step(work: Callable[[], object], root: Path, act: Callable[[int], object]) -> list[str]:
    """Run ``work`` in another process, which calls ``act`` with the step's number directly before each step. Return the steps."""
    steps, was_killed = _run(work, f"{root}/", act)
    assert not was_killed
    return steps


def full_disk(number: int, work: Callable[[], object], root: Path, *, times: int = 1) -> str:
    """Run ``work`` in this process with ENOSPC for ``times`` changes of files, the first at step ``number``. Return its path.

    Steps are new files and directories below ``root`` that a module writes. The model's own files do not count. Return
    "" if there are fewer steps.
    """
    count, failed, is_on = 0, "", True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, failed
        what = _step_of(event, arguments, f"{root}/") if is_on and event in ("open", "os.mkdir") else ""
        path = what.partition(" ")[2]
        if not path.startswith(("etc/", "var/lib/dra-accelerators")) or (root / path).is_dir():
            return
        count += 1
        if number <= count - 1 < number + times:
            failed = failed or what
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    sys.addaudithook(hook)
    try:
        work()
    finally:
        is_on = False
    return failed


def _run(work: Callable[[], object], root: str, act: Callable[[int], object]) -> tuple[list[str], bool]:
    """Run ``work`` in a forked process. Return its steps, and whether it was killed. Raises AssertionError for an exception there."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # The process is killed or exits; it waits for no lock of another thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _work(work, root, act, writer)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        said = file.read()
    _pid, status = os.waitpid(pid, 0)
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert was_killed or status == 0, said
    return said.splitlines(), was_killed


def _work(work: Callable[[], object], root: str, act: Callable[[int], object], writer: int) -> NoReturn:
    count = 0
    is_acting = False
    code = 1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, is_acting
        what = "" if is_acting else _step_of(event, arguments, root)
        if not what:
            return
        is_acting = True
        os.write(writer, f"{what}\n".encode())
        act(count)
        count += 1
        is_acting = False

    try:
        sys.addaudithook(hook)
        work()
        code = 0
    finally:
        if sys.exc_info()[0] is not None:
            os.write(writer, traceback.format_exc().encode())
        os._exit(code)


def _step_of(event: str, arguments: tuple[Any, ...], root: str) -> str:
    """Return a step as text, or "" for an event that changes nothing below the root."""
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
