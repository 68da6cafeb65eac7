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

    Some partitions have no position, and the device distinguishes them by number. Their placement has size 0, and
    ``start`` is the number. Only one partition of the device can use a number at a time, whatever its profile.
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

    def conflicts_with(self, other: Placement) -> bool:
        """Return whether two partitions cannot exist together: they share a memory slice, or their numbers are equal."""
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
    that fit on the device. ``number`` is a second id that the vendor uses for the profile, or -1. ``aliases`` are other
    spellings that users can write.
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

    def has_name(self, name: str) -> bool:
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

    ``uuid`` is empty for a partition without a compute instance: it uses memory slices, but no process can open it. If
    ``compute_instances`` is not 1, or the only instance does not fill the partition, the partition was created
    manually. A plan can treat the partition as if it were at one of ``equivalent_placements``, without a change on the
    device. With ``has_chosen_id`` the creator chose ``instance_id``, which survives reboots. Otherwise the device
    assigns the id, and can assign it to a different partition later.
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
    equivalent_placements: tuple[Placement, ...] = ()
    has_chosen_id: bool = False

    @property
    def key(self) -> OwnedPartition:
        """Return profile id, start, and size, which identify a partition on its device even after it is recreated."""
        return (self.profile_id, self.placement.start, self.placement.size)

    def matches_record(self, key: OwnedPartition | None, instance_id: int | None) -> bool:
        """Return whether a record with this key and this id describes this partition.

        The id distinguishes it from a later partition with the same key. If the device assigned the id, or the record
        has no id (None), only the key is compared.
        """
        if not self.has_chosen_id or instance_id is None:
            return self.key == key
        places = (self.placement, *self.equivalent_placements)
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
    has partitions. ``blocked`` is the reason why no partition can be created at present, with a remedy, or empty.
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

    ``needs_recovery`` and ``needs_reset`` are the device's own report, None if it does not report them: whether it needs
    a recovery, and whether the recovery is a reset. ``unchecked_causes`` are the causes that this scan could not check.
    A missing sign of such a cause does not mean that the fault has ended.
    """

    signs: tuple[Sign, ...] = ()
    needs_recovery: bool | None = None
    needs_reset: bool | None = None
    unchecked_causes: frozenset[str] = frozenset()

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
    - ``name_number`` is the number in its published names; None if the names contain ``minor``.
    - ``pci_device_id`` and ``pci_subsystem_id`` contain the device id in the high 16 bits and the vendor id in the low
      16 bits.
    - ``linked`` are the PCI addresses of devices with direct links to this one. They must be reset together with it,
      unless ``resets_alone``.
    - ``reset_blocked`` is the reason why the device cannot be reset now, with a remedy; "" if it can.
    - ``passthrough``: None if the device cannot be assigned to a virtual machine because it has no IOMMU group.
    - ``sharing_obstacle`` is the reason, with a remedy, why several claims cannot share the device now; None if they can.
    - ``driver_version`` is in the driver's spelling, empty if unknown.
    - ``clique``: None for a device that has not joined a fabric or does not report one.
    - ``switched``: switches inside the node connect all devices of the node that have this set.
    - ``module`` is the device's position on the baseboard.
    - ``whole_device_attributes`` are published for the whole device only, not for its partitions.
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
    sharing_obstacle: Sign | None = None
    driver_version: str = ""
    clique: Clique | None = None
    switched: bool = False
    module: int | None = None
    whole_device_attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    name_number: int | None = None

    def profile(self, profile_id: int) -> Profile | None:
        """Return the profile with that published id, or None."""
        return next((profile for profile in self.profiles if profile.profile_id == profile_id), None)

    def find_profile(self, name: str) -> Profile | None:
        """Return the device's profile that a name in any spelling identifies, or None."""
        return next((profile for profile in self.profiles if profile.has_name(name.strip())), None)

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
FIRST_READ_PENDING = "awaited"  # not a fault yet: the first read of the device is still running


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
    def is_first_read_pending(self) -> bool:
        """Return whether the first read of the device is still running, within its deadline."""
        return self.fault is not None and self.fault.cause == FIRST_READ_PENDING

    def describe(self) -> str:
        """Return the device's name and its fault for messages."""
        return f"{self.name}: {self.fault}" if self.fault is not None else self.name


def devices_of(findings: Iterable[Finding]) -> tuple[Device, ...]:
    """Return the devices with known facts, including devices with a fault."""
    return tuple(finding.device for finding in findings if finding.device is not None)


def healthy_devices(findings: Iterable[Finding]) -> tuple[Device, ...]:
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
    """Describe a vendor's devices and driver from the node's files, without access to a device.

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

    ``kind`` is one of OFFER_KINDS. A partition exists, or with ``dynamic`` it is created for a claim.

    ``capacities`` and ``consumes`` contain plain numbers; memory is in bytes. With ``policies``, one for each capacity,
    several claims share the device, and each consumes a part of it. ``prepared_before_binding`` says that pods are
    bound after the device is prepared for them. If the ``placement`` of a dynamic offer is a number, this number only
    distinguishes the offers of one profile. The partition gets its actual number when its creation is planned.

    A group represents several whole devices: ``members`` are their UUIDs, ``device_uuid`` is the first member, and
    ``profile`` is the vendor's name for the type of group. ``joint_counters`` maps counter sets that several devices share to
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
    joint_counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the physical devices that the offer contains or is a part of."""
        return self.members or (self.device_uuid,)

    @property
    def all_counters(self) -> Mapping[str, Mapping[str, int]]:
        """Return all counters that the offer consumes, by counter set."""
        own = {self.counter_set: self.consumes} if self.counter_set and self.consumes else {}
        return {**own, **self.joint_counters}


@dataclass(frozen=True)
class CounterSet:
    """Define the counters that a physical device shares among its offers."""

    name: str
    counters: Mapping[str, int]


#: A function that takes the offers, all devices by UUID, and the UUIDs of the devices that claims use. It returns the
#: offers for publication, without side effects. Only attributes and order can differ.
OfferArranger = Callable[[Sequence[Offer], Mapping[str, Device], Collection[str]], tuple[Offer, ...]]
