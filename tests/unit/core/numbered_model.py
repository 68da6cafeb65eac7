# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A vendor-neutral device whose partitions have numbers instead of places, for tests of the shared core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dra_driver.core.model import Device, Partition, Partitioning, Placement, Profile

NUMBERS = 16
UUID = "DEV-0"
#: The consumption of each profile: cores, helpers, and memory in bytes.
TAKES: Mapping[str, tuple[int, int, int]] = {"half": (10, 3, 32), "quarter": (5, 1, 16), "media": (10, 4, 32)}
TOTALS = {"cores": 20, "helpers": 7, "memory": 64}
IDS = {name: number for number, name in enumerate(sorted(TAKES))}
Slot = tuple[str, int]  # profile, number


def capacities(name: str) -> Mapping[str, int]:
    return dict(zip(TOTALS, TAKES[name]))


def can_exist(counts: Mapping[str, int]) -> bool:
    """Return whether these numbers of each profile can exist together, from an independent sum."""
    return all(
        sum(count * TAKES[name][at] for name, count in counts.items()) <= total
        for at, total in enumerate(TOTALS.values())
    )


def profile(name: str) -> Profile:
    most = max(count for count in range(NUMBERS + 1) if can_exist({name: count}))
    return Profile(
        name=name,
        profile_id=IDS[name],
        memory_bytes=TAKES[name][2],
        capacities=capacities(name),
        attributes={},
        placements=tuple(Placement(number, 0) for number in range(NUMBERS)),
        maximum=most,
    )


def partition(name: str, number: int, **changes: Any) -> Partition:
    facts: dict[str, Any] = {
        "uuid": f"PART-{name}-{number}",
        "profile": name,
        "profile_id": IDS[name],
        "placement": Placement(number, 0),
        "instance_id": 100 + number,
        "compute_instance_id": None,
        "memory_bytes": TAKES[name][2],
        "capacities": capacities(name),
    }
    facts.update(changes)
    return Partition(**facts)


def partitioning(has_partitions: bool) -> Partitioning:
    """Return the state of a device without a partitioning mode."""
    return Partitioning(supported=True, enabled=has_partitions, pending=has_partitions, has_mode=False)


def device(slots: Sequence[Slot] = (), **changes: Any) -> Device:
    facts: dict[str, Any] = {
        "vendor": "model",
        "index": 0,
        "minor": 0,
        "uuid": UUID,
        "product": "Model",
        "pci_address": "0000:10:00.0",
        "pcie_root": None,
        "numa_node": None,
        "memory_bytes": TOTALS["memory"],
        "memory_slices": 0,
        "attributes": {},
        "capacities": dict(TOTALS),
        "partitioning": partitioning(bool(slots)),
        "profiles": tuple(profile(name) for name in sorted(TAKES)),
        "partitions": tuple(partition(name, number) for name, number in sorted(slots, key=lambda slot: slot[1])),
    }
    facts.update(changes)
    return Device(**facts)


def multisets() -> tuple[Mapping[str, int], ...]:
    """Return each multiset of profiles that can exist."""
    names = sorted(TAKES)
    found: list[dict[str, int]] = [{}]
    for name in names:
        found = [{**counts, name: count} for counts in found for count in range(profile(name).maximum + 1)]
    return tuple({name: count for name, count in each.items() if count} for each in found if can_exist(each))


def counted(partitions: Iterable[Partition]) -> Mapping[str, int]:
    return dict(Counter(each.profile for each in partitions))
