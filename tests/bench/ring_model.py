# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Model claims for several chips on nodes with cards and rings, at random times for random durations: how many groups
stay whole.

Three ways to choose chips are compared: the scheduler with a claim's alternatives, selectors, and constraints;
Volcano's plugin for such nodes; and the first chips by index. Time is counted in arrivals.

The behavior of Volcano's plugin was read in its sources (Ascend/mind-cluster,
component/ascend-for-volcano/internal/npu, 2026-08): ascend910/ascend910old/module910x8 (frame.go, node.go),
ascend910/ascend910b (base.go, module910bx16/frame.go), ascend910/ascend910a3 (base.go, module910a3x16/frame.go),
ascend310p/card310px2 (frame.go, task.go), and base/frame.go for nodes with uniformly linked chips. The implementation
here is our own.
"""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import eq, le, lt
from typing import Any

from dra_driver.core.model import DEVICE, Device, Offer, Partitioning
from dra_driver.core.vendors.ascend import occupancy, preference, topology
from dra_driver.core.vendors.ascend.families import FAMILIES

Chips = tuple[int, ...]
#: Rank of a node for a claim, the lowest is best, and the chips that the claim would get there.
Chosen = tuple[tuple[int, ...], Chips]
#: Choose chips for a claim of a size from the free chips of a node.
Choice = Callable[[int, Collection[int]], "Chosen | None"]
#: Choice between nodes of equal rank: any; the fullest if the scheduler's profile packs by other resources; the
#: emptiest by default (spread).
TIES = ("any", "fullest", "emptiest")


@dataclass(frozen=True)
class Machine:
    """A kind of node. ``whole`` is the number of chips of a group to keep whole. Each of ``sizes`` is requested
    equally often.
    """

    name: str
    device_id: int
    chips: int
    per_card: int
    ring: int
    whole: int
    sizes: tuple[int, ...]
    volcano: Choice

    def groups(self, size: int) -> tuple[Chips, ...]:
        """Return all aligned groups of ``size`` chips."""
        return tuple(tuple(range(start, start + size)) for start in range(0, self.chips, size))

    def smallest_unit(self, count: int) -> int:
        """Return the size of the smallest unit (card, ring, node) that can hold a claim of this size."""
        return next((size for size in (self.per_card, self.ring) if count <= size), self.chips)


@dataclass(frozen=True)
class Outcome:
    """Result of traces: the average of free whole groups, claims served, their chips, and claims spread over several
    units.
    """

    whole: float = 0.0
    served: int = 0
    chips: int = 0
    apart: int = 0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.whole + other.whole, self.served + other.served, self.chips + other.chips, self.apart + other.apart
        )


# ---------------------------------------------------------------------- the scheduler with our claims


def node_of(machine: Machine) -> tuple[dict[str, Device], tuple[Offer, ...]]:
    """Return the chips of one node as the backend's devices and as published offers."""
    at = [
        topology.Chip(number, number // machine.per_card, number % machine.per_card) for number in range(machine.chips)
    ]
    placed = topology.places(FAMILIES[machine.device_id], at)
    devices = {}
    for each in at:
        attributes = topology.attributes("node", each, placed[each.physical_id])
        devices[str(each.physical_id)] = Device(
            vendor="ascend",
            index=each.physical_id,
            minor=each.physical_id,
            uuid=str(each.physical_id),
            product="NPU",
            pci_address="",
            pcie_root=None,
            numa_node=None,
            memory_bytes=0,
            memory_slices=0,
            attributes=attributes,
            capacities={},
            partitioning=Partitioning(False, False, False),
        )
    offers = tuple(
        Offer(f"npu-{uuid}", DEVICE, uuid, False, None, None, None, None, device.attributes, {})
        for uuid, device in devices.items()
    )
    return devices, offers


def by_claim(machine: Machine, *, prefer: Sequence[str] = preference.NEAREST_FIRST, whole: bool = True) -> Choice:
    """Return the scheduler's choice for our claims. A node where an earlier alternative fits ranks higher."""
    devices, offers = node_of(machine)
    # A claim larger than a ring spans rings in any case: all eight of two rings, for example.
    far = {count: prefer if count <= machine.ring else (*prefer, preference.ANY) for count in set(machine.sizes)}
    specs = {
        count: preference.claim_spec(count, "npu.huawei.com", prefer=tuple(dict.fromkeys(order)), whole=whole)
        for count, order in far.items()
    }
    known: dict[tuple[int, frozenset[int]], Chosen | None] = {}

    def choose(count: int, free: Collection[int]) -> Chosen | None:
        key = (count, frozenset(free))
        if key not in known:
            held = [uuid for uuid in devices if int(uuid) not in free]
            published = occupancy.arranged(offers, devices, held)
            there = {number: published[number].attributes for number in free}
            found = allocate(specs[count], there)
            known[key] = None if found is None else ((found[0],), found[1])
        return known[key]

    return choose


def allocate(spec: Mapping[str, Any], free: Mapping[int, Mapping[str, Any]]) -> tuple[int, Chips] | None:
    """Return the rank of the first alternative that fits on one node, and its first matching chips, like the
    scheduler.

    ``free`` maps the indexes of the devices to their attributes. They are published in the order of the indexes.
    """
    for rank, (alternative, shared) in enumerate(_alternatives(spec)):
        fit = [
            number
            for number in sorted(free)
            if all(is_true_for(each, free[number]) for each in _expressions(alternative))
        ]
        if not shared:
            if len(fit) >= alternative["count"]:
                return rank, tuple(fit[: alternative["count"]])
            continue
        groups: dict[Any, list[int]] = {}
        for number in fit:
            value = free[number].get(shared)
            if value is not None:
                groups.setdefault(value, []).append(number)
        # Groups are in the order of their first devices, as a backtracking search finds them.
        enough = next((group for group in groups.values() if len(group) >= alternative["count"]), None)
        if enough is not None:
            return rank, tuple(enough[: alternative["count"]])
    return None


def search(spec: Mapping[str, Any], free: Mapping[int, Mapping[str, Any]]) -> tuple[int, Chips] | None:
    """Return the same by trying all combinations in order: the reference for ``allocate``."""
    for rank, (alternative, shared) in enumerate(_alternatives(spec)):
        fit = [
            number
            for number in sorted(free)
            if all(is_true_for(each, free[number]) for each in _expressions(alternative))
        ]
        for chosen in combinations(fit, alternative["count"]):
            values = {free[each].get(shared) for each in chosen} if shared else {""}
            if len(values) == 1 and None not in values:
                return rank, chosen
    return None


def _alternatives(spec: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    (request,) = spec["devices"]["requests"]
    found = []
    for alternative in request.get("firstAvailable") or [{"name": "", **request["exactly"]}]:
        full = f"{request['name']}/{alternative['name']}" if alternative["name"] else request["name"]
        shared = [each["matchAttribute"] for each in spec["devices"].get("constraints", ()) if full in each["requests"]]
        found.append((alternative, shared[0].partition("/")[2] if shared else ""))
    return found


def _expressions(alternative: Mapping[str, Any]) -> list[str]:
    return [each["cel"]["expression"] for each in alternative.get("selectors", ())]


COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {"==": eq, "<": lt, "<=": le}


def is_true_for(expression: str, attributes: Mapping[str, Any]) -> bool:
    """Evaluate the CEL that our claims use: presence of attributes, and comparisons with numbers or other attributes."""
    of = r"device\.attributes\['npu\.huawei\.com'\]"
    for term in expression.split(" && "):
        there = re.fullmatch(rf"'(\w+)' in {of}", term)
        compared = re.fullmatch(rf"{of}\.(\w+) (==|<|<=) (?:(\d+)|{of}\.(\w+))", term)
        if there is not None:
            if there.group(1) not in attributes:
                return False
        elif compared is not None:
            left, operator, number, name = compared.groups()
            right = int(number) if number else attributes[name]
            if not COMPARE[operator](attributes[left], right):
                return False
        else:
            raise AssertionError(f"{term!r} is nothing that this knows how to evaluate")
    return True


# ---------------------------------------------------------------------- Volcano's plugin, and the index


def volcano_two_rings(count: int, free: Collection[int]) -> Chosen | None:
    """910A: choose the ring by a table of its free chips; up to four chips in one ring, or all eight. Nodes: ring,
    then fullest.
    """
    if count == 8:
        return ((0, 0), tuple(sorted(free))) if len(free) == 8 else None
    rings = [[chip for chip in sorted(free) if chip // 4 == ring] for ring in (0, 1)]
    for rank, wanted in enumerate({1: (1, 3, 2, 4), 2: (2, 4, 3), 4: (4,)}[count]):
        for ring in rings:
            if len(ring) == wanted:
                return (rank, len(free)), tuple(ring[:count])
    return None


def volcano_two_groups(count: int, free: Collection[int]) -> Chosen | None:
    """16 × 910B: choose the group of eight with the fewest free chips that suffice. Nodes: smallest rest of the group,
    then fullest.
    """
    groups = [[chip for chip in sorted(free) if chip // 8 == group] for group in (0, 1)]
    for wanted in range(count, 9):
        for group in groups:
            if len(group) == wanted:
                return (wanted - count, len(free)), tuple(group[:count])
    return None


def volcano_mesh(count: int, free: Collection[int]) -> Chosen | None:
    """8 × 910B: choose the first chips, because all links are equal. Nodes: the fullest."""
    return ((len(free),), tuple(sorted(free)[:count])) if len(free) >= count else None


def volcano_modules(count: int, free: Collection[int]) -> Chosen | None:
    """A3: choose one die of a partly used module, or whole modules. Nodes: the fewest free chips; for one die, those
    with a partly used module.
    """
    if len(free) < count:
        return None
    modules = [[die for die in sorted(free) if die // 2 == module] for module in range(8)]
    broken, full = ([each for each in modules if len(each) == size] for size in (1, 2))
    if count == 1:
        return (len(free) - 1 + (0 if broken else 16),), ((broken or full)[0][0],)
    if len(full) * 2 < count:
        return None
    return (len(free) - count,), tuple(die for module in full[: count // 2] for die in module)


def volcano_cards(count: int, free: Collection[int]) -> Chosen | None:
    """300I Duo: choose one chip of a partly used card, else of a whole one, or both chips of a card. Nodes: by the
    same table.
    """
    cards = [[chip for chip in sorted(free) if chip // 2 == card] for card in range(4)]
    for rank, wanted in enumerate({1: (1, 2), 2: (2,)}[count]):
        for card in cards:
            if len(card) == wanted:
                return (rank,), tuple(card[:count])
    return None


def by_index(count: int, free: Collection[int]) -> Chosen | None:
    """Choose the first chips by index."""
    return ((0,), tuple(sorted(free)[:count])) if len(free) >= count else None


_MIXED = (1, 1, 1, 2, 2, 4, 8)
MACHINES = {
    machine.name: machine
    for machine in (
        # Claims on 910A request parts of a ring, half of them a single chip, and sometimes a whole node.
        Machine("8x910A", 0xD801, 8, 1, 4, 4, (1, 1, 1, 2, 2, 4), volcano_two_rings),
        Machine("8x910A and whole nodes", 0xD801, 8, 1, 4, 4, _MIXED, volcano_two_rings),
        Machine("8x910B", 0xD802, 8, 1, 8, 8, _MIXED, volcano_mesh),
        Machine("16x910B", 0xD802, 16, 1, 8, 8, _MIXED, volcano_two_groups),
        Machine("4x300I-Duo", 0xD500, 8, 2, 2, 2, (1, 1, 1, 2, 2), volcano_cards),
        Machine("8xA3", 0xD803, 16, 2, 16, 2, _MIXED, volcano_modules),
    )
}


# ---------------------------------------------------------------------- traces


def run_trace(
    machine: Machine, choose: Choice, *, nodes: int, load: float, seed: int, claims: int, ties: str = "any"
) -> Outcome:
    """Run a trace; the same seed gives the same claims. ``load`` is the share of all chips in use if every claim were
    served.
    """
    chance, tie_random = random.Random(seed), random.Random(~seed)
    mean_duration = load * machine.chips * nodes / (sum(machine.sizes) / len(machine.sizes))
    free = [set(range(machine.chips)) for _node in range(nodes)]
    groups = [frozenset(group) for group in machine.groups(machine.whole)]
    whole = [len(groups)] * nodes
    running_claims: list[tuple[float, int, int, Chips]] = []
    now = last = whole_group_time = 0.0
    served = given = apart = 0
    for number in range(claims):
        now += chance.expovariate(1.0)
        count, leaves = chance.choice(machine.sizes), now + chance.expovariate(1 / mean_duration)
        while running_claims and running_claims[0][0] <= now:
            end_time, _number, node, chips = heapq.heappop(running_claims)
            whole_group_time, last = whole_group_time + (end_time - last) * sum(whole), end_time
            free[node].update(chips)
            whole[node] = sum(group <= free[node] for group in groups)
        whole_group_time, last = whole_group_time + (now - last) * sum(whole), now
        found = [
            (each[0], {"any": tie_random.random(), "fullest": len(there), "emptiest": -len(there)}[ties], node, each[1])
            for node, there in enumerate(free)
            if (each := choose(count, there)) is not None
        ]
        if not found:
            continue
        _rank, _tie, node, chips = min(found)
        free[node] -= set(chips)
        whole[node] = sum(group <= free[node] for group in groups)
        heapq.heappush(running_claims, (leaves, number, node, chips))
        served, given = served + 1, given + count
        apart += len({chip // machine.smallest_unit(count) for chip in chips}) > 1
    return Outcome(whole_group_time / now, served, given, apart)


def run_traces(
    machine: Machine, choose: Choice, seeds: Collection[int], *, nodes: int, claims: int, ties: str = "any"
) -> Outcome:
    """Return the sum of the outcomes of traces with light, medium, and heavy load."""
    outcomes = [
        run_trace(machine, choose, nodes=nodes, load=load, seed=seed, claims=claims, ties=ties)
        for load in (0.5, 0.7, 0.9)
        for seed in seeds
    ]
    return sum(outcomes, Outcome())


def compared_choices(machine: Machine) -> dict[str, Choice]:
    """Return the compared ways to choose, by name."""
    waiting = (preference.CARD, preference.RING)
    return {
        "ours": by_claim(machine),
        "ours, waiting": by_claim(machine, prefer=waiting),
        "nearest alone": by_claim(machine, whole=False),
        "volcano": machine.volcano,
        "index": by_index,
    }
