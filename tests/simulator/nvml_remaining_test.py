# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the calls that other tests do not use: processes in every version, older forms of structures, counters at zero."""

from __future__ import annotations

import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import (
    ARGUMENT_VERSION_MISMATCH,
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    NOT_TIED,
    SUCCESS,
    Silicon,
    gpu_section,
    machine_text,
)


@pytest.fixture
def silicon(bare_silicon: Silicon) -> Silicon:
    sections = [
        gpu_section(BOARDS["H100-80"], 0, ("mig-mode yes", "page-retirement yes", "nvlink 0 version=6 state=inactive")),
        gpu_section(BOARDS["A30"], 1, ("maximum-clocks graphics=1440 sm=1440 memory=1215 video=1305",)),
    ]
    bare_silicon.load(machine_text(bare_silicon.folder, sections))
    return bare_silicon


def test_processes_in_every_version(silicon: Silicon) -> None:
    client = silicon.client()
    gpu = client.gpu()
    instance = client("create_at", gpu, 9, 0, 4)
    computes = [client("nvmlGpuInstanceCreateComputeInstance", instance, 0) for _round in range(2)]
    silicon.control("fault 0 process 4194001 1 0 memory 100")
    silicon.control("fault 0 process 4194002 1 1 memory 200")
    listed = client("nvmlDeviceGetComputeRunningProcesses", gpu)
    assert [
        (each["pid"], each["usedGpuMemory"], each["gpuInstanceId"], each["computeInstanceId"]) for each in listed
    ] == [
        (4194001, 100 << 20, 1, 0),
        (4194002, 200 << 20, 1, 1),
    ]
    second = client("nvmlComputeInstanceGetInfo", computes[1])["device"]
    assert [each["pid"] for each in client("nvmlDeviceGetComputeRunningProcesses", second)] == [4194002]
    assert client("nvmlDeviceGetGraphicsRunningProcesses", gpu) == []
    assert client("nvmlDeviceGetMPSComputeRunningProcesses", gpu) == []
    for suffix in ("", "_v2", "_v3"):
        for kind, code in {"Compute": INSUFFICIENT_SIZE, "Graphics": SUCCESS, "MPSCompute": SUCCESS}.items():
            answer = client("symbol", f"nvmlDeviceGet{kind}RunningProcesses{suffix}", gpu, {"out": 1}, None)
            assert answer == [code, 2 if kind == "Compute" else 0]
    detail = client("nvmlDeviceGetRunningProcessDetailList", gpu, 0x01000018, 0)
    assert [(each["pid"], each["gpuInstanceId"]) for each in detail] == [(4194001, 1), (4194002, 1)]
    assert client.code("nvmlDeviceGetRunningProcessDetailList", gpu, 0x02000018, 0) == ARGUMENT_VERSION_MISMATCH
    assert client.code("nvmlDeviceGetProcessUtilization", client.gpu(1), 0) == NOT_FOUND
    assert client.code("nvmlDeviceGetProcessUtilization", gpu, 0) == NOT_SUPPORTED


def test_older_versions_write_only_their_structure_size(silicon: Silicon) -> None:
    client = silicon.client()
    gpu = client.gpu()
    instance = client("create_at", gpu, 19, 0, 1)
    compute = client("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    device = client("nvmlComputeInstanceGetInfo", compute)["device"]
    full = client("nvmlDeviceGetAttributes", device)
    code, first = client("symbol", "nvmlDeviceGetAttributes", device, {"struct": "c_nvmlDeviceAttributes"})
    assert (code, first) == (SUCCESS, {**full, "memorySizeMB": 0})
    code, info = client("symbol", "nvmlComputeInstanceGetInfo", compute, {"struct": "c_nvmlComputeInstanceInfo_t"})
    assert (code, info["device"], info["placement"]) == (SUCCESS, device, {"start": 0, "size": 0})
    for name in ("nvmlDeviceGetPciInfo", "nvmlDeviceGetPciInfo_v2"):
        code, pci = client("symbol", name, gpu, {"struct": "nvmlPciInfo_t"})
        assert (code, pci["busIdLegacy"], pci["busId"]) == (SUCCESS, "0000:10:00.0", "")
    events = client("nvmlEventSetCreate")
    client("nvmlDeviceRegisterEvents", gpu, 8, events)
    silicon.control("fault 0 xid 69 7 0")
    code, event = client("symbol", "nvmlEventSetWait", events, {"struct": "c_nvmlEventData_t"}, 0)
    assert (code, event["eventData"], event["gpuInstanceId"]) == (SUCCESS, 69, 0)
    silicon.control("fault 0 xid 13")
    code, event = client("symbol", "nvmlEventSetWait_v2", events, {"struct": "c_nvmlEventData_t"}, 0)
    assert (code, event["gpuInstanceId"]) == (SUCCESS, NOT_TIED)
    wanted = client("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, 0, 0)
    structure = {"struct": "c_nvmlComputeInstanceProfileInfo_v2_t"}
    assert client("symbol", "nvmlGpuInstanceGetComputeInstanceProfileInfoV", instance, 0, 0, structure) == [
        SUCCESS,
        wanted,
    ]
    wrong = {**structure, "fields": {"version": 77}}
    assert (
        client("symbol", "nvmlGpuInstanceGetComputeInstanceProfileInfoV", instance, 0, 0, wrong)[0]
        == ARGUMENT_VERSION_MISMATCH
    )


def test_idle_gpu_has_zero_counters(silicon: Silicon) -> None:
    client = silicon.client()
    gpu, other = client.gpu(0), client.gpu(1)
    assert client("nvmlDeviceGetRetiredPages", gpu, 0) == []
    assert client("nvmlDeviceGetRetiredPages_v2", gpu, 1) == []
    assert client("nvmlDeviceGetRetiredPagesPendingStatus", gpu) == 0
    assert client.code("nvmlDeviceGetRetiredPages", other, 0) == NOT_SUPPORTED
    assert client("nvmlDeviceGetPowerSource", gpu) == 0
    assert client("nvmlDeviceGetMaxCustomerBoostClock", other, 1) == 1440
    assert client.code("nvmlDeviceGetMaxCustomerBoostClock", gpu, 1) == NOT_SUPPORTED
    assert client("nvmlDeviceGetSupportedClocksThrottleReasons", gpu) == 0x1FF
    assert client("nvmlGetExcludedDeviceCount") == 0
    assert client.code("nvmlGetExcludedDeviceInfoByIndex", 0) == INVALID_ARGUMENT
    assert client("symbol", "nvmlDeviceGetC2cModeInfoV", gpu, {"struct": "c_nvmlC2cModeInfo_v1_t"}) == [
        0,
        {"isC2cEnabled": 0},
    ]
    assert client("symbol", "nvmlDeviceGetNvLinkInfo", gpu, {"struct": "c_nvmlNvLinkInfo_v1_t"})[0] == SUCCESS
    fabric = client("symbol", "nvmlDeviceGetGpuFabricInfo", gpu, {"struct": "c_nvmlGpuFabricInfo_t"})
    assert (fabric[0], fabric[1]["state"]) == (SUCCESS, 0)
    assert (
        client("symbol", "nvmlDeviceGetGpuFabricInfo", other, {"struct": "c_nvmlGpuFabricInfo_t"})[0] == NOT_SUPPORTED
    )
    client("nvmlDeviceSetAccountingMode", other, 1)
    assert client.code("nvmlDeviceGetAccountingStats", other, 1) == NOT_FOUND
    assert client.code("nvmlDeviceGetAccountingStats", gpu, 1) == NOT_SUPPORTED
    field = {"struct": "c_nvmlFieldValue_t", "fields": {"fieldId": 94}}
    code, cleared = client("symbol", "nvmlDeviceClearFieldValues", gpu, 1, field)
    assert (code, cleared["nvmlReturn"]) == (SUCCESS, NOT_SUPPORTED)
    assert client("symbol", "nvmlDeviceClearFieldValues", gpu, 0, field)[0] == INVALID_ARGUMENT


def test_null_pointers_are_rejected(silicon: Silicon) -> None:
    client = silicon.client()
    gpu = client.gpu()
    for name in (
        "nvmlDeviceGetIndex",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetName",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetAddressingMode",
        "nvmlDeviceGetSupportedEventTypes",
    ):
        assert client("symbol", name, gpu, None, None, None, None)[0] == INVALID_ARGUMENT, name
    assert client("symbol", "nvmlEventSetCreate", None)[0] == INVALID_ARGUMENT
    assert client("symbol", "nvmlDeviceCreateGpuInstance", gpu, 19, None)[0] == INVALID_ARGUMENT
    assert silicon.show()["gpus"][0]["gpu_instances"] == []
