# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Partitions of the NVSwitch fabric: identification of members, published attributes, and the partition of a claim's GPUs."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from board_model import device
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, InUse
from dra_driver.core.host.system import System
from dra_driver.core.model import Device
from dra_driver.core.vendors.nvidia.fabric import fabric_manager
from dra_driver.core.vendors.nvidia.fabric.fabric_manager import (
    FabricManager,
    FabricPartition,
    Member,
    NoFabricPartition,
    Options,
    attributes,
    find_partition,
    physical_ids,
    read_options,
    reject_overlap,
    version_of,
)
from hypothesis import given
from hypothesis import strategies as st

GPUS = tuple(replace(device("h100-80", index), module=index + 1) for index in range(8))


def partition(number: int, *modules: int, active: bool = False) -> FabricPartition:
    return FabricPartition(number, active, tuple(Member(module) for module in modules))


HGX = (
    partition(1, 1, 2, 3, 4, 5, 6, 7, 8),
    partition(2, 1, 2, 3, 4),
    partition(3, 5, 6, 7, 8),
    *(partition(4 + pair, 2 * pair + 1, 2 * pair + 2) for pair in range(4)),
    *(partition(8 + each, each + 1) for each in range(8)),
)


def test_structure_sizes_equal_the_header() -> None:
    """The structures of nv_fm_types.h on x86-64 and arm64: fields of 4 bytes and arrays of characters, without padding."""
    assert ctypes.sizeof(fabric_manager.ConnectParameters) == 4 + 256 + 4 + 4
    gpu = 4 + 80 + 32 + 4 + 4 + 4
    assert ctypes.sizeof(fabric_manager.GpuInfo) == gpu
    assert ctypes.sizeof(fabric_manager.PartitionList) == 12 + 64 * (12 + 16 * gpu)
    assert ctypes.sizeof(fabric_manager.ActivatedList) == 8 + 64 * 4
    assert version_of(fabric_manager.ConnectParameters) == 0x0100010C


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Options(False, "127.0.0.1:6666", False)),
        ("FABRIC_MODE=0\n", Options(False, "127.0.0.1:6666", False, is_bare_metal=True)),
        ("FABRIC_MODE=2\n", Options(False, "127.0.0.1:6666", False)),
        ("# FABRIC_MODE=1\n", Options(False, "127.0.0.1:6666", False, is_bare_metal=True)),
        ("FABRIC_MODE = 1 # shared\nFM_CMD_PORT_NUMBER=16000\n", Options(True, "127.0.0.1:16000", False)),
        ("FABRIC_MODE=1\nFM_CMD_UNIX_SOCKET_PATH=/run/fm/socket\n", Options(True, "/run/fm/socket", True)),
        ("FABRIC_MODE=1\nFABRIC_MODE_RESTART = 1 # keep\n", Options(True, "127.0.0.1:6666", False, resumes=True)),
        ("FABRIC_MODE=1\nFABRIC_MODE_RESTART=0\n", Options(True, "127.0.0.1:6666", False)),
        (
            "FABRIC_MODE=1\nFM_CMD_UNIX_SOCKET_PATH=\nFM_CMD_BIND_INTERFACE=127.0.0.2",
            Options(True, "127.0.0.2:6666", False),
        ),
    ],
)
def test_configuration_is_read(text: str, expected: Options) -> None:
    assert read_options(text) == expected


def test_member_without_other_identity_is_found_by_module() -> None:
    assert physical_ids(GPUS, HGX) == {gpu.uuid: gpu.module for gpu in GPUS}
    assert physical_ids([replace(GPUS[0], module=None)], HGX) == {}
    assert physical_ids([replace(GPUS[0], module=9)], HGX) == {}


def test_uuid_and_address_have_priority_over_module() -> None:
    """On HGX A100 physical ids and module ids differ: UUID and address have priority."""
    mixed = FabricPartition(
        1, False, (Member(2, GPUS[0].uuid, GPUS[0].pci_address), Member(1, "", GPUS[1].pci_address))
    )
    assert physical_ids(GPUS, [mixed]) == {GPUS[0].uuid: 2, GPUS[1].uuid: 1}


@pytest.mark.parametrize(
    "partitions",
    [
        [FabricPartition(1, False, (Member(1, GPUS[0].uuid, GPUS[1].pci_address),))],
        [
            FabricPartition(1, False, (Member(1, GPUS[0].uuid),)),
            FabricPartition(2, False, (Member(2, GPUS[0].uuid),)),
        ],
    ],
)
def test_contradicting_identities_are_rejected(partitions: list[FabricPartition]) -> None:
    with pytest.raises(AcceleratorError, match="contradicting identities"):
        physical_ids([GPUS[0]], partitions)


def test_attributes_have_partition_of_each_size() -> None:
    assert attributes(3, HGX) == {"partition1": 10, "partition2": 5, "partition4": 2, "partition8": 1}
    assert attributes(9, HGX) == {}
    assert attributes(1, [*HGX, partition(40, 1, 5)]) == {"partition1": 8, "partition4": 2, "partition8": 1}


@given(wanted=st.sets(st.integers(0, 7), min_size=1))
def test_claim_matches_one_partition_or_error_lists_all(wanted: set[int]) -> None:
    gpus = [GPUS[index] for index in sorted(wanted)]
    modules = {index + 1 for index in wanted}
    fitting = [each.number for each in HGX if {member.physical_id for member in each.members} == modules]
    try:
        assert [find_partition(gpus, HGX).number] == fitting
    except NoFabricPartition as error:
        assert fitting == []
        assert all(f"{each.number} has modules" in str(error) for each in HGX)
        assert f"N here is {len(wanted)}" in error.hint


def test_gpu_without_partition_is_named() -> None:
    stranger: Device = replace(GPUS[0], module=None)
    with pytest.raises(NoFabricPartition, match=r"\(module \?\)"):
        find_partition([stranger], HGX)


def test_overlap_with_active_partition_is_rejected() -> None:
    active = partition(2, 1, 2, 3, 4, active=True)
    reject_overlap(partition(5, 5, 6), [active])
    reject_overlap(active, [active])
    with pytest.raises(InUse, match="partition 2, which is active, contains its modules 3, 4"):
        reject_overlap(partition(5, 3, 4), [active])


def test_partition_without_shared_mode_or_library_needs_no_deactivation(tmp_path: Path) -> None:
    configuration = tmp_path / fabric_manager.CONFIGURATION.lstrip("/")
    configuration.parent.mkdir(parents=True)
    configuration.write_text("FABRIC_MODE=1\n")

    def load(_name: str) -> Any:
        raise OSError("libnvfm.so.1: cannot open shared object file: No such file or directory")

    manager = FabricManager(System(str(tmp_path)), load)
    with pytest.raises(BackendUnavailable, match=r"libnvfm.so.1 cannot be loaded"):
        manager.partitions()
    manager.deactivate(2)
    configuration.write_text("FABRIC_MODE=0\n")
    FabricManager(System(str(tmp_path)), load).deactivate(2)


def test_mode_is_kept_while_configuration_is_unreadable(tmp_path: Path) -> None:
    configuration = tmp_path / fabric_manager.CONFIGURATION.lstrip("/")
    configuration.parent.mkdir(parents=True)
    configuration.write_text("FABRIC_MODE=1\n")
    manager = FabricManager(System(str(tmp_path)))
    configuration.unlink()
    configuration.mkdir()  # a read error, not an answer
    manager.refresh_mode()
    assert manager.is_used
    configuration.rmdir()
    manager.refresh_mode()
    assert not manager.is_used


def test_library_load_error_keeps_partition_active(tmp_path: Path) -> None:
    configuration = tmp_path / fabric_manager.CONFIGURATION.lstrip("/")
    configuration.parent.mkdir(parents=True)
    configuration.write_text("FABRIC_MODE=1\n")

    def load(_name: str) -> Any:
        raise OSError("libnvfm.so.1: cannot open shared object file: Too many open files")

    with pytest.raises(BackendUnavailable, match="Too many open files"):
        FabricManager(System(str(tmp_path)), load).deactivate(2)
