# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The opaque configurations of NVIDIA's own DRA driver: all their fields, and which of them this version goes along with.

Facts: kubernetes-sigs/dra-driver-nvidia-gpu, api/nvidia.com/resource/v1beta1 (gpuconfig.go, migconfig.go, sharing.go).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..configuration import ConfigKind, NotOffered
from ..documents import Choice, Entries, Problem, Record, Size, Whole, below

_VERSION = "resource.nvidia.com/v1beta1"
_MEBIBYTE = 1024**2

TIME_SLICING, MPS = "TimeSlicing", "MPS"
#: In the order of the numbers that `nvidia-smi compute-policy --set-timeslice` takes, from 0.
INTERVALS = ("Default", "Short", "Medium", "Long")

_TIME_SLICING_CONFIG = Record({"interval": Choice(INTERVALS)}, defaults={"interval": INTERVALS[0]})

#: Limits are handed to MPS in whole MiB, so that less than one would be none.
_MPS_CONFIG = Record(
    {
        "defaultActiveThreadPercentage": Whole(1, 100, "percent"),
        "defaultPinnedDeviceMemoryLimit": Size(_MEBIBYTE),
        "defaultPerDevicePinnedMemoryLimit": Entries(
            r"[0-9]{1,3}|GPU-[0-9a-f-]{36}|MIG-[0-9a-f-]{36}",
            "a device's index or UUID",
            Size(_MEBIBYTE),
        ),
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


def _sharing_is_not_offered(values: Mapping[str, Any]) -> Iterator[NotOffered]:
    if "sharing" in values:
        yield NotOffered(
            "sharing",
            f"({values['sharing']['strategy']}) is not offered by this version: a device or partition is given to one claim alone",
        )


CONFIG_KINDS: tuple[ConfigKind, ...] = (
    ConfigKind(_VERSION, "GpuConfig", "device", Record({"sharing": _GPU_SHARING}), _sharing_is_not_offered),
    ConfigKind(
        _VERSION, "MigDeviceConfig", "partition", Record({"sharing": _PARTITION_SHARING}), _sharing_is_not_offered
    ),
)
