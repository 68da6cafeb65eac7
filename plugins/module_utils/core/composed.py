# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Several whole devices that a claim can have as one: what keeps them, their members and the members' parts apart. Pure.

The API server takes a device that draws on two counter sets at most, with 32 counters each, so that a group cannot take all counters
of its members. It need not. Each member has one counter more, in a set that the devices share: a part of the device takes one of it,
the whole device all of it, and a group all of it of each member. There is as much of it as the device has parts, so that it never
keeps parts from each other: that is for the device's own counters to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .model import DEVICE, PARTITION, AttributeValue, CounterSet, Device, Offer, frozen
from .slices import MOST_COUNTERS_IN_SET, MOST_SETS_OF_A_DEVICE

#: A group may have so many members.
MOST_MEMBERS = MOST_COUNTERS_IN_SET * MOST_SETS_OF_A_DEVICE
_SET = "joint-counter-set"


class Grouping(Protocol):
    """A vendor's groups of whole devices. Pure functions."""

    def groups(self, devices: Sequence[Device], /) -> tuple[Offer, ...]:
        """Return the groups that are complete, by all devices that there are; what they take and have their members say."""

    def attributes_of(self, kind: str, devices: Sequence[Device], /) -> Mapping[str, AttributeValue]:
        """Return what is published of a group of a kind (``profile`` of its offer), by its members in their order."""


@dataclass(frozen=True)
class Composition:
    """What is published with the groups. ``left_out`` are those that cannot be had, by their names, with the reason."""

    offers: tuple[Offer, ...]
    counter_sets: tuple[CounterSet, ...]
    left_out: Mapping[str, str]


def compose(
    offers: Sequence[Offer], counter_sets: Sequence[CounterSet], groups: Iterable[Offer], barred: Collection[str] = ()
) -> Composition:
    """Add groups to what is published of single devices, so that nothing that overlaps is given away twice.

    A group is had where each of its members is offered whole, to one claim at a time, and none is ``barred`` (UUIDs). It has the sum of
    its members' capacities. Groups come last, in the order of ``listed``. What belongs to no group stays as it is.
    """
    whole = {offer.device_uuid: offer for offer in offers if offer.kind == DEVICE and not offer.policies}
    position = {uuid: number for number, uuid in enumerate(whole)}
    left_out: dict[str, str] = {}
    had: list[Offer] = []
    for group in groups:
        why = _hindrance(group, whole, barred)
        if why:
            left_out[group.name] = why
        else:
            had.append(group)
    if not had:
        return Composition(tuple(offers), tuple(counter_sets), left_out)
    places = _places([uuid for uuid in whole if any(uuid in group.members for group in had)])
    possible = [group for group in had if len({places[uuid] for uuid in group.members}) <= MOST_SETS_OF_A_DEVICE]
    left_out.update(
        {
            group.name: f"its members are in more than {MOST_SETS_OF_A_DEVICE} counter sets"
            for group in had
            if group not in possible
        }
    )
    parts = Counter(offer.device_uuid for offer in offers if offer.kind == PARTITION)
    totals = {uuid: max(parts[uuid], 1) for uuid in places}
    found = [
        replace(
            offer, jointly={places[uuid]: frozen({whole[uuid].name: 1 if offer.kind == PARTITION else totals[uuid]})}
        )
        if (uuid := offer.device_uuid) in places
        else offer
        for offer in offers
    ]
    found += [_composed(group, whole, places, totals) for group in listed(possible, position)]
    sets: dict[str, dict[str, int]] = {}
    for uuid, name in places.items():
        sets.setdefault(name, {})[whole[uuid].name] = totals[uuid]
    joint = tuple(CounterSet(name, frozen(counters)) for name, counters in sets.items())
    return Composition(tuple(found), (*counter_sets, *joint), left_out)


def without_groups(
    offers: Iterable[Offer], counter_sets: Iterable[CounterSet]
) -> tuple[tuple[Offer, ...], tuple[CounterSet, ...]]:
    """Return what is published of single devices alone."""
    found = tuple(offers)
    joint = {name for offer in found for name in offer.jointly}
    return (
        tuple(replace(offer, jointly={}) if offer.jointly else offer for offer in found if not offer.members),
        tuple(each for each in counter_sets if each.name not in joint),
    )


def listed(groups: Iterable[Offer], position: Mapping[str, int]) -> tuple[Offer, ...]:
    """Return groups in the order in which they are published: small ones first, so that a claim for few comes last to what is large.

    Those of one size go from the last device to the first, because single devices are taken from the first on, and what these have
    begun is used up before another group is broken.
    """
    return tuple(
        sorted(groups, key=lambda each: (len(each.members), [-position[uuid] for uuid in each.members], each.name))
    )


def _hindrance(group: Offer, whole: Mapping[str, Offer], barred: Collection[str]) -> str:
    missing = [uuid for uuid in group.members if uuid not in whole]
    if missing:
        return f"{', '.join(missing)} is not offered whole"
    if any(uuid in barred for uuid in group.members):
        return "the layout does not want it"
    if not 2 <= len(set(group.members)) <= MOST_MEMBERS:
        return f"it has {len(set(group.members))} members, 2 to {MOST_MEMBERS} are possible"
    return ""


def _places(uuids: Sequence[str]) -> Mapping[str, str]:
    """Return in which shared set the counter of each device is."""
    return {
        uuid: _SET if len(uuids) <= MOST_COUNTERS_IN_SET else f"{_SET}-{number // MOST_COUNTERS_IN_SET}"
        for number, uuid in enumerate(uuids)
    }


def _composed(group: Offer, whole: Mapping[str, Offer], places: Mapping[str, str], totals: Mapping[str, int]) -> Offer:
    capacities: Counter[str] = Counter()
    jointly: dict[str, dict[str, int]] = {}
    for uuid in group.members:
        capacities.update(whole[uuid].capacities)
        jointly.setdefault(places[uuid], {})[whole[uuid].name] = totals[uuid]
    ahead = any(whole[uuid].prepared_before_binding for uuid in group.members)
    return replace(
        group,
        capacities=frozen(capacities),
        jointly={name: frozen(counters) for name, counters in jointly.items()},
        prepared_before_binding=ahead,
    )
