# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The facts of each vendor, without the backends. The import of a backend takes a tenth of a second in each task."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.vendors.ascend.vendor import FACTS as ASCEND
from ..core.vendors.nvidia.vendor import FACTS as NVIDIA
from ..core.vendors.vendor_facts import VendorFacts

VENDOR_FACTS: Mapping[str, VendorFacts] = {"ascend": ASCEND, "nvidia": NVIDIA}
