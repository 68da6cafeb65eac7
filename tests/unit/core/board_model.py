# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Boards for tests: devices of the core's model from board descriptions, and an independent model of possible partitions.

The independent model shares no code with the core. It uses the placements, instance counts, and engines in the
description.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from dra_driver.core.dra.resource_slices import build_pool, plan_pool
from dra_driver.core.model import Device, Partition, Partitioning, Placement, Profile, Version
from dra_driver.core.vendors.nvidia import offers
from dra_driver.core.vendors.nvidia.profiles import aliases

BOARDS = Path(__file__).resolve().parents[3] / "roles" / "simulator" / "files" / "boards"
MIB = 1024 * 1024
ENGINES = {
    "copy_engines": "copy",
    "decoders": "decoder",
    "encoders": "encoder",
    "jpeg_engines": "jpeg",
    "optical_flow_engines": "optical_flow",
}
Place = tuple[int, int]  # profile id, start


@cache
def board(name: str) -> dict[str, Any]:
    return json.loads((BOARDS / f"{name}.json").read_text())


def board_names(mig: bool = True) -> list[str]:
    return sorted(path.stem for path in BOARDS.glob("*.json") if board(path.stem)["mig"]["capable"] == mig)


def profiles(name: str) -> tuple[Profile, ...]:
    return tuple(
        Profile(
            name=entry["name"],
            profile_id=entry["id"],
            memory_bytes=entry["memory_mib"] * MIB,
            capacities={
                "multiprocessors": entry["multiprocessors"],
                "copyEngines": entry["copy_engines"],
                "decoders": entry["decoders"],
                "encoders": entry["encoders"],
                "jpegEngines": entry["jpeg_engines"],
                "ofaEngines": entry["optical_flow_engines"],
                "memory": entry["memory_mib"] * MIB,
            },
            attributes={},
            placements=tuple(Placement(start, entry["placements"]["size"]) for start in entry["placements"]["starts"]),
            maximum=entry["instances"],
            compute_slices=entry["slices"],
            aliases=aliases(entry["name"]),
        )
        for entry in board(name)["mig"].get("profiles", ())
    )


def device(
    name: str,
    index: int = 0,
    *,
    enabled: bool | None = None,
    pending: bool | None = None,
    places: tuple[Place, ...] = (),
    **changes: Any,
) -> Device:
    """Return a board as a device with partitions at ``places``. By default partitioning is enabled if there are any."""
    entry = board(name)
    known = profiles(name)
    on = bool(places) if enabled is None else enabled
    major, minor = (int(part) for part in entry["compute_capability"].split("."))
    by_id = {profile.profile_id: profile for profile in known}
    address = f"0000:{16 + index:02x}:00.0"
    uuid = f"GPU-{index:08x}-0000-0000-0000-000000000000"
    facts: dict[str, Any] = {
        "vendor": "nvidia",
        "index": index,
        "minor": index,
        "uuid": uuid,
        "product": entry["name"],
        "pci_address": address,
        "pcie_root": "pci0000:10",
        "numa_node": 0,
        "memory_bytes": entry["memory"]["total_mib"] * MIB,
        "memory_slices": entry["mig"].get("memory_slices", 0),
        "attributes": {
            "productName": entry["name"],
            "brand": "Nvidia",
            "architecture": entry["architecture"].title(),
            "cudaComputeCapability": Version(f"{major}.{minor}.0"),
            "driverVersion": Version("580.95.5"),
            "cudaDriverVersion": Version("13.0.0"),
            "addressingMode": "None",
            "resource.kubernetes.io/pciBusID": address,
            "resource.kubernetes.io/pcieRoot": "pci0000:10",
            "resource.kubernetes.io/numaNode": 0,
        },
        "capacities": {"memory": entry["memory"]["total_mib"] * MIB},
        "partitioning": Partitioning(
            supported=entry["mig"]["capable"],
            enabled=on,
            pending=on if pending is None else pending,
            needs_reset=entry["mig"].get("mode_change") == "reset",
        ),
        "profiles": known,
        "partitions": tuple(
            partition(by_id[profile_id], start, uuid, number)
            for number, (profile_id, start) in enumerate(sorted(places, key=lambda place: place[1]), start=1)
        ),
        "pci_device_id": int(entry["pci"]["device"], 16) << 16 | int(entry["pci"]["vendor"], 16),
        "pci_subsystem_id": int(entry["pci"]["subsystem_device"], 16) << 16 | int(entry["pci"]["subsystem_vendor"], 16),
    }
    facts.update(changes)
    return Device(**facts)


def partition(profile: Profile, start: int, parent: str, number: int, **changes: Any) -> Partition:
    facts: dict[str, Any] = {
        "uuid": f"MIG-{parent[4:12]}-{profile.profile_id}-{start}",
        "profile": profile.name,
        "profile_id": profile.profile_id,
        "placement": Placement(start, profile.size),
        "instance_id": number,
        "compute_instance_id": 0,
        "memory_bytes": profile.memory_bytes,
        "capacities": profile.capacities,
    }
    facts.update(changes)
    return Partition(**facts)


def can_exist(name: str, places: tuple[Place, ...]) -> bool:
    """Return whether instances at these places can exist together: no overlap, and enough instances and engines."""
    mig = board(name)["mig"]
    entries = {entry["id"]: entry for entry in mig["profiles"]}
    covered: list[int] = []
    for profile_id, start in places:
        layout = entries[profile_id]["placements"]
        if start not in layout["starts"]:
            return False
        covered.extend(range(start, start + layout["size"]))
    if len(set(covered)) != len(covered) or len(places) > mig["maximum_instances"]:
        return False
    counts = Counter(profile_id for profile_id, _start in places)
    if any(count > entries[profile_id]["instances"] for profile_id, count in counts.items()):
        return False
    if sum(entries[profile_id]["slices"] for profile_id, _start in places) > mig["compute_slices"]:
        return False
    return all(
        sum(entries[profile_id][key] for profile_id, _start in places) <= mig["engines"][engine]
        for key, engine in ENGINES.items()
    )


@cache
def all_states(name: str) -> tuple[tuple[Place, ...], ...]:
    """Return each set of instances that can exist on a board, each sorted."""
    entries = board(name)["mig"]["profiles"]
    every = sorted((entry["id"], start) for entry in entries for start in entry["placements"]["starts"])
    found: list[tuple[Place, ...]] = [()]
    frontier: list[tuple[tuple[Place, ...], int]] = [((), 0)]
    while frontier:
        state, position = frontier.pop()
        for index in range(position, len(every)):
            larger = (*state, every[index])
            if can_exist(name, larger):
                found.append(larger)
                frontier.append((larger, index + 1))
    return tuple(found)


def multiset(places: tuple[Place, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(Counter(profile_id for profile_id, _start in places).items()))


def pairs(names: list[str], *values: Any) -> list[Any]:
    return list(product(names, *values))


def slices_of(devices: Sequence[Device], driver: str, node: str) -> list[dict[str, Any]]:
    """Return the core's slices for a node with these devices and dynamic partitions."""
    pool = build_pool(
        driver=driver,
        pool=node,
        node_name=node,
        offers=[offer for device in devices for offer in offers.offers(device, dynamic=True)],
        counter_sets=[offers.counter_set(device) for device in devices],
    )
    return [write.body for write in plan_pool(pool, ()).writes if write.body is not None]
