# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Set GPU settings for a claim or for the node, and set them again after an event that loses settings.

Without persistence mode the driver deinitializes a GPU when its last client closes it. So closing NVML for one GPU can
lose the settings of all others. This module keeps the values from before the close, and compares them with the values
after it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import AcceleratorError
from ...host.system import System
from ...settings.knobs import ECC, PERSISTENCE, Knob
from ...settings.settings_record import TemporaryChange, noted_devices, noted_values
from . import settings
from .board_facts import BoardFacts
from .nvml import Nvml

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """The settings of a GPU before NVML was closed: values that differ from the initial ones, and the node's record."""

    values: Mapping[str, Any]
    noted: Mapping[str, Any]


def expected(kept: Kept | None, own: Mapping[str, Any], noted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a GPU should have after NVML was opened again.

    ``own`` are values of claims, ``noted`` is the node's record now. If a setting's entry in the record has changed
    while NVML was closed, another program has changed the setting, and the recorded value is used.
    """
    former = kept.noted if kept is not None else noted
    changed = {name for name in {*former, *noted} if former.get(name) != noted.get(name)}
    both = {**own, **(kept.values if kept is not None else {})}
    return {**noted, **{name: value for name, value in both.items() if name not in changed}}


def lost(
    wanted: Mapping[str, Any], kept: Kept | None, present: Mapping[str, Knob], differing: Collection[str]
) -> dict[str, Any]:
    """Return the settings to set again: those with their initial value, and those that NVML does not report.

    ``differing`` are settings with a value other than the initial one, which were not lost. A GPU that stayed in
    persistence mode was not deinitialized, so it has also kept the settings that NVML does not report.
    """
    persistent = kept is not None and bool(kept.values.get(PERSISTENCE)) and PERSISTENCE in differing
    return {
        name: value
        for name, value in wanted.items()
        if name in present
        and not present[name].blocked
        and (not persistent if name in settings.UNTOLD else name in settings.TOLD and name not in differing)
        and (name in settings.UNTOLD or present[name].value != value)
    }


class Knobs:
    """The settings of this host's GPUs. Call methods for a GPU on its lane."""

    def __init__(self, nvml: Nvml, system: System, record: str) -> None:
        self._nvml = nvml
        self._system = system
        self._record = record
        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}
        self._own: dict[str, dict[str, Any]] = {}  # values that this process has set instead of the node's values

    def read(self, board: BoardFacts, names: Collection[str], *, mig: bool) -> Mapping[str, Knob]:
        """Return the named settings that a GPU supports. ``mig`` is whether MIG is on. Raises AcceleratorError."""
        return settings.read(self._nvml, self._system, board, names, self.noted(board.uuid), mig=mig)

    def set(self, board: BoardFacts, values: Mapping[str, Any]) -> None:
        """Set settings.

        None means the value that the node has set, or else the default of the GPU. Raises AcceleratorError.
        """
        noted = self.noted(board.uuid) if None in values.values() else self._noted_or_nothing(board.uuid)
        meant = {name: noted.get(name) if value is None else value for name, value in values.items()}
        self._forget(board.uuid, values)
        settings.apply(self._nvml, self._system, board, meant)
        with self._lock:
            own = self._own.setdefault(board.uuid, {})
            for name, value in meant.items():
                own.pop(name, None)
                if name != ECC and value is not None and value != noted.get(name):
                    own[name] = value

    def _forget(self, uuid: str, names: Collection[str]) -> None:
        """Delete the kept values of settings that are set now, because their loss does not matter any more."""
        with self._lock:
            kept = self._kept.get(uuid)
            if kept is not None:
                values = {name: value for name, value in kept.values.items() if name not in names}
                self._kept[uuid] = Kept(values, kept.noted)

    def set_again(self, board: BoardFacts, noted: Mapping[str, Any], *, mig: bool) -> None:
        """Set the node's values again after a change that resets settings.

        The change itself is complete, so a value that the GPU rejects is logged and raises no error.
        """
        blocked = settings.NOT_WITH_MIG if mig else frozenset()
        for name in settings.ORDER:
            if name not in noted or name == ECC or name in blocked:  # the board stores ECC
                continue
            try:
                settings.apply(self._nvml, self._system, board, {name: noted[name]})
            except AcceleratorError as error:
                LOG.warning("%s, which the node has set, is not set again: %s", name, error)

    def is_persistent(self, board: BoardFacts) -> bool:
        """Return whether persistence mode is on and can be switched off. Raises AcceleratorError."""
        knob = settings.read(self._nvml, self._system, board, [PERSISTENCE], {}, mig=False).get(PERSISTENCE)
        return knob is not None and bool(knob.value) and not knob.blocked

    @contextlib.contextmanager
    def without_persistence(self, board: BoardFacts) -> Iterator[None]:
        """Switch persistence mode off, and on again at the end. Raises AcceleratorError if it cannot be switched off."""
        restore_record = self.persistence_restore_record([board.uuid])
        restore_record.begin()
        try:
            settings.apply(self._nvml, self._system, board, {PERSISTENCE: False})
            yield
        finally:
            self.set_again(board, {PERSISTENCE: True}, mig=False)
            with contextlib.suppress(AcceleratorError):  # then the record keeps the mode
                if self.is_persistent(board):
                    restore_record.end()

    def persistence_restore_record(self, uuids: Collection[str]) -> TemporaryChange:
        """Return the record of GPUs for the time in which their persistence mode is off."""
        return TemporaryChange(self._system, self._record, uuids, {PERSISTENCE: True})

    def keep(self, board: BoardFacts) -> None:
        """Store the settings of a GPU before NVML is closed. Raises AcceleratorError."""
        present = settings.read(self._nvml, self._system, board, settings.TOLD, {}, mig=False)
        kept = Kept(settings.differing(self._nvml, board, present), self._noted_or_nothing(board.uuid))
        with self._lock:
            self._kept[board.uuid] = kept

    def expected_on(self) -> frozenset[str]:
        """Return the UUIDs of GPUs that can have lost settings."""
        with self._lock:
            known = {*(uuid for uuid, kept in self._kept.items() if kept.values or kept.noted), *self._own}
        return frozenset(known | noted_devices(self._system, self._record))

    def set_lost(self, board: BoardFacts, *, mig: bool) -> None:
        """Set the settings that a GPU has lost while NVML was closed.

        Rejected values are logged. Raises AcceleratorError.
        """
        noted = self._noted_or_nothing(board.uuid)
        with self._lock:
            kept = self._kept.pop(board.uuid, None)
            wanted = expected(kept, self._own.get(board.uuid, {}), noted)
        if not wanted:
            return
        names = {*wanted, PERSISTENCE}
        present = settings.read(self._nvml, self._system, board, names, noted, mig=mig)
        again = lost(wanted, kept, present, settings.differing(self._nvml, board, present))
        if again:
            LOG.info("GPU %s: setting again %s after NVML was closed", board.uuid, ", ".join(again))
            self.set_again(board, again, mig=mig)

    def _noted_or_nothing(self, uuid: str) -> Mapping[str, Any]:
        try:
            return self.noted(uuid)
        except AcceleratorError as error:
            LOG.warning("%s", error)
            return {}

    def noted(self, uuid: str) -> Mapping[str, Any]:
        """Return the values that the node has set on a GPU. Raises AcceleratorError if the record cannot be read."""
        return noted_values(self._system, self._record, uuid)
