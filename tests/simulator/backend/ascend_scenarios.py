# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Scenarios of the Ascend backend on DCMI. ascend_test.py starts each of them in a separate process."""

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

# Each of these modules registers its scenarios when it is imported.
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
    """Run one scenario by name, on the machine below a directory."""
    name, root = sys.argv[1:]
    stage = Stage(Path(root))
    try:
        SCENARIOS[name][2](stage)
    finally:
        stage.close()


if __name__ == "__main__":
    main()
