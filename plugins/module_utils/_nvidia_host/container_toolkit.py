# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The packages of the NVIDIA Container Toolkit, and the verification of its installation."""

from __future__ import annotations

from .._host.driver_installation import COMMAND_SECONDS, last_words, systemctl
from .._packages.interface import PackageProblem, PackageTool, upstream
from .._packages.package_group import Group, Part, Unit
from ..core.host.system import System

BASE = "nvidia-container-toolkit-base"
FULL = (BASE, "nvidia-container-toolkit", "libnvidia-container-tools", "libnvidia-container1")
PATH_UNIT, SERVICE_UNIT = "nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"
#: The CDI file that the service writes.
SPECIFICATION = "/var/run/cdi/nvidia.yaml"
_PATTERN = (
    r"nvidia-container-toolkit(-base|-operator-extensions|-cdi-refresh)?|libnvidia-container(-tools|-dev|1|1-dbg)"
)
#: Files that the packages' scripts create and that no package removes.
_TRACES = (
    "/etc/nvidia-container-runtime/config.toml",
    "/etc/nvidia-container-runtime/",
    "/etc/nvidia-container-toolkit/",
    SPECIFICATION,
)
_LOADED = "/sys/module/nvidia/version"
_PROGRAM = "/usr/bin/nvidia-ctk"


def group_of(components: str, cdi_refresh: str) -> Group:
    """Return the package group for ``base`` or ``full`` components, and ``keep``, ``enabled`` or ``disabled`` CDI refresh."""
    on = None if cdi_refresh == "keep" else cdi_refresh == "enabled"
    return Group(
        name="nvidia-container-toolkit",
        title="the NVIDIA Container Toolkit",
        pattern=_PATTERN,
        parts=tuple(Part((name,)) for name in (FULL if components == "full" else (BASE,))),
        variable="nvidia_container_toolkit_version",
        # The path unit is disabled first, so that it does not start the service again.
        units=(Unit(PATH_UNIT, on), Unit(SERVICE_UNIT, on, stays=False, makes=SPECIFICATION)),
        traces=_TRACES,
    )


def prove(system: System, apt: PackageTool, *, refreshes: bool) -> None:
    """Verify that the toolkit's program runs with the installed version, and that the service creates the CDI file.

    If no driver is loaded, the CDI file is not verified. Raises PackageProblem.
    """
    expected = upstream(apt.packages().installed.get(BASE, "")).replace("~", "-")
    done = system.run([_PROGRAM, "--version"], COMMAND_SECONDS)
    if done.returncode or expected not in done.stdout.split():
        raise PackageProblem(
            f"{_PROGRAM} --version says: {last_words(done.stdout + done.stderr)}; expected {expected}",
            code="not-proved",
        )
    if not refreshes or not system.exists(_LOADED):
        return
    systemctl(system, "restart", SERVICE_UNIT)
    if not system.exists(SPECIFICATION):
        raise PackageProblem(
            f"{SERVICE_UNIT} has run, and there is no {SPECIFICATION}",
            hint=f"Check `journalctl -u {SERVICE_UNIT}`.",
            code="no-specification",
        )
