# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Set GPU settings for a claim or for the node, and restore them after an event that loses settings.

The node's values are in a record, which the programs write that set them (settings_record.py).

Without persistence mode the driver deinitializes a GPU when its last client closes it. So closing NVML for one GPU can
lose the settings of all others. This module saves the values before the close, and compares them with the values after
it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import AcceleratorError
from ....host.system import System
from ....settings.knobs import ECC, PERSISTENCE, Knob
from ....settings.settings_record import TemporaryChange, devices_with_settings, recorded_values
from ..board_facts import BoardFacts
from ..nvml import Nvml
from . import nvml_settings

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedSettings:
    """The settings of a GPU before NVML was closed: values that differ from the initial ones, and the node's recorded values."""

    values: Mapping[str, Any]
    recorded: Mapping[str, Any]


def expected_settings(
    saved: SavedSettings | None, claimed: Mapping[str, Any], recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that a GPU should have after NVML was opened again.

    ``claimed`` are the values of claims, ``recorded`` those of the node's record now. If a setting's entry in the record
    has changed while NVML was closed, another program has changed the setting, and the recorded value is used.
    """
    before = saved.recorded if saved is not None else recorded
    changed = {name for name in {*before, *recorded} if before.get(name) != recorded.get(name)}
    values = {**claimed, **(saved.values if saved is not None else {})}
    return {**recorded, **{name: value for name, value in values.items() if name not in changed}}


def lost_settings(
    expected: Mapping[str, Any], saved: SavedSettings | None, present: Mapping[str, Knob], differing: Collection[str]
) -> dict[str, Any]:
    """Return the expected settings that have to be set again.

    A setting that NVML reports is lost if it has its initial value. ``differing`` are the names of settings with another
    value. A setting that NVML does not report counts as lost, unless the GPU stayed in persistence mode: then the driver
    did not deinitialize it.
    """
    stayed_persistent = saved is not None and bool(saved.values.get(PERSISTENCE)) and PERSISTENCE in differing
    lost = {}
    for name, value in expected.items():
        if name not in present or present[name].blocked:
            continue
        if name in nvml_settings.UNREPORTED:
            is_lost = not stayed_persistent
        else:
            is_lost = name in nvml_settings.REPORTED and name not in differing and present[name].value != value
        if is_lost:
            lost[name] = value
    return lost


class GpuSettings:
    """The settings of this host's GPUs. Call methods for a GPU on its lane."""

    def __init__(self, nvml: Nvml, system: System, record: str) -> None:
        self._nvml = nvml
        self._system = system
        self._record = record
        self._lock = threading.Lock()
        self._saved: dict[str, SavedSettings] = {}
        self._claimed: dict[str, dict[str, Any]] = {}  # values that this process has set instead of the node's values

    def read(self, board: BoardFacts, names: Collection[str], *, mig: bool) -> Mapping[str, Knob]:
        """Return the named settings that a GPU supports. ``mig`` is whether MIG is on. Raises AcceleratorError."""
        return nvml_settings.read(self._nvml, self._system, board, names, self.recorded(board.uuid), mig=mig)

    def set(self, board: BoardFacts, values: Mapping[str, Any]) -> None:
        """Set settings.

        None means the value that the node has set, or else the default of the GPU. Raises AcceleratorError.
        """
        recorded = self.recorded(board.uuid) if None in values.values() else self._recorded_or_empty(board.uuid)
        resolved = {name: recorded.get(name) if value is None else value for name, value in values.items()}
        self._forget_saved(board.uuid, values)
        nvml_settings.apply(self._nvml, self._system, board, resolved)
        with self._lock:
            claimed = self._claimed.setdefault(board.uuid, {})
            for name, value in resolved.items():
                claimed.pop(name, None)
                if name != ECC and value is not None and value != recorded.get(name):
                    claimed[name] = value

    def _forget_saved(self, uuid: str, names: Collection[str]) -> None:
        """Delete the saved values of settings that are set now, because their loss does not matter any more."""
        with self._lock:
            saved = self._saved.get(uuid)
            if saved is not None:
                values = {name: value for name, value in saved.values.items() if name not in names}
                self._saved[uuid] = SavedSettings(values, saved.recorded)

    def restore(self, board: BoardFacts, values: Mapping[str, Any], *, mig: bool) -> None:
        """Set values again after a change that resets settings.

        The change itself is complete, so a value that the GPU rejects is logged and raises no error.
        """
        blocked = nvml_settings.UNSUPPORTED_WITH_MIG if mig else frozenset()
        for name in nvml_settings.ORDER:
            if name not in values or name == ECC or name in blocked:  # the board stores ECC
                continue
            try:
                nvml_settings.apply(self._nvml, self._system, board, {name: values[name]})
            except AcceleratorError as error:
                LOG.warning("%s, which the node has set, is not set again: %s", name, error)

    def can_disable_persistence(self, board: BoardFacts) -> bool:
        """Return whether persistence mode is on and can be disabled. Raises AcceleratorError."""
        return nvml_settings.is_disablable(
            nvml_settings.read(self._nvml, self._system, board, [PERSISTENCE], {}, mig=False)
        )

    @contextlib.contextmanager
    def without_persistence(self, board: BoardFacts) -> Iterator[None]:
        """Switch persistence mode off, and on again at the end. Raises AcceleratorError if it cannot be switched off."""
        restore_record = self.persistence_restore_record([board.uuid])
        restore_record.begin()
        try:
            nvml_settings.apply(self._nvml, self._system, board, {PERSISTENCE: False})
            yield
        finally:
            self.restore(board, {PERSISTENCE: True}, mig=False)
            with contextlib.suppress(AcceleratorError):  # then the record keeps the mode
                if self.can_disable_persistence(board):
                    restore_record.end()

    def persistence_restore_record(self, uuids: Collection[str]) -> TemporaryChange:
        """Return the record of GPUs for the time in which their persistence mode is off."""
        return TemporaryChange(self._system, self._record, uuids, {PERSISTENCE: True})

    def save(self, board: BoardFacts) -> None:
        """Store the settings of a GPU before NVML is closed. Raises AcceleratorError."""
        present = nvml_settings.read(self._nvml, self._system, board, nvml_settings.REPORTED, {}, mig=False)
        differing = nvml_settings.differing_from_initial(self._nvml, board, present)
        saved = SavedSettings(differing, self._recorded_or_empty(board.uuid))
        with self._lock:
            self._saved[board.uuid] = saved

    def gpus_with_settings(self) -> frozenset[str]:
        """Return the UUIDs of GPUs that can have lost settings."""
        with self._lock:
            saved = {uuid for uuid, each in self._saved.items() if each.values or each.recorded}
            known = saved | self._claimed.keys()
        return frozenset(known | devices_with_settings(self._system, self._record))

    def restore_lost(self, board: BoardFacts, *, mig: bool) -> None:
        """Set the settings again that a GPU has lost while NVML was closed.

        Rejected values are logged. Raises AcceleratorError.
        """
        recorded = self._recorded_or_empty(board.uuid)
        with self._lock:
            saved = self._saved.pop(board.uuid, None)
            expected = expected_settings(saved, self._claimed.get(board.uuid, {}), recorded)
        if not expected:
            return
        present = nvml_settings.read(self._nvml, self._system, board, {*expected, PERSISTENCE}, recorded, mig=mig)
        differing = nvml_settings.differing_from_initial(self._nvml, board, present)
        lost = lost_settings(expected, saved, present, differing)
        if lost:
            LOG.info("GPU %s: setting again %s after NVML was closed", board.uuid, ", ".join(lost))
            self.restore(board, lost, mig=mig)

    def _recorded_or_empty(self, uuid: str) -> Mapping[str, Any]:
        try:
            return self.recorded(uuid)
        except AcceleratorError as error:
            LOG.warning("%s", error)
            return {}

    def recorded(self, uuid: str) -> Mapping[str, Any]:
        """Return the values that the node has set on a GPU. Raises AcceleratorError if the record cannot be read."""
        return recorded_values(self._system, self._record, uuid)
