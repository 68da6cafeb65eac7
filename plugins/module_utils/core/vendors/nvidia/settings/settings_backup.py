# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Save the settings of all GPUs before NVML is closed, and restore lost ones when it is open again (gpu_settings.py)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from ....discovery.device_workers import Lanes
from ....errors import AcceleratorError, NotFound
from ..board_cache import BoardCache
from ..board_facts import BoardFacts
from .gpu_settings import GpuSettings

LOG = logging.getLogger(__name__)


class SettingsBackup:
    """The settings of all GPUs across a close of NVML.

    ``read_mode`` returns the facts of a GPU and whether MIG is on. It runs on the GPU's lane.
    """

    def __init__(
        self,
        settings: GpuSettings,
        lanes: Lanes,
        boards: BoardCache,
        read_mode: Callable[[str], tuple[BoardFacts, bool]],
    ) -> None:
        self._settings = settings
        self._lanes = lanes
        self._boards = boards
        self._read_mode = read_mode

    def save(self, faulty: Collection[str], seconds: float) -> None:
        """Save the settings of all GPUs that answer within ``seconds``. The ``faulty`` GPUs are not queried."""
        calls = [
            self._lanes.submit(
                board.uuid,
                partial(self._settings.save, board),
                seconds,
                doing=f"Reading the settings of GPU {board.uuid}",
            )
            for board in self._boards.cached_facts()
            if board.uuid not in faulty and self._boards.detached_device(board.uuid) is None
        ]
        until = time.monotonic() + seconds
        for call in calls:
            with contextlib.suppress(AcceleratorError):  # a scan reports the fault of the GPU
                call.result(until)

    def restore(self, seconds: float) -> None:
        """Set lost settings again on all GPUs in parallel, each within ``seconds``. Errors are logged."""

        def restore_lost(uuid: str) -> None:
            board, mig = self._read_mode(uuid)
            self._settings.restore_lost(board, mig=mig)

        calls = [
            self._lanes.submit(
                uuid, partial(restore_lost, uuid), seconds, doing=f"Restoring the settings that GPU {uuid} has lost"
            )
            for uuid in sorted(self._settings.gpus_with_settings())
            if self._boards.detached_device(uuid) is None
        ]
        until = time.monotonic() + seconds
        for call in calls:
            try:
                call.result(until)
            except NotFound:
                continue  # the GPU was removed
            except AcceleratorError as error:
                LOG.warning("%s", error)
