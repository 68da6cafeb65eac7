# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the companions of claims as services of the node's systemd, from one template for each kind.

A companion is a program of the vendor that lets the containers of a claim share a device. As a service it survives
restarts and updates of the driver, is restarted after a crash, has its own log and cgroup, and needs no more rights than
the driver's own unit. A second service of each companion holds the memory that it shares with containers.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from ..core.errors import AcceleratorError
from ..core.host.companions import (
    DIRECTORY,
    LIST_UNITS,
    UNIT_PREFIX,
    Companion,
    claim_in_environment,
    claim_of,
    device_of,
    parse_unit_list,
)
from ..core.host.system import System
from .store.records import ClaimReference

# Timeouts in seconds. A longer start is aborted, so that the kubelet gets the reason before its timeout.
START_SECONDS = 25.0
STOP_SECONDS = 30.0
ANSWER_SECONDS = 10.0

_SUFFIXES = _ENVIRONMENT, _COMMANDS, _NODES = ".environment", ".commands", ".nodes"
# The modes that the vendors' programs use for device nodes.
_READABLE, _WRITABLE = 0o444, 0o666
_LOG_LINES = 7


class CompanionServices(Protocol):
    """Manages companions. Every function blocks and is called on a thread."""

    def start(self, companion: Companion) -> None:
        """Start a companion unless it runs. Raises AcceleratorError with the last lines of its log."""

    def check(self, companion: Companion) -> None:
        """Verify that a running companion holds its settings. Raises AcceleratorError, with the companion's last log lines."""

    def stop(self, claim_uid: str) -> None:
        """Stop a claim's companions, if any, and remove their files. Raises AcceleratorError."""

    def claims(self) -> frozenset[str]:
        """Return the UIDs of the claims with companions, or with files of companions. Raises AcceleratorError."""

    def pids(self, claim_uid: str) -> frozenset[int]:
        """Return the processes of a claim's companions."""

    def claim_named(self, claim_uid: str) -> ClaimReference | None:
        """Return the claim of companions; None if they do not contain its name."""


class ServiceManager:
    """Run companions with the node's systemd."""

    def __init__(self, system: System) -> None:
        self._system = system

    def start(self, companion: Companion) -> None:
        """Start a companion unless it runs, whatever its settings are."""
        unit = f"{UNIT_PREFIX}{companion.kind}@{companion.name}.service"
        self._refuse_separate_pid_namespace(f"{unit} cannot be started")
        self._refuse_other_settings(companion, unit)
        if self._systemctl("is-active", "--quiet", unit, timeout=ANSWER_SECONDS)[0]:
            return
        self._make_nodes(companion)
        self._write(companion, _COMMANDS, companion.commands_text)
        self._write(companion, _ENVIRONMENT, companion.environment_text)
        started, output = self._systemctl("start", unit, timeout=START_SECONDS)
        if not started:
            raise AcceleratorError(
                f"{unit} does not start: {output}",
                hint=f"Its own last words: {self._last_log_lines(unit) or 'none'}",
                code="companion-failed",
            )

    def _refuse_other_settings(self, companion: Companion, unit: str) -> None:
        """Refuse a companion of a device that other claims use with other settings, also while systemd restarts it.

        Its files exist until its last claim has ended.
        """
        if not device_of(companion.owner):
            return
        with contextlib.suppress(OSError):
            if self._system.read_text(companion.folder + _ENVIRONMENT) != companion.environment_text:
                raise AcceleratorError(
                    f"{unit} runs for other claims of the device, with other settings of the daemon itself",
                    hint="Use the same settings in all claims of the device, or wait until the other claims have ended.",
                    code="companion-failed",
                )

    def check(self, companion: Companion) -> None:
        """Verify that a running companion holds its settings: a reload of its unit checks them in the unit's own sandbox."""
        unit = f"{UNIT_PREFIX}{companion.kind}@{companion.name}.service"
        self._refuse_separate_pid_namespace(f"{unit} cannot be checked")
        passed, _output = self._systemctl("reload", unit, timeout=START_SECONDS)
        if not passed:
            raise AcceleratorError(
                f"The check of {unit} failed: {self._last_log_lines(unit) or 'it wrote no message'}",
                hint=f"Read its log: journalctl --unit='{unit}'",
                code="companion-failed",
            )

    def stop(self, claim_uid: str) -> None:
        """Stop a claim's companions and remove their files."""
        # Both services of each companion: the program, and its memory, which systemd stops after it.
        pattern = f"{UNIT_PREFIX}*@{claim_uid}.*.service"
        if has_separate_pid_namespace(self._system) and claim_uid not in self.claims():
            return  # no companion was started, because that was refused
        self._refuse_separate_pid_namespace(f"{pattern} cannot be ended")
        stopped, output = self._systemctl("stop", pattern, timeout=STOP_SECONDS)
        if not stopped:
            raise AcceleratorError(
                f"{pattern} does not end: {output}",
                hint="The driver retries it. Check it with systemctl status.",
                code="companion-failed",
            )
        self._systemctl("reset-failed", pattern, timeout=ANSWER_SECONDS)
        for file in self._files():
            if claim_of(_name(file)) == claim_uid:
                if file.endswith(_NODES):
                    for path in self._system.read_text(f"{DIRECTORY}/{file}").splitlines():
                        self._remove(path)
                self._remove(f"{DIRECTORY}/{file}")

    def claims(self) -> frozenset[str]:
        """Return the UIDs of the claims with companions, from their files and services.

        In a pod without the node's processes only the files are used. They are removed after the services.
        """
        names = {_name(file) for file in self._files()}
        if has_separate_pid_namespace(self._system):
            return frozenset(filter(None, map(claim_of, names)))
        listed, output = self._systemctl(*LIST_UNITS[1:], timeout=ANSWER_SECONDS)
        if not listed:
            raise AcceleratorError(f"The companions of claims cannot be listed: {output}", code="companion-failed")
        names.update(unit.partition("@")[2].removesuffix(".service") for unit in parse_unit_list(output))
        return frozenset(filter(None, map(claim_of, names)))

    def claim_named(self, claim_uid: str) -> ClaimReference | None:
        """Return the claim whose name is in the environment of its companions; None if no environment has it."""
        for file in self._files():
            if file.endswith(_ENVIRONMENT) and claim_of(_name(file)) == claim_uid:
                with contextlib.suppress(OSError):
                    namespace, _slash, name = claim_in_environment(
                        self._system.read_text(f"{DIRECTORY}/{file}")
                    ).partition("/")
                    reference = ClaimReference(namespace, name, claim_uid)
                    if not reference.problem:
                        return reference
        return None

    def pids(self, claim_uid: str) -> frozenset[int]:
        """Return the processes in the cgroups of a claim's companions."""
        pattern = f"{UNIT_PREFIX}*@{claim_uid}.*.service"
        is_listed, output = self._systemctl(
            "show", "--property=ControlGroup", "--value", pattern, timeout=ANSWER_SECONDS
        )
        found: set[int] = set()
        for group in output.split() if is_listed else ():
            for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd"):  # version 2 and version 1
                with contextlib.suppress(OSError, ValueError):
                    found.update(map(int, self._system.read_text(f"{root}{group}/cgroup.procs").split()))
        return frozenset(found)

    def _refuse_separate_pid_namespace(self, what: str) -> None:
        if has_separate_pid_namespace(self._system):
            raise AcceleratorError(
                f"{what}: the driver is in a pod that does not see the node's processes, and systemctl must see the process of systemd",
                hint="Set dra_driver_pod_host_pid to true, or run the driver as a service (dra_driver_deploy_as: service).",
                code="companion-failed",
            )

    def _make_nodes(self, companion: Companion) -> None:
        """Create the missing device nodes. They are recorded first, and removed when the companion stops."""
        missing = [node for node in companion.nodes if node.major is not None and not self._system.exists(node.path)]
        if not missing:
            return
        listed = "".join(f"{node.path}\n" for node in missing)
        self._write(companion, _NODES, listed)
        for node in missing:
            mode = _READABLE if node.permissions == "r" else _WRITABLE
            try:
                self._system.make_character_device(node.path, node.major or 0, node.minor or 0, mode)
            except OSError as error:
                raise AcceleratorError(
                    f"{node.path}, which {companion.kind} needs for {companion.name}, cannot be made: {error.strerror}",
                    code="companion-failed",
                ) from error

    def _write(self, companion: Companion, suffix: str, text: str) -> None:
        """Write one of a companion's files. Raises AcceleratorError if that fails."""
        path = companion.folder + suffix
        try:
            self._system.write_atomic(path, text.encode(), mode=0o600, directory_mode=0o700)
        except OSError as error:
            raise AcceleratorError(
                f"{path}, which {companion.kind} needs for {companion.name}, cannot be written: {error.strerror}",
                hint="Check that the disk is not full or read-only; the claim is prepared with the next request of the kubelet.",
                code="files-unwritable",
            ) from error

    def _remove(self, path: str) -> None:
        """Remove a file or device node of a companion, if it exists. Raises AcceleratorError if that fails."""
        try:
            self._system.remove(path)
        except OSError as error:
            raise AcceleratorError(
                f"{path} cannot be removed: {error.strerror}",
                hint="Check that the disk is not read-only; the driver retries it.",
                code="files-unwritable",
            ) from error

    def _files(self) -> tuple[str, ...]:
        return tuple(name for name in self._system.list_directory(DIRECTORY) if name.endswith(_SUFFIXES))

    def _systemctl(self, *arguments: str, timeout: float) -> tuple[bool, str]:
        """Return whether systemctl succeeded, and its output."""
        done = self._system.run(["systemctl", "--no-ask-password", "--no-pager", *arguments], timeout=timeout)
        return done.returncode == 0, (done.stdout if done.returncode == 0 else f"{done.stdout} {done.stderr}").strip()

    def _last_log_lines(self, unit: str) -> str:
        with contextlib.suppress(AcceleratorError):
            command = ["journalctl", "--no-pager", "--output=cat", f"--lines={_LOG_LINES}", f"--unit={unit}"]
            return " ".join(self._system.run(command, timeout=ANSWER_SECONDS).stdout.split())
        return ""


def has_separate_pid_namespace(system: System) -> bool:
    """Return whether this process has a separate PID namespace: it is in a pod without hostPID."""
    try:
        lines = system.read_text("/proc/self/status").splitlines()
    except OSError:
        return False
    # The line has one PID for each namespace, from the namespace of this /proc to the namespace of the process.
    return any(len(line.split()) > 2 for line in lines if line.startswith("NSpid:"))


def _name(file: str) -> str:
    """Return the name of a companion from the name of one of its files."""
    return file.rpartition(".")[0]
