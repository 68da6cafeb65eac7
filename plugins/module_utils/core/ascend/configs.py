# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The opaque configurations of Ascend devices, and what the devices of the standard classes are.

Huawei's own DRA driver has no configuration; the one that is here is ours.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..configuration import ConfigKind
from ..documents import Record, Word
from ..model import DEVICE, GROUP, PARTITION

#: What the devices of the standard classes are.
DEVICE_CLASSES: Mapping[str, str] = {
    "npu.huawei.com": DEVICE,
    "vnpu.huawei.com": PARTITION,
    "card.npu.huawei.com": GROUP,
    "ring.npu.huawei.com": GROUP,
    "node.npu.huawei.com": GROUP,
}

#: How the selectors of other classes tell them apart.
DEVICE_TYPES: Mapping[tuple[str, str], str] = {
    ("type", "npu"): DEVICE,
    ("type", "vnpu"): PARTITION,
    ("type", "npu-group"): GROUP,
}

VERSION = "dra.accelerators/v1alpha1"

#: Which templates there are is the chip's to say; a name has to fit into the vendor's request for a slice.
_TEMPLATE = Word(r"[A-Za-z0-9_]{1,31}", "the name of a template such as vir02")

#: The scheduler reads none of it: a slice of another template is refused, and never given silently.
CONFIG_KINDS: tuple[ConfigKind, ...] = (
    ConfigKind(
        VERSION,
        "VnpuConfig",
        PARTITION,
        Record({"template": _TEMPLATE}, required=frozenset({"template"})),
        profile=lambda values: str(values["template"]),
    ),
)
