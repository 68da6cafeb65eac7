# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The kinds of prepare that there are: what a claim of each is allocated, and which stages it goes through.

One layout gives each kind its GPUs: all of them are served by one driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dra_driver.core.slices import FAILED_CONDITION, PREPARED_CONDITION
from dra_driver.stages import PREPARE, UNPREPARE

from tests.cluster.manifests import mps, settings

MACHINE = "8xH100"
#: What the driver is told, by GPU; the partitions of the first one are made before it starts.
LAYOUT: tuple[Mapping[str, Any], ...] = (
    {"match": {"index": 0}, "mode": "static", "partitions": {"1g.10gb": 2}},
    {"match": {"index": 4}, "mode": "whole", "shares": 4},
    {"match": {"index": 5}, "mode": "dynamic", "passthrough": True},
    {"match": {"index": [3, 6]}, "mode": "whole"},
    {"match": {"index": 7}, "mode": "dynamic", "prepared_before_binding": True},
    {"match": {}, "mode": "dynamic"},
)
STATIC = "a partition of the layout"
#: Stages that only those kinds go through that change a partition, settings, a program beside the claim, a GPU's driver.
_PARTITIONS = {"partitioning-changed", "partition-created", "partition-destroyed", "partitioning-restored"}
_SETTINGS = {"settings-applied", "settings-restored"}
_COMPANIONS = {"companion-started", "companions-stopped"}
_PASSTHROUGH = {"handed-over", "taken-back"}
_OF_SOME = _PARTITIONS | _SETTINGS | _COMPANIONS | _PASSTHROUGH


@dataclass(frozen=True)
class Kind:
    """One kind. ``results`` are devices of an allocation, or an allocation's results; ``does`` are stages beyond everybody's.

    ``ahead``: it is prepared before its pod is bound. ``beside`` are kinds of which a claim is held all the while.
    """

    name: str
    results: tuple[str | Mapping[str, Any], ...]
    config: tuple[Mapping[str, Any], ...] = ()
    does: frozenset[str] = frozenset()
    partitions: int = 0
    ahead: bool = False
    beside: tuple[str, ...] = ()

    def stages(self, of: tuple[str, ...]) -> tuple[str, ...]:
        """The stages of preparing, or of unpreparing, that a claim of this kind goes through; the last of several partitions too."""
        found = [stage for stage in of if stage not in _OF_SOME or stage in self.does]
        if self.partitions > 1:
            found += [
                f"{stage}:{self.partitions}" for stage in found if stage in ("partition-created", "partition-destroyed")
            ]
        return tuple(found)

    @property
    def prepare_stages(self) -> tuple[str, ...]:
        return self.stages(PREPARE)

    @property
    def unprepare_stages(self) -> tuple[str, ...]:
        # The kubelet's call begins with the first one; a claim that was given up is undone without it.
        return self.stages(UNPREPARE[1:] if self.ahead else UNPREPARE)


def opaque(**parameters: Any) -> dict[str, Any]:
    return {"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}


TIME_SLICING = opaque(
    apiVersion="resource.nvidia.com/v1beta1",
    kind="GpuConfig",
    sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}},
)
IOMMUFD = opaque(
    apiVersion="resource.nvidia.com/v1beta1",
    kind="VfioDeviceConfig",
    iommu={"backendPolicy": "PreferIommuFD", "enableAPIDevice": True},
)
SHARE = {
    "device": "gpu-4",
    "shareID": "11111111-1111-1111-1111-111111111111",
    "consumedCapacity": {"memory": "20Gi", "multiprocessors": "33", "shares": "1"},
}
OTHER_SHARE = {**SHARE, "shareID": "22222222-2222-2222-2222-222222222222"}
AWAITED = {
    "device": "gpu-7-mig-1g10gb-19-0",
    "bindingConditions": [PREPARED_CONDITION],
    "bindingFailureConditions": [FAILED_CONDITION],
}
_CLOCKS = {"minimum": 900, "maximum": 1200}
ON_ONE, ALSO, ELSEWHERE = "gpu-1-mig-1g10gb-19-0", "gpu-1-mig-2g20gb-14-2", "gpu-2-mig-3g40gb-9-4"
#: Places that those three leave free, so that claims of all three kinds can be held at once.
ALONE, SHARED = "gpu-1-mig-1g10gb-19-6", "gpu-2-mig-1g10gb-19-0"
KINDS = (
    Kind("whole", ("gpu-3",)),
    Kind("static", (STATIC,)),
    Kind("dynamic", (ALONE,), does=frozenset(_PARTITIONS), partitions=1),
    Kind("three", (ON_ONE, ALSO, ELSEWHERE), does=frozenset(_PARTITIONS), partitions=3),
    Kind("time-slicing", ("gpu-6",), (TIME_SLICING,), frozenset(_SETTINGS)),
    Kind(
        "settings",
        ("gpu-3",),
        (settings(powerLimit=300, graphicsClocks=_CLOCKS, computeMode="ExclusiveProcess"),),
        frozenset(_SETTINGS),
    ),
    Kind("mps", ("gpu-6",), (mps(defaultActiveThreadPercentage=50),), frozenset(_SETTINGS | _COMPANIONS)),
    Kind(
        "settings-mps",
        ("gpu-3",),
        (settings(powerLimit=300, graphicsClocks=_CLOCKS), mps(defaultActiveThreadPercentage=50)),
        frozenset(_SETTINGS | _COMPANIONS),
    ),
    Kind(
        "mps-partition",
        (SHARED,),
        (mps("MigDeviceConfig", defaultPinnedDeviceMemoryLimit="4Gi"),),
        frozenset(_PARTITIONS | _COMPANIONS),
        1,
    ),
    Kind("share", (SHARE,), (mps(),), frozenset(_COMPANIONS)),
    Kind("two-shares", (OTHER_SHARE,), (mps(),), frozenset(_COMPANIONS), beside=("share",)),
    Kind("passthrough", ("gpu-vfio-5",), does=frozenset(_PASSTHROUGH)),
    Kind("iommufd", ("gpu-vfio-5",), (IOMMUFD,), frozenset(_PASSTHROUGH)),
    Kind("ahead", (AWAITED,), does=frozenset(_PARTITIONS), partitions=1, ahead=True),
    Kind("admin", ({"device": "gpu-3", "adminAccess": True},)),
)
BY_NAME = {kind.name: kind for kind in KINDS}
