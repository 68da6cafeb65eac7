# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Each systemd unit of the collection limits its memory and its processes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROLES = Path(__file__).resolve().parents[3] / "roles"
#: The relief includes the driver's own template.
UNITS = [path for path in sorted(ROLES.glob("*/templates/*.service.j2")) if "relief" not in path.name]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_limits_memory_and_tasks(path: Path) -> None:
    text = path.read_text("utf-8")
    assert re.search(r"^MemoryMax=\d+(M|G|%)$", text, re.MULTILINE), path
    assert re.search(r"^TasksMax=\d+$", text, re.MULTILINE), path


def test_controller_has_file_descriptors_for_many_connections() -> None:
    """Idle connections to the webhook's port, which needs no certificate, must not cost the controller its Lease."""
    text = (ROLES / "dra_controller/templates/dra-accelerators-controller.service.j2").read_text("utf-8")
    assert "\nLimitNOFILE=65536\n" in text


def system_calls(name: str) -> set[str]:
    """Return the system calls of a name in a filter: one call, or a group and the groups in it."""
    if not name.startswith("@"):
        return {name}
    command = ("systemd-analyze", "--no-pager", "syscall-filter", name)
    reported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.strip() for line in reported.splitlines()[1:]]
    return {call for line in lines if line and not line.startswith("#") for call in system_calls(line)}


def test_controller_unit_allows_what_the_report_process_limits() -> None:
    """The process limits its memory and lowers its priority. If the kernel kills it, the controller must continue."""
    lines = (ROLES / "dra_controller/templates/dra-accelerators-controller.service.j2").read_text("utf-8").splitlines()
    allowed: set[str] = set()
    for line in lines:
        if line.startswith("SystemCallFilter="):
            names = line.partition("=")[2]
            calls = {call for name in names.removeprefix("~").split() for call in system_calls(name)}
            allowed = allowed - calls if names.startswith("~") else allowed | calls
    assert {"prlimit64", "getpriority", "setpriority"} <= allowed
    assert not {"nice", "setrlimit", "sched_setscheduler", "mount", "reboot"} & allowed
    assert "OOMPolicy=continue" in lines


def test_units_are_found() -> None:
    assert len(UNITS) >= 11
