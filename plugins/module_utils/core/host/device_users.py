# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the processes that have a device open, from the open files in /proc."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable

from ..errors import InUse, NotPermitted
from ..model import Process
from .kubelet_pods import add_pods
from .system import DeviceNumber, System

#: The maximum time, in seconds, for processes to close a device after its persistence mode was switched off.
FREE_SECONDS = 60.0
FREE_POLL_SECONDS = 0.5
_CAP_SYS_PTRACE = 19


def require_unused(
    system: System, paths: Iterable[str], what: str, *, ignored_name: str = "", seconds: float = 0.0
) -> None:
    """Raise InUse, which names the processes, while any process has one of these device nodes open.

    Processes with the name ``ignored_name`` are ignored. ``seconds`` is the maximum wait until no process has one open.
    """
    numbers = {path: number for path in paths if (number := system.device_number(path)) is not None}
    deadline = time.monotonic() + seconds
    while found := [
        each
        for each in find_device_users(system, set(numbers.values()))
        if not ignored_name or each.name != ignored_name
    ]:
        if time.monotonic() < deadline:
            time.sleep(FREE_POLL_SECONDS)
            continue
        found = list(add_pods(system, found))
        raise InUse(
            f"{what} is in use: {', '.join(numbers)} {'is' if len(numbers) == 1 else 'are'} open in {', '.join(map(str, found))}",
            pids=[process.pid for process in found],
            hint="End these processes; a monitor that keeps devices open has to let go of this one.",
        )


def require_visible_users(system: System, what: str) -> None:
    """Raise NotPermitted, which names the capabilities and the remedy, if this process cannot see all users of devices.

    Source: capabilities(7), proc_pid_fd(5). To read another user's open files, a process needs CAP_SYS_PTRACE. Their
    directory in /proc is readable only for that user, and for root with CAP_DAC_READ_SEARCH. A /proc that is mounted
    with hidepid hides such processes, so the capability is required even if all visible processes can be read.
    """
    if _has_ptrace_capability(system):
        pids = (pid for pid in system.list_directory("/proc") if pid.isdigit())
        unreadable = next((pid for pid in pids if not _may_read_open_files(system, pid)), None)
        if unreadable is None:
            return
        why = f"process {unreadable} ({_process_name(system, int(unreadable))}) keeps its open files to itself"
    else:
        why = "this process has no CAP_SYS_PTRACE"
    raise NotPermitted(
        f"{what} is not passed through to a virtual machine: its users cannot be found, because {why}",
        hint="Give the driver CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH: the role dra_driver does so if the layout has passthrough "
        "(in a pod, if dra_driver_pod_passthrough is true). A security module that denies it must allow it.",
    )


def find_device_users(system: System, numbers: Iterable[DeviceNumber]) -> tuple[Process, ...]:
    """Return the processes, other than this one, that have a device with one of these numbers open.

    Only the numbers count, because a container has its own device nodes. Processes that this one cannot read are
    ignored.
    """
    wanted = {(number.major, number.minor) for number in numbers}
    own = _own_pid(system)
    found = sorted(
        int(name)
        for name in (system.list_directory("/proc") if wanted else ())
        if name.isdigit() and name != own and _has_open(system, name, wanted)
    )
    return tuple(Process(pid, _process_name(system, pid)) for pid in found)


def find_located_users(system: System, paths: Iterable[str]) -> tuple[Process, ...]:
    """Return the other processes that have one of these device nodes open, with their pods, units, or containers.

    A process whose open files this one may not read is not found.
    """
    numbers = {number for path in paths if (number := system.device_number(path)) is not None}
    return add_pods(system, find_device_users(system, numbers))


def find_file_users(system: System, path: str) -> tuple[int, ...]:
    """Return the processes that have a file open, under any path in a container; empty if the file does not exist."""
    try:
        wanted = system.path(path).stat()
    except OSError:
        return ()
    found = []
    for name in system.list_directory("/proc"):
        for descriptor in system.list_directory(f"/proc/{name}/fd") if name.isdigit() else ():
            with contextlib.suppress(OSError):
                there = system.path(f"/proc/{name}/fd/{descriptor}").stat()
                if (there.st_dev, there.st_ino) == (wanted.st_dev, wanted.st_ino):
                    found.append(int(name))
                    break
    return tuple(sorted(found))


def _has_ptrace_capability(system: System) -> bool:
    """Return whether this process has CAP_SYS_PTRACE; True if the kernel does not report it."""
    try:
        status = system.read_text("/proc/self/status")
    except OSError:
        return True
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is None or bool(int(found[1], 16) >> _CAP_SYS_PTRACE & 1)


def _may_read_open_files(system: System, pid: str) -> bool:
    """Return whether a process's open files can be read. A process that has ended has none."""
    folder = system.path(f"/proc/{pid}/fd")
    try:
        for descriptor in os.listdir(folder):  # noqa: PTH208  names alone, no objects
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # closed in the meantime
                os.readlink(f"{folder}/{descriptor}")  # noqa: PTH115  every open file of the machine: no objects
                break  # the kernel allows them all or none
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def _own_pid(system: System) -> str:
    """Return this process's PID in the /proc of ``system``, which in a pod can differ from ``os.getpid``."""
    try:
        return system.path("/proc/self").readlink().name
    except OSError:
        return str(os.getpid())


def _has_open(system: System, pid: str, wanted: set[tuple[int, int]]) -> bool:
    folder = system.path(f"/proc/{pid}/fd")
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208  names alone, no objects
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            found = os.stat(f"{folder}/{descriptor}")  # noqa: PTH116  every open file of the machine: no objects
        except OSError:
            continue
        if found.st_rdev and (os.major(found.st_rdev), os.minor(found.st_rdev)) in wanted:
            return True
    return False


def _process_name(system: System, pid: int) -> str:
    try:
        return system.read_text(f"/proc/{pid}/comm").strip()
    except OSError:
        return ""
