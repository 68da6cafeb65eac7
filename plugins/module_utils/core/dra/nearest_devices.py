# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Choose devices that are nearest to each other, so that the remaining devices stay together. No side effects.

Locality is defined in levels, from the nearest to the farthest: on one device, in one of the vendor's groups, below one
PCI root, at one NUMA node. A level maps each device or part to its place. The search begins with the nearest level. If
several places are sufficient, it chooses the place with the fewest remaining devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..model import Device
from .composite_devices import Grouping

#: Maps the name of each device or part to its place.
Level = Mapping[str, object]


def levels(devices: Mapping[str, Device], grouping: Grouping | None) -> tuple[Level, ...]:
    """Return the levels of whole devices, by UUID: the device itself first, then levels with larger places."""
    found: dict[str, dict[str, object]] = {}
    for group in grouping.groups(tuple(devices.values())) if grouping is not None else ():
        found.setdefault(group.profile or "", {}).update(dict.fromkeys(group.members, group.name))
    found["pcie root"] = {uuid: each.pcie_root for uuid, each in devices.items() if each.pcie_root}
    found["numa node"] = {uuid: each.numa_node for uuid, each in devices.items() if each.numa_node is not None}
    # A device without a group, or with an unknown place, has a separate place.
    whole = [{uuid: level.get(uuid, ("", uuid)) for uuid in devices} for level in found.values()]
    return ({uuid: uuid for uuid in devices}, *sorted(whole, key=_largest_place))


def of_parts(levels: Iterable[Level], device_of: Mapping[str, str]) -> tuple[Level, ...]:
    """Return the levels of devices or parts of devices, given the UUID of each one's device."""
    return tuple({name: level[uuid] for name, uuid in device_of.items() if uuid in level} for level in levels)


def nearest(pool: Sequence[str], must: Collection[str], size: int, levels: Sequence[Level]) -> tuple[str, ...]:
    """Return ``size`` members of a pool, including those in ``must``, in the pool's order.

    Members of one place on a near level are preferred. If no place has enough, the largest places are taken completely,
    and the rest comes from the smallest sufficient place. Raises ValueError if the pool is too small or ``must`` is too
    large.
    """
    things, wanted = tuple(dict.fromkeys(pool)), frozenset(must)
    if not wanted <= set(things) or not len(wanted) <= size <= len(things):
        raise ValueError(f"{size} of {len(things)} cannot be chosen with {len(wanted)} that must be among them")
    chosen = _choose(things, wanted, size, tuple(levels))
    return tuple(thing for thing in things if thing in chosen)


def _choose(pool: tuple[str, ...], must: frozenset[str], size: int, levels: tuple[Level, ...]) -> frozenset[str]:
    if len(pool) == size:
        return frozenset(pool)
    must &= set(pool)
    if not levels or size == len(must):
        others = [thing for thing in pool if thing not in must]
        return must | frozenset(others[: size - len(must)])
    for number, level in enumerate(levels):
        fitting = [each for each in _places(pool, level) if len(each) >= size and must <= set(each)]
        if fitting:
            return _choose(min(fitting, key=len), must, size, levels[:number])
    return _choose_from_several_places(pool, must, size, levels)


def _choose_from_several_places(
    pool: tuple[str, ...], must: frozenset[str], size: int, levels: tuple[Level, ...]
) -> frozenset[str]:
    """Choose from several places of the farthest level, because no place of any level has enough."""
    *nearer, farthest = levels
    chosen: frozenset[str] = frozenset()
    places = _places(pool, farthest)
    left = sorted((each for each in places if must & set(each)), key=len, reverse=True)
    others = [each for each in places if each not in left]
    while len(chosen) < size:
        required_later = sum(len(must & set(each)) for each in left[1:])
        missing = size - len(chosen) - required_later
        if left:
            place = left.pop(0)
        else:
            enough = [each for each in others if len(each) >= missing]
            place = min(enough, key=len) if enough else max(others, key=len)
            others.remove(place)
        chosen |= _choose(place, must, min(len(place), missing), tuple(nearer))
    return chosen


def _places(pool: Iterable[str], level: Level) -> list[tuple[str, ...]]:
    found: dict[object, list[str]] = {}
    for thing in pool:
        found.setdefault(level.get(thing, ("", thing)), []).append(thing)
    return [tuple(each) for each in found.values()]


def _largest_place(level: Level) -> int:
    return max((len(each) for each in _places(level, level)), default=0)
