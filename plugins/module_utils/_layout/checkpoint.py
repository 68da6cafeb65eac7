# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Checkpoints of layouts: save the partitions of a vendor's devices, and restore them exactly later. No side effects.

A device is identified by its UUID, a partition by its profile and placement. Devices assign the names and ids of partitions, and a new
partition gets new ones. A checkpoint also saves the owner of each partition. A partition of the node driver is restored only while its
claim is prepared. A partition with a layout that only its creator can create (owner foreign) is kept if it exists, and never restored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._host import change_record
from ..core.errors import AcceleratorError, NotFound, Unsupported
from ..core.model import Device, Finding, OwnedPartition, Partition
from ..core.partitioning.layout_differences import CLAIM, by_place, name_of, owner_of
from ..core.partitioning.layout_plan import ResetDevice
from ..core.partitioning.rules import STATIC, WHOLE, Match, Rule, WantedPartition
from ..core.picture.answers import FOREIGN
from ..core.store.prepared_claims import PreparedPartition
from .apply_layout import Assignment, assign


@dataclass(frozen=True)
class KeptPartition:
    """A partition as a checkpoint has it; ``claims`` held it then."""

    profile: str
    start: int
    size: int
    owner: str
    claims: tuple[str, ...]
    compute_instances: int

    def is_place_of(self, partition: Partition) -> bool:
        """Whether a partition has this profile and place."""
        return (self.profile, self.start, self.size) == (
            partition.profile,
            partition.placement.start,
            partition.placement.size,
        )

    def describe(self) -> str:
        """Name it for a person."""
        return f"{self.profile} at {self.start}:{self.size}"


@dataclass(frozen=True)
class KeptDevice:
    """A device as a checkpoint has it."""

    uuid: str
    index: int
    product: str
    pci_address: str
    enabled: bool
    partitions: tuple[KeptPartition, ...]

    def describe(self) -> str:
        """Name it for a person."""
        return f"{self.product} {self.index} ({', '.join(filter(None, (self.uuid, self.pci_address)))})"


@dataclass(frozen=True)
class Restoration:
    """The plan of a restoration: the rules, the unchanged partitions by device (``spared``), and descriptions of partitions that are left out."""

    rules: tuple[Rule, ...]
    spared: Mapping[str, tuple[OwnedPartition, ...]]
    left_out: tuple[str, ...]


def to_text(vendor: str, devices: Sequence[Device], prepared: Sequence[PreparedPartition]) -> str:
    """Return the text of a checkpoint of a vendor's devices. Equal layouts have equal texts."""
    return change_record.to_text(
        {
            "vendor": vendor,
            "devices": [
                {
                    "uuid": device.uuid,
                    "index": device.index,
                    "product": device.product,
                    "pci_address": device.pci_address,
                    "enabled": device.partitioning.enabled,
                    "partitions": [_partition(device, each, prepared) for each in by_place(device)],
                }
                for device in devices
            ],
        }
    )


def _partition(device: Device, partition: Partition, prepared: Sequence[PreparedPartition]) -> dict[str, Any]:
    owner, claims = owner_of(device, partition, prepared)
    return {
        "profile": partition.profile,
        "start": partition.placement.start,
        "size": partition.placement.size,
        "owner": owner,
        "claims": list(claims),
        "compute_instances": partition.compute_instances,
    }


def parse(text: str, path: str, vendor: str) -> tuple[KeptDevice, ...]:
    """Read a checkpoint of a vendor's devices. Raises AcceleratorError with the code damaged-record or other-vendor."""

    def made(content: Any) -> tuple[str, tuple[KeptDevice, ...]]:
        return str(content["vendor"]), tuple(_kept(each) for each in content["devices"])

    whose, kept = change_record.read(
        text, path, made, of="the devices", hint="Create a new checkpoint, or apply a layout with rules."
    )
    if whose != vendor:
        raise AcceleratorError(
            f"{path} is a checkpoint of the devices of {whose}, not of {vendor}. Nothing was changed",
            hint="Set checkpoint_file to a checkpoint that this module created.",
            code="other-vendor",
        )
    return kept


def _kept(each: Any) -> KeptDevice:
    return KeptDevice(
        str(each["uuid"]),
        int(each["index"]),
        str(each["product"]),
        str(each["pci_address"]),
        bool(each["enabled"]),
        tuple(
            KeptPartition(
                str(one["profile"]),
                int(one["start"]),
                int(one["size"]),
                str(one["owner"]),
                tuple(str(claim) for claim in one["claims"]),
                int(one["compute_instances"]),
            )
            for one in each["partitions"]
        ),
    )


def unrestorable(devices: Sequence[Device]) -> list[str]:
    """Return descriptions of the partitions and modes that a checkpoint of these devices could not restore after a change."""
    by_hand = [
        f"{name_of(device, each)}: only who made it can make it again"
        for device in devices
        for each in by_place(device)
        if not each.uuid
    ]
    pending = [
        f"{device.describe()}: a change of its mode waits for a reset, and the checkpoint has the mode of this moment"
        for device in devices
        if device.partitioning.pending != device.partitioning.enabled
    ]
    return by_hand + pending


def restoration(
    kept: Sequence[KeptDevice],
    devices: Sequence[Device],
    faulty: Sequence[Finding],
    prepared: Sequence[PreparedPartition],
    *,
    leave_out_foreign: bool = False,
) -> Restoration:
    """Return the plan that restores a checkpoint on the present devices.

    Raises NotFound with the code device-missing for a missing device, AcceleratorError with the code unread for a device that cannot
    be read, and Unsupported with the code foreign-partition for a partition that only its creator can create again.
    """
    here = {device.uuid: device for device in devices}
    rules: list[Rule] = []
    spared: dict[str, tuple[OwnedPartition, ...]] = {}
    left_out: list[str] = []
    foreign: list[str] = []
    for one in kept:
        device = here.get(one.uuid) or _refuse_missing(one, devices, faulty)
        wanted: list[WantedPartition] = []
        stays: list[Partition] = []
        for each in one.partitions:
            there = [partition for partition in device.partitions if each.is_place_of(partition)]
            if each.owner == FOREIGN:
                same = [partition for partition in there if _is_same_by_hand(each, partition)]
                stays += same
                if not same:
                    foreign.append(f"{each.describe()} on {one.describe()}")
            elif each.owner == CLAIM and not _is_prepared(device, each, prepared):
                left_out.append(
                    f"{each.describe()} on {one.describe()} was made for {', '.join(each.claims)}, which is not prepared any more"
                )
            else:
                wanted.append(WantedPartition(each.profile, 1, each.start))
        spared[one.uuid] = tuple(partition.key for partition in stays)
        rules.append(Rule(Match(uuid=(one.uuid,)), STATIC if one.enabled else WHOLE, tuple(wanted)))
    if foreign and not leave_out_foreign:
        raise Unsupported(
            f"The checkpoint has partitions that were made by hand and do not exist any more: {'; '.join(foreign)}. Nothing was changed",
            hint="Create the same partitions again and rerun this, or set on_foreign to leave_out.",
            code="foreign-partition",
        )
    return Restoration(
        tuple(rules), spared, (*left_out, *(f"{each} was made by hand and cannot be made again" for each in foreign))
    )


def _is_same_by_hand(kept: KeptPartition, partition: Partition) -> bool:
    return not partition.uuid and partition.compute_instances == kept.compute_instances


def _is_prepared(device: Device, kept: KeptPartition, prepared: Sequence[PreparedPartition]) -> bool:
    return any(
        each.device_uuid == device.uuid
        and each.created
        and each.claim in kept.claims
        and each.placement is not None
        and (each.placement.start, each.placement.size) == (kept.start, kept.size)
        for each in prepared
    )


def _refuse_missing(one: KeptDevice, devices: Sequence[Device], faulty: Sequence[Finding]) -> Device:
    for finding in faulty:
        # One that was never read has no UUID, and is known by its number alone.
        if finding.uuid == one.uuid or (not finding.uuid and finding.index == one.index):
            raise AcceleratorError(
                f"The checkpoint has {one.describe()}, which cannot be read: {finding.fault}. Nothing was changed",
                hint="Repair the device, or apply a layout with rules for the others.",
                code="unread",
            )
    instead = next((each for each in devices if one.pci_address and each.pci_address == one.pci_address), None)
    raise NotFound(
        f"The checkpoint has {one.describe()}, which is not there"
        + (f"; at its PCI address is {instead.describe()}" if instead is not None else "")
        + ". Nothing was changed",
        hint="Create a new checkpoint of the present devices, or apply a layout with rules.",
        code="device-missing",
    )


def assign_restoration(
    devices: Sequence[Device], found: Restoration, prepared: Sequence[PreparedPartition]
) -> tuple[tuple[Assignment, ...], tuple[AcceleratorError, ...]]:
    """Return the result of ``assign`` without changes to spared partitions. A reset that would remove a spared partition is an error."""
    here = {device.uuid: device for device in devices}
    assigned, errors = assign([_without(device, found.spared) for device in devices], found.rules, prepared)
    refused = list(errors)
    for one in assigned:
        reset = {uuid for step in one.plan.steps if isinstance(step, ResetDevice) for uuid in step.device_uuids}
        lost = [here[uuid].describe() for uuid in sorted(reset) if found.spared.get(uuid)]
        if lost:
            refused.append(
                Unsupported(
                    f"{one.device.describe()} has to be reset, which would take partitions along that were made by hand on "
                    f"{', '.join(lost)}. Nothing was changed",
                    hint="Only who made them can make them again. Destroy them first, and set on_foreign to leave_out.",
                    code="foreign-partition",
                )
            )
    return tuple(replace(one, device=here[one.device.uuid]) for one in assigned), tuple(refused)


def _without(device: Device, spared: Mapping[str, Collection[OwnedPartition]]) -> Device:
    """Return the device without its spared partitions. They do not conflict with the other partitions of the checkpoint."""
    stay = spared.get(device.uuid, ())
    if not stay:
        return device
    return replace(device, partitions=tuple(each for each in device.partitions if each.key not in stay))
