# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keeps the companions of claims running: each is a service of the node's systemd, made from a template of its kind.

So a companion outlives the driver's restart and its update, is started again when it dies, has a log and a cgroup of its own,
and needs no right beyond those of the driver's own unit. Another service of each holds the memory that it shares with containers.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from ..core.companions import DIRECTORY, LIST_UNITS, UNIT_PREFIX, Companion, claim_of, claim_told, units_listed
from ..core.errors import AcceleratorError
from ..core.system import System
from .records import ClaimReference

# A start that takes longer than this is given up, so that the kubelet is told why before it hangs up.
START_SECONDS = 25.0
STOP_SECONDS = 30.0
ANSWER_SECONDS = 10.0

_SUFFIXES = _ENVIRONMENT, _COMMANDS, _NODES = ".environment", ".commands", ".nodes"
# What the vendors' own programs give the nodes that they make.
_READABLE, _WRITABLE = 0o444, 0o666
_LOG_LINES = 7


class Keeper(Protocol):
    """Who runs companions. Every function blocks and is called on a thread."""

    def start(self, companion: Companion) -> None:
        """Have a companion run; one that runs is left alone. Raises AcceleratorError, with its own last words."""

    def check(self, companion: Companion) -> None:
        """Verify that a running companion holds its settings. Raises AcceleratorError, with the companion's last log lines."""

    def stop(self, claim_uid: str) -> None:
        """End a claim's companions, and remove what they had; there need not be any. Raises AcceleratorError."""

    def claims(self) -> frozenset[str]:
        """Return the UIDs of the claims that have companions, or something left of them. Raises AcceleratorError."""

    def pids(self, claim_uid: str) -> frozenset[int]:
        """Return the processes of a claim's companions."""

    def claim_named(self, claim_uid: str) -> ClaimReference | None:
        """Return the claim that companions were started for; None where they do not tell its name."""


class ServiceManager:
    """The node's systemd as keeper."""

    def __init__(self, system: System) -> None:
        self._system = system

    def start(self, companion: Companion) -> None:
        """Have a companion run; one that runs is left alone, whatever it was told."""
        unit = f"{UNIT_PREFIX}{companion.kind}@{companion.name}.service"
        self._refuse_apart(f"{unit} cannot be started")
        if self._systemctl("is-active", "--quiet", unit, timeout=ANSWER_SECONDS)[0]:
            return
        self._make_nodes(companion)
        self._write(companion, _COMMANDS, companion.commands_text)
        self._write(companion, _ENVIRONMENT, companion.environment_text)
        started, said = self._systemctl("start", unit, timeout=START_SECONDS)
        if not started:
            raise AcceleratorError(
                f"{unit} does not start: {said}",
                hint=f"Its own last words: {self._last_words(unit) or 'none'}",
                code="companion-failed",
            )

    def check(self, companion: Companion) -> None:
        """Verify that a running companion holds its settings: a reload of its unit checks them in the unit's own sandbox."""
        unit = f"{UNIT_PREFIX}{companion.kind}@{companion.name}.service"
        self._refuse_apart(f"{unit} cannot be checked")
        passed, _said = self._systemctl("reload", unit, timeout=START_SECONDS)
        if not passed:
            raise AcceleratorError(
                f"The check of {unit} failed: {self._last_words(unit) or 'it wrote no message'}",
                hint=f"Read its log: journalctl --unit='{unit}'",
                code="companion-failed",
            )

    def stop(self, claim_uid: str) -> None:
        """End a claim's companions, and remove what they had."""
        # Both kinds of services of each: the program, and its memory, which systemd ends after it.
        pattern = f"{UNIT_PREFIX}*@{claim_uid}.*.service"
        if is_apart(self._system) and claim_uid not in self.claims():
            return  # none was started: that was refused
        self._refuse_apart(f"{pattern} cannot be ended")
        stopped, said = self._systemctl("stop", pattern, timeout=STOP_SECONDS)
        if not stopped:
            raise AcceleratorError(
                f"{pattern} does not end: {said}",
                hint="It is tried again. Look at it with systemctl status.",
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
        """Return the UIDs of the claims that have companions, by their files and by their services.

        In a pod with processes of its own alone it is by their files, which go after the services.
        """
        names = {_name(file) for file in self._files()}
        if is_apart(self._system):
            return frozenset(filter(None, map(claim_of, names)))
        listed, said = self._systemctl(*LIST_UNITS[1:], timeout=ANSWER_SECONDS)
        if not listed:
            raise AcceleratorError(f"The companions of claims cannot be listed: {said}", code="companion-failed")
        names.update(unit.partition("@")[2].removesuffix(".service") for unit in units_listed(said))
        return frozenset(filter(None, map(claim_of, names)))

    def claim_named(self, claim_uid: str) -> ClaimReference | None:
        """Return the claim that stands in the environment of its companions; None where it stands in none."""
        for file in self._files():
            if file.endswith(_ENVIRONMENT) and claim_of(_name(file)) == claim_uid:
                with contextlib.suppress(OSError):
                    namespace, _slash, name = claim_told(self._system.read_text(f"{DIRECTORY}/{file}")).partition("/")
                    reference = ClaimReference(namespace, name, claim_uid)
                    if not reference.problem:
                        return reference
        return None

    def pids(self, claim_uid: str) -> frozenset[int]:
        """Return the processes in the cgroups of a claim's companions."""
        pattern = f"{UNIT_PREFIX}*@{claim_uid}.*.service"
        told, said = self._systemctl("show", "--property=ControlGroup", "--value", pattern, timeout=ANSWER_SECONDS)
        found: set[int] = set()
        for group in said.split() if told else ():
            for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd"):  # version 2 and version 1
                with contextlib.suppress(OSError, ValueError):
                    found.update(map(int, self._system.read_text(f"{root}{group}/cgroup.procs").split()))
        return frozenset(found)

    def _refuse_apart(self, what: str) -> None:
        if is_apart(self._system):
            raise AcceleratorError(
                f"{what}: the driver is in a pod that does not see the node's processes, and systemd answers only who sees its own",
                hint="Set dra_driver_pod_host_pid to true, or have the driver as a service (dra_driver_form: service).",
                code="companion-failed",
            )

    def _make_nodes(self, companion: Companion) -> None:
        """Make those nodes that are not there; they are written down first, and go when the companion ends."""
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
        """Write one of a companion's files. Raises AcceleratorError where the disk does not take it."""
        path = companion.folder + suffix
        try:
            self._system.write_atomic(path, text.encode(), mode=0o600, directory_mode=0o700)
        except OSError as error:
            raise AcceleratorError(
                f"{path}, which {companion.kind} needs for {companion.name}, cannot be written: {error.strerror}",
                hint="Check that the disk is not full or read-only; the claim is prepared when the kubelet asks again.",
                code="files-unwritable",
            ) from error

    def _remove(self, path: str) -> None:
        """Remove a file or node of a companion; it need not be there. Raises AcceleratorError where the disk does not let it go."""
        try:
            self._system.remove(path)
        except OSError as error:
            raise AcceleratorError(
                f"{path} cannot be removed: {error.strerror}",
                hint="Check that the disk is not read-only; it is tried again.",
                code="files-unwritable",
            ) from error

    def _files(self) -> tuple[str, ...]:
        return tuple(name for name in self._system.list_directory(DIRECTORY) if name.endswith(_SUFFIXES))

    def _systemctl(self, *arguments: str, timeout: float) -> tuple[bool, str]:
        """Whether systemctl ended well, and what it said."""
        done = self._system.run(["systemctl", "--no-ask-password", "--no-pager", *arguments], timeout=timeout)
        return done.returncode == 0, (done.stdout if done.returncode == 0 else f"{done.stdout} {done.stderr}").strip()

    def _last_words(self, unit: str) -> str:
        with contextlib.suppress(AcceleratorError):
            command = ["journalctl", "--no-pager", "--output=cat", f"--lines={_LOG_LINES}", f"--unit={unit}"]
            return " ".join(self._system.run(command, timeout=ANSWER_SECONDS).stdout.split())
        return ""


def is_apart(system: System) -> bool:
    """Whether this process has another number on the node than for itself: it is in a pod without hostPID."""
    try:
        lines = system.read_text("/proc/self/status").splitlines()
    except OSError:
        return False
    # One number for each namespace, from that of this /proc, the node's, to the process's own.
    return any(len(line.split()) > 2 for line in lines if line.startswith("NSpid:"))


def _name(file: str) -> str:
    return file.rpartition(".")[0]
