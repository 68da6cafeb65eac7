# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Save the partitions of a vendor's devices in a checkpoint, and plan their exact restoration. No side effects.

A checkpoint identifies a device by its UUID, and a partition by its profile and placement, because a recreated partition has another
UUID. It also contains the owner of each partition. A partition that the node driver created for a claim is restored only while this claim
is prepared. A partition that was created manually in a form that no profile has (owner foreign) is kept if it exists, but cannot be restored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._host import change_record
from ..core.errors import AcceleratorError, NotFound, Unsupported
from ..core.model import Device, Finding, OwnedPartition, Partition
from ..core.partitioning.layout_differences import CLAIM, owner_of, partition_name, partitions_by_placement
from ..core.partitioning.layout_plan import ResetDevice
from ..core.partitioning.rules import STATIC, WHOLE, Match, Rule, WantedPartition
from ..core.picture.answers import FOREIGN
from ..core.store.prepared_claims import PreparedPartition
from .apply_layout import Assignment, assign


@dataclass(frozen=True)
class SavedPartition:
    """A partition in a checkpoint. ``claims`` are the claims that held it at that time."""

    profile: str
    start: int
    size: int
    owner: str
    claims: tuple[str, ...]
    compute_instances: int

    def is_at_place_of(self, partition: Partition) -> bool:
        """Return whether a partition has this profile and placement."""
        return (self.profile, self.start, self.size) == (
            partition.profile,
            partition.placement.start,
            partition.placement.size,
        )

    def describe(self) -> str:
        """Return the profile and the placement as text."""
        return f"{self.profile} at {self.start}:{self.size}"


@dataclass(frozen=True)
class SavedDevice:
    """A device in a checkpoint."""

    uuid: str
    index: int
    product: str
    pci_address: str
    enabled: bool
    partitions: tuple[SavedPartition, ...]

    def describe(self) -> str:
        """Return the product, the index, the UUID, and the PCI address as text."""
        return f"{self.product} {self.index} ({', '.join(filter(None, (self.uuid, self.pci_address)))})"


@dataclass(frozen=True)
class Restoration:
    """The plan of a restoration: the rules, the unchanged partitions by device (``unchanged``), and descriptions of partitions that are left out."""

    rules: tuple[Rule, ...]
    unchanged: Mapping[str, tuple[OwnedPartition, ...]]
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
                    "partitions": [_partition(device, each, prepared) for each in partitions_by_placement(device)],
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


def parse(text: str, path: str, vendor: str) -> tuple[SavedDevice, ...]:
    """Read a checkpoint of a vendor's devices. Raises AcceleratorError with the code damaged-record or other-vendor."""

    def parse_content(content: Any) -> tuple[str, tuple[SavedDevice, ...]]:
        return str(content["vendor"]), tuple(_saved_device(each) for each in content["devices"])

    saved_vendor, saved = change_record.read(
        text, path, parse_content, of="the devices", hint="Create a new checkpoint, or apply a layout with rules."
    )
    if saved_vendor != vendor:
        raise AcceleratorError(
            f"{path} is a checkpoint of the devices of {saved_vendor}, not of {vendor}. Nothing was changed",
            hint="Set checkpoint_file to a checkpoint that this module created.",
            code="other-vendor",
        )
    return saved


def _saved_device(each: Any) -> SavedDevice:
    return SavedDevice(
        str(each["uuid"]),
        int(each["index"]),
        str(each["product"]),
        str(each["pci_address"]),
        bool(each["enabled"]),
        tuple(
            SavedPartition(
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
        f"{partition_name(device, each)}: it was created manually in a form that no profile has"
        for device in devices
        for each in partitions_by_placement(device)
        if not each.uuid
    ]
    pending = [
        f"{device.describe()}: a mode change is pending until a reset, and the checkpoint contains the current mode"
        for device in devices
        if device.partitioning.pending != device.partitioning.enabled
    ]
    return by_hand + pending


def restoration(
    saved: Sequence[SavedDevice],
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
    present_devices = {device.uuid: device for device in devices}
    rules: list[Rule] = []
    unchanged: dict[str, tuple[OwnedPartition, ...]] = {}
    left_out: list[str] = []
    foreign: list[str] = []
    for one in saved:
        device = present_devices.get(one.uuid) or _refuse_missing(one, devices, faulty)
        wanted: list[WantedPartition] = []
        stays: list[Partition] = []
        for each in one.partitions:
            there = [partition for partition in device.partitions if each.is_at_place_of(partition)]
            if each.owner == FOREIGN:
                same = [partition for partition in there if _is_same_by_hand(each, partition)]
                stays += same
                if not same:
                    foreign.append(f"{each.describe()} on {one.describe()}")
            elif each.owner == CLAIM and not _is_prepared(device, each, prepared):
                left_out.append(
                    f"{each.describe()} on {one.describe()} was created for the claim {', '.join(each.claims)}, which is no longer prepared"
                )
            else:
                wanted.append(WantedPartition(each.profile, 1, each.start))
        unchanged[one.uuid] = tuple(partition.key for partition in stays)
        rules.append(Rule(Match(uuid=(one.uuid,)), STATIC if one.enabled else WHOLE, tuple(wanted)))
    if foreign and not leave_out_foreign:
        raise Unsupported(
            f"The checkpoint contains manually created partitions that no longer exist: {'; '.join(foreign)}. Nothing was changed",
            hint="Create the same partitions again and run this again, or set on_foreign to leave_out.",
            code="foreign-partition",
        )
    return Restoration(
        tuple(rules),
        unchanged,
        (*left_out, *(f"{each} was created manually and cannot be restored" for each in foreign)),
    )


def _is_same_by_hand(saved: SavedPartition, partition: Partition) -> bool:
    return not partition.uuid and partition.compute_instances == saved.compute_instances


def _is_prepared(device: Device, saved: SavedPartition, prepared: Sequence[PreparedPartition]) -> bool:
    return any(
        each.device_uuid == device.uuid
        and each.created
        and each.claim in saved.claims
        and each.placement is not None
        and (each.placement.start, each.placement.size) == (saved.start, saved.size)
        for each in prepared
    )


def _refuse_missing(one: SavedDevice, devices: Sequence[Device], faulty: Sequence[Finding]) -> Device:
    for finding in faulty:
        # A device that was never read has no UUID, and only its index is known.
        if finding.uuid == one.uuid or (not finding.uuid and finding.index == one.index):
            raise AcceleratorError(
                f"The device {one.describe()} of the checkpoint cannot be read: {finding.fault}. Nothing was changed",
                hint="Repair the device, or apply a layout with rules for the other devices.",
                code="unread",
            )
    instead = next((each for each in devices if one.pci_address and each.pci_address == one.pci_address), None)
    raise NotFound(
        f"The device {one.describe()} of the checkpoint does not exist"
        + (f". Its PCI address belongs to {instead.describe()}" if instead is not None else "")
        + ". Nothing was changed",
        hint="Create a new checkpoint of the present devices, or apply a layout with rules.",
        code="device-missing",
    )


def assign_restoration(
    devices: Sequence[Device], found: Restoration, prepared: Sequence[PreparedPartition]
) -> tuple[tuple[Assignment, ...], tuple[AcceleratorError, ...]]:
    """Return the result of ``assign`` without changes to spared partitions. A reset that would remove a spared partition is an error."""
    present_devices = {device.uuid: device for device in devices}
    assigned, errors = assign([_without(device, found.unchanged) for device in devices], found.rules, prepared)
    refused = list(errors)
    for one in assigned:
        reset = {uuid for step in one.plan.steps if isinstance(step, ResetDevice) for uuid in step.device_uuids}
        lost = [present_devices[uuid].describe() for uuid in sorted(reset) if found.unchanged.get(uuid)]
        if lost:
            refused.append(
                Unsupported(
                    f"{one.device.describe()} needs a reset, which would delete manually created partitions on "
                    f"{', '.join(lost)}. Nothing was changed",
                    hint="This module cannot create them again. Delete them first, and set on_foreign to leave_out.",
                    code="foreign-partition",
                )
            )
    return tuple(replace(one, device=present_devices[one.device.uuid]) for one in assigned), tuple(refused)


def _without(device: Device, unchanged: Mapping[str, Collection[OwnedPartition]]) -> Device:
    """Return the device without its spared partitions. They do not conflict with the other partitions of the checkpoint."""
    stay = unchanged.get(device.uuid, ())
    if not stay:
        return device
    return replace(device, partitions=tuple(each for each in device.partitions if each.key not in stay))
