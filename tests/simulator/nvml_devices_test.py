# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the facts of a board: identity, memory, PCI, affinity, topology, links, fabric."""

from __future__ import annotations

import os
from typing import Any

import pytest
from accelerator_simulator import fabric_manager, persistence_daemon

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import (
    ARGUMENT_VERSION_MISMATCH,
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    SUCCESS,
    UNINITIALIZED,
    Client,
    NvmlError,
    Silicon,
    gpu_section,
    machine_text,
)

LINKED = [
    # Two under one switch, one under another switch of the same root, one on another root of the node, one on another
    # node.
    ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:10:00.0", 0),
    ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:11:00.0", 0),
    ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:02.0/0000:20:00.0/0000:21:00.0/0000:12:00.0", 0),
    ("pci0000:10/0000:10:02.0/0000:13:00.0", 0),
    ("pci0000:40/0000:40:01.0/0000:14:00.0", 0),
    ("pci0000:80/0000:80:01.0/0000:15:00.0", 1),
]


@pytest.fixture
def client(bare_silicon: Silicon) -> Client:
    extra = [
        "minor 4",
        "board-part-number 692-2G520-0200-000",
        "vbios-version 96.00.99.00.01",
        "inforom-image-version G520.0200.00.05",
        "brand 14",
        "module-id 2",
        "pci-subsystem-id 0x16c110de",
        "pcie generation=5 width=16",
        "numa-node 1",
        "cpu-affinity 0-3,64-65",
        "memory-bus-width 5120",
        "bar1-memory 131072",
        "cores 16896",
        "addressing-mode hmm",
        "display-mode yes",
        "fabric state=3 status=0 cluster=00112233-4455-6677-8899-aabbccddeeff clique=7 health-mask=0xaa health-summary=1",
        "platform chassis=CH1 slot=3 tray=4 host=1 peer-type=1 module=2 ib-guid=000102030405060708090a0b0c0d0e0f",
        "nvlink 0 version=4 state=active remote=switch address=0000:05:00.0 speed=26562",
        "nvlink 1 version=4 state=inactive speed=26562",
    ]
    bare_silicon.load(machine_text(bare_silicon.folder, [gpu_section(BOARDS["H100-80"], 0, extra)]))
    return bare_silicon.client()


def test_identity(client: Client) -> None:
    gpu = client.gpu()
    uuid = "GPU-00000000-0000-4000-8000-000000000000"
    expected = {
        "nvmlDeviceGetIndex": 0,
        "nvmlDeviceGetMinorNumber": 4,
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetSerial": "1650000000000",
        "nvmlDeviceGetBoardPartNumber": "692-2G520-0200-000",
        "nvmlDeviceGetVbiosVersion": "96.00.99.00.01",
        "nvmlDeviceGetInforomImageVersion": "G520.0200.00.05",
        "nvmlDeviceGetBrand": 14,
        "nvmlDeviceGetArchitecture": 9,
        "nvmlDeviceGetCudaComputeCapability": [9, 0],
        "nvmlDeviceGetModuleId": 2,
        "nvmlDeviceGetBoardId": 0x1000,
        "nvmlDeviceGetMultiGpuBoard": 0,
        "nvmlDeviceGetBusType": 2,
        "nvmlDeviceGetNumGpuCores": 16896,
        "nvmlDeviceGetMemoryBusWidth": 5120,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetPcieLinkMaxSpeed": 5,
        "nvmlDeviceGetPcieReplayCounter": 0,
        "nvmlDeviceGetPcieSpeed": 32000,
        "nvmlDeviceGetDisplayMode": 1,
        "nvmlDeviceGetDisplayActive": 0,
        "nvmlDeviceGetGspFirmwareVersion": "580.95.05",
        "nvmlDeviceGetGspFirmwareMode": [1, 1],
    }
    assert {call: client(call, gpu) for call in expected} == expected
    assert client("nvmlDeviceGetHandleByUUID", uuid) == gpu
    assert client("nvmlDeviceGetHandleByPciBusId", "00000000:10:00.0") == gpu
    assert client("nvmlDeviceGetHandleByPciBusId", "0000:10:00.0") == gpu
    assert client("nvmlDeviceGetHandleBySerial", {"bytes": "1650000000000"}) == gpu
    assert client("nvmlDeviceGetHandleByUUIDV", {"bytes": uuid}, 1) == gpu
    assert client("nvmlDeviceGetHandleByUUIDV", {"bytes": "\x00" * 6 + "\x40\x00\x80" + "\x00" * 7}, 2) == gpu
    assert client.code("nvmlDeviceGetHandleByUUIDV", {"bytes": uuid}, 0) == INVALID_ARGUMENT
    assert client.code("nvmlDeviceGetNumaNodeId", gpu) == NOT_SUPPORTED


def test_unknown_devices_are_not_found(client: Client) -> None:
    assert client("nvmlDeviceGetCount") == 1
    assert client.code("nvmlDeviceGetHandleByIndex", 1) == INVALID_ARGUMENT
    assert client.code("nvmlDeviceGetHandleByUUID", "GPU-no") == NOT_FOUND
    assert client.code("nvmlDeviceGetHandleByPciBusId", "0000:99:00.0") == NOT_FOUND
    assert client.code("nvmlDeviceGetHandleByPciBusId", "rubbish") == INVALID_ARGUMENT
    assert client.code("nvmlDeviceGetName", {"handle": ["device", 0]}) == INVALID_ARGUMENT
    assert client.code("nvmlDeviceGetName", {"handle": ["device", 12345]}) == INVALID_ARGUMENT
    assert (
        client.code("nvmlGpuInstanceGetInfo", {"handle": ["gpu_instance", client.gpu()["handle"][1]]})
        == INVALID_ARGUMENT
    )
    assert client("symbol", "nvmlSystemGetDriverVersion", {"out": 0}, 3)[0] == INSUFFICIENT_SIZE


def test_pci(client: Client) -> None:
    pci = client("nvmlDeviceGetPciInfo", client.gpu())
    assert pci["busIdLegacy"] == "0000:10:00.0"
    assert pci["busId"] == "00000000:10:00.0"
    assert (pci["domain"], pci["bus"], pci["device"]) == (0, 0x10, 0)
    assert (pci["pciDeviceId"], pci["pciSubSystemId"]) == (0x233010DE, 0x16C110DE)
    structure = {"struct": "nvmlPciInfoExt_v1_t", "fields": {"version": 0x01000040}}
    extended = client.fill("nvmlDeviceGetPciInfoExt", client.gpu(), structure, by_reference=True)
    assert (extended["baseClass"], extended["subClass"], extended["busId"]) == (3, 2, "00000000:10:00.0")


def test_memory_and_affinity(client: Client) -> None:
    gpu = client.gpu()
    first, second = client("nvmlDeviceGetMemoryInfo", gpu), client("nvmlDeviceGetMemoryInfo", gpu, 0x02000028)
    assert first == {"total": 81559 << 20, "used": 512 << 20, "free": 81047 << 20}
    assert (second["reserved"], second["used"], second["free"]) == (512 << 20, 0, 81047 << 20)
    assert client.code("nvmlDeviceGetMemoryInfo", gpu, 0x03000028) == ARGUMENT_VERSION_MISMATCH
    assert client("nvmlDeviceGetBAR1MemoryInfo", gpu)["bar1Total"] == 131072 << 20
    assert client("nvmlDeviceGetCpuAffinity", gpu, 2) == [0b1111, 0b11]
    assert client("nvmlDeviceGetCpuAffinityWithinScope", gpu, 1, 0) == [0b1111]
    assert client("nvmlDeviceGetMemoryAffinity", gpu, 1, 0) == [0b10]
    assert client("nvmlSystemGetTopologyGpuSet", 64) == [gpu]
    assert client("nvmlSystemGetTopologyGpuSet", 5) == []


def test_versions_of_structures(client: Client) -> None:
    gpu = client.gpu()
    fabric = client.fill("nvmlDeviceGetGpuFabricInfoV", gpu, {"struct": "c_nvmlGpuFabricInfo_v3_t"}, by_reference=True)
    assert fabric["clusterUuid"][:3] == [0x00, 0x11, 0x22]
    assert (fabric["state"], fabric["status"], fabric["cliqueId"], fabric["healthMask"], fabric["healthSummary"]) == (
        3,
        0,
        7,
        0xAA,
        1,
    )
    second = client.fill("nvmlDeviceGetGpuFabricInfoV", gpu, {"struct": "c_nvmlGpuFabricInfo_v2_t"}, by_reference=True)
    assert second["cliqueId"] == 7
    wrong = {"struct": "c_nvmlGpuFabricInfo_v3_t", "fields": {"version": 0x09000028}}
    with pytest.raises(NvmlError) as caught:
        client.fill("nvmlDeviceGetGpuFabricInfoV", gpu, wrong, by_reference=True)
    assert caught.value.code == ARGUMENT_VERSION_MISMATCH
    code, fourth = client("symbol", "nvmlDeviceGetGpuFabricInfo_v4", gpu, {"struct": "c_nvmlGpuFabricInfo_v4_t"})
    assert (code, fourth["numCliques"], fourth["cliques"][0]["id"]) == (SUCCESS, 1, 7)
    platform = client.fill("nvmlDeviceGetPlatformInfo", gpu, {"struct": "c_nvmlPlatformInfo_v2_t"}, by_reference=True)
    assert platform["chassisSerialNumber"] == "CH1"
    assert [ord(platform[name]) for name in ("slotNumber", "trayIndex", "hostId", "peerType", "moduleId")] == [
        3,
        4,
        1,
        1,
        2,
    ]
    assert client("nvmlDeviceGetAddressingMode", gpu) == 1
    assert client("nvmlDeviceGetPdi", gpu) == 0x0040000000000000
    for name, kind in {
        "nvmlDeviceGetCapabilities": "c_nvmlDeviceCapabilities_v1_t",
        "nvmlDeviceGetRepairStatus": "c_nvmlRepairStatus_t",
        "nvmlDeviceGetSramEccErrorStatus": "c_nvmlEccSramErrorStatus_v1_t",
    }.items():
        assert client("symbol", name, gpu, {"struct": kind})[0] == SUCCESS
        assert client("symbol", name, gpu, {"struct": kind, "fields": {"version": 1}})[0] == ARGUMENT_VERSION_MISMATCH


def test_nvlink(client: Client) -> None:
    gpu = client.gpu()
    assert client("nvmlDeviceGetNvLinkState", gpu, 0) == 1
    assert client("nvmlDeviceGetNvLinkState", gpu, 1) == 0
    assert client.code("nvmlDeviceGetNvLinkState", gpu, 2) == INVALID_ARGUMENT
    assert client("nvmlDeviceGetNvLinkVersion", gpu, 0) == 4
    assert client("nvmlDeviceGetNvLinkCapability", gpu, 0, 0) == 1
    assert client("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, 0) == 2
    assert client("nvmlDeviceGetNvLinkRemotePciInfo", gpu, 0)["busId"] == "00000000:05:00.0"
    assert client("nvmlDeviceGetNvLinkErrorCounter", gpu, 0, 1) == 0
    values = client("nvmlDeviceGetFieldValues", gpu, [91, 90, [164, 0], [165, 1], [166, 0]])
    assert [value["value"]["uiVal"] for value in values] == [2, 26562, 26562, 0, 4]


def topology(silicon: Silicon, *links: tuple[int, int], capability: str = "8.0") -> Client:
    sections = []
    for number, (path, node) in enumerate(LINKED):
        extra = [f"pci-path {path}", f"numa-node {node}"]
        peers = [one if other == number else other for one, other in links if number in {one, other}]
        extra += [f"nvlink {index} remote=gpu address=0000:{0x10 + peer:02x}:00.0" for index, peer in enumerate(peers)]
        sections.append(gpu_section({**BOARDS["A100-40"], "capability": capability}, number, extra))
    silicon.load(machine_text(silicon.folder, sections))
    return silicon.client()


def test_common_ancestors(bare_silicon: Silicon) -> None:
    client = topology(bare_silicon)
    gpus = [client.gpu(index) for index in range(6)]
    assert [client("nvmlDeviceGetTopologyCommonAncestor", gpus[0], gpu) for gpu in gpus] == [0, 10, 20, 30, 40, 50]
    assert client("nvmlDeviceGetTopologyNearestGpus", gpus[0], 10) == [gpus[1]]
    assert client("nvmlDeviceGetTopologyNearestGpus", gpus[0], 50) == gpus[1:]
    assert client("nvmlDeviceOnSameBoard", gpus[0], gpus[1]) == 0
    assert client("nvmlDeviceGetP2PStatus", gpus[0], gpus[3], 4) == 0
    assert client("nvmlDeviceGetP2PStatus", gpus[0], gpus[5], 4) == 3
    assert client("nvmlDeviceGetP2PStatus", gpus[0], gpus[1], 2) == 5


def test_linked_gpus_reach_each_other(bare_silicon: Silicon) -> None:
    client = topology(bare_silicon, (0, 5))
    near, far = client.gpu(0), client.gpu(5)
    assert client("nvmlDeviceGetP2PStatus", near, far, 2) == 0
    assert client("nvmlDeviceGetP2PStatus", near, far, 1) == 0
    assert bare_silicon.control("gpu-reset 0,5")["ok"]
    far, near = client.gpu(5), client.gpu(0)
    bare_silicon.control("fault 0 nvlink 0 down")
    assert client("nvmlDeviceGetNvLinkState", near, 0) == 0
    assert client("nvmlDeviceGetP2PStatus", far, near, 2) == 0
    bare_silicon.control("fault 5 nvlink 0 down")
    assert client("nvmlDeviceGetP2PStatus", near, far, 2) == 5
    bare_silicon.control("fault 0,5 nvlink 0 up")
    client("nvmlDeviceSetMigMode", near, 1)
    bare_silicon.control("gpu-reset 0,5")
    assert client("nvmlDeviceGetP2PStatus", client.gpu(0), client.gpu(5), 2) == 5


def test_linked_gpus_are_reset_together_before_ampere(bare_silicon: Silicon) -> None:
    topology(bare_silicon, (0, 5), capability="7.0")
    refused = bare_silicon.control("gpu-reset 0")
    assert refused["code"] == INVALID_ARGUMENT and "linked to GPU 5" in refused["error"]
    assert bare_silicon.control("gpu-reset 1")["ok"] and bare_silicon.control("gpu-reset 0,5")["ok"]
    topology(bare_silicon, (0, 5))
    assert bare_silicon.control("gpu-reset 0")["ok"]


@pytest.mark.parametrize(
    ("capability", "without", "running"), [("7.0", False, False), ("8.0", False, True), ("9.0", True, True)]
)
def test_gpus_with_nvswitches_are_reset_separately(
    bare_silicon: Silicon, capability: str, without: bool, running: bool
) -> None:
    board, link = {**BOARDS["A100-40"], "capability": capability}, "nvlink 0 remote=switch address=0000:05:00.0"
    bare_silicon.load(machine_text(bare_silicon.folder, [gpu_section(board, number, [link]) for number in range(2)]))
    assert bare_silicon.control("gpu-reset 0").get("ok", False) == without
    assert bare_silicon.control("gpu-reset 0,1")["ok"]
    state = persistence_daemon.open_state(bare_silicon.folder / "lib")
    persistence_daemon.lock(state, fabric_manager.STATE_BYTE, held=True)
    assert bare_silicon.control("gpu-reset 0").get("ok", False) == running
    os.close(state)
    assert bare_silicon.control("gpu-reset 0").get("ok", False) == without


def test_library_initialization_and_shutdown(bare_silicon: Silicon) -> None:
    bare_silicon.load(machine_text(bare_silicon.folder, [gpu_section(BOARDS["L4"], 0)]))
    client = bare_silicon.client(initialize=False)
    assert client.code("nvmlSystemGetDriverVersion") == UNINITIALIZED
    client("nvmlInit")
    client("nvmlInitWithFlags", 1)
    assert client("symbol", "nvmlInit_v2")[0] == SUCCESS
    assert client.code("nvmlInitWithFlags", 8) == INVALID_ARGUMENT
    for _round in range(3):
        assert client("nvmlSystemGetDriverVersion") == "580.95.05"
        client("nvmlShutdown")
    assert client.code("nvmlSystemGetDriverVersion") == UNINITIALIZED
    assert client.code("nvmlShutdown") == UNINITIALIZED
    client("nvmlInit")
    versions: dict[str, Any] = {
        "nvmlSystemGetNVMLVersion": "13.580.95.05",
        "nvmlSystemGetCudaDriverVersion": 13000,
        "nvmlSystemGetCudaDriverVersion_v2": 13000,
        "nvmlUnitGetCount": 0,
        "nvmlSystemGetHicVersion": [],
    }
    assert {call: client(call) for call in versions} == versions
    assert client("nvmlSystemGetDriverBranch")["branch"] == "r580_00"
    assert "python" in client("nvmlSystemGetProcessName", client.process.pid)
    assert client("nvmlErrorString", 23) == "Insufficient Resources"
