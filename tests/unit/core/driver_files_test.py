# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Container edits from the driver's own list for each container with a GPU: the existing files, and an error that names missing CUDA files."""

from __future__ import annotations

from pathlib import Path

import pytest
from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.host.cdi import HOOK_ENVIRONMENT, ContainerEdits, Hook, build_spec
from dra_driver.core.vendors.nvidia.container.driver_files import SOCKET_OPTIONS, driver_edits
from node_model import FOLDER, VERSION, Node


def inside(edits: ContainerEdits) -> dict[str, str]:
    return {mount.container_path: mount.host_path for mount in edits.mounts}


def test_driver_edits_libraries_keep_path_and_links(tmp_path: Path) -> None:
    system = Node(tmp_path)
    system.driver()
    for name in ("libnvidia-glcore", "libnvcuvid", "libcudadebugger"):
        system.file(f"{FOLDER}/{name}.so.{VERSION}")
    system.file(f"{FOLDER}/libnvidia-ml.so.570.1.2")
    system.file(f"{FOLDER}/libcudart.so.12.0")
    system.file(f"{FOLDER}/libnvidia-egl-gbm.so.1.1.2")
    system.link(f"{FOLDER}/libcuda.so.1", f"libcuda.so.{VERSION}")
    system.link(f"{FOLDER}/libcuda.so", "libcuda.so.1")
    system.link(f"{FOLDER}/libnvidia-glcore-other.so", f"libnvidia-glcore.so.{VERSION}")
    found = inside(driver_edits(system, VERSION))
    assert found == {
        f"{FOLDER}/libcuda.so.{VERSION}": f"{FOLDER}/libcuda.so.{VERSION}",
        f"{FOLDER}/libcuda.so.1": f"{FOLDER}/libcuda.so.{VERSION}",
        f"{FOLDER}/libcuda.so": f"{FOLDER}/libcuda.so.{VERSION}",
        f"{FOLDER}/libcudadebugger.so.{VERSION}": f"{FOLDER}/libcudadebugger.so.{VERSION}",
        f"{FOLDER}/libcudadebugger.so.1": f"{FOLDER}/libcudadebugger.so.{VERSION}",
        f"{FOLDER}/libnvcuvid.so.{VERSION}": f"{FOLDER}/libnvcuvid.so.{VERSION}",
        f"{FOLDER}/libnvcuvid.so.1": f"{FOLDER}/libnvcuvid.so.{VERSION}",
        f"{FOLDER}/libnvidia-egl-gbm.so.1.1.2": f"{FOLDER}/libnvidia-egl-gbm.so.1.1.2",
        f"{FOLDER}/libnvidia-glcore.so.{VERSION}": f"{FOLDER}/libnvidia-glcore.so.{VERSION}",
        f"{FOLDER}/libnvidia-ml.so.{VERSION}": f"{FOLDER}/libnvidia-ml.so.{VERSION}",
        f"{FOLDER}/libnvidia-ml.so.1": f"{FOLDER}/libnvidia-ml.so.{VERSION}",
    }


def test_driver_edits_resolve_links_in_loader_directory(tmp_path: Path) -> None:
    """Debian keeps the driver's files below nvidia/current, with links in the loader's directory: the driver resolves the links."""
    system = Node(tmp_path)
    system.driver(f"{FOLDER}/nvidia/current")
    system.link(f"{FOLDER}/libcuda.so.1", f"nvidia/current/libcuda.so.{VERSION}")
    found = inside(driver_edits(system, VERSION))
    for name in ("libcuda.so.1", "libcuda.so"):
        assert found[f"{FOLDER}/{name}"] == f"{FOLDER}/nvidia/current/libcuda.so.{VERSION}"


def test_driver_edits_linked_directory_is_scanned_once(tmp_path: Path) -> None:
    system = Node(tmp_path)
    system.driver("/usr/lib64")
    system.link("/lib64", "usr/lib64")
    paths = [mount.container_path for mount in driver_edits(system, VERSION).mounts]
    assert len(set(paths)) == len(paths) and all(path.startswith("/usr/lib64/") for path in paths)


def test_driver_edits_programs_firmware_and_control_nodes(tmp_path: Path) -> None:
    system = Node(tmp_path)
    system.driver("/usr/lib64")
    system.nodes["/dev/nvidia0"] = (195, 0)
    for path in ("/usr/bin/nvidia-smi", "/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-ctk"):
        system.file(path)
    system.file("/usr/sbin/nvidia-cuda-mps-server")
    system.file(f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin")
    system.file(f"/lib/firmware/nvidia/{VERSION}/README")
    system.file("/usr/share/vulkan/icd.d/nvidia_icd.json")
    edits = driver_edits(system, VERSION)
    found = inside(edits)
    assert found["/usr/bin/nvidia-smi"] == "/usr/bin/nvidia-smi" and "/usr/sbin/nvidia-cuda-mps-server" in found
    assert f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin" in found
    assert found["/etc/vulkan/icd.d/nvidia_icd.json"] == "/usr/share/vulkan/icd.d/nvidia_icd.json"
    assert not any("README" in path or "cdi-hook" in path for path in found)
    assert [(node.path, node.major, node.minor) for node in edits.device_nodes] == [
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia-uvm", 510, 0),
        ("/dev/nvidia-uvm-tools", 510, 1),
    ]
    command = ("nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib64")
    assert edits.hooks == (Hook("createContainer", "/usr/bin/nvidia-cdi-hook", command, env=HOOK_ENVIRONMENT),)
    assert edits.env == ("NVIDIA_VISIBLE_DEVICES=void",)
    (tmp_path / "usr/bin/nvidia-cdi-hook").unlink()
    assert driver_edits(system, VERSION).hooks[0].args[:3] == ("nvidia-ctk", "hook", "update-ldcache")
    build_spec("k8s.gpu.nvidia.com/claim", {"x": edits}, edits)


def test_driver_edits_socket_is_mounted_writable_if_present(tmp_path: Path) -> None:
    system = Node(tmp_path)
    system.driver()
    path = "/run/nvidia-persistenced/socket"
    system.listen(path)
    (mount,) = (each for each in driver_edits(system, VERSION).mounts if each.container_path == path)
    assert mount.options == SOCKET_OPTIONS and "ro" not in mount.options
    system.path(path).unlink()
    assert path not in inside(driver_edits(system, VERSION))


@pytest.mark.parametrize(
    ("path", "remedy"), [("/dev/nvidiactl", "`nvidia-modprobe -c 0`"), ("/dev/nvidia-uvm", "`nvidia-modprobe -c 0 -u`")]
)
def test_driver_edits_missing_node_is_named_with_remedy(tmp_path: Path, path: str, remedy: str) -> None:
    system = Node(tmp_path)
    system.driver()
    del system.nodes[path]
    with pytest.raises(BackendUnavailable) as refusal:
        driver_edits(system, VERSION)
    assert path in str(refusal.value) and remedy in str(refusal.value) and refusal.value.code == "driver-incomplete"


@pytest.mark.parametrize("library", ["libcuda.so", "libnvidia-ml.so"])
def test_driver_edits_missing_library_is_named_with_version(tmp_path: Path, library: str) -> None:
    system = Node(tmp_path)
    system.driver()
    system.path(f"{FOLDER}/{library}.{VERSION}").rename(system.path(f"{FOLDER}/{library}.570.1.2"))
    with pytest.raises(BackendUnavailable, match=rf"{library}.{VERSION} .* was not found in /usr/lib/x86_64"):
        driver_edits(system, VERSION)
