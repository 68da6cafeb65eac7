# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the calls that the NVIDIA backend rejects, its rollbacks, and its recoveries."""

from __future__ import annotations

import os
import subprocess
import sys

from dra_driver.core.errors import (
    BackendUnavailable,
    DeviceFaulty,
    DoesNotFit,
    InUse,
    InvalidLayout,
    LayoutFailed,
    NotFound,
    NotPermitted,
    Unsupported,
)
from dra_driver.core.host.system import System
from dra_driver.core.model import Placement, Process, devices_of, healthy_devices
from dra_driver.core.partitioning.layout_execute import execute
from dra_driver.core.partitioning.layout_plan import plan_layout
from dra_driver.core.partitioning.rules import Match, Rule, WantedPartition
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.vendors.registry import create

from tests.simulator.backend.stage import Stage, assert_refused, on, places


@on("8xH100")
def invalid_requests_are_rejected(stage: Stage) -> None:
    gpu = stage.first_gpu()
    assert_refused(Unsupported, stage.backend.create_partition, gpu.uuid, 19, Placement(0, 1))
    gpu = stage.enable_mig()
    assert_refused(NotFound, stage.backend.create_partition, gpu.uuid, 77, Placement(0, 1))
    error = assert_refused(InvalidLayout, stage.backend.create_partition, gpu.uuid, 9, Placement(2, 4))
    assert "0:4, 4:4" in str(error)
    assert_refused(NotFound, stage.backend.destroy_partition, gpu.uuid, 5)
    assert_refused(NotFound, stage.backend.device, "GPU-00000000-0000-0000-0000-000000000000")
    first = stage.backend.create_partition(gpu.uuid, 9, Placement(4, 4))
    error = assert_refused(DoesNotFit, stage.backend.create_partition, gpu.uuid, 14, Placement(4, 2))
    assert isinstance(error, DoesNotFit) and error.blockers == (first,)


MONITOR = """
import sys, pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0))
print("open", flush=True)
sys.stdin.read()
"""


@on("8xH100")
def a_partition_that_a_monitor_has_open_is_in_use_until_the_monitor_ends(stage: Stage) -> None:
    gpu = stage.enable_mig()
    made = stage.backend.create_partition(gpu.uuid, 19, Placement(0, 1))
    with subprocess.Popen(
        [sys.executable, "-c", MONITOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as monitor:
        assert monitor.stdout and monitor.stdout.readline() == "open\n"
        assert_refused(InUse, stage.backend.destroy_partition, gpu.uuid, made.instance_id)
        (left,) = stage.backend.device(gpu.uuid).partitions
        assert left == made
    stage.backend.destroy_partition(gpu.uuid, made.instance_id)
    assert stage.backend.device(gpu.uuid).partitions == ()


@on("1xL4")
def a_board_without_partitioning(stage: Stage) -> None:
    gpu = stage.first_gpu()
    assert not gpu.partitioning.supported and gpu.profiles == () and gpu.memory_slices == 0
    assert_refused(Unsupported, stage.backend.set_partitioning, gpu.uuid, True)
    (only,) = stage.backend.offers(gpu, dynamic=True)
    assert only.kind == "device"


@on("8xH100")
def processes_block_the_removal_of_their_partition(stage: Stage) -> None:
    gpu = stage.enable_mig()
    made = stage.backend.create_partition(gpu.uuid, 19, Placement(0, 1))
    with subprocess.Popen(["sleep", "120"]) as sleeper:
        try:
            (stage.root / f"proc/{sleeper.pid}").mkdir()
            (stage.root / f"proc/{sleeper.pid}/comm").write_text("sleep\n")
            stage.control("fault", "0", "process", str(sleeper.pid), str(made.instance_id), "0", "memory", "512")
            now = stage.backend.device(gpu.uuid)
            assert now.processes == (Process(sleeper.pid, "sleep"),) == now.partitions[0].processes
            error = assert_refused(InUse, stage.backend.destroy_partition, gpu.uuid, made.instance_id)
            assert isinstance(error, InUse) and error.pids == (sleeper.pid,)
            rule = Rule(Match(), "static", (WantedPartition("7g.80gb"),))
            error = assert_refused(InUse, plan_layout, now, rule)
            assert isinstance(error, InUse) and error.pids == (sleeper.pid,)
            assert stage.backend.device(gpu.uuid).partitions[0].uuid == made.uuid
        finally:
            sleeper.kill()
    execute(stage.backend, plan_layout(stage.backend.device(gpu.uuid), rule))
    assert [each.profile for each in stage.backend.device(gpu.uuid).partitions] == ["7g.80gb"]


@on("8xH100")
def a_process_blocks_a_change_of_mode(stage: Stage) -> None:
    gpu = stage.first_gpu()
    with subprocess.Popen(["sleep", "120"]) as sleeper:
        try:
            stage.control("fault", "0", "process", str(sleeper.pid))
            error = assert_refused(InUse, stage.backend.set_partitioning, gpu.uuid, True)
            assert isinstance(error, InUse) and error.pids == (sleeper.pid,)
            state = stage.backend.device(gpu.uuid).partitioning
            assert not state.enabled and not state.pending
        finally:
            sleeper.kill()
    stage.backend.set_partitioning(gpu.uuid, True)


@on("8xH100")
def failed_compute_instance_leaves_no_gpu_instance(stage: Stage) -> None:
    gpu = stage.enable_mig()
    function = "nvmlGpuInstanceCreateComputeInstance"
    for code, kind in (("19", InUse), ("999", DeviceFaulty), ("4", NotPermitted)):
        stage.control("fault", "0", "call", function, "fail", code, "nth", "1")
        assert_refused(kind, stage.backend.create_partition, gpu.uuid, 9, Placement(0, 4))
        assert stage.backend.device(gpu.uuid).partitions == ()
    stage.backend.create_partition(gpu.uuid, 9, Placement(0, 4))


@on("8xH100")
def failed_layout_is_rolled_back(stage: Stage) -> None:
    gpu = stage.enable_mig()
    start = Rule(Match(), "static", (WantedPartition("3g.40gb", 1, 4), WantedPartition("1g.10gb", 2)))
    execute(stage.backend, plan_layout(gpu, start))
    gpu = stage.backend.device(gpu.uuid)
    before = places(gpu)
    wanted = Rule(Match(), "static", (WantedPartition("2g.20gb", 3), WantedPartition("1g.10gb", 1)))
    plan = plan_layout(gpu, wanted)
    for nth in range(1, 4):
        stage.control("fault", "0", "call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "23", "nth", str(nth))
        error = assert_refused(LayoutFailed, execute, stage.backend, plan)
        assert isinstance(error, LayoutFailed) and not error.not_undone and error.undone
        gpu = stage.backend.device(gpu.uuid)
        assert places(gpu) == before
        plan = plan_layout(gpu, wanted)
    execute(stage.backend, plan)


@on("8xH100")
def failed_layout_restores_the_mode(stage: Stage) -> None:
    gpu = stage.first_gpu()
    plan = plan_layout(gpu, Rule(Match(), "static", (WantedPartition("1g.10gb", 7),)))
    stage.control("fault", "0", "call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "23", "nth", "4")
    assert_refused(LayoutFailed, execute, stage.backend, plan)
    assert not stage.backend.device(gpu.uuid).partitioning.enabled


@on("8xH100")
def lost_gpu_is_reported_and_other_gpus_are_listed(stage: Stage) -> None:
    gpus = stage.gpus()
    stage.control("fault", "3", "lost")
    error = assert_refused(DeviceFaulty, stage.backend.device, gpus[3].uuid)
    assert "bus" in str(error)
    assert error.code == "gpu-lost"
    assert_refused(DeviceFaulty, stage.backend.set_partitioning, gpus[3].uuid, True)
    findings = stage.backend.discover()
    after = devices_of(findings)
    assert [gpu.uuid for gpu in after] == [gpu.uuid for gpu in gpus]
    assert [gpu.health.causes for gpu in after] == [("gpu-lost",) if gpu.index == 3 else () for gpu in after]
    assert not after[3].health.healthy
    assert [finding.index for finding in findings if finding.fault] == [3]
    fresh = create("nvidia", System(str(stage.root)))
    fresh.open()
    findings = fresh.discover()
    assert [gpu.index for gpu in healthy_devices(findings)] == [0, 1, 2, 4, 5, 6, 7]
    assert findings[3].device is None and findings[3].fault and findings[3].fault.cause == "gpu-lost"
    assert "GPU 3" in findings[3].describe()
    stage.control("clear")
    assert len(healthy_devices(fresh.discover())) == 8


@on("8xH100")
def changes_need_privileges(stage: Stage) -> None:
    gpu = stage.first_gpu()
    os.seteuid(65534)
    try:
        error = assert_refused(NotPermitted, stage.backend.set_partitioning, gpu.uuid, True)
        assert "root" in str(error)
    finally:
        os.seteuid(0)
    assert not stage.backend.device(gpu.uuid).partitioning.enabled


@on("8xH100")
def backend_is_closed_and_reopened(stage: Stage) -> None:
    before = stage.gpus()
    stage.backend.close()
    assert_refused(BackendUnavailable, stage.backend.discover)
    stage.backend.open()
    stage.backend.open()
    assert stage.gpus() == before


@on("8xH100")
def driver_may_be_installed_later(stage: Stage) -> None:
    stage.control("fault", "all", "call", "nvmlInitWithFlags", "fail", "9", "nth", "1")
    backend = NvidiaBackend(System(str(stage.root)))
    stage.backend.close()
    error = assert_refused(BackendUnavailable, backend.open)
    assert "modprobe nvidia" in str(error)
    assert_refused(BackendUnavailable, backend.discover)
    backend.open()
    assert len(backend.discover()) == 8
