# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the NVIDIA backend does on NVML. Each scenario runs in a process of its own, started by backend_test.py."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dra_driver.core.backend import create
from dra_driver.core.errors import (
    AcceleratorError,
    BackendUnavailable,
    DeviceLost,
    DoesNotFit,
    InUse,
    InvalidLayout,
    LayoutFailed,
    NotFound,
    NotPermitted,
    Unsupported,
)
from dra_driver.core.layout import (
    LayoutPlan,
    Match,
    Rule,
    WantedPartition,
    execute,
    parse_rules,
    plan_layout,
    plan_layouts,
    rules_from_mig_parted,
)
from dra_driver.core.model import Device, Partition, Placement, Process, Version
from dra_driver.core.nvidia.backend import NvidiaBackend
from dra_driver.core.prepared import PreparedPartition
from dra_driver.core.slices import build_pool
from dra_driver.core.system import System

from tests.simulator.backend.gpu_machine import LIBRARY_FOLDER, SIMULATOR
from tests.unit.core import board_model

SCENARIOS: dict[str, tuple[str, Callable[[Stage], None]]] = {}


class Stage:
    """The machine as a scenario sees it, with a backend that is open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.backend = NvidiaBackend(System(str(root)))

    def control(self, *words: str) -> None:
        program = "import sys; from gpu_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
        arguments = ["--root", str(self.root), *words]
        environment = {**os.environ, "PYTHONPATH": str(SIMULATOR)}
        subprocess.run(
            [sys.executable, "-c", program, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL
        )

    def first(self) -> Device:
        return self.backend.discover()[0]

    def lay_out(self, *rules: Rule) -> None:
        """Bring the first GPUs to these rules, together with the GPUs that are reset along with them."""
        for outcome in plan_layouts(list(itertools.zip_longest(self.backend.discover(), rules))):
            assert isinstance(outcome, LayoutPlan), outcome
            execute(self.backend, outcome)

    def enabled(self) -> Device:
        """The first GPU with partitioning on."""
        gpu = self.first()
        self.lay_out(Rule(Match(), "static"))
        gpu = self.backend.device(gpu.uuid)
        assert gpu.partitioning.enabled and gpu.partitioning.pending and gpu.partitions == ()
        return gpu


def on(machine: str) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    def register(scenario: Callable[[Stage], None]) -> Callable[[Stage], None]:
        SCENARIOS[scenario.__name__] = (machine, scenario)
        return scenario

    return register


def refused(kind: type[AcceleratorError], action: Callable[..., Any], *arguments: Any) -> AcceleratorError:
    try:
        action(*arguments)
    except AcceleratorError as error:
        assert error.__class__ is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
        assert str(error)
        return error
    raise AssertionError(f"{action} was not refused")


def recorded(stage: Stage) -> list[tuple[str, Any]]:
    """Record the calls of NVML from now on, by function and last argument."""
    calls: list[tuple[str, Any]] = []
    original = stage.backend._nvml.call

    def recording(function: str, *arguments: Any, doing: str = "") -> Any:
        calls.append((function, arguments[-1] if arguments else None))
        return original(function, *arguments, doing=doing)

    stage.backend._nvml.call = recording  # type: ignore[method-assign]
    return calls


def places(gpu: Device) -> tuple[board_model.Place, ...]:
    return tuple(sorted((each.profile_id, each.placement.start) for each in gpu.partitions))


def same_profiles(gpu: Device, name: str) -> None:
    expected = {profile.profile_id: profile for profile in board_model.profiles(name)}
    assert {profile.profile_id for profile in gpu.profiles} == set(expected)
    for profile in gpu.profiles:
        wanted = expected[profile.profile_id]
        assert (
            profile.name,
            dict(profile.capacities),
            profile.placements,
            profile.maximum,
            profile.compute_slices,
        ) == (
            wanted.name,
            dict(wanted.capacities),
            wanted.placements,
            wanted.maximum,
            wanted.compute_slices,
        ), (profile, wanted)
        assert profile.memory_bytes == wanted.memory_bytes and set(profile.aliases) == set(wanted.aliases)


@on("8xH100")
def facts_of_a_server(stage: Stage) -> None:
    gpus = stage.backend.discover()
    assert [gpu.index for gpu in gpus] == list(range(8)) and len({gpu.uuid for gpu in gpus}) == 8
    reference = board_model.device("h100-80")
    for gpu in gpus:
        same_profiles(gpu, "h100-80")
        for name in (
            "vendor",
            "product",
            "memory_bytes",
            "memory_slices",
            "pci_device_id",
            "pci_subsystem_id",
            "health",
        ):
            assert getattr(gpu, name) == getattr(reference, name), name
        assert gpu.partitioning == reference.partitioning and not gpu.processes
        assert set(gpu.attributes) == set(reference.attributes)
        for name in ("productName", "brand", "architecture", "cudaComputeCapability", "addressingMode"):
            assert gpu.attributes[name] == reference.attributes[name], name
        assert gpu.attributes["driverVersion"] == Version("580.95.5")
        assert gpu.attributes["cudaDriverVersion"] == Version("13.0.0")
        assert gpu.attributes["resource.kubernetes.io/pciBusID"] == gpu.pci_address
        assert gpu == stage.backend.device(gpu.uuid)
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [gpu.pcie_root for gpu in gpus] == sorted(["pci0000:15", "pci0000:48", "pci0000:97", "pci0000:c7"] * 2)
    assert stage.backend.driver_version == "580.95.05"


@on("mixed")
def facts_of_different_boards(stage: Stage) -> None:
    by_product = {
        board_model.board(name)["name"]: name for name in board_model.board_names() + board_model.board_names(mig=False)
    }
    gpus = stage.backend.discover()
    assert len({gpu.product for gpu in gpus}) > 2
    for gpu in gpus:
        name = by_product[gpu.product]
        same_profiles(gpu, name)
        assert gpu.partitioning.supported == board_model.board(name)["mig"]["capable"]
        assert gpu.pci_device_id == board_model.device(name).pci_device_id
        build_pool(
            driver="gpu.nvidia.com",
            pool="n",
            node_name="n",
            offers=stage.backend.offers(gpu, dynamic=True),
            counter_sets=[stage.backend.counter_set(gpu)],
        )


def every_place(stage: Stage) -> None:
    gpu = stage.enabled()
    places_of: dict[Placement, set[str]] = {}
    for profile in gpu.profiles:
        for placement in profile.placements:
            made = stage.backend.create_partition(gpu.uuid, profile.profile_id, placement)
            now = stage.backend.device(gpu.uuid)
            assert now.partitions == (made,)
            assert made.key == (profile.profile_id, placement.start, placement.size)
            assert made.profile == profile.name and made.compute_instances == 1 and made.compute_instance_id == 0
            assert dict(made.capacities) == dict(profile.capacities) and made.uuid.startswith("MIG-")
            (offer,) = stage.backend.offers(now, dynamic=False)
            assert offer.partition_uuid == made.uuid
            possible = {each.name for each in stage.backend.offers(gpu, dynamic=True)}
            assert offer.name in possible
            nodes = stage.backend.device_edits(now, made).device_nodes
            assert [node.path.rpartition("/")[2][:10] for node in nodes[:3]] == [
                f"nvidia{gpu.minor}",
                "nvidia-cap",
                "nvidia-cap",
            ]
            places_of.setdefault(placement, set()).add(made.uuid)
            stage.backend.destroy_partition(gpu.uuid, made.instance_id)
    assert set(places_of) == {placement for profile in gpu.profiles for placement in profile.placements}
    # The vendor's UUID goes by the place: later partitions there may have it again, others elsewhere never.
    assert sum(map(len, places_of.values())) == len(set().union(*places_of.values()))
    assert stage.backend.device(gpu.uuid).partitions == ()


for _machine in ("4xA30", "8xA100-40", "8xH100", "8xH200", "8xB200", "4xGB200", "2xRTX-PRO-6000"):
    SCENARIOS[f"every_place_on_{_machine}"] = (_machine, every_place)


def random_layouts(stage: Stage) -> None:
    """Layouts one after the other: each plan disturbs the fewest, and NVML has what was planned."""
    gpu = stage.enabled()
    by_product = {board_model.board(name)["name"]: name for name in board_model.board_names()}
    name = by_product[gpu.product]
    states = board_model.all_states(name)
    names = {profile.profile_id: profile.name for profile in gpu.profiles}
    rng = random.Random(7)
    for _round in range(25):
        target = board_model.multiset(rng.choice(states))
        before = set(places(gpu))
        uuids = {each.key: each.uuid for each in gpu.partitions}
        rule = Rule(Match(), "static", tuple(WantedPartition(names[profile], count) for profile, count in target))
        plan = plan_layout(gpu, rule)
        least = min(len(before - set(state)) for state in states if board_model.multiset(state) == target)
        results = execute(stage.backend, plan)
        gpu = stage.backend.device(gpu.uuid)
        assert board_model.multiset(places(gpu)) == target
        assert len(before - set(places(gpu))) <= least
        assert all(uuids[each.key] == each.uuid for each in plan.kept)
        assert len(results) == len(plan.steps)
        assert plan_layout(gpu, rule).steps == ()
    stage.lay_out(Rule(Match(), "whole"))
    gpu = stage.backend.device(gpu.uuid)
    assert not gpu.partitioning.enabled and not gpu.partitioning.pending and gpu.partitions == ()


for _machine in ("4xA30", "8xA100-40", "8xH100", "2xRTX-PRO-6000"):
    SCENARIOS[f"random_layouts_on_{_machine}"] = (_machine, random_layouts)


def counters_and_hardware_agree(stage: Stage) -> None:
    """What the counters accept can be created, what they refuse is refused by NVML."""
    gpu = stage.enabled()
    possible = [offer for offer in stage.backend.offers(gpu, dynamic=True) if offer.kind == "partition"]
    rng = random.Random(11)
    for _round in range(12):
        left = dict(stage.backend.counter_set(gpu).counters)
        made: list[Partition] = []
        rng.shuffle(possible)
        for offer in possible:
            assert offer.profile_id is not None and offer.placement is not None
            fits = all(amount <= left[counter] for counter, amount in offer.consumes.items())
            if fits:
                made.append(stage.backend.create_partition(gpu.uuid, offer.profile_id, offer.placement))
                for counter, amount in offer.consumes.items():
                    left[counter] -= amount
            else:
                refused(DoesNotFit, stage.backend.create_partition, gpu.uuid, offer.profile_id, offer.placement)
        for each in made:
            stage.backend.destroy_partition(gpu.uuid, each.instance_id)


for _machine in ("4xA30", "8xA100-40", "8xH100", "8xB200", "2xRTX-PRO-6000"):
    SCENARIOS[f"counters_and_hardware_agree_on_{_machine}"] = (_machine, counters_and_hardware_agree)


@on("8xA100-40")
def a_mode_that_needs_a_reset(stage: Stage) -> None:
    gpu = stage.first()
    stage.backend.set_partitioning(gpu.uuid, True)
    pending = stage.backend.device(gpu.uuid).partitioning
    assert (pending.enabled, pending.pending, pending.needs_reset) == (False, True, True)
    refused(Unsupported, stage.backend.create_partition, gpu.uuid, 19, Placement(0, 1))
    stage.backend.set_partitioning(gpu.uuid, False)
    assert not stage.backend.device(gpu.uuid).partitioning.pending
    stage.backend.set_partitioning(gpu.uuid, True)
    stage.backend.reset([gpu.uuid])
    assert stage.backend.device(gpu.uuid).partitioning.enabled
    others = stage.backend.discover()[1:]
    assert not any(other.partitioning.enabled or other.partitioning.pending for other in others)


@on("4xA30")
def linked_gpus_are_reset_together(stage: Stage) -> None:
    """What a reset takes from the other GPU of a pair is there again afterwards, or the claim on it is respected."""
    first, second, *_others = stage.backend.discover()
    assert first.linked == (second.pci_address,) and second.linked == (first.pci_address,)
    static = Rule(Match(), "static", (WantedPartition("2g.12gb", 1), WantedPartition("1g.6gb", 2)))
    stage.lay_out(static)
    gpus = stage.backend.discover()
    assert [gpu.partitioning.enabled for gpu in gpus] == [True, False, False, False]
    before = places(gpus[0])
    held = PreparedPartition("team/train", first.uuid, gpus[0].partitions[0].uuid)
    wanted: list[tuple[Device, Rule | None]] = [(gpus[0], None), (gpus[1], static), *((gpu, None) for gpu in gpus[2:])]
    outcomes = plan_layouts(wanted, prepared=[held])
    assert isinstance(outcomes[1], InUse) and outcomes[1].claims == ("team/train",)
    stage.control("fault", "1", "call", "nvmlGpuInstanceCreateComputeInstance", "fail", "23", "nth", "2")
    plan = plan_layouts(wanted)[1]
    assert isinstance(plan, LayoutPlan)
    error = refused(LayoutFailed, execute, stage.backend, plan)
    assert isinstance(error, LayoutFailed) and not error.not_undone, error
    gpus = stage.backend.discover()
    assert places(gpus[0]) == before and [gpu.partitioning.enabled for gpu in gpus] == [True, False, False, False]
    stage.lay_out(static, static)
    gpus = stage.backend.discover()
    assert places(gpus[0]) == before and board_model.multiset(places(gpus[1])) == board_model.multiset(before)
    stage.lay_out(*[Rule(Match(), "whole")] * 4)
    gpus = stage.backend.discover()
    assert not any(gpu.partitioning.enabled or gpu.partitioning.pending or gpu.partitions for gpu in gpus)


@on("8xH100")
def a_mode_that_is_immediate(stage: Stage) -> None:
    gpu = stage.first()
    stage.backend.set_partitioning(gpu.uuid, True)
    assert stage.backend.device(gpu.uuid).partitioning.enabled
    stage.backend.set_partitioning(gpu.uuid, True)
    made = stage.backend.create_partition(gpu.uuid, 9, Placement(4, 4))
    error = refused(InUse, stage.backend.set_partitioning, gpu.uuid, False)
    assert made.uuid in str(error)
    stage.backend.destroy_partition(gpu.uuid, made.instance_id)
    stage.backend.set_partitioning(gpu.uuid, False)
    assert not stage.backend.device(gpu.uuid).partitioning.enabled


@on("8xH100")
def what_is_wrong_is_refused(stage: Stage) -> None:
    gpu = stage.first()
    refused(Unsupported, stage.backend.create_partition, gpu.uuid, 19, Placement(0, 1))
    gpu = stage.enabled()
    refused(NotFound, stage.backend.create_partition, gpu.uuid, 77, Placement(0, 1))
    error = refused(InvalidLayout, stage.backend.create_partition, gpu.uuid, 9, Placement(2, 4))
    assert "0:4, 4:4" in str(error)
    refused(NotFound, stage.backend.destroy_partition, gpu.uuid, 5)
    refused(NotFound, stage.backend.device, "GPU-00000000-0000-0000-0000-000000000000")
    first = stage.backend.create_partition(gpu.uuid, 9, Placement(4, 4))
    error = refused(DoesNotFit, stage.backend.create_partition, gpu.uuid, 14, Placement(4, 2))
    assert isinstance(error, DoesNotFit) and error.blockers == (first,)


@on("1xL4")
def a_board_without_partitioning(stage: Stage) -> None:
    gpu = stage.first()
    assert not gpu.partitioning.supported and gpu.profiles == () and gpu.memory_slices == 0
    refused(Unsupported, stage.backend.set_partitioning, gpu.uuid, True)
    (only,) = stage.backend.offers(gpu, dynamic=True)
    assert only.kind == "device"


@on("8xH100")
def processes_hold_what_they_use(stage: Stage) -> None:
    gpu = stage.enabled()
    made = stage.backend.create_partition(gpu.uuid, 19, Placement(0, 1))
    with subprocess.Popen(["sleep", "120"]) as sleeper:
        try:
            (stage.root / f"proc/{sleeper.pid}").mkdir()
            (stage.root / f"proc/{sleeper.pid}/comm").write_text("sleep\n")
            stage.control("fault", "0", "process", str(sleeper.pid), str(made.instance_id), "0", "memory", "512")
            now = stage.backend.device(gpu.uuid)
            assert now.processes == (Process(sleeper.pid, "sleep"),) == now.partitions[0].processes
            error = refused(InUse, stage.backend.destroy_partition, gpu.uuid, made.instance_id)
            assert isinstance(error, InUse) and error.pids == (sleeper.pid,)
            rule = Rule(Match(), "static", (WantedPartition("7g.80gb"),))
            error = refused(InUse, plan_layout, now, rule)
            assert isinstance(error, InUse) and error.pids == (sleeper.pid,)
            assert stage.backend.device(gpu.uuid).partitions[0].uuid == made.uuid
        finally:
            sleeper.kill()
    execute(stage.backend, plan_layout(stage.backend.device(gpu.uuid), rule))
    assert [each.profile for each in stage.backend.device(gpu.uuid).partitions] == ["7g.80gb"]


@on("8xH100")
def a_process_blocks_a_change_of_mode(stage: Stage) -> None:
    gpu = stage.first()
    with subprocess.Popen(["sleep", "120"]) as sleeper:
        try:
            stage.control("fault", "0", "process", str(sleeper.pid))
            error = refused(InUse, stage.backend.set_partitioning, gpu.uuid, True)
            assert isinstance(error, InUse) and error.pids == (sleeper.pid,)
            state = stage.backend.device(gpu.uuid).partitioning
            assert not state.enabled and not state.pending
        finally:
            sleeper.kill()
    stage.backend.set_partitioning(gpu.uuid, True)


@on("8xH100")
def a_failed_compute_instance_leaves_nothing(stage: Stage) -> None:
    gpu = stage.enabled()
    function = "nvmlGpuInstanceCreateComputeInstance"
    for code, kind in (("19", InUse), ("999", AcceleratorError), ("4", NotPermitted)):
        stage.control("fault", "0", "call", function, "fail", code, "nth", "1")
        refused(kind, stage.backend.create_partition, gpu.uuid, 9, Placement(0, 4))
        assert stage.backend.device(gpu.uuid).partitions == ()
    stage.backend.create_partition(gpu.uuid, 9, Placement(0, 4))


@on("8xH100")
def a_failed_layout_is_undone(stage: Stage) -> None:
    gpu = stage.enabled()
    start = Rule(Match(), "static", (WantedPartition("3g.40gb", 1, 4), WantedPartition("1g.10gb", 2)))
    execute(stage.backend, plan_layout(gpu, start))
    gpu = stage.backend.device(gpu.uuid)
    before = places(gpu)
    wanted = Rule(Match(), "static", (WantedPartition("2g.20gb", 3), WantedPartition("1g.10gb", 1)))
    plan = plan_layout(gpu, wanted)
    for nth in range(1, 4):
        stage.control("fault", "0", "call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "23", "nth", str(nth))
        error = refused(LayoutFailed, execute, stage.backend, plan)
        assert isinstance(error, LayoutFailed) and not error.not_undone and error.undone
        gpu = stage.backend.device(gpu.uuid)
        assert places(gpu) == before
        plan = plan_layout(gpu, wanted)
    execute(stage.backend, plan)


@on("8xH100")
def a_failed_layout_takes_the_mode_back(stage: Stage) -> None:
    gpu = stage.first()
    plan = plan_layout(gpu, Rule(Match(), "static", (WantedPartition("1g.10gb", 7),)))
    stage.control("fault", "0", "call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "23", "nth", "4")
    refused(LayoutFailed, execute, stage.backend, plan)
    assert not stage.backend.device(gpu.uuid).partitioning.enabled


def raw_instance(gpu: Device, profile_id: int, start: int, size: int, compute: tuple[int, ...]) -> None:
    """Make a GPU instance the way an administrator's tool does, with these compute instances."""
    import ctypes

    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile_id, ctypes.byref(placement))
    for profile in compute:
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, profile)


@on("8xH100")
def instances_made_by_hand(stage: Stage) -> None:
    gpu = stage.enabled()
    raw_instance(gpu, 9, 0, 4, ())
    raw_instance(gpu, 14, 4, 2, (0, 0))
    raw_instance(gpu, 15, 6, 2, (7,))
    gpu = stage.backend.device(gpu.uuid)
    empty, split, full = gpu.partitions
    assert (empty.uuid, empty.compute_instances, empty.compute_instance_id) == ("", 0, None)
    assert (split.uuid, split.compute_instances) == ("", 2)
    assert full.uuid and full.compute_instances == 1
    assert [offer.partition_uuid for offer in stage.backend.offers(gpu, dynamic=False)] == [full.uuid]
    plan = plan_layout(gpu, Rule(Match(), "static", (WantedPartition("1g.20gb", 1), WantedPartition("4g.40gb", 1))))
    assert plan.kept == (full,)
    execute(stage.backend, plan)
    assert places(stage.backend.device(gpu.uuid)) == ((5, 0), (15, 6))


@on("8xH100")
def handles_survive_another_s_change_of_mode(stage: Stage) -> None:
    gpu = stage.first()
    other = f"""
from dra_driver.core.backend import create
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
def a_lost_gpu_is_reported_and_hides_no_other(stage: Stage) -> None:
    gpus = stage.backend.discover()
    stage.control("fault", "3", "lost")
    error = refused(DeviceLost, stage.backend.device, gpus[3].uuid)
    assert "bus" in str(error)
    refused(DeviceLost, stage.backend.set_partitioning, gpus[3].uuid, True)
    after = stage.backend.discover()
    assert [gpu.uuid for gpu in after] == [gpu.uuid for gpu in gpus]
    assert [gpu.health.causes for gpu in after] == [("gpu-lost",) if gpu.index == 3 else () for gpu in after]
    assert not after[3].health.healthy
    fresh = create("nvidia", System(str(stage.root)))
    fresh.open()
    assert [gpu.index for gpu in fresh.discover()] == [0, 1, 2, 4, 5, 6, 7]


@on("8xH100")
def privileges_are_needed(stage: Stage) -> None:
    gpu = stage.first()
    os.seteuid(65534)
    try:
        error = refused(NotPermitted, stage.backend.set_partitioning, gpu.uuid, True)
        assert "root" in str(error)
    finally:
        os.seteuid(0)
    assert not stage.backend.device(gpu.uuid).partitioning.enabled


@on("8xH100")
def eight_gpus_at_once(stage: Stage) -> None:
    gpus = stage.backend.discover()
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
    assert stage.backend.discover() == gpus


@on("8xH100")
def one_gpu_by_two_threads(stage: Stage) -> None:
    """The same place is given to one of two that want it; the other is told that there is no room."""
    gpu = stage.enabled()
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
def looking_at_one_gpu_is_cheap(stage: Stage) -> None:
    gpu = stage.enabled()
    calls = recorded(stage)
    stage.backend.device(gpu.uuid)
    assert len(calls) <= 3 + len(gpu.profiles), calls
    assert not any("Profile" in call or "Placements" in call or "HandleBy" in call for call, _argument in calls), calls
    stage.backend.create_partition(gpu.uuid, 19, Placement(0, 1))
    calls.clear()
    made = stage.backend.create_partition(gpu.uuid, 19, Placement(1, 1))
    assert not any("PossiblePlacements" in call or "ProfileInfo" in call for call, _argument in calls), calls
    calls.clear()
    stage.backend.destroy_partition(gpu.uuid, made.instance_id)
    assert not any("HandleBy" in call for call, _argument in calls), calls


@on("8xH100")
def mig_parted_files_are_followed(stage: Stage) -> None:
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
        gpus = stage.backend.discover()
        for gpu, rule in zip(gpus, rules_from_mig_parted(document, name, gpus)):
            execute(stage.backend, plan_layout(gpu, rule))
        assert [len(gpu.partitions) for gpu in stage.backend.discover()] == [expected] * 8
    assert not any(gpu.partitioning.enabled for gpu in stage.backend.discover())


@on("8xA100-40")
def rules_of_the_project_are_followed(stage: Stage) -> None:
    rules = parse_rules(
        [
            {"match": {"index": 0}, "mode": "static", "partitions": {"3g.20gb": 1, "1g.5gb": 4}},
            {"match": {"index": [1, 2]}, "mode": "dynamic"},
            {"match": {}, "mode": "whole"},
        ]
    )
    for gpu, rule in zip(stage.backend.discover(), [rules[0], rules[1], rules[1], *itertools.repeat(rules[2], 5)]):
        assert rule.match.matches(gpu)
        execute(stage.backend, plan_layout(gpu, rule))
    after = stage.backend.discover()
    assert [gpu.partitioning.enabled for gpu in after] == [True] * 3 + [False] * 5
    assert [len(gpu.partitions) for gpu in after] == [5] + [0] * 7
    assert len(stage.backend.offers(after[1], dynamic=True)) == 25


@on("8xH100")
def edits_carry_what_a_container_needs(stage: Stage) -> None:
    gpu = stage.enabled()
    made = stage.backend.create_partition(gpu.uuid, 19, Placement(6, 1))
    common = stage.backend.driver_edits()
    inside = {mount.container_path: mount.host_path for mount in common.mounts}
    folder = f"/{LIBRARY_FOLDER}"
    for name in ("libnvidia-ml.so.1", "libnvidia-ml.so.580.95.05", "libcuda.so.1", "libcuda.so"):
        assert inside[f"{folder}/{name}"].endswith(".so.580.95.05")
    assert inside["/usr/bin/nvidia-smi"] == "/usr/bin/nvidia-smi"
    assert common.env == ("NVIDIA_VISIBLE_DEVICES=void",) and common is stage.backend.driver_edits()
    nodes = stage.backend.device_edits(gpu, made).device_nodes
    minor = 3 + 135 * gpu.minor + 9 * made.instance_id
    assert [node.path for node in nodes] == [
        f"/dev/nvidia{gpu.minor}",
        f"/dev/nvidia-caps/nvidia-cap{minor}",
        f"/dev/nvidia-caps/nvidia-cap{minor + 1}",
    ]
    assert all(node.type == "c" and node.major and node.minor is not None for node in nodes)


def an_older_driver_names_no_profiles(stage: Stage) -> None:
    """Without the versioned calls the names follow from the rule, and partitions can be made all the same."""
    new = stage.first()
    for function in ("nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlGpuInstanceGetComputeInstanceProfileInfoV"):
        stage.control("fault", "all", "call", function, "fail", "13")
        stage.control("fault", "0", "call", function, "fail", "13")
    calls = recorded(stage)
    old = stage.first()
    assert ("nvmlDeviceGetGpuInstanceProfileInfo", 1) in calls
    assert [profile.name for profile in old.profiles] == [profile.name for profile in new.profiles]
    assert old == new
    gpu = stage.enabled()
    made = stage.backend.create_partition(gpu.uuid, gpu.profiles[0].profile_id, gpu.profiles[0].placements[0])
    assert made.uuid and stage.backend.device(gpu.uuid).partitions == (made,)


for _machine in ("4xA30", "8xH200", "4xGB200", "2xRTX-PRO-6000"):
    SCENARIOS[f"an_older_driver_names_no_profiles_of_{_machine}"] = (_machine, an_older_driver_names_no_profiles)


@on("8xH100")
def a_driver_that_hides_profiles_while_partitioning_is_off(stage: Stage) -> None:
    for function in ("nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlDeviceGetGpuInstanceProfileInfo"):
        stage.control("fault", "0", "call", function, "fail", "3")
    gpu = stage.first()
    assert gpu.profiles == () and gpu.partitioning.supported
    (whole,) = stage.backend.offers(gpu, dynamic=True)
    assert (whole.kind, whole.counter_set) == ("device", None)
    error = refused(Unsupported, plan_layout, gpu, Rule(Match(), "static", (WantedPartition("1g.10gb"),)))
    assert "without partitions first" in str(error)
    execute(stage.backend, plan_layout(gpu, Rule(Match(), "static")))
    stage.control("clear", "0")
    assert stage.first().profiles


@on("8xH100")
def closing_and_opening_again(stage: Stage) -> None:
    before = stage.backend.discover()
    stage.backend.close()
    refused(BackendUnavailable, stage.backend.discover)
    stage.backend.open()
    stage.backend.open()
    assert stage.backend.discover() == before


@on("8xH100")
def the_driver_may_come_later(stage: Stage) -> None:
    stage.control("fault", "all", "call", "nvmlInitWithFlags", "fail", "9", "nth", "1")
    backend = NvidiaBackend(System(str(stage.root)))
    stage.backend.close()
    error = refused(BackendUnavailable, backend.open)
    assert "modprobe nvidia" in str(error)
    refused(BackendUnavailable, backend.discover)
    backend.open()
    assert len(backend.discover()) == 8


def main() -> None:
    """Run one scenario by name, on the machine below a folder."""
    name, root = sys.argv[1:]
    stage = Stage(Path(root))
    stage.backend.open()
    SCENARIOS[name][1](stage)


if __name__ == "__main__":
    main()
