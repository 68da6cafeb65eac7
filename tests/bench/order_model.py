# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Model the scheduler's first fit for one node's dynamic GPUs, with claims at random times.

A claim requests a profile and gets the first of its devices that the counters still allow, GPU after GPU in the
published order. It releases the device later. A claim that does not fit is rejected. No other property of a scheduler
affects how much room an order of the devices leaves.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dra_driver.core.model import Offer

#: Exponent of the probability of a profile, by the memory slices that it takes.
MIXES: Mapping[str, Mapping[str, float]] = {
    "every profile alike": {"exponent": 0.0},
    "small ones more often": {"exponent": 1.0},
    "mostly small ones": {"exponent": 2.0},
}
GPUS = 8


@dataclass(frozen=True)
class Event:
    """A claim that requests a profile or, without a profile, is released."""

    claim: int
    profile: str = ""


def trace(
    sizes: Mapping[str, int], slices: int, mix: str, *, seed: int, claims: int, gpus: int = GPUS, load: float = 0.9
) -> tuple[Event, ...]:
    """Return claims at random times with random durations, which would fill ``load`` of the node if all were served.

    ``sizes`` are the memory slices of each profile, ``slices`` those of one GPU. The same seed gives the same trace.
    """
    chance = random.Random(seed)
    names = sorted(sizes)
    weights = [sizes[name] ** -MIXES[mix]["exponent"] for name in names]
    mean = sum(weight * sizes[name] for weight, name in zip(weights, names)) / sum(weights)
    staying = load * gpus * slices / mean
    now, events = 0.0, []
    leaving: list[tuple[float, int]] = []
    for number in range(claims):
        now += chance.expovariate(1.0)
        while leaving and leaving[0][0] <= now:
            events.append(Event(heapq.heappop(leaving)[1]))
        events.append(Event(number, chance.choices(names, weights)[0]))
        heapq.heappush(leaving, (now + chance.expovariate(1 / staying), number))
    return tuple(events)


def served(published: Sequence[Offer], counters: Mapping[str, int], events: Sequence[Event]) -> int:
    """Return how many claims of a trace get a device with the devices of each GPU published in this order."""
    by_profile: dict[str, list[Offer]] = {}
    for offer in published:
        by_profile.setdefault(offer.profile or "", []).append(offer)
    left = [dict(counters) for _gpu in range(GPUS)]
    held: dict[int, tuple[dict[str, int], Offer]] = {}
    count = 0
    for event in events:
        if event.profile:
            found = _first_fit(left, by_profile[event.profile])
            if found is not None:
                held[event.claim] = found
                _add(*found, -1)
                count += 1
        elif event.claim in held:
            _add(*held.pop(event.claim), 1)
    return count


def _first_fit(left: Sequence[dict[str, int]], offers: Sequence[Offer]) -> tuple[dict[str, int], Offer] | None:
    for gpu in left:
        for offer in offers:
            if all(gpu[counter] >= amount for counter, amount in offer.consumes.items()):
                return gpu, offer
    return None


def _add(gpu: dict[str, int], offer: Offer, sign: int) -> None:
    for counter, amount in offer.consumes.items():
        gpu[counter] += sign * amount
