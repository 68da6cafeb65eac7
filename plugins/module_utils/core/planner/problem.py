# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the optimization problem: the possible configurations of each device of a fleet, their offers, and their costs.

An *item* is the unit that a claim can get: a whole device of one kind, or a partition of one profile of it. A
*configuration* of a device says which items it offers in addition to those that claims keep, which claims would move,
and which partitions would be deleted. Similar devices form one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..model import Device, Profile
from .arrangements import Arrangement, Arrangements, fewer
from .demands import Demand, Part
from .fleet import Fleet, FleetDevice

Amounts = tuple[tuple[int, int], ...]  # item numbers with the number of each


@dataclass(frozen=True)
class Item:
    """A unit that a claim can get: a partition of a profile, or without a profile the whole device, of one kind of device.

    ``on_demand`` says that the partition is created on demand for a claim. ``barred`` are the numbers of the demands
    that cannot use it, because its nodes are excluded for them.
    """

    number: int
    device: Device
    profile: Profile | None
    on_demand: bool = False
    barred: frozenset[int] = frozenset()

    @property
    def memory_bytes(self) -> int:
        """Return the item's memory in bytes."""
        return self.profile.memory_bytes if self.profile is not None else self.device.memory_bytes

    @property
    def rank(self) -> tuple[int, int, int, tuple[int, ...], str]:
        """Return the sort key that orders items from the smallest.

        Partitions come before whole devices, and partitions with fewer capacities before others.
        """
        if self.profile is None:
            return (self.memory_bytes, 1, 0, (), self.device.product)
        capacities = tuple(self.profile.capacities.values())
        return (self.memory_bytes, 0, sum(1 for each in capacities if each), capacities, self.profile.name)

    def is_of(self, dynamic: bool) -> bool:
        """Return whether devices with partitions on demand (``dynamic``), or with partitions from their layout, offer it.

        Both kinds of devices offer whole devices.
        """
        return self.profile is None or self.on_demand == dynamic

    def describe(self) -> str:
        """Return the item's name for messages."""
        return f"{self.profile.name if self.profile else 'whole'} of {self.device.product}"


@dataclass(frozen=True)
class Configuration:
    """A possible configuration of a device.

    ``moved`` are the claims that would lose their place, counted by the item that each needs elsewhere. ``destroyed``
    is the number of unused partitions to delete. ``touched`` is 1 if anything changes on the device.
    """

    offers: Amounts
    moved: Amounts
    destroyed: int
    touched: int

    @property
    def moves(self) -> int:
        """Return the number of claims that would move."""
        return sum(count for _item, count in self.moved)


@dataclass(frozen=True)
class Group:
    """Similar devices, by their numbers in the fleet.

    ``node`` is empty if it does not matter which node they belong to.
    """

    members: tuple[int, ...]
    node: str
    configurations: tuple[Configuration, ...]


@dataclass(frozen=True)
class State:
    """The current partitions of a device, as bits of placements and as counts.

    ``pinned`` ones must stay, ``movable`` ones belong to claims that can move, and ``free`` ones are unused.
    """

    pinned: int
    movable: int
    free: int
    pinned_counts: tuple[int, ...]
    movable_counts: tuple[int, ...]
    free_counts: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """All input of a plan.

    ``wants`` contains, for each demand and each of its parts, the numbers of the matching items, best first.
    """

    fleet: Fleet
    demands: tuple[Demand, ...]
    items: tuple[Item, ...]
    wants: tuple[tuple[tuple[int, ...], ...], ...]
    groups: tuple[Group, ...]
    kinds: Mapping[int, Arrangements]
    most_moves: int

    def is_of(self, item: Item, one: FleetDevice) -> bool:
        """Return whether a device has an item or can offer it."""
        return (
            item.device.profiles is one.device.profiles
            and item.device.product == one.device.product
            and item.is_of(one.is_dynamic)
            and item.barred == barred_from(one.node, self.demands)
        )

    @property
    def priorities(self) -> tuple[int, ...]:
        """Return all priorities, highest first."""
        return tuple(sorted({each.priority for each in self.demands}, reverse=True))


def barred_from(node: str, demands: Sequence[Demand]) -> frozenset[int]:
    """Return the numbers of the demands that cannot use devices of a node."""
    return frozenset(number for number, each in enumerate(demands) if node in each.elsewhere)


def build(fleet: Fleet, demands: Sequence[Demand], *, most_moves: int = 0) -> Problem:
    """Find the possible configurations of each device. ``most_moves`` is the maximum number of claims that can move.

    Raises Unsupported if a kind of device has too many possible arrangements of the demanded partitions.
    """
    return _Builder(fleet, tuple(demands), most_moves).build()


def _alike(device: Device) -> Any:
    """Return the properties that all devices of a kind share."""
    return (
        device.vendor,
        device.product,
        device.memory_bytes,
        device.memory_slices,
        device.partitioning.supported,
        id(device.profiles),
        tuple(sorted(device.capacities.items())),
    )


class _Builder:
    def __init__(self, fleet: Fleet, demands: tuple[Demand, ...], most_moves: int) -> None:
        self.fleet = fleet
        self.demands = demands
        self.most_moves = most_moves
        self.barred = {node: barred_from(node, demands) for node in fleet.nodes}
        self.items: list[Item] = []
        self.of_kind: dict[Any, int] = {}
        self.exemplars: list[FleetDevice] = []
        self.wholes: dict[Any, int] = {}
        self.item_numbers: dict[tuple[int, int | None], int] = {}
        self.kinds: dict[int, Arrangements] = {}
        self.known: dict[Any, tuple[Configuration, ...]] = {}

    def build(self) -> Problem:
        kinds = [self._kind(each) for each in self.fleet.devices]
        for kind, exemplar in enumerate(self.exemplars):
            self._make_items(kind, exemplar, [each for each, of in zip(self.fleet.devices, kinds) if of == kind])
        by_node = any(each.devices > 1 for each in self.demands)
        groups: dict[Any, list[int]] = {}
        for number, (each, kind) in enumerate(zip(self.fleet.devices, kinds)):
            key = (each.node if by_node else "", kind, self._likeness(each, kind))
            groups.setdefault(key, []).append(number)
        wants = tuple(
            tuple(self._wanted(number, part) for part in demand.parts) for number, demand in enumerate(self.demands)
        )
        return Problem(
            self.fleet,
            self.demands,
            tuple(self.items),
            wants,
            tuple(
                Group(tuple(members), key[0], self._configurations(self.fleet.devices[members[0]], key[1], key[2]))
                for key, members in groups.items()
            ),
            {number: self.kinds[kind] for number, kind in enumerate(kinds)},
            self.most_moves,
        )

    def _kind(self, each: FleetDevice) -> int:
        key = (self.barred[each.node], each.is_dynamic, _alike(each.device))
        if key not in self.of_kind:
            self.of_kind[key] = len(self.exemplars)
            self.exemplars.append(each)
        return self.of_kind[key]

    def _make_items(self, kind: int, first: FleetDevice, members: Sequence[FleetDevice]) -> None:
        exemplar, on_demand, barred = first.device, first.is_dynamic, self.barred[first.node]
        there = {one.profile_id for each in members for one in each.device.partitions}
        wanted = {
            profile.profile_id
            for profile in exemplar.profiles
            for number, demand in enumerate(self.demands)
            for part in demand.parts
            if number not in barred and part.takes(exemplar, profile, on_demand)
        }
        relevant = (there | wanted) if exemplar.partitioning.supported else set()
        self.kinds[kind] = Arrangements(exemplar, relevant)
        # As whole devices they are equal, whether their partitions are dynamic or static.
        whole = self.wholes.setdefault((barred, _alike(exemplar)), len(self.items))
        self.item_numbers[(kind, None)] = whole
        if whole == len(self.items):
            self.items.append(Item(whole, exemplar, None, barred=barred))
        for profile in self.kinds[kind].profiles:
            self.item_numbers[(kind, profile.profile_id)] = len(self.items)
            self.items.append(Item(len(self.items), exemplar, profile, on_demand, barred))

    def _wanted(self, demand: int, part: Part) -> tuple[int, ...]:
        fitting = [
            item
            for item in self.items
            if demand not in item.barred and part.takes(item.device, item.profile, item.on_demand)
        ]
        return tuple(item.number for item in sorted(fitting, key=lambda item: item.rank))

    def _is_movable(self, names: Sequence[str]) -> bool:
        """Return whether the holders of a partition or device can move: one claim without other devices."""
        return self.most_moves > 0 and len(names) == 1 and self.fleet.claims.get(names[0]) == 1 and "/" in names[0]

    def _likeness(self, each: FleetDevice, kind: int) -> Any:
        """Return the key by which devices of one kind are grouped as similar."""
        if each.fixed or each.has_particular_rule:
            return ("fixed", each.mode, self._state(each, kind, fixed=True), self._serves_whole(each))
        whole = "" if not each.occupants else "movable" if self._is_movable(each.occupants) else "pinned"
        return (each.is_dynamic, each.device.partitioning.enabled, whole, self._state(each, kind))

    def _serves_whole(self, each: FleetDevice) -> bool:
        """Return whether a device that does not change can be allocated as a whole."""
        if each.fixed or each.occupants or each.device.partitions or each.device.partitioning.enabled:
            return False
        return not (each.rule or {}).get("shares")

    def _state(self, each: FleetDevice, kind: int, *, fixed: bool = False) -> State:
        arrangements = self.kinds[kind]
        bits = [0, 0, 0]
        counts = [[0] * len(arrangements.profiles) for _which in bits]
        for number, partition in enumerate(each.device.partitions):
            names = each.holders.get(number, ())
            # The holder of a whole device can also use its partitions.
            which = 2 if not names and not each.occupants else 1 if not fixed and self._is_movable(names) else 0
            try:
                position = arrangements.number(partition.profile_id)
                bits[which] |= arrangements.bit(partition.key)
            except KeyError:
                continue  # such a device is fixed
            counts[which][position] += 1
        pinned, movable, free = (tuple(each) for each in counts)
        return State(bits[0], bits[1], bits[2], pinned, movable, free)

    def _configurations(self, each: FleetDevice, kind: int, likeness: Any) -> tuple[Configuration, ...]:
        if (kind, likeness) not in self.known:
            self.known[(kind, likeness)] = tuple(self._find(each, kind, likeness))
        return self.known[(kind, likeness)]

    def _find(self, each: FleetDevice, kind: int, likeness: Any) -> list[Configuration]:
        whole = self.item_numbers[(kind, None)]
        if likeness[0] == "fixed":
            # It offers its unused partitions, unless it is faulty.
            state: State = likeness[2]
            usable = each.has_particular_rule or each.device.health.healthy
            free = self._amounts(kind, state.free_counts) if usable and not each.has_particular_rule else ()
            return [Configuration(((whole, 1),) if likeness[3] else free, (), 0, 0)]
        dynamic, enabled, occupied, state = likeness
        if occupied == "pinned":
            return [Configuration((), (), 0, 0)]
        found = []
        if not occupied:
            found += self._cut(kind, state, dynamic, ())
            if not any(state.pinned_counts):
                changes = int(not dynamic and enabled) or int(any(state.free_counts) or any(state.movable_counts))
                moved = self._amounts(kind, state.movable_counts)
                found.append(Configuration(((whole, 1),), moved, sum(state.free_counts), changes))
        else:
            found.append(Configuration((), (), 0, 0))
            moved = ((whole, 1),)
            found += [one for one in self._cut(kind, state, dynamic, moved) if one.offers]
        return _without_worse(found)

    def _cut(self, kind: int, state: State, dynamic: bool, moved: Amounts) -> list[Configuration]:
        """Return the possible partitionings of a device.

        Of those with equal offers and equal moves, keep the cheapest.
        """
        found = []
        for (offered, lacking), (destroyed, new) in _ways(self.kinds[kind], state, dynamic, self.most_moves).items():
            gone = moved or self._amounts(kind, lacking)
            changes = bool(destroyed or gone) if dynamic else bool(new or destroyed or gone)
            found.append(Configuration(self._amounts(kind, offered), gone, destroyed, int(changes)))
        return found

    def _amounts(self, kind: int, counts: Sequence[int]) -> Amounts:
        profiles = self.kinds[kind].profiles
        return tuple(
            (self.item_numbers[(kind, profile.profile_id)], count) for profile, count in zip(profiles, counts) if count
        )


def against(
    arrangements: Arrangements, one: Arrangement, state: State, dynamic: bool
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Compare a set of partitions, which contains all pinned partitions, with the current state.

    Returns the offered partitions and the missing movable partitions, as counts by profile, then the number of deleted
    free partitions and the number of new partitions. On a dynamic device all unused partitions are deleted.
    """
    offered, lacking, destroyed, new = [], [], 0, 0
    for number, profile in enumerate(arrangements.profiles):
        pinned, movable, free = (
            counts[number] for counts in (state.pinned_counts, state.movable_counts, state.free_counts)
        )
        room_left = one.counts[number] - pinned
        if profile.is_numbered:
            staying, kept = min(movable, room_left), min(free, max(room_left - movable, 0))
        else:
            mask = arrangements.mask(number)
            staying = bin(one.bits & state.movable & mask).count("1")
            kept = bin(one.bits & state.free & mask).count("1")
        kept = 0 if dynamic else kept
        offered.append(room_left - staying)
        lacking.append(movable - staying)
        destroyed += free - kept
        new += room_left - staying - kept
    return tuple(offered), tuple(lacking), destroyed, new


def _ways(
    arrangements: Arrangements, state: State, dynamic: bool, most_moves: int
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]]:
    """Return the smallest numbers of deleted and new partitions.

    The key is the offered partitions and the missing movable partitions, as counts by profile.
    """
    best: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
    pinned, movable, free = state.pinned, state.movable, state.free
    plain = not any(profile.is_numbered for profile in arrangements.profiles)
    nothing = (0,) * len(arrangements.profiles)
    all_free = sum(state.free_counts)
    held = sum(state.pinned_counts)
    for counts, sets in arrangements.by_counts:
        if not fewer(state.pinned_counts, counts):
            continue
        if plain and not movable:
            # A fast path with bit operations only: it applies to most devices, and there can be thousands.
            kept = max((bin(free & bits).count("1") for bits in sets if bits & pinned == pinned), default=-1)
            if kept >= 0:
                kept = 0 if dynamic else kept
                offered = tuple(count - own for count, own in zip(counts, state.pinned_counts))
                best[(offered, nothing)] = (all_free - kept, sum(counts) - held - kept)
            continue
        for bits in sets:
            if bits & pinned != pinned or bin(movable & ~bits).count("1") > most_moves:
                continue
            offered, lacking, destroyed, new = against(arrangements, Arrangement(bits, counts), state, dynamic)
            key, cost = (offered, lacking), (destroyed, new)
            if key not in best or cost < best[key]:
                best[key] = cost
    return best


def _without_worse(found: list[Configuration]) -> list[Configuration]:
    """Drop each configuration that offers no more than another and costs no less."""
    items = sorted({item for one in found for item, _count in (*one.offers, *one.moved)})
    # One row of values per configuration, where smaller is better.
    rows = []
    for one in found:
        offers, moved = dict(one.offers), dict(one.moved)
        row = (
            *(-offers.get(item, 0) for item in items),
            *(moved.get(item, 0) for item in items if one.moved or item in moved),
        )
        row = (*row, *(0,) * (2 * len(items) - len(row)), one.destroyed, one.touched)
        rows.append((sum(row[: len(items)]), one.moves, row, one))
    rows.sort(key=lambda each: each[:3])
    kept: list[tuple[tuple[int, ...], Configuration]] = []
    for _offered, _moves, row, one in rows:
        if not any(fewer(other, row) for other, _known in kept):
            kept.append((row, one))
    return [one for _row, one in kept]
