# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The labels of a Node with GPUs, with the names and values of NVIDIA's gpu-feature-discovery (GFD).

Facts: NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery/README.md and internal/lm. docs/labels.md compares the
labels. This module has no side effects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...dra.node_labels import (
    AUTO,
    MIXED,
    NO_PARTITIONS,
    SINGLE,
    UNKNOWN_MACHINE,
    MachineFacts,
    common_value,
    drop_empty_labels,
    value_of,
)
from ...model import Device, Partition, Version

DOMAIN = "nvidia.com"
GPU = f"{DOMAIN}/gpu"
_NOT_SPELLED = re.compile(r"[^A-Za-z0-9_. -]")
_MEBIBYTE = 1024 * 1024
_MODES = {"0x030000": "graphics", "0x030200": "compute"}
_UNKNOWN = "unknown"
#: The profile capacity of each engine label.
_ENGINES = {
    "multiprocessors": "multiprocessors",
    "engines.copy": "copyEngines",
    "engines.decoder": "decoders",
    "engines.encoder": "encoders",
    "engines.jpeg": "jpegEngines",
    "engines.ofa": "ofaEngines",
}
#: The label suffixes for partitions. They follow the profile name, or with the strategy single the name of the GPU
#: labels.
OF_PARTITIONS = (
    "count",
    "product",
    "replicas",
    "sharing-strategy",
    "memory",
    "slices.gi",
    "slices.ci",
    *_ENGINES,
)
#: All labels except those by profile, for callers that need the names in advance.
NAMES = (
    *(
        f"{GPU}.{name}"
        for name in (
            "count",
            "product",
            "memory",
            "family",
            "compute.major",
            "compute.minor",
            "machine",
            "mode",
            "clique",
            "replicas",
            "sharing-strategy",
            "slices.gi",
            "slices.ci",
            *_ENGINES,
        )
    ),
    *(
        f"{DOMAIN}/cuda.{name}"
        for name in (
            "driver-version.full",
            "driver-version.major",
            "driver-version.minor",
            "driver-version.revision",
            "runtime-version.full",
            "runtime-version.major",
            "runtime-version.minor",
            "driver.major",
            "driver.minor",
            "driver.rev",
            "runtime.major",
            "runtime.minor",
        )
    ),
    f"{DOMAIN}/mig.capable",
    f"{DOMAIN}/mig.strategy",
    f"{DOMAIN}/mps.capable",
)
#: The labels by profile, as a regular expression: nvidia.com/mig-1g.10gb.me.all.count
PROFILE_NAMES = (
    rf"{re.escape(DOMAIN)}/mig-(?:\d{{1,2}}c\.)?\d{{1,2}}g\.\d{{1,4}}gb(?:[.-][a-z]{{1,12}}){{0,3}}\."
    rf"(?:{'|'.join(map(re.escape, OF_PARTITIONS))})"
)


def partition_resource(profile: str) -> str:
    """Return the extended resource name of a profile, which is also the prefix of the profile's labels."""
    return f"{DOMAIN}/mig-{profile.replace('+', '.')}"


def spelled(text: str) -> str:
    """Return a name in GFD's spelling for labels: invalid characters are removed, and each gap becomes one dash."""
    return value_of("-".join(_NOT_SPELLED.sub("", text).split()))


def labels(
    devices: Sequence[Device], machine: MachineFacts = UNKNOWN_MACHINE, strategy: str = NO_PARTITIONS
) -> dict[str, str]:
    """Return the labels of a Node with these GPUs. Values that differ between the GPUs are left out.

    ``strategy`` is the MIG strategy. AUTO means MIXED if there are partitions, because the kubelet's resources use
    those names.
    """
    if not devices:
        return {}
    there = [(device, each) for device in devices if device.partitioning.enabled for each in device.partitions]
    parts = [(device, each) for device, each in there if each.uuid]
    if strategy == AUTO:
        strategy = MIXED if parts else NO_PARTITIONS
    found = {
        **_versions(devices),
        **drop_empty_labels(_of_node(devices, machine)),
        **drop_empty_labels(_of_gpus(devices)),
    }
    if strategy != NO_PARTITIONS:
        found[f"{DOMAIN}/mig.strategy"] = strategy
    if strategy == MIXED:
        for profile in sorted({each.profile for _device, each in parts}):
            those = [(device, each) for device, each in parts if each.profile == profile]
            found.update(drop_empty_labels(_of_partitions(partition_resource(profile), those)))
    elif strategy == SINGLE and any(device.partitioning.enabled for device in devices):
        found.update(drop_empty_labels(_as_gpus(devices, parts)))
    return dict(sorted(found.items()))


def _versions(devices: Sequence[Device]) -> dict[str, str]:
    """Return the labels of the driver and CUDA versions. A driver version of two numbers has an empty revision label."""
    found: dict[str, str] = {}
    driver = common_value(each.driver_version or None for each in devices)
    numbers = driver.split(".")
    if 2 <= len(numbers) <= 3:
        major, minor, revision = (*numbers, "")[:3]
        found[f"{DOMAIN}/cuda.driver-version.full"] = driver
        for name, value in (("major", major), ("minor", minor), ("revision", revision)):
            found[f"{DOMAIN}/cuda.driver-version.{name}"] = value
        for name, value in (("major", major), ("minor", minor), ("rev", revision)):
            found[f"{DOMAIN}/cuda.driver.{name}"] = value
    runtime = common_value(each.attributes.get("cudaDriverVersion") for each in devices).split(".")
    if len(runtime) == 3:
        found[f"{DOMAIN}/cuda.runtime-version.full"] = ".".join(runtime[:2])
        for name, value in (("major", runtime[0]), ("minor", runtime[1])):
            found[f"{DOMAIN}/cuda.runtime-version.{name}"] = found[f"{DOMAIN}/cuda.runtime.{name}"] = value
    return found


def _of_node(devices: Sequence[Device], machine: MachineFacts) -> dict[str, str]:
    joined = {each.clique for each in devices if each.clique is not None}
    classes = [
        machine.bus_properties[each.pci_address].bus_class
        for each in devices
        if each.pci_address in machine.bus_properties
    ]
    return {
        f"{GPU}.machine": spelled(machine.product) or _UNKNOWN,
        f"{GPU}.mode": _MODES.get(common_value(classes), _UNKNOWN),
        # A GPU that has not joined a fabric does not change the node's clique. Two different cliques give none.
        f"{GPU}.clique": str(joined.pop()) if len(joined) == 1 else "",
        f"{DOMAIN}/mig.capable": str(any(each.partitioning.supported for each in devices)).lower(),
        f"{DOMAIN}/mps.capable": "false",
    }


def _of_gpus(devices: Sequence[Device]) -> dict[str, str]:
    capabilities = [each.attributes.get("cudaComputeCapability") for each in devices]
    versions = [each.text.split(".") if isinstance(each, Version) else ["", ""] for each in capabilities]
    families = [str(each.attributes.get("architecture", "")).lower() for each in devices]
    family = common_value(families)
    whole = any(not each.partitioning.enabled for each in devices)
    return {
        f"{GPU}.count": str(len(devices)),
        f"{GPU}.product": common_value(spelled(each.product) for each in devices),
        f"{GPU}.memory": common_value(each.memory_bytes // _MEBIBYTE or None for each in devices),
        f"{GPU}.family": "undefined" if family == _UNKNOWN else family,
        f"{GPU}.compute.major": common_value(each[0] for each in versions),
        f"{GPU}.compute.minor": common_value(each[1] for each in versions),
        f"{GPU}.replicas": "1" if whole else "0",
        f"{GPU}.sharing-strategy": "none",
    }


def _of_partitions(name: str, parts: Sequence[tuple[Device, Partition]]) -> dict[str, str]:
    """Return the labels of partitions of one profile, with the prefix ``name``."""
    slices = [_slices(device, each) for device, each in parts]
    found = {
        "count": str(len(parts)),
        "product": common_value(f"{spelled(device.product)}-MIG-{_profile_name(each)}" for device, each in parts),
        "replicas": "1",
        "sharing-strategy": "none",
        "memory": common_value(each.memory_bytes // _MEBIBYTE for _device, each in parts),
        "slices.gi": common_value(slices),
        "slices.ci": common_value(slices),  # it has a UUID only if one compute instance fills it
    }
    for label, capacity in _ENGINES.items():
        found[label] = common_value(each.capacities.get(capacity) for _device, each in parts)
    return {f"{name}.{label}": value for label, value in found.items()}


def _as_gpus(devices: Sequence[Device], parts: Sequence[tuple[Device, Partition]]) -> Mapping[str, str]:
    """Return the labels about GPUs with the strategy single: those of the partitions, or zero counts if they differ."""
    full = {device.uuid for device, _each in parts}
    alike = len({each.profile for _device, each in parts}) == 1
    if alike and all(device.partitioning.enabled and device.uuid in full for device in devices):
        return _of_partitions(GPU, parts)
    first = next(device for device in devices if device.partitioning.enabled)
    return {
        f"{GPU}.product": f"{spelled(first.product)}-MIG-INVALID",
        **{f"{GPU}.{name}": "0" for name in ("count", "replicas", "memory")},
    }


def _profile_name(part: Partition) -> str:
    return spelled(part.profile.replace("+", "."))


def _slices(device: Device, part: Partition) -> int | None:
    profile = device.profile(part.profile_id)
    return profile.compute_slices or None if profile is not None else None
