# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Find the deb or rpm packages that own the installed NPU driver or firmware.

Facts: the vendor also publishes the driver and the firmware as deb and rpm. The scripts of hicann/driver
(scripts/package/custom/driver/common/scripts/run_driver_install.sh) have a PACKAGE_TYPE for that. The names of these
packages are not in public sources, so the owner of ``version.info`` counts too.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._packages import apt, rpm_base
from ..core.errors import AcceleratorError
from ..core.host.system import System
from ..core.vendors.ascend.driver_files import install_folder
from .driver_packages import KINDS, REMOVE, PackageError, Step

_NAME = re.compile(r"(?i)(?:ascend|atlas)[a-z0-9_.+-]*-npu-(?P<kind>driver|firmware)(?:[-_.].*)?")
_SECONDS = 60.0
_RPM_DATABASES = ("/var/lib/rpm", "/usr/lib/sysimage/rpm")
_DEB, _RPM = "deb", "rpm"
_REMOVALS = {_DEB: "apt-get remove", _RPM: "rpm -e"}


@dataclass(frozen=True)
class Owner:
    """An installed package that contains the driver or the firmware. Without a version, its installation is incomplete."""

    name: str
    version: str
    type: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.version, f"({self.type})")))


def read_owners(system: System) -> dict[str, Owner]:
    """Return the packages that own the driver and the firmware, by kind. Raises AcceleratorError if a database cannot be read."""
    folder = install_folder(system)
    found = {**_rpm_owners(system, folder), **_deb_owners(system, folder)}
    return {kind: found[kind] for kind in KINDS if kind in found}


def refuse_managed(steps: Sequence[Step], owners: Mapping[str, Owner]) -> None:
    """Reject steps that change the files of a package. Raises PackageError."""
    managed = [(step, owners[step.kind]) for step in steps if step.kind in owners]
    if not managed:
        return
    listed = ", ".join(f"the installed {step.kind} belongs to the package {owner}" for step, owner in managed)
    commands = ", ".join(f"{_REMOVALS[owner.type]} {owner.name}" for _step, owner in managed)
    is_removal = all(step.verb == REMOVE for step, _owner in managed)
    replace = (
        "" if is_removal else "Install the other version with the package manager too. Or remove the package first: "
    )
    raise PackageError(
        f"Cannot {'; '.join(step.describe() for step, _owner in managed)}: {listed}. "
        "The module runs .run packages, and the package manager would not know what they change. Nothing was run",
        hint=f"{replace or 'Remove it with the package manager: '}{commands}. Then run this again.",
        code="package-managed",
    )


def _deb_owners(system: System, folder: str) -> dict[str, Owner]:
    if not (system.exists(apt.STATUS) and system.finds("dpkg-query")):
        return {}
    try:
        installed, incomplete = apt.read_installed(system)
    except AcceleratorError as error:
        raise _unreadable(error.message) from error
    # Incomplete packages can have files on the node.
    packages = {**dict.fromkeys(incomplete, ""), **installed}
    versions = {name.partition(":")[0]: version for name, version in packages.items()}
    named = {kind: name for name in versions if (kind := _kind_of(name))}
    query = ["dpkg-query", f"--admindir={system.path(posixpath.dirname(apt.STATUS))}", "-S"]
    for kind in KINDS:
        # Output: "NAME:ARCH, OTHER: PATH". Exit code 1 means that no package owns the file.
        words = re.split(r"[:,\s]", _output(system, [*query, _file_of(folder, kind)]), maxsplit=1)
        named |= {kind: words[0]} if words[0] in versions else {}
    return {kind: Owner(name, versions[name], _DEB) for kind, name in named.items()}


def _rpm_owners(system: System, folder: str) -> dict[str, Owner]:
    if not (any(map(system.exists, _RPM_DATABASES)) and system.finds("rpm")):
        return {}
    try:
        installed, _twice = rpm_base.read_installed(system, os.uname().machine, refuse_messages=True)
    except AcceleratorError as error:
        raise _unreadable(error.message) from error
    found = {kind: Owner(name, version, _RPM) for name, version in installed.items() if (kind := _kind_of(name))}
    query = ["rpm", *([] if system.root == "/" else ["--root", system.root]), "-qf", "--queryformat"]
    for kind in KINDS:
        # Exit code 1 means that no package owns the file, or that the file does not exist.
        text = _output(system, [*query, "%{NAME}\\t%{EVR}\\n", _file_of(folder, kind)])
        row = (text.splitlines() or [""])[0].split("\t")
        found |= {kind: Owner(row[0], row[1], _RPM)} if len(row) == 2 else {}
    return found


def _output(system: System, argv: Sequence[str]) -> str:
    """Return the output of a query, or an empty string after exit code 1. Raises PackageError if the database cannot be read."""
    try:
        done = system.run(argv, _SECONDS)
    except AcceleratorError as error:
        raise _unreadable(error.message) from error
    if done.returncode not in (0, 1):
        raise _unreadable(f"{argv[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout if done.returncode == 0 else ""


def _unreadable(reason: str) -> PackageError:
    return PackageError(
        f"The installed packages cannot be read: {reason}",
        hint="Wait until no other package manager runs, or repair the database of the package manager. Nothing was run.",
        code="packages-unreadable",
    )


def _kind_of(name: str) -> str:
    found = _NAME.fullmatch(name)
    return found["kind"].lower() if found else ""


def _file_of(folder: str, kind: str) -> str:
    return f"{folder}/{kind}/version.info"
