# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Container edits for one GPU or one MIG device: device nodes, numbers in /proc, and the driver's own rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from board_model import device
from dra_driver.core.discovery.device_workers import Lanes
from dra_driver.core.errors import NotFound
from dra_driver.core.host.system import System
from dra_driver.core.model import Partitioning
from dra_driver.core.vendors.nvidia.board_cache import BoardCache
from dra_driver.core.vendors.nvidia.board_facts import DriverFacts
from dra_driver.core.vendors.nvidia.container.container_edits import (
    Capabilities,
    capability_minors,
    character_major,
    device_edits,
)
from dra_driver.core.vendors.nvidia.health.watch import Watch
from dra_driver.core.vendors.nvidia.nvml import Nvml
from hypothesis import given
from hypothesis import strategies as st
from node_model import Node


def test_device_edits_whole_gpu_has_node_and_render_node(tmp_path: Path) -> None:
    gpu = device("h100-80", 1)
    system = Node(tmp_path, {"/dev/nvidia1": (195, 1), "/dev/dri/renderD129": (226, 129)})
    for name in ("card1", "renderD129", "version"):
        system.file(f"/sys/bus/pci/devices/{gpu.pci_address}/drm/{name}/dev")
    nodes = device_edits(system, gpu, None).device_nodes
    assert [(node.path, node.type, node.major, node.minor, node.permissions) for node in nodes] == [
        ("/dev/nvidia1", "c", 195, 1, "rw"),
        ("/dev/dri/renderD129", "c", 226, 129, "rw"),
    ]


def test_device_edits_missing_node_uses_proc_numbers(tmp_path: Path) -> None:
    (node,) = device_edits(Node(tmp_path), device("h100-80", 3), None).device_nodes
    assert (node.path, node.type, node.major, node.minor) == ("/dev/nvidia3", "c", 195, 3)
    (tmp_path / "proc/devices").write_text("Character devices:\n  1 mem\n")
    with pytest.raises(NotFound, match="/dev/nvidia3 is not there"):
        device_edits(System(str(tmp_path)), device("h100-80", 3), None)


def test_device_edits_partition_capability_nodes_from_proc_or_rule(tmp_path: Path) -> None:
    gpu = device("h100-80", 2, places=((9, 4),))
    (partition,) = gpu.partitions
    system = Node(tmp_path, {"/dev/nvidia2": (195, 2)})
    instance, compute = capability_minors(2, partition.instance_id, 0)
    assert (instance, compute) == (3 + 135 * 2 + 9 * 1, 3 + 135 * 2 + 9 * 1 + 1)
    nodes = device_edits(system, gpu, partition).device_nodes
    assert [(node.path, node.major, node.minor) for node in nodes] == [
        ("/dev/nvidia2", 195, 2),
        (f"/dev/nvidia-caps/nvidia-cap{instance}", 234, instance),
        (f"/dev/nvidia-caps/nvidia-cap{compute}", 234, compute),
    ]
    directory = f"/proc/driver/nvidia/capabilities/gpu2/mig/gi{partition.instance_id}"
    system.file(f"{directory}/access", "DeviceFileMinor: 77\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    system.file(f"{directory}/ci0/access", "DeviceFileMinor: 78\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    assert [node.minor for node in device_edits(system, gpu, partition).device_nodes] == [2, 77, 78]


def test_capabilities_numbers_are_read_once(tmp_path: Path) -> None:
    gpu = device("h100-80", 2, places=((9, 4),))
    (partition,) = gpu.partitions
    system = Node(tmp_path, {"/dev/nvidia2": (195, 2)})
    numbers = Capabilities(system)
    rule = [node.minor for node in device_edits(system, gpu, partition, capabilities=numbers).device_nodes]
    # A number that the kernel did not report is read again.
    directory = f"/proc/driver/nvidia/capabilities/gpu2/mig/gi{partition.instance_id}"
    for file, number in ((f"{directory}/access", 77), (f"{directory}/ci0/access", 78)):
        system.file(file, f"DeviceFileMinor: {number}\n")
    from_proc = device_edits(system, gpu, partition, capabilities=numbers)
    assert rule != [2, 77, 78] == [node.minor for node in from_proc.device_nodes]
    for path in ("proc/devices", f"{directory[1:]}/access", f"{directory[1:]}/ci0/access"):
        (tmp_path / path).unlink()
    assert device_edits(system, gpu, partition, capabilities=numbers) == from_proc
    with pytest.raises(NotFound, match="nvidia-caps"):
        device_edits(system, gpu, partition)


@pytest.mark.parametrize("how", ["begin_session", "end_session", "drop_handles"])
def test_capabilities_numbers_are_kept_while_library_is_open(tmp_path: Path, how: str) -> None:
    system, nvml = Node(tmp_path), Nvml()
    boards = BoardCache(nvml, system, Watch(nvml, Lanes("test")))
    boards.begin_session(DriverFacts("580.95.05", "13.0"))
    former = boards.capabilities
    assert boards.capabilities is former and former.major() == 234
    if how == "begin_session":
        boards.begin_session(DriverFacts("581.0.0", "13.0"))
    else:
        getattr(boards, how)()
    # The kernel module can have another major number now.
    (tmp_path / "proc/devices").write_text("Character devices:\n235 nvidia-caps\n")
    assert (boards.capabilities.major(), former.major()) == (235, 234)


def test_device_edits_monitoring_has_partition_list_node(tmp_path: Path) -> None:
    system = Node(tmp_path, {"/dev/nvidia0": (195, 0)})
    for places in ((), ((9, 4),)):
        gpu = device("h100-80", places=places)
        nodes = device_edits(system, gpu, None, monitoring=True).device_nodes
        assert [(node.path, node.minor, node.permissions) for node in nodes] == [
            ("/dev/nvidia0", 0, "rw"),
            ("/dev/nvidia-caps/nvidia-cap2", 2, "r"),
        ]
    unable = replace(device("h100-80"), partitioning=Partitioning(supported=False))
    assert len(device_edits(system, unable, None, monitoring=True).device_nodes) == 1
    system.file("/proc/driver/nvidia/capabilities/mig/monitor", "DeviceFileMinor: 9\n")
    assert device_edits(system, gpu, gpu.partitions[0], monitoring=True).device_nodes[-1].minor == 9


def test_device_edits_partition_without_compute_instance_is_rejected(tmp_path: Path) -> None:
    gpu = device("h100-80", places=((9, 4),))
    system = Node(tmp_path, {"/dev/nvidia0": (195, 0)})
    unusable = replace(gpu.partitions[0], compute_instance_id=None)
    with pytest.raises(NotFound, match="no compute instance"):
        device_edits(system, gpu, unusable)
    (tmp_path / "proc/devices").write_text("Character devices:\n195 nvidia\n")
    with pytest.raises(NotFound, match="nvidia-caps"):
        device_edits(system, gpu, gpu.partitions[0])


def test_device_edits_only_graphics_partitions_have_render_nodes(tmp_path: Path) -> None:
    system = Node(tmp_path, {"/dev/nvidia0": (195, 0), "/dev/dri/renderD128": (226, 128)})
    for profile_id, rendered in ((14, 0), (47, 1)):
        gpu = device("rtx-pro-6000", places=((profile_id, 0),))
        system.file(f"/sys/bus/pci/devices/{gpu.pci_address}/drm/renderD128/dev")
        nodes = device_edits(system, gpu, gpu.partitions[0]).device_nodes
        assert sum("/dri/" in node.path for node in nodes) == rendered


@given(
    st.lists(st.tuples(st.integers(0, 31), st.integers(0, 14), st.integers(0, 7)), min_size=2, max_size=40, unique=True)
)
def test_capability_minors_are_unique_and_in_range(places: list[tuple[int, int, int]]) -> None:
    instances = {(gpu, instance): capability_minors(gpu, instance, compute)[0] for gpu, instance, compute in places}
    computes = [capability_minors(*place)[1] for place in places]
    every = [*instances.values(), *computes]
    assert len(set(every)) == len(every) and min(every) >= 3 and max(every) <= 4322


def test_majors_are_of_character_devices(tmp_path: Path) -> None:
    system = Node(tmp_path)
    assert character_major(system, "nvidia-frontend", "nvidia") == 195
    assert character_major(system, "not-this-one") is None
    (tmp_path / "proc/devices").unlink()
    assert character_major(system, "nvidia") is None
