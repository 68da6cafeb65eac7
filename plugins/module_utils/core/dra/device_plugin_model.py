# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the offers of a node for the kubelet's device-plugin API: whole devices and existing partitions, by resource.

The module has no side effects. Pods request a number of a resource without parameters, so nothing is created for them.
Partitions on demand, shares, groups, and devices for virtual machines are available only through claims.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import AcceleratorError, NotFound
from ..health import tracker as health_tracker
from ..health.conditions import Severity
from ..host.cdi import ContainerEdits, build_spec
from ..model import DEVICE, PARTITION, Device, Offer, OwnedPartition, Partition
from .nearest_devices import Level, nearest, of_parts

#: The maximum length of a device id.
LONGEST_ID = 63
#: The prefix of this driver's socket names in the kubelet's directory, for all vendors.
SOCKET_PREFIX = "dra-"
#: The replacement for a claim's UID in the name of a vendor's CDI file for all devices.
PLUGIN_FILE = "plugin"
#: The taint effects that prevent new pods on a device.
_BARRING = ("NoSchedule", "NoExecute")
_RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


class NotAllocatable(AcceleratorError):
    """Report that a device cannot be allocated to a pod."""

    default_code = "not-given"


class Naming(Protocol):
    """The backend functions that this module uses. The backend documents them."""

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        """Return the published devices of a physical device."""

    def resource_name(self, device: Device, profile: str | None) -> str:
        """Return the resource name of a whole device (no profile), or of a partition of it."""


@dataclass(frozen=True)
class PluginDevice:
    """One device for pods. ``id`` is its UUID, which monitoring programs also use.

    ``barred`` is the reason why new pods cannot get it, or empty. ``device_uuid`` is the physical device that it is or
    belongs to.
    """

    id: str
    name: str
    resource: str
    device_uuid: str
    partition_uuid: str | None
    numa_node: int | None
    barred: str = ""

    @property
    def is_healthy(self) -> bool:
        """Return whether a new pod can get it."""
        return not self.barred


@dataclass(frozen=True)
class ResourceStatus:
    """The state of one resource: its devices, those that a new pod can get, and whether the kubelet has registered it."""

    resource: str
    devices: int
    healthy: int
    connected: bool


@dataclass(frozen=True)
class AllocationResult:
    """The result of an allocation for a container: qualified names of CDI devices, and environment variables."""

    cdi_devices: tuple[str, ...] = ()
    variables: Mapping[str, str] | None = None


def plugin_devices(
    naming: Naming,
    driver: str,
    devices: Mapping[str, Device],
    faults: Mapping[str, health_tracker.TrackedFaults],
    effects: Mapping[Severity, str] = health_tracker.DEFAULT_EFFECTS,
    held: Collection[str] = (),
) -> tuple[PluginDevice, ...]:
    """Return the devices for pods, in the vendor's order. ``devices`` are by UUID.

    ``held`` are the UUIDs of physical devices that claims use; they are not offered. Partitions without a UUID, and
    resources whose name the kubelet would reject, are not offered either.
    """
    found: list[PluginDevice] = []
    for device in sorted(devices.values(), key=lambda each: each.index):
        if device.uuid in held:
            continue
        for offer in naming.offers(device, False):
            if offer.kind not in (DEVICE, PARTITION) or offer.dynamic:
                continue
            name = offer.partition_uuid if offer.kind == PARTITION else offer.device_uuid
            resource = naming.resource_name(device, offer.profile)
            if not name or len(name) > LONGEST_ID or not _RESOURCE.fullmatch(resource):
                continue
            faults_of_offer = health_tracker.faults_of_offer(offer, devices, faults)
            taints = (*health_tracker.taints(driver, faults_of_offer, effects), *offer.taints)
            causes = dict.fromkeys(each.key.rpartition("/")[2] for each in taints if each.effect in _BARRING)
            found.append(
                PluginDevice(
                    id=name,
                    name=offer.name,
                    resource=resource,
                    device_uuid=device.uuid,
                    partition_uuid=offer.partition_uuid,
                    numa_node=device.numa_node if device.numa_node is not None and device.numa_node >= 0 else None,
                    barred=", ".join(causes),
                )
            )
    return tuple(found)


def reasons_not_offered(
    devices: Mapping[str, Device], offered: Collection[PluginDevice], held: Collection[str] = ()
) -> dict[str, str]:
    """Return the physical devices without an offer, by description, each with the reason."""
    present = {each.device_uuid for each in offered}
    found: dict[str, str] = {}
    for device in sorted(devices.values(), key=lambda each: each.index):
        if device.uuid in present:
            continue
        if device.uuid in held:
            reason = "a claim that was prepared earlier has it"
        elif device.partitioning.enabled and not device.partitions:
            reason = (
                "the partitioning mode is on, no partition exists, and pods without claims get no partitions on demand. "
                "Create partitions with a layout rule (mode: static) or turn the mode off"
            )
        elif device.partitions:
            reason = "none of its partitions has a UUID"
        else:
            reason = "the kubelet accepts neither its UUID nor the name of its resource"
        found[device.describe()] = reason
    return found


def by_resource(devices: Collection[PluginDevice]) -> dict[str, tuple[PluginDevice, ...]]:
    """Return devices by their resource."""
    found: dict[str, list[PluginDevice]] = {}
    for each in devices:
        found.setdefault(each.resource, []).append(each)
    return {resource: tuple(each) for resource, each in found.items()}


def preferred(
    devices: Collection[PluginDevice],
    available: Collection[str],
    must: Collection[str],
    size: int,
    levels: Collection[Level],
) -> tuple[str, ...]:
    """Return the ids of ``size`` available devices that are nearest to each other. Unknown ids of the kubelet come last.

    Raises ValueError if this is not possible.
    """
    known = {each.id: each.device_uuid for each in devices if each.id in set(available)}
    pool = [*known, *sorted(each for each in set(available) if each not in known)]
    return nearest(pool, must, size, of_parts(levels, known))


def partition_of(wanted: PluginDevice, device: Device) -> Partition | None:
    """Return the partition to allocate, from current facts; None for a whole device.

    Raises NotFound if the partition no longer exists, or if the device has been partitioned since the offer.
    """
    if wanted.partition_uuid is not None:
        found = device.partition(wanted.partition_uuid)
        if found is None:
            raise NotFound(f"{wanted.name} ({wanted.partition_uuid}) is not on {device.describe()} any more")
        return found
    if device.partitions or device.partitioning.enabled:
        raise NotFound(f"{device.describe()} has been cut into partitions since it was offered whole")
    return None


def cdi_kind(claims_kind: str) -> str:
    """Return the CDI kind of devices for pods without claims, from the CDI kind of devices for claims."""
    return f"{claims_kind.partition('/')[0]}/device"


def specification(kind: str, edits: Mapping[str, ContainerEdits], common: ContainerEdits) -> dict[str, Any] | None:
    """Return the CDI file for all devices of a vendor, by id; None if only environment variables select devices."""
    if not edits or common.lists:
        return None
    return build_spec(kind, {name: edits[name] for name in sorted(edits)}, common=common)


def given(
    kind: str, ids: Collection[str], edits: Mapping[str, ContainerEdits], common: ContainerEdits
) -> AllocationResult:
    """Return the result of an allocation of these devices.

    If the vendor's container runtime injects devices, the result is environment variables that list all devices of the
    container. Otherwise it is the names in the CDI file. Raises NotAllocatable for a device without edits.
    """
    lacking = [each for each in ids if each not in edits]
    if lacking:
        raise NotAllocatable(f"What a container needs for {', '.join(lacking)} is not known")
    if not common.lists:
        return AllocationResult(tuple(f"{kind}={each}" for each in ids))
    merged = ContainerEdits.merge(common, *(edits[each] for each in ids))
    variables = dict(entry.split("=", 1) for entry in merged.env)
    return AllocationResult(
        variables={**variables, **{name: ",".join(values) for name, values in merged.lists if values}}
    )


def socket_name(resource: str) -> str:
    """Return the name of a resource's socket in the kubelet's directory. It is unique and contains the resource name."""
    return f"{SOCKET_PREFIX}{resource.replace('/', '_', 1)}.sock"
