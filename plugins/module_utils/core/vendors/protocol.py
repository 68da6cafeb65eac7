# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The protocol that each vendor's directory implements. ``registry.py`` has the list of the vendors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Callable, Protocol, TypeVar

from ..discovery.device_workers import Call
from ..dra.composite_devices import Grouping
from ..dra.node_labels import NO_PARTITIONS, UNKNOWN_MACHINE, MachineFacts
from ..dra.opaque_config import ConfigKind
from ..host.cdi import ContainerEdits
from ..host.companions import Companion, SharedDevice
from ..model import (
    AttributeValue,
    CounterSet,
    Device,
    Finding,
    Notice,
    Offer,
    OfferArranger,
    OwnedPartition,
    Partition,
    Placement,
    Surroundings,
)
from ..settings.knobs import Knob
from ..telemetry import Telemetry
from .fabric_partitions import FabricPartitions
from .vendor_facts import VendorFacts

Answer = TypeVar("Answer")


class Backend(Protocol):
    """The devices of one vendor on this node.

    Methods marked "No side effects" read and change nothing outside their arguments. All methods are thread-safe. Methods that change
    a device hold the lock of this device, so calls for different devices run in parallel.

    A failure of one physical device does not affect other devices: a call for the device raises DeviceFaulty, whose code is the
    cause, and ``discover`` returns a Fault. Every call for a device ends within a deadline. If a device hangs, the call raises
    DeviceFaulty with the cause no-answer, and so does each later call, at once, until the hanging call has returned. Only
    BackendUnavailable concerns the whole node.
    """

    #: The names of the vendor's objects. The three attributes below are the most used of these names.
    facts: VendorFacts
    vendor: str
    driver_name: str
    cdi_kind: str
    config_kinds: tuple[ConfigKind, ...]
    #: The kind of device (see Offer.kind) of each standard DeviceClass of the vendor, by class name.
    device_classes: Mapping[str, str]
    #: Whether all partitions exist again after a reboot.
    partitions_outlive_boot: bool
    #: Whether programs can run on the node for the vendor's claims. At most one vendor: their files name the claim, not the vendor.
    has_companions: bool
    #: The groups of whole devices that a claim can use as one device. None if the vendor has no groups.
    grouping: Grouping | None
    #: How offers change while claims use devices or partitions. None if offers do not change.
    arranged: OfferArranger | None
    #: The kind of device by an attribute and its value, for selectors of other classes (see class_kinds.py).
    device_types: Mapping[tuple[str, str], str]

    @property
    def fabric_partitions(self) -> FabricPartitions | None:
        """Return the partitions of the node's fabric, or None if no fabric of the vendor has partitions."""

    def has_devices(self) -> bool:
        """Return whether the node has a device of the vendor, with or without a driver. Does not call the library."""

    def open(self) -> None:
        """Open the vendor's library. Raises BackendUnavailable with the reason. Can be called again at any time."""

    def close(self) -> None:
        """Close the vendor's library, all handles, and the event sources of ``wait_for_change``.

        Afterwards this process does not prevent the reset of a device. The last known facts are kept for ``discover``.
        """

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        """Scan all devices in parallel. Return the facts or the fault of each device, ordered by index.

        A known device that does not answer is included, a removed device is not. Facts that never change are read
        once; ``full`` reads them again. ``patience`` (seconds) limits the wait for a device that was never read. The read
        continues, and the device is returned as awaited until the read ends or the device's deadline expires. Raises only
        BackendUnavailable, if the library does not work or does not list the devices.
        """

    def device(self, uuid: str) -> Device:
        """Read the current facts of one device, with few calls. Raises NotFound, DeviceFaulty, BackendUnavailable."""

    def ask(self, uuid: str) -> Call[Device]:
        """Start ``device`` without waiting for its result: for callers that must not block."""

    def run_on_device(self, uuid: str, function: Callable[[], Answer]) -> Answer:
        """Run a function that makes several calls for one device, without calls of other threads in between.

        Return its result. Each call has its usual deadline. The function must not change anything except the device,
        and must not call other devices. Raises the exceptions of the function, and DeviceFaulty with the cause
        no-answer if a call exceeds its deadline. Then the remaining calls are skipped, and the caller has to read the
        state of the device.
        """

    def start_on_device(self, uuid: str, function: Callable[[], Answer]) -> Call[Answer]:
        """Start ``run_on_device`` without waiting for its result. The function may record its changes between the calls.

        After the function has called ``leave``, it has no restrictions. The result is available when the function returns.
        """

    def leave(self, uuid: str) -> None:
        """Allow calls of other threads for the device.

        Only for functions of ``start_on_device``. Raises Abandoned if no caller waits for the result.
        """

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait for an event of a device, for up to ``seconds``. Return no notices if there was no event.

        A notice (an error, a change of partitioning by another program) is only a reason to scan at once: vendors report
        only some changes, and the scan reads the facts. Blocks, so call it on a separate thread. Returns early when the
        backend is closed. While a thread waits, scans may skip facts whose changes are reported as events. Raises
        BackendUnavailable if the backend is not open.
        """

    def surroundings(self) -> Surroundings:
        """Return the facts about the vendor's devices and driver that the operating system shows.

        Fast, does not call the library. Devices that ``detach`` has bound to another driver are included.
        """

    def reopen(self) -> None:
        """Close and open the library, because its facts from the last opening are outdated.

        Other calls wait until this is done. Raises BackendUnavailable, and the library is closed then.
        """

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        """Enable or disable partitioning. If a reset is needed, the change stays pending.

        Raises InUse, NotPermitted, Unsupported, DeviceFaulty.
        """

    def reset(self, uuids: Sequence[str]) -> None:
        """Reset devices together. Raises InUse, NotPermitted, DeviceFaulty, AcceleratorError."""

    def choose_id(self, device: Device, placement: Placement, taken: Collection[int] = ()) -> int | None:
        """Return the instance ID for a new partition at this placement, or None if the device assigns IDs.

        No side effects. ``taken`` are IDs that are reserved for other partitions, which need not exist yet. Raises
        InUse if no ID is free.
        """

    def create_partition(
        self, uuid: str, profile_id: int, placement: Placement, instance_id: int | None = None
    ) -> Partition:
        """Create a partition at exactly this placement. After a failure no partition exists.

        With an ``instance_id`` from ``choose_id``, the partition is created with this ID, or the call fails.

        Raises DoesNotFit, NotPermitted, Unsupported, NotFound, DeviceFaulty.
        """

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        """Destroy a partition. Raises NotFound, InUse, NotPermitted, DeviceFaulty."""

    def knobs(self, uuid: str, names: Collection[str]) -> Mapping[str, Knob]:
        """Return the named settings that a device has. Raises NotFound, DeviceFaulty, BackendUnavailable."""

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        """Change settings of a device.

        None means the node's value (settings_record.py), or the device's default without one. If a setting fails,
        previous settings may have been changed. Raises NotFound, NotPermitted, Unsupported, DeviceFaulty,
        BackendUnavailable, AcceleratorError.
        """

    def telemetry(self, seconds: float, partitions: Collection[str] = ()) -> tuple[Telemetry, ...]:
        """Return the utilization of the devices and of these partitions (UUIDs), within ``seconds``.

        A query can keep a partition open, so that no other process can destroy it: pass only partitions of the driver.
        All devices are queried in parallel. A device with a fault, without an answer in time, or with another call in progress is
        left out and does not delay the others. For monitoring only, not for claims. Raises BackendUnavailable.
        """

    def companions(self, claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
        """Return the programs that let containers share these devices of a claim.

        No side effects. Raises ConfigRefused.
        """

    def refuse_without_companions(self) -> None:
        """Verify that the companion programs are installed on this node.

        Raises AcceleratorError with the package to install.
        """

    def companion_edits(self, companion: Companion) -> ContainerEdits:
        """Return the container edits for the connection to a companion. No side effects."""

    def detach(self, uuid: str, action: Callable[[], None]) -> None:
        """Release a device, and call ``action``, which binds the device to another driver.

        Afterwards the library does not know the device, and the backend returns the facts that were read last. Calls for other
        devices wait until this is done. Raises the exceptions of ``action``, InUse, DeviceFaulty, BackendUnavailable.
        """

    def attach(self, uuid: str, action: Callable[[], None]) -> None:
        """Call ``action``, which binds a device to the vendor's driver, and wait until the library knows the device.

        Raises the exceptions of ``action``, NotFound, DeviceFaulty, BackendUnavailable.
        """

    def use_number_file(self, directory: str, *, writes: bool = False, is_referred: bool = True) -> None:
        """Assign device indices and names from the file in the driver's state directory, so that they stay when a device is removed.

        Only the driver ``writes`` the file. If no claim or rule refers to devices by index (``is_referred``), they get new indices;
        names stay.
        """

    def add_detached(self, devices: Iterable[Device]) -> None:
        """Store the facts of devices that were detached before this process started.

        The facts of all other devices are read.
        """

    def device_nodes(self, device: Device) -> tuple[str, ...]:
        """Return the device nodes through which programs use a whole device. No side effects."""

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[OwnedPartition] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        """Return the offers to publish for a device. No side effects.

        ``owned`` are the partitions, by profile ID, start, and size, that the driver created for claims. All other existing
        partitions are an administrator's: they are published unchanged and never destroyed. With ``passthrough`` a virtual machine
        can use the device. Its additional offer and the whole device consume the same counters completely.
        """

    def labels(
        self, devices: Sequence[Device], machine: MachineFacts = UNKNOWN_MACHINE, strategy: str = NO_PARTITIONS
    ) -> Mapping[str, str]:
        """Return the labels of a Node with these devices, limited to the labels that ``facts`` names. No side effects.

        A label is left out if its value differs between the devices. ``strategy``, one of ``labels.STRATEGIES``, is the form of labels
        for partitions, for vendors whose own labels have several forms.
        """

    def resource_name(self, device: Device, profile: str | None) -> str:
        """Return the extended resource that pods request to get such a whole device (no profile) or a partition of it.

        No side effects. The names are those of the vendor's device plugin, so that existing pods need no change.
        """

    def parts(self, device: Device) -> Mapping[str, int]:
        """Return the capacities of a whole device that are divided among claims that share the device.

        No side effects.
        """

    def counter_set(self, device: Device, owned: Collection[OwnedPartition] | None = None) -> CounterSet:
        """Return the counters that the device's dynamic offers share. No side effects.

        With ``owned`` (the same as for ``offers``) the capacity of other partitions is left out.
        """

    def describe_unrestored(self) -> str:
        """Return which partitions the vendor's driver has still to create after a boot; empty for none."""

    def driver_edits(self) -> ContainerEdits:
        """Return the container edits that all devices of the vendor need, from the current files on disk. Fast.

        If ``lists`` is set in the edits, even if it is empty, containers find their devices through these variables.

        Raises BackendUnavailable, which names the missing file, if a file that every container needs does not exist.
        """

    def settle(self, seconds: float) -> None:
        """Wait for up to ``seconds`` for queries that ``driver_edits`` has started in the background.

        Its next call returns their results.
        """

    def machine_edits(self) -> ContainerEdits:
        """Return the container edits for containers with only passthrough devices, without the vendor's driver.

        No side effects.
        """

    def device_attributes(
        self, device: Device, partition: Partition | None, is_for_machine: bool = False
    ) -> Mapping[str, AttributeValue]:
        """Return the published attributes of one whole device (no partition), optionally for a virtual machine, or of one partition.

        No side effects.
        """

    def device_edits(self, device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
        """Return the container edits of one whole device (no partition) or of one partition.

        With ``monitoring`` the edits also let a container monitor the device's partitions without using one.
        """

    def share_edits(self, device: Device, consumed: Mapping[str, int]) -> ContainerEdits:
        """Return the container edits with the claim's part of a shared whole device. No side effects."""
