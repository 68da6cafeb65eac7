# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Fixtures for tests of the compiled simulated NVML library, the programs next to it, and the NVIDIA backend that uses
it.

Makes the simulator's program importable as `accelerator_simulator`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "roles" / "simulator" / "files"))
from tests.simulator.dcmi_support import dcmi_build, npus
from tests.simulator.nvml_support import bare_silicon, nvml_build

# Fixtures of every test in this directory.
__all__ = ["bare_silicon", "dcmi_build", "npus", "nvml_build"]
