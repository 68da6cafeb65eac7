# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a container needs for a GPU: device nodes, driver libraries, programs, capability nodes of MIG devices.

Facts: NVIDIA/nvidia-container-toolkit (pkg/nvcdi), NVIDIA/nvidia-modprobe for the numbers of the capability nodes.
"""

from __future__ import annotations

import re

from ..cdi import ContainerEdits, DeviceNode, Hook, Mount
from ..errors import BackendUnavailable, NotFound
from ..model import Device, Partition
from ..system import System

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib/nvidia/current",
    "/usr/lib/x86_64-linux-gnu/vdpau",
    "/usr/lib64/vdpau",
)
PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
PROGRAM_FOLDERS = ("/usr/bin", "/usr/local/bin", "/opt/bin")
SOCKETS = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket")
HOOKS = (
    ("/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook", "update-ldcache")),
    ("/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook", "update-ldcache")),
)
FIRMWARE_FOLDER = "/lib/firmware/nvidia"

# Libraries that programs open as lib<name>.so.1, also where ldconfig has made no link.
_SONAME_ONE = (
    "cuda",
    "cudadebugger",
    "nvidia-ml",
    "nvidia-ptxjitcompiler",
    "nvidia-opencl",
    "nvidia-encode",
    "nvcuvid",
)
_LIBRARY = re.compile(
    r"lib(nvidia-.+|cuda|cudadebugger|nvcuvid|nvoptix|vdpau_nvidia"
    r"|EGL_nvidia|GLX_nvidia|GLESv1_CM_nvidia|GLESv2_nvidia)\.so\.(?P<version>\d[\d.]*)"
)
_CAPABILITY_FIRST_INSTANCE = 3  # minors of /dev/nvidia-caps: 1 config, 2 monitor, then 135 for each GPU
_CAPABILITIES_OF_GPU = 135
_CAPABILITIES_OF_INSTANCE = 9


def driver_edits(system: System, driver_version: str) -> ContainerEdits:
    """Return what all GPUs of the machine need in a container.

    Libraries keep their path, and the links beside them (``libcuda.so.1``) become mounts as well, so that images with
    the same library folder need no hook. Raises BackendUnavailable when no library of this driver version is found.
    """
    libraries = _libraries(system, driver_version)
    if not libraries:
        raise BackendUnavailable(
            f"No library of the NVIDIA driver {driver_version} was found in {', '.join(LIBRARY_FOLDERS)}",
            hint="Install the driver's user space in the version of the loaded kernel module.",
        )
    mounts = [Mount(host, inside) for host, inside in libraries]
    for program in PROGRAMS:
        found = next(
            (f"{folder}/{program}" for folder in PROGRAM_FOLDERS if system.exists(f"{folder}/{program}")), None
        )
        if found is not None:
            mounts.append(Mount(found, f"/usr/bin/{program}"))
    firmware = f"{FIRMWARE_FOLDER}/{driver_version}"
    mounts.extend(
        Mount(f"{firmware}/{name}", f"{firmware}/{name}")
        for name in system.list_directory(firmware)
        if name.startswith("gsp") and name.endswith(".bin")
    )
    mounts.extend(
        Mount(socket, socket, ("ro", "nosuid", "nodev", "noexec", "bind"))
        for socket in SOCKETS
        if system.is_socket(socket)
    )
    return ContainerEdits(
        env=("NVIDIA_VISIBLE_DEVICES=void",),
        device_nodes=tuple(_node(system, path) for path in CONTROL_NODES if system.device_number(path)),
        mounts=tuple(mounts),
        hooks=_cache_hook(system, sorted({inside.rpartition("/")[0] for _host, inside in libraries})),
    )


def device_edits(system: System, device: Device, partition: Partition | None) -> ContainerEdits:
    """Return what one GPU, or one MIG device of it, needs in a container.

    Raises NotFound when the device's numbers cannot be told, or when a partition has no compute instance.
    """
    nodes = [_gpu_node(system, device)]
    graphics = partition is None or "+gfx" in partition.profile
    if partition is not None:
        nodes.extend(_capability_nodes(system, device, partition))
    if graphics:
        nodes.extend(_render_nodes(system, device))
    return ContainerEdits(device_nodes=tuple(nodes))


def capability_minors(device_minor: int, instance_id: int, compute_instance_id: int) -> tuple[int, int]:
    """Return the minors of the capability nodes of a GPU instance and a compute instance, by the driver's rule."""
    instance = (
        _CAPABILITY_FIRST_INSTANCE + _CAPABILITIES_OF_GPU * device_minor + _CAPABILITIES_OF_INSTANCE * instance_id
    )
    return instance, instance + 1 + compute_instance_id


def character_major(system: System, *names: str) -> int | None:
    """Return the major number of a character device driver from /proc/devices, by the first of its names found."""
    try:
        text = system.read_text("/proc/devices")
    except OSError:
        return None
    majors: dict[str, int] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        number, _space, name = line.strip().partition(" ")
        if number.isdigit():
            majors[name.strip()] = int(number)
    return next((majors[name] for name in names if name in majors), None)


def _gpu_node(system: System, device: Device) -> DeviceNode:
    path = f"/dev/nvidia{device.minor}"
    if system.device_number(path):
        return _node(system, path)
    major = character_major(system, "nvidia", "nvidia-frontend")
    if major is None:
        raise NotFound(
            f"{path} is not there and /proc/devices has no entry for nvidia",
            hint="Load the NVIDIA kernel module; `nvidia-modprobe -c 0 -u` makes the nodes.",
        )
    return DeviceNode(path, type="c", major=major, minor=device.minor, permissions="rw")


def _capability_nodes(system: System, device: Device, partition: Partition) -> list[DeviceNode]:
    if partition.compute_instance_id is None:
        raise NotFound(f"The partition {partition.describe()} of GPU {device.uuid} has no compute instance")
    major = character_major(system, "nvidia-caps")
    if major is None:
        raise NotFound(
            "/proc/devices has no entry for nvidia-caps",
            hint="The NVIDIA kernel module must be loaded on this machine.",
        )
    computed = capability_minors(device.minor, partition.instance_id, partition.compute_instance_id)
    instance = f"/proc/driver/nvidia/capabilities/gpu{device.minor}/mig/gi{partition.instance_id}"
    files = (f"{instance}/access", f"{instance}/ci{partition.compute_instance_id}/access")
    nodes: list[DeviceNode] = []
    for file, fallback in zip(files, computed):
        minor = _access_minor(system, file)
        number = fallback if minor is None else minor
        nodes.append(
            DeviceNode(f"/dev/nvidia-caps/nvidia-cap{number}", type="c", major=major, minor=number, permissions="r")
        )
    return nodes


def _access_minor(system: System, path: str) -> int | None:
    try:
        text = system.read_text(path)
    except OSError:
        return None
    found = re.search(r"DeviceFileMinor:\s*(\d+)", text)
    return int(found.group(1)) if found else None


def _render_nodes(system: System, device: Device) -> list[DeviceNode]:
    names = system.list_directory(f"/sys/bus/pci/devices/{device.pci_address}/drm")
    paths = [f"/dev/dri/{name}" for name in names if re.fullmatch(r"(card|renderD)\d+", name)]
    return [_node(system, path) for path in paths if system.device_number(path)]


def _node(system: System, path: str) -> DeviceNode:
    number = system.device_number(path)
    if number is None:
        raise NotFound(f"{path} is no device node")
    return DeviceNode(path, type=number.type, major=number.major, minor=number.minor, permissions="rw")


def _libraries(system: System, driver_version: str) -> list[tuple[str, str]]:
    """Return pairs of the file on the host and the path inside: the file itself and each link to it beside it."""
    found: list[tuple[str, str]] = []
    seen = set()
    for folder in LIBRARY_FOLDERS:
        real_folder = system.real_path(folder)
        if real_folder in seen or not system.exists(folder):
            continue
        seen.add(real_folder)
        names = system.list_directory(real_folder)
        files: dict[str, str] = {}
        for name in names:
            match = _LIBRARY.fullmatch(name)
            path = f"{real_folder}/{name}"
            if match and match.group("version") == driver_version and not system.is_link(path):
                files[path] = match.group(1)
        links: dict[str, list[str]] = {path: [] for path in files}
        stems = tuple(f"lib{stem}.so" for stem in set(files.values()))
        for name in names:
            path = f"{real_folder}/{name}"
            if name.startswith(stems) and system.is_link(path):
                target = system.real_path(path)
                if target in links:
                    links[target].append(path)
        for path, stem in sorted(files.items()):
            found.append((path, path))
            inside = list(links[path])
            if not inside and stem in _SONAME_ONE:
                inside.append(f"{real_folder}/lib{stem}.so.1")
            found.extend((path, link) for link in inside)
    return found


def _cache_hook(system: System, folders: list[str]) -> tuple[Hook, ...]:
    for path, command in HOOKS:
        if system.exists(path):
            arguments = tuple(part for folder in folders for part in ("--folder", folder))
            return (Hook("createContainer", path, (*command, *arguments)),)
    return ()
