# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test a simulated node through the NVML binding, sysfs, and /proc. A difference ends the program with a message."""

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
    """End the program if ``found`` is not ``wanted``."""
    if found != wanted:
        sys.exit(f"{what}: found {found!r}, expected {wanted!r}")


def error_of(function, *arguments):
    """Return the NVML error number of a call, 0 if it succeeds."""
    try:
        function(*arguments)
    except nvml.NVMLError as error:
        return error.value
    return 0


def simulator(*arguments):
    """Run the simulator's command and return its JSON output."""
    done = subprocess.run(["accelerator-simulator", *arguments], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def check_topology(count):
    """Check that each GPU of NVML is in sysfs under a root bus and on the NUMA node that NVML returns."""
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
    """Create a GPU instance at a placement with a full compute instance, and return its ID and its MIG device."""
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
    """Test an 8xH100 after converge: create partitions and inject faults. Instances and MIG mode remain."""
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
    # Removed and restored files are no power cycle: the instances remain
    simulator("power-off")
    expect(
        "nvidia-smi without files",
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode != 0,
        True,
    )
    simulator("power-on")
    expect("capability minor, restored files", access.read_text(encoding="ascii").split()[1], str(3 + 9 * instance))
    expect(
        "MIG device, restored files",
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
    """Check that Hopper GPUs lost their instances and their MIG mode in a reboot, and kept their identities."""
    expect("number of GPUs", nvml.nvmlDeviceGetCount(), 8)
    check_topology(8)
    first = nvml.nvmlDeviceGetHandleByIndex(0)
    expect("MIG mode", nvml.nvmlDeviceGetMigMode(first), [0, 0])
    shown = simulator("show", "--json")
    expect("instances", [gpu["gpu_instances"] for gpu in shown["gpus"]], [[]] * 8)
    listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    expect("UUID in nvidia-smi", nvml.nvmlDeviceGetUUID(first) in listed, True)


def mixed():
    """Check the mixed machine: minor numbers differ from indices, and boards differ in their features."""
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
    """Run the test of the command-line argument."""
    nvml.nvmlInit()
    {"running": running, "rebooted": rebooted, "mixed": mixed}[sys.argv[1]]()
    nvml.nvmlShutdown()


if __name__ == "__main__":
    main()
