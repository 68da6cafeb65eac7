# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Check whether the kernel driver of NPUs treats this process as an ordinary container.

Such a container holds every NPU that it can open. The rules are those of the open driver tree (hicann/driver,
``uda_access.c`` and ``ka_system.c``, snapshot 2026-07). Closed drivers can differ. A process is an ordinary container
if its mount namespace is not that of the host. The exception is user 0 of the initial user namespace with the
capabilities 0 to 37 and without a read-only ``/sys/fs/cgroup/memory``.
"""

from __future__ import annotations

import os

from ....errors import BackendUnavailable
from ....host.system import System
from ...host_texts import text_or_empty

HELPER_UNIT = "dra-accelerators-dcmi.service"
CODE = "ordinary-container"
#: Capabilities 0 to 37, which the kernel has since Linux 3.16.
CAPABILITIES = (1 << 38) - 1
_CONTROL_GROUPS = "/sys/fs/cgroup/memory"
_INITIAL = ["0", "0", "4294967295"]


def refuse_container(system: System) -> None:
    """Raise BackendUnavailable if this process is an ordinary container for the kernel driver."""
    reason = container_reason(system)
    if reason:
        raise BackendUnavailable(
            f"DCMI is not opened, because the kernel driver would take this process for an ordinary container and give it every NPU: {reason}",
            hint=f"Start {HELPER_UNIT}, which opens DCMI on the host. A process that opens DCMI itself must be in the mount namespace of PID 1: "
            "without ProtectSystem=, PrivateTmp=, ReadWritePaths=, and similar options of systemd.",
            code=CODE,
        )


def container_reason(system: System) -> str:
    """Return why this process is an ordinary container for the kernel driver; "" if it is not, or if this cannot be checked."""
    own = host = ""
    try:
        own = system.link_target("/proc/self/ns/mnt")
        host = system.link_target("/proc/1/ns/mnt")
        if not own or own == host:
            return ""
    except OSError:
        if os.geteuid() != 0:
            return ""  # only root can read it
    lack = _missing_privilege(system)
    if not lack:
        return ""
    if not host:
        return f"its mount namespace cannot be compared with that of PID 1, and {lack}"
    return f"its mount namespace is {own}, that of PID 1 is {host}, and {lack}"


def _missing_privilege(system: System) -> str:
    """Return what a process outside the host's mount namespace lacks to count as the host; "" if it lacks nothing."""
    status = dict(line.split(":", 1) for line in _lines(system, "/proc/self/status") if ":" in line)
    if status.get("Uid", "").split()[1:2] != ["0"] or _lines(system, "/proc/self/uid_map")[:1] != [" ".join(_INITIAL)]:
        return "it is not user 0 of the initial user namespace"
    missing = CAPABILITIES & ~int(status.get("CapEff", "0"), 16)
    if missing:
        numbers = ", ".join(str(number) for number in range(38) if missing >> number & 1)
        return f"it lacks the capabilities {numbers} of 0 to 37"
    for line in _lines(system, "/proc/self/mountinfo"):
        words = line.split(" ")
        if len(words) > 5 and words[4] == _CONTROL_GROUPS and "ro" in words[5].split(","):
            return f"{_CONTROL_GROUPS} is read-only"
    return ""


def _lines(system: System, path: str) -> list[str]:
    return [" ".join(line.split()) for line in text_or_empty(system, path).splitlines()]
