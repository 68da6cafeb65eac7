# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What does not change about a device, as plain values and back: for as long as the vendor's library cannot be asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .model import AttributeValue, Clique, Device, Partitioning, Passthrough, Placement, Profile, Version, frozen

_PLAIN = (
    "vendor",
    "index",
    "minor",
    "uuid",
    "product",
    "pci_address",
    "pcie_root",
    "numa_node",
    "memory_bytes",
    "memory_slices",
    "pci_device_id",
    "pci_subsystem_id",
)
_OF_PROFILE = ("name", "profile_id", "memory_bytes", "maximum", "compute_slices", "number")


def document_of(device: Device) -> dict[str, Any]:
    """Return a device's facts as JSON has values; processes, partitions and health are of the moment, and left out."""
    found = {name: getattr(device, name) for name in _PLAIN}
    found["attributes"] = _attributes_document(device.attributes)
    found["capacities"] = dict(device.capacities)
    # Releases before it came know of no device without a mode, and read documents of all others.
    found["partitioning"] = {
        name: value
        for name, value in vars(device.partitioning).items()
        if name not in ("has_mode", "blocked") or (name == "has_mode" and not value)
    }
    found["profiles"] = [_profile_document(profile) for profile in device.profiles]
    found["linked"] = list(device.linked)
    found["passthrough"] = dict(vars(device.passthrough)) if device.passthrough is not None else None
    found["driver_version"] = device.driver_version
    found["clique"] = dict(vars(device.clique)) if device.clique is not None else None
    found["switched"] = device.switched
    found["module"] = device.module
    return found


def device_of(document: Mapping[str, Any]) -> Device:
    """Read what ``document_of`` has made. Raises ValueError."""
    try:
        passthrough, clique = document["passthrough"], document.get("clique")
        return Device(
            **{name: document[name] for name in _PLAIN},
            attributes=_attributes(document["attributes"]),
            capacities=frozen(document["capacities"]),
            partitioning=Partitioning(**document["partitioning"]),
            profiles=tuple(_profile(each) for each in document["profiles"]),
            linked=tuple(document["linked"]),
            passthrough=Passthrough(**passthrough) if passthrough is not None else None,
            # Documents of former releases have none of these.
            driver_version=document.get("driver_version", ""),
            clique=Clique(**clique) if clique is not None else None,
            switched=bool(document.get("switched")),
            module=document.get("module"),
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the facts of a device cannot be read: {error!r}") from error


def _profile_document(profile: Profile) -> dict[str, Any]:
    return {
        **{name: getattr(profile, name) for name in _OF_PROFILE},
        "capacities": dict(profile.capacities),
        "attributes": _attributes_document(profile.attributes),
        "placements": [[placement.start, placement.size] for placement in profile.placements],
        "aliases": list(profile.aliases),
    }


def _profile(document: Mapping[str, Any]) -> Profile:
    return Profile(
        **{name: document[name] for name in _OF_PROFILE},
        capacities=frozen(document["capacities"]),
        attributes=_attributes(document["attributes"]),
        placements=tuple(Placement(start, size) for start, size in document["placements"]),
        aliases=tuple(document["aliases"]),
    )


def _attributes_document(attributes: Mapping[str, AttributeValue]) -> dict[str, Any]:
    return {
        name: {"version": value.text} if isinstance(value, Version) else value for name, value in attributes.items()
    }


def _attributes(document: Mapping[str, Any]) -> dict[str, AttributeValue]:
    return {
        name: Version(value["version"]) if isinstance(value, Mapping) else value for name, value in document.items()
    }
