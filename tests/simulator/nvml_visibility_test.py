# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that inside a container only accessible devices exist. Ordinary files represent device nodes here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import (
    DRIVER_NOT_LOADED,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    STATE,
    SUCCESS,
    Silicon,
    gpu_section,
    machine_text,
)

NOBODY = 65534


@pytest.fixture
def silicon(bare_silicon: Silicon) -> Silicon:
    sections = [gpu_section(BOARDS["H100-80"], number, ("mig-mode yes", f"minor {3 - number}")) for number in range(3)]
    bare_silicon.load(machine_text(bare_silicon.folder, sections))
    return bare_silicon


def uuids(silicon: Silicon, user: int | None = None) -> list[str]:
    client = silicon.client(user=user)
    return [client("nvmlDeviceGetUUID", client.gpu(index))[4:12] for index in range(client("nvmlDeviceGetCount"))]


def test_minors_differ_from_indexes_and_gpus_without_nodes_are_not_listed(silicon: Silicon) -> None:
    assert uuids(silicon) == ["00000000", "00000001", "00000002"]
    (silicon.dev / "nvidia2").unlink()
    assert uuids(silicon) == ["00000000", "00000002"]
    client = silicon.client()
    assert client("nvmlDeviceGetMinorNumber", client.gpu(1)) == 1
    assert client("nvmlDeviceGetIndex", client.gpu(1)) == 1
    assert client.code("nvmlDeviceGetHandleByUUID", "GPU-00000001-0000-4000-8000-000000000001") == NOT_FOUND
    assert client.code("nvmlDeviceGetHandleByPciBusId", "0000:11:00.0") == NOT_FOUND
    assert client.code("nvmlDeviceGetHandleByIndex", 2) == INVALID_ARGUMENT


def test_gpu_whose_node_cannot_be_opened_is_not_listed(silicon: Silicon) -> None:
    (silicon.dev / "nvidia3").chmod(0o600)
    assert uuids(silicon, NOBODY) == ["00000001", "00000002"]


def test_missing_control_node_means_no_driver(silicon: Silicon) -> None:
    (silicon.dev / "nvidiactl").unlink()
    client = silicon.client(initialize=False)
    assert client.code("nvmlInit") == DRIVER_NOT_LOADED
    (silicon.dev / "nvidiactl").touch()
    assert client.code("nvmlInit") == SUCCESS


def test_no_loaded_machine_means_no_driver(bare_silicon: Silicon) -> None:
    client = bare_silicon.client(initialize=False)
    assert client.code("nvmlInit") == DRIVER_NOT_LOADED
    assert not client("control", "show")["ok"]
    bare_silicon.load(machine_text(bare_silicon.folder, [gpu_section(BOARDS["L4"], 0)]))
    assert client.code("nvmlInit") == SUCCESS


def test_character_device_without_a_driver(silicon: Silicon) -> None:
    (silicon.dev / "nvidia2").unlink()
    os.mknod(silicon.dev / "nvidia2", 0o666 | 0o020000, os.makedev(195, 2))
    try:
        os.close(os.open(silicon.dev / "nvidia2", os.O_RDWR))
        expected = 3
    except OSError as error:
        expected = 3 if error.errno in {6, 19} else 2
    assert len(uuids(silicon)) == expected


def test_mig_devices_need_both_capability_nodes_without_privileges(silicon: Silicon) -> None:
    root = silicon.client()
    gpu = root.gpu(0)
    made = []
    for start in (0, 1):
        instance = root("create_at", gpu, 19, start, 1)
        compute = root("nvmlGpuInstanceCreateComputeInstance", instance, 0)
        made.append(root("nvmlDeviceGetUUID", root("nvmlComputeInstanceGetInfo", compute)["device"]))
    first = 3 + 135 * 3 + 9 * 7
    second = first + 9

    def seen() -> list[int]:
        nobody = silicon.client(user=NOBODY)
        codes = [nobody.code("nvmlDeviceGetMigDeviceHandleByIndex", nobody.gpu(0), index) for index in (0, 1)]
        found = [nobody.code("nvmlDeviceGetHandleByUUID", uuid) for uuid in made]
        assert sorted(codes) == sorted(found)
        return codes

    nodes = silicon.dev / "nvidia-caps"
    assert seen() == [NOT_FOUND, NOT_FOUND]
    (nodes / f"nvidia-cap{second}").touch()
    assert seen() == [NOT_FOUND, NOT_FOUND]
    (nodes / f"nvidia-cap{second + 1}").touch()
    assert seen() == [SUCCESS, NOT_FOUND]
    nobody = silicon.client(user=NOBODY)
    only = nobody("nvmlDeviceGetMigDeviceHandleByIndex", nobody.gpu(0), 0)
    assert nobody("nvmlDeviceGetUUID", only) == made[1]
    assert nobody("nvmlDeviceGetIndex", only) == 0
    assert nobody.code("nvmlDeviceGetGpuInstanceById", nobody.gpu(0), 7) == NO_PERMISSION
    (nodes / "nvidia-cap2").touch()
    assert nobody.code("nvmlDeviceGetGpuInstanceById", nobody.gpu(0), 7) == SUCCESS


def test_root_sees_mig_devices_through_the_access_files(silicon: Silicon) -> None:
    root = silicon.client()
    instance = root("create_at", root.gpu(0), 19, 0, 1)
    root("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    assert root.code("nvmlDeviceGetMigDeviceHandleByIndex", root.gpu(0), 0) == SUCCESS
    (silicon.capabilities / "gpu3/mig/gi7/ci0/access").unlink()
    assert root.code("nvmlDeviceGetMigDeviceHandleByIndex", root.gpu(0), 0) == NOT_FOUND


def test_root_in_a_pod(silicon: Silicon) -> None:
    root = silicon.client()
    instance = root("create_at", root.gpu(0), 19, 0, 1)
    root("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    pod = silicon.client(initialize=False)
    pod("give_administration_up")
    pod("nvmlInit")
    assert pod.code("nvmlDeviceGetMigDeviceHandleByIndex", pod.gpu(0), 0) == NOT_FOUND
    assert pod.code("nvmlDeviceCreateGpuInstance", pod.gpu(0), 19) == NO_PERMISSION
    assert pod.code("nvmlDeviceSetMigMode", pod.gpu(0), 0) == NO_PERMISSION
    text = (silicon.folder / "machine.txt").read_text().replace("cuda-version", "administrator root\ncuda-version")
    silicon.load(text)
    assert pod.code("nvmlDeviceCreateGpuInstance", pod.gpu(0), 19) == SUCCESS


def test_running_processes_see_the_devices_of_a_new_machine(silicon: Silicon) -> None:
    client = silicon.client()
    gpu = client.gpu(2)
    silicon.load(machine_text(silicon.folder, [gpu_section(BOARDS["L4"], 0)]))
    assert client("nvmlDeviceGetCount") == 1
    assert client.code("nvmlDeviceGetName", gpu) == INVALID_ARGUMENT
    assert client("nvmlDeviceGetName", client.gpu()) == "NVIDIA L4"


def sysfs(silicon: Silicon, address: str, vendor: str, driver: str | None) -> Path:
    folder = silicon.folder / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    if driver:
        (folder / "driver").symlink_to(f"../../drivers/{driver}")
    return folder


def test_gpus_bound_to_other_drivers_are_not_listed(silicon: Silicon) -> None:
    sysfs(silicon, "0000:10:00.0", "0x10de", "nvidia")
    taken = sysfs(silicon, "0000:11:00.0", "0x10de", "vfio-pci")
    sysfs(silicon, "0000:12:00.0", "0x10de", None)
    assert uuids(silicon) == ["00000000"]
    (taken / "driver").unlink()
    (taken / "driver").symlink_to("../../drivers/nvidia")
    assert uuids(silicon) == ["00000000", "00000001"]


def test_other_hardware_at_the_same_address_is_ignored(silicon: Silicon) -> None:
    sysfs(silicon, "0000:10:00.0", "0x144d", "nvme")
    assert len(uuids(silicon)) == 3


def test_state_is_readable_on_a_read_only_file_system(silicon: Silicon) -> None:
    """As in a pod with a read-only bind mount of the file: root without write access can read, and changes nothing."""
    state = silicon.folder / "lib" / STATE
    assert state.stat().st_mode & 0o777 == 0o644
    inode = state.stat().st_ino
    nobody = silicon.client(user=NOBODY)
    assert nobody("nvmlDeviceGetMigMode", nobody.gpu(0)) == [1, 1]
    root = silicon.client()
    root("create_at", root.gpu(0), 0, 0, 8)
    assert nobody("nvmlDeviceGetGpuInstanceRemainingCapacity", nobody.gpu(0), 19) == 0
    assert nobody.code("nvmlDeviceCreateGpuInstance", nobody.gpu(1), 19) == NO_PERMISSION
    silicon.load((silicon.folder / "machine.txt").read_text())
    assert state.stat().st_ino == inode
