# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test processes that have a GPU or a MIG device open, and the operations that they block."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import IN_USE, SUCCESS, Client, Silicon, gpu_section, machine_text


def load(silicon: Silicon, *statements: str) -> Client:
    """Load two H100 in MIG mode; return an administrator's process."""
    sections = [gpu_section(BOARDS["H100-80"], number, ("mig-mode yes",)) for number in range(2)]
    assert silicon.load(machine_text(silicon.folder, sections, statements))["ok"]
    return silicon.client()


def make(silicon: Silicon, root: Client, start: int) -> tuple[Any, Any]:
    """Return a new 1g.10gb instance and its compute instance."""
    instance = root("create_at", root.gpu(), 19, start, 1)
    compute = root("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    return instance, compute


def give_nodes(silicon: Silicon, identifier: int) -> None:
    shown = next(entry for entry in silicon.show()["gpus"][0]["gpu_instances"] if entry["id"] == identifier)
    for minor in (shown["capability_minor"], shown["compute_instances"][0]["capability_minor"]):
        (silicon.dev / f"nvidia-caps/nvidia-cap{minor}").touch()


def opened(silicon: Silicon) -> dict[int, bool]:
    return {entry["id"]: entry["open"] for entry in silicon.show()["gpus"][0]["gpu_instances"]}


@pytest.mark.parametrize("end", ["shutdown", "exit", "kill"])
def test_process_in_a_container_blocks_the_removal_of_its_instance(bare_silicon: Silicon, end: str) -> None:
    root = load(bare_silicon)
    kept, free = make(bare_silicon, root, 0), make(bare_silicon, root, 3)
    give_nodes(bare_silicon, 7)
    pod = bare_silicon.container()
    assert opened(bare_silicon) == {7: True, 10: False}
    assert root.code("nvmlComputeInstanceDestroy", kept[1]) == IN_USE
    assert root.code("nvmlComputeInstanceDestroy", free[1]) == SUCCESS
    assert root.code("nvmlGpuInstanceDestroy", free[0]) == SUCCESS
    if end == "shutdown":
        pod("nvmlShutdown")
    elif end == "exit":
        pod.close()
    else:
        pod.process.kill()
        pod.process.wait()
    assert opened(bare_silicon) == {7: False}
    assert root.code("nvmlComputeInstanceDestroy", kept[1]) == SUCCESS
    assert root.code("nvmlGpuInstanceDestroy", kept[0]) == SUCCESS


def test_each_initialization_has_its_own_shutdown(bare_silicon: Silicon) -> None:
    root = load(bare_silicon)
    make(bare_silicon, root, 0)
    give_nodes(bare_silicon, 7)
    pod = bare_silicon.container()
    pod("nvmlInit")
    pod("nvmlShutdown")
    assert opened(bare_silicon) == {7: True}
    pod("nvmlShutdown")
    assert opened(bare_silicon) == {7: False}


def test_listed_instance_is_free_and_monitored_instance_is_in_use(bare_silicon: Silicon) -> None:
    root, monitor = load(bare_silicon), bare_silicon.client()
    instance, compute = make(bare_silicon, root, 0)
    device = monitor("nvmlDeviceGetMigDeviceHandleByIndex", monitor.gpu(), 0)
    for call in ("nvmlDeviceGetUUID", "nvmlDeviceGetAttributes", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetName"):
        monitor(call, device)
    assert opened(bare_silicon) == {7: False}
    monitor("nvmlDeviceGetMemoryInfo", device)
    assert root.code("nvmlComputeInstanceDestroy", compute) == IN_USE
    assert root.code("nvmlGpuInstanceDestroy", instance) == IN_USE
    # A process does not block itself
    assert monitor.code("nvmlComputeInstanceDestroy", compute) == SUCCESS


def test_container_blocks_mode_changes_and_resets_of_its_gpu(bare_silicon: Silicon) -> None:
    root = load(bare_silicon)
    pod = bare_silicon.container()
    assert root("nvmlDeviceSetMigMode", root.gpu(), 0) == IN_USE
    assert bare_silicon.control("gpu-reset 1")["code"] == IN_USE
    pod("nvmlShutdown")
    assert root("nvmlDeviceSetMigMode", root.gpu(), 0) == SUCCESS
    assert bare_silicon.control("gpu-reset 1")["ok"]


def test_host_processes_block_their_gpus_if_configured(bare_silicon: Silicon) -> None:
    root = load(bare_silicon, "clients-hold-gpus yes")
    other = bare_silicon.client()
    assert root("nvmlDeviceSetMigMode", root.gpu(), 0) == IN_USE
    assert bare_silicon.smi("--gpu-reset", "-i", "1").returncode != 0
    other("nvmlShutdown")
    assert root("nvmlDeviceSetMigMode", root.gpu(), 0) == SUCCESS
    assert bare_silicon.smi("--gpu-reset", "-i", "1").returncode != 0
    root("nvmlShutdown")
    assert bare_silicon.smi("--gpu-reset", "-i", "1").returncode == 0


def test_cuda_context_and_looping_nvidia_smi_count_as_clients(bare_silicon: Silicon) -> None:
    root = load(bare_silicon)
    make(bare_silicon, root, 0)
    give_nodes(bare_silicon, 7)
    command = ["setpriv", "--bounding-set=-sys_admin", str(bare_silicon.folder / "lib/nvidia-smi"), "-L", "-l", "3600"]
    with subprocess.Popen(command, env=bare_silicon.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = [process.stdout.readline().split(":")[0] for _line in range(3)]
        assert [line.strip() for line in lines] == ["GPU 0", "MIG 1g.10gb     Device  0", "GPU 1"]
        assert opened(bare_silicon) == {7: True}
        process.kill()
    assert opened(bare_silicon) == {7: False}
    pod = bare_silicon.client(initialize=False)
    pod("give_administration_up")
    assert pod("cuda", "cuInit", 0) == SUCCESS
    assert opened(bare_silicon) == {7: True}
    pod.close()
    assert opened(bare_silicon) == {7: False}
