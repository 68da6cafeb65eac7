# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test MIG through nvidia-ml-py: tables, placements, IDs, errors, compute instances."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulator.nvml_boards import BOARDS
from tests.simulator.nvml_model import Model
from tests.simulator.nvml_support import (
    ARGUMENT_VERSION_MISMATCH,
    COMPUTE,
    FUNCTION_NOT_FOUND,
    IN_USE,
    INSUFFICIENT_RESOURCES,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    SUCCESS,
    Client,
    Silicon,
    gpu_section,
    load,
    machine_text,
)

MIG_BOARDS = [name for name, board in BOARDS.items() if board["profiles"]]


def instance_info(client: Client, instance: Any) -> tuple[int, int, int, int]:
    info = client("nvmlGpuInstanceGetInfo", instance)
    return info["id"], info["profileId"], info["placement"]["start"], info["placement"]["size"]


@pytest.mark.parametrize("name", MIG_BOARDS)
def test_the_tables_of_every_board(bare_silicon: Silicon, name: str) -> None:
    load(bare_silicon, name)
    board, client = BOARDS[name], bare_silicon.client()
    gpu = client.gpu()
    for enum in range(18):
        row = board["profiles"].get(enum)
        if row is None:
            assert client.code("nvmlDeviceGetGpuInstanceProfileInfo", gpu, enum) == NOT_SUPPORTED
            continue
        second = client("nvmlDeviceGetGpuInstanceProfileInfo", gpu, enum)
        first = client("nvmlDeviceGetGpuInstanceProfileInfo", gpu, enum, 1)
        by_id = client("nvmlDeviceGetGpuInstanceProfileInfoByIdV", gpu, row["id"])
        assert second == by_id
        assert {key: second[key] for key in first} == first
        assert second["name"] == f"MIG {row['name']}"
        assert (second["id"], second["sliceCount"], second["instanceCount"]) == (
            row["id"],
            row["slices"],
            row["maximum"],
        )
        assert (second["multiprocessorCount"], second["memorySizeMB"]) == (row["multiprocessors"], row["memory"])
        engines = row["engines"]
        assert [second[f"{engine}Count"] for engine in ("decoder", "encoder", "jpeg", "ofa")] == [
            engines.get(engine, 0) for engine in ("decoder", "encoder", "jpeg", "ofa")
        ]
        assert second["copyEngineCount"] == engines["copy"]
        assert client("possible_placements", gpu, row["id"]) == [[start, row["size"]] for start in row["starts"]]
    assert client.code("nvmlDeviceGetGpuInstanceProfileInfo", gpu, 18) == INVALID_ARGUMENT
    assert client.code("possible_placements", gpu, 99) == INVALID_ARGUMENT


@pytest.mark.parametrize("name", MIG_BOARDS)
def test_one_profile_fills_a_board_in_the_drivers_order(bare_silicon: Silicon, name: str) -> None:
    load(bare_silicon, name)
    board, client = BOARDS[name], bare_silicon.client()
    gpu = client.gpu()
    for enum, row in board["profiles"].items():
        model, created = Model(board), []
        while model.choices(enum):
            start = model.choices(enum)[0]
            assert client("nvmlDeviceGetGpuInstanceRemainingCapacity", gpu, row["id"]) == model.remaining(enum)
            created.append(client("nvmlDeviceCreateGpuInstance", gpu, row["id"]))
            assert instance_info(client, created[-1]) == (model.create(enum, start), row["id"], start, row["size"])
        assert len(created) == row["maximum"]
        assert client("nvmlDeviceGetGpuInstanceRemainingCapacity", gpu, row["id"]) == 0
        assert client.code("nvmlDeviceCreateGpuInstance", gpu, row["id"]) == INSUFFICIENT_RESOURCES
        assert len(client("gpu_instances", gpu, row["id"])) == row["maximum"]
        for instance in created:
            client("nvmlGpuInstanceDestroy", instance)


def test_placement_order_equals_real_boards(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80")
    client = bare_silicon.client()
    gpu = client.gpu()

    def fill(profile: int, count: int) -> list[int]:
        made = [client("nvmlDeviceCreateGpuInstance", gpu, profile) for _round in range(count)]
        starts = [instance_info(client, instance)[2] for instance in made]
        for instance in made:
            client("nvmlGpuInstanceDestroy", instance)
        return starts

    assert fill(19, 7) == [6, 4, 5, 0, 1, 2, 3]
    assert fill(9, 2) == [4, 0]
    assert fill(14, 1) == [4]


def test_instance_ids_of_older_drivers_begin_in_the_upper_half(bare_silicon: Silicon) -> None:
    load(bare_silicon, "A100-80")
    client = bare_silicon.client()
    gpu = client.gpu()
    ids = {start: instance_info(client, client("create_at", gpu, 9, start, 4))[0] for start in (0, 4)}
    assert ids == {0: 2, 4: 1}
    for profile in client("gpu_instances", gpu, 9):
        client("nvmlGpuInstanceDestroy", profile)
    assert instance_info(client, client("create_at", gpu, 19, 0, 1))[0] == 11
    assert instance_info(client, client("create_at", gpu, 19, 6, 1))[0] == 9


def test_invalid_placement_and_occupied_placement_have_different_errors(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80")
    client = bare_silicon.client()
    gpu = client.gpu()
    assert client.code("create_at", gpu, 14, 1, 2) == INVALID_ARGUMENT
    assert client.code("create_at", gpu, 14, 0, 3) == INVALID_ARGUMENT
    assert client.code("create_at", gpu, 77, 0, 1) == INVALID_ARGUMENT
    client("create_at", gpu, 9, 0, 4)
    assert client.code("create_at", gpu, 9, 0, 4) == INSUFFICIENT_RESOURCES
    assert client.code("create_at", gpu, 14, 2, 2) == INSUFFICIENT_RESOURCES
    assert client.code("create_at", gpu, 0, 0, 8) == INSUFFICIENT_RESOURCES
    assert client.code("nvmlDeviceGetGpuInstanceById", gpu, 1) == SUCCESS
    assert client.code("nvmlDeviceGetGpuInstanceById", gpu, 2) == NOT_FOUND


def test_media_engines(bare_silicon: Silicon) -> None:
    load(bare_silicon, "RTX-PRO-6000", "A30")
    client = bare_silicon.client()
    pro, a30 = client.gpu(0), client.gpu(1)
    everything = client("create_at", pro, 65, 0, 3)
    for profile in (14, 21, 47, 65):
        assert client.code("create_at", pro, profile, 3, 3) == INSUFFICIENT_RESOURCES
    client("create_at", pro, 67, 3, 3)
    client("create_at", pro, 66, 6, 6)
    client("nvmlGpuInstanceDestroy", everything)
    client("create_at", pro, 21, 0, 3)
    client("create_at", a30, 21, 0, 1)
    assert client.code("create_at", a30, 21, 1, 1) == INSUFFICIENT_RESOURCES
    assert client.code("create_at", a30, 6, 2, 2) == INSUFFICIENT_RESOURCES
    client("create_at", a30, 5, 2, 2)


def test_mig_device_life_cycle(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80")
    client = bare_silicon.client()
    gpu = client.gpu()
    instance = client("create_at", gpu, 9, 4, 4)
    assert client.code("nvmlDeviceGetMigDeviceHandleByIndex", gpu, 0) == NOT_FOUND
    compute = client("nvmlGpuInstanceCreateComputeInstance", instance, 2)
    info = client("nvmlComputeInstanceGetInfo", compute)
    device = info["device"]
    assert (info["id"], info["profileId"], info["placement"]) == (0, 2, {"start": 0, "size": 3})
    assert info["gpuInstance"] == instance
    assert client("nvmlDeviceGetMigDeviceHandleByIndex", gpu, 0) == device
    assert client("nvmlDeviceIsMigDeviceHandle", device) == 1
    assert client("nvmlDeviceIsMigDeviceHandle", gpu) == 0
    assert client("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device) == gpu
    assert client.code("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", gpu) == INVALID_ARGUMENT
    assert client("nvmlDeviceGetGpuInstanceId", device) == 2
    assert client("nvmlDeviceGetComputeInstanceId", device) == 0
    assert client.code("nvmlDeviceGetGpuInstanceId", gpu) == INVALID_ARGUMENT  # like real boards (tests/silicon)
    assert client("nvmlDeviceGetName", device) == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    assert client("nvmlDeviceGetMaxMigDeviceCount", gpu) == 7
    attributes = client("nvmlDeviceGetAttributes", device)
    assert attributes == {
        "multiprocessorCount": 60,
        "sharedCopyEngineCount": 3,
        "sharedDecoderCount": 3,
        "sharedEncoderCount": 0,
        "sharedJpegCount": 3,
        "sharedOfaCount": 0,
        "gpuInstanceSliceCount": 3,
        "computeInstanceSliceCount": 3,
        "memorySizeMB": 40448,
    }
    assert client.code("nvmlDeviceGetAttributes", gpu) == NOT_SUPPORTED
    memory = client("nvmlDeviceGetMemoryInfo", device)
    assert (memory["total"], memory["used"]) == (40448 << 20, 0)
    uuid = client("nvmlDeviceGetUUID", device)
    assert uuid.startswith("MIG-")
    assert uuid[18] == "5"
    assert client("nvmlDeviceGetHandleByUUID", uuid) == device
    assert client.code("nvmlGpuInstanceDestroy", instance) == IN_USE
    client("nvmlComputeInstanceDestroy", compute)
    assert client.code("nvmlDeviceGetName", device) == INVALID_ARGUMENT
    assert client.code("nvmlComputeInstanceGetInfo", compute) == INVALID_ARGUMENT
    assert client.code("nvmlDeviceGetHandleByUUID", uuid) == NOT_FOUND
    client("nvmlGpuInstanceDestroy", instance)
    assert client.code("nvmlGpuInstanceGetInfo", instance) == INVALID_ARGUMENT
    again = client("create_at", gpu, 9, 4, 4)
    assert again != instance
    second = client("nvmlComputeInstanceGetInfo", client("nvmlGpuInstanceCreateComputeInstance", again, 2))["device"]
    assert client("nvmlDeviceGetUUID", second) == uuid
    assert client.code("nvmlDeviceGetName", device) == INVALID_ARGUMENT


def test_uuids_differ_between_placements_gpus_and_compute_instances(bare_silicon: Silicon) -> None:
    load(bare_silicon, "A100-40", "A100-40")
    client = bare_silicon.client()
    uuids = []
    for index in (0, 1):
        gpu = client.gpu(index)
        for start in (0, 4):
            instance = client("create_at", gpu, 9, start, 4)
            computes = [client("nvmlGpuInstanceCreateComputeInstance", instance, 0) for _round in range(3)]
            uuids += [
                client("nvmlDeviceGetUUID", client("nvmlComputeInstanceGetInfo", each)["device"]) for each in computes
            ]
    assert len(set(uuids)) == 12


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 7])
def test_compute_instances_of_every_size(bare_silicon: Silicon, slices: int) -> None:
    load(bare_silicon, "A100-40")
    client = bare_silicon.client()
    gpu = client.gpu()
    row = next(
        row for row in BOARDS["A100-40"]["profiles"].values() if row["slices"] == slices and "+" not in row["name"]
    )
    instance = client("create_at", gpu, row["id"], row["starts"][0], row["size"])
    for enum, size in enumerate((1, 2, 3, 4, 7)):
        starts = COMPUTE[slices].get(size)
        if starts is None:
            assert client.code("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, enum, 0) == NOT_SUPPORTED
            continue
        info = client("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, enum, 0)
        first = client("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, enum, 0, 1)
        assert {key: info[key] for key in first} == first
        assert info["sharedCopyEngineCount"] == row["engines"]["copy"]
        assert (info["sliceCount"], info["instanceCount"]) == (size, len(starts))
        assert info["name"] == "MIG " + ("" if size == slices else f"{size}c.") + row["name"]
        assert client("possible_placements", instance, info["id"], True) == [[start, size] for start in starts]
        made: list[Any] = []
        for start in starts:
            assert client("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", instance, info["id"]) == len(
                starts
            ) - len(made)
            made.append(client("create_at", instance, info["id"], start, size, True))
        assert client.code("nvmlGpuInstanceCreateComputeInstance", instance, info["id"]) == INSUFFICIENT_RESOURCES
        assert client.code("create_at", instance, info["id"], 0, size, True) == INSUFFICIENT_RESOURCES
        assert client.code("create_at", instance, info["id"], 11, size, True) == INVALID_ARGUMENT
        assert [client("nvmlGpuInstanceGetComputeInstanceById", instance, index) for index in range(len(made))] == made
        assert client("compute_instances", instance, info["id"]) == made
        for compute in made:
            client("nvmlComputeInstanceDestroy", compute)
    assert client.code("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, 9, 0) == INVALID_ARGUMENT
    assert client.code("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, 0, 1) == INVALID_ARGUMENT
    assert client.code("nvmlGpuInstanceCreateComputeInstance", instance, 42) == INVALID_ARGUMENT


def test_the_index_space_of_mig_devices_has_holes(bare_silicon: Silicon) -> None:
    load(bare_silicon, "H100-80")
    client = bare_silicon.client()
    gpu = client.gpu()
    made = []
    for start in range(4):
        instance = client("create_at", gpu, 19, start, 1)
        made.append((instance, client("nvmlGpuInstanceCreateComputeInstance", instance, 0)))
    client("nvmlComputeInstanceDestroy", made[1][1])
    client("nvmlGpuInstanceDestroy", made[1][0])
    codes = [client.code("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index) for index in range(8)]
    assert codes == [SUCCESS, NOT_FOUND, SUCCESS, SUCCESS, NOT_FOUND, NOT_FOUND, NOT_FOUND, INVALID_ARGUMENT]
    third = client("nvmlDeviceGetMigDeviceHandleByIndex", gpu, 2)
    assert client("nvmlDeviceGetIndex", third) == 2


def test_boards_without_mig(bare_silicon: Silicon) -> None:
    load(bare_silicon, "L4")
    client = bare_silicon.client()
    gpu = client.gpu()
    assert client.code("nvmlDeviceGetMigMode", gpu) == NOT_SUPPORTED
    assert client.code("nvmlDeviceSetMigMode", gpu, 1) == NOT_SUPPORTED
    assert client.code("nvmlDeviceGetGpuInstanceProfileInfo", gpu, 0) == NOT_SUPPORTED
    assert client.code("nvmlDeviceCreateGpuInstance", gpu, 19) == NOT_SUPPORTED
    assert client("nvmlDeviceGetMaxMigDeviceCount", gpu) == 0


def test_older_driver_has_fewer_mig_functions(bare_silicon: Silicon) -> None:
    load(bare_silicon, "A100-40", extra=(), statements=("profile-info-versions no", "profiles-need-mig-mode yes"))
    client = bare_silicon.client()
    gpu = client.gpu()
    assert client.code("nvmlDeviceGetGpuInstanceProfileInfo", gpu, 0) == FUNCTION_NOT_FOUND
    assert client.code("nvmlDeviceGetGpuInstanceProfileInfo", gpu, 0, 1) == NOT_SUPPORTED
    assert client.code("possible_placements", gpu, 19) == NOT_SUPPORTED
    client("nvmlDeviceSetMigMode", gpu, 1)
    bare_silicon.control("gpu-reset 0")
    assert client("nvmlDeviceGetGpuInstanceProfileInfo", client.gpu(), 0, 1)["id"] == 19


def test_the_third_version_of_profile_information_and_unknown_versions(bare_silicon: Silicon) -> None:
    load(bare_silicon, "RTX-PRO-6000")
    client = bare_silicon.client()
    gpu = client.gpu()
    structure: dict[str, Any] = {"struct": "c_nvmlGpuInstanceProfileInfo_v2_t", "fields": {"version": 0x03000098}}
    code, raw = client("symbol", "nvmlDeviceGetGpuInstanceProfileInfoV", gpu, 0xA, structure)
    assert (code, raw["id"]) == (SUCCESS, 47)
    structure["fields"]["version"] = 0x04000098
    assert client("symbol", "nvmlDeviceGetGpuInstanceProfileInfoV", gpu, 0xA, structure)[0] == ARGUMENT_VERSION_MISMATCH


def test_capability_files_follow_the_instances(bare_silicon: Silicon) -> None:
    extra = ("mig-mode yes", "minor 5")
    section = gpu_section(BOARDS["H100-80"], 0, extra)
    assert bare_silicon.load(machine_text(bare_silicon.folder, [section], ("cap-nodes yes", "caps-major 236")))["ok"]
    client = bare_silicon.client()
    instance = client("create_at", client.gpu(), 19, 3, 1)
    compute = client("nvmlGpuInstanceCreateComputeInstance", instance, 0)
    tree = bare_silicon.capabilities / "gpu5/mig"
    assert sorted(path.name for path in tree.iterdir()) == ["config", "gi10", "monitor"]
    minor = 3 + 135 * 5 + 9 * 10
    assert (tree / "gi10/access").read_text() == f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    assert f"DeviceFileMinor: {minor + 1}\n" in (tree / "gi10/ci0/access").read_text()
    assert "DeviceFileMinor: 1\n" in (tree / "config").read_text()
    nodes = bare_silicon.dev / "nvidia-caps"
    assert sorted(path.name for path in nodes.iterdir()) == [f"nvidia-cap{minor}", f"nvidia-cap{minor + 1}"]
    client("nvmlComputeInstanceDestroy", compute)
    assert not (tree / "gi10/ci0").exists()
    client("nvmlGpuInstanceDestroy", instance)
    assert sorted(path.name for path in tree.iterdir()) == ["config", "monitor"]
    assert list(nodes.iterdir()) == []
