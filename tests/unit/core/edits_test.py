# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a container gets for a GPU: from folders, links, numbers in /proc and the driver's own rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from board_model import device
from dra_driver.core.cdi import ContainerEdits, Hook, build_spec
from dra_driver.core.errors import BackendUnavailable, NotFound
from dra_driver.core.nvidia.edits import capability_minors, character_major, device_edits, driver_edits
from dra_driver.core.system import DeviceNumber, System
from hypothesis import given
from hypothesis import strategies as st

VERSION = "580.95.05"
DEVICES = """Character devices:
  1 mem
195 nvidia
234 nvidia-caps
510 nvidia-uvm

Block devices:
195 not-this-one
"""


class Node(System):
    """A machine below a folder whose device nodes are a table; the folder itself holds no device nodes."""

    def __init__(self, root: Path, nodes: dict[str, tuple[int, int]] | None = None) -> None:
        super().__init__(str(root))
        self.nodes = nodes or {}
        (root / "proc").mkdir(exist_ok=True)
        (root / "proc/devices").write_text(DEVICES)

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber("c", *self.nodes[path]) if path in self.nodes else None

    def file(self, path: str, text: str = "") -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def link(self, path: str, target: str) -> None:
        self.path(path).symlink_to(target)


def inside(edits: ContainerEdits) -> dict[str, str]:
    return {mount.container_path: mount.host_path for mount in edits.mounts}


def test_libraries_keep_their_path_and_their_links(tmp_path: Path) -> None:
    system = Node(tmp_path)
    folder = "/usr/lib/x86_64-linux-gnu"
    for name in ("libcuda", "libnvidia-ml", "libnvidia-glcore", "libnvcuvid", "libcudadebugger"):
        system.file(f"{folder}/{name}.so.{VERSION}")
    system.file(f"{folder}/libnvidia-ml.so.570.1.2")
    system.file(f"{folder}/libcudart.so.12.0")
    system.link(f"{folder}/libcuda.so.1", f"libcuda.so.{VERSION}")
    system.link(f"{folder}/libcuda.so", "libcuda.so.1")
    system.link(f"{folder}/libnvidia-glcore-other.so", f"libnvidia-glcore.so.{VERSION}")
    found = inside(driver_edits(system, VERSION))
    assert found == {
        f"{folder}/libcuda.so.{VERSION}": f"{folder}/libcuda.so.{VERSION}",
        f"{folder}/libcuda.so.1": f"{folder}/libcuda.so.{VERSION}",
        f"{folder}/libcuda.so": f"{folder}/libcuda.so.{VERSION}",
        f"{folder}/libcudadebugger.so.{VERSION}": f"{folder}/libcudadebugger.so.{VERSION}",
        f"{folder}/libcudadebugger.so.1": f"{folder}/libcudadebugger.so.{VERSION}",
        f"{folder}/libnvcuvid.so.{VERSION}": f"{folder}/libnvcuvid.so.{VERSION}",
        f"{folder}/libnvcuvid.so.1": f"{folder}/libnvcuvid.so.{VERSION}",
        f"{folder}/libnvidia-glcore.so.{VERSION}": f"{folder}/libnvidia-glcore.so.{VERSION}",
        f"{folder}/libnvidia-ml.so.{VERSION}": f"{folder}/libnvidia-ml.so.{VERSION}",
        f"{folder}/libnvidia-ml.so.1": f"{folder}/libnvidia-ml.so.{VERSION}",
    }


def test_a_folder_that_is_another_s_link_is_looked_at_once(tmp_path: Path) -> None:
    system = Node(tmp_path)
    system.file(f"/usr/lib64/libnvidia-ml.so.{VERSION}")
    system.link("/lib64", "usr/lib64")
    found = driver_edits(system, VERSION).mounts
    assert [mount.container_path for mount in found] == [
        f"/usr/lib64/libnvidia-ml.so.{VERSION}",
        "/usr/lib64/libnvidia-ml.so.1",
    ]


def test_programs_firmware_control_nodes_and_the_loader_s_cache(tmp_path: Path) -> None:
    nodes = {"/dev/nvidiactl": (195, 255), "/dev/nvidia-uvm": (510, 0), "/dev/nvidia0": (195, 0)}
    system = Node(tmp_path, nodes)
    system.file(f"/usr/lib64/libcuda.so.{VERSION}")
    system.file("/usr/bin/nvidia-smi")
    system.file("/usr/bin/nvidia-cdi-hook")
    system.file("/usr/bin/nvidia-ctk")
    system.file(f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin")
    system.file(f"/lib/firmware/nvidia/{VERSION}/README")
    edits = driver_edits(system, VERSION)
    found = inside(edits)
    assert found["/usr/bin/nvidia-smi"] == "/usr/bin/nvidia-smi"
    assert f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin" in found
    assert not any("README" in path or "cdi-hook" in path for path in found)
    assert [(node.path, node.major, node.minor) for node in edits.device_nodes] == [
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia-uvm", 510, 0),
    ]
    assert edits.hooks == (
        Hook(
            "createContainer",
            "/usr/bin/nvidia-cdi-hook",
            ("nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib64"),
        ),
    )
    assert edits.env == ("NVIDIA_VISIBLE_DEVICES=void",)
    (tmp_path / "usr/bin/nvidia-cdi-hook").unlink()
    assert driver_edits(system, VERSION).hooks[0].args[:3] == ("nvidia-ctk", "hook", "update-ldcache")
    build_spec("k8s.gpu.nvidia.com/claim", {"x": edits}, edits)


def test_without_the_driver_s_libraries_the_reason_is_given(tmp_path: Path) -> None:
    system = Node(tmp_path)
    system.file("/usr/lib64/libnvidia-ml.so.570.1.2")
    with pytest.raises(BackendUnavailable, match=r"No library of the NVIDIA driver 580\.95\.05"):
        driver_edits(system, VERSION)


def test_a_whole_gpu_has_its_node_and_its_render_node(tmp_path: Path) -> None:
    gpu = device("h100-80", 1)
    system = Node(tmp_path, {"/dev/nvidia1": (195, 1), "/dev/dri/renderD129": (226, 129)})
    for name in ("card1", "renderD129", "version"):
        system.file(f"/sys/bus/pci/devices/{gpu.pci_address}/drm/{name}/dev")
    nodes = device_edits(system, gpu, None).device_nodes
    assert [(node.path, node.type, node.major, node.minor, node.permissions) for node in nodes] == [
        ("/dev/nvidia1", "c", 195, 1, "rw"),
        ("/dev/dri/renderD129", "c", 226, 129, "rw"),
    ]


def test_a_node_that_is_not_there_has_its_numbers_nevertheless(tmp_path: Path) -> None:
    (node,) = device_edits(Node(tmp_path), device("h100-80", 3), None).device_nodes
    assert (node.path, node.type, node.major, node.minor) == ("/dev/nvidia3", "c", 195, 3)
    (tmp_path / "proc/devices").write_text("Character devices:\n  1 mem\n")
    with pytest.raises(NotFound, match="/dev/nvidia3 is not there"):
        device_edits(System(str(tmp_path)), device("h100-80", 3), None)


def test_a_partition_has_capability_nodes_by_proc_or_by_rule(tmp_path: Path) -> None:
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
    folder = f"/proc/driver/nvidia/capabilities/gpu2/mig/gi{partition.instance_id}"
    system.file(f"{folder}/access", "DeviceFileMinor: 77\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    system.file(f"{folder}/ci0/access", "DeviceFileMinor: 78\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    assert [node.minor for node in device_edits(system, gpu, partition).device_nodes] == [2, 77, 78]


def test_a_partition_without_compute_instance_or_driver_has_no_edits(tmp_path: Path) -> None:
    gpu = device("h100-80", places=((9, 4),))
    system = Node(tmp_path, {"/dev/nvidia0": (195, 0)})
    unusable = replace(gpu.partitions[0], compute_instance_id=None)
    with pytest.raises(NotFound, match="no compute instance"):
        device_edits(system, gpu, unusable)
    (tmp_path / "proc/devices").write_text("Character devices:\n195 nvidia\n")
    with pytest.raises(NotFound, match="nvidia-caps"):
        device_edits(system, gpu, gpu.partitions[0])


def test_only_graphics_partitions_have_render_nodes(tmp_path: Path) -> None:
    system = Node(tmp_path, {"/dev/nvidia0": (195, 0), "/dev/dri/renderD128": (226, 128)})
    for profile_id, rendered in ((14, 0), (47, 1)):
        gpu = device("rtx-pro-6000", places=((profile_id, 0),))
        system.file(f"/sys/bus/pci/devices/{gpu.pci_address}/drm/renderD128/dev")
        nodes = device_edits(system, gpu, gpu.partitions[0]).device_nodes
        assert sum("/dri/" in node.path for node in nodes) == rendered


@given(
    st.lists(st.tuples(st.integers(0, 31), st.integers(0, 14), st.integers(0, 7)), min_size=2, max_size=40, unique=True)
)
def test_capability_minors_are_apart_and_within_the_driver_s_range(places: list[tuple[int, int, int]]) -> None:
    instances = {(gpu, instance): capability_minors(gpu, instance, compute)[0] for gpu, instance, compute in places}
    computes = [capability_minors(*place)[1] for place in places]
    every = [*instances.values(), *computes]
    assert len(set(every)) == len(every) and min(every) >= 3 and max(every) <= 4322


def test_majors_are_those_of_character_devices(tmp_path: Path) -> None:
    system = Node(tmp_path)
    assert character_major(system, "nvidia-frontend", "nvidia") == 195
    assert character_major(system, "not-this-one") is None
    (tmp_path / "proc/devices").unlink()
    assert character_major(system, "nvidia") is None
