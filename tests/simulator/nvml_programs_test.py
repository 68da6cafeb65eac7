# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test nvidia-smi and libcuda with the library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import IN_USE, Silicon, gpu_section, machine_text

CUDA = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
number = ctypes.c_int(-1)
codes = [cuda.cuInit(0), cuda.cuDriverGetVersion(ctypes.byref(number))]
version = number.value
codes.append(cuda.cuDeviceGetCount(ctypes.byref(number)))
print(json.dumps([codes, version, number.value]))
"""


@pytest.fixture
def silicon(bare_silicon: Silicon) -> Silicon:
    sections = [gpu_section(BOARDS[name], number) for number, name in enumerate(("H100-80", "A100-40", "L4"))]
    bare_silicon.load(machine_text(bare_silicon.folder, sections))
    return bare_silicon


def output(silicon: Silicon, *arguments: str) -> str:
    run = silicon.smi(*arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_nvidia_smi_list(silicon: Silicon) -> None:
    client = silicon.client()
    client("nvmlDeviceSetMigMode", client.gpu(), 1)
    for profile in (9, 19):
        instance = client("nvmlDeviceCreateGpuInstance", client.gpu(), profile)
        compute = client("nvmlGpuInstanceCreateComputeInstance", instance, 2 if profile == 9 else 0)
    uuid = client("nvmlDeviceGetUUID", client("nvmlComputeInstanceGetInfo", compute)["device"])
    lines = output(silicon, "-L").splitlines()
    assert lines[0] == "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-4000-8000-000000000000)"
    assert lines[1].split()[:4] == ["MIG", "3g.40gb", "Device", "0:"]
    assert lines[2].strip().endswith(f"Device  1: (UUID: {uuid})")
    assert lines[4] == "GPU 2: NVIDIA L4 (UUID: GPU-00000002-0000-4000-8000-000000000002)"


def test_nvidia_smi_queries(silicon: Silicon) -> None:
    fields = "index,uuid,name,pci.bus_id,memory.total,mig.mode.current,mig.mode.pending,power.limit"
    plain = output(silicon, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", "1,2").splitlines()
    assert [line.split(", ")[0] for line in plain] == ["1", "2"]
    assert plain[0].split(", ")[2:] == [
        "NVIDIA A100-SXM4-40GB",
        "00000000:11:00.0",
        "40960",
        "Disabled",
        "Disabled",
        "300.00",
    ]
    assert plain[1].split(", ")[5] == "[N/A]"
    headed = output(silicon, "--query-gpu=memory.total", "--format=csv").splitlines()
    assert headed[0] == "memory.total [MiB]"
    assert headed[1] == "81559 MiB"
    assert silicon.smi("--query-gpu=nothing", "--format=csv").returncode == 2


def test_nvidia_smi_mig_mode_and_reset(silicon: Silicon) -> None:
    output(silicon, "-i", "1", "-mig", "1")
    client = silicon.client()
    assert client("nvmlDeviceGetMigMode", client.gpu(1)) == [0, 1]
    silicon.control("fault 1 process 4194000")
    refused = silicon.smi("--gpu-reset", "-i", "1")
    assert refused.returncode != 0
    silicon.control("clear 1")
    output(silicon, "--gpu-reset", "-i", "1")
    assert client("nvmlDeviceGetMigMode", client.gpu(1)) == [1, 1]
    assert silicon.control("gpu-reset 1")["code"] != IN_USE


def test_nvidia_smi_compute_policy(silicon: Silicon) -> None:
    uuid = "GPU-00000002-0000-4000-8000-000000000002"
    silicon.client()  # without a client the GPU loses the setting when nvidia-smi ends
    output(silicon, "compute-policy", "-i", uuid, "--set-timeslice=2")
    assert [gpu["time_slice"] for gpu in silicon.show()["gpus"]] == [0, 0, 2]


def test_nvidia_smi_workload_profiles(silicon: Silicon) -> None:
    """Output of nvidia-smi 580.65.06. For a board without profiles, the exit status is NVML's error."""
    none = silicon.smi("power-profiles", "-l", "-i", "0")
    assert (none.returncode, none.stdout) == (
        3,
        "Workload Power Profiles feature is not supported on this device.\n",
    )
    profiles = ("workload-profile 1 priority=0", "workload-profile 3 priority=1", "workload-profile 13 priority=2")
    silicon.load(machine_text(silicon.folder, [gpu_section(BOARDS["B200"], 0, profiles)]))
    assert output(silicon, "power-profiles", "-l").splitlines() == ["1. Max-Q", "3. Memory Bound", "13. HPC"]
    assert output(silicon, "power-profiles", "-gr") == "No profiles are currently requested.\n"
    assert output(silicon, "power-profiles", "-ge") == "No profiles are currently engaged.\n"


def test_nvidia_smi_mig_listings(silicon: Silicon) -> None:
    client = silicon.client()
    client("nvmlDeviceSetMigMode", client.gpu(), 1)
    instance = client("nvmlDeviceCreateGpuInstance", client.gpu(), 9)
    client("nvmlGpuInstanceCreateComputeInstance", instance, 2)
    assert "MIG 1g.10gb" in output(silicon, "mig", "-lgip")
    assert "3g.40gb" in output(silicon, "mig", "-lgi")
    assert "3g.40gb" in output(silicon, "mig", "-lci")
    assert "{0,4}:4" in output(silicon, "mig", "-lgipp")
    assert "NVIDIA H100 80GB HBM3" in output(silicon)


def test_nvidia_smi_without_a_driver(bare_silicon: Silicon) -> None:
    assert bare_silicon.smi("-L").returncode == 9


def cuda(silicon: Silicon) -> list[object]:
    run = subprocess.run(
        [sys.executable, "-c", CUDA], capture_output=True, text=True, env=silicon.environment, check=True
    )
    return list(json.loads(run.stdout))


def test_libcuda_reports_the_same_values_as_nvml(silicon: Silicon) -> None:
    assert cuda(silicon) == [[0, 0, 0], 13000, 3]
    client = silicon.client()
    client("nvmlDeviceSetMigMode", client.gpu(), 1)
    assert cuda(silicon) == [[0, 0, 0], 13000, 2]
    instance = client("nvmlDeviceCreateGpuInstance", client.gpu(), 9)
    client("nvmlGpuInstanceCreateComputeInstance", instance, 2)
    assert cuda(silicon) == [[0, 0, 0], 13000, 1]
    (silicon.dev / "nvidiactl").unlink()
    assert cuda(silicon) == [[100, 0, 3], 0, 0]
