# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Run the Ascend driver and firmware packages on a node, and verify the result by the installed files."""

from __future__ import annotations

import contextlib
import grp
import os
import posixpath
import pwd
import re
from collections.abc import Sequence
from typing import Any

from .._host.driver_installation import (
    DeviceUsers,
    digest_of,
    find_users,
    keep_record,
    last_words,
    verified_copy,
    waits_for_restart,
)
from .._host.file_restore import reason
from .._host.stopped_services import stopped_services
from ..core.errors import AcceleratorError, as_failure
from ..core.host.system import LONGEST_INSTALLATION, System, text_or_none
from ..core.vendors.ascend import bus
from ..core.vendors.ascend.driver_files import CONTROL_NODES, INSTALL_INFO, MANAGER
from ..core.vendors.ascend.families import UNKNOWN, family_of
from .driver_packages import (
    COMPLETE,
    DRIVER,
    Choices,
    Installed,
    Package,
    PackageError,
    Record,
    Step,
    problems,
    read_installed,
    read_record,
    refusal,
    removal_script,
    wants_restart,
    words,
)

FOLDER = "/var/lib/dra-accelerators/ascend"
RECORD = f"{FOLDER}/record.json"
_VERIFIED = "/var/lib/dra-accelerators/ascend-verified"
_NODE = re.compile(r"v?davinci\d+")


class Installer:
    """Install and remove the driver and firmware of one node, and keep the record of this collection."""

    def __init__(
        self,
        system: System,
        *,
        timeout: float,
        services: Sequence[str],
        state_path: str,
        keep: bool,
        is_check: bool = False,
    ) -> None:
        self.system = system
        self.timeout = timeout
        self.services = tuple(services)
        self.state_path = state_path
        self.keep = keep
        self.is_check = is_check
        #: The directory of the verified copies. In check mode, each process has a separate directory and deletes it.
        self.verified = f"{_VERIFIED}-{os.getpid()}" if is_check else _VERIFIED
        #: Whether a deb or rpm package owns the driver.
        self.is_managed = False
        self._stack = contextlib.ExitStack()
        #: The verified copies, by the paths of their packages. They exist until the installer is closed.
        self._copies: dict[str, str] = {}

    def close(self) -> None:
        """Delete the verified copies, and those of killed runs except in check mode."""
        self._copies.clear()
        self._stack.close()
        for name in () if self.is_check else self.system.list_directory(posixpath.dirname(_VERIFIED)):
            path = f"{posixpath.dirname(_VERIFIED)}/{name}"
            number = path.removeprefix(f"{_VERIFIED}-")
            if path == _VERIFIED or (number.isdigit() and not self.system.exists(f"/proc/{number}")):
                self.system.remove_tree(path)

    # Queries

    def installed(self) -> Installed:
        """Return the installed versions from the node's files."""
        return read_installed(self.system, is_managed=self.is_managed)

    def record(self) -> Record:
        """Return this collection's record. Raises AcceleratorError if it cannot be read."""
        return read_record(text_or_none(self.system, RECORD), RECORD)

    def write(self, record: Record) -> None:
        """Write the record, or delete it if it is empty."""
        keep_record(self.system, RECORD, record.to_text() if record else "", doing=record.doing)

    def waits_for_restart(self, record: Record) -> bool:
        """Return whether packages were installed or removed since the last boot."""
        return waits_for_restart(self.system, record.boot)

    # Checks

    def verify(self, package: Package) -> None:
        """Copy a package into a directory of root, and verify the digest and the self-check of the copy.

        The module later runs the copy. Raises PackageError, ChecksumMismatch.
        """
        if not self.system.path(package.path).is_file():
            raise PackageError(
                f"{package.path} is not on the node", hint="Copy it there; the role does.", code="package-missing"
            )
        copied = verified_copy(self.system, package.path, package.checksum, f"{self.verified}/{package.kind}")
        copy = self._stack.enter_context(copied)
        self._copies[package.path] = copy
        done = self.system.run(["bash", str(self.system.path(copy)), "--check"], self.timeout)
        if done.returncode:
            raise PackageError(
                f"The self-check of {package.path} failed: {last_words(done.stdout + done.stderr)}",
                hint="Copy it once more. Nothing was installed.",
                code="package-damaged",
            )

    def unfit(self, steps: Sequence[Step]) -> list[str]:
        """Return the reasons why packages do not fit this node."""
        packages = [step.package for step in steps if step.package is not None]
        known = {family_of(chip.device_id) for chip in bus.chips(self.system)} - {UNKNOWN}
        families = sorted(each.word for each in known)
        return problems(packages, machine=os.uname().machine, families=families)

    def lacking(self, steps: Sequence[Step], choices: Choices) -> dict[str, str]:
        """Return the requirements of the driver package that the node does not meet, each with a message."""
        found: dict[str, str] = {}
        if not any(step.kind == DRIVER and step.package for step in steps):
            return found
        own = self._own_group(choices.user)
        if own is None:
            found["user"] = f"There is no user {choices.user} to own the driver."
        elif not self._has_member(choices.group, choices.user, own):
            found["group"] = f"The user {choices.user} is not in the group {choices.group}, which owns the driver."
        headers = f"/lib/modules/{os.uname().release}/build"
        if choices.build and not self.system.exists(headers):
            found["headers"] = (
                f"{headers} does not exist. Without the kernel headers, the package cannot build a kernel module if none of its own modules fits. "
                "Install the headers, or disable the build of kernel modules."
            )
        return found

    def taken_ids(self, choices: Choices) -> list[str]:
        """Return the reasons, each as a sentence, why the driver's missing user cannot get its UID and GID."""
        if self._own_group(choices.user) is not None:
            return []
        users, groups = dict(self._ids("passwd")), dict(self._ids("group"))
        found = [
            f"UID {choices.uid} belongs to the user {name}." for name, number in users.items() if number == choices.uid
        ]
        found += [
            f"GID {choices.gid} belongs to the group {name}."
            for name, number in groups.items()
            if number == choices.gid and name != choices.group
        ]
        if groups.get(choices.group, choices.gid) != choices.gid:
            found.append(f"The group {choices.group} has the GID {groups[choices.group]}, expected {choices.gid}.")
        return found

    def _ids(self, table: str) -> list[tuple[str, int]]:
        """Return the names and numbers of users (``passwd``) or groups (``group``)."""
        if self.system.root == "/":
            if table == "passwd":
                return [(entry.pw_name, entry.pw_uid) for entry in pwd.getpwall()]
            return [(entry.gr_name, entry.gr_gid) for entry in grp.getgrall()]
        columns = {"passwd": 7, "group": 4}[table]
        return [(entry[0], int(entry[2])) for entry in self._entries(f"/etc/{table}", columns)]

    def _own_group(self, user: str) -> int | None:
        """Return the GID of a user's primary group, or None if the user does not exist."""
        if self.system.root == "/":
            try:
                return pwd.getpwnam(user).pw_gid
            except KeyError:
                return None
        return next((int(entry[3]) for entry in self._entries("/etc/passwd", 7) if entry[0] == user), None)

    def _has_member(self, group: str, user: str, own: int) -> bool:
        if self.system.root == "/":
            try:
                known = grp.getgrnam(group)
            except KeyError:
                return False
            return known.gr_gid == own or user in known.gr_mem
        entries = self._entries("/etc/group", 4)
        return any(entry[0] == group and (entry[2] == str(own) or user in entry[3].split(",")) for entry in entries)

    def _entries(self, path: str, columns: int) -> list[list[str]]:
        """Return the rows of a passwd or group file below a root directory other than ``/``."""
        try:
            lines = self.system.read_text(path).splitlines()
        except OSError:
            return []
        return [entry for line in lines if len(entry := line.split(":")) == columns]

    def refuse_users(self) -> None:
        """Raise InUse if a prepared claim or a process uses the NPUs. Services that are stopped for the change are excluded."""
        found = self.users()
        found.refuse_claims("NPUs")
        found.refuse_processes("NPUs")

    def users(self) -> DeviceUsers:
        """Return the prepared claims and processes that use the NPUs. Services that are stopped for the change are excluded."""
        names = [name for name in self.system.list_directory("/dev") if _NODE.fullmatch(name)]
        paths = (MANAGER, *CONTROL_NODES, *(f"/dev/{name}" for name in names))
        return find_users(self.system, state_path=self.state_path, paths=paths, services=self.services)

    # Actions

    def carry_out(self, steps: Sequence[Step], choices: Choices, record: Record) -> Record:
        """Run the steps while the services are stopped, and return the new record.

        Raises AcceleratorError with the completed steps and the installed versions.
        """
        done: list[str] = []
        with stopped_services(self.system, self.services, "ascend"):
            for step in steps:
                record = self._take(step, choices, record, done)
                done.append(step.describe())
        return record

    def _take(self, step: Step, choices: Choices, record: Record, done: Sequence[str]) -> Record:
        try:
            # If this run is killed after this line, the next run completes the step.
            self.write(record.beginning(step))
            output = self._run(step, choices)
            self._prove(step)
            kept = self._keep(step)
            now = record.after(kept, self.system.boot_id() if wants_restart(output) else "")
            self.write(now)
            self._forget(record, now)
        except (AcceleratorError, OSError) as error:
            # The record still has the step, so the next run repeats it.
            failed = as_failure(error)
            so_far = f" Done before that: {'; '.join(done)}." if done else ""
            raise PackageError(
                f"{failed.message.rstrip('.')}.{so_far} {self._state()}.", hint=failed.hint, code=failed.code
            ) from error
        return now

    def _state(self) -> str:
        """Return a sentence with the installed versions."""
        try:
            now = self.installed()
        except OSError as error:
            return f"The installed versions cannot be read: {reason(error)}"
        return f"Installed: driver {now.driver or 'none'}{' (not complete)' if now.driver and not now.complete else ''}, firmware {now.firmware or 'none'}"

    def finish_removal(self, record: Record) -> Record:
        """Return the record after driver and firmware were removed, and delete the kept packages.

        An interrupted run did not record whether its removal needs a reboot. Therefore a reboot is required after it.
        """
        now = Record(boot=self.system.boot_id() if record.doing else record.boot)
        self.write(now)
        self._forget(record, now)
        return now

    def _run(self, step: Step, choices: Choices) -> str:
        if step.package is None:
            script = removal_script(self.installed(), step.kind)
            if not self.system.exists(script):
                raise PackageError(
                    f"{script}, by which the {step.kind} removes itself, is not there",
                    hint=f"Install the {step.kind} once more, and then remove it.",
                    code="no-removal",
                )
            argv = ["bash", str(self.system.path(script))]
        else:
            argv = words(step, choices)
            # Run the verified copy: another user can have replaced the file at the package's path.
            argv[1] = str(self.system.path(self._copies[step.package.path]))
        # With these arguments the package does not prompt. The empty input prevents it from waiting.
        finished = self.system.run(argv, self.timeout, input="", longest=LONGEST_INSTALLATION)
        output = f"{finished.stdout}\n{finished.stderr}"
        failed = refusal(step, finished.returncode, output)
        if failed is not None:
            raise failed
        return output

    def _prove(self, step: Step) -> None:
        """Verify the result of a step by the installed files. Raises PackageError."""
        now = self.installed()
        found = now.version(step.kind)
        if found.lower() != step.after.lower():
            raise PackageError(
                f"After the step to {step.describe()}, the node reports {found or 'none'}, expected {step.after or 'none'}",
                hint="Where the package calls its version otherwise than its name, say so in driver_version or firmware_version.",
                code="not-proved",
            )
        if step.kind == DRIVER and step.package is not None and not now.complete:
            raise PackageError(
                f"{INSTALL_INFO} does not call the installation {COMPLETE}",
                hint="Check /var/log/ascend_seclog/ascend_install.log, and run this again.",
                code="not-proved",
            )

    def _keep(self, step: Step) -> Step:
        """Keep a package for a rollback, and return the step with the new path."""
        package = step.package
        if package is None or not self.keep:
            return step
        target = f"{FOLDER}/{posixpath.basename(package.path)}"
        if target != package.path:
            self.system.make_directory(FOLDER, 0o700)
            # The copy is deleted after the step, so it is moved instead of copied again.
            self.system.move(self._copies.pop(package.path), target)
        checksum = package.checksum or digest_of(self.system, target)
        moved = Package(package.kind, target, package.chip, package.version, package.machine, checksum)
        return Step(step.verb, step.kind, step.before, moved)

    def _forget(self, before: Record, now: Record) -> None:
        """Remove kept packages that no rollback needs any more. Files outside of the collection's directory stay."""
        needed = {each["path"] for known in (now.packages, now.former) for each in known.values()}
        known = {each["path"] for record in (before.packages, before.former) for each in record.values()}
        for path in known - needed:
            if posixpath.dirname(path) == FOLDER:
                self.system.remove(path)


def shown(before: Installed, after: dict[str, Any]) -> dict[str, str]:
    """Return Ansible's diff of a change."""
    return {"before": _lines(before.to_dict()), "after": _lines(after)}


def _lines(facts: dict[str, Any]) -> str:
    return "".join(f"{key}: {facts[key]}\n" for key in ("driver", "firmware", "complete"))
