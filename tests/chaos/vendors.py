# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The vendors by name."""

from __future__ import annotations

from tests.chaos import ascend, nvidia
from tests.chaos.vendor import Vendor

VENDORS: dict[str, Vendor] = {
    each.name: each for each in (nvidia.VENDOR, ascend.VENDOR, ascend.OLDER, ascend.NUMBERED_VNPUS)
}

for _vendor in VENDORS.values():
    assert {name for held, _load in _vendor.handovers for name in held} == set(_vendor.by_name), (
        "each kind is held over a hand-over"
    )
