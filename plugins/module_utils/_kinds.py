# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What is the same for all devices of a kind: how they can be cut, and how that would be published. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ._facts import profile_facts
from .core.backend import BACKENDS, create
from .core.model import DEVICE, Device, Offer, Partition, Profile
from .core.published_form import published_form

Json = dict[str, Any]
#: Under which a kind's whole device stands in ``published``, beside the numbers of profiles.
WHOLE = "whole"


def kinds_of(devices: Iterable[Device]) -> tuple[Json, list[str]]:
    """Return the kinds by their names, and the kind of each device. Products that can be cut in different ways are different kinds."""
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
    """How the whole device, and a partition of each profile, would be published if nobody had any of it.

    ``devices`` has the whole device and what could be made when a claim wants it, ``made`` what a layout has made.
    """
    if device.vendor not in BACKENDS:
        return {}
    mode = replace(device.partitioning, enabled=False, pending=False, needs_reset=False)
    # Taken for whole the device is published with what it has; taken for dynamic, with each partition that could be made.
    empty = replace(device, partitions=(), partitioning=mode)
    backend = create(device.vendor)
    found: Json = {}
    for offer in (*backend.offers(empty, dynamic=False), *backend.offers(empty, dynamic=True)):
        key = WHOLE if offer.kind == DEVICE else str(offer.profile_id)
        if key not in found and (offer.kind == DEVICE or offer.profile_id is not None):
            found[key] = _content(offer)
    cut = replace(mode, enabled=True, pending=True)
    made: Json = {}
    for profile in device.profiles if mode.supported else ():
        offers = backend.offers(replace(empty, partitions=(_made(device, profile),), partitioning=cut), dynamic=False)
        made[str(profile.profile_id)] = _content(offers[0])
    return {"driver": backend.driver_name, "devices": found, "made": made}


def _made(device: Device, profile: Profile) -> Partition:
    """A partition as a layout makes it, under a UUID and an id that are nobody's."""
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
