# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the NVIDIA backend on NVML: the simulator role's library, built here, with one machine per scenario."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dra_driver.core.vendors.registry import BACKENDS, create

from tests.simulator.backend.gpu_machine import Machine
from tests.simulator.backend.nvml_scenarios import SCENARIOS
from tests.simulator.nvml_builds import build


@pytest.fixture(scope="session")
def library() -> Path:
    return build().folder


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_on_nvml(scenario: str, library: Path, tmp_path: Path) -> None:
    Machine(tmp_path / "root", SCENARIOS[scenario][0], library).run(scenario)


def test_missing_library_error_names_the_library() -> None:
    program = """
from dra_driver.core.vendors.registry import create
from dra_driver.core.errors import BackendUnavailable
backend = create("nvidia")
for _attempt in range(2):
    try:
        backend.open()
    except BackendUnavailable as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.count("libnvidia-ml.so.1 was not found. Install the NVIDIA driver's user space.") == 2


def test_missing_python_binding_error_names_the_package() -> None:
    program = """
import sys
sys.modules["pynvml"] = None
from dra_driver.core.vendors.registry import create
try:
    create("nvidia").open()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("BackendUnavailable") and "nvidia-ml-py" in done.stdout


def test_vendors_are_known_by_name() -> None:
    assert list(BACKENDS) == ["ascend", "nvidia"]
    assert create("nvidia").driver_name == "gpu.nvidia.com"
    with pytest.raises(ValueError, match="known are ascend, nvidia"):
        create("acme")
