# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA's implementation of the backend protocol: discovery, changes, published devices, and container edits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, TypeVar

from ...discovery.device_workers import Call
from ...discovery.scan import DeviceScan, findings, gather
from ...dra.composite_devices import Grouping
from ...dra.node_labels import NO_PARTITIONS, UNKNOWN_MACHINE, MachineFacts
from ...errors import AcceleratorError, BackendUnavailable, DeviceFaulty, InUse, NotFound
from ...host import pci
from ...host.cdi import ContainerEdits
from ...host.companions import Companion, SharedDevice
from ...host.kubelet_pods import located
from ...host.passthrough import holders, users_of_file
from ...host.system import System
from ...model import (
    Arranged,
    AttributeValue,
    CounterSet,
    Device,
    Fault,
    Finding,
    Health,
    Notice,
    Offer,
    OwnedPartition,
    Partition,
    Partitioning,
    Placement,
    Process,
    Surroundings,
)
from ...settings.knobs import PERSISTENCE, Knob
from ...settings.settings_record import record_path
from ...telemetry import Telemetry
from ..lane_backend import LIBRARY, LaneBackend
from . import discover, mps, offers, partition, settings, sysfs, telemetry
from .board_facts import BoardFacts
from .boards import Boards
from .configs import CONFIG_KINDS, DEVICE_CLASSES, DEVICE_TYPES
from .container import container_edits, driver_files
from .container.common_edits import CommonEdits
from .fabric.fabric_calls import FabricCalls
from .health import faults
from .health.watch import Watch
from .knobs import Knobs
from .nvml import Nvml
from .settings_backup import SettingsBackup
from .vendor import FACTS, labels, resource_name

Answer = TypeVar("Answer")
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deadlines:
    """The deadlines of calls in seconds.

    The first scan of a GPU can have to wake it, and a change of its MIG mode can reset it. A change of a GPU's kernel
    driver closes NVML and opens it again.
    """

    library: float = 60.0
    scan: float = 10.0
    full_scan: float = 30.0
    change: float = 60.0
    switch: float = 120.0
    fabric: float = 60.0


class NvidiaBackend(LaneBackend):
    """The GPUs of this host. Safe for threads. Each GPU has a lane, so calls to different GPUs run in parallel.

    The fixed facts of a board (names, profiles, placements, handle) are read once and cached until the GPU is reset or
    replaced, so that a scan of a GPU needs few calls.
    """

    facts = FACTS
    vendor = facts.word
    driver_name = facts.driver_name
    cdi_kind = facts.cdi_kind
    config_kinds = CONFIG_KINDS
    device_classes = DEVICE_CLASSES
    device_types = DEVICE_TYPES
    partitions_outlive_boot = False
    has_companions = True
    grouping: Grouping | None = None
    arranged: Arranged | None = None

    def __init__(self, system: System | None = None, deadlines: Deadlines | None = None, record: str = "") -> None:
        self._deadlines = deadlines or Deadlines()
        super().__init__(self._deadlines, "GPU")
        self._system = system or System()
        self._nvml = Nvml()
        self._knobs = Knobs(self._nvml, self._system, record or record_path(self.vendor))
        self._watch = Watch(self._nvml, self._lanes)
        self._boards = Boards(self._nvml, self._system, self._watch)
        self._settings = SettingsBackup(self._knobs, self._lanes, self._boards, self._settled_mode)
        self._restores_settings = False  # True from the second opening of NVML on; in the node driver from the first
        self._lock = threading.Lock()
        # Held during a scan of all GPUs, and while a GPU is detached or attached, so that a scan does not see an
        # intermediate state.
        self._steady = threading.Lock()
        self._count: int | None = None
        self._surroundings = Surroundings((), frozenset())
        self._common_edits = CommonEdits(self._system)
        self._fabric = FabricCalls(self._system, self._lanes, self._deadlines.fabric)

    def is_there(self) -> bool:
        """Return whether a GPU is on the PCI bus or in the driver's files."""
        return bool(sysfs.listed(self._system) or sysfs.gpus_on_the_bus(self._system))

    def open(self) -> None:
        """Load NVML and read the driver's version. Raises BackendUnavailable with the reason.

        If this process closed NVML before, settings that GPUs have lost since then are set again.
        """
        was_open = self._nvml.is_open
        self._of_library(self._open, "Opening NVML")
        if self._restores_settings and not was_open:
            self._settings.restore(self._deadlines.change)
        self._restores_settings = True

    def close(self) -> None:
        """Wait for changes in progress, then shut NVML down and release all handles."""
        self._watch.close()
        self._lanes.rest(self._deadlines.change)
        self._keep_settings()
        self._of_library(self._close, "Closing NVML")
        self._fabric.close()
        self._lanes.close()

    @property
    def driver_version(self) -> str:
        """The version of the loaded driver, in the driver's spelling."""
        return self._boards.driver.driver_version

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        """Scan all GPUs in parallel and return the facts or the fault of each, ordered by index.

        With ``patience``, a GPU without known facts that has not answered after that many seconds is reported as
        awaited.
        """
        self._fabric.refresh(self._deadlines.scan)
        with self._steady:
            found = tuple(self._fabric.with_attributes(finding) for finding in self._discover(full, patience))
            self._boards.numbering.write()
            return found

    def _discover(self, full: bool, patience: float | None) -> tuple[Finding, ...]:
        count = self._of_library(
            lambda: int(self._nvml.call("nvmlDeviceGetCount", doing="Counting GPUs")), "Counting GPUs"
        )
        away = self._boards.away()
        with self._lock:
            is_other = count != self._count
            by_index = full or is_other
            self._count = count
        deadline = self._deadlines.full_scan if by_index else self._deadlines.scan
        begun = time.monotonic()
        calls: dict[int, Call[Device]] = {}
        for position, index in enumerate(self._boards.indices(count, is_other)):
            scan_board = partial(self._boards.scan, position, index, by_index, full)
            key = self._boards.uuid_at(index) or f"index {index}"
            calls[index] = self._lanes.submit(key, scan_board, deadline, doing=f"Scanning GPU {index}")
        scan = gather(calls, self._last_at, faults.faulty, begun=begun, deadline=deadline, patience=patience)
        found, gone = findings(
            DeviceScan({**scan.found, **away}, scan.silent),
            self._boards.known(),
            why_missing=self._why_missing,
            sign=faults.sign,
            names=partial(sysfs.called, self._system),
        )
        for uuid in gone:
            self._boards.forget(uuid, taken_away=True)
        former, self._ill = self._ill, frozenset(finding.uuid for finding in found if finding.fault is not None)
        for uuid in former - self._ill:
            self._watch.forget(uuid)  # its registration for events may have failed
        return tuple(self._on_the_bus(finding) if finding.uuid in away else finding for finding in found)

    def _on_the_bus(self, finding: Finding) -> Finding:
        """Return the finding of a GPU that is bound to another driver: its last facts, or a fault if it is not on the bus any more."""
        device = finding.device
        if device is None or self._system.exists(f"{pci.DEVICES}/{device.pci_address}"):
            return finding
        lost = DeviceFaulty(
            f"{device.pci_address}, which is passed through, is not on the PCI bus any more", code=faults.GPU_LOST
        )
        ill = replace(device, health=Health((faults.sign(lost),)))
        return replace(finding, device=ill, fault=Fault(lost.code, str(lost)))

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait up to ``seconds`` for an error or a change of partitioning that a GPU reports, and return the events."""
        self._refuse_closed()

        def boards() -> list[BoardFacts]:
            return [board for board in self._boards.kept() if board.uuid not in self._ill]

        return self._watch.wait(boards, seconds)

    def surroundings(self) -> Surroundings:
        """Return version and instance of the loaded driver, and its GPUs, from the kernel's files."""
        if not self._steady.acquire(blocking=False):
            return self._surroundings  # a GPU is being detached or attached, or a scan is running
        try:
            away = frozenset(gpu.pci_address for gpu in self._boards.away().values())
            listed = sysfs.listed(self._system)
            self._surroundings = Surroundings(sysfs.loaded(self._system), listed | away, self._boards.returned)
            return self._surroundings
        finally:
            self._steady.release()

    def renew(self) -> None:
        """Close NVML and open it again, because it knows only the GPUs that existed when it was opened."""
        with self._steady:
            try:
                self._without_library(LIBRARY, lambda: None, "Reopening NVML")
                self._boards.begin(discover.read_driver(self._nvml))
            except BackendUnavailable:
                raise
            except AcceleratorError as error:
                raise BackendUnavailable(error.message, hint=error.hint) from error

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Enable or disable MIG mode. On GPUs that need a reset the change stays pending."""

        def change() -> None:
            noted = self._knobs.noted(uuid)  # before the change, because a record that cannot be read must prevent it
            board, now = self._settled(uuid)
            if self._set_mode(board, now, enabled):
                self._boards.read_minor(board)
                self._set_again(uuid, noted)

        self._change(uuid, change, f"{'Enabling' if enabled else 'Disabling'} MIG mode of GPU {uuid}")

    def _set_mode(self, board: BoardFacts, now: Partitioning, enabled: bool) -> bool:
        """Enable or disable MIG mode. If only the persistence daemon has the GPU open, retry without persistence mode."""
        set_mode = partial(partition.set_mode, self._nvml, board, now, partial(self._with_holders, board.uuid), enabled)
        try:
            return set_mode()
        except InUse:
            device = self._with_holders(board.uuid)
            if device.partitions or not partition.is_only_used_by_persistence_daemon(device.processes):
                raise
            if not self._knobs.is_persistent(board):
                raise
        with self._knobs.without_persistence(board):
            with contextlib.suppress(InUse):  # the next attempt names the processes
                partition.await_closed(self._system, self.device_nodes(device), f"GPU {board.uuid}")
            return set_mode()

    def _with_holders(self, uuid: str) -> Device:
        """Return a GPU with all processes that use it: those that NVML reports, and those that have its device node open."""
        device = self._read(uuid)
        found = {each.pid: each for each in located(self._system, device.processes)}
        found |= {each.pid: each for each in holders(self._system, self.device_nodes(device))}
        return replace(device, processes=tuple(found[pid] for pid in sorted(found)))

    def _persistent(self, uuids: Sequence[str]) -> list[str]:
        """Return the GPUs whose persistence mode is on and can be switched off."""
        found = []
        for uuid in uuids:
            with contextlib.suppress(AcceleratorError):
                knob = self.knobs(uuid, [PERSISTENCE]).get(PERSISTENCE)
                found += [uuid] if knob is not None and knob.value and not knob.blocked else []
        return found

    def _known(self, uuids: Iterable[str]) -> list[Device]:
        """Return the GPUs as last read, without those that were never read."""
        return [device for uuid in uuids if (device := self._boards.last(uuid)) is not None]

    def reset_holders(self, uuids: Sequence[str], store: str) -> tuple[Process, ...]:
        """Return the other processes that would prevent a reset of these GPUs, by their open device nodes. Changes nothing.

        The node driver is left out: it has its ``store`` open, and closes NVML for a reset. So is the persistence daemon if
        only it has the GPUs open, and persistence mode can be switched off.
        """
        nodes = [node for device in self._known(uuids) for node in self.device_nodes(device)]
        found = holders(self._system, nodes)
        drivers = users_of_file(self._system, store) if found else ()
        found = tuple(each for each in found if each.pid not in drivers)
        return () if partition.is_only_used_by_persistence_daemon(found) and self._persistent(uuids) else found

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset GPUs together with nvidia-smi.

        NVML is closed for the reset, because a GPU that a process has open cannot be reset.
        """
        noted = {
            uuid: self._knobs.noted(uuid) for uuid in uuids
        }  # before the reset, because a record that cannot be read must prevent it
        known = self._known(uuids)
        self._fabric.check_reset(known)
        nodes = [node for device in known for node in self.device_nodes(device)]
        persistent = self._persistent(uuids)
        with contextlib.ExitStack() as changes:
            for uuid in uuids:
                changes.enter_context(self._watch.own_change(uuid))
            self.close()
            try:
                restore_record = self._knobs.persistence_restore_record(persistent)
                partition.reset(self._system, uuids, nodes, persistent, restore_record)
            finally:
                for uuid in uuids:
                    self._boards.forget(uuid)
                self.open()
            for uuid in uuids:
                self._after_loss(uuid, noted[uuid])

    def choose_id(self, device: Device, placement: Placement, taken: Collection[int] = ()) -> int | None:
        """Return None, because the driver assigns the IDs of GPU instances."""

    def knobs(self, uuid: str, names: Collection[str]) -> Mapping[str, Knob]:
        """Return the named settings that the GPU supports."""

        def read() -> Mapping[str, Knob]:
            mig = self._read(uuid).partitioning.enabled
            if self._boards.is_away(uuid) is not None:
                return settings.of_none(names)
            return self._knobs.read(self._boards.board(uuid), names, mig=mig)

        return self._lanes.run(uuid, read, self._deadlines.scan, doing=f"Reading the settings of GPU {uuid}")

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        """Set settings of a GPU. None means the value that the node has set, or else the default of the GPU."""

        def change() -> None:
            self._read(uuid)
            if self._boards.is_away(uuid) is not None and set(values) <= settings.WHILE_AWAY:
                return
            self._knobs.set(self._boards.board(uuid), values)

        self._lanes.run(uuid, change, self._deadlines.change, doing=f"Setting {', '.join(values)} of GPU {uuid}")

    def telemetry(self, seconds: float, partitions: Collection[str] = ()) -> tuple[Telemetry, ...]:
        """Return the telemetry of the GPUs and of these MIG devices (UUIDs). GPUs that are faulty or busy are left out."""

        def read(board: BoardFacts) -> tuple[Telemetry, ...]:
            last = self._boards.last(board.uuid)
            there = last.partitions if last is not None else ()
            return telemetry.read(self._nvml, board, [each for each in there if each.uuid in partitions])

        return self._gather_telemetry(seconds, self._boards.kept(), read)

    def detach(self, uuid: str, action: Callable[[], None]) -> None:
        """Release a GPU and call ``action``, which binds it to another driver.

        NVML is closed during this, because it keeps every queried GPU open.
        """
        with self._steady:
            device = self._lanes.run(uuid, partial(self._read, uuid), self._deadlines.scan, doing=f"Reading GPU {uuid}")
            if self._boards.is_away(uuid) is not None:
                action()
                return

            def leave() -> None:
                action()
                self._boards.send_away(device)

            self._without_library(uuid, leave, f"Giving GPU {uuid} to another driver")

    def attach(self, uuid: str, action: Callable[[], None]) -> None:
        """Call ``action``, which binds a GPU to NVIDIA's driver, and verify that NVML lists the GPU.

        If NVIDIA's driver is not loaded, only ``action`` is called.
        """
        with self._steady:
            if self._boards.is_away(uuid) is None:
                action()
                return
            take = partial(self._boards.welcome, uuid, action)
            try:
                self._without_library(uuid, take, f"Taking GPU {uuid} back from another driver")
            except BackendUnavailable as error:
                if self._boards.is_away(uuid) is not None or sysfs.loaded(self._system):
                    raise
                LOG.warning("GPU %s is bound to NVIDIA's driver again, and the driver is not loaded: %s", uuid, error)
                return
        self.device(uuid)
        self._after_loss(uuid)

    def number_by(self, directory: str, *, writes: bool = False, is_referred: bool = True) -> None:
        """Assign GPU numbers from the file in the driver's state directory. See numbering.py."""
        self._boards.numbering.use(directory, writes=writes)
        self._common_edits.creates_nodes = writes
        self._restores_settings = self._restores_settings or writes
        if not is_referred and not self._nvml.is_open:
            self._boards.numbering.forget()

    def remember(self, devices: Iterable[Device]) -> None:
        """Store the facts of GPUs that were detached before this process started."""
        for device in devices:
            self._boards.send_away(device)

    def _without_library(self, uuid: str, action: Callable[[], None], doing: str) -> None:
        """Call ``action`` on a GPU's lane while NVML is closed. Calls for other GPUs wait until NVML is open again."""

        def act() -> None:
            with self._lanes.alone(uuid, self._deadlines.scan):
                self._boards.let_go()
                self._nvml.close()
                try:
                    action()
                finally:
                    self._nvml.open()

        self._watch.close()
        self._keep_settings()
        try:
            self._lanes.run(uuid, act, self._deadlines.switch, doing=doing)
        finally:
            self._watch.begin()
            if self._nvml.is_open:
                self._settings.restore(self._deadlines.change)

    def _keep_settings(self) -> None:
        if self._nvml.is_open:
            self._settings.keep(self._ill, self._deadlines.scan)

    def _settled_mode(self, uuid: str) -> tuple[BoardFacts, bool]:
        board, now = self._settled(uuid)
        return board, now.enabled

    @property
    def fabric_partitions(self) -> FabricCalls:
        """The partitions of the NVSwitch fabric."""
        return self._fabric

    def device_nodes(self, device: Device) -> tuple[str, ...]:
        """Return the path of the GPU's current device node."""
        return (f"/dev/nvidia{self._boards.with_present_minor(device).minor}",)

    def companions(self, claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
        """Return the MPS daemons for the shared devices of a claim."""
        return mps.companions(claim_uid, devices)

    def refuse_without_companions(self) -> None:
        """Raise AcceleratorError if MPS is not installed."""
        mps.refuse_without_tool(self._system)

    def companion_edits(self, companion: Companion) -> ContainerEdits:
        """Return the container edits for an MPS daemon."""
        return mps.edits(companion)

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        """Return the offers of a GPU, with the fabric mode at the last scan."""
        return self._fabric.offered(device, offers.offers(device, dynamic, owned, passthrough))

    def labels(
        self, devices: Sequence[Device], machine: MachineFacts = UNKNOWN_MACHINE, strategy: str = NO_PARTITIONS
    ) -> Mapping[str, str]:
        """Return the Node labels for these GPUs."""
        return labels(devices, machine, strategy)

    def resource_name(self, device: Device, profile: str | None) -> str:
        """Return the extended resource name of a whole GPU, or of a MIG device with this profile."""
        return resource_name(device, profile)

    def parts(self, device: Device) -> Mapping[str, int]:
        """Return the capacities of a whole GPU that claims can share."""
        return offers.parts(device)

    def counter_set(self, device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
        """Return the counter set of a GPU's dynamic offers."""
        return offers.counter_set(device, owned)

    def unrestored(self) -> str:
        """Return "", because NVIDIA's driver restores no MIG device after a boot."""
        return ""

    def driver_edits(self) -> ContainerEdits:
        """Return the container edits that all GPUs share, for the files that exist now. Raises BackendUnavailable."""
        found = self._common_edits.current(self.driver_version)
        if not self._fabric.is_used:
            return found
        # A client of the fabric manager could activate and deactivate all partitions.
        kept = tuple(each for each in found.mounts if each.host_path != driver_files.FABRIC_MANAGER_SOCKET)
        return replace(found, mounts=kept)

    def settle(self, seconds: float) -> None:
        """Wait up to ``seconds`` until a running nvidia-ctk has answered."""
        self._common_edits.settle(seconds)

    def machine_edits(self) -> ContainerEdits:
        """Return the container edits for the container of a virtual machine."""
        return container_edits.NOTHING

    def device_attributes(
        self, device: Device, partition: Partition | None, is_for_machine: bool = False
    ) -> Mapping[str, AttributeValue]:
        """Return the attributes of a GPU, for a virtual machine or not, or of an existing MIG device."""
        device = replace(device, whole_attributes=self._fabric.attributes(device))
        return offers.attributes_for_machine(device) if is_for_machine else offers.attributes_of(device, partition)

    def device_edits(self, device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
        """Return the container edits of one GPU or one MIG device, with its current device node."""
        boards = self._boards
        present = boards.with_present_minor(device)
        return container_edits.device_edits(self._system, present, partition, monitoring, boards.capabilities)

    def _open(self) -> None:
        self._nvml.open()
        self._boards.begin(discover.read_driver(self._nvml))
        self._watch.begin()

    def _close(self) -> None:
        self._boards.end()
        with self._lock:
            self._count = None
        self._nvml.close()

    def _refuse_closed(self) -> None:
        if not self._nvml.is_open:
            raise BackendUnavailable("NVML is not open", hint="Open the backend first.")

    def _own_change(self, uuid: str) -> AbstractContextManager[object]:
        return self._watch.own_change(uuid)

    def _create(self, uuid: str, profile_id: int, placement: Placement, instance_id: int | None) -> Partition:  # noqa: ARG002
        """Create a GPU instance with the compute instance that fills it. The driver assigns the ID."""
        board, _now = self._settled(uuid)
        return partition.create(self._nvml, board, partial(self._read, uuid), profile_id, placement)

    def _destroy(self, uuid: str, instance_id: int) -> None:
        board, _now = self._settled(uuid)
        partition.destroy(self._nvml, board, partial(self._read, uuid), instance_id)

    def _set_again(self, uuid: str, noted: Mapping[str, Any]) -> None:
        """Set the node's values on a GPU again, after a change that resets settings. Runs on the GPU's lane."""
        if noted:
            board, now = self._settled(uuid)
            self._knobs.set_again(board, noted, mig=now.enabled)

    def _after_loss(self, uuid: str, noted: Mapping[str, Any] | None = None) -> None:
        """Set the node's values on a GPU again. Without ``noted``, they are read from the record."""

        def set_again() -> None:
            self._set_again(uuid, self._knobs.noted(uuid) if noted is None else noted)

        doing = f"Setting again what GPU {uuid} had"
        try:
            self._lanes.run(uuid, set_again, self._deadlines.change, doing=doing)
        except AcceleratorError as error:  # the loss itself is complete, and scans report faults
            LOG.warning("%s: %s", doing, error)

    def _read(self, uuid: str) -> Device:
        """Read the changing facts of a GPU. Runs on its lane."""
        away = self._boards.is_away(uuid)
        return away if away is not None else self._read_or_fault(self._boards.read, uuid)

    def _settled(self, uuid: str) -> tuple[BoardFacts, Partitioning]:
        """Return the facts of a GPU and its MIG mode before a change of its partitioning. Runs on its lane."""
        return self._read_or_fault(self._boards.settle, uuid)

    @staticmethod
    def _read_or_fault(ask: Callable[[str], Answer], uuid: str) -> Answer:
        try:
            return ask(uuid)
        except (BackendUnavailable, NotFound):
            raise
        except AcceleratorError as error:
            raise faults.faulty(error) from error

    def _last_at(self, index: int) -> Device | None:
        return self._boards.last(self._boards.uuid_at(index))

    def _why_missing(self, device: Device) -> DeviceFaulty | None:
        """Return why a known GPU is missing; None for a GPU that was removed."""

        def ask() -> None:
            handle = self._nvml.call("nvmlDeviceGetHandleByUUID", device.uuid, doing=f"Finding GPU {device.uuid}")
            discover.probe(self._nvml, handle, device.uuid)

        try:
            self._lanes.run(device.uuid, ask, self._deadlines.scan, doing=f"Asking GPU {device.uuid}")
        except DeviceFaulty as error:
            return error
        except AcceleratorError:
            return None
        return None
