# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the value types for devices, partitions, profiles, placements, and published devices."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Callable, Union

from .health.conditions import Severity, Sign

_SEMANTIC_VERSION = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)(\.(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*))*)?"
    r"(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?"
)


def frozen(values: Mapping[str, int]) -> Mapping[str, int]:
    """Return a read-only copy of a mapping of counts."""
    return MappingProxyType(dict(values))


@dataclass(frozen=True, order=True)
class Version:
    """A semantic version, the form of a version attribute in a ResourceSlice: strictly X.Y.Z, no leading zeros."""

    text: str

    def __post_init__(self) -> None:
        """Raise ValueError for a version that the API server would reject."""
        if len(self.text) > 64 or not _SEMANTIC_VERSION.fullmatch(self.text):
            raise ValueError(
                f"{self.text!r} is not a semantic version: expected X.Y.Z without leading zeros, 64 characters at most"
            )

    @classmethod
    def coerce(cls, text: str) -> Version:
        """Convert a vendor's spelling to a version: ``580.95.05`` becomes 580.95.5, ``13.0`` becomes 13.0.0.

        Raises ValueError unless the text begins with one to three numbers that are separated by dots.
        """
        found = re.fullmatch(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:[.\-+ ].*)?", text.strip())
        if found is None:
            raise ValueError(f"{text!r} is not a version: expected numbers separated by dots")
        return cls(".".join(str(int(number or 0)) for number in found.groups()))

    @classmethod
    def coerce_or_none(cls, text: str) -> Version | None:
        """Return the same version as ``coerce``, or None for a text that is not a version."""
        try:
            return cls.coerce(text)
        except ValueError:
            return None

    def __str__(self) -> str:
        return self.text


AttributeValue = Union[bool, int, str, Version]

# The kinds of offers: a whole device for containers, a partition of a device, a whole device for a virtual machine, or
# a group of whole devices.
DEVICE, PARTITION, PASSTHROUGH, GROUP = "device", "partition", "passthrough", "group"
OFFER_KINDS = (DEVICE, PARTITION, PASSTHROUGH, GROUP)

# Profile id, start, and size of a partition. A partition that is recreated on the same device keeps this key.
OwnedPartition = tuple[int, int, int]


@dataclass(frozen=True, order=True)
class Placement:
    """Define the memory slices that a partition covers on its device.

    A placement of size 0 is a number, not a position. Some partitions have no defined position, and the device
    distinguishes them by number. A number belongs to the device: only one partition of the device can use it at a time,
    whatever its profile.
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """Return the number of the first slice after the partition."""
        return self.start + self.size

    @property
    def slices(self) -> range:
        """Return the numbers of the covered memory slices."""
        return range(self.start, self.end)

    @property
    def is_number(self) -> bool:
        """Return whether this placement is a number and not a position."""
        return self.size == 0

    def overlaps(self, other: Placement) -> bool:
        """Return whether two placements share a memory slice. Numbers never overlap."""
        return bool(self.size and other.size) and self.start < other.end and other.start < self.end

    def clashes(self, other: Placement) -> bool:
        """Return whether two partitions with these placements cannot exist together.

        They share a memory slice or their number is equal.
        """
        if self.is_number and other.is_number:
            return self.start == other.start
        return self.overlaps(other)

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"


@dataclass(frozen=True)
class Profile:
    """Describe one type of partition that can be created on a device.

    ``capacities`` maps each published capacity name to the amount that one partition gets: counts, and memory in bytes.
    All profiles of a device share the same capacity names. ``maximum`` is the number of partitions with this profile
    that fit on the device. ``number`` is the vendor's second number for the profile, or -1. ``aliases``
    are other spellings that users can write.
    """

    name: str
    profile_id: int
    memory_bytes: int
    capacities: Mapping[str, int]
    attributes: Mapping[str, AttributeValue]
    placements: tuple[Placement, ...]
    maximum: int
    compute_slices: int = 0
    number: int = -1
    aliases: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of memory slices of one partition; 0 for a numbered profile or one without placements."""
        return self.placements[0].size if self.placements else 0

    @property
    def is_numbered(self) -> bool:
        """Return whether the profile's partitions have numbers instead of positions.

        All numbered profiles of a device share the same numbers.
        """
        return bool(self.placements) and self.placements[0].is_number

    def answers_to(self, name: str) -> bool:
        """Return whether a name that a user wrote identifies this profile."""
        return name == self.name or name in self.aliases


@dataclass(frozen=True)
class Process:
    """Describe a process that has a device open.

    ``pod`` is the namespace and name of the process's pod. ``unit`` is the systemd unit or the container of a process
    outside pods. Both are empty if the caller did not request them.
    """

    pid: int
    name: str = ""
    pod: str = ""
    unit: str = ""

    def __str__(self) -> str:
        details = ", ".join(each for each in (self.name, f"pod {self.pod}" if self.pod else self.unit) if each)
        return f"{self.pid} ({details})" if details else str(self.pid)


@dataclass(frozen=True)
class Partition:
    """Describe an existing partition.

    ``uuid`` is empty for a partition without a compute instance: it takes space, but no process can open it. If
    ``compute_instances`` is not 1, or the only instance does not fill the partition, the partition was created
    manually. ``elsewhere`` are placements that are equivalent to ``placement``. The partition can count as placed there
    without a change on the device. ``has_chosen_id`` says that the creator chose ``instance_id``: it was known before
    the partition existed, and it survives reboots. Otherwise the device assigns the id, and can assign it to a
    different partition later.
    """

    uuid: str
    profile: str
    profile_id: int
    placement: Placement
    instance_id: int
    compute_instance_id: int | None
    memory_bytes: int
    processes: tuple[Process, ...] = ()
    compute_instances: int = 1
    capacities: Mapping[str, int] = field(default_factory=dict)
    elsewhere: tuple[Placement, ...] = ()
    has_chosen_id: bool = False

    @property
    def key(self) -> OwnedPartition:
        """Return profile id, start, and size, which identify a partition on its device even after it is recreated."""
        return (self.profile_id, self.placement.start, self.placement.size)

    def is_the_one(self, key: OwnedPartition | None, instance_id: int | None) -> bool:
        """Return whether this is the partition that was created with this key and this id.

        The id distinguishes it from a later partition with the same key. The method compares only the key if the device
        assigned the id, or if ``instance_id`` is None because no chosen id was recorded.
        """
        if not self.has_chosen_id or instance_id is None:
            return self.key == key
        places = (self.placement, *self.elsewhere)
        return self.instance_id == instance_id and key in [(self.profile_id, each.start, each.size) for each in places]

    def describe(self) -> str:
        """Return the partition's name for messages."""
        return f"{self.profile} at {self.placement}" + (
            f" ({self.uuid})" if self.uuid else " (without compute instance)"
        )


@dataclass(frozen=True)
class Partitioning:
    """Describe whether a device can be partitioned, is partitioned, and will be partitioned after the next reset.

    Without ``has_mode`` the device has no partitioning mode to switch. ``enabled`` and ``pending`` then say whether it
    has partitions. ``blocked`` is the reason why no partition can be created at present, with a remedy; empty if one
    can.
    """

    supported: bool
    enabled: bool = False
    pending: bool = False
    needs_reset: bool = False
    has_mode: bool = True
    blocked: str = ""


@dataclass(frozen=True)
class Health:
    """Describe the faults that a scan found on a device.

    ``needs_recovery`` is the device's own report. ``needs_reset`` says whether this recovery is a reset. For a device that does not
    report them, both are unset (None). ``untold`` are the causes that this scan could not check: a missing sign
    does not mean that such a fault has ended.
    """

    signs: tuple[Sign, ...] = ()
    needs_recovery: bool | None = None
    needs_reset: bool | None = None
    untold: frozenset[str] = frozenset()

    @property
    def healthy(self) -> bool:
        """Return whether the device can be allocated: it has at most informative signs."""
        return all(sign.severity == Severity.INFORMATIVE for sign in self.signs)

    @property
    def causes(self) -> tuple[str, ...]:
        """Return the stable names of the causes, without duplicates."""
        return tuple(dict.fromkeys(sign.cause for sign in self.signs))


@dataclass(frozen=True)
class Passthrough:
    """Describe the published data of a device that a virtual machine can use.

    ``number`` is its position among the vendor's devices on the PCI bus. ``memory_bytes`` is the size of its regions in
    the address space. ``iommufd`` says whether the kernel offers that interface.
    """

    number: int
    memory_bytes: int
    iommufd: bool


@dataclass(frozen=True)
class Clique:
    """Identify a set of devices that a fabric connects, on one or several nodes: fabric name and clique number."""

    fabric: str
    number: int

    def __str__(self) -> str:
        return f"{self.fabric}.{self.number}"


@dataclass(frozen=True)
class Device:
    """Describe one physical device with all facts for slices, labels, reports, and plans.

    - ``index`` is the device's position in the vendor's order. ``minor`` is the current number of its device node.
    - ``name_number`` is the number in its published names, None if that is the minor.
    - ``pci_device_id`` and ``pci_subsystem_id`` are 0xDDDDVVVV, with the device in the high half, as vendors print
      them.
    - ``linked`` are the PCI addresses of devices with direct links to this one. They must be reset together with it,
      unless ``resets_alone``.
    - ``reset_blocked`` is the reason why the device cannot be reset now, with a remedy; "" if it can.
    - ``passthrough``: None if the device cannot be assigned to a virtual machine because it has no IOMMU group.
    - ``unshareable`` says why several claims cannot share the device at present, and what to do; None if they can.
    - ``driver_version`` is in the driver's spelling, empty if unknown.
    - ``clique``: None for a device that has not joined a fabric or does not report one.
    - ``switched`` says that switches inside the node connect it with all other devices for which this is set. This
      fabric has no name, because it does not extend beyond the node.
    - ``module`` is the device's position on the baseboard.
    - ``whole_attributes`` are published for the whole device only, not for its partitions.
    """

    vendor: str
    index: int
    minor: int
    uuid: str
    product: str
    pci_address: str
    pcie_root: str | None
    numa_node: int | None
    memory_bytes: int
    memory_slices: int
    attributes: Mapping[str, AttributeValue]
    capacities: Mapping[str, int]
    partitioning: Partitioning
    profiles: tuple[Profile, ...] = ()
    partitions: tuple[Partition, ...] = ()
    processes: tuple[Process, ...] = ()
    health: Health = Health()
    pci_device_id: int = 0
    pci_subsystem_id: int = 0
    linked: tuple[str, ...] = ()
    resets_alone: bool = False
    reset_blocked: str = ""
    passthrough: Passthrough | None = None
    unshareable: Sign | None = None
    driver_version: str = ""
    clique: Clique | None = None
    switched: bool = False
    module: int | None = None
    whole_attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    name_number: int | None = None

    def profile(self, profile_id: int) -> Profile | None:
        """Return the profile with that published id, or None."""
        return next((profile for profile in self.profiles if profile.profile_id == profile_id), None)

    def find_profile(self, name: str) -> Profile | None:
        """Return the device's profile that a name in any spelling identifies, or None."""
        return next((profile for profile in self.profiles if profile.answers_to(name.strip())), None)

    def partition(self, uuid: str) -> Partition | None:
        """Return the live partition with that UUID, or None."""
        return next((partition for partition in self.partitions if uuid and partition.uuid == uuid), None)

    def is_reset_with(self, other: Device) -> bool:
        """Return whether a reset of this device has to include another device: one that links connect, directly or over switches."""
        return not self.resets_alone and (other.pci_address in self.linked or (self.switched and other.switched))

    def describe(self) -> str:
        """Return the device's name for messages."""
        return f"{self.product} {self.index} ({', '.join(filter(None, (self.uuid, self.pci_address)))})"


# Causes of faults that do not depend on the vendor. The vendor packages define the other causes.
NO_ANSWER = "no-answer"  # a call did not return within its deadline
UNKNOWN_ERROR = "unknown-error"
AWAITED = "awaited"  # not a fault yet: the first read of the device is still running; others do not wait for it


@dataclass(frozen=True)
class Fault:
    """Describe a fault of one physical device: a stable cause, which taints carry, and a message for people."""

    cause: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Finding:
    """Describe the result of one scan of one physical device: its facts, its fault, or both.

    ``name`` identifies the device for people, even if little else is known. ``uuid`` is empty if it was never read.
    ``device`` contains the current facts. If a fault prevents reading them, it contains the last known facts, with the
    fault's cause in ``device.health`` and without processes; None if there are no known facts. ``fault``: None for a
    device without a fault.
    """

    index: int
    name: str
    uuid: str
    device: Device | None
    fault: Fault | None = None

    @property
    def awaited(self) -> bool:
        """Return whether the first read of the device is still running, within its deadline."""
        return self.fault is not None and self.fault.cause == AWAITED

    def describe(self) -> str:
        """Return the device's name and its fault for messages."""
        return f"{self.name}: {self.fault}" if self.fault is not None else self.name


def devices_of(findings: Iterable[Finding]) -> tuple[Device, ...]:
    """Return the devices with known facts, including devices with a fault."""
    return tuple(finding.device for finding in findings if finding.device is not None)


def well(findings: Iterable[Finding]) -> tuple[Device, ...]:
    """Return the devices without a fault. Their facts are current, and they can be changed."""
    return tuple(finding.device for finding in findings if finding.device is not None and finding.fault is None)


@dataclass(frozen=True)
class Notice:
    """Describe an event that a device reported; ``uuid`` is empty if the device is unknown.

    ``sign`` is the fault that the event reports, None unless it reports more than a scan can find.
    """

    uuid: str
    message: str
    sign: Sign | None = None


@dataclass(frozen=True)
class Surroundings:
    """List a vendor's devices as the node shows them, by their names there, and the driver that they use.

    If two values differ, devices or the driver were added, removed, or changed. Only a scan finds the details.
    """

    driver: tuple[object, ...]
    devices: frozenset[str]
    #: The number of devices that another program returned from passthrough and that the vendor's library does not know
    #: yet.
    returned: int = 0


@dataclass(frozen=True)
class Taint:
    """A device taint as published in a ResourceSlice."""

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True)
class RequestPolicy:
    """Define how much of a capacity one claim consumes: the default, the minimum, and the step above the minimum."""

    default: int
    minimum: int
    step: int


@dataclass(frozen=True)
class Offer:
    """Describe one device of a ResourceSlice.

    It is a whole device for containers or for a virtual machine, an existing partition, a partition that can be
    created, or a group of devices.

    ``capacities`` and ``consumes`` contain plain numbers; memory is in bytes. With ``policies``, one for each capacity,
    several claims share the device, and each consumes a part of it. ``prepared_before_binding`` says that pods are
    bound after the device is prepared for them. If the ``placement`` of a dynamic offer is a number, the number only
    distinguishes the offers of one profile. The partition's actual number is chosen when the partition is planned.

    A group represents several whole devices: ``members`` are their UUIDs, ``device_uuid`` is the first member, and
    ``profile`` is the vendor's name for the type of group. ``jointly`` maps counter sets that several devices share to
    the counters that the offer consumes from each (see composite_devices.py).
    """

    name: str
    kind: str
    device_uuid: str
    dynamic: bool
    profile: str | None
    profile_id: int | None
    placement: Placement | None
    partition_uuid: str | None
    attributes: Mapping[str, AttributeValue]
    capacities: Mapping[str, int]
    counter_set: str | None = None
    consumes: Mapping[str, int] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    policies: Mapping[str, RequestPolicy] = field(default_factory=dict)
    prepared_before_binding: bool = False
    members: tuple[str, ...] = ()
    jointly: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the physical devices that the offer contains or is a part of."""
        return self.members or (self.device_uuid,)

    @property
    def taken(self) -> Mapping[str, Mapping[str, int]]:
        """Return all counters that the offer consumes, by counter set."""
        own = {self.counter_set: self.consumes} if self.counter_set and self.consumes else {}
        return {**own, **self.jointly}


@dataclass(frozen=True)
class CounterSet:
    """Define the counters that a physical device shares among its offers."""

    name: str
    counters: Mapping[str, int]


#: A function that takes the offers, all devices by UUID, and the UUIDs of the devices that claims use. It returns the
#: offers for publication, without side effects. Only attributes and order can differ.
Arranged = Callable[[Sequence[Offer], Mapping[str, Device], Collection[str]], tuple[Offer, ...]]
