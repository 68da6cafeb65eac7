# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The opaque configurations of NVIDIA's DRA driver: all their fields, and the fields that this version supports.

Facts: kubernetes-sigs/dra-driver-nvidia-gpu, api/nvidia.com/resource/v1beta1 (gpuconfig.go, migconfig.go, sharing.go,
vfiodeviceconfig.go, iommu.go).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...dra.consumable_capacity import SHARES
from ...dra.opaque_config import ConfigKind
from ...host.companions import OF_DEVICE
from ...model import DEVICE, PARTITION, PASSTHROUGH
from ...schema import Boolean, Choice, Entries, Integer, MemorySize, Problem, Record, below
from ...settings.knobs import COMPUTE_MODE, COMPUTE_MODES, DEVICE_SETTINGS, TIME_SLICE

#: The device kinds of NVIDIA's DeviceClasses.
DEVICE_CLASSES: Mapping[str, str] = {
    "gpu.nvidia.com": DEVICE,
    "mig.nvidia.com": PARTITION,
    "vfio.gpu.nvidia.com": PASSTHROUGH,
}

#: The attribute values by which selectors of other classes distinguish the kinds.
DEVICE_TYPES: Mapping[tuple[str, str], str] = {
    ("type", "gpu"): DEVICE,
    ("type", "mig"): PARTITION,
    ("type", "vfio"): PASSTHROUGH,
}

_VERSION = "resource.nvidia.com/v1beta1"
_MEBIBYTE = 1024**2

TIME_SLICING, MPS = "TimeSlicing", "MPS"
#: How a virtual machine accesses its devices. The first is the default.
POLICIES = ("LegacyOnly", "PreferIommuFD")
#: In the order of the numbers of `nvidia-smi compute-policy --set-timeslice`, from 0.
INTERVALS = ("Default", "Short", "Medium", "Long")

_TIME_SLICING_CONFIG = Record({"interval": Choice(INTERVALS)}, defaults={"interval": INTERVALS[0]})

_PERCENTAGE = "defaultActiveThreadPercentage"
#: If true, one MPS server runs the processes of all users, and MPS treats these users as root. If false, MPS runs the
#: processes of only one user at a time.
MULTI_USER = "multiUser"
#: One daemon for all claims with shares of a GPU. Its server runs their processes at the same time.
SHARED_DAEMON = "sharedDaemon"
_LIMIT, _LIMIT_BY_DEVICE = "defaultPinnedDeviceMemoryLimit", "defaultPerDevicePinnedMemoryLimit"
#: MPS takes limits in whole MiB, so a limit below 1 MiB would have no effect.
_MPS_CONFIG = Record(
    {
        _PERCENTAGE: Integer(1, 100, "percent"),
        _LIMIT: MemorySize(_MEBIBYTE),
        _LIMIT_BY_DEVICE: Entries(
            r"[0-9]{1,3}|GPU-[0-9a-f-]{36}|MIG-[0-9a-f-]{36}",
            "a device's index or UUID",
            MemorySize(_MEBIBYTE),
        ),
        MULTI_USER: Boolean(),
        SHARED_DAEMON: Boolean(),
    }
)

#: The settings key of each strategy.
_SETTINGS = {TIME_SLICING: "timeSlicingConfig", MPS: "mpsConfig"}


def _one_strategy(sharing: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Yield a problem for settings of a strategy that is not selected, because they would be ignored."""
    for strategy, settings in _SETTINGS.items():
        if settings in sharing and sharing["strategy"] != strategy:
            yield Problem(below(path, settings), f"given with strategy {sharing['strategy']}", f"strategy {strategy}")


_GPU_SHARING = Record(
    {"strategy": Choice((TIME_SLICING, MPS)), "timeSlicingConfig": _TIME_SLICING_CONFIG, "mpsConfig": _MPS_CONFIG},
    required=frozenset({"strategy"}),
    check=_one_strategy,
)
#: A partition has no time-slice setting, because it does not share its compute time.
_PARTITION_SHARING = Record(
    {"strategy": Choice((TIME_SLICING, MPS)), "mpsConfig": _MPS_CONFIG},
    required=frozenset({"strategy"}),
    check=_one_strategy,
)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device settings for a sharing strategy.

    Time-slicing uses the first compute mode, because several processes access the GPU. MPS uses the second one, because
    only the MPS server accesses the GPU directly.
    """
    sharing = values.get("sharing", {})
    if sharing.get("strategy") == MPS:
        return {COMPUTE_MODE: COMPUTE_MODES[1]}
    if sharing.get("strategy") != TIME_SLICING:
        return {}
    chosen = sharing.get("timeSlicingConfig") or _TIME_SLICING_CONFIG.defaults
    return {COMPUTE_MODE: COMPUTE_MODES[0], TIME_SLICE: chosen["interval"]}


def _mps(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of an MPS control daemon; empty if the strategy is not MPS."""
    sharing = values.get("sharing", {})
    if sharing.get("strategy") != MPS:
        return {}
    config = dict(sharing.get("mpsConfig", {}))
    for name in (MULTI_USER, SHARED_DAEMON):
        if not config.get(name):
            config.pop(name, None)  # compare equal to an omitted setting
    return {"strategy": MPS, **config}


def _limit_to_capacity(
    sharing: Mapping[str, Any], consumed: Mapping[str, int], totals: Mapping[str, int]
) -> Mapping[str, Any]:
    """Return the MPS settings, limited to the capacity that a claim consumes of a GPU.

    Claims with shares of a GPU have separate MPS servers. The GPU runs these servers in turn (CUDA's documentation of
    MPS), so the turns already divide the compute time. A thread percentage would reduce a claim's compute capacity
    again. Therefore the result has a percentage only if the claim's configuration sets one. No public source documents
    the combined effect. tests/silicon/acceptance.py measures it.

    With ``sharedDaemon``, the claims share one server. The thread percentage of a claim is the percentage of the GPU's
    multiprocessors that it consumes. If their number is unknown, the percentage is computed from the shares. A claim
    that consumes none of this capacity gets no computed percentage.
    """
    limits = dict(sharing)
    memory = consumed.get("memory")
    if memory is not None:
        limits[_LIMIT] = min(limits.get(_LIMIT, memory), memory)
        if _LIMIT_BY_DEVICE in limits:
            limits[_LIMIT_BY_DEVICE] = {key: min(limit, memory) for key, limit in limits[_LIMIT_BY_DEVICE].items()}
    if limits.pop(SHARED_DAEMON, False):
        limits[OF_DEVICE] = True
        counted = "multiprocessors" if "multiprocessors" in totals else SHARES
        if consumed.get(counted) and totals.get(counted):
            percentage = max(1, 100 * consumed[counted] // totals[counted])
            limits[_PERCENTAGE] = min(limits.get(_PERCENTAGE, 100), percentage)
    return limits


def _with_device_uuids(sharing: Mapping[str, Any], uuids: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings with the keys of per-device limits as UUIDs.

    A limit by UUID has precedence over one by index. An unknown index stays, and is rejected later. NVIDIA's driver
    uses the index in the sorted UUIDs of the devices of one configuration (GKP/prepared.go, UUIDs).
    """
    if not uuids or _LIMIT_BY_DEVICE not in sharing:
        return sharing
    places = {str(number): uuid for number, uuid in enumerate(sorted(uuids))}
    limits = {places.get(key, key): limit for key, limit in sharing[_LIMIT_BY_DEVICE].items() if key in places}
    limits.update({key: limit for key, limit in sharing[_LIMIT_BY_DEVICE].items() if key not in places})
    return {**sharing, _LIMIT_BY_DEVICE: limits}


_IOMMU = Record(
    {"backendPolicy": Choice(POLICIES), "enableAPIDevice": Boolean()},
    required=frozenset({"backendPolicy"}),
    defaults={"enableAPIDevice": False},
)


def _interface(values: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether iommufd is preferred to the legacy groups, and whether the container gets the node /dev/iommu."""
    iommu = values.get("iommu", {})
    return iommu.get("backendPolicy") == POLICIES[1], bool(iommu.get("enableAPIDevice"))


CONFIG_KINDS: tuple[ConfigKind, ...] = (
    ConfigKind(
        _VERSION,
        "GpuConfig",
        DEVICE,
        Record({"sharing": _GPU_SHARING}),
        _settings,
        _mps,
        _limit_to_capacity,
        named=_with_device_uuids,
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
