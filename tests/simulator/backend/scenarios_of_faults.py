# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that a fault of one GPU affects only that GPU, and is reported with its cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from dra_driver.core.errors import DeviceFaulty, NotFound
from dra_driver.core.host.system import System
from dra_driver.core.model import Device, Finding, Placement, healthy_devices
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.vendors.nvidia.nvml_session import NvidiaDeadlines

from tests.simulator.backend.stage import Stage, assert_refused, on

SICK = 3
ALWAYS_READ = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode", "nvmlDeviceGetComputeRunningProcesses_v3")
READ_ONCE = (
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetName",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetBrand",
)
PROFILES = ("nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlDeviceGetGpuInstancePossiblePlacements_v2")
CAUSES = {
    "999": "unknown-error",
    "15": "gpu-lost",
    "16": "reset-required",
    "4": "no-permission",
    "8": "insufficient-power",
    "10": "no-answer",
    "11": "unknown-error",
    "17": "no-permission",
}
SOON = 3  # a deadline that a hanging call always exceeds


def fresh(stage: Stage, **deadlines: float) -> NvidiaBackend:
    """Return a backend that has not scanned yet, like a driver at its start."""
    backend = NvidiaBackend(System(str(stage.root)), NvidiaDeadlines(**deadlines))
    backend.open()
    return backend


def assert_only_one_is_faulty(findings: tuple[Finding, ...], cause: str, what: Any = None) -> Finding:
    assert [finding.index for finding in findings] == list(range(8)), what
    faults = {finding.index: finding.fault for finding in findings if finding.fault}
    assert list(faults) == [SICK] and faults[SICK].cause == cause and faults[SICK].message, (what, faults)
    return findings[SICK]


def ill(findings: tuple[Finding, ...]) -> list[int]:
    return [finding.index for finding in findings if finding.fault]


def works(backend: NvidiaBackend, gpu: Device) -> None:
    """Assert that a GPU changes its mode and creates a partition as usual."""
    backend.set_partitioning(gpu.uuid, True)
    made = backend.create_partition(gpu.uuid, 19, Placement(0, 1))
    assert backend.device(gpu.uuid).partitions == (made,)
    backend.destroy_partition(gpu.uuid, made.instance_id)
    backend.set_partitioning(gpu.uuid, False)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


@on("8xH100")
def faulty_gpu_affects_no_other_gpu(stage: Stage) -> None:
    gpus = stage.gpus()
    for full, functions in ((False, ALWAYS_READ), (True, READ_ONCE + PROFILES)):
        for function in functions:
            stage.control("fault", str(SICK), "call", function, "fail", "999")
            sick = assert_only_one_is_faulty(stage.backend.discover(full), "unknown-error", function)
            assert sick.name == gpus[SICK].describe() and sick.uuid == gpus[SICK].uuid
            assert sick.device is not None and sick.device.health.causes == ("unknown-error",)
            assert sick.device.profiles == gpus[SICK].profiles
            stage.control("clear", str(SICK))
            assert stage.gpus() == gpus
    stage.control("fault", str(SICK), "call", "nvmlDeviceGetMemoryInfo", "fail", "999")
    stage.control("fault", str(SICK), "call", "nvmlDeviceGetMigMode", "fail", "999")
    assert_only_one_is_faulty(stage.backend.discover(), "unknown-error")
    assert assert_refused(DeviceFaulty, stage.backend.device, gpus[SICK].uuid).code == "unknown-error"
    assert assert_refused(DeviceFaulty, stage.backend.set_partitioning, gpus[SICK].uuid, True).code == "unknown-error"
    for gpu in (*gpus[:SICK], *gpus[SICK + 1 :]):
        works(stage.backend, gpu)


@on("8xH100")
def each_error_has_its_cause(stage: Stage) -> None:
    gpus = stage.gpus()
    for code, cause in CAUSES.items():
        stage.control("fault", str(SICK), "call", "nvmlDeviceGetMemoryInfo", "fail", code)
        assert_only_one_is_faulty(stage.backend.discover(), cause, code)
        sick = assert_only_one_is_faulty(fresh(stage).discover(), cause, code)
        assert sick.device is None
        stage.control("clear", str(SICK))
    # An unsupported function is no fault.
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetBrand", "nvmlDeviceGetAddressingMode"):
        stage.control("fault", str(SICK), "call", function, "fail", "3")
    (without,) = [gpu for gpu in healthy_devices(fresh(stage).discover()) if gpu.index == SICK]
    assert "memory" not in without.capacities and without.attributes["brand"] == "Unknown"
    assert "addressingMode" not in without.attributes
    assert without.pci_address == gpus[SICK].pci_address


@on("8xH100")
def gpu_faulty_at_the_start_is_named(stage: Stage) -> None:
    gpus = stage.gpus()
    for function in READ_ONCE:
        stage.control("fault", str(SICK), "call", function, "fail", "16")
        sick = assert_only_one_is_faulty(fresh(stage).discover(), "reset-required", function)
        assert sick.device is None and sick.uuid == gpus[SICK].uuid
        assert sick.name == f"NVIDIA H100 80GB HBM3 {SICK} ({gpus[SICK].uuid}, {gpus[SICK].pci_address})"
        stage.control("clear", str(SICK))
    # Without the driver's files the kernel's files identify it.
    (stage.root / "proc/driver/nvidia/gpus").rename(stage.root / "gpus")
    stage.control("fault", str(SICK), "call", "nvmlDeviceGetName", "fail", "16")
    sick = assert_only_one_is_faulty(fresh(stage).discover(), "reset-required")
    assert sick.name == f"GPU {SICK} ({gpus[SICK].pci_address})" and sick.uuid == ""


@on("8xH100")
def hanging_gpu_affects_no_other_gpu(stage: Stage) -> None:
    backend = fresh(stage, scan=SOON, full_scan=60, change=60)
    gpus = healthy_devices(backend.discover())
    stage.control("fault", str(SICK), "call", "nvmlDeviceGetMigMode", "hang")
    until(lambda: ill(backend.discover()) == [SICK])  # on a host under load other GPUs can miss this short deadline
    sick = assert_only_one_is_faulty(backend.discover(), "no-answer")
    assert sick.device is not None and sick.name == gpus[SICK].describe()
    before = threading.active_count()
    for _scan in range(3):
        assert_only_one_is_faulty(backend.discover(), "no-answer")
    assert threading.active_count() == before
    assert assert_refused(DeviceFaulty, backend.device, gpus[SICK].uuid).code == "no-answer"
    assert_refused(DeviceFaulty, backend.create_partition, gpus[SICK].uuid, 19, Placement(0, 1))
    for gpu in (*gpus[:SICK], *gpus[SICK + 1 :]):
        works(backend, gpu)
    stage.control("clear", str(SICK))
    until(lambda: len(healthy_devices(backend.discover())) == 8)
    works(backend, gpus[SICK])
    assert threading.active_count() == before


@on("8xH100")
def gpu_hanging_at_the_start_affects_no_other_gpu(stage: Stage) -> None:
    backend = fresh(stage, full_scan=SOON)
    stage.control("fault", str(SICK), "call", "nvmlDeviceGetHandleByIndex_v2", "hang")
    until(lambda: ill(backend.discover()) == [SICK])
    sick = assert_only_one_is_faulty(backend.discover(), "no-answer")
    assert sick.device is None and sick.uuid
    assert_only_one_is_faulty(backend.discover(), "no-answer")
    stage.control("clear", str(SICK))
    until(lambda: len(healthy_devices(backend.discover())) == 8)


@on("8xH100")
def gpu_without_a_successful_read_is_not_waited_for(stage: Stage) -> None:
    """The hanging GPU's deadline is an hour away. The other GPUs are found and usable earlier."""
    backend = fresh(stage, full_scan=3600)
    stage.control("fault", str(SICK), "call", "nvmlDeviceGetHandleByIndex_v2", "hang")
    until(lambda: ill(backend.discover(patience=SOON)) == [SICK])
    findings = backend.discover(patience=0.1)
    sick = assert_only_one_is_faulty(findings, "awaited")
    assert sick.device is None and sick.uuid and sick.is_first_read_pending
    for gpu in healthy_devices(findings):
        works(backend, gpu)
    stage.control("clear", str(SICK))
    until(lambda: len(healthy_devices(backend.discover(patience=0.1))) == 8)


@on("8xH100")
def partition_created_after_the_deadline_is_deleted(stage: Stage) -> None:
    backend = fresh(stage, change=2)
    gpu = healthy_devices(backend.discover())[0]
    backend.set_partitioning(gpu.uuid, True)
    stage.control("fault", "0", "call", "nvmlGpuInstanceCreateComputeInstance", "hang")
    error = assert_refused(DeviceFaulty, backend.create_partition, gpu.uuid, 9, Placement(0, 4))
    assert error.code == "no-answer"
    assert ill(backend.discover()) == [0]
    stage.control("clear", "0")
    until(lambda: len(healthy_devices(backend.discover())) == 8)
    assert backend.device(gpu.uuid).partitions == ()
    works(backend, gpu)


@on("8xH100")
def unplugged_gpu_is_forgotten(stage: Stage) -> None:
    gpus = stage.gpus()
    for function in ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMigMode"):
        stage.control("fault", str(SICK), "call", function, "fail", "6")
    # NVML still counts it, so it exists. That it is not found is its fault.
    assert_only_one_is_faulty(stage.backend.discover(full=True), "unknown-error")
    assert_refused(NotFound, stage.backend.device, gpus[SICK].uuid)


@on("8xH100")
def a_gpu_that_reports_no_memory_is_lost_and_not_removed(stage: Stage) -> None:
    """A GPU that shares the host's memory: NVML returns NOT_SUPPORTED for it in any condition."""
    gpus = stage.gpus()
    stage.control("fault", str(SICK), "call", "nvmlDeviceGetMemoryInfo", "fail", "3")
    assert not ill(stage.backend.discover())
    assert stage.backend._why_missing(gpus[SICK]) is None
    stage.control("fault", str(SICK), "call", "nvmlDeviceGetTemperature", "fail", "15")
    assert_only_one_is_faulty(stage.backend.discover(), "gpu-lost")
    reason = stage.backend._why_missing(gpus[SICK])
    assert reason is not None and reason.code == "gpu-lost"
    stage.control("clear")
    stage.gpus()
