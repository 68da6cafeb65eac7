# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keep partitions that a device rejected from new claims, while another rejection is likely.

Counters do not describe everything: free capacity can be fragmented, and a device can reserve some for itself. Only an
attempt to create a partition shows that. The driver makes no attempt without a claim. A rejected partition is offered
again when a conflicting partition may have been removed, or after some time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..core.errors import DoesNotFit
from ..core.model import PARTITION, Device, Offer, OwnedPartition, Partition, Taint
from .plan import Destruction, destruction, partition_of
from .store.records import ClaimRecord, DeviceRecord

#: The cause in the taint's key.
REFUSED = "partition-refused"
#: Seconds for which an offer is kept from new claims: after the first rejection, and the maximum after repeated ones.
FIRST_SECONDS, LONGEST_SECONDS = 60.0, 960.0


class PartitionRefused(DoesNotFit):
    """A device rejects a partition although the plan fits. ``device_record`` describes the partition."""

    def __init__(self, error: DoesNotFit, device_record: DeviceRecord) -> None:
        super().__init__(error.message, blockers=error.blockers, hint=error.hint, code=error.code)
        self.device_record = device_record


@dataclass(frozen=True)
class Refusal:
    """A partition that a device rejected.

    ``consumes`` are the amounts that the partition needs of each counter. ``existing_partitions`` were on the device at
    that time, by instance ID and key. ``until`` is the expiry on the clock of Refusals. ``times`` counts the rejections
    that came after the previous one had expired.
    """

    device_uuid: str
    consumes: Mapping[str, int]
    existing_partitions: frozenset[tuple[int, OwnedPartition]]
    until: float
    times: int = 1

    def is_likely_again(self, device: Device | None, now: float) -> bool:
        """Return whether another rejection is likely: it has not expired, and no partition was removed since."""
        return now < self.until and device is not None and self.existing_partitions <= _partition_keys(device)

    def applies_to(self, offer: Offer) -> bool:
        """Return whether an offer would be rejected too: a dynamic partition of the same device that needs at least the same capacity."""
        return (
            offer.device_uuid == self.device_uuid
            and offer.kind == PARTITION
            and offer.dynamic
            and all(offer.consumes.get(counter, 0) >= amount for counter, amount in self.consumes.items())
        )


class Refusals:
    """The rejections in this process. Used on the event loop only. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, frozenset[tuple[str, int]]], Refusal] = {}

    def add(self, offer: Offer, device: Device) -> float:
        """Record that a device in its current state rejected an offer. Return the seconds for which it is tainted."""
        key, now = (offer.device_uuid, frozenset(offer.consumes.items())), self._clock()
        known = self._known.get(key)
        times = 1
        if known is not None and known.existing_partitions <= _partition_keys(device):
            # A rejection while the previous one is valid is not new information. One after its expiry is.
            times = known.times + (now >= known.until)
        seconds = min(FIRST_SECONDS * float(2 ** (times - 1)), LONGEST_SECONDS)
        self._known[key] = Refusal(
            offer.device_uuid, dict(offer.consumes), _partition_keys(device), now + seconds, times
        )
        return seconds

    def remove_disproved(self, offer: Offer) -> None:
        """Remove the rejections that a successful creation disproves."""
        self._known = {key: each for key, each in self._known.items() if not each.applies_to(offer)}

    def taint_offers(self, driver: str, offers: Iterable[Offer], devices: Mapping[str, Device]) -> tuple[Offer, ...]:
        """Return the offers, with a taint on partitions that a device recently rejected."""
        now = self._clock()
        valid = [each for each in self._known.values() if each.is_likely_again(devices.get(each.device_uuid), now)]
        taint = Taint(f"{driver}/{REFUSED}", "NoSchedule")
        return tuple(
            replace(offer, taints=(*offer.taints, taint)) if any(each.applies_to(offer) for each in valid) else offer
            for offer in offers
        )


def _partition_keys(device: Device) -> frozenset[tuple[int, OwnedPartition]]:
    """Return the instance ID and the key of each partition on a device."""
    return frozenset((each.instance_id, each.key) for each in device.partitions)


@dataclass(frozen=True)
class RemovablePartitions:
    """The driver's partitions that can be removed from a device, so that its free capacity is contiguous.

    ``leftovers`` are claims whose preparation failed and could not be undone. ``movable`` are prepared claims that the
    kubelet has not prepared yet. ``destructions`` are the partitions of the movable claims. They are created again at the
    same placements.
    """

    leftovers: tuple[ClaimRecord, ...] = ()
    movable: tuple[ClaimRecord, ...] = ()
    destructions: tuple[Destruction, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leftovers or self.movable)


def find_removable_partitions(
    devices: Mapping[str, Device],
    uuid: str,
    records: Iterable[ClaimRecord],
    prepared_ahead: Collection[str],
) -> RemovablePartitions:
    """Return the partitions of a device that can be destroyed for the claim that is being prepared.

    ``devices`` are fresh facts of the devices with held locks. ``records`` are all other claims. ``prepared_ahead`` are the
    UIDs of the claims that the kubelet has not prepared yet. Partitions in use, partitions that a container may soon use,
    and partitions of other owners stay.
    """
    leftovers, movable, destructions = [], [], []
    for record in records:
        made = [
            (device_record.device_uuid, _existing_partition(devices, device_record))
            for device_record in record.devices
            if device_record.created
        ]
        is_here = any(device_record.created and device_record.device_uuid == uuid for device_record in record.devices)
        if not is_here or not set(record.device_uuids) <= set(devices):
            continue
        if any(partition is not None and partition.processes for _uuid, partition in made):
            continue
        if not record.prepared:
            leftovers.append(record)
        elif record.uid in prepared_ahead and not record.shared and not record.passthrough_devices:
            movable.append(record)
            destructions += [destruction(on, partition) for on, partition in made if partition and on == uuid]
    return RemovablePartitions(tuple(leftovers), tuple(movable), tuple(destructions))


def _existing_partition(devices: Mapping[str, Device], device_record: DeviceRecord) -> Partition | None:
    device = devices.get(device_record.device_uuid)
    return partition_of(device, device_record) if device is not None else None
