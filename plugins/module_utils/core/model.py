# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The words of the domain as values: devices, partitions, profiles, placements and what is published of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Callable, Union

from .signs import Severity, Sign

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
        """Refuse what the API server would refuse."""
        if len(self.text) > 64 or not _SEMANTIC_VERSION.fullmatch(self.text):
            raise ValueError(
                f"{self.text!r} is not a semantic version: expected X.Y.Z without leading zeros, 64 characters at most"
            )

    @classmethod
    def coerce(cls, text: str) -> Version:
        """Make a version out of a vendor's spelling: ``580.95.05`` is 580.95.5, ``13.0`` is 13.0.0.

        Raises ValueError when the text does not begin with one to three numbers separated by dots.
        """
        found = re.fullmatch(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:[.\-+ ].*)?", text.strip())
        if found is None:
            raise ValueError(f"{text!r} is not a version: expected numbers separated by dots")
        return cls(".".join(str(int(number or 0)) for number in found.groups()))

    @classmethod
    def coerce_or_none(cls, text: str) -> Version | None:
        """Return the same, and None for a text that is no version."""
        try:
            return cls.coerce(text)
        except ValueError:
            return None

    def __str__(self) -> str:
        return self.text


AttributeValue = Union[bool, int, str, Version]

# What an offer is: a whole device for containers, a partition of one, a whole device for a virtual machine, or several whole devices as one.
DEVICE, PARTITION, PASSTHROUGH, GROUP = "device", "partition", "passthrough", "group"
OFFER_KINDS = (DEVICE, PARTITION, PASSTHROUGH, GROUP)

# Profile id, start and size of a partition: what identifies it on its device across its life times.
OwnedPartition = tuple[int, int, int]


@dataclass(frozen=True, order=True)
class Placement:
    """Where a partition lies on its device, in memory slices.

    One of size 0 is no place but a number: of a partition that lies nowhere in particular, and is one of those that its
    device can tell apart. Numbers are the device's, each for one partition at a time, whatever its profile.
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first slice after the partition."""
        return self.start + self.size

    @property
    def slices(self) -> range:
        """The numbers of the memory slices covered."""
        return range(self.start, self.end)

    @property
    def is_number(self) -> bool:
        """Whether this is a number and no place."""
        return self.size == 0

    def overlaps(self, other: Placement) -> bool:
        """Whether two placements share a memory slice; numbers never do."""
        return bool(self.size and other.size) and self.start < other.end and other.start < self.end

    def clashes(self, other: Placement) -> bool:
        """Whether partitions with these two placements cannot both be there: they share a memory slice or are one number."""
        if self.is_number and other.is_number:
            return self.start == other.start
        return self.overlaps(other)

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"


@dataclass(frozen=True)
class Profile:
    """One kind of partition that a device can be cut into.

    ``capacities`` is what one partition gets of each thing that the device shares out, by the names that are published:
    counts, and memory in bytes. All profiles of a device have the same names. ``maximum`` is how many of this profile the
    board takes at once, ``number`` the vendor's second number for it where there is one. ``aliases`` are other spellings
    that users may write.
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
        """The memory slices that one partition covers; 0 for a profile without placements, and for a numbered one."""
        return self.placements[0].size if self.placements else 0

    @property
    def is_numbered(self) -> bool:
        """Whether its partitions have numbers and no places. All such profiles of a device have the same numbers."""
        return bool(self.placements) and self.placements[0].is_number

    def answers_to(self, name: str) -> bool:
        """Whether a name that a user wrote means this profile."""
        return name == self.name or name in self.aliases


@dataclass(frozen=True)
class Process:
    """A process that has a device open. ``pod`` is the namespace and name of the one that it runs in, where that was asked for."""

    pid: int
    name: str = ""
    pod: str = ""

    def __str__(self) -> str:
        told = ", ".join(([self.name] if self.name else []) + ([f"pod {self.pod}"] if self.pod else []))
        return f"{self.pid} ({told})" if told else str(self.pid)


@dataclass(frozen=True)
class Partition:
    """A partition that exists.

    ``uuid`` is empty for one without a compute instance: it takes room and has no handle. When
    ``compute_instances`` is not 1, or the one instance does not fill the partition, the partition was made by hand. ``elsewhere`` are
    placements that it may as well count as lying at: nobody can tell the difference, and nothing on the device moves.
    ``has_chosen_id`` says that ``instance_id`` was chosen by whoever made it: it was known before, and is kept over starts of the
    machine. Other ids are the device's, and another partition's tomorrow.
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
        """Profile id, start and size: what identifies a partition on its device across its life times."""
        return (self.profile_id, self.placement.start, self.placement.size)

    def is_the_one(self, key: OwnedPartition | None, instance_id: int | None) -> bool:
        """Whether it is the partition with this key that was made with this id, and not one that somebody else made in its place.

        Ids that the device gives tell nothing of that; neither does None, where nobody wrote down which id was chosen.
        """
        if not self.has_chosen_id or instance_id is None:
            return self.key == key
        places = (self.placement, *self.elsewhere)
        return self.instance_id == instance_id and key in [(self.profile_id, each.start, each.size) for each in places]

    def describe(self) -> str:
        """Name the partition for a person."""
        return f"{self.profile} at {self.placement}" + (
            f" ({self.uuid})" if self.uuid else " (without compute instance)"
        )


@dataclass(frozen=True)
class Partitioning:
    """Whether a device can be partitioned, is, and will be after the next reset.

    Without ``has_mode`` there is nothing to be switched: the device is partitioned while it has partitions, which is what
    ``enabled`` and ``pending`` say then. ``blocked`` is the reason why no partition can be created now, with a remedy; "" if one can.
    """

    supported: bool
    enabled: bool = False
    pending: bool = False
    needs_reset: bool = False
    has_mode: bool = True
    blocked: str = ""


@dataclass(frozen=True)
class Health:
    """What a look finds wrong with a device.

    ``needs_recovery`` is the device's own report of that, ``needs_reset`` whether this recovery is a reset; None for a device
    that reports neither. ``untold`` are causes that this look could not ask for: that none of their signs is there means nothing.
    """

    signs: tuple[Sign, ...] = ()
    needs_recovery: bool | None = None
    needs_reset: bool | None = None
    untold: frozenset[str] = frozenset()

    @property
    def healthy(self) -> bool:
        """Whether nothing keeps the device from being given away."""
        return all(sign.severity == Severity.INFORMATIVE for sign in self.signs)

    @property
    def causes(self) -> tuple[str, ...]:
        """The words for what is wrong."""
        return tuple(dict.fromkeys(sign.cause for sign in self.signs))


@dataclass(frozen=True)
class Passthrough:
    """What is published of a device that a virtual machine can have: its place among the vendor's devices on the PCI bus, and more.

    ``memory_bytes`` is what its regions take in the address space, ``iommufd`` whether the kernel offers that interface.
    """

    number: int
    memory_bytes: int
    iommufd: bool


@dataclass(frozen=True)
class Clique:
    """Devices, of one machine or of several, that reach each other over a fabric: the fabric's name, and a number in it."""

    fabric: str
    number: int

    def __str__(self) -> str:
        return f"{self.fabric}.{self.number}"


@dataclass(frozen=True)
class Device:
    """One physical device with all facts that slices, labels, reports and plans need.

    ``index`` is the vendor's order, ``minor`` the number of its device node. ``pci_device_id`` and
    ``pci_subsystem_id`` are 0xDDDDVVVV, device in the high half, as vendors print them. ``linked`` are the PCI addresses
    of devices that have to be reset together with this one. ``passthrough`` is None for a device that cannot be given to a
    virtual machine: one without an IOMMU group. ``unshareable`` says why claims cannot have it beside each other at present, and
    what to do; None where they can. ``driver_version`` is the driver's as it spells it, empty where that is not known, and ``clique`` is
    None for a device that has joined no fabric, or does not tell. ``switched`` says that it reaches over switches of its own machine all
    devices there of which that is said too: its fabric has no name, since it ends with the machine. ``module`` is the number of its place
    on the baseboard, and ``whole_attributes`` are published of the whole device alone, not of its partitions.
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
    passthrough: Passthrough | None = None
    unshareable: Sign | None = None
    driver_version: str = ""
    clique: Clique | None = None
    switched: bool = False
    module: int | None = None
    whole_attributes: Mapping[str, AttributeValue] = field(default_factory=dict)

    def profile(self, profile_id: int) -> Profile | None:
        """Return the profile with that published id, or None."""
        return next((profile for profile in self.profiles if profile.profile_id == profile_id), None)

    def find_profile(self, name: str) -> Profile | None:
        """Return the profile that a name in any spelling means on this device, or None."""
        return next((profile for profile in self.profiles if profile.answers_to(name.strip())), None)

    def partition(self, uuid: str) -> Partition | None:
        """Return the live partition with that UUID, or None."""
        return next((partition for partition in self.partitions if uuid and partition.uuid == uuid), None)

    def describe(self) -> str:
        """Name the device for a person."""
        return f"{self.product} {self.index} ({self.uuid}, {self.pci_address})"


# The causes of faults that have nothing to do with one vendor's silicon; the others are words of the vendor's folder.
NO_ANSWER = "no-answer"  # a call did not come back within its deadline
UNKNOWN_ERROR = "unknown-error"
AWAITED = "awaited"  # no fault yet: a device that was never read takes its time, and its neighbours do not wait for it


@dataclass(frozen=True)
class Fault:
    """What is wrong with one physical device: a stable word for it, which taints carry, and what was found, for people."""

    cause: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Finding:
    """What one look tells of one physical device: its facts, or its fault, or both.

    ``name`` says for a person which device it is, also where little else is known. ``uuid`` is empty where it was never
    learnt. ``device`` are its facts: fresh ones; where a fault keeps them from being read, those that were read last, with
    the fault's cause in ``device.health`` and without processes; None where none ever were. ``fault`` is None for a
    device that is well.
    """

    index: int
    name: str
    uuid: str
    device: Device | None
    fault: Fault | None = None

    @property
    def awaited(self) -> bool:
        """Whether the device is still being read for the first time, within its deadline."""
        return self.fault is not None and self.fault.cause == AWAITED

    def describe(self) -> str:
        """Name the device, and what is wrong with it, for a person."""
        return f"{self.name}: {self.fault}" if self.fault is not None else self.name


def devices_of(findings: Iterable[Finding]) -> tuple[Device, ...]:
    """Return the devices whose facts are known, those with a fault among them."""
    return tuple(finding.device for finding in findings if finding.device is not None)


def well(findings: Iterable[Finding]) -> tuple[Device, ...]:
    """Return the devices without a fault, whose facts are fresh: what can be changed."""
    return tuple(finding.device for finding in findings if finding.device is not None and finding.fault is None)


@dataclass(frozen=True)
class Notice:
    """What a device told of without being asked; ``uuid`` is empty where it is not known which device it was.

    ``sign`` is what it says of the device's health, where that is more than what a look will find.
    """

    uuid: str
    message: str
    sign: Sign | None = None


@dataclass(frozen=True)
class Surroundings:
    """What the machine itself shows of a vendor's devices, by their names there, and of the driver that they have.

    Two of them that differ say that devices or the driver have come, gone or changed; what, a look tells.
    """

    driver: tuple[object, ...]
    devices: frozenset[str]
    #: How many devices that were passed through have come back by somebody else's hand: the vendor's library does not know them.
    returned: int = 0


@dataclass(frozen=True)
class Taint:
    """A device taint as published in a ResourceSlice."""

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True)
class RequestPolicy:
    """How much of a capacity one claim consumes: by default, at least, and in which steps above that."""

    default: int
    minimum: int
    step: int


@dataclass(frozen=True)
class Offer:
    """One device of a ResourceSlice: a whole device, also one for a virtual machine, a partition that exists or one that can be made.

    ``capacities`` and ``consumes`` hold plain numbers; those called memory are bytes. With ``policies``, one for each
    capacity, several claims have the device at a time, each a part of it. ``prepared_before_binding`` says that pods are bound when the
    device is prepared for them. A dynamic one whose ``placement`` is a number is one of so many that can be made: the number tells
    them apart, and which one the partition will have is decided when it is planned.

    A group stands for several whole devices: ``members`` are their UUIDs, ``device_uuid`` is the first, ``profile`` what kind of group it
    is in the vendor's word. ``jointly`` is what an offer takes of counter sets that several devices share, by set (see composed.py).
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
        """The physical devices that it is, or is a part of."""
        return self.members or (self.device_uuid,)

    @property
    def taken(self) -> Mapping[str, Mapping[str, int]]:
        """All that it takes of counter sets, by set."""
        own = {self.counter_set: self.consumes} if self.counter_set and self.consumes else {}
        return {**own, **self.jointly}


@dataclass(frozen=True)
class CounterSet:
    """What a physical device has to share out among its offers."""

    name: str
    counters: Mapping[str, int]


#: Given the offers, all devices by their UUIDs, and the UUIDs of those that claims hold: the offers as they are published then.
#: Attributes and order may differ, nothing else. Pure.
Arranged = Callable[[Sequence[Offer], Mapping[str, Device], Collection[str]], tuple[Offer, ...]]
