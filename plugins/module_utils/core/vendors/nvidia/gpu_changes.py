# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Change GPUs: MIG mode, partitions, resets, settings, and the kernel driver of GPUs for virtual machines."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Callable

from ...errors import AcceleratorError, BackendUnavailable, InUse
from ...host.device_users import find_file_users, find_located_users
from ...host.kubelet_pods import add_pods
from ...model import Device, Partition, Partitioning, Placement, Process
from ...settings.knobs import PERSISTENCE, Knob
from . import gpu_reset, partition, sysfs
from .board_facts import BoardFacts
from .nvml_session import NvmlSession
from .settings import nvml_settings

LOG = logging.getLogger(__name__)


class GpuChanges(NvmlSession):
    """The changes of GPUs. Each change runs on the lane of its GPU."""

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Enable or disable MIG mode. On GPUs that need a reset the change stays pending."""

        def change() -> None:
            # Read before the change, because a record that cannot be read must prevent it.
            recorded = self._gpu_settings.recorded(uuid)
            board, mode = self._read_mig_mode(uuid)
            if self._set_mode(board, mode, enabled):
                self._boards.read_minor(board)
                self._restore_on_lane(uuid, recorded)

        self._change(uuid, change, f"{'Enabling' if enabled else 'Disabling'} MIG mode of GPU {uuid}")

    def _set_mode(self, board: BoardFacts, mode: Partitioning, enabled: bool) -> bool:
        """Enable or disable MIG mode, and return whether that changed anything.

        If only the persistence daemon has the GPU open, retry without persistence mode.
        """
        read = partial(self._read_with_users, board.uuid)
        set_mode = partial(partition.set_mode, self._nvml, board, mode, read, enabled)
        try:
            return set_mode()
        except InUse:
            device = self._read_with_users(board.uuid)
            if device.partitions or not gpu_reset.is_only_used_by_persistence_daemon(device.processes):
                raise
            if not self._gpu_settings.can_disable_persistence(board):
                raise
        with self._gpu_settings.without_persistence(board):
            with contextlib.suppress(InUse):  # the next attempt names the processes
                gpu_reset.await_closed(self._system, self.device_nodes(device), f"GPU {board.uuid}")
            return set_mode()

    def _read_with_users(self, uuid: str) -> Device:
        """Return a GPU with all processes that use it: those that NVML reports, and those that have its device node open."""
        device = self._read(uuid)
        found = {each.pid: each for each in add_pods(self._system, device.processes)}
        found |= {each.pid: each for each in find_located_users(self._system, self.device_nodes(device))}
        return replace(device, processes=tuple(found[pid] for pid in sorted(found)))

    def _persistent(self, uuids: Sequence[str]) -> list[str]:
        """Return the GPUs whose persistence mode is on and can be switched off."""
        found = []
        for uuid in uuids:
            with contextlib.suppress(AcceleratorError):
                found += [uuid] if nvml_settings.is_disablable(self.knobs(uuid, [PERSISTENCE])) else []
        return found

    def _last_read(self, uuids: Iterable[str]) -> list[Device]:
        """Return the GPUs as last read, without those that were never read."""
        return [device for uuid in uuids if (device := self._boards.last_device(uuid)) is not None]

    def reset_holders(self, uuids: Sequence[str], store: str) -> tuple[Process, ...]:
        """Return the other processes that would prevent a reset of these GPUs, by their open device nodes. Changes nothing.

        The node driver is left out: it has its ``store`` open, and closes NVML for a reset. So is the persistence daemon if
        only it has the GPUs open, and persistence mode can be switched off.
        """
        nodes = [node for device in self._last_read(uuids) for node in self.device_nodes(device)]
        found = find_located_users(self._system, nodes)
        drivers = find_file_users(self._system, store) if found else ()
        found = tuple(each for each in found if each.pid not in drivers)
        return () if gpu_reset.is_only_used_by_persistence_daemon(found) and self._persistent(uuids) else found

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset GPUs together with nvidia-smi.

        NVML is closed for the reset, because a GPU that a process has open cannot be reset.
        """
        # Read before the reset, because a record that cannot be read must prevent it.
        recorded = {uuid: self._gpu_settings.recorded(uuid) for uuid in uuids}
        devices = self._last_read(uuids)
        self._fabric.check_reset(devices)
        nodes = [node for device in devices for node in self.device_nodes(device)]
        persistent = self._persistent(uuids)
        with contextlib.ExitStack() as changes:
            for uuid in uuids:
                changes.enter_context(self._watch.own_change(uuid))
            self.close()
            try:
                restore_record = self._gpu_settings.persistence_restore_record(persistent)
                gpu_reset.reset(self._system, uuids, nodes, persistent, restore_record)
            finally:
                for uuid in uuids:
                    self._boards.forget(uuid)
                self.open()
            for uuid in uuids:
                self._restore_settings(uuid, recorded[uuid])

    def choose_id(self, device: Device, placement: Placement, taken: Collection[int] = ()) -> int | None:
        """Return None, because the driver assigns the IDs of GPU instances."""

    def knobs(self, uuid: str, names: Collection[str]) -> Mapping[str, Knob]:
        """Return the named settings that the GPU supports."""

        def read() -> Mapping[str, Knob]:
            mig = self._read(uuid).partitioning.enabled
            if self._boards.detached_device(uuid) is not None:
                return nvml_settings.settings_while_detached(names)
            return self._gpu_settings.read(self._boards.board(uuid), names, mig=mig)

        return self._lanes.run(uuid, read, self._deadlines.scan, doing=f"Reading the settings of GPU {uuid}")

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        """Set settings of a GPU. None means the value that the node has set, or else the default of the GPU."""

        def change() -> None:
            self._read(uuid)
            if self._boards.detached_device(uuid) is not None and set(values) <= nvml_settings.WHILE_DETACHED:
                return
            self._gpu_settings.set(self._boards.board(uuid), values)

        self._lanes.run(uuid, change, self._deadlines.change, doing=f"Setting {', '.join(values)} of GPU {uuid}")

    def detach(self, uuid: str, action: Callable[[], None]) -> None:
        """Release a GPU and call ``action``, which binds it to another driver.

        NVML is closed during this, because it keeps every queried GPU open.
        """
        with self._scan_lock:
            device = self._lanes.run(uuid, partial(self._read, uuid), self._deadlines.scan, doing=f"Reading GPU {uuid}")
            if self._boards.detached_device(uuid) is not None:
                action()
                return

            def detach() -> None:
                action()
                self._boards.add_detached(device)

            self._run_while_closed(uuid, detach, f"Binding GPU {uuid} to another driver")

    def attach(self, uuid: str, action: Callable[[], None]) -> None:
        """Call ``action``, which binds a GPU to NVIDIA's driver, and verify that NVML lists the GPU.

        If NVIDIA's driver is not loaded, only ``action`` is called.
        """
        with self._scan_lock:
            if self._boards.detached_device(uuid) is None:
                action()
                return
            attach = partial(self._boards.attach, uuid, action)
            try:
                self._run_while_closed(uuid, attach, f"Binding GPU {uuid} to NVIDIA's driver")
            except BackendUnavailable as error:
                if self._boards.detached_device(uuid) is not None or sysfs.driver_instance(self._system):
                    raise
                LOG.warning("GPU %s is bound to NVIDIA's driver again, and the driver is not loaded: %s", uuid, error)
                return
        self.device(uuid)
        self._restore_settings(uuid)

    def use_number_file(self, directory: str, *, writes: bool = False, is_referred: bool = True) -> None:
        """Assign GPU numbers from the file in the driver's state directory. See numbering.py."""
        self._boards.numbering.use(directory, writes=writes)
        self._common_edits.creates_nodes = writes
        self._restores_settings = self._restores_settings or writes
        if not is_referred and not self._nvml.is_open:
            self._boards.numbering.forget_indices()

    def add_detached(self, devices: Iterable[Device]) -> None:
        """Store the facts of GPUs that were detached before this process started."""
        for device in devices:
            self._boards.add_detached(device)

    def _create(self, uuid: str, profile_id: int, placement: Placement, instance_id: int | None) -> Partition:  # noqa: ARG002
        """Create a GPU instance with the compute instance that fills it. The driver assigns the ID."""
        board, _mode = self._read_mig_mode(uuid)
        return partition.create(self._nvml, board, partial(self._read, uuid), profile_id, placement)

    def _destroy(self, uuid: str, instance_id: int) -> None:
        board, _mode = self._read_mig_mode(uuid)
        partition.destroy(self._nvml, board, partial(self._read, uuid), instance_id)
