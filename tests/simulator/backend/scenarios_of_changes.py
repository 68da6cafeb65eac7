# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the NVIDIA backend's changes: MIG modes, partitions, and whole layouts, alone and in parallel."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dra_driver.core.errors import (
    AcceleratorError,
    DoesNotFit,
    InUse,
    LayoutFailed,
    NotFound,
    Unsupported,
)
from dra_driver.core.model import Device, Partition, Placement
from dra_driver.core.partitioning.layout_execute import execute
from dra_driver.core.partitioning.layout_plan import LayoutPlan, ResetDevice, plan_layout, plan_layouts
from dra_driver.core.partitioning.rules import Match, Rule, WantedPartition, parse_rules
from dra_driver.core.store.prepared_claims import PreparedPartition
from dra_driver.core.vendors.nvidia.mig_parted import rules_from_mig_parted

from tests.simulator.backend.scenarios_of_fabric import fabric_manager
from tests.simulator.backend.stage import Stage, assert_refused, on, places, record_calls
from tests.unit.core import board_model


@on("8xA100-40")
def a_mode_that_needs_a_reset(stage: Stage) -> None:
    with fabric_manager(stage, 0):
        mode_changes_with_a_reset(stage)


def mode_changes_with_a_reset(stage: Stage) -> None:
    gpu = stage.first_gpu()
    stage.backend.set_partitioning(gpu.uuid, True)
    pending = stage.backend.device(gpu.uuid).partitioning
    assert (pending.enabled, pending.pending, pending.needs_reset) == (False, True, True)
    assert_refused(Unsupported, stage.backend.create_partition, gpu.uuid, 19, Placement(0, 1))
    stage.backend.set_partitioning(gpu.uuid, False)
    assert not stage.backend.device(gpu.uuid).partitioning.pending
    stage.backend.set_partitioning(gpu.uuid, True)
    stage.backend.reset([gpu.uuid])
    assert stage.backend.device(gpu.uuid).partitioning.enabled
    others = stage.gpus()[1:]
    assert not any(other.partitioning.enabled or other.partitioning.pending for other in others)


@on("8xH100")
def mode_is_read_once_for_a_scan_and_the_next_steps(stage: Stage) -> None:
    gpu = stage.first_gpu()
    made: list[Partition] = []

    def steps() -> None:
        stage.backend.device(gpu.uuid)
        stage.backend.set_partitioning(gpu.uuid, True)
        made.append(stage.backend.create_partition(gpu.uuid, 19, Placement(0, 1)))

    calls = record_calls(stage)
    stage.backend.run_on_device(gpu.uuid, steps)
    asked = [function for function, _argument in calls]
    assert asked.count("nvmlDeviceGetMigMode") == 2, "once in the scan, and once after the change"
    assert asked.index("nvmlDeviceSetMigMode") > asked.index("nvmlDeviceGetMigMode")
    stage.backend.destroy_partition(gpu.uuid, made[0].instance_id)
    # A change by another process is detected after a moment.
    head = "from dra_driver.core.vendors.registry import create\nbackend = create('nvidia')\nbackend.open()\n"
    program = f"{head}backend.set_partitioning({gpu.uuid!r}, False)\n"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (
        assert_refused(Unsupported, stage.backend.create_partition, gpu.uuid, 19, Placement(0, 1)).code
        == "partitioning-off"
    )
    # A change that is not detected in time makes the GPU reject the call, without any effect.
    stage.backend._boards.read_mig_mode(gpu.uuid)[0].last_mode = (
        time.monotonic(),
        replace(gpu.partitioning, enabled=True),
    )
    assert_refused(Unsupported, stage.backend.create_partition, gpu.uuid, 19, Placement(0, 1))
    assert stage.backend.device(gpu.uuid).partitions == ()


@on("8xH100")
def capability_major_number_is_constant_while_nvml_is_open(stage: Stage) -> None:
    gpu = stage.enable_mig()
    stage.backend.create_partition(gpu.uuid, 19, Placement(0, 1))
    gpu = stage.backend.device(gpu.uuid)
    file = stage.root / "proc/devices"

    def major() -> int | None:
        return stage.backend.device_edits(gpu, gpu.partitions[0]).device_nodes[-1].major

    found = major()
    said = file.read_text()
    file.unlink()
    file.write_text(said.replace(f"{found} nvidia-caps\n", "411 nvidia-caps\n"))
    assert major() == found
    stage.backend.close()
    stage.backend.open()
    assert major() == 411
    stage.backend.close()
    file.write_text("Character devices:\n195 nvidia\n")
    stage.backend.open()
    assert_refused(NotFound, major)
    file.write_text(said)
    assert major() == found, "a missing number is read again"


@on("4xA30")
def linked_gpus_are_reset_separately_since_ampere(stage: Stage) -> None:
    """A claim on the other GPU of a pair does not prevent a reset, and keeps its partition."""
    first, second, *_others = stage.gpus()
    assert first.linked == (second.pci_address,) and first.resets_alone and not first.reset_blocked
    static = Rule(Match(), "static", (WantedPartition("2g.12gb", 1), WantedPartition("1g.6gb", 2)))
    stage.lay_out(static)
    before = stage.first_gpu().partitions
    held = PreparedPartition("team/train", first.uuid, before[0].uuid)
    wanted: list[tuple[Device, Rule | None]] = [*zip(stage.gpus(), (None, static, None, None))]
    plan = plan_layouts(wanted, prepared=[held])[1]
    assert isinstance(plan, LayoutPlan) and ResetDevice((second.uuid,)) in plan.steps
    execute(stage.backend, plan)
    assert stage.first_gpu().partitions == before
    assert [gpu.partitioning.enabled for gpu in stage.gpus()] == [True, True, False, False]


def before_ampere(stage: Stage) -> None:
    """Give the boards a compute capability below 8.0, so that linked GPUs are reset together."""
    description = stage.root / "var/lib/accelerator-simulator/nvidia.txt"
    description.write_text(description.read_text().replace("compute-capability 8.0", "compute-capability 7.0"))
    reply = ctypes.create_string_buffer(1 << 16)
    command = f"load {description}".encode()
    assert ctypes.CDLL("libnvidia-ml.so.1").acceleratorSimulatorControl(command, reply, len(reply)) == 0, reply.value


@on("4xA30")
def linked_gpus_are_reset_together_before_ampere(stage: Stage) -> None:
    """Partitions that a reset destroys on the other GPU of a pair are restored, or a claim on it prevents the reset."""
    before_ampere(stage)
    first, second, *_others = stage.gpus()
    assert first.linked == (second.pci_address,) and second.linked == (first.pci_address,)
    assert not any(gpu.switched for gpu in stage.gpus())
    static = Rule(Match(), "static", (WantedPartition("2g.12gb", 1), WantedPartition("1g.6gb", 2)))
    stage.lay_out(static)
    gpus = stage.gpus()
    assert [gpu.partitioning.enabled for gpu in gpus] == [True, False, False, False]
    before = places(gpus[0])
    held = PreparedPartition("team/train", first.uuid, gpus[0].partitions[0].uuid)
    wanted: list[tuple[Device, Rule | None]] = [(gpus[0], None), (gpus[1], static), *((gpu, None) for gpu in gpus[2:])]
    outcomes = plan_layouts(wanted, prepared=[held])
    assert isinstance(outcomes[1], InUse) and outcomes[1].claims == ("team/train",)
    stage.control("fault", "1", "call", "nvmlGpuInstanceCreateComputeInstance", "fail", "23", "nth", "2")
    plan = plan_layouts(wanted)[1]
    assert isinstance(plan, LayoutPlan)
    error = assert_refused(LayoutFailed, execute, stage.backend, plan)
    assert isinstance(error, LayoutFailed) and not error.not_undone, error
    gpus = stage.gpus()
    assert places(gpus[0]) == before and [gpu.partitioning.enabled for gpu in gpus] == [True, False, False, False]
    stage.lay_out(static, static)
    gpus = stage.gpus()
    assert places(gpus[0]) == before and board_model.multiset(places(gpus[1])) == board_model.multiset(before)
    stage.lay_out(*[Rule(Match(), "whole")] * 4)
    gpus = stage.gpus()
    assert not any(gpu.partitioning.enabled or gpu.partitioning.pending or gpu.partitions for gpu in gpus)


@on("8xA100-40")
def reset_with_nvswitches_needs_the_fabric_manager(stage: Stage) -> None:
    gpu = stage.first_gpu()
    assert gpu.resets_alone and "nvidia-fabricmanager" in gpu.reset_blocked
    stage.backend.set_partitioning(gpu.uuid, True)
    calls = record_calls(stage)
    error = assert_refused(Unsupported, stage.backend.reset, [gpu.uuid])
    assert error.code == "reset-blocked" and gpu.uuid in str(error) and "nvidia-fabricmanager" in str(error)
    assert not calls, "NVML stays open"
    with fabric_manager(stage, 0):
        assert not any(each.reset_blocked for each in stage.gpus())
        stage.backend.reset([gpu.uuid])
        assert [each.partitioning.enabled for each in stage.gpus()] == [True] + [False] * 7
    assert all(each.reset_blocked for each in stage.gpus())


@on("mixed")
def gpus_without_a_bridge_are_reset_separately(stage: Stage) -> None:
    """Two A30 in one machine, whose NVLinks lead nowhere."""
    a30 = stage.gpus()[2]
    assert a30.resets_alone and not a30.linked and not a30.reset_blocked
    stage.backend.set_partitioning(a30.uuid, True)
    stage.backend.reset([a30.uuid])
    assert [gpu.partitioning.enabled for gpu in stage.gpus()] == [False, False, True, False, False]


@on("8xH100")
def a_mode_that_is_immediate(stage: Stage) -> None:
    gpu = stage.first_gpu()
    stage.backend.set_partitioning(gpu.uuid, True)
    assert stage.backend.device(gpu.uuid).partitioning.enabled
    stage.backend.set_partitioning(gpu.uuid, True)
    made = stage.backend.create_partition(gpu.uuid, 9, Placement(4, 4))
    error = assert_refused(InUse, stage.backend.set_partitioning, gpu.uuid, False)
    assert made.uuid in str(error)
    stage.backend.destroy_partition(gpu.uuid, made.instance_id)
    stage.backend.set_partitioning(gpu.uuid, False)
    assert not stage.backend.device(gpu.uuid).partitioning.enabled


@on("8xH100")
def handles_survive_a_mode_change_by_another_process(stage: Stage) -> None:
    gpu = stage.first_gpu()
    other = f"""
from dra_driver.core.vendors.registry import create
backend = create("nvidia")
backend.open()
state = backend.device({gpu.uuid!r}).partitioning
backend.set_partitioning({gpu.uuid!r}, not state.enabled)
"""
    for wanted in (True, False, True):
        subprocess.run([sys.executable, "-c", other], check=True)
        assert stage.backend.device(gpu.uuid).partitioning.enabled is wanted
    stage.backend.create_partition(gpu.uuid, 0, Placement(0, 8))


@on("8xH100")
def eight_gpus_are_partitioned_in_parallel(stage: Stage) -> None:
    gpus = stage.gpus()
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(gpus))

    def work(gpu: Device) -> None:
        try:
            barrier.wait()
            stage.backend.set_partitioning(gpu.uuid, True)
            for _round in range(3):
                made = [stage.backend.create_partition(gpu.uuid, 19, Placement(start, 1)) for start in range(7)]
                assert len(stage.backend.device(gpu.uuid).partitions) == 7
                for each in made:
                    stage.backend.destroy_partition(gpu.uuid, each.instance_id)
            stage.backend.set_partitioning(gpu.uuid, False)
        except (AcceleratorError, AssertionError) as error:
            errors.append(error)

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(work, gpus))
    assert errors == []
    assert stage.gpus() == gpus


@on("8xH100")
def two_threads_use_one_gpu(stage: Stage) -> None:
    """Two threads request the same placement: one gets it, and the other gets an error that it does not fit."""
    gpu = stage.enable_mig()
    for _round in range(5):
        outcomes: list[object] = []

        def work(outcomes: list[object]) -> None:
            try:
                outcomes.append(stage.backend.create_partition(gpu.uuid, 0, Placement(0, 8)))
            except DoesNotFit as error:
                outcomes.append(error)

        threads = [threading.Thread(target=work, args=(outcomes,)) for _each in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made = [each for each in outcomes if isinstance(each, Partition)]
        assert len(outcomes) == 2 and len(made) == 1
        stage.backend.destroy_partition(gpu.uuid, made[0].instance_id)


@on("8xH100")
def mig_parted_files_are_applied(stage: Stage) -> None:
    document = {
        "version": "v1",
        "mig-configs": {
            "all-balanced": [
                {
                    "device-filter": ["0x233010DE"],
                    "devices": "all",
                    "mig-enabled": True,
                    "mig-devices": {"1c.1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
                }
            ],
            "all-disabled": [{"devices": "all", "mig-enabled": False}],
        },
    }
    for name, expected in (("all-balanced", 4), ("all-disabled", 0)):
        gpus = stage.gpus()
        for gpu, rule in zip(gpus, rules_from_mig_parted(document, name, gpus)):
            execute(stage.backend, plan_layout(gpu, rule))
        assert [len(gpu.partitions) for gpu in stage.gpus()] == [expected] * 8
    assert not any(gpu.partitioning.enabled for gpu in stage.gpus())


@on("8xA100-40")
def layout_rules_are_applied(stage: Stage) -> None:
    with fabric_manager(stage, 0):
        verify_rules_are_applied(stage)


def verify_rules_are_applied(stage: Stage) -> None:
    rules = parse_rules(
        [
            {"match": {"index": 0}, "mode": "static", "partitions": {"3g.20gb": 1, "1g.5gb": 4}},
            {"match": {"index": [1, 2]}, "mode": "dynamic"},
            {"match": {}, "mode": "whole"},
        ]
    )
    for gpu, rule in zip(stage.gpus(), [rules[0], rules[1], rules[1], *itertools.repeat(rules[2], 5)]):
        assert rule.match.matches(gpu)
        execute(stage.backend, plan_layout(gpu, rule))
    after = stage.gpus()
    assert [gpu.partitioning.enabled for gpu in after] == [True] * 3 + [False] * 5
    assert [len(gpu.partitions) for gpu in after] == [5] + [0] * 7
    assert len(stage.backend.offers(after[1], dynamic=True)) == 25
