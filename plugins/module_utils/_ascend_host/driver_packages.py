# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read the installed Ascend driver and firmware, and plan the packages to run, their order, and their arguments. No side effects.

The first installation installs the driver before the firmware. An upgrade or a removal uses the reverse order. The
driver records the progress of its installation in /etc/ascend_install.info.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._host import change_record
from ..core.errors import AcceleratorError
from ..core.host.system import System
from ..core.vendors.ascend.driver_files import INSTALL_INFO, install_folder, version_of
from ..core.vendors.ascend.npu_smi.npu_smi_tables import key_values

DRIVER, FIRMWARE = "driver", "firmware"
KINDS = (DRIVER, FIRMWARE)
INSTALL, UPGRADE, REMOVE = "install", "upgrade", "remove"
COMPLETE = "complete"
OWNER = "HwHiAiUser"
#: UID and GID of the owner. MindCluster requires them on all hosts and in all containers ("Creating a User Account").
ID = 1000
DEFAULT_FOLDER = "/usr/local/Ascend"

_NAME = re.compile(
    r"(?i)(?:Ascend-hdk-|Ascend-?|Atlas-)?(?P<chip>[a-z0-9_.-]+?)(?:-hdk)?-npu-(?P<kind>driver|firmware)_(?P<version>[^_/]+?)"
    r"(?:_linux-(?P<machine>[a-z0-9_-]+))?\.run"
)
#: Output of a package that needs no reboot. Other packages request a reboot or print nothing about it.
_AT_ONCE = re.compile(r"(?i)takes? effect (immediately|at once)")
_CODE = re.compile(r"\b0x00[0-9a-fA-F]{2}\b")
#: Meaning of the error codes of the driver package, and what to do.
CODES: Mapping[str, tuple[str, str]] = {
    "0x0002": (
        "the package rejects its arguments",
        "This collection may be older than the package. Compare the package's --help.",
    ),
    "0x0003": (
        "the package rejects the directory",
        "Expected an absolute path of directories that only root may write.",
    ),
    "0x0004": ("the package does not know one of its arguments", "Check the package's --help."),
    "0x0080": ("nothing is installed that it could replace or remove", f"Check {INSTALL_INFO}."),
    "0x0090": ("it could not remove the installed files", "Check /var/log/ascend_seclog/ascend_install.log."),
    "0x0091": (f"there is no user {OWNER}, or no user with the requested name", "The role ascend_driver creates it."),
    "0x0093": ("it was not run by root", "Set become."),
    "0x0094": ("another installation is running, or the NPUs are in use", "End what uses them, and run this again."),
    "0x0095": (
        "the first installation of the driver had a different user",
        f"Expected the UserName of {INSTALL_INFO}.",
    ),
    "0x0096": (
        "the group is not the user's, or not the one that the driver has",
        f"Expected the UserGroup of {INSTALL_INFO}.",
    ),
}
#: Families of core/vendors/ascend/families.py by the chip in a package's name.
_FAMILIES = {
    "310": ("310",),
    "310b": ("310B",),
    "310p": ("310P",),
    "910": ("910A",),
    "910b": ("910B",),
    "910c": ("910_93",),
    "a3": ("910_93",),
    "910_93": ("910_93",),
    "950": ("950",),
}


class PackageError(AcceleratorError):
    """A package cannot be used, or has failed."""

    default_code = "package"


@dataclass(frozen=True)
class Package:
    """A package file on the node. ``machine`` is its architecture, or empty for all architectures."""

    kind: str
    path: str
    chip: str
    version: str
    machine: str = ""
    checksum: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the package in the format of the record."""
        return {"path": self.path, "version": self.version, "checksum": self.checksum}


def read_package(kind: str, path: str, version: str = "", checksum: str = "") -> Package:
    """Read a package's file name. ``version`` replaces the version in the name if they differ. Raises PackageError."""
    found = _NAME.fullmatch(posixpath.basename(path))
    if found is None or found["kind"].lower() != kind:
        raise PackageError(
            f"The file name of {path} is not that of a package of the {kind}",
            hint=f"Expected Ascend-hdk-CHIP-npu-{kind}_VERSION{'_linux-MACHINE' if kind == DRIVER else ''}.run, its name at the vendor's.",
            code="package-name",
        )
    machine = (found["machine"] or "").replace("x86-64", "x86_64")
    return Package(kind, path, found["chip"].lower(), version or found["version"], machine, checksum.lower())


@dataclass(frozen=True)
class Installed:
    """The installed driver and firmware. An empty version means not installed.

    ``complete`` is the driver's own status of its installation.
    """

    driver: str = ""
    firmware: str = ""
    complete: bool = True
    folder: str = DEFAULT_FOLDER
    user: str = ""
    group: str = ""
    type: str = ""

    def version(self, kind: str) -> str:
        """Return the installed version of the driver or the firmware."""
        return self.driver if kind == DRIVER else self.firmware

    def to_dict(self) -> dict[str, Any]:
        """Return the data for a module's result."""
        return {
            "driver": self.driver,
            "firmware": self.firmware,
            "complete": self.complete,
            "directory": self.folder,
            "user": self.user,
            "group": self.group,
            "type": self.type,
        }


def read_installed(system: System, *, is_managed: bool = False) -> Installed:
    """Read the installed versions from the files of the installation.

    ``is_managed`` states that a distribution package owns the driver. Such a driver is complete unless its own file
    states otherwise.
    """
    try:
        said = key_values(system.read_text(INSTALL_INFO).replace("=", ":"))
    except OSError:
        said = {}
    driver = version_of(system)
    # A driver without this file was installed in another way and is possibly incomplete.
    status = said.get("driver_install_status", "" if driver and not is_managed else COMPLETE)
    return Installed(
        driver=driver,
        firmware=version_of(system, FIRMWARE),
        complete=status == COMPLETE,
        folder=install_folder(system),
        user=said.get("username", ""),
        group=said.get("usergroup", ""),
        type=said.get("driver_install_type", ""),
    )


@dataclass(frozen=True)
class Step:
    """One package to run, or one component to remove."""

    verb: str
    kind: str
    before: str
    package: Package | None = None

    @property
    def after(self) -> str:
        """Return the version after the step, or an empty string for a removal."""
        return self.package.version if self.package else ""

    def describe(self) -> str:
        """Return a short description of the step."""
        if self.verb == REMOVE:
            return f"remove the {self.kind} {self.before}".rstrip()
        if self.before == self.after:
            return f"install the {self.kind} {self.after} once more, which was left incomplete"
        return f"install the {self.kind} {self.after}" + (f" in place of {self.before}" if self.before else "")


def plan(installed: Installed, wanted: Sequence[Package], unfinished: str = "") -> tuple[Step, ...]:
    """Return the packages to run, in order. Raises PackageError for firmware without a driver.

    ``unfinished`` is the component whose installation was interrupted in an earlier run.
    """
    packages = {package.kind: package for package in wanted}
    if FIRMWARE in packages and DRIVER not in packages and not installed.driver:
        raise PackageError(
            "The firmware is wanted, and there is no driver, which brings it onto the NPUs",
            hint="Name a package of the driver as well.",
            code="driver-missing",
        )
    # Firmware cannot be installed on the chips without a working driver.
    first = not installed.driver or not installed.complete
    steps = []
    for kind in KINDS if first else tuple(reversed(KINDS)):
        package = packages.get(kind)
        if package is None:
            continue
        before = installed.version(kind)
        is_whole = unfinished != kind and (installed.complete or kind == FIRMWARE)
        if before.lower() == package.version.lower() and is_whole:
            continue
        verb = UPGRADE if before and is_whole and not (first and kind == DRIVER) else INSTALL
        steps.append(Step(verb, kind, before, package))
    return tuple(steps)


def plan_removal(installed: Installed) -> tuple[Step, ...]:
    """Return the removals: the firmware before the driver."""
    there = (FIRMWARE, *((DRIVER,) if installed.driver or not installed.complete else ()))
    found = (Step(REMOVE, kind, installed.version(kind)) for kind in there)
    return tuple(step for step in found if step.before or step.kind == DRIVER)


@dataclass(frozen=True)
class Choices:
    """The options of a package besides its operation."""

    type: str = "full"
    folder: str = DEFAULT_FOLDER
    user: str = OWNER
    group: str = OWNER
    for_all: bool = False
    build: bool = True
    uid: int = ID
    gid: int = ID


def words(step: Step, choices: Choices) -> list[str]:
    """Return the command line of a package. It runs without prompts: the caller must verify that the user has accepted the license."""
    package = step.package
    if package is None:
        raise ValueError(f"{step.describe()} runs no package")
    said = ["--quiet"]
    if step.kind == FIRMWARE:
        return ["bash", package.path, "--upgrade" if step.verb == UPGRADE else "--full", *said]
    said += ["--install-for-all"] if choices.for_all else []
    said += [] if choices.build else ["--norebuild"]
    if step.verb == UPGRADE:
        return ["bash", package.path, "--upgrade", *said]
    said += [] if choices.folder == DEFAULT_FOLDER else [f"--install-path={choices.folder}"]
    if (choices.user, choices.group) != (OWNER, OWNER):
        said += [f"--install-username={choices.user}", f"--install-usergroup={choices.group}"]
    return ["bash", package.path, f"--{choices.type}", *said]


def removal_script(installed: Installed, kind: str) -> str:
    """Return the path of the uninstall script that an installation has created."""
    return f"{installed.folder}/{kind}/script/uninstall.sh"


def wants_restart(output: str) -> bool:
    """Return whether a successful package needs a reboot. It does, unless its output states that the change is immediate."""
    return not _AT_ONCE.search(output)


def refusal(step: Step, returncode: int, output: str) -> PackageError | None:
    """Return the error of a package run, or None. Firmware that is current or waits for a reboot exits with 2."""
    if returncode == 0 or (step.kind == FIRMWARE and returncode == 2):
        return None
    code = next((found.lower() for found in _CODE.findall(output)), "")
    meaning, hint = CODES.get(code, ("", "Check /var/log/ascend_seclog/ascend_install.log."))
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = f"It said: {' | '.join(lines[-5:])[-600:]}" if lines else "It said nothing"
    why = f"{code}: {meaning}. {said}" if meaning else said
    return PackageError(
        f"To {step.describe()} has failed with {returncode}. {why}", hint=hint, code=f"package-{code}" if code else ""
    )


def problems(packages: Sequence[Package], *, machine: str, families: Sequence[str]) -> list[str]:
    """Return why packages do not fit this node. ``families`` are the chip families of the node, empty if it shows none."""
    found = []
    for package in packages:
        if package.machine and package.machine != machine:
            found.append(f"{package.path} is for {package.machine}, and this node is {machine}.")
        fitting = _FAMILIES.get(package.chip)
        if fitting is None:
            found.append(
                f"{package.path} is for the chip {package.chip}, which is unknown. Known are {', '.join(_FAMILIES)}."
            )
        elif families and not set(fitting) & set(families):
            found.append(
                f"{package.path} is for chips of the family {' or '.join(fitting)}, and this node has {', '.join(families)}."
            )
    return found


@dataclass(frozen=True)
class Record:
    """The packages that this collection has installed, the previous packages, the boot ID of the change, and the step in progress."""

    packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    former: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    boot: str = ""
    doing: str = ""

    def __bool__(self) -> bool:
        return bool(self.is_of_packages or self.boot)

    @property
    def is_of_packages(self) -> bool:
        """Return whether the record contains packages or an interrupted step, not only the boot ID."""
        return bool(self.packages or self.former or self.doing)

    def to_text(self) -> str:
        """Return the text of the record."""
        content = {
            "packages": {kind: dict(each) for kind, each in self.packages.items()},
            "former": {kind: dict(each) for kind, each in self.former.items()},
            "boot": self.boot,
            "doing": self.doing,
        }
        return change_record.to_text(content)

    def beginning(self, step: Step) -> Record:
        """Return the record for the start of a step."""
        return replace(self, doing=step.kind)

    def after(self, step: Step, boot: str) -> Record:
        """Return the record after a step. It keeps the previous package for a rollback."""
        packages, former = dict(self.packages), dict(self.former)
        before = packages.pop(step.kind, None)
        if step.package is None:
            former.pop(step.kind, None)
        else:
            packages[step.kind] = step.package.to_dict()
            if before is not None and before["version"] != step.package.version:
                former[step.kind] = before
        return Record(packages, former, boot or self.boot, "")

    def previous_packages(self, versions: Mapping[str, str] | None = None) -> list[Package]:
        """Return the packages of the previous version. Raises PackageError if none are recorded.

        ``versions`` selects packages by kind from all kept ones. It also works after a package has failed, when the
        record still lists the version from before the failure as installed.
        """
        if versions:
            return [self._kept(kind, version) for kind, version in versions.items()]
        if not self.former:
            raise PackageError(
                "There is no record of a previous driver. A rollback needs an earlier driver that this collection installed",
                hint="Name the packages of the desired version.",
                code="no-former",
            )
        return [
            read_package(kind, each["path"], each["version"], each["checksum"]) for kind, each in self.former.items()
        ]

    def _kept(self, kind: str, version: str) -> Package:
        for known in (self.packages, self.former):
            each = known.get(kind)
            if each is not None and each["version"] == version:
                return read_package(kind, each["path"], each["version"], each["checksum"])
        raise PackageError(
            f"No package of the {kind} {version} is kept on this node: this collection has not installed it",
            hint="Name the packages of the version that is wanted.",
            code="no-former",
        )


def read_record(text: str | None, path: str) -> Record:
    """Read a record. Return an empty record if there is no text. Raises AcceleratorError."""
    if text is None:
        return Record()
    hint = f"The installed version is in {INSTALL_INFO}. Remove the record; then no driver counts as installed by this collection."
    return change_record.read(text, path, _record_of, of="installed packages", hint=hint)


def _record_of(content: Any) -> Record:
    known = [
        {str(kind): {str(key): str(value) for key, value in each.items()} for kind, each in content[name].items()}
        for name in ("packages", "former")
    ]
    return Record(known[0], known[1], str(content["boot"]), str(content["doing"]))
