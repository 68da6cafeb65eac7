# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark's rows: which claims, on which layout, and which allocation each of them gets. No side effects.

All claims of a row have different devices, except with administrator access. The last number of each row is the
maximum. A node has at most 32 GPUs, the limit of NVIDIA's driver, and thus at most 32 claims of whole GPUs.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.cluster.cluster import DRIVER
from tests.cluster.manifests import mps, settings

Layout = tuple[Mapping[str, Any], ...]
LAYOUTS: dict[str, Layout] = {
    "whole": ({"match": {}, "mode": "whole"},),
    "static": ({"match": {}, "mode": "static", "partitions": {"1g.10gb": 7}},),
    "dynamic": ({"match": {}, "mode": "dynamic"},),
    "shares": ({"match": {}, "mode": "whole", "shares": 4},),
    "passthrough": ({"match": {}, "mode": "whole", "passthrough": True},),
}
TIME_SLICING = {
    "opaque": {
        "driver": DRIVER,
        "parameters": {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "GpuConfig",
            "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}},
        },
    }
}


@dataclass(frozen=True)
class Kind:
    """Claims of one kind.

    ``type`` and ``made`` select devices, ``description`` is the text in the table, and with ``admin`` claims share devices.
    ``of_device`` is the maximum of simultaneous partitions per device, 0 for no limit. ``profile`` is the name of the
    attribute with the partition's profile.
    """

    name: str
    layout: str
    description: str
    type: str = "gpu"
    made: bool = False
    device_class: str = "gpu.nvidia.com"
    config: Mapping[str, Any] | None = None
    admin: bool = False
    profiles: tuple[str, ...] = ("1g.10gb", "1g.24gb")
    profile: str = "profile"
    of_device: int = 0

    @property
    def is_partition(self) -> bool:
        """Return whether the devices are partitions."""
        return self.type in ("mig", "vnpu")

    def fits(self, device: Mapping[str, Any]) -> bool:
        """Return whether a published device is of this kind."""
        attributes = device["attributes"]
        if attributes["type"]["string"] != self.type:
            return False
        return not self.is_partition or (
            attributes[self.profile]["string"] in self.profiles and ("uuid" in attributes) == self.made
        )


MIG = {"type": "mig", "device_class": "mig.nvidia.com"}
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("whole", "whole", "whole GPU"),
        Kind("admin", "whole", "whole GPU with admin access, each by several claims at once", admin=True),
        Kind("settings", "whole", "whole GPU with a power limit", config=settings(powerLimit=400)),
        Kind("slices", "whole", "whole GPU with a time slice", config=TIME_SLICING),
        Kind("mps", "whole", "whole GPU with an MPS daemon", config=mps(defaultActiveThreadPercentage=50)),
        Kind("static", "static", "static partition", made=True, **MIG),  # type: ignore[arg-type]
        Kind("dynamic", "dynamic", "dynamic partition", **MIG),  # type: ignore[arg-type]
        Kind(
            "mps-mig",
            "dynamic",
            "dynamic partition with an MPS daemon",
            config=mps("MigDeviceConfig", defaultPinnedDeviceMemoryLimit="1Gi"),
            **MIG,  # type: ignore[arg-type]
        ),
        Kind("share", "shares", "quarter of a GPU with an MPS daemon", config=mps()),
        Kind(
            "passed",
            "passthrough",
            "whole GPU bound to vfio-pci",
            type="vfio",
            device_class="vfio.gpu.nvidia.com",
        ),
    )
}
#: Numbers of parallel claims by kind, on sixteen H100. The last is the maximum.
PARALLEL: dict[str, tuple[int, ...]] = {
    "whole": (1, 8, 16),
    "admin": (1, 8, 64, 128),
    "settings": (1, 8, 16),
    "slices": (1, 8, 16),
    "mps": (1, 8, 16),
    "static": (1, 8, 64, 112),
    "dynamic": (1, 8, 64, 112),
    "mps-mig": (1, 8, 64),
    "share": (1, 8, 64),
    "passed": (1, 8, 16),
}
ROWS = [(kind.layout, kind.name, number) for kind in KINDS.values() for number in PARALLEL[kind.name]]

#: Layouts for NPU claims and the GPU claims compared with them on one node, with the numbers of parallel claims.
NPU_COMPARISONS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "whole": (LAYOUTS["whole"], (1, 2)),
    "static": (
        (
            {"match": {"vendor": "nvidia"}, "mode": "static", "partitions": {"1g.10gb": 7}},
            {"match": {"vendor": "ascend"}, "mode": "static", "partitions": {"vir01": 7}},
        ),
        (1, 8),
    ),
    "dynamic": (LAYOUTS["dynamic"], (1, 8)),
}
VNPU = {
    "type": "vnpu",
    "device_class": "vnpu.huawei.com",
    "profiles": ("vir01",),
    "profile": "template",
    "of_device": 7,
}
NPU_KINDS: dict[str, Kind] = {
    kind.layout: kind
    for kind in (
        Kind("npu", "whole", "whole NPU", type="npu", device_class="npu.huawei.com"),
        Kind("vnpu", "static", "static vNPU", made=True, **VNPU),  # type: ignore[arg-type]
        Kind("cut", "dynamic", "dynamic vNPU", **VNPU),  # type: ignore[arg-type]
    )
}

#: The curve: boards, number of published devices, and layout.
PUBLISHED: tuple[tuple[str, int, Layout], ...] = (
    ("8xH100", 8, LAYOUTS["whole"]),
    ("8xH100", 64, ({"match": {"index": [0, 1]}, "mode": "dynamic"}, *LAYOUTS["passthrough"])),
    ("16xH100", 128, ({"match": {"index": [0, 1, 2, 3]}, "mode": "dynamic"}, *LAYOUTS["passthrough"])),
    (
        "32xRTX-PRO-6000",
        1000,
        ({"match": {"index": list(range(8))}, "mode": "dynamic", "passthrough": True}, *LAYOUTS["dynamic"]),
    ),
)


def places(kind: Kind, devices: Mapping[str, Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the allocation results of ``number`` claims with different devices.

    Raises ValueError with the maximum if fewer fit.
    """
    fitting = [name for name in sorted(devices) if kind.fits(devices[name])]
    if kind.of_device:
        parents = [devices[name]["attributes"]["parentUUID"]["string"] for name in fitting]
        fitting = [name for at, name in enumerate(fitting) if parents[:at].count(parents[at]) < kind.of_device]
    found = [place for name in fitting for place in _of(name, devices[name])]
    if kind.admin and found:
        found = [{**found[position % len(found)], "adminAccess": True} for position in range(number)]
    if len(found) < number:
        raise ValueError(f"{number} claims of the kind {kind.name} do not fit: there is room for {len(found)}")
    return found[:number]


def _of(name: str, device: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the allocations that one device can provide: itself, or each of its shares."""
    if not device.get("allowMultipleAllocations"):
        return ({"device": name},)
    # Consumption of a claim without capacity requests: as many of these fit as there are shares.
    consumed = {key: capacity["requestPolicy"]["default"] for key, capacity in device["capacity"].items()}
    return [
        {
            "device": name,
            "shareID": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}/{share}")),
            "consumedCapacity": consumed,
        }
        for share in range(int(device["capacity"]["shares"]["value"]))
    ]
