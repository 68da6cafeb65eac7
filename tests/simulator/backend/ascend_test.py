# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The Ascend backend on DCMI itself: the library of the simulator role, built here, one machine for each scenario."""

from __future__ import annotations

from pathlib import Path

import pytest
from dra_driver.core.ascend.backend import AscendBackend
from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.system import System

from tests.simulator.backend.ascend_scenarios import SCENARIOS
from tests.simulator.backend.npu_machine import NpuMachine
from tests.simulator.dcmi_support import SOURCES
from tests.simulator.nvml_builds import build


@pytest.fixture(scope="session")
def library() -> Path:
    return build(sources=SOURCES).folder


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_on_dcmi(scenario: str, library: Path, tmp_path: Path) -> None:
    machine = NpuMachine(tmp_path / "root")
    machine.power_on(SCENARIOS[scenario][0], library, **SCENARIOS[scenario][1])
    machine.run(scenario)


def test_without_the_library_the_reason_is_given_and_what_is_on_the_bus(library: Path, tmp_path: Path) -> None:
    machine = NpuMachine(tmp_path / "root")
    machine.power_on("4x300I-Duo", library)
    machine.library.unlink()
    backend = AscendBackend(System(str(machine.root)))
    for _attempt in range(2):
        with pytest.raises(BackendUnavailable) as caught:
            backend.open()
        assert "libdcmi.so was not found" in str(caught.value)
        assert "on the PCI bus are 8 (NPU of the family 310P at " in str(caught.value)
    (machine.root / "sys/bus/pci/devices").rename(machine.root / "away")
    with pytest.raises(BackendUnavailable) as caught:
        backend.open()
    assert "PCI" not in str(caught.value)
