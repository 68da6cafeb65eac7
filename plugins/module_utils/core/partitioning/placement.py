# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Choose placements for the desired partitions of one device so that the change affects the fewest existing partitions.

This is an exhaustive search with bounds. Devices have at most a dozen memory slices, so all arrangements are checked,
and the result is optimal. Numbered partitions need no search, because only their count matters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from ..errors import DoesNotFit, InvalidLayout
from ..model import Device, Partition, Placement, Profile
from . import capacity as partitioning_capacity
from .capacity import Place
from .rules import WantedPartition

_Group = tuple[Profile, tuple[int, ...], int]  # profile, requested starts, number of others
_Cost = tuple[int, int, int, int, int, tuple[tuple[int, int], ...]]


#: The criterion to minimize first.
PODS, PARTITIONS = "pods", "partitions"
PREFERENCES = (PODS, PARTITIONS)


def arrange(
    device: Device,
    wanted: Sequence[WantedPartition],
    held: Mapping[tuple[int, int, int], int] | None = None,
    prefer: str = PODS,
) -> tuple[Place, ...]:
    """Choose a placement for every desired partition.

    ``held`` maps the keys (profile id, start, size) of existing partitions in use to their number of holders: pods, or
    1 for other holders. The criteria are, in this order: fewest affected holders, fewest affected partitions in use,
    fewest affected partitions, most space left for large partitions, and lowest starts or numbers. With ``prefer``
    partitions, the number of affected partitions comes before the holders. Raises InvalidLayout for an unknown profile
    or placement. Raises DoesNotFit, which names the obstacle, if there is no arrangement.
    """
    held = held or {}
    groups = _groups(device, wanted)
    numbered = _numbered(device, groups, held)
    best: tuple[_Cost, tuple[Place, ...]] | None = None
    for placed in _arrangements(device, groups):
        places = placed + numbered
        cost = _cost(device, places, held, prefer)
        if best is None or cost < best[0]:
            best = (cost, places)
    if best is None:
        raise _does_not_fit(device, groups)
    return best[1]


def kept(device: Device, places: Collection[Place]) -> tuple[Partition, ...]:
    """Return the existing partitions that an arrangement keeps.

    A partition without a compute instance cannot be kept, because no process could use it.
    """
    keys = {(profile.profile_id, placement.start, placement.size) for profile, placement in places}
    return tuple(partition for partition in device.partitions if partition.uuid and partition.key in keys)


def _groups(device: Device, wanted: Sequence[WantedPartition]) -> tuple[_Group, ...]:
    starts: dict[int, list[int]] = {}
    counts: dict[int, int] = {}
    profiles: dict[int, Profile] = {}
    for each in wanted:
        profile = device.find_profile(each.profile)
        if profile is None:
            raise InvalidLayout(
                f"{device.describe()} has no profile {each.profile!r}",
                hint="It has " + (", ".join(sorted(known.name for known in device.profiles)) or "none") + ".",
            )
        profiles[profile.profile_id] = profile
        if each.start is None:
            counts[profile.profile_id] = counts.get(profile.profile_id, 0) + each.count
            continue
        if all(placement.start != each.start for placement in profile.placements):
            if profile.is_numbered:
                raise InvalidLayout(
                    f"There is no {profile.name} with the number {each.start} on {device.describe()}",
                    hint="It has no place to choose: give a count instead.",
                )
            raise InvalidLayout(
                f"{profile.name} cannot start at memory slice {each.start} on {device.describe()}",
                hint=f"Its starts are {', '.join(str(placement.start) for placement in profile.placements)}.",
            )
        starts.setdefault(profile.profile_id, []).append(each.start)
    ordered = sorted(profiles.values(), key=lambda profile: (-profile.size, profile.profile_id))
    return tuple(
        (profile, tuple(starts.get(profile.profile_id, ())), counts.get(profile.profile_id, 0)) for profile in ordered
    )


def _numbered(device: Device, groups: Sequence[_Group], held: Mapping[tuple[int, int, int], int]) -> tuple[Place, ...]:
    """Choose the numbers: requested ones, then those of kept partitions, used ones first, then the lowest free ones."""
    mine = [group for group in groups if group[0].is_numbered]
    given = [number for _profile, numbers, _free in mine for number in numbers]
    if len(set(given)) < len(given):
        twice = next(number for number in given if given.count(number) > 1)
        raise DoesNotFit(
            f"The number {twice} is wanted for several partitions on {device.describe()}",
            blockers=tuple(profile.name for profile, numbers, _free in mine if twice in numbers),
        )
    taken = set(given)
    chosen: list[tuple[Profile, int]] = [(profile, number) for profile, numbers, _free in mine for number in numbers]
    lacking: list[tuple[Profile, int]] = []
    for profile, _numbers, free in mine:
        stay = [each for each in device.partitions if each.uuid and each.profile_id == profile.profile_id]
        stay = [each for each in stay if each.placement.is_number and each.placement.start not in taken]
        stay.sort(key=lambda each: (-held.get(each.key, 0), each.placement.start))
        chosen += [(profile, each.placement.start) for each in stay[:free]]
        taken.update(each.placement.start for each in stay[:free])
        lacking.append((profile, free - len(stay[:free])))
    for profile, count in lacking:
        numbers = [placement.start for placement in profile.placements if placement.start not in taken]
        # If there are not enough numbers, _arrangements yields nothing, and the error names the obstacle.
        chosen += [(profile, number) for number in sorted(numbers)[:count]]
        taken.update(sorted(numbers)[:count])
    return tuple((profile, Placement(number, 0)) for profile, number in chosen)


def _numbers_run_out(groups: Sequence[_Group]) -> bool:
    mine = [(profile, len(given) + free) for profile, given, free in groups if profile.is_numbered]
    return sum(count for _profile, count in mine) > max(
        (len(profile.placements) for profile, _count in mine), default=0
    )


def _arrangements(device: Device, groups: Sequence[_Group], engines: bool = True) -> Iterator[tuple[Place, ...]]:
    """Yield every possible arrangement once. Without ``engines`` only placements and counts are checked.

    Numbered partitions are not included: they have no placement and only consume capacities.
    """
    limits = partitioning_capacity.totals(device) if engines else {}

    def extend(
        position: int, taken: int, left: dict[str, int], places: tuple[Place, ...]
    ) -> Iterator[tuple[Place, ...]]:
        if position == len(groups):
            yield places
            return
        profile, given, free = groups[position]
        count = len(given) + free
        if count > profile.maximum:
            return
        after = {key: amount - count * profile.capacities.get(key, 0) for key, amount in left.items()}
        if min(after.values(), default=0) < 0:
            return
        if profile.is_numbered:
            yield from extend(position + 1, taken, after, places)
            return
        fixed = [placement for placement in profile.placements if placement.start in given]
        others = [placement for placement in profile.placements if placement.start not in given]
        if len(fixed) != len(given):  # the same start was requested twice
            return
        for chosen in combinations(others, free):
            covered, clear = taken, True
            for placement in (*fixed, *chosen):
                bits = partitioning_capacity.mask(placement)
                if covered & bits:
                    clear = False
                    break
                covered |= bits
            if clear:
                added = tuple((profile, placement) for placement in (*fixed, *chosen))
                yield from extend(position + 1, covered, after, places + added)

    if not _numbers_run_out(groups):
        yield from extend(0, 0, dict(limits), ())


def _cost(device: Device, places: Sequence[Place], held: Mapping[tuple[int, int, int], int], prefer: str) -> _Cost:
    keeping = {partition.key for partition in kept(device, places)}
    disturbed = [partition for partition in device.partitions if partition.key not in keeping]
    live = [partition for partition in disturbed if partition.uuid or partition.compute_instances]
    taken = 0
    for _profile, placement in places:
        taken |= partitioning_capacity.mask(placement)
    left = sum(
        placement.size**2
        for profile in device.profiles
        for placement in profile.placements
        if not partitioning_capacity.mask(placement) & taken
    )
    starts = tuple(sorted((placement.start, profile.profile_id) for profile, placement in places))
    holders = [held[partition.key] for partition in disturbed if partition.key in held]
    of_holders, of_partitions = (sum(holders), len(holders)), (len(live), len(disturbed))
    first, then = (of_partitions, of_holders) if prefer == PARTITIONS else (of_holders, of_partitions)
    return (*first, *then, -left, starts)


def _does_not_fit(device: Device, groups: Sequence[_Group]) -> DoesNotFit:
    wished = " + ".join(f"{len(given) + free} × {profile.name}" for profile, given, free in groups)
    start = f"{wished} does not fit on {device.describe()}"
    for profile, given, free in groups:
        if len(given) + free > profile.maximum:
            return DoesNotFit(
                f"{start}: the board takes {profile.maximum} × {profile.name} at most, {len(given) + free} are wanted",
                blockers=(profile.name,),
            )
    if _numbers_run_out(groups):
        numbered = [profile for profile, _given, _free in groups if profile.is_numbered]
        return DoesNotFit(
            f"{start}: the board has only {len(numbered[0].placements)} numbers",
            blockers=tuple(profile.name for profile in numbered),
        )
    needed = sum(profile.size * (len(given) + free) for profile, given, free in groups)
    if needed > device.memory_slices:
        return DoesNotFit(
            f"{start}: it needs {needed} memory slices, the board has {device.memory_slices}",
            blockers=tuple(profile.name for profile, _given, _free in groups),
        )
    if next(_arrangements(device, groups, engines=False), None) is not None:
        return _lacks_engines(device, groups, start)
    culprits = tuple(
        profile.name
        for position, (profile, given, free) in enumerate(groups)
        if next(_arrangements(device, _with_one_less(groups, position, given, free)), None) is not None
    )
    places = "; ".join(
        f"{profile.name} at {', '.join(str(placement.start) for placement in profile.placements)}"
        for profile, _given, _free in groups
        if not profile.is_numbered
    )
    advice = f" It fits with one less of {' or '.join(culprits)}." if culprits else ""
    return DoesNotFit(
        f"{start}: no arrangement keeps them apart; they can start at memory slices {places}",
        blockers=culprits or tuple(profile.name for profile, _given, _free in groups),
        hint=advice.strip(),
    )


def _lacks_engines(device: Device, groups: Sequence[_Group], start: str) -> DoesNotFit:
    lacking: list[str] = []
    users: dict[str, None] = {}
    for key, total in partitioning_capacity.totals(device).items():
        asked = sum(profile.capacities.get(key, 0) * (len(given) + free) for profile, given, free in groups)
        if asked > total:
            lacking.append(f"{asked} {key} of {total}")
            users.update((profile.name, None) for profile, _given, _free in groups if profile.capacities.get(key, 0))
    return DoesNotFit(
        f"{start}: {', '.join(users)} together would need {', '.join(lacking)} that the board has",
        blockers=tuple(users),
    )


def _with_one_less(groups: Sequence[_Group], position: int, given: tuple[int, ...], free: int) -> tuple[_Group, ...]:
    profile = groups[position][0]
    smaller = (profile, given, free - 1) if free else (profile, given[:-1], 0)
    return (*groups[:position], smaller, *groups[position + 1 :])
