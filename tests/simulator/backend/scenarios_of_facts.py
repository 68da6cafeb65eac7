# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the facts that the NVIDIA backend reads: boards, placements, and partitions of any creator."""

from __future__ import annotations

import contextlib
import os
import random
import stat
from collections.abc import Callable

from dra_driver.core.dra.node_labels import bus_labels, read_machine
from dra_driver.core.dra.resource_slices import build_pool
from dra_driver.core.errors import (
    BackendUnavailable,
    DoesNotFit,
    Unsupported,
)
from dra_driver.core.host.system import System
from dra_driver.core.model import Clique, Partition, Placement, Version
from dra_driver.core.partitioning.layout_execute import execute
from dra_driver.core.partitioning.layout_plan import plan_layout
from dra_driver.core.partitioning.rules import Match, Rule, WantedPartition

from tests.simulator.backend.gpu_machine import LIBRARY_FOLDER
from tests.simulator.backend.scenarios_of_fabric import fabric_manager
from tests.simulator.backend.stage import (
    SCENARIOS,
    Stage,
    assert_expected_profiles,
    assert_refused,
    on,
    places,
    raw_instance,
    record_calls,
)
from tests.unit.core import board_model


@on("8xH100")
def facts_of_a_server(stage: Stage) -> None:
    gpus = stage.gpus()
    assert [gpu.index for gpu in gpus] == list(range(8)) and len({gpu.uuid for gpu in gpus}) == 8
    reference = board_model.device("h100-80")
    for gpu in gpus:
        assert_expected_profiles(gpu, "h100-80")
        for name in (
            "vendor",
            "product",
            "memory_bytes",
            "memory_slices",
            "pci_device_id",
            "pci_subsystem_id",
        ):
            assert getattr(gpu, name) == getattr(reference, name), name
        assert gpu.partitioning == reference.partitioning and not gpu.processes and not gpu.health.signs
        assert set(gpu.attributes) == set(reference.attributes)
        for name in ("productName", "brand", "architecture", "cudaComputeCapability", "addressingMode"):
            assert gpu.attributes[name] == reference.attributes[name], name
        assert gpu.attributes["driverVersion"] == Version("580.95.5")
        assert gpu.attributes["cudaDriverVersion"] == Version("13.0.0")
        assert gpu.attributes["resource.kubernetes.io/pciBusID"] == gpu.pci_address
        assert gpu == stage.backend.device(gpu.uuid)
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    # NVSwitches link them in a fabric of this machine only, which has no clique.
    assert all(gpu.switched and gpu.clique is None and not gpu.linked for gpu in gpus)
    stage.control("fault", "2", "fabric", "joining")
    assert [gpu.index for gpu in stage.gpus() if not gpu.switched] == [2]
    stage.control("clear")
    assert all(gpu.switched for gpu in stage.gpus())
    assert [gpu.pcie_root for gpu in gpus] == sorted(["pci0000:15", "pci0000:48", "pci0000:97", "pci0000:c7"] * 2)
    assert stage.backend.driver_version == "580.95.05"


@on("8xH100")
def labels_of_a_server(stage: Stage) -> None:
    """Labels are made of the facts that gpu-feature-discovery reads from NVML and sysfs."""
    gpus = stage.gpus()
    stage.lay_out(Rule(Match(), "static", (WantedPartition("3g.40gb", 1), WantedPartition("1g.10gb", 2))))
    gpus = stage.gpus()
    machine = read_machine(System(str(stage.root)), gpus)
    assert {seat.bus_class for seat in machine.bus_properties.values()} == {"0x030200"} and len(
        machine.bus_properties
    ) == 8
    found = stage.backend.labels(gpus, machine, "mixed")
    said = {name.rpartition("/")[2]: value for name, value in found.items()}
    assert said["gpu.count"] == "8" and said["gpu.product"] == "NVIDIA-H100-80GB-HBM3" and said["gpu.mode"] == "compute"
    assert [said[f"cuda.driver-version.{part}"] for part in ("full", "revision")] == ["580.95.05", "05"]
    assert said["cuda.runtime-version.full"] == "13.0" and said["gpu.memory"] == str(gpus[0].memory_bytes >> 20)
    assert [said[f"mig-1g.10gb.{part}"] for part in ("count", "slices.gi", "engines.copy")] == ["2", "1", "1"]
    assert said["mig-3g.40gb.multiprocessors"] == "60" and said["mig-3g.40gb.count"] == "1"
    assert "gpu.clique" not in said
    assert bus_labels(gpus, machine, ("class", "vendor"))["feature.node.kubernetes.io/pci-0302_10de.present"] == "true"


@on("4xGB200")
def labels_of_a_server_in_a_fabric(stage: Stage) -> None:
    gpus = stage.gpus()
    clique = Clique("5d6c1a52-7e0b-4c3f-9a41-2b8f0c6d7e10", 1)
    assert {gpu.clique for gpu in gpus} == {clique} and not any(gpu.switched for gpu in gpus)
    assert stage.backend.labels(gpus)["nvidia.com/gpu.clique"] == "5d6c1a52-7e0b-4c3f-9a41-2b8f0c6d7e10.1"
    # It is read with the condition in scans. Preparing a claim uses the last scan's value without another call.
    calls = record_calls(stage)
    assert stage.backend.device(gpus[0].uuid).clique == clique
    assert "nvmlDeviceGetGpuFabricInfoV" not in {call for call, _argument in calls}
    stage.control("fault", "0", "fabric", "joining")
    assert [gpu.clique for gpu in stage.gpus()] == [None, clique, clique, clique]
    stage.control("clear")
    assert stage.gpus()[0].clique == clique


@on("8xA100-40")
def links_of_a_server_without_a_fabric_state(stage: Stage) -> None:
    """GPUs of the Ampere generation do not report their fabric state. Their links lead to switches."""
    assert all(gpu.switched and not gpu.linked and not gpu.health.signs for gpu in stage.gpus())


@on("mixed")
def facts_of_different_boards(stage: Stage) -> None:
    by_product = {
        board_model.board(name)["name"]: name for name in board_model.board_names() + board_model.board_names(mig=False)
    }
    gpus = stage.gpus()
    assert len({gpu.product for gpu in gpus}) > 2
    for gpu in gpus:
        name = by_product[gpu.product]
        assert_expected_profiles(gpu, name)
        assert gpu.partitioning.supported == board_model.board(name)["mig"]["capable"]
        assert gpu.pci_device_id == board_model.device(name).pci_device_id
        build_pool(
            driver="gpu.nvidia.com",
            pool="n",
            node_name="n",
            offers=stage.backend.offers(gpu, dynamic=True),
            counter_sets=[stage.backend.counter_set(gpu)],
        )


def managed(scenario: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """Return a scenario during which the fabric manager runs on A100 GPUs with NVSwitches: without it they cannot be reset."""

    def run(stage: Stage) -> None:
        with fabric_manager(stage, 0) if stage.first_gpu().reset_blocked else contextlib.nullcontext():
            scenario(stage)

    return run


def every_placement_can_be_created(stage: Stage) -> None:
    gpu = stage.enable_mig()
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
    # The vendor's UUID depends on the placement: later partitions there can get it again, others never.
    assert sum(map(len, places_of.values())) == len(set().union(*places_of.values()))
    assert stage.backend.device(gpu.uuid).partitions == ()


for _machine in ("4xA30", "8xA100-40", "8xH100", "8xH200", "8xB200", "4xGB200", "2xRTX-PRO-6000"):
    SCENARIOS[f"every_place_on_{_machine}"] = (_machine, managed(every_placement_can_be_created))


def random_layouts(stage: Stage) -> None:
    """Apply random layouts in sequence: each plan disturbs the fewest partitions, and NVML has the planned ones."""
    gpu = stage.enable_mig()
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
    SCENARIOS[f"random_layouts_on_{_machine}"] = (_machine, managed(random_layouts))


def counters_and_hardware_agree(stage: Stage) -> None:
    """NVML can create what the counters allow, and rejects what they forbid."""
    gpu = stage.enable_mig()
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
                assert_refused(DoesNotFit, stage.backend.create_partition, gpu.uuid, offer.profile_id, offer.placement)
        for each in made:
            stage.backend.destroy_partition(gpu.uuid, each.instance_id)


for _machine in ("4xA30", "8xA100-40", "8xH100", "8xB200", "2xRTX-PRO-6000"):
    SCENARIOS[f"counters_and_hardware_agree_on_{_machine}"] = (_machine, managed(counters_and_hardware_agree))


@on("8xH100")
def manually_created_instances_are_found(stage: Stage) -> None:
    gpu = stage.enable_mig()
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
@on("8xH100")
def scan_of_one_gpu_makes_few_calls(stage: Stage) -> None:
    gpu = stage.enable_mig()
    calls = record_calls(stage)
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
def edits_contain_nodes_and_mounts_of_a_container(stage: Stage) -> None:
    gpu = stage.enable_mig()
    made = stage.backend.create_partition(gpu.uuid, 19, Placement(6, 1))
    # Below a directory the simulator creates ordinary files instead of device nodes, which the backend does not
    # accept.
    assert "/dev/nvidiactl" in str(assert_refused(BackendUnavailable, stage.backend.driver_edits))
    path = stage.root / "dev/nvidiactl"
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(195, 255))
    assert "/dev/nvidia-uvm" in str(assert_refused(BackendUnavailable, stage.backend.driver_edits))
    stage.backend.use_number_file("/driver", writes=True)  # only the driver creates nodes
    common = stage.backend.driver_edits()
    assert [(node.path, node.major, node.minor) for node in common.device_nodes] == [
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia-uvm", 510, 0),
        ("/dev/nvidia-uvm-tools", 510, 1),
    ]
    assert stat.S_IMODE((stage.root / "dev/nvidia-uvm").stat().st_mode) == 0o666
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
    """Without the versioned calls the names follow the naming rule, and partitions can be created anyway."""
    new = stage.first_gpu()
    for function in ("nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlGpuInstanceGetComputeInstanceProfileInfoV"):
        stage.control("fault", "all", "call", function, "fail", "13")
        stage.control("fault", "0", "call", function, "fail", "13")
    calls = record_calls(stage)
    old = stage.gpus(full=True)[0]
    assert ("nvmlDeviceGetGpuInstanceProfileInfo", 1) in calls
    assert [profile.name for profile in old.profiles] == [profile.name for profile in new.profiles]
    assert old == new
    gpu = stage.enable_mig()
    made = stage.backend.create_partition(gpu.uuid, gpu.profiles[0].profile_id, gpu.profiles[0].placements[0])
    assert made.uuid and stage.backend.device(gpu.uuid).partitions == (made,)


for _machine in ("4xA30", "8xH200", "4xGB200", "2xRTX-PRO-6000"):
    SCENARIOS[f"an_older_driver_names_no_profiles_of_{_machine}"] = (_machine, an_older_driver_names_no_profiles)


@on("8xH100")
def a_driver_that_hides_profiles_while_partitioning_is_off(stage: Stage) -> None:
    for function in ("nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlDeviceGetGpuInstanceProfileInfo"):
        stage.control("fault", "0", "call", function, "fail", "3")
    gpu = stage.gpus(full=True)[0]
    assert gpu.profiles == () and gpu.partitioning.supported
    (whole,) = stage.backend.offers(gpu, dynamic=True)
    assert (whole.kind, whole.counter_set) == ("device", None)
    error = assert_refused(Unsupported, plan_layout, gpu, Rule(Match(), "static", (WantedPartition("1g.10gb"),)))
    assert "without partitions first" in str(error)
    execute(stage.backend, plan_layout(gpu, Rule(Match(), "static")))
    stage.control("clear", "0")
    assert stage.gpus(full=True)[0].profiles
