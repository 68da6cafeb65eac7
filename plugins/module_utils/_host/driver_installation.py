# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Functions that the modules for vendor drivers share: processes that block a change, units, records, digests."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.errors import AcceleratorError, InUse
from ..core.host.device_users import find_device_users, find_file_users
from ..core.host.kubelet_pods import pod_names, pod_of_process, pods_of_claims
from ..core.host.system import System, path_exists
from ..core.model import Process
from ..core.store.prepared_claims import PreparedClaim, prepared_claims

#: The timeout of a systemctl query.
COMMAND_SECONDS = 60.0
#: The timeout of a systemctl command that changes a unit. A unit can need minutes to stop.
CHANGE_SECONDS = 300.0
_BLOCK_BYTES = 1 << 20
_RUNNING_STATES = ("active", "activating", "reloading")


def digest_of(system: System, path: str) -> str:
    """Return the SHA-256 digest of a file. The file is read in blocks."""
    digest = hashlib.sha256()
    with system.path(path).open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class ChecksumMismatch(AcceleratorError):
    """A file has a SHA-256 digest other than the expected one."""

    default_code = "checksum"


@contextlib.contextmanager
def verified_copy(system: System, source: str, checksum: str, directory: str) -> Iterator[str]:
    """Yield the path of a copy of a file in a directory that only root can enter. The copy is deleted at the end.

    If a file is verified and then run or installed from the same path, a user with write access to it or its directory
    can replace it in between. Therefore the bytes are copied and hashed in one pass, and only the copy is used.

    :param checksum: the expected SHA-256 digest; an empty one is not compared.
    :param directory: the directory of the copy, which is deleted first. Only root may have write access to its parent.
    :raises ChecksumMismatch: if the digest differs.
    """
    target = f"{directory}/{posixpath.basename(source)}"
    missing = [path for path in system.path(directory).parents if not path_exists(path)]
    system.remove_tree(directory)
    system.path(directory).mkdir(mode=0o700, parents=True)
    try:
        digest = hashlib.sha256()
        with system.path(source).open("rb") as file, system.path(target).open("xb") as copy:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                copy.write(block)
        if checksum and digest.hexdigest() != checksum.lower():
            raise ChecksumMismatch(
                f"{source} has the SHA-256 digest {digest.hexdigest()}, expected {checksum.lower()}",
                hint="The file is damaged, or it is a different file. Nothing was run or installed from it.",
            )
        yield target
    finally:
        system.remove_tree(directory)
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def last_words(text: str) -> str:
    """Return the last lines of a program's output in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-400:] or "no output"


def keep_record(system: System, path: str, text: str, *, doing: str) -> None:
    """Write a record. An empty text removes the record with its directory and all kept files.

    ``doing`` is the operation in progress. Without one, the record states that the installation is complete. Installers do
    not sync their files, so this function syncs all files before it writes such a record.
    """
    if not doing:
        system.sync_all()
    if text:
        system.write_atomic(path, text.encode(), mode=0o600, directory_mode=0o700)
    else:
        directory = posixpath.dirname(path)
        system.remove_tree(directory)
        with contextlib.suppress(OSError):
            # Other modules of this collection can have files there.
            system.path(posixpath.dirname(directory)).rmdir()


def waits_for_restart(system: System, boot: str) -> bool:
    """Return whether a reboot is pending. ``boot`` is the boot ID of the recorded change, or empty without a change."""
    return bool(boot) and boot == system.boot_id()


@dataclass(frozen=True)
class DeviceUsers:
    """The users of a node's devices: prepared claims with their pods, and processes that have device nodes open."""

    claims: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()
    pods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def described_claims(self) -> list[str]:
        """Return the claims, each with its pods as far as the node knows them."""
        return [
            f"{claim} (pod {', '.join(self.pods[claim])})" if self.pods.get(claim) else claim for claim in self.claims
        ]

    def pod_names(self) -> tuple[str, ...]:
        """Return the pods of claims and of processes, as far as the node knows them."""
        known = [name for names in self.pods.values() for name in names]
        return tuple(sorted({*known, *(process.pod for process in self.processes if process.pod)}))

    def refuse_claims(self, devices: str, hint: str = "Drain the node, and run this again.") -> None:
        """Raise InUse if a claim is prepared."""
        if self.claims:
            raise InUse(
                f"Prepared claims have {devices} of this node: {', '.join(self.described_claims())}",
                claims=self.claims,
                hint=hint,
            )

    def refuse_processes(self, devices: str) -> None:
        """Raise InUse if a process has a device node open."""
        if self.processes:
            raise InUse(
                f"Processes have {devices} of this node open: {', '.join(map(str, self.processes))}",
                pids=[process.pid for process in self.processes],
                hint="End them or drain the node, and run this again. The driver is not replaced under a running program.",
            )


def find_users(system: System, *, state_path: str, paths: Iterable[str], services: Sequence[str]) -> DeviceUsers:
    """Return the claims in the node driver's store, and the processes that have one of these device nodes open.

    Processes of ``services`` are excluded. A node driver in a pod is excluded, too: it is the pod with a process that
    has the store open.
    """
    claims = prepared_claims(state_path) if state_path else ()
    numbers = {number for path in paths if (number := system.device_number(path)) is not None}
    found = find_device_users(system, numbers) if numbers else ()
    service_processes = main_processes(system, services) if found else frozenset()
    driver_processes = find_file_users(system, state_path) if state_path and found else ()
    driver_pods = {pod_of_process(system, pid) for pid in driver_processes} - {""}
    names = pod_names(system) if claims or found else {}
    processes = []
    for process in found:
        pod = pod_of_process(system, process.pid)
        if process.pid not in service_processes and pod not in driver_pods:
            processes.append(replace(process, pod=names.get(pod, pod)))
    return DeviceUsers(
        tuple(claim.describe() for claim in claims), tuple(processes), pods_of(system, state_path, claims, names)
    )


def pods_of(
    system: System, state_path: str, claims: Sequence[PreparedClaim], names: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return the pods of claims, by the claim. ``names`` are the names of pods by UID.

    The kubelet's directory is the third parent of the store's path.
    """
    known = pods_of_claims(system, posixpath.normpath(posixpath.join(state_path, "../../.."))) if claims else {}
    return {
        claim.describe(): tuple(names.get(uid, uid) for uid in known[claim.uid])
        for claim in claims
        if claim.uid in known
    }


def wait_for_claims(
    state_path: str,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait up to ``seconds`` until the node driver has no claim in its store. The caller rejects remaining claims."""
    deadline = clock() + seconds
    while state_path and clock() < deadline and prepared_claims(state_path):
        sleep(min(1.0, max(deadline - clock(), 0.0)))


def main_processes(system: System, services: Sequence[str]) -> frozenset[int]:
    """Return the main PIDs of units."""
    pids = (property_of(system, service, "MainPID") for service in services)
    return frozenset(int(pid) for pid in pids if pid.isdigit()) - {0}


def property_of(system: System, unit: str, name: str) -> str:
    """Return a property of a unit from systemd."""
    return system.run(["systemctl", "show", f"--property={name}", "--value", unit], COMMAND_SECONDS).stdout.strip()


def is_running(system: System, service: str) -> bool:
    """Return whether a unit is active, starting, or reloading."""
    return system.run(["systemctl", "is-active", service], COMMAND_SECONDS).stdout.strip() in _RUNNING_STATES


def systemctl(system: System, verb: str, service: str) -> None:
    """Run a systemctl verb for a unit. Raises AcceleratorError with the output."""
    _run_systemctl(system, [verb, service])


def daemon_reload(system: System) -> None:
    """Reload the unit files of systemd. Raises AcceleratorError with the output."""
    _run_systemctl(system, ["daemon-reload"])


def _run_systemctl(system: System, arguments: Sequence[str]) -> None:
    done = system.run(["systemctl", *arguments], CHANGE_SECONDS)
    if done.returncode:
        raise AcceleratorError(
            f"systemctl {' '.join(arguments)} ended with {done.returncode}: {last_words(done.stderr)}"
        )
