# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA GPUs for the chaos tests: eight H100 with one layout that gives each kind its own GPU. One driver serves all of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerator_simulator.library import NVIDIA, Library
from dra_driver.core.dra.device_json import FAILED_CONDITION, PREPARED_CONDITION

from tests.chaos.claim_kinds import (
    COMPANIONS,
    FIRST_SHARE,
    PARTITIONS,
    PASSTHROUGH,
    SECOND_SHARE,
    SETTINGS,
    STATIC,
    Kind,
    opaque,
)
from tests.chaos.errors import Broken
from tests.chaos.vendor import Vendor
from tests.cluster.manifests import mps, settings
from tests.simulator.nvml_builds import SOURCES

DRIVER = "gpu.nvidia.com"
#: The partitions of the first GPU are created before the driver starts.
LAYOUT: tuple[Mapping[str, Any], ...] = (
    {"match": {"index": 0}, "mode": "static", "partitions": {"1g.10gb": 2}},
    {"match": {"index": 4}, "mode": "whole", "shares": 4},
    {"match": {"index": 5}, "mode": "dynamic", "passthrough": True},
    {"match": {"index": [3, 6]}, "mode": "whole"},
    {"match": {"index": 7}, "mode": "dynamic", "passthrough": True, "prepared_before_binding": True},
    {"match": {}, "mode": "dynamic"},
)
VERSION = "resource.nvidia.com/v1beta1"
TIME_SLICING = opaque(
    DRIVER,
    apiVersion=VERSION,
    kind="GpuConfig",
    sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}},
)
IOMMUFD = opaque(
    DRIVER,
    apiVersion=VERSION,
    kind="VfioDeviceConfig",
    iommu={"backendPolicy": "PreferIommuFD", "enableAPIDevice": True},
)
SHARE = {
    "device": "gpu-4",
    "shareID": FIRST_SHARE,
    "consumedCapacity": {"memory": "20Gi", "multiprocessors": "33", "shares": "1"},
}
OTHER_SHARE = {**SHARE, "shareID": SECOND_SHARE}
AWAITED = {
    "device": "gpu-7-mig-1g10gb-19-0",
    "bindingConditions": [PREPARED_CONDITION],
    "bindingFailureConditions": [FAILED_CONDITION],
}
AWAITED_MACHINE = {**AWAITED, "device": "gpu-vfio-7"}
_CLOCKS = {"minimum": 900, "maximum": 1200}
ON_ONE, ALSO, ELSEWHERE = "gpu-1-mig-1g10gb-19-0", "gpu-1-mig-2g20gb-14-2", "gpu-2-mig-3g40gb-9-4"
#: Places outside of those three, so that claims of all three kinds can be held at once.
ALONE, SHARED = "gpu-1-mig-1g10gb-19-6", "gpu-2-mig-1g10gb-19-0"
KINDS = (
    Kind("whole", ("gpu-3",)),
    Kind("static", (STATIC,)),
    Kind("dynamic", (ALONE,), stages_of_kind=PARTITIONS, partitions=1),
    Kind("three", (ON_ONE, ALSO, ELSEWHERE), stages_of_kind=PARTITIONS, partitions=3),
    Kind("time-slicing", ("gpu-6",), (TIME_SLICING,), SETTINGS),
    Kind(
        "settings",
        ("gpu-3",),
        (settings(powerLimit=300, graphicsClocks=_CLOCKS, computeMode="ExclusiveProcess"),),
        SETTINGS,
    ),
    Kind("mps", ("gpu-6",), (mps(defaultActiveThreadPercentage=50),), SETTINGS | COMPANIONS),
    Kind(
        "settings-mps",
        ("gpu-3",),
        (settings(powerLimit=300, graphicsClocks=_CLOCKS), mps(defaultActiveThreadPercentage=50)),
        SETTINGS | COMPANIONS,
    ),
    Kind(
        "mps-partition",
        (SHARED,),
        (mps("MigDeviceConfig", defaultPinnedDeviceMemoryLimit="4Gi"),),
        PARTITIONS | COMPANIONS,
        1,
    ),
    Kind("share", (SHARE,), (mps(),), COMPANIONS),
    Kind("two-shares", (OTHER_SHARE,), (mps(),), COMPANIONS, prepared_neighbors=("share",)),
    Kind("passthrough", ("gpu-vfio-5",), stages_of_kind=PASSTHROUGH),
    Kind("iommufd", ("gpu-vfio-5",), (IOMMUFD,), PASSTHROUGH),
    Kind("ahead", (AWAITED,), stages_of_kind=PARTITIONS, partitions=1, before_binding=True),
    Kind("passthrough-ahead", (AWAITED_MACHINE,), stages_of_kind=PASSTHROUGH, before_binding=True),
    Kind("admin", ({"device": "gpu-3", "adminAccess": True},)),
)
HANDOVERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("static", "three", "settings", "mps", "mps-partition", "share", "two-shares", "passthrough", "ahead"), "dynamic"),
    (("static", "dynamic", "three", "settings-mps", "time-slicing", "two-shares", "iommufd", "ahead"), "mps-partition"),
    (
        ("dynamic", "three", "whole", "admin", "mps-partition", "share", "passthrough", "passthrough-ahead"),
        "time-slicing",
    ),
)
LIBRARY_CALLS = (
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceGetInfo",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceSetPowerManagementLimit",
    "nvmlDeviceSetGpuLockedClocks",
    "nvmlDeviceSetComputeMode",
    "nvmlDeviceResetGpuLockedClocks",
)
#: NVML functions that a scan calls once or for each GPU.
SCAN_CALLS = (
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlEventSetWait_v2",
)
#: Unknown error, in use, insufficient resources, the GPU is lost, needs a reset.
ERROR_CODES = (999, 19, 23, 15, 16)
#: Errors of applications, memory, links, and the GPU's own processors. A reset or a reported repair ends all of them.
XIDS = (13, 31, 43, 45, 48, 62, 63, 74, 92, 94, 95, 119, 120, 154)
FUZZ_CONFIGURATIONS = (
    *((("gpu-3",), config) for config in (TIME_SLICING, settings(powerLimit=300), settings(computeMode="Prohibited"))),
    (("gpu-3",), settings(graphicsClocks={"minimum": 900, "maximum": 1200})),
    (("gpu-3", "gpu-6"), TIME_SLICING),
    (("gpu-vfio-5",), IOMMUFD),
    ((SHARE,), mps()),
    ((ON_ONE,), opaque(DRIVER, apiVersion=VERSION, kind="MigDeviceConfig")),
    (
        ("gpu-3",),
        mps(
            defaultActiveThreadPercentage=50,
            defaultPinnedDeviceMemoryLimit="4Gi",
            defaultPerDevicePinnedMemoryLimit={"0": "1Gi"},
        ),
    ),
)

CAPABILITIES = Path("/dev/nvidia-caps")
#: The capabilities without a partition: mig/config and mig/monitor.
MONITOR = {f"{CAPABILITIES}/nvidia-cap1", f"{CAPABILITIES}/nvidia-cap2"}
#: The compared settings of a GPU.
SETTINGS_SHOWN = (
    "mig_mode_current",
    "mig_mode_pending",
    "compute_mode",
    "persistence_mode",
    "time_slice",
    "power_limit_mw",
    "locked_clock_minimum_mhz",
    "locked_clock_maximum_mhz",
    "locked_memory_clock_minimum_mhz",
    "locked_memory_clock_maximum_mhz",
)


def hardware(silicon: Library) -> dict[str, Any]:
    """Return each GPU that NVML lists, by PCI address: its settings, and its partitions."""
    return {
        gpu["pci_address"]: {
            "set": [gpu[name] for name in SETTINGS_SHOWN],
            "partitions": sorted(
                [
                    each["profile"],
                    each["start"],
                    each["size"],
                    [inner["profile"] for inner in each["compute_instances"]],
                ]
                for each in gpu["gpu_instances"]
            ),
        }
        for gpu in silicon.command("show")["gpus"]
    }


def check_cdi_files(silicon: Library, files: list[Path]) -> None:
    """Assert that each CDI file names existing partitions, by their device nodes. Raises Broken."""
    instances = [
        each for gpu in silicon.command("show")["gpus"] for each in gpu["gpu_instances"] if each["compute_instances"]
    ]
    minors = {
        f"/dev/nvidia-caps/nvidia-cap{number}"
        for each in instances
        for number in (each["capability_minor"], *(inner["capability_minor"] for inner in each["compute_instances"]))
    }
    partitions = {inner["uuid"] for each in instances for inner in each["compute_instances"]}
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        nodes = {
            node["path"]
            for device in document["devices"]
            for node in device["containerEdits"].get("deviceNodes", ())
            if "nvidia-caps/" in node["path"]
        }
        gone = {path for path in nodes - minors if path not in MONITOR}
        unknown = set(re.findall(r"MIG-[0-9a-f-]{36}", json.dumps(document["devices"]))) - partitions
        if gone or unknown:
            raise Broken(f"{file} names {sorted(gone | unknown)}, which is no partition that exists")


def start_orphaned_program(claim: str) -> None:
    """Start an MPS daemon, as for a claim."""
    folder = Path("/run/dra-accelerators/companions") / f"{claim}.0"
    Path(f"{folder}.environment").write_text(
        f'CUDA_MPS_PIPE_DIRECTORY="{folder}/pipe"\nCUDA_MPS_LOG_DIRECTORY="{folder}/log"\n'
    )
    Path(f"{folder}.commands").write_text("get_default_active_thread_percentage\n")
    subprocess.run(["systemctl", "start", f"dra-accelerators-mps@{claim}.0.service"], check=True)


VENDOR = Vendor(
    name="nvidia",
    backend="nvidia",
    driver=DRIVER,
    simulated_vendor=NVIDIA,
    sources=SOURCES,
    machine="8xH100",
    layout=LAYOUT,
    kinds=KINDS,
    parallel_kinds=("settings", "static", "three", "passthrough"),
    other_kind="settings",
    handovers=HANDOVERS,
    library_calls=LIBRARY_CALLS,
    error_codes=ERROR_CODES,
    kinds_with_calls=("three", "settings"),
    hanging_calls=("nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"),
    scan_calls=SCAN_CALLS,
    device_errors=tuple(f"xid {number}" for number in XIDS),
    failed_state="recovery-action 1",
    fuzz_configurations=FUZZ_CONFIGURATIONS,
    fuzz_words=("8Gi", "GpuConfig", "DeviceSettings", "MPS", "TimeSlicing"),
    is_static=lambda name: "-mig-" in name and name.startswith("gpu-0-"),
    hardware=hardware,
    device_nodes=lambda: len(os.listdir(CAPABILITIES)),
    check_cdi_files=check_cdi_files,
    pci_class="0x0302",
    pci_driver="nvidia",
    install_directory=lambda name: Path(NVIDIA.folder if name.startswith("lib") else "/usr/bin"),
    program_prefix=b"nvidia-cuda-mps",
    start_orphaned_program=start_orphaned_program,
)
