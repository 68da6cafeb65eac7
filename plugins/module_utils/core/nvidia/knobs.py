# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What is set on a GPU: by a claim while it is held, by the node else, and again by the node after what takes settings along."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import AcceleratorError
from ..settings import ECC, Knob
from ..settings_record import noted_values
from ..system import System
from . import settings
from .board_facts import BoardFacts
from .nvml import Nvml

LOG = logging.getLogger(__name__)


class Knobs:
    """The knobs of this machine's GPUs. What is called for a GPU is called on its lane."""

    def __init__(self, nvml: Nvml, system: System, record: str) -> None:
        self._nvml = nvml
        self._system = system
        self._record = record

    def read(self, board: BoardFacts, names: Collection[str], *, mig: bool) -> Mapping[str, Knob]:
        """Return those of a GPU's knobs that are named and that it has; ``mig`` is whether MIG is on. Raises AcceleratorError."""
        return settings.read(self._nvml, self._system, board, names, self._noted(board.uuid), mig=mig)

    def set(self, board: BoardFacts, values: Mapping[str, Any]) -> None:
        """Set knobs; None is what the node has set, and where it has set nothing what the GPU has by default. Raises AcceleratorError."""
        noted = self._noted(board.uuid) if None in values.values() else {}
        meant = {name: noted.get(name) if value is None else value for name, value in values.items()}
        settings.apply(self._nvml, self._system, board, meant)

    def set_again(self, board: BoardFacts, *, mig: bool) -> None:
        """Set again what the node has set, after what takes settings along.

        Whoever changed the GPU has what was wanted, so that a knob that is not taken is told in the log, and is in the way of nothing.
        """
        blocked = settings.NOT_WITH_MIG if mig else frozenset()
        noted = self._noted(board.uuid)
        for name in settings.ORDER:
            if name not in noted or name == ECC or name in blocked:  # ECC is kept by the board
                continue
            try:
                settings.apply(self._nvml, self._system, board, {name: noted[name]})
            except AcceleratorError as error:
                LOG.warning("%s, which the node has set, is not set again: %s", name, error)

    def are_noted(self, uuid: str) -> bool:
        """Return whether the node has set anything on a GPU."""
        return bool(self._noted(uuid))

    def _noted(self, uuid: str) -> Mapping[str, Any]:
        return noted_values(self._system, self._record, uuid)
