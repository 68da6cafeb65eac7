# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The hands: carries out plans on hardware and CDI files. Every function blocks and is called on a thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Callable

from ..core.backend import Backend
from ..core.cdi import ContainerEdits, build_spec, list_specs, remove_spec, spec_path, write_spec
from ..core.errors import AcceleratorError, BackendUnavailable, DeviceFaulty, InUse, NotFound, NotPermitted
from ..core.model import Device, Partition
from ..core.system import System
from ..logs import fields
from .debts import Debt
from .plan import Destruction, ModeChange, PreparePlan, UndoPlan
from .records import ANNOTATION, DEVICE, ClaimRecord, DeviceRecord

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Facts:
    """Fresh facts of devices by UUID, and what keeps others from telling theirs; one that is not there is in neither."""

    devices: Mapping[str, Device]
    faults: Mapping[str, str]


@dataclass(frozen=True)
class Undone:
    """What became of an undo plan: the devices on which partitioning went off, and the partitions that are owed now."""

    switched_off: tuple[str, ...]
    debts: tuple[Debt, ...]


@dataclass(frozen=True)
class Hands:
    """One vendor's hardware and the CDI folder. ``reached`` is told each stage that is complete."""

    backend: Backend
    system: System
    cdi_directory: str
    reached: Callable[[str], None]

    def facts(self, uuids: Iterable[str]) -> Facts:
        """Return fresh facts of the devices named. Raises BackendUnavailable."""
        found: dict[str, Device] = {}
        faults: dict[str, str] = {}
        for uuid in uuids:
            try:
                found[uuid] = self.backend.device(uuid)
            except NotFound:
                continue
            except DeviceFaulty as error:
                faults[uuid] = str(error)
        return Facts(found, faults)

    def carry_out(self, plan: PreparePlan) -> tuple[ClaimRecord, dict[str, Partition]]:
        """Do the hardware's part of a plan; return the completed record and the partitions made, by CDI name.

        On failure everything that this call made is destroyed again and the error is raised; what could not be
        destroyed is in the log, and in the record that says the claim is being prepared.
        """
        made: list[tuple[DeviceRecord, Partition]] = []
        changed: list[ModeChange] = []
        if plan.record.devices:
            self.backend.driver_edits()  # what no container can do without is missed before hardware is changed
        try:
            self._destroy(plan.destructions)
            for change in plan.mode_changes:
                self.backend.set_partitioning(change.device_uuid, change.enabled)
                changed.append(change)
                self.reached("partitioning-changed")
            for device in plan.creates:
                partition = self._create(device)
                made.append((device, partition))
                self.reached("partition-created")
        except BaseException:
            self._take_back(made, changed)
            raise
        partitions = {device.cdi_name: partition for device, partition in made}
        return replace(
            plan.record, devices=tuple(_with(device, partitions) for device in plan.record.devices)
        ), partitions

    def write_cdi(self, record: ClaimRecord, facts: Mapping[str, Device], made: Mapping[str, Partition]) -> None:
        """Write the claim's CDI file from its completed record. A claim without devices has none.

        ``facts`` are from before partitions were made; ``made`` are those, by CDI name.
        """
        if not record.devices:
            return
        spec = self.cdi_spec(record, facts, made)
        write_spec(self.system, self.cdi_path(record.uid), spec)
        self.reached("cdi-written")

    def cdi_spec(
        self, record: ClaimRecord, facts: Mapping[str, Device], made: Mapping[str, Partition]
    ) -> dict[str, Any]:
        """Return the claim's CDI file as data."""
        edits: dict[str, ContainerEdits] = {}
        for held in record.devices:
            device = facts[held.device_uuid]
            partition = None if held.kind == DEVICE else made.get(held.cdi_name) or _existing(held, device)
            edits[held.cdi_name] = self.backend.device_edits(device, partition)
        return build_spec(
            self.backend.cdi_kind,
            edits,
            common=self.backend.driver_edits(),
            annotations={ANNOTATION: record.to_document()},
        )

    def undo(self, plan: UndoPlan) -> Undone:
        """Destroy what is ours and switch partitioning off where that is due.

        A partition that its device does not let go of, because of a fault, is owed. Raises InUse with the pids for one
        that is in use, NotPermitted and BackendUnavailable.
        """
        debts = list(plan.debts)
        for destruction in plan.destructions:
            try:
                self._destroy([destruction])
            except (InUse, NotPermitted, BackendUnavailable):
                raise
            except AcceleratorError as error:
                LOG.warning("%s is destroyed later: %s", destruction.description, error)
                debts.append(destruction.debt)
        owing = {debt.device_uuid for debt in debts}
        switched_off = []
        for change in plan.mode_changes:
            if change.device_uuid in owing:
                continue
            try:
                self.backend.set_partitioning(change.device_uuid, change.enabled)
                self.reached("partitioning-restored")
            except AcceleratorError as error:
                LOG.warning("partitioning stays on: %s", error, extra=fields(device=change.device_uuid))
            else:
                switched_off.append(change.device_uuid)
        return Undone(tuple(switched_off), tuple(debts))

    def remove_cdi(self, claim_uid: str) -> None:
        """Remove a claim's CDI file; it need not be there."""
        remove_spec(self.system, self.cdi_path(claim_uid))
        self.reached("cdi-removed")

    def cdi_uids(self) -> tuple[str, ...]:
        """Return the UIDs of the claims that have a CDI file."""
        return list_specs(self.system, self.cdi_directory, self.backend.cdi_kind)

    def cdi_path(self, claim_uid: str) -> str:
        """Return where a claim's CDI file is."""
        return spec_path(self.cdi_directory, self.backend.cdi_kind, claim_uid)

    def _create(self, device: DeviceRecord) -> Partition:
        placement, profile_id = device.placement, device.profile_id
        if placement is None or profile_id is None:
            raise AcceleratorError(f"{device.name} has no placement, so no partition can be made for it")
        return self.backend.create_partition(device.device_uuid, profile_id, placement)

    def _destroy(self, destructions: Iterable[Destruction]) -> None:
        for destruction in destructions:
            try:
                self.backend.destroy_partition(destruction.device_uuid, destruction.instance_id)
            except NotFound:
                LOG.info("already gone: %s", destruction.description)
            self.reached("partition-destroyed")

    def _take_back(self, made: list[tuple[DeviceRecord, Partition]], changed: list[ModeChange]) -> None:
        for device, partition in reversed(made):
            try:
                self.backend.destroy_partition(device.device_uuid, partition.instance_id)
            except AcceleratorError:
                LOG.exception("a partition made for a claim that failed is left: %s", partition.describe())
        for change in reversed(changed):
            try:
                self.backend.set_partitioning(change.device_uuid, not change.enabled)
            except AcceleratorError as error:
                LOG.warning("partitioning could not be set back: %s", error, extra=fields(device=change.device_uuid))


def _with(device: DeviceRecord, made: Mapping[str, Partition]) -> DeviceRecord:
    partition = made.get(device.cdi_name)
    if partition is None:
        return device
    return replace(device, partition_uuid=partition.uuid, instance_id=partition.instance_id)


def _existing(held: DeviceRecord, device: Device) -> Partition:
    for partition in device.partitions:
        if partition.key == held.key and partition.uuid == held.partition_uuid:
            return partition
    raise NotFound(f"Partition {held.name} ({held.partition_uuid}) is not on {device.describe()}")
