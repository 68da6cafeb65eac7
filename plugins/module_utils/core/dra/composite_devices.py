# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build groups of whole devices that a claim can get as one device, and prevent overlapping allocations.

No side effects. The API server accepts at most two counter sets per device, with 32 counters each, so a group cannot
consume all counters of its members. Instead, each member has one additional counter in a counter set that devices
share. A part of the device consumes one unit of it, the whole device consumes all units, and a group consumes all units
of each member. The counter has as many units as the device has parts, so it never prevents parts from coexisting. The
device's own counters control that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..model import DEVICE, PARTITION, AttributeValue, CounterSet, Device, Offer, frozen
from .resource_slices import MOST_COUNTERS_IN_SET, MOST_SETS_OF_A_DEVICE

#: The maximum number of members of a group.
MOST_MEMBERS = MOST_COUNTERS_IN_SET * MOST_SETS_OF_A_DEVICE
_SET = "joint-counter-set"


class Grouping(Protocol):
    """A vendor's groups of whole devices. The functions have no side effects."""

    def groups(self, devices: Sequence[Device], /) -> tuple[Offer, ...]:
        """Return the complete groups of the given devices. ``compose`` adds the values that depend on their members."""

    def attributes_of(self, kind: str, devices: Sequence[Device], /) -> Mapping[str, AttributeValue]:
        """Return the published attributes of a group of a kind (``profile`` of its offer), from its members in order."""


@dataclass(frozen=True)
class Composition:
    """The published devices with groups. ``left_out`` maps the names of unavailable groups to the reason."""

    offers: tuple[Offer, ...]
    counter_sets: tuple[CounterSet, ...]
    left_out: Mapping[str, str]


def compose(
    offers: Sequence[Offer], counter_sets: Sequence[CounterSet], groups: Iterable[Offer], barred: Collection[str] = ()
) -> Composition:
    """Add groups to the published single devices, with counters that prevent overlapping allocations.

    A group is offered if each of its members is offered as a whole device to one claim at a time and is not ``barred``
    (UUIDs). Its capacities are the sums of its members' capacities. Groups come last, in the order of ``sort_groups``.
    Devices without a group do not change.
    """
    whole = {offer.device_uuid: offer for offer in offers if offer.kind == DEVICE and not offer.policies}
    position = {uuid: number for number, uuid in enumerate(whole)}
    left_out: dict[str, str] = {}
    offered: list[Offer] = []
    for group in groups:
        why = _obstacle(group, whole, barred)
        if why:
            left_out[group.name] = why
        else:
            offered.append(group)
    if not offered:
        return Composition(tuple(offers), tuple(counter_sets), left_out)
    places = _places([uuid for uuid in whole if any(uuid in group.members for group in offered)])
    possible = [group for group in offered if len({places[uuid] for uuid in group.members}) <= MOST_SETS_OF_A_DEVICE]
    left_out.update(
        {
            group.name: f"its members are in more than {MOST_SETS_OF_A_DEVICE} counter sets"
            for group in offered
            if group not in possible
        }
    )
    parts = Counter(offer.device_uuid for offer in offers if offer.kind == PARTITION)
    totals = {uuid: max(parts[uuid], 1) for uuid in places}
    found = [
        replace(
            offer,
            joint_counters={places[uuid]: frozen({whole[uuid].name: 1 if offer.kind == PARTITION else totals[uuid]})},
        )
        if (uuid := offer.device_uuid) in places
        else offer
        for offer in offers
    ]
    found += [_complete_group(group, whole, places, totals) for group in sort_groups(possible, position)]
    sets: dict[str, dict[str, int]] = {}
    for uuid, name in places.items():
        sets.setdefault(name, {})[whole[uuid].name] = totals[uuid]
    joint = tuple(CounterSet(name, frozen(counters)) for name, counters in sets.items())
    return Composition(tuple(found), (*counter_sets, *joint), left_out)


def without_groups(
    offers: Iterable[Offer], counter_sets: Iterable[CounterSet]
) -> tuple[tuple[Offer, ...], tuple[CounterSet, ...]]:
    """Return only the published single devices."""
    found = tuple(offers)
    joint = {name for offer in found for name in offer.joint_counters}
    return (
        tuple(
            replace(offer, joint_counters={}) if offer.joint_counters else offer for offer in found if not offer.members
        ),
        tuple(each for each in counter_sets if each.name not in joint),
    )


def sort_groups(groups: Iterable[Offer], position: Mapping[str, int]) -> tuple[Offer, ...]:
    """Return groups in the order of publication: small ones first, so that a claim for few devices uses large groups last.

    Groups of one size go from the last device to the first, because single devices are allocated from the first on. So
    a partly allocated group is used up before another group is broken.
    """
    return tuple(
        sorted(groups, key=lambda each: (len(each.members), [-position[uuid] for uuid in each.members], each.name))
    )


def _obstacle(group: Offer, whole: Mapping[str, Offer], barred: Collection[str]) -> str:
    missing = [uuid for uuid in group.members if uuid not in whole]
    if missing:
        return f"{', '.join(missing)} is not offered whole"
    if any(uuid in barred for uuid in group.members):
        return "the layout does not want it"
    if not 2 <= len(set(group.members)) <= MOST_MEMBERS:
        return f"it has {len(set(group.members))} members, 2 to {MOST_MEMBERS} are possible"
    return ""


def _places(uuids: Sequence[str]) -> Mapping[str, str]:
    """Return the shared counter set of each device."""
    return {
        uuid: _SET if len(uuids) <= MOST_COUNTERS_IN_SET else f"{_SET}-{number // MOST_COUNTERS_IN_SET}"
        for number, uuid in enumerate(uuids)
    }


def _complete_group(
    group: Offer, whole: Mapping[str, Offer], places: Mapping[str, str], totals: Mapping[str, int]
) -> Offer:
    capacities: Counter[str] = Counter()
    joint_counters: dict[str, dict[str, int]] = {}
    for uuid in group.members:
        capacities.update(whole[uuid].capacities)
        joint_counters.setdefault(places[uuid], {})[whole[uuid].name] = totals[uuid]
    return replace(
        group,
        capacities=frozen(capacities),
        joint_counters={name: frozen(counters) for name, counters in joint_counters.items()},
        prepared_before_binding=any(whole[uuid].prepared_before_binding for uuid in group.members),
    )
