# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Convert devices, partitions, and offers to the plain data that the modules return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.model import AttributeValue, Device, Offer, Partition, Placement, Process, Profile, Version


def _plain(value: AttributeValue) -> bool | int | str:
    return value.text if isinstance(value, Version) else value


def _attributes(attributes: Mapping[str, AttributeValue]) -> dict[str, bool | int | str]:
    return {name: _plain(value) for name, value in attributes.items()}


def _placement(placement: Placement | None) -> dict[str, int] | None:
    return None if placement is None else {"start": placement.start, "size": placement.size}


def _process(process: Process) -> dict[str, Any]:
    return {"pid": process.pid, "name": process.name}


def profile_facts(profile: Profile) -> dict[str, Any]:
    """Return the facts of a partition profile; memory in bytes."""
    return {
        "name": profile.name,
        "profile_id": profile.profile_id,
        "memory_bytes": profile.memory_bytes,
        "maximum": profile.maximum,
        "placements": [_placement(placement) for placement in profile.placements],
        "attributes": _attributes(profile.attributes),
        "capacities": dict(profile.capacities),
    }


def partition_facts(partition: Partition) -> dict[str, Any]:
    """Return the facts of an existing partition. ``uuid`` is empty if the partition has no handle."""
    return {
        "uuid": partition.uuid,
        "profile": partition.profile,
        "profile_id": partition.profile_id,
        "placement": _placement(partition.placement),
        "instance_id": partition.instance_id,
        "compute_instance_id": partition.compute_instance_id,
        "memory_bytes": partition.memory_bytes,
        "processes": [_process(process) for process in partition.processes],
    }


def device_facts(device: Device) -> dict[str, Any]:
    """Return all facts of a device, with its profiles and partitions."""
    partitioning = device.partitioning
    return {
        "vendor": device.vendor,
        "index": device.index,
        "minor": device.minor,
        "uuid": device.uuid,
        "product": device.product,
        "pci_address": device.pci_address,
        "pcie_root": device.pcie_root,
        "numa_node": device.numa_node,
        "memory_bytes": device.memory_bytes,
        "memory_slices": device.memory_slices,
        "attributes": _attributes(device.attributes),
        "capacities": dict(device.capacities),
        "partitioning": {
            "supported": partitioning.supported,
            "enabled": partitioning.enabled,
            "pending": partitioning.pending,
            "needs_reset": partitioning.needs_reset,
            "blocked": partitioning.blocked,
        },
        "profiles": [profile_facts(profile) for profile in device.profiles],
        "partitions": [partition_facts(partition) for partition in device.partitions],
        "processes": [_process(process) for process in device.processes],
        "health": {
            "healthy": device.health.healthy,
            "causes": list(device.health.causes),
            "signs": [
                {
                    "cause": sign.cause,
                    "severity": sign.severity.word,
                    "value": sign.value,
                    "message": sign.message,
                    "remedy": sign.remedy,
                }
                for sign in device.health.signs
            ],
        },
    }


def offer_facts(offer: Offer) -> dict[str, Any]:
    """Return the facts of a device as it would be published in a ResourceSlice."""
    return {
        "name": offer.name,
        "kind": offer.kind,
        "dynamic": offer.dynamic,
        "profile": offer.profile,
        "placement": _placement(offer.placement),
        "partition_uuid": offer.partition_uuid,
        "attributes": _attributes(offer.attributes),
        "capacities": dict(offer.capacities),
        "counter_set": offer.counter_set,
        "consumes": dict(offer.consumes),
        "taints": [{"key": taint.key, "value": taint.value, "effect": taint.effect} for taint in offer.taints],
    }
