# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Open and close NVML, and read GPUs on their lanes.

A lane is a queue of calls with one thread. Each GPU has a lane, so a GPU that hangs does not block the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable, TypeVar

from ...errors import AcceleratorError, BackendUnavailable, NotFound
from ...host.system import System
from ...model import Device, Partitioning
from ...settings.settings_record import record_path
from ..lane_backend import LIBRARY, Deadlines, LaneBackend
from . import gpu_reader
from .board_cache import BoardCache
from .board_facts import BoardFacts
from .container.common_edits import CommonEdits
from .fabric.fabric_calls import FabricCalls
from .health import faults
from .health.watch import Watch
from .nvml import Nvml
from .settings.gpu_settings import GpuSettings
from .settings.settings_backup import SettingsBackup
from .vendor import FACTS

Answer = TypeVar("Answer")
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class NvidiaDeadlines(Deadlines):
    """The deadlines of calls in seconds.

    The first scan of a GPU can have to wake it, and a change of its MIG mode can reset it. ``rebind`` is the deadline of
    a change of a GPU's kernel driver, which closes NVML and opens it again.
    """

    rebind: float = 120.0
    fabric: float = 60.0


class NvmlSession(LaneBackend):
    """NVML on this host, and the data that is kept while it is open. Safe for threads."""

    facts = FACTS
    _deadlines: NvidiaDeadlines

    def __init__(
        self, system: System | None = None, deadlines: NvidiaDeadlines | None = None, record: str = ""
    ) -> None:
        super().__init__(deadlines or NvidiaDeadlines(), "GPU")
        self._system = system or System()
        self._nvml = Nvml()
        self._gpu_settings = GpuSettings(self._nvml, self._system, record or record_path(self.facts.word))
        self._watch = Watch(self._nvml, self._lanes)
        self._boards = BoardCache(self._nvml, self._system, self._watch)
        self._settings_backup = SettingsBackup(self._gpu_settings, self._lanes, self._boards, self._is_mig_enabled)
        # Whether the next opening of NVML restores settings: the first one only in the node driver, later ones always.
        self._restores_settings = False
        self._lock = threading.Lock()
        # Held during a scan of all GPUs, and while a GPU is detached or attached, so that a scan does not see an
        # intermediate state.
        self._scan_lock = threading.Lock()
        self._gpu_count: int | None = None
        self._common_edits = CommonEdits(self._system)
        self._fabric = FabricCalls(self._system, self._lanes, self._deadlines.fabric)

    def open(self) -> None:
        """Load NVML and read the driver's version. Raises BackendUnavailable with the reason.

        If this process closed NVML before, settings that GPUs have lost since then are set again.
        """
        was_open = self._nvml.is_open
        self._run_for_library(self._open, "Opening NVML")
        if self._restores_settings and not was_open:
            self._settings_backup.restore(self._deadlines.change)
        self._restores_settings = True

    def close(self) -> None:
        """Wait for changes in progress, then shut NVML down and release all handles."""
        self._watch.close()
        self._lanes.rest(self._deadlines.change)
        self._save_settings()
        self._run_for_library(self._close, "Closing NVML")
        self._fabric.close()
        self._lanes.close()

    @property
    def driver_version(self) -> str:
        """The version of the loaded driver, in the driver's spelling."""
        return self._boards.driver.driver_version

    def reopen(self) -> None:
        """Close NVML and open it again, because it knows only the GPUs that existed when it was opened."""
        with self._scan_lock:
            try:
                self._run_while_closed(LIBRARY, lambda: None, "Reopening NVML")
                self._boards.begin_session(gpu_reader.read_driver(self._nvml))
            except BackendUnavailable:
                raise
            except AcceleratorError as error:
                raise BackendUnavailable(error.message, hint=error.hint) from error

    def device_nodes(self, device: Device) -> tuple[str, ...]:
        """Return the path of the GPU's current device node."""
        return (f"/dev/nvidia{self._boards.with_current_minor(device).minor}",)

    def _run_while_closed(self, lane: str, action: Callable[[], None], doing: str) -> None:
        """Call ``action`` on a lane while NVML is closed. Calls on all other lanes wait until NVML is open again."""

        def close_and_run() -> None:
            with self._lanes.alone(lane, self._deadlines.scan):
                self._boards.drop_handles()
                self._nvml.close()
                try:
                    action()
                finally:
                    self._nvml.open()

        self._watch.close()
        self._save_settings()
        try:
            self._lanes.run(lane, close_and_run, self._deadlines.rebind, doing=doing)
        finally:
            self._watch.begin()
            if self._nvml.is_open:
                self._settings_backup.restore(self._deadlines.change)

    def _save_settings(self) -> None:
        if self._nvml.is_open:
            self._settings_backup.save(self._faulty, self._deadlines.scan)

    def _is_mig_enabled(self, uuid: str) -> tuple[BoardFacts, bool]:
        """Return the facts of a GPU, and whether MIG is on. Runs on its lane."""
        board, mode = self._read_mig_mode(uuid)
        return board, mode.enabled

    def _open(self) -> None:
        self._nvml.open()
        self._boards.begin_session(gpu_reader.read_driver(self._nvml))
        self._watch.begin()

    def _close(self) -> None:
        self._boards.end_session()
        with self._lock:
            self._gpu_count = None
        self._nvml.close()

    def _refuse_closed(self) -> None:
        if not self._nvml.is_open:
            raise BackendUnavailable("NVML is not open", hint="Open the backend first.")

    def _own_change(self, uuid: str) -> AbstractContextManager[object]:
        return self._watch.own_change(uuid)

    def _restore_on_lane(self, uuid: str, recorded: Mapping[str, Any]) -> None:
        """Set the node's recorded values on a GPU again, after a change that resets settings. Runs on the GPU's lane."""
        if recorded:
            board, mode = self._read_mig_mode(uuid)
            self._gpu_settings.restore(board, recorded, mig=mode.enabled)

    def _restore_settings(self, uuid: str, recorded: Mapping[str, Any] | None = None) -> None:
        """Set the node's recorded values on a GPU again. Without ``recorded``, they are read from the record."""

        def restore() -> None:
            self._restore_on_lane(uuid, self._gpu_settings.recorded(uuid) if recorded is None else recorded)

        doing = f"Restoring the settings of GPU {uuid}"
        try:
            self._lanes.run(uuid, restore, self._deadlines.change, doing=doing)
        except AcceleratorError as error:  # the change itself is complete, and scans report faults
            LOG.warning("%s: %s", doing, error)

    def _read(self, uuid: str) -> Device:
        """Read the changing facts of a GPU. Runs on its lane."""
        detached = self._boards.detached_device(uuid)
        return detached if detached is not None else self._read_or_fault(self._boards.read, uuid)

    def _read_mig_mode(self, uuid: str) -> tuple[BoardFacts, Partitioning]:
        """Return the facts of a GPU and its MIG mode before a change of its partitioning. Runs on its lane."""
        return self._read_or_fault(self._boards.read_mig_mode, uuid)

    @staticmethod
    def _read_or_fault(read: Callable[[str], Answer], uuid: str) -> Answer:
        """Call ``read``. Its errors are faults of the GPU, unless they show that the GPU or NVML is missing."""
        try:
            return read(uuid)
        except (BackendUnavailable, NotFound):
            raise
        except AcceleratorError as error:
            raise faults.as_fault(error) from error
