# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Store the settings of all GPUs before NVML is closed, and set lost ones again when it is open again (knobs.py)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from ...discovery.device_workers import Lanes
from ...errors import AcceleratorError, NotFound
from .board_facts import BoardFacts
from .boards import Boards
from .knobs import Knobs

LOG = logging.getLogger(__name__)


class SettingsBackup:
    """The settings of all GPUs across a close of NVML.

    ``settled`` returns the facts of a GPU and whether MIG is on. It runs on the GPU's lane.
    """

    def __init__(
        self, knobs: Knobs, lanes: Lanes, boards: Boards, settled: Callable[[str], tuple[BoardFacts, bool]]
    ) -> None:
        self._knobs = knobs
        self._lanes = lanes
        self._boards = boards
        self._settled = settled

    def keep(self, ill: Collection[str], seconds: float) -> None:
        """Store the settings of all GPUs that answer within ``seconds``. The GPUs in ``ill`` are not queried."""
        calls = [
            self._lanes.submit(
                board.uuid, partial(self._knobs.keep, board), seconds, doing=f"Reading the settings of GPU {board.uuid}"
            )
            for board in self._boards.kept()
            if board.uuid not in ill and self._boards.is_away(board.uuid) is None
        ]
        until = time.monotonic() + seconds
        for call in calls:
            with contextlib.suppress(AcceleratorError):  # a scan reports the fault of the GPU
                call.result(until)

    def restore(self, seconds: float) -> None:
        """Set lost settings again on all GPUs in parallel, each within ``seconds``. Errors are logged."""

        def set_lost(uuid: str) -> None:
            board, mig = self._settled(uuid)
            self._knobs.set_lost(board, mig=mig)

        calls = [
            self._lanes.submit(uuid, partial(set_lost, uuid), seconds, doing=f"Setting again what GPU {uuid} has lost")
            for uuid in sorted(self._knobs.expected_on())
            if self._boards.is_away(uuid) is None
        ]
        until = time.monotonic() + seconds
        for call in calls:
            try:
                call.result(until)
            except NotFound:
                continue  # the GPU was removed
            except AcceleratorError as error:
                LOG.warning("%s", error)
