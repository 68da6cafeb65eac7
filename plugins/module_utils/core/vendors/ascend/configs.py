# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The opaque configurations of Ascend devices, and the device kinds of the standard classes.

Huawei's DRA driver has no configuration. The one here is defined by this collection.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...dra.opaque_config import ConfigKind
from ...model import DEVICE, GROUP, PARTITION
from ...schema import MatchingString, Record

#: The device kinds of the standard DeviceClasses.
DEVICE_CLASSES: Mapping[str, str] = {
    "npu.huawei.com": DEVICE,
    "vnpu.huawei.com": PARTITION,
    "card.npu.huawei.com": GROUP,
    "ring.npu.huawei.com": GROUP,
    "node.npu.huawei.com": GROUP,
}

#: The attribute values by which selectors of other classes distinguish the kinds.
DEVICE_TYPES: Mapping[tuple[str, str], str] = {
    ("type", "npu"): DEVICE,
    ("type", "vnpu"): PARTITION,
    ("type", "npu-group"): GROUP,
}

VERSION = "dra.accelerators/v1alpha1"

#: The chip reports its templates. A name must fit into the vendor's request for a vNPU.
_TEMPLATE = MatchingString(r"[A-Za-z0-9_]{1,31}", "the name of a template such as vir02")

#: The scheduler does not read it. A vNPU with another template is rejected, never substituted.
CONFIG_KINDS: tuple[ConfigKind, ...] = (
    ConfigKind(
        VERSION,
        "VnpuConfig",
        PARTITION,
        Record({"template": _TEMPLATE}, required=frozenset({"template"})),
        profile=lambda values: str(values["template"]),
    ),
)
