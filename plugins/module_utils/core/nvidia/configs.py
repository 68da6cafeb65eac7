# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The opaque configurations of NVIDIA's own DRA driver: all their fields, and which of them this version goes along with.

Facts: kubernetes-sigs/dra-driver-nvidia-gpu, api/nvidia.com/resource/v1beta1 (gpuconfig.go, migconfig.go, sharing.go,
vfiodeviceconfig.go, iommu.go).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..configuration import ConfigKind
from ..documents import Choice, Entries, Problem, Record, Size, Truth, Whole, below
from ..model import DEVICE, PARTITION, PASSTHROUGH
from ..settings import COMPUTE_MODE, COMPUTE_MODES, DEVICE_SETTINGS, TIME_SLICE
from ..shares import SHARES

#: What the devices of NVIDIA's own classes are.
DEVICE_CLASSES: Mapping[str, str] = {
    "gpu.nvidia.com": DEVICE,
    "mig.nvidia.com": PARTITION,
    "vfio.gpu.nvidia.com": PASSTHROUGH,
}

#: How the selectors of other classes tell them apart.
DEVICE_TYPES: Mapping[tuple[str, str], str] = {
    ("type", "gpu"): DEVICE,
    ("type", "mig"): PARTITION,
    ("type", "vfio"): PASSTHROUGH,
}

_VERSION = "resource.nvidia.com/v1beta1"
_MEBIBYTE = 1024**2

TIME_SLICING, MPS = "TimeSlicing", "MPS"
#: How a virtual machine reaches its devices; the first is what is done without a configuration.
POLICIES = ("LegacyOnly", "PreferIommuFD")
#: In the order of the numbers that `nvidia-smi compute-policy --set-timeslice` takes, from 0.
INTERVALS = ("Default", "Short", "Medium", "Long")

_TIME_SLICING_CONFIG = Record({"interval": Choice(INTERVALS)}, defaults={"interval": INTERVALS[0]})

_PERCENTAGE = "defaultActiveThreadPercentage"
#: One server for the processes of all users, who then are root's to MPS; else those of one user compute at a time.
MULTI_USER = "multiUser"
_LIMIT, _LIMIT_BY_DEVICE = "defaultPinnedDeviceMemoryLimit", "defaultPerDevicePinnedMemoryLimit"
#: Limits are handed to MPS in whole MiB, so that less than one would be none.
_MPS_CONFIG = Record(
    {
        _PERCENTAGE: Whole(1, 100, "percent"),
        _LIMIT: Size(_MEBIBYTE),
        _LIMIT_BY_DEVICE: Entries(
            r"[0-9]{1,3}|GPU-[0-9a-f-]{36}|MIG-[0-9a-f-]{36}",
            "a device's index or UUID",
            Size(_MEBIBYTE),
        ),
        MULTI_USER: Truth(),
    }
)

#: The settings that belong to each strategy.
_SETTINGS = {TIME_SLICING: "timeSlicingConfig", MPS: "mpsConfig"}


def _one_strategy(sharing: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Settings of a strategy that was not chosen would be silently ignored."""
    for strategy, settings in _SETTINGS.items():
        if settings in sharing and sharing["strategy"] != strategy:
            yield Problem(below(path, settings), f"given with strategy {sharing['strategy']}", f"strategy {strategy}")


_GPU_SHARING = Record(
    {"strategy": Choice((TIME_SLICING, MPS)), "timeSlicingConfig": _TIME_SLICING_CONFIG, "mpsConfig": _MPS_CONFIG},
    required=frozenset({"strategy"}),
    check=_one_strategy,
)
#: A partition has no time-slices to set: its time is its own.
_PARTITION_SHARING = Record(
    {"strategy": Choice((TIME_SLICING, MPS)), "mpsConfig": _MPS_CONFIG},
    required=frozenset({"strategy"}),
    check=_one_strategy,
)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Time-slicing needs a mode that lets several processes in, so that mode comes with it. Under MPS the one process is its server."""
    sharing = values.get("sharing", {})
    if sharing.get("strategy") == MPS:
        return {COMPUTE_MODE: COMPUTE_MODES[1]}
    if sharing.get("strategy") != TIME_SLICING:
        return {}
    chosen = sharing.get("timeSlicingConfig") or _TIME_SLICING_CONFIG.defaults
    return {COMPUTE_MODE: COMPUTE_MODES[0], TIME_SLICE: chosen["interval"]}


def _mps(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is asked of an MPS control daemon; the strategy says that there is to be one."""
    sharing = values.get("sharing", {})
    if sharing.get("strategy") != MPS:
        return {}
    config = dict(sharing.get("mpsConfig", {}))
    if not config.get(MULTI_USER):
        config.pop(MULTI_USER, None)  # the same as nothing said, for who compares
    return {"strategy": MPS, **config}


def _within(sharing: Mapping[str, Any], consumed: Mapping[str, int], totals: Mapping[str, int]) -> Mapping[str, Any]:
    """Hold the limits of an MPS daemon to what a claim consumes of a GPU: its memory, and its part of the multiprocessors.

    Where a GPU's multiprocessors are not known its shares stand for them. Who consumes none has none to itself, and is not
    limited either: it computes when others do not.
    """
    limits = dict(sharing)
    counted = "multiprocessors" if "multiprocessors" in totals else SHARES
    memory, part = consumed.get("memory"), consumed.get(counted, 0)
    if memory is not None:
        limits[_LIMIT] = min(limits.get(_LIMIT, memory), memory)
        if _LIMIT_BY_DEVICE in limits:
            limits[_LIMIT_BY_DEVICE] = {key: min(limit, memory) for key, limit in limits[_LIMIT_BY_DEVICE].items()}
    if part and totals.get(counted):
        percentage = max(1, 100 * part // totals[counted])
        limits[_PERCENTAGE] = min(limits.get(_PERCENTAGE, 100), percentage)
    return limits


def _named(sharing: Mapping[str, Any], uuids: Sequence[str]) -> Mapping[str, Any]:
    """Name the devices of limits by UUID. Whoever is named both ways has the limit by UUID; an index that none has stays, to be refused.

    NVIDIA's own driver counts the UUIDs of the devices that one configuration is for, sorted (GKP/prepared.go, UUIDs).
    """
    if not uuids or _LIMIT_BY_DEVICE not in sharing:
        return sharing
    places = {str(number): uuid for number, uuid in enumerate(sorted(uuids))}
    limits = {places.get(key, key): limit for key, limit in sharing[_LIMIT_BY_DEVICE].items() if key in places}
    limits.update({key: limit for key, limit in sharing[_LIMIT_BY_DEVICE].items() if key not in places})
    return {**sharing, _LIMIT_BY_DEVICE: limits}


_IOMMU = Record(
    {"backendPolicy": Choice(POLICIES), "enableAPIDevice": Truth()},
    required=frozenset({"backendPolicy"}),
    defaults={"enableAPIDevice": False},
)


def _interface(values: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether iommufd is preferred to the legacy groups, and whether its own node comes with the device's."""
    iommu = values.get("iommu", {})
    return iommu.get("backendPolicy") == POLICIES[1], bool(iommu.get("enableAPIDevice"))


CONFIG_KINDS: tuple[ConfigKind, ...] = (
    ConfigKind(
        _VERSION, "GpuConfig", DEVICE, Record({"sharing": _GPU_SHARING}), _settings, _mps, _within, named=_named
    ),
    ConfigKind(
        _VERSION,
        "MigDeviceConfig",
        PARTITION,
        Record({"sharing": _PARTITION_SHARING}),
        sharing=_mps,
    ),
    ConfigKind(_VERSION, "VfioDeviceConfig", PASSTHROUGH, Record({"iommu": _IOMMU}), passthrough=_interface),
    DEVICE_SETTINGS,
)
