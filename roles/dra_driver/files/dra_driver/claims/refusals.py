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
    """A device rejects a partition although the plan fits. ``held`` is the device of the claim that it would be."""

    def __init__(self, error: DoesNotFit, held: DeviceRecord) -> None:
        super().__init__(error.message, blockers=error.blockers, hint=error.hint, code=error.code)
        self.held = held


@dataclass(frozen=True)
class Refusal:
    """A partition that a device rejected: its counters, and the existing partitions at that time, by ID and key.

    ``until`` is on the clock of Refusals. ``times`` counts the rejections that came after the previous one had expired.
    """

    device_uuid: str
    consumes: Mapping[str, int]
    there: frozenset[tuple[int, OwnedPartition]]
    until: float
    times: int = 1

    def stands(self, device: Device | None, now: float) -> bool:
        """Return whether another rejection is likely: it has not expired, and no partition was removed since."""
        return now < self.until and device is not None and self.there <= _there(device)

    def concerns(self, offer: Offer) -> bool:
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

    def note(self, offer: Offer, device: Device) -> float:
        """Record that a device in its current state rejected an offer. Return the seconds for which it is tainted."""
        key, now = (offer.device_uuid, frozenset(offer.consumes.items())), self._clock()
        known = self._known.get(key)
        times = 1
        if known is not None and known.there <= _there(device):
            # A rejection while the previous one is valid is not new information. One after its expiry is.
            times = known.times + (now >= known.until)
        seconds = min(FIRST_SECONDS * float(2 ** (times - 1)), LONGEST_SECONDS)
        self._known[key] = Refusal(offer.device_uuid, dict(offer.consumes), _there(device), now + seconds, times)
        return seconds

    def made(self, offer: Offer) -> None:
        """Remove the rejections that a successful creation disproves."""
        self._known = {key: each for key, each in self._known.items() if not each.concerns(offer)}

    def tainted(self, driver: str, offers: Iterable[Offer], devices: Mapping[str, Device]) -> tuple[Offer, ...]:
        """Return the offers, with a taint on partitions that a device recently rejected."""
        now = self._clock()
        standing = [each for each in self._known.values() if each.stands(devices.get(each.device_uuid), now)]
        taint = Taint(f"{driver}/{REFUSED}", "NoSchedule")
        return tuple(
            replace(offer, taints=(*offer.taints, taint)) if any(each.concerns(offer) for each in standing) else offer
            for offer in offers
        )


def _there(device: Device) -> frozenset[tuple[int, OwnedPartition]]:
    return frozenset((each.instance_id, each.key) for each in device.partitions)


@dataclass(frozen=True)
class Clearance:
    """The driver's partitions that can be removed from a device, so that its free capacity is contiguous.

    ``leftovers`` are claims whose preparation failed and could not be undone. ``movable`` are prepared claims that no
    kubelet has asked for yet. Their partitions, listed in ``destructions``, are created again at the same placements.
    """

    leftovers: tuple[ClaimRecord, ...] = ()
    movable: tuple[ClaimRecord, ...] = ()
    destructions: tuple[Destruction, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leftovers or self.movable)


def clearance(
    devices: Mapping[str, Device],
    uuid: str,
    records: Iterable[ClaimRecord],
    waiting: Collection[str],
) -> Clearance:
    """Return what can be removed from a device for the claim that is being prepared. ``records`` are all other claims.

    ``devices`` are fresh facts of the devices with held locks. ``waiting`` are the UIDs of claims that no kubelet has
    asked for. Partitions in use, partitions that a container may soon use, and partitions of other owners stay.
    """
    leftovers, movable, destructions = [], [], []
    for record in records:
        made = [(held.device_uuid, _made(devices, held)) for held in record.devices if held.created]
        is_here = any(held.created and held.device_uuid == uuid for held in record.devices)
        if not is_here or not set(record.device_uuids) <= set(devices):
            continue
        if any(partition is not None and partition.processes for _uuid, partition in made):
            continue
        if not record.prepared:
            leftovers.append(record)
        elif record.uid in waiting and not record.shared and not record.passthrough_devices:
            movable.append(record)
            destructions += [destruction(on, partition) for on, partition in made if partition and on == uuid]
    return Clearance(tuple(leftovers), tuple(movable), tuple(destructions))


def _made(devices: Mapping[str, Device], held: DeviceRecord) -> Partition | None:
    device = devices.get(held.device_uuid)
    return partition_of(device, held) if device is not None else None
