# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test events and injected faults across processes."""

from __future__ import annotations

import select
import time

import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    NOT_TIED,
    TIMEOUT,
    VERSION,
    Client,
    Silicon,
    gpu_section,
    machine_text,
)
from tests.unit.core.xid_table import ASKS_FROM, BRANCHES, ROWS, asks

ALL_EVENTS = 0xFF1F
XID, RECOVERY = 8, 0x8000


@pytest.fixture
def silicon(bare_silicon: Silicon) -> Silicon:
    boards = ("H100-80", "H100-80", "L4")
    extra = ("mig-mode yes",)
    sections = [gpu_section(BOARDS[name], number, extra if name != "L4" else ()) for number, name in enumerate(boards)]
    bare_silicon.load(machine_text(bare_silicon.folder, sections))
    return bare_silicon


def listener(silicon: Silicon, index: int = 0, types: int = ALL_EVENTS) -> tuple[Client, object]:
    client = silicon.client()
    events = client("nvmlEventSetCreate")
    supported = client("nvmlDeviceGetSupportedEventTypes", client.gpu(index))
    client("nvmlDeviceRegisterEvents", client.gpu(index), types & supported, events)
    return client, events


def received(
    client: Client, events: object, milliseconds: int = 0, end: int = TIMEOUT
) -> list[tuple[int, int, int, int]]:
    """Return all pending events: type, data, GPU instance, compute instance."""
    found, code = client("drain", events, milliseconds)
    assert code == end
    return [
        (event["eventType"], event["eventData"], event["gpuInstanceId"], event["computeInstanceId"]) for event in found
    ]


def test_xid_event_reaches_every_registered_process_of_that_gpu_only(silicon: Silicon) -> None:
    one, one_set = listener(silicon)
    two, two_set = listener(silicon)
    other, other_set = listener(silicon, 1)
    assert silicon.control("fault 0 xid 13")["ok"]
    assert received(one, one_set) == received(two, two_set) == [(XID, 13, NOT_TIED, NOT_TIED)]
    assert received(other, other_set) == []
    assert received(one, one_set) == []


def test_waiting_process_wakes_immediately(silicon: Silicon) -> None:
    client, events = listener(silicon)
    client.send("nvmlEventSetWait_v2", events, 20000)
    time.sleep(0.2)
    begin = time.monotonic()
    silicon.control("fault 0 xid 94")
    event = client.receive()["result"]
    assert time.monotonic() - begin < 5
    assert event["eventData"] == 94
    assert event["device"] == client.gpu(0)


def test_process_with_read_only_access_wakes_too(silicon: Silicon) -> None:
    client = silicon.client(user=65534)
    events = client("nvmlEventSetCreate")
    client("nvmlDeviceRegisterEvents", client.gpu(), XID, events)
    client.send("nvmlEventSetWait_v2", events, 20000)
    time.sleep(0.2)
    begin = time.monotonic()
    silicon.control("fault 0 xid 94")
    assert client.receive()["result"]["eventData"] == 94
    assert time.monotonic() - begin < 5


def test_wait_ends_on_timeout_and_when_its_set_is_freed(silicon: Silicon) -> None:
    client, events = listener(silicon)
    begin = time.monotonic()
    assert client.code("nvmlEventSetWait_v2", events, 300) == TIMEOUT
    assert 0.28 < time.monotonic() - begin < 5
    client("nvmlEventSetFree", events)
    assert client.code("nvmlEventSetWait_v2", events, 10) == INVALID_ARGUMENT
    assert client.code("nvmlEventSetFree", events) == INVALID_ARGUMENT


def test_xids_of_a_mig_device_and_changes_of_the_configuration(silicon: Silicon) -> None:
    client, events = listener(silicon)
    instance = client("create_at", client.gpu(), 19, 2, 1)
    client("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    assert silicon.control("fault 0 xid 69 9 0")["ok"]
    refused = silicon.control("fault 0 xid 69 10 0")
    assert refused["code"] == INVALID_ARGUMENT
    assert received(client, events) == [(0x100, 1, 9, NOT_TIED), (0x100, 1, 9, 0), (XID, 69, 9, 0)]


def test_only_registered_and_supported_event_types_are_delivered(silicon: Silicon) -> None:
    client, events = listener(silicon, types=XID)
    silicon.control("fault 0 ecc sbe 3")
    silicon.control("fault 0 xid 31")
    assert received(client, events) == [(XID, 31, NOT_TIED, NOT_TIED)]
    last = client.gpu(2)
    assert client("nvmlDeviceGetSupportedEventTypes", last) & 0x100 == 0
    assert client.code("nvmlDeviceRegisterEvents", last, 0x100, events) == NOT_SUPPORTED
    assert client.code("nvmlDeviceRegisterEvents", last, XID, {"handle": ["event_set", 4096]}) == INVALID_ARGUMENT


def test_full_event_ring_drops_the_oldest_event(silicon: Silicon) -> None:
    client, events = listener(silicon, types=1)
    for index in (1, 2):
        client("nvmlDeviceRegisterEvents", client.gpu(index), 1, events)
    counts = list(range(1, 361))
    for count in counts:
        silicon.control(f"fault all ecc sbe {count}")
    seen = [event[1] for event in received(client, events)]
    assert seen == [count for count in counts for _gpu in range(3)][-1024:]


def test_ecc(silicon: Silicon) -> None:
    client, events = listener(silicon)
    gpu = client.gpu()
    silicon.control("fault 0 ecc sbe 5")
    silicon.control("fault 0 ecc dbe")
    assert [client("nvmlDeviceGetTotalEccErrors", gpu, kind, 0) for kind in (0, 1)] == [5, 1]
    assert client("nvmlDeviceGetDetailedEccErrors", gpu, 0, 1)["deviceMemory"] == 5
    assert client("nvmlDeviceGetMemoryErrorCounter", gpu, 1, 1, 2) == 1
    assert client("nvmlDeviceGetMemoryErrorCounter", gpu, 1, 1, 0) == 0
    assert [kind for kind, *_unused in received(client, events)] == [1, 2, XID, XID, RECOVERY]
    client("nvmlDeviceClearEccErrorCounts", gpu, 0)
    assert client("nvmlDeviceGetTotalEccErrors", gpu, 0, 0) == 0
    silicon.control("power-cycle")
    values = client("nvmlDeviceGetFieldValues", client.gpu(), [1, 2, 3, 4, 5, 6])
    assert [value["value"]["ullVal"] & 0xFFFFFFFF for value in values] == [1, 1, 0, 0, 5, 1]


def recovery(client: Client, gpu: object) -> int:
    return int(client("nvmlDeviceGetFieldValues", gpu, [230])[0]["value"]["uiVal"])


def test_row_remapping(silicon: Silicon) -> None:
    client = silicon.client()
    gpu = client.gpu()
    assert client("nvmlDeviceGetRemappedRows", gpu) == [0, 0, 0, 0]
    silicon.control("fault 0 row-remap pending")
    assert client("nvmlDeviceGetRemappedRows", gpu) == [0, 0, 1, 0]
    assert recovery(client, gpu) == 4
    silicon.control("gpu-reset 0")
    gpu = client.gpu()
    assert client("nvmlDeviceGetRemappedRows", gpu) == [0, 1, 0, 0]
    assert recovery(client, gpu) == 0
    silicon.control("fault 0 row-remap failure")
    silicon.control("power-cycle")
    gpu = client.gpu()
    assert client("nvmlDeviceGetRemappedRows", gpu) == [0, 1, 0, 1]
    histogram = client("nvmlDeviceGetRowRemapperHistogram", gpu)
    assert (histogram["none"], histogram["high"]) == (1, 1)
    code, second = client("symbol", "nvmlDeviceGetRemappedRows_v2", gpu, {"struct": "c_nvmlRemappedRowsInfo_v2_t"})
    assert (code, second["uncActiveRemaps"], second["bfailureOccurred"]) == (0, 1, 1)
    assert [each["value"]["uiVal"] for each in client("nvmlDeviceGetFieldValues", gpu, [142, 143, 144, 145])] == [
        0,
        1,
        0,
        1,
    ]
    assert client.code("nvmlDeviceGetRetiredPagesPendingStatus", gpu) == NOT_SUPPORTED


def test_every_call_of_a_lost_gpu_returns_gpu_is_lost(silicon: Silicon) -> None:
    client, events = listener(silicon)
    gpu, other = client.gpu(0), client.gpu(1)
    instance = client("nvmlDeviceCreateGpuInstance", gpu, 19)
    silicon.control("fault 0 lost")
    for call in (
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetPciInfo",
    ):
        assert client.code(call, gpu) == GPU_IS_LOST
    assert client.code("nvmlGpuInstanceGetInfo", instance) == GPU_IS_LOST
    assert client.code("nvmlDeviceGetHandleByIndex", 0) == GPU_IS_LOST
    assert client("nvmlDeviceGetCount") == 3
    assert client("nvmlDeviceGetName", other)
    assert (XID, 79, NOT_TIED, NOT_TIED) in received(client, events, end=GPU_IS_LOST)
    assert silicon.control("gpu-reset 0")["code"] == GPU_IS_LOST
    silicon.control("driver-reload")
    assert client.code("nvmlDeviceGetHandleByIndex", 0) == GPU_IS_LOST
    silicon.control("power-cycle")
    assert client("nvmlDeviceGetName", client.gpu(0))


def test_other_errors_are_events_with_a_recovery_action(silicon: Silicon) -> None:
    client, events = listener(silicon)
    for word, kind, action in (
        ("retirement-failure", 0x800, 4),
        ("fatal-poison", 0x2000, 1),
        ("unavailable", 0x4000, 1),
    ):
        assert silicon.control(f"fault 0 event {word}")["ok"]
        assert received(client, events) == [
            (kind, 0, NOT_TIED, NOT_TIED),
            (XID, 154, NOT_TIED, NOT_TIED),
            (RECOVERY, action, NOT_TIED, NOT_TIED),
        ]
        assert recovery(client, client.gpu()) == action
        silicon.control("clear 0")


def test_reasons_of_slow_clocks(silicon: Silicon) -> None:
    client = silicon.client()
    gpu, reasons = client.gpu(), "nvmlDeviceGetCurrentClocksEventReasons"
    assert client(reasons, gpu) == 0x1
    for fault, found in (("slowdown hardware", 0x8), ("slowdown power-brake", 0x88), ("thermal", 0x68 | 0x88)):
        silicon.control(f"fault 0 {fault}")
        assert client(reasons, gpu) == found, fault
    silicon.control("clear 0")
    assert client(reasons, gpu) == 0x1


def test_fabric_position_of_a_gpu(bare_silicon: Silicon) -> None:
    extra = (
        "fabric state=3 status=0 cluster=00112233-4455-6677-8899-aabbccddeeff clique=7 health-mask=0x1aa",
        "nvlink 0 version=4 state=active remote=switch address=0000:05:00.0 speed=26562",
    )
    sections = [gpu_section(BOARDS["H100-80"], 0, extra), gpu_section(BOARDS["H100-80"], 1)]
    bare_silicon.load(machine_text(bare_silicon.folder, sections))
    client = bare_silicon.client()

    def reported() -> tuple[int, int, int]:
        found = client.fill(
            "nvmlDeviceGetGpuFabricInfoV", client.gpu(), {"struct": "c_nvmlGpuFabricInfo_v2_t"}, by_reference=True
        )
        return found["state"], found["status"], found["healthMask"]

    for word, found in {
        "not-started": (1, 0, 0x1AA),
        "joining": (2, 0, 0x1AA),
        "failed": (3, 999, 0x1AA),
        "routes": (3, 0, 0x19A),
        "mending": (3, 0, 0x1A6),
        "place": (3, 0, 0x2AA),
        "bandwidth": (3, 0, 0x1A9),
    }.items():
        bare_silicon.control(f"fault 0 fabric {word}")
        assert reported() == found, word
    bare_silicon.control("gpu-reset 0")
    assert reported() == (3, 0, 0x1AA)
    assert "attached to a fabric" in bare_silicon.control("fault 1 fabric failed")["error"]


def test_unplugged_gpu_is_lost_for_open_handles_and_unknown_to_new_processes(silicon: Silicon) -> None:
    client = silicon.client()
    instance = client("nvmlDeviceCreateGpuInstance", client.gpu(1), 19)
    gpu, uuid = client.gpu(1), client("nvmlDeviceGetUUID", client.gpu(1))
    assert silicon.control("unplug 1")["ok"]
    assert client.code("nvmlDeviceGetName", gpu) == GPU_IS_LOST
    assert client.code("nvmlGpuInstanceGetInfo", instance) == GPU_IS_LOST
    assert client("nvmlDeviceGetCount") == 3
    silicon.control("clear")
    silicon.control("power-cycle")
    assert client.code("nvmlDeviceGetHandleByIndex", 1) == GPU_IS_LOST, "only plugging restores the GPU"
    another = silicon.client()
    assert another("nvmlDeviceGetCount") == 2
    assert another("nvmlDeviceGetUUID", another.gpu(1)) != uuid
    assert silicon.control("plug 1")["ok"] and silicon.control("plug 1")["ok"]
    assert silicon.client()("nvmlDeviceGetCount") == 3
    assert client("nvmlDeviceGetUUID", client.gpu(1)) == uuid
    assert silicon.show()["gpus"][1]["gpu_instances"] == []


@pytest.mark.parametrize("branch", BRANCHES)
def test_recovery_action_follows_the_xid_catalog(bare_silicon: Silicon, branch: int) -> None:
    text = machine_text(bare_silicon.folder, [gpu_section(BOARDS["H100-80"], 0)])
    assert bare_silicon.load(text.replace(VERSION, f"{branch}.10.01"))["ok"]
    client = bare_silicon.client()
    assert client("nvmlSystemGetDriverVersion") == f"{branch}.10.01"
    for xid in sorted(set(ROWS) - set(ASKS_FROM)) if branch == BRANCHES[-1] else (46, 119, 140):
        bare_silicon.control(f"fault 0 xid {xid}")
    assert recovery(client, client.gpu()) == 0, "among these are 46, 119, and 140, after which a reset is needed"
    asking = set()
    for xid in ASKS_FROM:
        bare_silicon.control(f"fault 0 xid {xid}")
        if recovery(client, client.gpu()):
            asking.add(xid)
            bare_silicon.control("clear 0")
    assert asking == {xid for xid in ASKS_FROM if asks(xid, branch)}


def test_recovery_actions_of_xids(silicon: Silicon) -> None:
    client = silicon.client()
    for xid, action in {13: 0, 109: 1, 119: 0, 48: 4, 95: 4, 79: 2}.items():
        silicon.control(f"fault 0 xid {xid}")
        assert recovery(client, client.gpu()) == action, xid
        silicon.control("clear 0")


def test_call_fails_at_its_nth_invocation(silicon: Silicon) -> None:
    one, two = silicon.client(), silicon.client()
    gpu = one.gpu()
    silicon.control("fault 0 call nvmlDeviceGetMemoryInfo fail 999 nth 3")
    codes = [client.code("nvmlDeviceGetMemoryInfo", gpu) for client in (one, two, one, two)]
    assert codes == [0, 0, 999, 0]
    assert one.code("nvmlDeviceGetMemoryInfo", one.gpu(1)) == 0
    silicon.control("fault 1 call nvmlDeviceGetName fail 16")
    assert [two.code("nvmlDeviceGetName", two.gpu(1)) for _round in range(2)] == [16, 16]
    silicon.control("clear")
    assert two.code("nvmlDeviceGetName", two.gpu(1)) == 0


def test_call_fault_applies_to_all_versions_or_the_named_version(silicon: Silicon) -> None:
    client = silicon.client()
    silicon.control("fault all call nvmlDeviceGetCount fail 18")
    assert client("symbol", "nvmlDeviceGetCount_v2", {"out": 0})[0] == 18
    silicon.control("fault all call nvmlDeviceGetPciInfo_v3 fail 18")
    assert client.code("nvmlDeviceGetPciInfo", client.gpu()) == 18
    structure = {"struct": "nvmlPciInfo_t"}
    assert client("symbol", "nvmlDeviceGetPciInfo_v2", client.gpu(), structure)[0] == 0
    silicon.control("fault all call nvmlInitWithFlags fail 9")
    fresh = silicon.client(initialize=False)
    assert fresh.code("nvmlInit") == DRIVER_NOT_LOADED
    assert fresh.code("nvmlSystemGetDriverVersion") == 1


def test_slow_call_does_not_delay_other_processes(silicon: Silicon) -> None:
    slow, quick = silicon.client(), silicon.client()
    gpu = slow.gpu()
    silicon.control("fault 0 call nvmlDeviceGetUUID delay 0.7")
    begin = time.monotonic()
    assert slow("nvmlDeviceGetUUID", gpu)
    assert time.monotonic() - begin >= 0.7
    silicon.control("clear")
    silicon.control("fault 0 call nvmlDeviceGetUUID delay 3600")
    slow.send("nvmlDeviceGetUUID", gpu)
    assert quick("nvmlDeviceGetUUID", quick.gpu(1))
    assert quick("nvmlDeviceGetName", quick.gpu(0))
    assert select.select([slow.process.stdout], [], [], 0.3)[0] == []
    silicon.control("clear")
    assert slow.receive()["result"].startswith("GPU-")


def test_hanging_call_delays_no_other_process_and_ends_when_the_fault_is_cleared(silicon: Silicon) -> None:
    stuck, free = silicon.client(), silicon.client()
    gpu = stuck.gpu()
    silicon.control("fault 0 call nvmlDeviceGetUUID hang nth 1")
    stuck.send("nvmlDeviceGetUUID", gpu)
    assert select.select([stuck.process.stdout], [], [], 0.5)[0] == []
    assert free("nvmlDeviceGetUUID", free.gpu(1))
    assert free("nvmlDeviceGetUUID", free.gpu(0))
    silicon.control("fault 1 thermal")
    assert silicon.show()["call_faults"][0]["delay_milliseconds"] == -1
    silicon.control("clear 1")
    assert select.select([stuck.process.stdout], [], [], 0.5)[0] == []
    silicon.control("clear 0")
    assert stuck.receive()["result"].startswith("GPU-")


def test_fault_of_one_gpu_applies_to_lookups_of_that_gpu(silicon: Silicon) -> None:
    client = silicon.client()
    uuid = client("nvmlDeviceGetUUID", client.gpu(1))
    silicon.control("fault 1 call nvmlDeviceGetHandleByIndex fail 999")
    silicon.control("fault 1 call nvmlDeviceGetHandleByUUID fail 16")
    assert client("nvmlDeviceGetCount") == 3
    assert [client.code("nvmlDeviceGetHandleByIndex", index) for index in range(3)] == [0, 999, 0]
    assert client.code("nvmlDeviceGetHandleByUUID", uuid) == 16
    assert client.code("nvmlDeviceGetHandleByPciBusId", "0000:11:00.0") == 0
    silicon.control("clear 1")
    assert client("nvmlDeviceGetUUID", client.gpu(1)) == uuid


def test_call_faults_without_a_device_are_cleared_with_all_faults(silicon: Silicon) -> None:
    silicon.control("fault all call nvmlDeviceGetCount fail 18")
    silicon.control("fault 2 call nvmlDeviceGetName fail 18")
    silicon.control("clear 0,1")
    assert len(silicon.show()["call_faults"]) == 2
    silicon.control("clear all")
    assert silicon.show()["call_faults"] == []


def test_calls_are_counted_by_function_and_by_process(silicon: Silicon) -> None:
    silicon.control("calls reset")
    one, two = silicon.client(), silicon.client()
    reader = silicon.client(user=65534)
    for client, times in ((one, 3), (two, 2), (reader, 5)):
        gpu = client.gpu()
        for _round in range(times):
            client("nvmlDeviceGetName", gpu)
    assert one.code("nvmlDeviceGetName", {"handle": ["device", 4096]}) == INVALID_ARGUMENT
    silicon.show()
    counted = silicon.control("calls")
    assert counted["functions"] == {
        "nvmlInitWithFlags": 2,
        "nvmlDeviceGetHandleByIndex_v2": 2,
        "nvmlDeviceGetName": 6,
    }
    assert counted["calls"] == 10
    assert {entry["pid"]: entry["calls"] for entry in counted["processes"]} == {one.process.pid: 6, two.process.pid: 4}
    assert silicon.control("calls reset") == counted
    assert silicon.control("calls")["calls"] == 0
    one("nvmlDeviceGetCount")
    assert one("fork_and", "nvmlDeviceGetCount")["result"] == 3
    assert sorted(entry["calls"] for entry in silicon.control("calls")["processes"]) == [1, 1]


WRONG_COMMANDS = [
    "fault",
    "fault 0",
    "fault 7 xid 13",
    "fault 0 xid",
    "fault 0 xid -1",
    "fault 0 xid 5000",
    "fault 0 xid 13 9",
    "fault 0 ecc other",
    "fault 2 row-remap",
    "fault 0 process 0",
    "fault 0 call nvmlX fail 0",
    "fault 0 call GetName fail 3",
    "fault 0 call nvmlX delay -1",
    "fault 0 call nvmlX delay 1 nth 0",
    "fault 0 call nvmlX hang 3",
    "calls wrong",
    "fault 0 nvlink 0 down",
    "fault 0 recovery-action 9",
    "fault 0 event",
    "fault 0 event poison",
    "fault 0 slowdown thermal",
    "fault 0 fabric failed",
    "unplug nothing",
    "plug 7",
    "fault 0 wrong",
    "gpu-reset nothing",
    "load",
    "unknown",
    "",
]


def test_invalid_command_is_rejected_and_changes_nothing(silicon: Silicon) -> None:
    before = silicon.show()
    for command in WRONG_COMMANDS:
        answer = silicon.control(command)
        assert not answer["ok"], command
        assert "expected" in answer["error"], command
    assert silicon.show() == before
