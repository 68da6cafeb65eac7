# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Lock a node, so that only one module at a time changes it and records the changes.

A second run at the same time would undo the changes of the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.respawn import has_respawned

from .._module import run
from ..core.errors import AcceleratorError
from ..core.host.system import System

RECORDS_DIRECTORY = "/var/lib/dra-accelerators"
LOCK = "lock"
# Attempts to lock the file, and the pause between two attempts.
_ATTEMPTS, _PAUSE_SECONDS = 5, 0.05


class OtherRun(AcceleratorError):
    """Another run changes the node."""

    default_code = "other-run"


def run_alone(module: AnsibleModule, work: Callable[[AnsibleModule], dict[str, Any]], system: System) -> None:
    """Run ``work(module)`` like ``run``, while no other run changes the node. Check mode does not create the lock file."""

    def locked(module: AnsibleModule) -> dict[str, Any]:
        with hold_lock(system, records_directory(module.params), is_check=module.check_mode):
            return work(module)

    run(module, locked)


def records_directory(params: Mapping[str, Any]) -> str:
    """Return the directory of a module's records, which has the lock."""
    return str(params.get("records") or posixpath.dirname(params.get("record") or "") or RECORDS_DIRECTORY)


@contextlib.contextmanager
def hold_lock(system: System, directory: str, *, is_check: bool) -> Iterator[None]:
    """Hold the lock of a directory with records. The kernel releases the lock of a killed run. Raises OtherRun."""
    path = f"{directory}/{LOCK}"
    if is_check:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            descriptor = _open_and_lock(system, path, is_check=True)
            if descriptor is not None:
                os.close(descriptor)
        yield
        return
    descriptor = _open_and_lock(system, path, is_check=False)
    if descriptor is None:
        yield
        return
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            system.path(path).unlink()
            system.path(directory).rmdir()
        os.close(descriptor)


def _open_and_lock(system: System, path: str, *, is_check: bool) -> int | None:
    """Open and lock a file; return its descriptor. Raises OtherRun, OSError.

    Returns None if the holder is the process that runs this module again with another interpreter.
    """
    target, holder = system.path(path), ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            # A run that ends deletes the file, and check mode holds it for a moment.
            time.sleep(_PAUSE_SECONDS)
        if not is_check:
            system.make_directory(posixpath.dirname(path))
        try:
            descriptor = os.open(target, (os.O_RDONLY if is_check else os.O_RDWR | os.O_CREAT) | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            if is_check:
                raise
            continue
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_check else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), target.stat()):
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    if has_respawned() and holder == str(os.getppid()):
        return None
    raise OtherRun(
        f"Another run of a module of dra.accelerators, process {holder or 'unknown'}, changes this node: it has locked {path}",
        hint="Wait until that run has ended, and run this again. Nothing was changed.",
    )
