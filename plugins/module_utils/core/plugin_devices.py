# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a node offers through the kubelet's device-plugin API: whole devices and partitions that exist, by resource. Pure.

Pods ask for so many of a resource and say nothing of what they are, so that nothing is made for them: partitions on demand, shares,
groups and devices for virtual machines are for claims alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from . import health
from .cdi import ContainerEdits, build_spec
from .errors import AcceleratorError, NotFound
from .model import DEVICE, PARTITION, Device, Offer, OwnedPartition, Partition
from .nearness import Level, nearest, of_parts
from .signs import Severity

#: The most characters of a device's id.
LONGEST_ID = 63
#: What the names of this driver's sockets in the kubelet's folder begin with, whichever the vendor.
SOCKET_PREFIX = "dra-"
#: What the CDI file of all devices of a vendor has in the place of a claim's UID.
PLUGIN_FILE = "plugin"
#: What keeps new pods from a device.
_BARRING = ("NoSchedule", "NoExecute")
_RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


class NotGiven(AcceleratorError):
    """A device that a pod was to have cannot be given to it."""

    default_code = "not-given"


class Naming(Protocol):
    """What of a backend is asked here; see there."""

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        """Return what is published of a device."""

    def resource_name(self, device: Device, profile: str | None) -> str:
        """Return what pods ask for to get such a whole device (no profile), or a partition of it."""


@dataclass(frozen=True)
class PluginDevice:
    """One thing that a pod can have. ``id`` is its UUID, by which programs that watch devices know it too.

    ``barred`` is what keeps new pods from it, "" where nothing does. ``device_uuid`` is the physical device that it is, or is on.
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
        """Whether a new pod may have it."""
        return not self.barred


@dataclass(frozen=True)
class ResourceStatus:
    """What pods can ask for: how many devices there are of it, how many of them a new pod can have, and whether the kubelet knows."""

    resource: str
    devices: int
    healthy: int
    connected: bool


@dataclass(frozen=True)
class Given:
    """What a container is told to get its devices: full names of CDI devices, and variables."""

    cdi_devices: tuple[str, ...] = ()
    variables: Mapping[str, str] | None = None


def plugin_devices(
    naming: Naming,
    driver: str,
    devices: Mapping[str, Device],
    ailments: Mapping[str, health.Ailments],
    effects: Mapping[Severity, str] = health.DEFAULT_EFFECTS,
    held: Collection[str] = (),
) -> tuple[PluginDevice, ...]:
    """Return what pods can have of devices, which go by their UUIDs, in the vendor's order.

    ``held`` are UUIDs of physical devices that claims have: nothing of them is offered. What nobody can name is not offered either:
    a partition without a UUID, a resource whose name the kubelet would refuse.
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
            told = health.concerning(offer, devices, ailments)
            taints = (*health.taints(driver, told, effects), *offer.taints)
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
    """Return the physical devices of which nothing is offered, by description, each with the reason."""
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
    """Return devices by what pods ask for."""
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
    """Return the ids of ``size`` available devices that lie nearest to each other; those that the kubelet names and nobody knows last.

    Raises ValueError where that cannot be.
    """
    known = {each.id: each.device_uuid for each in devices if each.id in set(available)}
    pool = [*known, *sorted(each for each in set(available) if each not in known)]
    return nearest(pool, must, size, of_parts(levels, known))


def partition_of(wanted: PluginDevice, device: Device) -> Partition | None:
    """Return the partition that a pod is to have, by fresh facts; None where it is to have the whole device.

    Raises NotFound where it is not there any more, or the device has been cut since.
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
    """Return the kind of what pods get without a claim, by the kind of what they get by claims."""
    return f"{claims_kind.partition('/')[0]}/device"


def specification(kind: str, edits: Mapping[str, ContainerEdits], common: ContainerEdits) -> dict[str, Any] | None:
    """Return the CDI file for all devices of a vendor, by their ids; None where containers are told of devices by variables alone."""
    if not edits or common.lists:
        return None
    return build_spec(kind, {name: edits[name] for name in sorted(edits)}, common=common)


def given(kind: str, ids: Collection[str], edits: Mapping[str, ContainerEdits], common: ContainerEdits) -> Given:
    """Return what a container with these devices is told.

    Where the vendor's container runtime brings devices in, that is variables, each naming all of the container's devices; else the names
    in the CDI file. Raises NotGiven for a device without edits.
    """
    lacking = [each for each in ids if each not in edits]
    if lacking:
        raise NotGiven(f"What a container needs for {', '.join(lacking)} is not known")
    if not common.lists:
        return Given(tuple(f"{kind}={each}" for each in ids))
    merged = ContainerEdits.merge(common, *(edits[each] for each in ids))
    variables = dict(entry.split("=", 1) for entry in merged.env)
    return Given(variables={**variables, **{name: ",".join(values) for name, values in merged.lists if values}})


def socket_name(resource: str) -> str:
    """Return the name of the socket of a resource, in the kubelet's folder: nobody else's begins so, and it names the resource."""
    return f"{SOCKET_PREFIX}{resource.replace('/', '_', 1)}.sock"
