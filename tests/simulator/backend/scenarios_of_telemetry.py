# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the telemetry of GPUs and partitions. A faulty GPU does not affect the others' values."""

from __future__ import annotations

import subprocess
import sys

from dra_driver.core.host.system import System
from dra_driver.core.partitioning.rules import Match, Rule, WantedPartition
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.vendors.nvidia.nvml_session import NvidiaDeadlines

from tests.simulator.backend.scenarios_of_faults import until
from tests.simulator.backend.stage import Stage, on

SICK = 2
SOON = 3


@on("8xH100")
def telemetry_of_whole_gpus_equals_nvml(stage: Stage) -> None:
    import pynvml

    gpus = stage.gpus()
    found = {each.uuid: each for each in stage.backend.telemetry(20)}
    assert set(found) == {gpu.uuid for gpu in gpus}
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpus[0].uuid)
    first = found[gpus[0].uuid]
    assert first.device_uuid == first.uuid
    assert first.power == pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    assert first.power_limit == pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000 == 700
    assert first.temperature == pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert (first.memory_used, first.memory_total) == (memory.used, memory.total)
    assert first.utilization == 0
    assert first.clocks["memory"] == pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM) * 1e6
    assert first.energy is not None


@on("8xH100")
def partitions_report_their_memory(stage: Stage) -> None:
    stage.lay_out(Rule(Match(), "static", (WantedPartition("3g.40gb"), WantedPartition("1g.10gb"))))
    gpu = stage.first_gpu()
    assert len(gpu.partitions) == 2
    uuids = {each.uuid for each in gpu.partitions}
    found = {each.uuid: each for each in stage.backend.telemetry(20, uuids) if each.device_uuid == gpu.uuid}
    assert set(found) == {gpu.uuid, *uuids}
    assert found[gpu.uuid].utilization is None  # a GPU in MIG mode has no utilization
    for partition in gpu.partitions:
        total = found[partition.uuid].memory_total
        assert total is not None and 0.9 < total / partition.memory_bytes < 1.1
    gone = gpu.partitions[0]
    stage.control("fault", "7", "call", "nvmlDeviceGetPowerUsage", "fail", "3")
    stage.backend.destroy_partition(gpu.uuid, gone.instance_id)
    found = {each.uuid: each for each in stage.backend.telemetry(20, uuids)}
    assert gone.uuid not in found and len([each for each in found.values() if each.power is None]) == 2


@on("8xH100")
def partition_not_requested_can_be_destroyed_by_other_programs(stage: Stage) -> None:
    stage.lay_out(Rule(Match(), "static", (WantedPartition("3g.40gb"), WantedPartition("1g.10gb"))))
    gpu = stage.first_gpu()
    named, other = gpu.partitions
    stage.backend.telemetry(20, {named.uuid})
    tell = (
        "from dra_driver.core.vendors.registry import create\nfrom dra_driver.core.host.system import System\n"
        f"backend = create('nvidia', System({str(stage.root)!r}))\nbackend.open()\n"
        f"backend.destroy_partition({gpu.uuid!r}, %d)\n"
    )
    done = {
        each.uuid: subprocess.run(
            [sys.executable, "-c", tell % each.instance_id], capture_output=True, text=True, check=False
        )
        for each in (other, named)
    }
    assert done[other.uuid].returncode == 0, done[other.uuid].stderr
    assert "InUse" in done[named.uuid].stderr, "a queried partition is in use, so the driver queries only its own"


@on("8xH100")
def faulty_gpu_is_omitted_and_delays_no_other_gpu(stage: Stage) -> None:
    """The hanging GPU's deadline is an hour away. The other GPUs' values are returned earlier."""
    backend = NvidiaBackend(System(str(stage.root)), NvidiaDeadlines(scan=3600, full_scan=3600))
    backend.open()
    gpus = stage.gpus()
    backend.discover()
    stage.control("fault", str(SICK), "call", "nvmlDeviceGetPowerUsage", "hang")
    found = {each.uuid for each in backend.telemetry(SOON)}
    assert gpus[SICK].uuid not in found and found <= {gpu.uuid for gpu in gpus}
    # A GPU that answers with an error is left out as well.
    stage.control("clear", str(SICK))
    stage.control("fault", "0", "call", "nvmlDeviceGetPowerUsage", "fail", "15")
    until(lambda: {each.uuid for each in backend.telemetry(5)} == {gpu.uuid for gpu in gpus[1:]})
