# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test setters, the values that are read back, and the effect of a power cycle."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_support import (
    ARGUMENT_VERSION_MISMATCH,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    SUCCESS,
    Client,
    Silicon,
    gpu_section,
    machine_text,
)

CLOCKS = (
    "memory-clock 2619 minimum=345 maximum=1980 step=15",
    "memory-clock 1593 minimum=345 maximum=1500 step=15",
    "clocks graphics=345 sm=345 memory=2619 video=765",
    "maximum-clocks graphics=1980 sm=1980 memory=2619 video=1545",
    "temperature gpu=31 shutdown=95 slowdown=92 memory-maximum=95 gpu-maximum=87",
    "persistence yes",
)


@pytest.fixture
def silicon(bare_silicon: Silicon) -> Silicon:
    lower = ("clocks graphics=210 sm=210 memory=6251 video=765", "maximum-clocks graphics=2040 sm=2040 memory=6251")
    sections = [
        gpu_section(BOARDS["H100-80"], 0, CLOCKS),
        gpu_section(BOARDS["L4"], 1, ("fan count=1 speed=40", *lower)),
    ]
    bare_silicon.load(machine_text(bare_silicon.folder, sections))
    return bare_silicon


def test_gpu_without_a_client_loses_its_settings(silicon: Silicon) -> None:
    """Persistence mode keeps them: GPU 0 has it, GPU 1 does not."""

    def limits() -> list[int]:
        return [gpu["power_limit_mw"] // 1000 for gpu in silicon.show()["gpus"]]

    first, second = silicon.client(), silicon.client()
    for index in range(2):
        first("nvmlDeviceSetPowerManagementLimit", first.gpu(index), 200_000)
    first("nvmlShutdown")
    assert limits() == [200, 200]
    second.process.kill()
    second.process.wait()
    assert limits() == [200, 200]  # no process has used the library since
    third = silicon.client()
    assert limits() == [200, 300]
    third("nvmlDeviceSetPowerManagementLimit", third.gpu(1), 200_000)
    third("nvmlShutdown")
    assert limits() == [200, 300]


def test_settings_of_idle_gpus_persist_if_configured(bare_silicon: Silicon) -> None:
    sections = [gpu_section(BOARDS["L4"], 0)]
    bare_silicon.load(machine_text(bare_silicon.folder, sections, ("idle-gpus-keep-settings yes",)))
    client = bare_silicon.client()
    client("nvmlDeviceSetPowerManagementLimit", client.gpu(), 200_000)
    client("nvmlShutdown")
    assert bare_silicon.show()["gpus"][0]["power_limit_mw"] == 200_000


def lost_at_a_power_cycle(
    silicon: Silicon, client: Client, call: str, before: Any, after: Any, *arguments: Any
) -> None:
    assert client(call, client.gpu(), *arguments) == before
    silicon.control("power-cycle")
    assert client(call, client.gpu(), *arguments) == after


def test_power(silicon: Silicon) -> None:
    client = silicon.client()
    gpu = client.gpu()
    assert client("nvmlDeviceGetPowerManagementLimitConstraints", gpu) == [100000, 400000]
    assert client("nvmlDeviceGetPowerManagementDefaultLimit", gpu) == 300000
    assert client("nvmlDeviceGetPowerUsage", gpu) == 60000
    assert client("nvmlDeviceGetPowerManagementMode", gpu) == 1
    assert client.code("nvmlDeviceSetPowerManagementLimit", gpu, 99999) == INVALID_ARGUMENT
    assert client.code("nvmlDeviceSetPowerManagementLimit", gpu, 400001) == INVALID_ARGUMENT
    client("nvmlDeviceSetPowerManagementLimit", gpu, 250000)
    assert client("nvmlDeviceGetEnforcedPowerLimit", gpu) == 250000
    value = {
        "struct": "c_nvmlPowerValue_v2_t",
        "fields": {"version": 0x0200000C, "powerScope": 0, "powerValueMw": 200000},
    }
    assert client("symbol", "nvmlDeviceSetPowerManagementLimit_v2", gpu, value)[0] == SUCCESS
    value["fields"]["powerScope"] = 1  # type: ignore[index]
    assert client("symbol", "nvmlDeviceSetPowerManagementLimit_v2", gpu, value)[0] == NOT_SUPPORTED
    value["fields"]["version"] = 5  # type: ignore[index]
    assert client("symbol", "nvmlDeviceSetPowerManagementLimit_v2", gpu, value)[0] == ARGUMENT_VERSION_MISMATCH
    fields = client("nvmlDeviceGetFieldValues", gpu, [186, 187, 188, 189, 190, 192])
    assert [each["value"]["uiVal"] for each in fields] == [60000, 100000, 400000, 300000, 200000, 200000]
    lost_at_a_power_cycle(silicon, client, "nvmlDeviceGetPowerManagementLimit", 200000, 300000)


def test_energy_is_power_over_time(silicon: Silicon) -> None:
    """The difference of two values matches the GPU's power, for at least the time between the calls and at most the
    time around them.
    """
    client = silicon.client()
    gpu = client.gpu()

    def reading() -> tuple[float, int, float]:
        before = time.time()
        return before, client("nvmlDeviceGetTotalEnergyConsumption", gpu), time.time()

    watts = client("nvmlDeviceGetPowerUsage", gpu) / 1000
    (first_asked, first, first_told) = reading()
    time.sleep(0.2)
    (second_asked, second, second_told) = reading()
    rounding = watts + 1  # one millisecond's energy, and one millijoule
    assert first > 0
    assert watts * (second_asked - first_told) * 1000 - rounding <= second - first
    assert second - first <= watts * (second_told - first_asked) * 1000 + rounding
    (field,) = client("nvmlDeviceGetFieldValues", gpu, [83])
    assert second <= field["value"]["ullVal"] <= second + watts * (time.time() - second_asked) * 1000 + rounding


def test_locked_clocks_limit_the_current_clocks(silicon: Silicon) -> None:
    client = silicon.client()
    gpu = client.gpu()
    assert client("nvmlDeviceGetSupportedMemoryClocks", gpu) == [2619, 1593]
    graphics = client("nvmlDeviceGetSupportedGraphicsClocks", gpu, 1593)
    assert (graphics[0], graphics[-1], len(graphics)) == (1500, 345, 78)
    assert client.code("nvmlDeviceGetSupportedGraphicsClocks", gpu, 1000) == NOT_FOUND
    assert client("nvmlDeviceGetMaxClockInfo", gpu, 0) == 1980
    assert client.code("nvmlDeviceSetGpuLockedClocks", gpu, 1500, 1000) == INVALID_ARGUMENT
    assert client.code("nvmlDeviceSetGpuLockedClocks", gpu, 1500, 9000) == INVALID_ARGUMENT
    client("nvmlDeviceSetGpuLockedClocks", gpu, 900, 1200)
    assert client("nvmlDeviceGetClockInfo", gpu, 1) == 900
    assert client("nvmlDeviceGetClock", gpu, 0, 0) == 900
    shown = silicon.show()["gpus"][0]
    assert (shown["locked_clock_minimum_mhz"], shown["locked_clock_maximum_mhz"]) == (900, 1200)
    client("nvmlDeviceSetApplicationsClocks", gpu, 1593, 1485)
    assert client("nvmlDeviceGetApplicationsClock", gpu, 0) == 1485
    assert client("nvmlDeviceGetCurrentClocksEventReasons", gpu) == 3
    assert client.code("nvmlDeviceSetApplicationsClocks", gpu, 1593, 1486) == INVALID_ARGUMENT
    client("nvmlDeviceResetApplicationsClocks", gpu)
    assert (
        client("nvmlDeviceGetApplicationsClock", gpu, 2)
        == client("nvmlDeviceGetDefaultApplicationsClock", gpu, 2)
        == 2619
    )
    lost_at_a_power_cycle(silicon, client, "nvmlDeviceGetClockInfo", 900, 345, 0)
    client("nvmlDeviceSetGpuLockedClocks", client.gpu(), 900, 900)
    client("nvmlDeviceResetGpuLockedClocks", client.gpu())
    assert client("nvmlDeviceGetClockInfo", client.gpu(), 0) == 345


def test_memory_clocks_are_locked_from_ampere_on_and_not_on_hopper(silicon: Silicon) -> None:
    client = silicon.client()
    hopper, ada = client.gpu(), client.gpu(1)
    assert client.code("nvmlDeviceSetMemoryLockedClocks", hopper, 1000, 1593) == NOT_SUPPORTED
    assert client.code("nvmlDeviceResetMemoryLockedClocks", hopper) == NOT_SUPPORTED
    client("nvmlDeviceSetMemoryLockedClocks", ada, 405, 810)
    assert client("nvmlDeviceGetClockInfo", ada, 2) == 810
    client("nvmlDeviceResetMemoryLockedClocks", ada)
    assert client("nvmlDeviceGetClockInfo", ada, 2) == 6251


def test_compute_persistence_and_ecc_modes(silicon: Silicon) -> None:
    client = silicon.client()
    gpu = client.gpu()
    for mode in (3, 2, 0, 3):
        client("nvmlDeviceSetComputeMode", gpu, mode)
        assert client("nvmlDeviceGetComputeMode", gpu) == mode
    assert client.code("nvmlDeviceSetComputeMode", gpu, 1) == NOT_SUPPORTED
    assert client.code("nvmlDeviceSetComputeMode", gpu, 4) == INVALID_ARGUMENT
    lost_at_a_power_cycle(silicon, client, "nvmlDeviceGetComputeMode", 3, 0)
    client("nvmlDeviceSetPersistenceMode", client.gpu(), 0)
    lost_at_a_power_cycle(silicon, client, "nvmlDeviceGetPersistenceMode", 0, 1)
    gpu = client.gpu()
    client("nvmlDeviceSetEccMode", gpu, 0)
    assert client("nvmlDeviceGetEccMode", gpu) == [1, 0]
    assert client("nvmlDeviceGetDefaultEccMode", gpu) == [1]
    silicon.control("gpu-reset 0")
    assert client("nvmlDeviceGetEccMode", client.gpu()) == [0, 0]
    silicon.control("power-cycle")
    gpu = client.gpu()
    assert client("nvmlDeviceGetEccMode", gpu) == [0, 0]
    assert client.code("nvmlDeviceGetTotalEccErrors", gpu, 0, 0) == NOT_SUPPORTED
    client("nvmlDeviceSetAccountingMode", gpu, 1)
    assert client("nvmlDeviceGetAccountingMode", gpu) == 1
    assert client("nvmlDeviceGetAccountingPids", gpu) == []
    assert client("nvmlDeviceGetAccountingBufferSize", gpu) == 4000
    assert client("nvmlDeviceGetVirtualizationMode", gpu) == 0
    assert client("nvmlDeviceGetAPIRestriction", gpu, 0) == 1
    assert client("nvmlDeviceGetPerformanceState", gpu) == client("nvmlDeviceGetPowerState", gpu) == 0


def test_gpu_in_mig_mode_supports_fewer_calls(silicon: Silicon) -> None:
    client = silicon.client()
    assert client("nvmlDeviceGetUtilizationRates", client.gpu()) == {"gpu": 0, "memory": 0}
    for call in ("Encoder", "Decoder", "Jpg", "Ofa"):
        assert client(f"nvmlDeviceGet{call}Utilization", client.gpu())[0] == 0
    client("nvmlDeviceSetMigMode", client.gpu(), 1)
    gpu = client.gpu()
    assert client.code("nvmlDeviceGetUtilizationRates", gpu) == NOT_SUPPORTED
    assert client.code("nvmlDeviceSetComputeMode", gpu, 3) == NOT_SUPPORTED
    compute = client("nvmlGpuInstanceCreateComputeInstance", client("nvmlDeviceCreateGpuInstance", gpu, 9), 2)
    device = client("nvmlComputeInstanceGetInfo", compute)["device"]
    client("nvmlDeviceSetComputeMode", device, 3)
    assert client("nvmlDeviceGetComputeMode", device) == 3
    assert client.code("nvmlDeviceSetPowerManagementLimit", device, 200000) == NOT_SUPPORTED
    assert client.code("nvmlDeviceGetFieldValues", device, [230]) == NOT_SUPPORTED
    assert client("nvmlDeviceGetPciInfo", device)["busId"] == "00000000:10:00.0"


def test_temperatures_and_fans(silicon: Silicon) -> None:
    client = silicon.client()
    gpu, other = client.gpu(0), client.gpu(1)
    assert client("nvmlDeviceGetTemperature", gpu, 0) == 31
    assert client("nvmlDeviceGetTemperatureV", gpu, 0) == 31
    assert [client("nvmlDeviceGetTemperatureThreshold", gpu, which) for which in range(4)] == [95, 92, 95, 87]
    assert client.code("nvmlDeviceGetTemperatureThreshold", gpu, 5) == NOT_SUPPORTED
    assert client.code("nvmlDeviceGetTemperatureThreshold", gpu, 9) == INVALID_ARGUMENT
    assert client("nvmlDeviceGetMarginTemperature", gpu) == 61
    assert client("nvmlDeviceGetNumFans", gpu) == 0
    assert client.code("nvmlDeviceGetFanSpeed", gpu) == NOT_SUPPORTED
    assert client("nvmlDeviceGetFanSpeed", other) == client("nvmlDeviceGetFanSpeed_v2", other, 0) == 40
    assert client.code("nvmlDeviceGetFanSpeed_v2", other, 1) == INVALID_ARGUMENT
    silicon.control("fault 0 thermal")
    assert client("nvmlDeviceGetTemperature", gpu, 0) == 93
    assert client("nvmlDeviceGetCurrentClocksEventReasons", gpu) == 0x68
    assert client("nvmlDeviceGetCurrentClocksThrottleReasons", gpu) == 0x68
    assert client("nvmlDeviceGetSupportedClocksEventReasons", gpu) == 0x1FF
    assert client("nvmlDeviceGetViolationStatus", gpu, 1)["violationTime"] > 0
    assert client("nvmlDeviceGetPcieThroughput", gpu, 0) == 0


PROFILES = (
    "workload-profile 0 priority=0 conflicts=0x2",
    "workload-profile 1 priority=1 conflicts=0x1",
    "workload-profile 7 priority=2",
)
CURRENT, REQUESTED = (f"c_nvmlWorkloadPowerProfile{which}Profiles_v1_t" for which in ("Current", "Requested"))


def bits(mask: dict[str, Any]) -> set[int]:
    return {32 * index + bit for index, word in enumerate(mask["mask"]) for bit in range(32) if word >> bit & 1}


def profiles(client: Client) -> tuple[set[int], ...]:
    """Return the board's, the requested, and the enforced profiles."""
    current = client.fill(
        "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles", client.gpu(), {"struct": CURRENT}, by_reference=True
    )
    return tuple(bits(current[f"{which}ProfilesMask"]) for which in ("perf", "requested", "enforced"))


def request(client: Client, what: str, *numbers: int, code: int = SUCCESS, first: int = 0x01000024) -> None:
    """Make a call with a first word (mostly the version), and a bit for each number."""
    assert client("masked", f"nvmlDeviceWorkloadPowerProfile{what}", client.gpu(), first, list(numbers)) == code


def test_conflicting_workload_profiles_apply_only_one(bare_silicon: Silicon) -> None:
    silicon = bare_silicon
    sections = [gpu_section(BOARDS["B200"], 0, PROFILES), gpu_section(BOARDS["H100-80"], 1)]
    silicon.load(machine_text(silicon.folder, sections))
    client = silicon.client()
    assert profiles(client) == ({0, 1, 7}, set(), set())
    request(client, "SetRequestedProfiles", 1)
    request(client, "SetRequestedProfiles", 7)
    assert profiles(client)[1:] == ({1, 7}, {1, 7})
    request(client, "SetRequestedProfiles", 0)
    assert profiles(client)[1:] == ({0, 1, 7}, {0, 7})
    request(client, "ClearRequestedProfiles", 0, 7)
    assert profiles(client)[1:] == ({1}, {1})
    assert silicon.show()["gpus"][0]["workload_profiles_requested"] == 2
    for number in (2, 33):
        request(client, "SetRequestedProfiles", number, code=INVALID_ARGUMENT)
    request(client, "SetRequestedProfiles", 1, code=ARGUMENT_VERSION_MISMATCH, first=1)
    for operation, requested in ((1, {0, 1}), (2, {0}), (0, set())):
        request(client, "UpdateProfiles_v1", 0, first=operation)
        assert profiles(client)[1] == requested
    request(client, "UpdateProfiles_v1", 0, first=3, code=INVALID_ARGUMENT)
    request(client, "SetRequestedProfiles", 1)
    silicon.control("power-cycle")
    assert profiles(client)[1] == set()
    info = client.fill(
        "nvmlDeviceWorkloadPowerProfileGetProfilesInfo",
        client.gpu(),
        {"struct": "c_nvmlWorkloadPowerProfileProfilesInfo_v1_t"},
        by_reference=True,
    )
    assert bits(info["perfProfilesMask"]) == {0, 1, 7}
    assert [info["perfProfile"][number]["priority"] for number in (0, 1, 7)] == [0, 1, 2]
    assert bits(info["perfProfile"][1]["conflictingmask"]) == {0}
    other = {"struct": CURRENT}
    assert (
        client("symbol", "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles", client.gpu(1), other)[0] == NOT_SUPPORTED
    )


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("workload-profile 32 priority=0", "the number of a workload power profile, each once, 0 to 31"),
        ("workload-profile 0 priority=0 conflicts=0x4", "conflict with ones of the same board"),
        ("workload-profile 0", "priority"),
    ],
)
def test_invalid_workload_profile_is_rejected(bare_silicon: Silicon, statement: str, said: str) -> None:
    path = bare_silicon.folder / "wrong.machine"
    path.write_text(machine_text(bare_silicon.folder, [gpu_section(BOARDS["B200"], 0, (statement,))]))
    assert said in bare_silicon.control(f"load {path}")["error"]


def test_the_compute_policy_has_its_own_command(silicon: Silicon) -> None:
    assert silicon.control("timeslice 0")["timeslice"] == [0]
    assert silicon.control("timeslice 0 3")["ok"]
    assert silicon.control("timeslice all")["timeslice"] == [3, 0]
    assert silicon.control("timeslice 0 4")["code"] == INVALID_ARGUMENT
    silicon.control("power-cycle")
    assert silicon.control("timeslice 0")["timeslice"] == [0]


def test_confidential_computing(silicon: Silicon) -> None:
    client = silicon.client()
    assert client("nvmlSystemGetConfComputeCapabilities")["gpusCaps"] == 0
    assert client("nvmlSystemGetConfComputeState")["ccFeature"] == 0
    assert client.code("nvmlSystemGetConfComputeGpusReadyState") == NOT_SUPPORTED
    silicon.load(machine_text(silicon.folder, [gpu_section(BOARDS["H100-80"], 0)], ("confidential-computing yes",)))
    client = silicon.client()
    assert client("nvmlSystemGetConfComputeCapabilities")["gpusCaps"] == 1
    client("nvmlSystemSetConfComputeGpusReadyState", 1)
    assert client("nvmlSystemGetConfComputeGpusReadyState") == 1
    settings = {"struct": "c_nvmlSystemConfComputeSettings_v1_t"}
    assert client("symbol", "nvmlSystemGetConfComputeSettings", settings)[0] == SUCCESS
    assert silicon.control("fault all confidential-computing on")["ok"]
    assert client("nvmlSystemGetConfComputeState")["ccFeature"] == 1
    assert client("nvmlSystemGetConfComputeGpusReadyState") == 0
    assert silicon.control("fault all confidential-computing protected-pcie")["ok"]
    assert client("nvmlSystemGetConfComputeState")["ccFeature"] == 0
    assert client("symbol", "nvmlSystemGetConfComputeSettings", settings)[1]["multiGpuMode"] == 1
    silicon.control("clear")
    assert client("nvmlSystemGetConfComputeState")["ccFeature"] == 0
    assert client("symbol", "nvmlSystemGetConfComputeSettings", settings)[1]["multiGpuMode"] == 0
