# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the Ascend backend does on DCMI. Each scenario runs in a process of its own, started by ascend_test.py."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.simulator.backend import (
    ascend_claims,
    ascend_facts,
    ascend_faults,
    ascend_groups,
    ascend_refusals,
    ascend_sharing,
    ascend_slices,
    ascend_watching,
)
from tests.simulator.backend.ascend_stage import SCENARIOS, Stage

# Each of these rooms has registered its scenarios.
__all__ = [
    "SCENARIOS",
    "ascend_claims",
    "ascend_facts",
    "ascend_faults",
    "ascend_groups",
    "ascend_refusals",
    "ascend_sharing",
    "ascend_slices",
    "ascend_watching",
]


def main() -> None:
    """Run one scenario by name, on the machine below a folder."""
    name, root = sys.argv[1:]
    SCENARIOS[name][2](Stage(Path(root)))


if __name__ == "__main__":
    main()
