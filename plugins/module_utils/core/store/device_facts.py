# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert the constant facts of a device to JSON data and back, for use while the device cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model import AttributeValue, Clique, Device, Partitioning, Passthrough, Placement, Profile, Version, frozen

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
    """Return a device's facts as JSON data, without processes, partitions, and health, which change."""
    found = {name: getattr(device, name) for name in _PLAIN}
    found["attributes"] = _attributes_document(device.attributes)
    found["capacities"] = dict(device.capacities)
    # Earlier releases assume that every device has a mode, and must be able to read the facts of such devices.
    found["partitioning"] = {
        name: value
        for name, value in vars(device.partitioning).items()
        if name not in ("has_mode", "blocked") or (name == "has_mode" and not value)
    }
    found["profiles"] = [_profile_document(profile) for profile in device.profiles]
    found["linked"] = list(device.linked)
    found["resets_alone"] = device.resets_alone
    found["passthrough"] = dict(vars(device.passthrough)) if device.passthrough is not None else None
    found["driver_version"] = device.driver_version
    found["clique"] = dict(vars(device.clique)) if device.clique is not None else None
    found["switched"] = device.switched
    found["module"] = device.module
    found["name_number"] = device.name_number
    return found


def device_of(document: Mapping[str, Any]) -> Device:
    """Parse the result of ``document_of``. Raises ValueError."""
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
            # Facts from earlier releases lack these fields.
            driver_version=document.get("driver_version", ""),
            resets_alone=bool(document.get("resets_alone")),
            clique=Clique(**clique) if clique is not None else None,
            switched=bool(document.get("switched")),
            module=document.get("module"),
            name_number=document.get("name_number"),
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
