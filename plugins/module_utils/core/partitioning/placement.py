# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Choose placements for the desired partitions of one device so that the change affects the fewest existing partitions.

This is an exhaustive search with bounds. Devices have at most a dozen memory slices, so all arrangements are checked,
and the result is optimal. Numbered partitions need no search, because only their count matters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ..errors import DoesNotFit, InvalidLayout
from ..model import Device, Partition, Placement, Profile
from . import capacity as partitioning_capacity
from .capacity import Place
from .rules import WantedPartition

#: The criteria of ``arrange`` in their order, smaller is better.
_Cost = tuple[int, int, int, int, int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class _ProfileDemand:
    """The desired partitions of one profile: the requested starts (or numbers), and the number of other partitions."""

    profile: Profile
    starts: tuple[int, ...]
    unplaced: int

    @property
    def count(self) -> int:
        return len(self.starts) + self.unplaced


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
    demands = _demands(device, wanted)
    numbered = _choose_numbers(device, demands, held)
    best: tuple[_Cost, tuple[Place, ...]] | None = None
    for placed in _arrangements(device, demands):
        places = placed + numbered
        cost = _cost(device, places, held, prefer)
        if best is None or cost < best[0]:
            best = (cost, places)
    if best is None:
        raise _does_not_fit(device, demands)
    return best[1]


def kept(device: Device, places: Collection[Place]) -> tuple[Partition, ...]:
    """Return the existing partitions that an arrangement keeps.

    A partition without a compute instance cannot be kept, because no process could use it.
    """
    keys = {(profile.profile_id, placement.start, placement.size) for profile, placement in places}
    return tuple(partition for partition in device.partitions if partition.uuid and partition.key in keys)


def _demands(device: Device, wanted: Sequence[WantedPartition]) -> tuple[_ProfileDemand, ...]:
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
        _ProfileDemand(profile, tuple(starts.get(profile.profile_id, ())), counts.get(profile.profile_id, 0))
        for profile in ordered
    )


def _choose_numbers(
    device: Device, demands: Sequence[_ProfileDemand], held: Mapping[tuple[int, int, int], int]
) -> tuple[Place, ...]:
    """Choose the numbers: requested ones, then those of kept partitions, used ones first, then the lowest free ones."""
    numbered = [demand for demand in demands if demand.profile.is_numbered]
    requested = [number for demand in numbered for number in demand.starts]
    if len(set(requested)) < len(requested):
        twice = next(number for number in requested if requested.count(number) > 1)
        raise DoesNotFit(
            f"The number {twice} is wanted for several partitions on {device.describe()}",
            blockers=tuple(demand.profile.name for demand in numbered if twice in demand.starts),
        )
    taken = set(requested)
    chosen: list[tuple[Profile, int]] = [(demand.profile, number) for demand in numbered for number in demand.starts]
    lacking: list[tuple[Profile, int]] = []
    for demand in numbered:
        candidates = [
            each
            for each in device.partitions
            if each.uuid
            and each.profile_id == demand.profile.profile_id
            and each.placement.is_number
            and each.placement.start not in taken
        ]
        candidates.sort(key=lambda each: (-held.get(each.key, 0), each.placement.start))
        staying = [each.placement.start for each in candidates[: demand.unplaced]]
        chosen += [(demand.profile, number) for number in staying]
        taken.update(staying)
        lacking.append((demand.profile, demand.unplaced - len(staying)))
    for profile, count in lacking:
        # If there are not enough numbers, _arrangements yields nothing, and the error names the obstacle.
        free = sorted(placement.start for placement in profile.placements if placement.start not in taken)[:count]
        chosen += [(profile, number) for number in free]
        taken.update(free)
    return tuple((profile, Placement(number, 0)) for profile, number in chosen)


def _lacks_numbers(demands: Sequence[_ProfileDemand]) -> bool:
    numbered = [demand for demand in demands if demand.profile.is_numbered]
    available = max((len(demand.profile.placements) for demand in numbered), default=0)
    return sum(demand.count for demand in numbered) > available


def _arrangements(
    device: Device, demands: Sequence[_ProfileDemand], check_engines: bool = True
) -> Iterator[tuple[Place, ...]]:
    """Yield every possible arrangement once. Without ``check_engines`` only placements and counts are checked.

    Numbered partitions are not included: they have no placement and only consume capacities.
    """
    limits = partitioning_capacity.totals(device) if check_engines else {}

    def extend(
        position: int, taken: int, left: dict[str, int], places: tuple[Place, ...]
    ) -> Iterator[tuple[Place, ...]]:
        if position == len(demands):
            yield places
            return
        demand = demands[position]
        profile = demand.profile
        if demand.count > profile.maximum:
            return
        after = {key: amount - demand.count * profile.capacities.get(key, 0) for key, amount in left.items()}
        if min(after.values(), default=0) < 0:
            return
        if profile.is_numbered:
            yield from extend(position + 1, taken, after, places)
            return
        fixed = [placement for placement in profile.placements if placement.start in demand.starts]
        others = [placement for placement in profile.placements if placement.start not in demand.starts]
        if len(fixed) != len(demand.starts):  # the same start was requested twice
            return
        for chosen in combinations(others, demand.unplaced):
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

    if not _lacks_numbers(demands):
        yield from extend(0, 0, dict(limits), ())


def _cost(device: Device, places: Sequence[Place], held: Mapping[tuple[int, int, int], int], prefer: str) -> _Cost:
    kept_keys = {partition.key for partition in kept(device, places)}
    affected = [partition for partition in device.partitions if partition.key not in kept_keys]
    usable = [partition for partition in affected if partition.uuid or partition.compute_instances]
    taken = 0
    for _profile, placement in places:
        taken |= partitioning_capacity.mask(placement)
    room_left = sum(
        placement.size**2
        for profile in device.profiles
        for placement in profile.placements
        if not partitioning_capacity.mask(placement) & taken
    )
    starts = tuple(sorted((placement.start, profile.profile_id) for profile, placement in places))
    holders = [held[partition.key] for partition in affected if partition.key in held]
    holder_costs, partition_costs = (sum(holders), len(holders)), (len(usable), len(affected))
    first, second = (partition_costs, holder_costs) if prefer == PARTITIONS else (holder_costs, partition_costs)
    return (*first, *second, -room_left, starts)


def _does_not_fit(device: Device, demands: Sequence[_ProfileDemand]) -> DoesNotFit:
    requested = " + ".join(f"{demand.count} × {demand.profile.name}" for demand in demands)
    start = f"{requested} does not fit on {device.describe()}"
    names = tuple(demand.profile.name for demand in demands)
    for demand in demands:
        if demand.count > demand.profile.maximum:
            return DoesNotFit(
                f"{start}: the board takes {demand.profile.maximum} × {demand.profile.name} at most, {demand.count} are wanted",
                blockers=(demand.profile.name,),
            )
    if _lacks_numbers(demands):
        numbered = [demand.profile for demand in demands if demand.profile.is_numbered]
        return DoesNotFit(
            f"{start}: the board has only {len(numbered[0].placements)} numbers",
            blockers=tuple(profile.name for profile in numbered),
        )
    needed = sum(demand.profile.size * demand.count for demand in demands)
    if needed > device.memory_slices:
        return DoesNotFit(
            f"{start}: it needs {needed} memory slices, the board has {device.memory_slices}", blockers=names
        )
    if next(_arrangements(device, demands, check_engines=False), None) is not None:
        return _lacks_engines(device, demands, start)
    removable = tuple(
        demand.profile.name
        for position, demand in enumerate(demands)
        if next(_arrangements(device, _with_one_less(demands, position)), None) is not None
    )
    places = "; ".join(
        f"{demand.profile.name} at {', '.join(str(placement.start) for placement in demand.profile.placements)}"
        for demand in demands
        if not demand.profile.is_numbered
    )
    return DoesNotFit(
        f"{start}: no arrangement keeps them apart; they can start at memory slices {places}",
        blockers=removable or names,
        hint=f"It fits with one less of {' or '.join(removable)}." if removable else "",
    )


def _lacks_engines(device: Device, demands: Sequence[_ProfileDemand], start: str) -> DoesNotFit:
    lacking: list[str] = []
    users: dict[str, None] = {}
    for key, total in partitioning_capacity.totals(device).items():
        needed = sum(demand.profile.capacities.get(key, 0) * demand.count for demand in demands)
        if needed > total:
            lacking.append(f"{needed} {key} of {total}")
            users.update((demand.profile.name, None) for demand in demands if demand.profile.capacities.get(key, 0))
    return DoesNotFit(
        f"{start}: {', '.join(users)} together would need {', '.join(lacking)} that the board has",
        blockers=tuple(users),
    )


def _with_one_less(demands: Sequence[_ProfileDemand], position: int) -> tuple[_ProfileDemand, ...]:
    demand = demands[position]
    if demand.unplaced:
        smaller = replace(demand, unplaced=demand.unplaced - 1)
    else:
        smaller = replace(demand, starts=demand.starts[:-1])
    return (*demands[:position], smaller, *demands[position + 1 :])
