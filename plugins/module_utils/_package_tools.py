# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Which package manager a node has: what its distribution says it is, not which programs lie there."""

from __future__ import annotations

import os

from ._apt_tool import Apt
from ._dnf_tool import Dnf
from ._package_port import PackageProblem, PackageTool
from ._rpm import os_names
from ._zypper_tool import Zypper
from .core.system import System

#: The environment variable in which the role offline names the folder of a bundle's repository, besides which dnf and zypper are to know none.
#: apt has a variable of its own for that.
BUNDLE = "DRA_ACCELERATORS_BUNDLE"
_OS_RELEASE = "/etc/os-release"
_APT = {"debian", "ubuntu"}
_ZYPPER = {"suse", "sles", "opensuse"}
_DNF = {"rhel", "fedora", "centos", "rocky", "almalinux", "ol", "openeuler"}


def tool_of(system: System, *, timeout: float) -> PackageTool:
    """Return a node's package manager; ``timeout`` is for one call of it, in seconds. Raises PackageProblem where none is known.

    With a bundle on the node (``BUNDLE`` in the environment) it knows that one's packages, and no source of the node's own.
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
        f"{_OS_RELEASE} says that this is {' or '.join(names) or 'nothing'}, of which no package manager is known",
        hint="apt, dnf and zypper are, on Debian, Red Hat's and SUSE's distributions and on openEuler.",
        code="no-package-manager",
    )
