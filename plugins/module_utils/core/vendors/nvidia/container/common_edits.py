# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The container edits that all GPUs share, kept up to date with the files on the disk.

nvidia-ctk generates them if it is installed. Otherwise they come from this collection's list (driver_files.py). Each
claim compares a fingerprint of the paths that the edits depend on, which takes microseconds. After a change, the claim
gets a new list of this collection at once, and nvidia-ctk runs on a separate thread. A claim waits for nvidia-ctk only
if this collection's list is incomplete.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Callable

from ....errors import AcceleratorError, BackendUnavailable
from ....host.cdi import ContainerEdits
from ....host.system import Stamp, System
from . import container_toolkit, driver_files

LOG = logging.getLogger(__name__)

# The pauses before nvidia-ctk is called again after a failure, if no file has changed: the first pause in seconds, the
# factor between two pauses, and the longest pause in seconds. The first one is short, because an installation may be in
# progress.
RETRY_FIRST, RETRY_FACTOR, RETRY_SECONDS = 2.0, 4.0, 600.0
_MOST_FAILURES = 10
# How often nvidia-ctk is called in a row if the files change while it runs.
ATTEMPTS = 3


@dataclass(frozen=True)
class _Generated:
    """Edits, and the state of the files from which they were generated."""

    driver_version: str
    paths: tuple[str, ...]
    fingerprint: tuple[Stamp, ...]
    edits: ContainerEdits
    # The time of the next call of nvidia-ctk. None if these edits are from nvidia-ctk, or it is not installed.
    toolkit_at: float | None = None


@dataclass(frozen=True)
class _Failure:
    """A failed call of nvidia-ctk. Until ``until``, it is not repeated for the same files, and claims are rejected."""

    driver_version: str
    fingerprint: tuple[Stamp, ...]
    until: float


class CommonEdits:
    """Keep the shared container edits. Safe for threads."""

    def __init__(self, system: System, clock: Callable[[], float] = time.monotonic) -> None:
        self._system = system
        self._clock = clock
        #: Whether missing device nodes are created. Only the node driver creates them, so that modules in check mode
        #: change nothing.
        self.creates_nodes = False
        self._lock = threading.Lock()
        self._generated: _Generated | None = None
        self._toolkit_thread: threading.Thread | None = None
        self._failure: _Failure | None = None
        self._last_message = ""
        self._failures = 0

    def current(self, driver_version: str) -> ContainerEdits:
        """Return the edits for the files that exist now.

        Raises BackendUnavailable, with the name of the file, if a file that CUDA needs is missing.
        """
        generated = self._generated
        if generated is None or not self._is_current(generated, driver_version):
            with self._lock:
                generated = self._generated
                if generated is None or not self._is_current(generated, driver_version):
                    self._generated = generated = self._generate(driver_version)
        if generated.toolkit_at is not None and self._clock() >= generated.toolkit_at:
            self._start_toolkit(driver_version)
        return generated.edits

    def settle(self, seconds: float) -> None:
        """Wait up to ``seconds`` until a running nvidia-ctk has answered."""
        thread = self._toolkit_thread
        if thread is not None:
            thread.join(seconds)

    def _is_current(self, generated: _Generated, driver_version: str) -> bool:
        fingerprint = self._system.fingerprint(generated.paths)
        return generated.driver_version == driver_version and fingerprint == generated.fingerprint

    def _generate(self, driver_version: str) -> _Generated:
        if self.creates_nodes:
            driver_files.create_uvm_nodes(self._system)
        driver_files.check_nodes(self._system)
        paths = _watched_paths(driver_version)
        fingerprint = self._system.fingerprint(paths)
        has_toolkit = container_toolkit.is_installed(self._system)
        try:
            edits = driver_files.driver_edits(self._system, driver_version)
        except BackendUnavailable:
            # nvidia-ctk may know directories that this list does not. Without it the claim would be rejected, so the
            # claim waits for it here.
            if not has_toolkit or self._has_failed(driver_version, fingerprint):
                raise
            try:
                return self._run_toolkit(driver_version)
            except AcceleratorError as error:
                self._failure = _Failure(driver_version, fingerprint, self._clock() + RETRY_SECONDS)
                self._log_once(logging.WARNING, f"nvidia-ctk does not help: {error}")
            raise
        if not has_toolkit:
            self._log_once(logging.INFO, "container edits come from the driver's own list: nvidia-ctk is not installed")
        all_paths = tuple(dict.fromkeys((*paths, *_sources(edits))))
        # If a path appeared or disappeared in the meantime, the fingerprint stays empty, and the next claim reads the files
        # again.
        is_same = self._system.fingerprint(paths) == fingerprint
        fingerprint = self._system.fingerprint(all_paths) if is_same else ()
        return _Generated(
            driver_version, all_paths, fingerprint, edits, toolkit_at=self._clock() if has_toolkit else None
        )

    def _has_failed(self, driver_version: str, fingerprint: tuple[Stamp, ...]) -> bool:
        """Return whether nvidia-ctk failed with these files less than RETRY_SECONDS ago."""
        failure = self._failure
        return (
            failure is not None
            and (failure.driver_version, failure.fingerprint) == (driver_version, fingerprint)
            and self._clock() < failure.until
        )

    def _run_toolkit(self, driver_version: str) -> _Generated:
        """Call nvidia-ctk until no file has changed while it ran. Raises AcceleratorError."""
        paths = _watched_paths(driver_version)
        for _attempt in range(ATTEMPTS):
            before = self._system.fingerprint(paths)
            edits = container_toolkit.common_edits(self._system, driver_version)
            if self._system.fingerprint(paths) == before:
                all_paths = tuple(dict.fromkeys((*paths, *_sources(edits))))
                self._log_once(logging.INFO, f"container edits come from {container_toolkit.PROGRAM}")
                return _Generated(driver_version, all_paths, self._system.fingerprint(all_paths), edits)
        raise AcceleratorError("The driver's files changed each time nvidia-ctk read them", code="toolkit-failed")

    def _start_toolkit(self, driver_version: str) -> None:
        """Run nvidia-ctk on a separate thread, unless it is running."""
        with self._lock:
            if self._toolkit_thread is None or not self._toolkit_thread.is_alive():
                self._toolkit_thread = threading.Thread(
                    target=self._update_from_toolkit, args=(driver_version,), name="container-edits", daemon=True
                )
                self._toolkit_thread.start()

    def _update_from_toolkit(self, driver_version: str) -> None:
        try:
            generated = self._run_toolkit(driver_version)
        except Exception as error:  # noqa: BLE001  after any error, the edits of this collection stay in effect
            self._log_once(logging.WARNING, f"container edits come from the driver's own list: {error}")
            with self._lock:
                wait = min(RETRY_FIRST * RETRY_FACTOR**self._failures, RETRY_SECONDS)
                self._failures = min(self._failures + 1, _MOST_FAILURES)
                if self._generated is not None and self._generated.toolkit_at is not None:
                    self._generated = replace(self._generated, toolkit_at=self._clock() + wait)
            return
        with self._lock:
            self._failures = 0
            self._generated = generated

    def _log_once(self, level: int, message: str) -> None:
        """Log a message, unless it is the same as the last one."""
        if message != self._last_message:
            self._last_message = message
            LOG.log(level, "%s", message)


def _watched_paths(driver_version: str) -> tuple[str, ...]:
    return (*driver_files.watched_paths(driver_version), container_toolkit.PROGRAM)


def _sources(edits: ContainerEdits) -> Iterable[str]:
    """Yield the paths that edits depend on: nodes, mounted files, and the directories of libraries, which can get new files."""
    for each in edits.device_nodes:
        yield each.host_path or each.path
    for mount in edits.mounts:
        folder, _slash, name = mount.host_path.rpartition("/")
        yield folder if ".so" in name else mount.host_path
