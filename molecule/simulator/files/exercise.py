# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Exercises a simulated node through NVIDIA's own binding, sysfs and /proc; any difference ends it with a message."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pynvml as nvml

H100_1G_10GB, H100_3G_40GB = 19, 9


def expect(what, found, wanted):
    """Ends the program where ``found`` is not ``wanted``."""
    if found != wanted:
        sys.exit(f"{what}: found {found!r}, expected {wanted!r}")


def error_of(function, *arguments):
    """The NVML error number that a call ends with, 0 where it succeeds."""
    try:
        function(*arguments)
    except nvml.NVMLError as error:
        return error.value
    return 0


def simulator(*words):
    """Runs the command and returns its JSON."""
    done = subprocess.run(["accelerator-simulator", *words], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def check_topology(count):
    """Each GPU that NVML lists is in sysfs under a root bus, on the NUMA node that NVML names."""
    for index in range(count):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        address = nvml.nvmlDeviceGetPciInfo(handle).busId.lower()[4:]
        real = os.path.realpath(f"/sys/bus/pci/devices/{address}")
        expect(f"{address}: start of its real path", real[:16], "/sys/devices/pci")
        node = int(Path(real, "numa_node").read_text(encoding="ascii"))
        expect(
            f"{address}: NUMA nodes",
            list(nvml.nvmlDeviceGetMemoryAffinity(handle, 1, nvml.NVML_AFFINITY_SCOPE_NODE)),
            [1 << node],
        )
        minor = nvml.nvmlDeviceGetMinorNumber(handle)
        expect(f"{address}: device node", Path(f"/dev/nvidia{minor}").stat().st_rdev, os.makedev(195, minor))


def create(handle, profile, start):
    """A GPU instance at a placement with the compute instance that fills it; returns its id and its MIG device."""
    placement = nvml.c_nvmlGpuInstancePlacement_t()
    placement.start = start
    placement.size = 1 if profile == H100_1G_10GB else 4
    instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile, ctypes.byref(placement))
    compute = nvml.nvmlGpuInstanceCreateComputeInstance(
        instance,
        nvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE
        if profile == H100_1G_10GB
        else nvml.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE,
    )
    return nvml.nvmlGpuInstanceGetInfo(instance).id, nvml.nvmlComputeInstanceGetInfo(compute).device


def running():
    """A freshly converged 8xH100: partitions it and injects faults. Leaves instances and MIG mode behind."""
    expect("number of GPUs", nvml.nvmlDeviceGetCount(), 8)
    check_topology(8)
    first = nvml.nvmlDeviceGetHandleByIndex(0)
    expect("memory in MiB", nvml.nvmlDeviceGetMemoryInfo(first).total >> 20, 81559)
    expect("SetMigMode", nvml.nvmlDeviceSetMigMode(first, nvml.NVML_DEVICE_MIG_ENABLE), 0)
    first = nvml.nvmlDeviceGetHandleByIndex(0)
    expect("MIG mode", nvml.nvmlDeviceGetMigMode(first), [1, 1])
    instance, device = create(first, H100_3G_40GB, 4)
    create(first, H100_1G_10GB, 0)
    expect("occupied placement", error_of(create, first, H100_3G_40GB, 4), nvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    expect("placement off the list", error_of(create, first, H100_3G_40GB, 2), nvml.NVML_ERROR_INVALID_ARGUMENT)
    expect("MIG UUID", nvml.nvmlDeviceGetUUID(device)[:4], "MIG-")
    access = Path(f"/proc/driver/nvidia/capabilities/gpu0/mig/gi{instance}/access")
    expect("capability minor", access.read_text(encoding="ascii").split()[1], str(3 + 9 * instance))
    # Files that are taken away and placed again are no power cycle: the instances live on
    simulator("power-off")
    expect(
        "nvidia-smi without files",
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode != 0,
        True,
    )
    simulator("power-on")
    expect("capability minor, placed again", access.read_text(encoding="ascii").split()[1], str(3 + 9 * instance))
    expect(
        "MIG device, placed again",
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(nvml.nvmlDeviceGetHandleByIndex(0), 0) is not None,
        True,
    )

    simulator("fault", "1", "call", "nvmlDeviceSetMigMode", "fail", str(nvml.NVML_ERROR_IN_USE))
    second = nvml.nvmlDeviceGetHandleByIndex(1)
    expect("injected failure", error_of(nvml.nvmlDeviceSetMigMode, second, 1), nvml.NVML_ERROR_IN_USE)
    last = nvml.nvmlDeviceGetHandleByIndex(7)
    simulator("fault", "7", "lost")
    expect("a call on a lost GPU", error_of(nvml.nvmlDeviceGetUUID, last), nvml.NVML_ERROR_GPU_IS_LOST)
    expect("a handle of a lost GPU", error_of(nvml.nvmlDeviceGetHandleByIndex, 7), nvml.NVML_ERROR_GPU_IS_LOST)
    simulator("clear", "all")
    expect("after clear", error_of(nvml.nvmlDeviceSetMigMode, second, 0), 0)


def rebooted():
    """After a reboot: Hopper has lost its instances and its MIG mode; identities are the same."""
    expect("number of GPUs", nvml.nvmlDeviceGetCount(), 8)
    check_topology(8)
    first = nvml.nvmlDeviceGetHandleByIndex(0)
    expect("MIG mode", nvml.nvmlDeviceGetMigMode(first), [0, 0])
    shown = simulator("show", "--json")
    expect("instances", [gpu["gpu_instances"] for gpu in shown["gpus"]], [[]] * 8)
    listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    expect("UUID in nvidia-smi", nvml.nvmlDeviceGetUUID(first) in listed, True)


def mixed():
    """The mixed machine: minors are not indices, and boards differ in what they can do."""
    expect("number of GPUs", nvml.nvmlDeviceGetCount(), 5)
    check_topology(5)
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(5)]
    expect("minors", [nvml.nvmlDeviceGetMinorNumber(handle) for handle in handles], [3, 1, 0, 4, 2])
    expect("MIG of an L4", error_of(nvml.nvmlDeviceGetMigMode, handles[4]), nvml.NVML_ERROR_NOT_SUPPORTED)
    expect("activation of MIG mode on an A30", nvml.nvmlDeviceSetMigMode(handles[2], 1), nvml.NVML_ERROR_RESET_REQUIRED)
    expect("MIG mode of an A30 before a reset", nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByIndex(2)), [0, 1])
    address = nvml.nvmlDeviceGetPciInfo(handles[2]).busId
    subprocess.run(["nvidia-smi", "--gpu-reset", "-i", address], check=True, capture_output=True)
    expect("MIG mode of an A30 after a reset", nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByIndex(2)), [1, 1])


def main():
    """Runs the exercise that the argument names."""
    nvml.nvmlInit()
    {"running": running, "rebooted": rebooted, "mixed": mixed}[sys.argv[1]]()
    nvml.nvmlShutdown()


if __name__ == "__main__":
    main()
