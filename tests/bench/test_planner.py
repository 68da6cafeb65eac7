# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Compare how many claims fleets serve: with a planned layout, with partitions created in order of arrival, and with
one layout for all devices.
"""

from __future__ import annotations

import functools
import importlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bench.figures import Figures
from tests.bench.order_model import MIXES, Event, trace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "core"))

import board_model
import chip_model
from planner_model import Small, answers

UTILS = "ansible_collections.dra.accelerators.plugins.module_utils"
Json = dict[str, Any]
Kind = tuple[str, Any]  # a product, and a profile ID or None
SEEDS, SECONDS = 3, 30.0
#: For each kind of device, the layout with one of every profile that fits: NVIDIA's all-balanced for the H100.
BALANCED: Mapping[str, Mapping[str, int]] = {
    "h100-80": {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
    "a30": {"1g.6gb": 2, "2g.12gb": 1},
    "310P": {"vir01": 1, "vir02": 1, "vir04": 1},
    "910B3": {"vir05_1c_16g": 2, "vir10_3c_32g": 1},
}
FLEETS: Mapping[str, Mapping[str, int]] = {
    "32 H100": {"h100-80": 32},
    "200 NPUs": {"310P": 100, "910B3": 100},
    "1,600 of four kinds": {"h100-80": 800, "a30": 200, "310P": 400, "910B3": 200},
}
#: Fleets with a history of claims: numbers of H100, numbers of permitted moves, and the load that the claims would
#: cause.
LIVED_IN, MOVES, LOAD = (32, 200), (0, 4, 16), 1.1
BOARD = "h100-80"


def module(name: str) -> Any:
    return importlib.import_module(f"{UTILS}.{name}")


def nodes_of(counts: Mapping[str, int]) -> tuple[dict[str, Json], dict[str, str]]:
    """Return the facts of a fleet's nodes with eight devices each, and the kind of each product."""
    found: dict[str, Json] = {}
    products: dict[str, str] = {}
    number = 0
    for kind, count in counts.items():
        if kind in chip_model.CHIPS:
            facts = module("_report.device_facts").device_facts(chip_model.device(kind, (), 0))
        else:
            (answer,) = answers([Small(kind)]).values()
            facts = {**answer["devices"][0], **answer["kinds"][kind]}
            facts.pop("kind")
        products[facts["product"]] = kind
        for at in range(count):
            number += 1
            node = found.setdefault(f"{kind}-{at // 8}", {"devices": []})
            node["devices"].append({**facts, "index": at % 8, "uuid": f"{kind}-{number:06d}"})
    return found, products


def wanted(fleet: Any, products: Mapping[str, str], mix: str, chance: random.Random) -> list[Json]:
    """Return random claims that would fill the fleet without any loss. The mix gives the share of small ones. A tenth
    requests whole devices.
    """
    found: list[Json] = []
    for product, kind in products.items():
        devices = [each.device for each in fleet.devices if each.device.product == product]
        balanced = BALANCED[kind]
        profiles = [each for each in devices[0].profiles if each.name in balanced]
        weights = [each.memory_bytes ** -MIXES[mix]["exponent"] for each in profiles]
        left = float(sum(each.memory_bytes for each in devices))
        counts: Counter[str] = Counter()
        while left > 0:
            if chance.random() < 0.1:
                counts[""] += 1
                left -= devices[0].memory_bytes
            else:
                (profile,) = chance.choices(profiles, weights)
                counts[profile.name] += 1
                left -= profile.memory_bytes
        for name, count in counts.items():
            found.append(
                {
                    "name": f"{name or 'whole'} of {kind}",
                    "count": count,
                    "product": product,
                    **({"profile": name} if name else {}),
                }
            )
    return found


def items_of(problem: Any) -> list[list[Any]]:
    """Return the suitable items for each claim."""
    return [
        [problem.items[item] for item in problem.wants[number][0]]
        for number, demand in enumerate(problem.demands)
        for _claim in range(demand.count)
    ]


def first_fit(problem: Any, chance: random.Random) -> int:
    """Return how many claims are served in order of arrival, each on the first device and at the first placement that
    fits.
    """
    claims = items_of(problem)
    chance.shuffle(claims)
    state: dict[int, Any] = {}
    by_product: dict[str, list[int]] = {}
    for number, each in enumerate(problem.fleet.devices):
        by_product.setdefault(each.device.product, []).append(number)
    legal: dict[int, set[Any]] = {}
    # Claims never leave, so a device without room for an item never has room for it again.
    first: Counter[int] = Counter()
    served = 0
    for items in claims:
        for item in items:
            devices = by_product[item.device.product]
            after = None
            while first[item.number] < len(devices) and after is None:
                device = devices[first[item.number]]
                arrangements = problem.kinds[device]
                sets = legal.setdefault(id(arrangements), {(one.bits, one.counts) for one in arrangements.all})
                after = _with(arrangements, state.get(device, (0, (0,) * len(arrangements.profiles))), item, sets)
                if after is None:
                    first[item.number] += 1
            if after is not None:
                state[device] = after
                served += 1
                break
    return served


def _with(arrangements: Any, state: Any, item: Any, legal: set[Any]) -> Any:
    """Return a device's state with one more item; None if it does not fit. A whole device holds no other item."""
    if state == "whole":
        return None
    bits, counts = state
    if item.profile is None:
        return "whole" if not any(counts) else None
    number = arrangements.number(item.profile.profile_id)
    more = (*counts[:number], counts[number] + 1, *counts[number + 1 :])
    if item.profile.is_numbered:
        return (bits, more) if (bits, more) in legal else None
    for at, (profile, _place) in enumerate(arrangements.places):
        if profile == number and not bits >> at & 1 and (bits | 1 << at, more) in legal:
            return (bits | 1 << at, more)
    return None


def balanced(problem: Any, products: Mapping[str, str]) -> int:
    """Return how many claims are served if all devices have one layout. Claims of whole devices are not served."""
    supply: Counter[tuple[str, str]] = Counter()
    for number, each in enumerate(problem.fleet.devices):
        counts = BALANCED[products[each.device.product]]
        known = problem.kinds[number]
        assert tuple(counts.get(one.name, 0) for one in known.profiles) in dict(known.by_counts), each.device.product
        for name, count in counts.items():
            supply[each.device.product, name] += count
    served = 0
    for number, demand in enumerate(problem.demands):
        names = {(problem.items[item].device.product, _name(problem.items[item])) for item in problem.wants[number][0]}
        served += min(demand.count, sum(supply[name] for name in names))
    return served


def _name(item: Any) -> str:
    return item.profile.name if item.profile is not None else ""


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.monotonic()
    return function(), time.monotonic() - begin


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", FLEETS)
def test_claims_that_a_plan_serves(figures: Figures, name: str, mix: str) -> None:
    optimization = module("_planner.optimization")
    sums: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    nodes, products = nodes_of(FLEETS[name])
    fleet = module("core.planner.fleet").read_fleet(nodes)
    for seed in range(SEEDS):
        chance = random.Random(f"{name} {mix} {seed}")
        demands = module("core.planner.demands").read_demands(wanted(fleet, products, mix, chance))
        problem, seconds_of = timed(lambda demands=demands: module("core.planner.problem").build(fleet, demands))
        seconds["problem"] += seconds_of
        best, seconds_of = timed(lambda problem=problem: optimization.solve(problem, SECONDS))
        seconds["plan"] += seconds_of
        sums["wanted"] += sum(each.count for each in demands)
        sums["plan"] += sum(best.solution.served)
        sums["bound"] += best.solution.bounds[0]
        sums["proven"] += best.most_served
        sums["first fit"] += first_fit(problem, chance)
        sums["balanced"] += balanced(problem, products)
        assert sum(best.solution.served) <= best.solution.bounds[0]
    assert sums["plan"] >= max(sums["first fit"], sums["balanced"])
    figures.add_line(
        f"{name}, {mix}: of {sums['wanted']} claims a plan serves {sums['plan']} (no plan more than {sums['bound']}, proven "
        f"in {sums['proven']} of {SEEDS}), first fit {sums['first fit']}, balanced {sums['balanced']}: plan / first fit "
        f"{sums['plan'] / sums['first fit']:.2f}, plan / balanced {sums['plan'] / sums['balanced']:.2f}; HiGHS takes "
        f"{seconds['plan'] / seconds['problem']:.2f} times as long as the search for possible configurations"
    )


# ---- fleets with a history of claims


Place = tuple[int, int]


@functools.cache
def can_exist(places: tuple[Place, ...]) -> bool:
    return board_model.can_exist(BOARD, places)


class UsedFleet:
    """GPUs whose partitions are created in order of arrival at the first placement that fits, and destroyed with their
    claims.
    """

    def __init__(self, gpus: int) -> None:
        entries = board_model.board(BOARD)["mig"]["profiles"]
        self.starts = {one["name"]: (one["id"], one["placements"]["starts"]) for one in entries}
        self.gpus: list[tuple[Place, ...]] = [() for _gpu in range(gpus)]
        self.held: dict[int, tuple[int, Place]] = {}
        self.waiting: dict[int, str] = {}

    def start_claim(self, claim: int, profile: str) -> bool:
        number, starts = self.starts[profile]
        for at, places in enumerate(self.gpus):
            for start in starts:
                more = tuple(sorted((*places, (number, start))))
                if can_exist(more):
                    self.gpus[at] = more
                    self.held[claim] = (at, (number, start))
                    return True
        self.waiting[claim] = profile
        return False

    def end_claim(self, claim: int) -> None:
        self.waiting.pop(claim, None)
        if claim in self.held:
            at, place = self.held.pop(claim)
            self.gpus[at] = tuple(each for each in self.gpus[at] if each != place)


def run_events(gpus: int, events: tuple[Event, ...]) -> UsedFleet:
    found = UsedFleet(gpus)
    for event in events:
        if event.profile:
            found.start_claim(event.claim, event.profile)
        else:
            found.end_claim(event.claim)
    return found


def running_when_balanced(gpus: int, events: tuple[Event, ...]) -> int:
    """Return how many claims of a trace have a device at its end if all GPUs keep one balanced layout."""
    left = Counter({name: count * gpus for name, count in BALANCED[BOARD].items()})
    held: dict[int, str] = {}
    for event in events:
        if event.profile and left[event.profile]:
            held[event.claim] = event.profile
            left[event.profile] -= 1
        elif event.claim in held:
            left[held.pop(event.claim)] += 1
    return len(held)


def waiting_demands(used_fleet: UsedFleet, chance: random.Random) -> list[Json]:
    """Return the pending claims, half of them with a higher priority."""
    counts = Counter((profile, chance.choice((0, 1))) for profile in used_fleet.waiting.values())
    return [
        {"name": f"{profile} of priority {priority}", "count": count, "profile": profile, "priority": priority}
        for (profile, priority), count in sorted(counts.items())
    ]


def first_fit_of_waiting(used_fleet: UsedFleet, demands: list[Json]) -> list[int]:
    """Return how many pending claims fit now if each takes the first place, higher priorities first."""
    later = UsedFleet(0)
    later.gpus = list(used_fleet.gpus)
    found = [0, 0]
    for demand in sorted(demands, key=lambda each: -each["priority"]):
        for number in range(demand["count"]):
            found[demand["priority"]] += later.start_claim(number, demand["profile"])
    return found


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("gpus", LIVED_IN)
def test_plan_counts_new_and_running_claims(figures: Figures, gpus: int, mix: str) -> None:
    optimization, problems = module("_planner.optimization"), module("core.planner.problem")
    plans = module("core.planner.plan")
    entries = [one for one in board_model.board(BOARD)["mig"]["profiles"] if one["name"] in BALANCED[BOARD]]
    sizes = {one["name"]: one["placements"]["size"] for one in entries}
    sums: Counter[str] = Counter()
    for seed in range(SEEDS):
        events = trace(
            sizes,
            board_model.board(BOARD)["mig"]["memory_slices"],
            mix,
            seed=seed,
            claims=40 * gpus,
            gpus=gpus,
            load=LOAD,
        )
        used_fleet = run_events(gpus, events)
        documents = waiting_demands(used_fleet, random.Random(f"{gpus} {mix} {seed}"))
        demands = module("core.planner.demands").read_demands(documents)
        small = [
            Small(BOARD, places, frozenset(places), enabled=bool(places), node=f"node-{at // 8}")
            for at, places in enumerate(used_fleet.gpus)
        ]
        fleet = module("core.planner.fleet").read_fleet(answers(small))
        sums["running"] += len(used_fleet.held)
        sums["waiting"] += len(used_fleet.waiting)
        sums["high"] += sum(each["count"] for each in documents if each["priority"])
        sums["balanced"] += running_when_balanced(gpus, events)
        low, high = first_fit_of_waiting(used_fleet, documents)
        sums["first fit"] += low + high
        sums["first fit, high"] += high
        before = 0
        for most in MOVES:
            problem = problems.build(fleet, demands, most_moves=most)
            best = optimization.solve(problem, SECONDS)
            first = sum(n for n, one in zip(best.solution.served, demands, strict=True) if one.priority)
            moves = len(plans.make_plan(problem, best.solution).moves)
            sums[f"plan {most}"] += sum(best.solution.served)
            sums[f"plan {most}, high"] += first
            sums[f"moves {most}"] += moves
            sums[f"proven {most}"] += best.most_served
            assert moves <= most
            # More permitted moves never serve fewer claims of the first priority.
            assert first >= before or not best.most_served, f"with {most} moves {first}, with fewer {before}"
            before = first
    assert sums["plan 0"] + sums["running"] > sums["balanced"]
    figures.add_line(
        f"{gpus} H100 in use, {mix}: {sums['running']} claims run and {sums['waiting']} wait, {sums['high']} of them with priority; "
        f"first fit serves {sums['first fit']} ({sums['first fit, high']} with priority), "
        + ", ".join(
            f"a plan with {most} moves {sums[f'plan {most}']} ({sums[f'plan {most}, high']}; {sums[f'moves {most}']} moved, "
            f"proven {sums[f'proven {most}']} of {SEEDS})"
            for most in MOVES
        )
        + f"; running then as a multiple of balanced ({sums['balanced']}): first fit "
        f"{(sums['running'] + sums['first fit']) / sums['balanced']:.2f}, "
        + ", ".join(f"{most} moves {(sums['running'] + sums[f'plan {most}']) / sums['balanced']:.2f}" for most in MOVES)
    )
