# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The protocol that each vendor's directory implements. ``backend.py`` has the list of the vendors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Callable, Protocol, TypeVar

from .cdi import ContainerEdits
from .companions import Companion, SharedDevice
from .composed import Grouping
from .configuration import ConfigKind
from .fabric import FabricPartitions
from .labels import NO_PARTITIONS, UNKNOWN_MACHINE, MachineFacts
from .lanes import Call
from .model import (
    Arranged,
    AttributeValue,
    CounterSet,
    Device,
    Finding,
    Notice,
    Offer,
    OwnedPartition,
    Partition,
    Placement,
    Surroundings,
)
from .settings import Knob
from .telemetry import Telemetry
from .vendor import VendorFacts

Answer = TypeVar("Answer")


class Backend(Protocol):
    """One vendor's devices on this machine.

    All methods may be called from several threads. Methods that change a device hold that device's lock, so calls for
    different devices run side by side.

    A fault has an owner. What goes wrong with one physical device is DeviceFaulty, whose code is the cause, for a call
    about that device, and a Fault in what ``discover`` returns; other devices notice nothing. Every call about a device
    ends within a deadline: a device that hangs is DeviceFaulty with the cause no-answer, at once for whoever asks next,
    until the call that hangs has come back. Only BackendUnavailable is about the whole machine.
    """

    #: What the vendor's things are called; the three names below are the most used of it.
    facts: VendorFacts
    vendor: str
    driver_name: str
    cdi_kind: str
    config_kinds: tuple[ConfigKind, ...]
    #: What the devices of the vendor's standard DeviceClasses are (see Offer.kind), by the class's name.
    device_classes: Mapping[str, str]
    #: Whether partitions are there again after a start of the machine, whoever made them.
    partitions_outlive_boot: bool
    #: Whether programs may run on the node beside the vendor's claims. One vendor's alone: what they leave names the claim, not the vendor.
    has_companions: bool
    #: Which whole devices claims may have as one; None for a vendor whose devices are had one by one.
    grouping: Grouping | None
    #: What becomes of the offers while claims hold devices, or partitions of them; None where nothing does.
    arranged: Arranged | None
    #: By which attribute, and which value of it, selectors of other classes tell what the devices are (see device_classes.py).
    device_types: Mapping[tuple[str, str], str]

    @property
    def fabric_partitions(self) -> FabricPartitions | None:
        """The partitions of the machine's fabric; None if no fabric of the vendor has partitions."""

    def is_there(self) -> bool:
        """Whether the machine shows a device of the vendor, with a driver for it or without. Asks no library."""

    def open(self) -> None:
        """Reach the vendor's library. Raises BackendUnavailable with the reason; may be called again at any time."""

    def close(self) -> None:
        """Let go of the vendor's library, of every handle and of what ``wait_for_change`` listens to.

        Afterwards nothing of this process keeps a device from being reset. Last known facts are kept for ``discover``.
        """

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        """Look at all devices, side by side, and return each one's facts or its fault, ordered by index.

        A device that was known and does not answer any more is among them, one that was taken away is not. Facts that
        never change are read once; ``full`` reads them again. With ``patience``, in seconds, a device that was never read
        is not waited for longer than that: it goes on being read, and until it is back, or its own deadline is over, it
        is found as awaited. Raises BackendUnavailable, and nothing else, where the library itself does not work or does
        not tell which devices there are.
        """

    def device(self, uuid: str) -> Device:
        """Return fresh facts of one device, cheaply. Raises NotFound, DeviceFaulty, BackendUnavailable."""

    def ask(self, uuid: str) -> Call[Device]:
        """Begin what ``device`` does, and return at once: for who must not wait and can be told."""

    def together(self, uuid: str, function: Callable[[], Answer]) -> Answer:
        """Do several things to one device, one after the other, with nothing of others in between; return what the function returns.

        What the function asks of the device has the deadlines that it has anywhere. The function changes nothing but the device, and
        asks nothing of others. Raises what it raises, and DeviceFaulty with the cause no-answer when a part of it is late: then the
        rest of it is not done, and what was done is still to be found out.
        """

    def visit(self, uuid: str, function: Callable[[], Answer]) -> Call[Answer]:
        """Begin what ``together`` does, and return at once; the function may write down in between what it does to the device.

        When it has called ``leave`` it may do whatever it likes; what it was asked for is back when it returns.
        """

    def leave(self, uuid: str) -> None:
        """Let others ask the device from now on; what calls this is a visit. Raises Abandoned where nobody waits for it any more."""

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait until a device tells of something, for so many seconds at most; nothing said means nothing was told.

        What is told (an error, a change of partitioning that somebody else has made) is a reason to look at once, no more:
        vendors tell of some changes and not of others, and a look is what tells the facts. Blocks, so it wants a thread of
        its own; returns early when the backend is closed. While somebody waits, looks may leave out what would have been
        told. Raises BackendUnavailable when the backend is not open.
        """

    def surroundings(self) -> Surroundings:
        """Return what the machine itself shows of the vendor's devices and driver. Costs next to nothing, and asks no library.

        Devices that were given to another driver through ``detach`` count as there.
        """

    def renew(self) -> None:
        """Open the library anew: what it found when it was opened is no longer so. Whatever is asked meanwhile waits.

        Raises BackendUnavailable; it is closed then.
        """

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Switch partitioning on or off; where a reset is needed the change stays pending.

        Raises InUse, NotPermitted, Unsupported, DeviceFaulty.
        """

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset devices together. Raises InUse, NotPermitted, DeviceFaulty, AcceleratorError."""

    def choose_id(self, device: Device, placement: Placement, taken: Collection[int] = ()) -> int | None:
        """Return the instance id to make a partition at this placement with; None where the device itself gives ids. Pure.

        ``taken`` are ids that other partitions are to have, which need not be there. Raises InUse when none is left.
        """

    def create_partition(
        self, uuid: str, profile_id: int, placement: Placement, instance_id: int | None = None
    ) -> Partition:
        """Create a partition at exactly this placement; nothing stays behind on failure.

        With an ``instance_id``, one that ``choose_id`` has returned, it is made with that or not at all.

        Raises DoesNotFit, NotPermitted, Unsupported, NotFound, DeviceFaulty.
        """

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        """Destroy a partition. Raises NotFound, InUse, NotPermitted, DeviceFaulty."""

    def knobs(self, uuid: str, names: Collection[str]) -> Mapping[str, Knob]:
        """Return those of a device's knobs that are named and that it has. Raises NotFound, DeviceFaulty, BackendUnavailable."""

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        """Set knobs of a device; None is what the node has set (settings_record.py), or else what the device has by default.

        Where one fails, those before it may have been set. Raises NotFound, NotPermitted, Unsupported, DeviceFaulty,
        BackendUnavailable, AcceleratorError.
        """

    def telemetry(self, seconds: float, partitions: Collection[str] = ()) -> tuple[Telemetry, ...]:
        """Return what the devices and these partitions (UUIDs) tell of their present work, within so many seconds.

        Who asks a partition may hold it from then on, so that no other process can destroy it: name none but the driver's own.
        All devices are asked side by side; one that has a fault, does not answer in time or works on something else is left
        out and holds up no other. For who watches, off the way of claims. Raises BackendUnavailable.
        """

    def companions(self, claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
        """Return the programs that let containers share these devices of a claim. Pure. Raises ConfigRefused."""

    def refuse_without_companions(self) -> None:
        """Refuse where the programs for that are not on this machine. Raises AcceleratorError with what to install."""

    def companion_edits(self, companion: Companion) -> ContainerEdits:
        """Return what a container needs to reach a companion. Pure."""

    def detach(self, uuid: str, action: Callable[[], None]) -> None:
        """Let a device be given to another driver: let go of it, call ``action``, which does that, and go on without it.

        Afterwards the library does not know the device, and its facts stand as they were read last. Calls about other devices
        wait meanwhile. Raises what ``action`` raises, InUse, DeviceFaulty, BackendUnavailable.
        """

    def attach(self, uuid: str, action: Callable[[], None]) -> None:
        """Take a device back: call ``action``, which gives it to the vendor's own driver, and wait until the library knows it.

        Raises what ``action`` raises, NotFound, DeviceFaulty, BackendUnavailable.
        """

    def number_by(self, directory: str, *, writes: bool = False, is_referred: bool = True) -> None:
        """Give devices the indices in the file of the driver whose state directory this is: they stay when a device is removed.

        The driver ``writes`` the file. If no claim or rule refers to devices by index (``is_referred``), they get new numbers.
        """

    def remember(self, devices: Iterable[Device]) -> None:
        """Learn the facts of devices that were detached before this process began; those that are there are read as ever."""

    def device_nodes(self, device: Device) -> tuple[str, ...]:
        """Return the device nodes by which programs use a whole device. Pure."""

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        """Return what is published of a device. Pure.

        ``owned`` are the partitions, by profile id, start and size, that the driver made for claims; all others that
        exist are an administrator's, are published as they are and never destroyed. With ``passthrough`` a virtual machine can
        have the device: what is published beside the whole device takes all that this takes of the same counters.
        """

    def labels(
        self, devices: Sequence[Device], machine: MachineFacts = UNKNOWN_MACHINE, strategy: str = NO_PARTITIONS
    ) -> Mapping[str, str]:
        """Return the labels of a Node with these devices, of those that ``facts`` names. Pure.

        What is not the same for all of them is not among them. ``strategy``, one of ``labels.STRATEGIES``, says how labels speak of
        partitions, where the vendor's own do.
        """

    def resource_name(self, device: Device, profile: str | None) -> str:
        """Return what pods ask for, through the kubelet's device-plugin API, to get such a whole device (no profile) or a partition of it.

        Pure. The names are those of the vendor's own device plugin, so that pods written for that one need no change.
        """

    def parts(self, device: Device) -> Mapping[str, int]:
        """Return the capacities of a whole device that are shared out among claims which have it at the same time. Pure."""

    def counter_set(self, device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
        """Return what the device's dynamic offers share. Pure.

        With ``owned`` (the same as for ``offers``) the room that other partitions take is left out.
        """

    def driver_edits(self) -> ContainerEdits:
        """Return the container edits that all devices of the vendor need, by what is on the disk now; cheap.

        With ``lists``, even of nothing, containers know their devices by these variables.

        Raises BackendUnavailable, naming it, when something is not there that no container can do without.
        """

    def settle(self, seconds: float) -> None:
        """Wait, for so many seconds at most, until what ``driver_edits`` has asked for beside is known: the next call returns it."""

    def machine_edits(self) -> ContainerEdits:
        """Return the container edits of who has devices for virtual machines alone: nothing of the vendor's driver. Pure."""

    def device_attributes(
        self, device: Device, partition: Partition | None, is_for_machine: bool = False
    ) -> Mapping[str, AttributeValue]:
        """Return what is published of one whole device (no partition), as what a virtual machine gets or not, or of one partition.

        Pure.
        """

    def device_edits(self, device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
        """Return the container edits of one whole device (no partition) or of one partition.

        With ``monitoring`` also what lets a container watch the device's partitions without holding any of them.
        """

    def share_edits(self, device: Device, consumed: Mapping[str, int]) -> ContainerEdits:
        """Return what tells containers how much their claim has of a whole device that other claims have as well. Pure."""
