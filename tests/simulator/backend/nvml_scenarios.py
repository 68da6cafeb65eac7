# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Scenarios of the NVIDIA backend on NVML. backend_test.py starts each of them in a separate process."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.simulator.backend import (
    scenarios_of_changes,
    scenarios_of_claims,
    scenarios_of_defects,
    scenarios_of_fabric,
    scenarios_of_facts,
    scenarios_of_faults,
    scenarios_of_passthrough,
    scenarios_of_refusals,
    scenarios_of_settings,
    scenarios_of_telemetry,
    scenarios_of_watching,
    scenarios_of_xids,
)
from tests.simulator.backend.stage import SCENARIOS, Stage

# Each of these modules registers its scenarios when it is imported.
__all__ = [
    "SCENARIOS",
    "scenarios_of_changes",
    "scenarios_of_claims",
    "scenarios_of_defects",
    "scenarios_of_fabric",
    "scenarios_of_facts",
    "scenarios_of_faults",
    "scenarios_of_passthrough",
    "scenarios_of_refusals",
    "scenarios_of_settings",
    "scenarios_of_telemetry",
    "scenarios_of_watching",
    "scenarios_of_xids",
]


def main() -> None:
    """Run one scenario by name, on the machine below a directory."""
    name, root = sys.argv[1:]
    stage = Stage(Path(root))
    stage.backend.open()
    SCENARIOS[name][1](stage)


if __name__ == "__main__":
    main()
