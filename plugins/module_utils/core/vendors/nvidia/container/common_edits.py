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

# The pauses, in seconds, before nvidia-ctk is called again after a failure, if no file has changed. The first one is
# short, because an installation may be in progress.
RETRY_FIRST, RETRY_FACTOR, RETRY_SECONDS = 2.0, 4.0, 600.0
_MOST_FAILURES = 10
# How often nvidia-ctk is called in a row if the files change while it runs.
ATTEMPTS = 3


@dataclass(frozen=True)
class _Known:
    """Edits, and the state of the files from which they were generated."""

    driver_version: str
    paths: tuple[str, ...]
    seen: tuple[Stamp, ...]
    edits: ContainerEdits
    # The time of the next call of nvidia-ctk. None if these edits are from nvidia-ctk, or it is not installed.
    ask_at: float | None = None


class CommonEdits:
    """Keep the shared container edits. Safe for threads."""

    def __init__(self, system: System, clock: Callable[[], float] = time.monotonic) -> None:
        self._system = system
        self._clock = clock
        #: Whether missing device nodes are created. Only the node driver creates them, so that modules in check mode
        #: change nothing.
        self.creates_nodes = False
        self._lock = threading.Lock()
        self._known: _Known | None = None
        self._asking: threading.Thread | None = None
        self._refused: tuple[str, tuple[Stamp, ...], float] | None = None
        self._said = ""
        self._failures = 0

    def current(self, driver_version: str) -> ContainerEdits:
        """Return the edits for the files that exist now.

        Raises BackendUnavailable, with the name of the file, if a file that CUDA needs is missing.
        """
        known = self._known
        if known is None or not self._fits(known, driver_version):
            with self._lock:
                known = self._known
                if known is None or not self._fits(known, driver_version):
                    self._known = known = self._made_anew(driver_version)
        if known.ask_at is not None and self._clock() >= known.ask_at:
            self._ask_aside(driver_version)
        return known.edits

    def settle(self, seconds: float) -> None:
        """Wait up to ``seconds`` until a running nvidia-ctk has answered."""
        asking = self._asking
        if asking is not None:
            asking.join(seconds)

    def _fits(self, known: _Known, driver_version: str) -> bool:
        return known.driver_version == driver_version and self._system.fingerprint(known.paths) == known.seen

    def _made_anew(self, driver_version: str) -> _Known:
        if self.creates_nodes:
            driver_files.create_uvm_nodes(self._system)
        driver_files.check_nodes(self._system)
        paths = _watched(driver_version)
        seen = self._system.fingerprint(paths)
        toolkit = container_toolkit.is_installed(self._system)
        try:
            edits = driver_files.driver_edits(self._system, driver_version)
        except BackendUnavailable:
            # nvidia-ctk may know directories that this list does not. Without it the claim would be rejected, so the
            # claim waits for it here.
            if not toolkit or (self._refused and self._refused[:2] == (driver_version, seen) and not self._is_past()):
                raise
            try:
                return self._from_toolkit(driver_version)
            except AcceleratorError as error:
                self._refused = (driver_version, seen, self._clock() + RETRY_SECONDS)
                self._say(logging.WARNING, f"nvidia-ctk does not help: {error}")
            raise
        if not toolkit:
            self._say(logging.INFO, "container edits come from the driver's own list: nvidia-ctk is not installed")
        more = tuple(dict.fromkeys((*paths, *_sources(edits))))
        # If a path appeared or disappeared in the meantime, the fingerprint stays empty, and the next claim reads the files
        # again.
        seen = self._system.fingerprint(more) if self._system.fingerprint(paths) == seen else ()
        return _Known(driver_version, more, seen, edits, ask_at=self._clock() if toolkit else None)

    def _is_past(self) -> bool:
        return self._refused is None or self._clock() >= self._refused[2]

    def _from_toolkit(self, driver_version: str) -> _Known:
        """Call nvidia-ctk until no file has changed while it ran. Raises AcceleratorError."""
        paths = _watched(driver_version)
        for _attempt in range(ATTEMPTS):
            before = self._system.fingerprint(paths)
            edits = container_toolkit.common_edits(self._system, driver_version)
            if self._system.fingerprint(paths) == before:
                more = tuple(dict.fromkeys((*paths, *_sources(edits))))
                self._say(logging.INFO, f"container edits come from {container_toolkit.PROGRAM}")
                return _Known(driver_version, more, self._system.fingerprint(more), edits)
        raise AcceleratorError("The driver's files changed each time nvidia-ctk read them", code="toolkit-failed")

    def _ask_aside(self, driver_version: str) -> None:
        with self._lock:
            if self._asking is None or not self._asking.is_alive():
                self._asking = threading.Thread(
                    target=self._ask, args=(driver_version,), name="container-edits", daemon=True
                )
                self._asking.start()

    def _ask(self, driver_version: str) -> None:
        try:
            known = self._from_toolkit(driver_version)
        except Exception as error:  # noqa: BLE001  whatever it is, our own list stays in effect
            self._say(logging.WARNING, f"container edits come from the driver's own list: {error}")
            with self._lock:
                wait = min(RETRY_FIRST * RETRY_FACTOR**self._failures, RETRY_SECONDS)
                self._failures = min(self._failures + 1, _MOST_FAILURES)
                if self._known is not None and self._known.ask_at is not None:
                    self._known = replace(self._known, ask_at=self._clock() + wait)
            return
        with self._lock:
            self._failures = 0
            self._known = known

    def _say(self, level: int, message: str) -> None:
        if message != self._said:
            self._said = message
            LOG.log(level, "%s", message)


def _watched(driver_version: str) -> tuple[str, ...]:
    return (*driver_files.watched_paths(driver_version), container_toolkit.PROGRAM)


def _sources(edits: ContainerEdits) -> Iterable[str]:
    """Yield the paths that edits depend on: nodes, mounted files, and the directories of libraries, which can get new files."""
    for each in edits.device_nodes:
        yield each.host_path or each.path
    for mount in edits.mounts:
        folder, _slash, name = mount.host_path.rpartition("/")
        yield folder if ".so" in name else mount.host_path
