# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the Ascend backend on DCMI: the simulator role's library, built here, with one machine per scenario."""

from __future__ import annotations

from pathlib import Path

import pytest
from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.host.system import System
from dra_driver.core.vendors.ascend.backend import AscendBackend

from tests.simulator import older_driver
from tests.simulator.backend.ascend_scenarios import SCENARIOS
from tests.simulator.backend.npu_machine import NpuMachine
from tests.simulator.dcmi_support import SOURCES
from tests.simulator.nvml_builds import build

#: Chips that an older driver does not support because they came later.
LATER = {name for name, (machine, _library, _scenario) in SCENARIOS.items() if machine in ("8xA3", "1x950", "8x950-UB")}
#: A scenario of each kind. The others are marked ``prove``.
BRIEF = {
    "both_ways_tell_the_same_on_8x310P-Pro",
    "claims_get_their_vnpus",
    "npu_used_by_another_container_is_named",
}
#: The driver identifies a process by its mount namespace, and the library aborts a process that calls it from two
#: threads.
RULES = {"administrator": "mount-namespace", "single_thread": True}
#: Scenarios that run on many machines. All machines but these two are marked ``prove``.
OF_MANY = ("slices_measure_what_is_published_on_", "both_ways_tell_the_same_on_", "replaced_chips_leave_no_fault_on_")
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
    """Both generations give the same results: missing functions are replaced, and tables are parsed with the other
    rules.
    """
    machine = NpuMachine(tmp_path / "root")
    machine.power_on(SCENARIOS[scenario][0], older, **SCENARIOS[scenario][1], **older_driver.STATEMENTS, **RULES)
    machine.run(scenario)


def marks(scenario: str) -> list[pytest.MarkDecorator]:
    """Return the marks that exclude a scenario from `make test`."""
    return [pytest.mark.prove] if scenario.startswith(OF_MANY) and not scenario.endswith(SHOWN) else []


@pytest.mark.parametrize("scenario", [pytest.param(name, marks=marks(name)) for name in sorted(SCENARIOS)])
def test_on_dcmi(scenario: str, library: Path, tmp_path: Path) -> None:
    machine = NpuMachine(tmp_path / "root")
    machine.power_on(SCENARIOS[scenario][0], library, **SCENARIOS[scenario][1], **RULES)
    machine.run(scenario)


def test_missing_library_error_names_the_library_and_the_pci_devices(library: Path, tmp_path: Path) -> None:
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
