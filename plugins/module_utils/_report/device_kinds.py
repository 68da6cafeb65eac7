# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Describe the kinds of devices: their partition profiles, and how these would be published. No side effects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..core.dra.device_json import published_form
from ..core.model import DEVICE, Device, Offer, Partition, Profile
from ..core.vendors.registry import BACKENDS, create
from .device_facts import profile_facts

Json = dict[str, Any]
#: The key of the whole device in ``published``, in addition to the profile numbers.
WHOLE = "whole"


def kinds_of(devices: Iterable[Device]) -> tuple[Json, list[str]]:
    """Return the kinds by name, and the kind of each device. Equal products with different profiles are different kinds."""
    found: Json = {}
    names = []
    for device in devices:
        same = {
            "profiles": [profile_facts(each) for each in device.profiles],
            "memory_slices": device.memory_slices,
            "capacities": dict(device.capacities),
        }
        name, number = device.product, 1
        while name in found and {key: found[name][key] for key in same} != same:
            number += 1
            name = f"{device.product} ({number})"
        if name not in found:
            found[name] = {**same, "published": _published(device)}
        names.append(name)
    return found, names


def _published(device: Device) -> Json:
    """Return how an unused device, and a partition of each profile, would be published.

    ``devices`` has the whole device and the partitions that can be created on demand. ``made`` has partitions of a layout.
    """
    if device.vendor not in BACKENDS:
        return {}
    mode = replace(device.partitioning, enabled=False, pending=False, needs_reset=False)
    # The offers of an unpartitioned device contain the whole device. Those of a dynamic device contain all possible partitions.
    empty = replace(device, partitions=(), partitioning=mode)
    backend = create(device.vendor)
    found: Json = {}
    for offer in (*backend.offers(empty, dynamic=False), *backend.offers(empty, dynamic=True)):
        key = WHOLE if offer.kind == DEVICE else str(offer.profile_id)
        if key not in found and (offer.kind == DEVICE or offer.profile_id is not None):
            found[key] = _content(offer)
    partitioned = replace(mode, enabled=True, pending=True)
    static: Json = {}
    for profile in device.profiles if mode.supported else ():
        example = replace(empty, partitions=(_static_partition(device, profile),), partitioning=partitioned)
        static[str(profile.profile_id)] = _content(backend.offers(example, dynamic=False)[0])
    return {"driver": backend.driver_name, "devices": found, "made": static}


def _static_partition(device: Device, profile: Profile) -> Partition:
    """Return a partition as a layout creates it, with a placeholder UUID and ID."""
    return Partition(
        uuid=f"{device.uuid}-{profile.profile_id}",
        profile=profile.name,
        profile_id=profile.profile_id,
        placement=profile.placements[0],
        instance_id=0,
        compute_instance_id=0,
        memory_bytes=profile.memory_bytes,
        capacities=profile.capacities,
    )


def _content(offer: Offer) -> Json:
    form = published_form(offer)
    return {each: form[each] for each in ("attributes", "capacity") if each in form}
