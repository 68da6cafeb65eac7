# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The opaque configurations of NVIDIA's own DRA driver, as far as this version goes along with them.

Facts: kubernetes-sigs/dra-driver-nvidia-gpu, api/nvidia.com/resource/v1beta1.
"""

from __future__ import annotations

from ..model import ConfigKind

_VERSION = "resource.nvidia.com/v1beta1"
_SHARING = "sharing ({strategy}) is not offered by this version: a device or partition is given to one claim alone"

CONFIG_KINDS: tuple[ConfigKind, ...] = (
    ConfigKind(_VERSION, "GpuConfig", "device", {"sharing": _SHARING}),
    ConfigKind(_VERSION, "MigDeviceConfig", "partition", {"sharing": _SHARING}),
)
