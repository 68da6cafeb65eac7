# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test changes of the MIG mode through nvidia-ml-py: modes and resets, blocking processes, permissions, durations."""

from __future__ import annotations

import select
import time
from typing import Any

import pytest

from tests.simulator.nvml_support import (
    IN_USE,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    SUCCESS,
    NvmlError,
    Silicon,
    load,
)


def test_ampere_mode_change_needs_a_reset_and_is_persistent(bare_silicon: Silicon) -> None:
    load(bare_silicon, "A100-40", extra=())
    client = bare_silicon.client()
    gpu = client.gpu()
    assert client("nvmlDeviceGetMigMode", gpu) == [0, 0]
    assert client("nvmlDeviceSetMigMode", gpu, 1) == RESET_REQUIRED
    assert client("nvmlDeviceGetMigMode", gpu) == [0, 1]
    assert client.code("nvmlDeviceCreateGpuInstance", gpu, 19) == NOT_SUPPORTED
    assert bare_silicon.control("gpu-reset 0")["ok"]
    assert client.code("nvmlDeviceGetMigMode", gpu) == INVALID_ARGUMENT
    gpu = client.gpu()
    assert client("nvmlDeviceGetMigMode", gpu) == [1, 1]
    instance = client("nvmlDeviceCreateGpuInstance", gpu, 19)
    assert bare_silicon.control("power-cycle")["ok"]
    assert client.code("nvmlGpuInstanceGetInfo", instance) == INVALID_ARGUMENT
    gpu = client.gpu()
    assert client("nvmlDeviceGetMigMode", gpu) == [1, 1]
    assert client("gpu_instances", gpu, 19) == []


def test_hopper_mode_change_is_immediate_and_not_persistent(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80", extra=())
    client = bare_silicon.client()
    gpu = client.gpu()
    assert client("nvmlDeviceSetMigMode", gpu, 1) == SUCCESS
    assert client("nvmlDeviceGetMigMode", gpu) == [1, 1]
    instance = client("nvmlDeviceCreateGpuInstance", gpu, 0)
    assert client("nvmlDeviceSetMigMode", gpu, 0) == IN_USE
    assert client("nvmlDeviceGetMigMode", gpu) == [1, 0]
    assert client("nvmlDeviceSetMigMode", gpu, 1) == SUCCESS
    client("nvmlGpuInstanceDestroy", instance)
    bare_silicon.control("power-cycle")
    assert client("nvmlDeviceGetMigMode", client.gpu()) == [0, 0]


def test_handle_is_valid_after_a_mode_change_and_invalid_after_a_reset(bare_silicon: Silicon) -> None:
    """In the order of NVIDIA's DRA driver, which gets its handle at the start and keeps it."""
    load(bare_silicon, "H100-80", "A100-40", extra=())
    client, other = bare_silicon.client(), bare_silicon.client()
    gpu, ampere = client.gpu(0), client.gpu(1)
    for _round in range(2):
        assert client("nvmlDeviceSetMigMode", gpu, 1) == SUCCESS
        assert client("nvmlDeviceGetGpuInstanceProfileInfo", gpu, 0)["id"] == 19
        assert client("possible_placements", gpu, 19) == [[start, 1] for start in range(7)]
        instance = client("create_at", gpu, 19, 4, 1)
        identifier = client("nvmlGpuInstanceGetInfo", instance)["id"]
        compute = client("nvmlGpuInstanceCreateComputeInstance", instance, 0)
        device = client("nvmlComputeInstanceGetInfo", compute)["device"]
        assert client("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device) == gpu
        client("nvmlComputeInstanceDestroy", compute)
        client("nvmlGpuInstanceDestroy", instance)
        assert client.code("nvmlDeviceGetUUID", device) == INVALID_ARGUMENT
        assert client.code("nvmlComputeInstanceGetInfo", compute) == INVALID_ARGUMENT
        again = client("create_at", gpu, 19, 4, 1)
        assert client("nvmlGpuInstanceGetInfo", again)["id"] == identifier
        assert client.code("nvmlGpuInstanceGetInfo", instance) == INVALID_ARGUMENT
        client("nvmlGpuInstanceDestroy", again)
        assert other("nvmlDeviceSetMigMode", other.gpu(), 0) == SUCCESS
        assert client("nvmlDeviceGetMigMode", gpu) == [0, 0]
    assert client("nvmlDeviceSetMigMode", ampere, 1) == RESET_REQUIRED
    assert client("nvmlDeviceGetMigMode", ampere) == [0, 1]
    assert bare_silicon.control("gpu-reset 1")["ok"]
    assert client.code("nvmlDeviceGetMigMode", ampere) == INVALID_ARGUMENT
    assert client("nvmlDeviceGetMigMode", client.gpu(1)) == [1, 1]
    assert client("nvmlDeviceGetMigMode", gpu) == [0, 0]
    bare_silicon.control("driver-reload")
    assert client.code("nvmlDeviceGetMigMode", gpu) == INVALID_ARGUMENT


def test_mode_change_can_change_the_minor(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80", "H100-80", extra=(), statements=("mode-change-moves-minor yes",))
    information = bare_silicon.folder / "proc/driver/nvidia/gpus/0000:10:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H100\nDevice Minor: \t 0\nGPU Excluded:\t No\n")
    client = bare_silicon.client()
    gpu = client.gpu()
    client("nvmlDeviceSetMigMode", gpu, 1)
    assert client("nvmlDeviceGetMinorNumber", gpu) == 2
    instance = client("create_at", gpu, 0, 0, 8)
    client("nvmlGpuInstanceCreateComputeInstance", instance, 4)
    assert {path.name for path in bare_silicon.capabilities.iterdir()} == {"gpu1", "gpu2"}
    assert (bare_silicon.capabilities / "gpu2/mig/gi0/ci0/access").is_file()
    assert not (bare_silicon.dev / "nvidia0").exists()
    assert "Device Minor: \t 2\nGPU Excluded:" in information.read_text()
    assert bare_silicon.client()("nvmlDeviceGetCount") == 2
    shown = bare_silicon.show()["gpus"]
    assert [(entry["index"], entry["minor"]) for entry in shown] == [(0, 2), (1, 1)]
    bare_silicon.control("power-cycle")
    assert client("nvmlDeviceGetMinorNumber", client.gpu()) == 0
    assert (bare_silicon.dev / "nvidia0").exists()
    assert not (bare_silicon.dev / "nvidia2").exists()
    assert {path.name for path in bare_silicon.capabilities.iterdir()} == {"gpu0", "gpu1"}


def test_driver_bind_takes_the_lowest_free_minor(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80", "H100-80", "H100-80", extra=())
    gpus = bare_silicon.folder / "proc/driver/nvidia/gpus"
    for number in range(3):
        (gpus / f"0000:1{number}:00.0").mkdir(parents=True)
        (gpus / f"0000:1{number}:00.0/information").write_text(f"Device Minor: \t {number}\nGPU Excluded:\t No\n")

    def minors() -> list[int]:
        client = bare_silicon.client()
        found = [client("nvmlDeviceGetMinorNumber", client.gpu(number)) for number in range(3)]
        assert found == [entry["minor"] for entry in bare_silicon.show()["gpus"]]
        texts = [(gpus / f"0000:1{number}:00.0/information").read_text() for number in range(3)]
        assert texts == [f"Device Minor: \t {minor}\nGPU Excluded:\t No\n" for minor in found]
        trees = {path.name for path in bare_silicon.capabilities.iterdir()}
        assert trees == {f"gpu{minor}" for minor in found} and (bare_silicon.dev / "nvidia0").exists()
        return found

    for gpu in ("0", "2"):
        assert bare_silicon.control(f"driver-unbind {gpu}")["ok"]
    assert {path.name for path in bare_silicon.capabilities.iterdir()} == {"gpu1"}
    for gpu in ("2", "0"):
        assert bare_silicon.control(f"driver-bind {gpu}")["ok"]
    assert minors() == [2, 1, 0], "the two have exchanged their minors"
    bare_silicon.control("unplug 1")
    bare_silicon.control("driver-unbind 2")
    bare_silicon.control("driver-bind 2")
    bare_silicon.control("plug 1")
    assert minors() == [2, 1, 0]
    bare_silicon.control("power-cycle")
    assert minors() == [0, 1, 2]


def test_running_processes_block_mode_changes_and_resets(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80", "H100-80")
    client = bare_silicon.client()
    gpu, other = client.gpu(0), client.gpu(1)
    instance = client("nvmlDeviceCreateGpuInstance", gpu, 9)
    compute = client("nvmlGpuInstanceCreateComputeInstance", instance, 2)
    identifier = client("nvmlGpuInstanceGetInfo", instance)["id"]
    user = client.process.pid
    assert bare_silicon.control(f"fault 0 process {user} {identifier} 0 memory 1000")["ok"]
    assert client.code("nvmlComputeInstanceDestroy", compute) == IN_USE
    assert client.code("nvmlGpuInstanceDestroy", instance) == IN_USE
    running = client("nvmlDeviceGetComputeRunningProcesses", gpu)
    assert [(each["pid"], each["gpuInstanceId"], each["computeInstanceId"]) for each in running] == [
        (user, identifier, 0)
    ]
    device = client("nvmlComputeInstanceGetInfo", compute)["device"]
    assert client("nvmlDeviceGetComputeRunningProcesses", device) == running
    assert client("nvmlDeviceGetMemoryInfo", device)["used"] == 1000 << 20
    assert bare_silicon.control("clear 0")["ok"]
    client("nvmlComputeInstanceDestroy", compute)
    bare_silicon.control("fault 1 process 4194000")
    assert client.code("nvmlDeviceCreateGpuInstance", other, 9) == IN_USE
    assert bare_silicon.control("gpu-reset 1")["code"] == IN_USE
    assert bare_silicon.control("gpu-reset 0")["ok"]


def test_ended_process_does_not_block(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80")
    client, user = bare_silicon.client(), bare_silicon.client(initialize=False)
    bare_silicon.control(f"fault 0 process {user.process.pid}")
    assert len(client("nvmlDeviceGetComputeRunningProcesses", client.gpu())) == 1
    user.close()
    assert client("nvmlDeviceGetComputeRunningProcesses", client.gpu()) == []


def test_only_administrators_change_and_list_instances(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80", "L4", extra=("mig-mode yes", "maximum-clocks graphics=1980"))
    root = bare_silicon.client()
    instance = root("nvmlDeviceCreateGpuInstance", root.gpu(), 19)
    root("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    made = root("nvmlGpuInstanceGetInfo", instance)["id"]
    nobody = bare_silicon.client(user=65534)
    gpu = nobody.gpu()
    # Each call fails because of the missing privilege only: an administrator can make it on the same board.
    for call, index, arguments in (
        ("nvmlDeviceSetPowerManagementLimit", 0, (300000,)),
        ("nvmlDeviceSetComputeMode", 1, (0,)),
        ("nvmlDeviceSetPersistenceMode", 0, (1,)),
        ("nvmlDeviceSetGpuLockedClocks", 0, (210, 210)),
        ("nvmlDeviceGetGpuInstanceById", 0, (made,)),
        ("nvmlDeviceCreateGpuInstance", 0, (19,)),
    ):
        assert nobody.code(call, nobody.gpu(index), *arguments) == NO_PERMISSION, call
        assert root.code(call, root.gpu(index), *arguments) == 0, call
    assert nobody.code("nvmlDeviceSetMigMode", gpu, 0) == NO_PERMISSION
    assert nobody.code("gpu_instances", gpu, 19) == NO_PERMISSION
    assert nobody("control", "power-cycle")["code"] == NO_PERMISSION
    assert nobody("nvmlDeviceGetMigMode", gpu) == [1, 1]


def test_slow_operation_does_not_delay_other_processes(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80", "H100-80", statements=("operation-delay 600000",))
    busy, other = bare_silicon.client(), bare_silicon.client()
    busy.send("nvmlDeviceCreateGpuInstance", busy.gpu(0), 19)
    assert other("gpu_instances", other.gpu(0), 19) == []
    assert other("nvmlDeviceGetName", other.gpu(1))
    assert other.code("nvmlDeviceSetMigMode", other.gpu(1), 0) == SUCCESS
    assert select.select([busy.process.stdout], [], [], 0.5)[0] == []
    # Killed during the call, it has created nothing
    busy.process.kill()
    busy.process.wait()
    assert bare_silicon.show()["gpus"][0]["gpu_instances"] == []


def test_every_operation_has_its_configured_delay(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80", statements=("operation-delay 300",))
    client = bare_silicon.client()
    gpu = client.gpu()

    def timed(call: str, *arguments: object) -> Any:
        begin = time.monotonic()
        answer = client(call, *arguments)
        assert time.monotonic() - begin >= 0.3, call
        return answer

    instance = timed("nvmlDeviceCreateGpuInstance", gpu, 19)
    compute = timed("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    timed("nvmlComputeInstanceDestroy", compute)
    timed("nvmlGpuInstanceDestroy", instance)
    again = timed("create_at", gpu, 19, 3, 1)
    with pytest.raises(NvmlError):
        timed("nvmlDeviceCreateGpuInstance", gpu, 12345)
    assert len(client("gpu_instances", gpu, 19)) == 1
    timed("nvmlGpuInstanceDestroy", again)
