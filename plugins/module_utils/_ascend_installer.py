# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Runs packages of Ascend's driver and firmware on a node, and sees by the files that they leave what has become of it."""

from __future__ import annotations

import contextlib
import grp
import os
import posixpath
import pwd
import re
from collections.abc import Sequence
from typing import Any

from ._ascend_packages import (
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
from ._driver_install import (
    InTheWay,
    digest_of,
    in_the_way,
    keep_record,
    last_words,
    text_or_none,
    verified_copy,
    waits_for_restart,
)
from ._stopped_services import stopped_services
from .core.ascend import bus
from .core.ascend.driver_files import CONTROL_NODES, INSTALL_INFO, MANAGER
from .core.ascend.families import family_of
from .core.system import LONGEST_INSTALLATION, System

FOLDER = "/var/lib/dra-accelerators/ascend"
RECORD = f"{FOLDER}/record.json"
_VERIFIED = "/var/lib/dra-accelerators/ascend-verified"
_NODE = re.compile(r"v?davinci\d+")


class Installer:
    """The node's driver and firmware, and what this collection knows of them."""

    def __init__(self, system: System, *, timeout: float, services: Sequence[str], state_path: str, keep: bool) -> None:
        self.system = system
        self.timeout = timeout
        self.services = tuple(services)
        self.state_path = state_path
        self.keep = keep
        self._stack = contextlib.ExitStack()
        #: By the paths of packages, their verified copies, which exist until the installer is closed.
        self._copies: dict[str, str] = {}

    def close(self) -> None:
        """Delete the verified copies, and those of a killed run."""
        self._copies.clear()
        self._stack.close()
        self.system.remove_tree(_VERIFIED)

    # What is there

    def installed(self) -> Installed:
        """Return what the node's files say."""
        return read_installed(self.system)

    def record(self) -> Record:
        """Return what is ours. Raises AcceleratorError for a record that cannot be read."""
        return read_record(text_or_none(self.system, RECORD), RECORD)

    def write(self, record: Record) -> None:
        """Write the record; one that says nothing goes."""
        keep_record(self.system, RECORD, record.to_text() if record else "")

    def waits_for_restart(self, record: Record) -> bool:
        """Whether something was installed or removed since the machine was started."""
        return waits_for_restart(self.system, record.boot)

    # What stands in the way

    def verify(self, package: Package) -> None:
        """Copy a package into a directory of root, and verify the digest and the check of the copy. The module later runs the copy.

        Raises PackageError, ChecksumMismatch.
        """
        if not self.system.path(package.path).is_file():
            raise PackageError(
                f"{package.path} is not on the node", hint="Copy it there; the role does.", code="package-missing"
            )
        copied = verified_copy(self.system, package.path, package.checksum, f"{_VERIFIED}/{package.kind}")
        copy = self._stack.enter_context(copied)
        self._copies[package.path] = copy
        done = self.system.run(["bash", str(self.system.path(copy)), "--check"], self.timeout)
        if done.returncode:
            raise PackageError(
                f"{package.path} says of itself that it is not whole: {last_words(done.stdout + done.stderr)}",
                hint="Copy it once more. Nothing was installed.",
                code="package-damaged",
            )

    def unfit(self, steps: Sequence[Step]) -> list[str]:
        """Return why packages are not for this node."""
        packages = [step.package for step in steps if step.package is not None]
        families = sorted({family_of(chip.device_id).word for chip in bus.chips(self.system)})
        return problems(packages, machine=os.uname().machine, families=families)

    def lacking(self, steps: Sequence[Step], choices: Choices) -> dict[str, str]:
        """Return what the driver's package needs of the node and does not find there, each with a sentence."""
        found: dict[str, str] = {}
        if not any(step.kind == DRIVER and step.package for step in steps):
            return found
        own = self._own_group(choices.user)
        if own is None:
            found["user"] = f"There is no user {choices.user}, whose the driver is to be."
        elif not self._has_member(choices.group, choices.user, own):
            found["group"] = f"The user {choices.user} is in no group {choices.group}, whose the driver is to be."
        headers = f"/lib/modules/{os.uname().release}/build"
        if choices.build and not self.system.exists(headers):
            found["headers"] = (
                f"{headers} is not there: without the headers of its kernel no module is built where none of the package's own fits. "
                "Install them, or say that none is to be built."
            )
        return found

    def _own_group(self, user: str) -> int | None:
        """Return the number of a user's own group; None where there is no such user."""
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
        """Return the lines of a table of users or groups, of a folder that stands for a machine."""
        try:
            lines = self.system.read_text(path).splitlines()
        except OSError:
            return []
        return [entry for line in lines if len(entry := line.split(":")) == columns]

    def refuse_users(self) -> None:
        """Refuse while a prepared claim or a process has the NPUs; services that are stopped for it do not count. Raises InUse."""
        found = self.users()
        found.refuse_claims("NPUs")
        found.refuse_processes("NPUs")

    def users(self) -> InTheWay:
        """Return who has the NPUs: prepared claims, and processes other than services that are stopped."""
        names = [name for name in self.system.list_directory("/dev") if _NODE.fullmatch(name)]
        paths = (MANAGER, *CONTROL_NODES, *(f"/dev/{name}" for name in names))
        return in_the_way(self.system, state_path=self.state_path, paths=paths, services=self.services)

    # What is done

    def carry_out(self, steps: Sequence[Step], choices: Choices, record: Record) -> Record:
        """Take the steps with the services stopped; return the record afterwards. Raises AcceleratorError, saying how far it came."""
        done: list[str] = []
        with stopped_services(self.system, self.services, "ascend"):
            for step in steps:
                record = self._take(step, choices, record, done)
                done.append(step.describe())
        return record

    def _take(self, step: Step, choices: Choices, record: Record, done: Sequence[str]) -> Record:
        # A run that is killed from here on is made up for by the next one.
        self.write(record.beginning(step))
        try:
            output = self._run(step, choices)
            self._prove(step)
        except PackageError as error:
            # What has failed is tried again by the next run, because the record still says that it was begun.
            so_far = f" Done before that: {'; '.join(done)}." if done else ""
            raise PackageError(f"{error.message.rstrip('.')}.{so_far}", hint=error.hint, code=error.code) from error
        kept = self._keep(step)
        now = record.after(kept, self.system.boot_id() if wants_restart(output) else "")
        self.write(now)
        self._forget(record, now)
        return now

    def finish_removal(self, record: Record) -> Record:
        """Return the record if neither driver nor firmware is left, and delete the kept packages.

        An interrupted run did not record whether its removal needs a restart, so a restart is required after it.
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
            # By the path of the package another user may have put another file since.
            argv[1] = str(self.system.path(self._copies[step.package.path]))
        # It asks nothing with the words that it is run with; whatever it might ask gets no answer.
        finished = self.system.run(argv, self.timeout, input="", longest=LONGEST_INSTALLATION)
        output = f"{finished.stdout}\n{finished.stderr}"
        failed = refusal(step, finished.returncode, output)
        if failed is not None:
            raise failed
        return output

    def _prove(self, step: Step) -> None:
        """See by the node's own files that a step has done what it is for. Raises PackageError."""
        now = self.installed()
        found = now.version(step.kind)
        if found.lower() != step.after.lower():
            raise PackageError(
                f"After the step to {step.describe()} the node says that it has {found or 'none'}, expected {step.after or 'none'}",
                hint="Where the package calls its version otherwise than its name, say so in driver_version or firmware_version.",
                code="not-proved",
            )
        if step.kind == DRIVER and step.package is not None and not now.complete:
            raise PackageError(
                f"{INSTALL_INFO} does not call the installation {COMPLETE}",
                hint="Look at /var/log/ascend_seclog/ascend_install.log, and run this again.",
                code="not-proved",
            )

    def _keep(self, step: Step) -> Step:
        """Keep a package where it can be gone back to later; return the step with where it is now."""
        package = step.package
        if package is None or not self.keep:
            return step
        target = f"{FOLDER}/{posixpath.basename(package.path)}"
        if target != package.path:
            self.system.path(FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
            # The copy is deleted after the step, so it is moved and not copied again.
            self.system.move(self._copies.pop(package.path), target)
        checksum = package.checksum or digest_of(self.system, target)
        moved = Package(package.kind, target, package.chip, package.version, package.machine, checksum)
        return Step(step.verb, step.kind, step.before, moved)

    def _forget(self, before: Record, now: Record) -> None:
        """Remove packages that nothing can go back to any more; those that were never copied stay."""
        needed = {each["path"] for known in (now.packages, now.former) for each in known.values()}
        known = {each["path"] for record in (before.packages, before.former) for each in record.values()}
        for path in known - needed:
            if posixpath.dirname(path) == FOLDER:
                self.system.remove(path)


def shown(before: Installed, after: dict[str, Any]) -> dict[str, str]:
    """Return what Ansible shows of a change."""
    return {"before": _lines(before.to_dict()), "after": _lines(after)}


def _lines(facts: dict[str, Any]) -> str:
    return "".join(f"{key}: {facts[key]}\n" for key in ("driver", "firmware", "complete"))
