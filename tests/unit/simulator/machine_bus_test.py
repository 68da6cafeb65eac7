# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The kernel's part of the PCI bus, on a host whose files are in a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from accelerator_simulator.bus import DEVICES, DRIVERS, Bus
from accelerator_simulator.power import Configuration, Power

GPU, AUDIO = "0000:19:00.0", "0000:19:00.1"
MAJORS = {"vfio": 233, "vfio-dev": 232}


@pytest.fixture()
def machine(tmp_path: Path) -> Path:
    Power(Configuration("2xRTX-PRO-6000", "test"), tmp_path, use_library=False).power_on()
    return tmp_path


def write(bus: Bus, path: str, text: str) -> list[object]:
    """Write to a file, and return the results of the kernel's actions."""
    bus.path(path).write_text(f"{text}\n")
    return [action() for _address, action in bus.written(path)]


def override(bus: Bus, address: str, driver: str) -> None:
    write(bus, f"{DEVICES}/{address}/driver_override", driver)


def to_vfio(bus: Bus, address: str, previous: str) -> None:
    override(bus, address, "vfio-pci")
    assert write(bus, f"{DRIVERS}/{previous}/unbind", address) == [True]
    assert write(bus, f"{DRIVERS}/vfio-pci/bind", address) == [True]


def test_gpu_is_bound_to_vfio_and_back(machine: Path) -> None:
    reported: list[str] = []
    bus = Bus(str(machine), MAJORS, attached=reported.append)
    shown = bus.path(f"/proc/driver/nvidia/gpus/{GPU}/information")
    before = shown.read_bytes()
    to_vfio(bus, GPU, "nvidia")
    group = bus.path(f"{DEVICES}/{GPU}/iommu_group").readlink().name
    assert bus.driver_of(GPU) == "vfio-pci" and not shown.parent.exists()
    assert bus.path(f"/dev/vfio/{group}").exists() and len(list(bus.path("/dev/vfio/devices").iterdir())) == 1
    assert bus.path(f"{DRIVERS}/vfio-pci/{GPU}/vendor").read_text() == "0x10de\n"
    assert write(bus, f"{DRIVERS}/vfio-pci/unbind", GPU) == [True] and bus.driver_of(GPU) == ""
    assert not bus.path(f"/dev/vfio/{group}").exists() and not bus.path(f"{DEVICES}/{GPU}/vfio-dev").exists()
    override(bus, GPU, "")
    assert bus.path(f"{DEVICES}/{GPU}/driver_override").read_text() == "(null)\n"
    assert write(bus, "/sys/bus/pci/drivers_probe", GPU) == [True]
    assert bus.driver_of(GPU) == "nvidia" and shown.read_bytes() == before and reported == [GPU]


def test_invalid_bus_writes_are_rejected(machine: Path) -> None:
    bus = Bus(str(machine), MAJORS)
    assert write(bus, f"{DRIVERS}/vfio-pci/unbind", GPU) == [False], "another driver has it"
    assert write(bus, f"{DRIVERS}/nvidia/bind", GPU) == [False], "it has a driver"
    assert write(bus, f"{DRIVERS}/nvidia/unbind", GPU) == [True]
    assert write(bus, f"{DRIVERS}/vfio-pci/bind", GPU) == [False], "vfio-pci takes none of itself"
    override(bus, GPU, "no-such-driver")
    assert write(bus, "/sys/bus/pci/drivers_probe", GPU) == [False]
    assert write(bus, f"{DRIVERS}/nvidia/bind", "0000:ff:00.0") == [False]
    assert bus.driver_of(GPU) == ""


def test_unbind_waits_for_an_open_gpu(machine: Path) -> None:
    users = [True, True, False]
    requested: list[str] = []

    def in_use(address: str) -> bool:
        requested.append(address)
        return users.pop(0)

    bus = Bus(str(machine), MAJORS, in_use)
    assert write(bus, f"{DRIVERS}/nvidia/unbind", GPU) == [True]
    assert requested == [GPU] * 3
    always: Callable[[str], bool] = lambda _address: True  # noqa: E731
    impatient = Bus(str(machine), MAJORS, always, patience=0)
    other = "0000:c9:00.0"
    assert write(impatient, f"{DRIVERS}/nvidia/unbind", other) == [False] and impatient.driver_of(other) == "nvidia"


def test_group_has_its_node_while_a_function_is_bound(machine: Path) -> None:
    bus = Bus(str(machine), MAJORS)
    to_vfio(bus, GPU, "nvidia")
    to_vfio(bus, AUDIO, "snd_hda_intel")
    group = bus.path(f"/dev/vfio/{bus.path(f'{DEVICES}/{GPU}/iommu_group').readlink().name}")
    assert (
        bus.path(f"{DEVICES}/{AUDIO}/iommu_group").readlink()
        != bus.path(f"{DEVICES}/0000:c9:00.0/iommu_group").readlink()
    )
    assert write(bus, f"{DRIVERS}/vfio-pci/unbind", AUDIO) == [True] and group.exists()
    assert write(bus, f"{DRIVERS}/vfio-pci/unbind", GPU) == [True] and not group.exists()


def test_gpu_in_use_is_unplugged_and_plugged_again(machine: Path) -> None:
    reported: list[str] = []
    bus = Bus(str(machine), MAJORS, in_use=lambda _address: True, attached=reported.append)
    listed, shown = bus.path(f"{DEVICES}/{GPU}"), bus.path(f"/proc/driver/nvidia/gpus/{GPU}/information")
    before, target = shown.read_bytes(), listed.readlink()
    assert bus.unplug(GPU) and not bus.unplug(GPU), "it is out already"
    assert not listed.is_symlink() and not shown.parent.exists()
    assert not bus.path(f"{DRIVERS}/nvidia/{GPU}").is_symlink()
    assert bus.plug(GPU) and not bus.plug(GPU), "it is in already"
    assert listed.readlink() == target and shown.read_bytes() == before
    assert bus.driver_of(GPU) == "nvidia" and reported == [GPU]


def test_gpu_bound_to_vfio_is_plugged_with_its_own_driver(machine: Path) -> None:
    bus = Bus(str(machine), MAJORS)
    to_vfio(bus, GPU, "nvidia")
    group = bus.path(f"{DEVICES}/{GPU}/iommu_group").readlink().name
    assert bus.unplug(GPU) and not bus.path(f"/dev/vfio/{group}").exists()
    assert bus.plug(GPU)
    assert bus.driver_of(GPU) == "nvidia"


def test_power_off_removes_all_nodes(tmp_path: Path) -> None:
    power = Power(Configuration("1xL4", "test"), tmp_path, use_library=False)
    power.power_on()
    to_vfio(power.bus(), "0000:3b:00.0", "nvidia")
    power.power_off()
    assert not (tmp_path / "dev").exists() or not list((tmp_path / "dev").rglob("*vfio*"))
