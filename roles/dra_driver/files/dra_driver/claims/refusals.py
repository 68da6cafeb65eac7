# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What devices refuse although all that is counted allows it: kept from new claims for as long as it is likely to be refused again.

Counters do not know everything: what is free may lie apart on the silicon, and a device may keep something for itself. Of that only
the device can tell, when it is told to make a partition. Nothing is made to find out: what was refused is offered again when something
that was in the way may have gone, or after a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..core.errors import DoesNotFit
from ..core.model import PARTITION, Device, Offer, OwnedPartition, Partition, Taint
from .plan import Destruction, destruction, partition_of
from .records import ClaimRecord, DeviceRecord

#: The cause in the taint's key.
REFUSED = "partition-refused"
#: How long an offer is kept from new claims, in seconds: the first time, and at most, when it was refused again each time.
FIRST_SECONDS, LONGEST_SECONDS = 60.0, 960.0


class PartitionRefused(DoesNotFit):
    """A device does not make a partition although its plan fits. ``held`` is the one of the claim's devices that it would have been."""

    def __init__(self, error: DoesNotFit, held: DeviceRecord) -> None:
        super().__init__(error.message, blockers=error.blockers, hint=error.hint, code=error.code)
        self.held = held


@dataclass(frozen=True)
class Refusal:
    """One partition that a device has refused: what it would have taken, and which partitions were there, by number and key.

    ``until`` is on the ledger's clock; ``times`` counts the refusals that came after a while without one.
    """

    device_uuid: str
    consumes: Mapping[str, int]
    there: frozenset[tuple[int, OwnedPartition]]
    until: float
    times: int = 1

    def stands(self, device: Device | None, now: float) -> bool:
        """Whether it is likely to be refused again: it is not long ago, and nothing that was there has gone."""
        return now < self.until and device is not None and self.there <= _there(device)

    def concerns(self, offer: Offer) -> bool:
        """Whether a published device would be refused as well: one that can be made there, and takes no less of anything."""
        return (
            offer.device_uuid == self.device_uuid
            and offer.kind == PARTITION
            and offer.dynamic
            and all(offer.consumes.get(counter, 0) >= amount for counter, amount in self.consumes.items())
        )


class Refusals:
    """Remembers them in this process. Used on the event loop alone; ``clock`` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, frozenset[tuple[str, int]]], Refusal] = {}

    def note(self, offer: Offer, device: Device) -> float:
        """Take note that a device, as it is now, does not make what is offered; return for how many seconds it is kept back."""
        key, now = (offer.device_uuid, frozenset(offer.consumes.items())), self._clock()
        known = self._known.get(key)
        times = 1
        if known is not None and known.there <= _there(device):
            # Asked for again while it stands says nothing new; refused again when it was offered again does.
            times = known.times + (now >= known.until)
        seconds = min(FIRST_SECONDS * float(2 ** (times - 1)), LONGEST_SECONDS)
        self._known[key] = Refusal(offer.device_uuid, dict(offer.consumes), _there(device), now + seconds, times)
        return seconds

    def made(self, offer: Offer) -> None:
        """Forget what is disproved by a partition that was made just now."""
        self._known = {key: each for key, each in self._known.items() if not each.concerns(offer)}

    def tainted(self, driver: str, offers: Iterable[Offer], devices: Mapping[str, Device]) -> tuple[Offer, ...]:
        """Return what is published, with a taint on what cannot be made for now."""
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
    """What of the driver's own can go from a device so that its room lies together again.

    ``leftovers`` are claims whose preparation failed and could not be taken back then. ``movable`` are claims that are prepared and
    that no kubelet has asked for yet: their partitions, which ``destructions`` names, are made again at their places afterwards.
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
    """Decide what can be cleared from a device for a claim that is being prepared, of all ``records`` but its own; pure.

    ``devices`` are fresh facts of those whose locks are held, ``waiting`` the UIDs of claims that no kubelet has asked for. Partitions
    that anything uses, that a container may be about to get, or that the driver did not make stay where they are.
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
        elif record.uid in waiting and not record.shared and not record.away:
            movable.append(record)
            destructions += [destruction(on, partition) for on, partition in made if partition and on == uuid]
    return Clearance(tuple(leftovers), tuple(movable), tuple(destructions))


def _made(devices: Mapping[str, Device], held: DeviceRecord) -> Partition | None:
    device = devices.get(held.device_uuid)
    return partition_of(device, held) if device is not None else None
