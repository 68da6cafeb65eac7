# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Whether a reset of a GPU needs the fabric manager, and whether that runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dra_driver.core.errors import Unsupported
from dra_driver.core.health.resets import blocked_reset
from dra_driver.core.host.system import System
from dra_driver.core.model import Device
from dra_driver.core.vendors.nvidia.fabric.fabric_process import FabricProcess

from tests.unit.core.board_model import device


def gpu(architecture: str = "Ampere", switched: bool = True) -> Device:
    found = device("a100-40")
    return replace(found, switched=switched, attributes={**found.attributes, "architecture": architecture})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with one NVSwitch and one process."""
    directory = tmp_path / "sys/bus/pci/devices/0000:05:00.0"
    directory.mkdir(parents=True)
    (directory / "vendor").write_text("0x10de\n")
    (directory / "class").write_text("0x068000\n")
    process(tmp_path, 7, "systemd")
    return tmp_path


def process(root: Path, pid: int, name: str) -> Path:
    comm = root / f"proc/{pid}/comm"
    comm.parent.mkdir(parents=True)
    comm.write_text(f"{name}\n")
    return comm


def test_reset_is_blocked_until_the_fabric_manager_runs(root: Path) -> None:
    found = FabricProcess(System(str(root)))
    assert "systemctl start nvidia-fabricmanager" in found.why_reset_blocked(gpu())
    for pid in (20, 21):  # it is started, and restarted
        comm = process(root, pid, "nv-fabricmanage")
        assert found.why_reset_blocked(gpu()) == ""
        comm.unlink()
        assert found.why_reset_blocked(gpu())


def test_reset_of_gpus_without_switches_needs_no_fabric_manager(root: Path) -> None:
    found = FabricProcess(System(str(root)))
    assert [found.why_reset_blocked(each) for each in (gpu(switched=False), gpu("Hopper"), gpu("Volta"))] == [""] * 3


def test_switches_outside_virtual_machine_do_not_count(root: Path) -> None:
    (root / "sys/bus/pci/devices/0000:05:00.0/class").write_text("0x060400\n")
    assert FabricProcess(System(str(root))).why_reset_blocked(gpu()) == ""


def test_first_process_of_namespace_does_not_see_the_host(root: Path) -> None:
    (root / "proc/self").symlink_to("1")
    assert FabricProcess(System(str(root))).why_reset_blocked(gpu()) == ""


def test_devices_with_the_same_reason_are_named_together() -> None:
    assert blocked_reset([gpu()]) is None
    error = blocked_reset(
        [gpu(), replace(gpu(), reset_blocked="it is tired"), replace(gpu(), reset_blocked="it is tired")]
    )
    assert isinstance(error, Unsupported) and str(error).count("it is tired") == 1 and error.code == "reset-blocked"


def test_remedy_is_named_for_many_devices(root: Path) -> None:
    """A long list of devices is shortened, the remedy is not."""
    reason = FabricProcess(System(str(root))).why_reset_blocked(gpu())
    error = blocked_reset([replace(gpu(), index=index, reset_blocked=reason) for index in range(64)])
    assert "systemctl start nvidia-fabricmanager" in str(error) and len(str(error)) < 3000
