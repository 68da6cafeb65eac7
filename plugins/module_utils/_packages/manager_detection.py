# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Select the package manager of a node by its distribution in os-release, not by the installed programs."""

from __future__ import annotations

import os

from ..core.host.system import System
from .apt import Apt
from .dnf import Dnf
from .interface import PackageProblem, PackageTool
from .rpm_output import os_names
from .zypper import Zypper

#: Environment variable with the directory of a bundle's repository, set by the role offline. It restricts dnf and
#: zypper to this repository. apt uses a separate variable.
BUNDLE = "DRA_ACCELERATORS_BUNDLE"
_OS_RELEASE = "/etc/os-release"
_APT = {"debian", "ubuntu"}
_ZYPPER = {"suse", "sles", "opensuse"}
_DNF = {"rhel", "fedora", "centos", "rocky", "almalinux", "ol", "openeuler"}


def tool_of(system: System, *, timeout: float) -> PackageTool:
    """Return the package manager of a node. ``timeout`` applies to one call, in seconds. Raises PackageProblem for an unknown distribution.

    If the environment variable ``BUNDLE`` is set, the package manager uses only the packages of the bundle.
    """
    bundle = os.environ.get(BUNDLE, "")
    names = os_names(system.read_text(_OS_RELEASE)) if system.exists(_OS_RELEASE) else ()
    for name in names:
        if name in _APT:
            return Apt(system, timeout=timeout)
        if name in _ZYPPER:
            return Zypper(system, timeout=timeout, bundle=bundle)
        if name in _DNF:
            return Dnf(system, timeout=timeout, bundle=bundle)
    raise PackageProblem(
        f"The distribution of the node is not supported: {_OS_RELEASE} contains {' or '.join(names) or 'no name'}",
        hint="Expected Debian, a distribution of Red Hat or SUSE or one similar to them, or openEuler.",
        code="no-package-manager",
    )
