# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The Ascend backend on DCMI itself: the library of the simulator role, built here, one machine for each scenario."""

from __future__ import annotations

from pathlib import Path

import pytest
from dra_driver.core.ascend.backend import AscendBackend
from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.system import System

from tests.simulator import older_driver
from tests.simulator.backend.ascend_scenarios import SCENARIOS
from tests.simulator.backend.npu_machine import NpuMachine
from tests.simulator.dcmi_support import SOURCES
from tests.simulator.nvml_builds import build

#: What an older driver cannot have: chips that came later.
LATER = {name for name, (machine, _library, _scenario) in SCENARIOS.items() if machine in ("8xA3", "1x950")}
#: A scenario of each kind; the others are of the proof.
BRIEF = {
    "both_ways_tell_the_same_on_8x310P-Pro",
    "claims_have_their_slices",
    "what_another_container_has_is_named",
}
#: Stories that are told of many machines; of the others than these two in the proof.
OF_MANY = ("slices_measure_what_is_published_on_", "both_ways_tell_the_same_on_")
SHOWN = ("8x310P-Pro", "8x910A")


@pytest.fixture(scope="session")
def library() -> Path:
    return build(sources=SOURCES).folder


@pytest.fixture(scope="session")
def older() -> Path:
    return build("", older_driver.BUILT, sources=SOURCES).folder


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(name, marks=[] if name in BRIEF else pytest.mark.prove) for name in sorted(set(SCENARIOS) - LATER)],
)
def test_on_an_older_driver(scenario: str, older: Path, tmp_path: Path) -> None:
    """The same of both generations: what is missing is done without, tables are read with their other rules."""
    machine = NpuMachine(tmp_path / "root")
    machine.power_on(SCENARIOS[scenario][0], older, **SCENARIOS[scenario][1], **older_driver.STATEMENTS)
    machine.run(scenario)


def marks(scenario: str) -> list[pytest.MarkDecorator]:
    """What keeps a scenario out of `make test`."""
    return [pytest.mark.prove] if scenario.startswith(OF_MANY) and not scenario.endswith(SHOWN) else []


@pytest.mark.parametrize("scenario", [pytest.param(name, marks=marks(name)) for name in sorted(SCENARIOS)])
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
