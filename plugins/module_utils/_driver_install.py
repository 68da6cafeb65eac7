# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What modules that install a vendor's driver share: who is in the way, services that stand still meanwhile, records, digests."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .core.errors import AcceleratorError, InUse
from .core.model import Process
from .core.passthrough import users
from .core.prepared import prepared_claims
from .core.system import System

COMMAND_SECONDS = 60.0
_BLOCK = 1 << 20
_RUNNING = ("active", "activating", "reloading")


def digest_of(system: System, path: str) -> str:
    """Return the SHA-256 digest of a file, which may be larger than one would hold in memory."""
    digest = hashlib.sha256()
    with system.path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def last_words(text: str) -> str:
    """Return the end of what a program has said, as one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-400:] or "it said nothing"


def text_or_none(system: System, path: str) -> str | None:
    """Return a file's text, or None where there is none."""
    try:
        return system.read_text(path)
    except FileNotFoundError:
        return None


def keep_record(system: System, path: str, text: str) -> None:
    """Write a record; an empty text removes it, with its folder and all that was kept there."""
    if text:
        system.write_atomic(path, text.encode(), mode=0o600, directory_mode=0o700)
    else:
        folder = posixpath.dirname(path)
        system.remove_tree(folder)
        with contextlib.suppress(OSError):
            # Others of this collection may keep something there.
            system.path(posixpath.dirname(folder)).rmdir()


def waits_for_restart(system: System, boot: str) -> bool:
    """Whether the boot in which something was installed or removed, if any, is still this one."""
    return bool(boot) and boot == system.boot_id()


@dataclass(frozen=True)
class InTheWay:
    """Who has the devices of a node: prepared claims, and processes that have their nodes open."""

    claims: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()

    def refuse_claims(self, devices: str) -> None:
        """Refuse where a claim is prepared. Raises InUse."""
        if self.claims:
            raise InUse(
                f"Prepared claims have {devices} of this node: {', '.join(self.claims)}",
                claims=self.claims,
                hint="Drain the node, and run this again.",
            )

    def refuse_processes(self, devices: str) -> None:
        """Refuse where a process has a node open. Raises InUse."""
        if self.processes:
            raise InUse(
                f"Processes have {devices} of this node open: {', '.join(map(str, self.processes))}",
                pids=[process.pid for process in self.processes],
                hint="End them or drain the node, and run this again. The driver is not replaced under a running program.",
            )


def in_the_way(system: System, *, state_path: str, paths: Iterable[str], services: Sequence[str]) -> InTheWay:
    """Look for claims in the node driver's store, and for processes that have one of these nodes open; ``services`` do not count."""
    claims = tuple(claim.describe() for claim in prepared_claims(state_path)) if state_path else ()
    numbers = {number for path in paths if (number := system.device_number(path)) is not None}
    found = users(system, numbers) if numbers else ()
    own = main_processes(system, services) if found else frozenset()
    return InTheWay(claims, tuple(process for process in found if process.pid not in own))


def main_processes(system: System, services: Sequence[str]) -> frozenset[int]:
    """Return the main processes of units."""
    said = (property_of(system, service, "MainPID") for service in services)
    return frozenset(int(each) for each in said if each.isdigit()) - {0}


def property_of(system: System, unit: str, name: str) -> str:
    """Return a property of a unit, as systemd says it."""
    return system.run(["systemctl", "show", f"--property={name}", "--value", unit], COMMAND_SECONDS).stdout.strip()


def is_running(system: System, service: str) -> bool:
    """Whether a unit runs, or is about to."""
    return system.run(["systemctl", "is-active", service], COMMAND_SECONDS).stdout.strip() in _RUNNING


def systemctl(system: System, verb: str, service: str) -> None:
    """Tell systemd something of a unit. Raises AcceleratorError with what it said."""
    done = system.run(["systemctl", verb, service], COMMAND_SECONDS * 5)
    if done.returncode:
        raise AcceleratorError(f"systemctl {verb} {service} ended with {done.returncode}: {last_words(done.stderr)}")


@contextlib.contextmanager
def standing_still(system: System, services: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Stop those of the units that run, in this order, and start them again afterwards in the other; yields which they are.

    One that runs by then is left alone, and one that has gone meanwhile, with its packages, is not started.
    """
    running = tuple(name for name in services if is_running(system, name))
    try:
        for name in running:
            systemctl(system, "stop", name)
        yield running
    finally:
        for name in reversed(running):
            if not is_running(system, name) and property_of(system, name, "LoadState") != "not-found":
                systemctl(system, "start", name)
