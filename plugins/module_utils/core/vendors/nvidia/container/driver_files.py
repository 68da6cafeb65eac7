# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the files of the driver that every container with a GPU needs: control nodes, libraries, programs, and sockets.

Facts: NVIDIA/nvidia-container-toolkit (pkg/nvcdi, internal/discover). Its list is the reference for this one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from ....errors import BackendUnavailable
from ....host.cdi import ContainerEdits, Hook, Mount
from ....host.system import System
from ...host_texts import text_or_empty
from .container_edits import character_major, node

LOG = logging.getLogger(__name__)

# In the order of their minor numbers.
UVM_NODES = ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
CONTROL_NODES = ("/dev/nvidiactl", *UVM_NODES, "/dev/nvidia-modeset")
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
    "/usr/lib/aarch64-linux-gnu/vdpau",
    "/usr/lib64/vdpau",
)
PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
)
PROGRAM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/opt/bin")
FABRIC_MANAGER_SOCKET = "/run/nvidia-fabricmanager/socket"
PERSISTENCE_SOCKET = "/run/nvidia-persistenced/socket"
SOCKETS = (PERSISTENCE_SOCKET, FABRIC_MANAGER_SOCKET)
FILE_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
# Programs write to sockets, so these are not read-only.
SOCKET_OPTIONS = ("nosuid", "nodev", "rbind", "rprivate", "noexec")
# Programs that change a container before it starts, and the arguments with which each is called.
HOOK_PROGRAMS = (
    ("/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook",)),
    ("/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook")),
)
FIRMWARE_FOLDER = "/lib/firmware/nvidia"
# Files by which graphics, ray tracing, and OpenCL loaders find the driver, and the directory in which each loader
# looks.
CONFIGURATION_FOLDERS = ("/etc", "/usr/local/share", "/usr/share")
CONFIGURATION = (
    ("glvnd/egl_vendor.d/10_nvidia.json", "/usr/share"),
    ("egl/egl_external_platform.d/15_nvidia_gbm.json", "/usr/share"),
    ("egl/egl_external_platform.d/10_nvidia_wayland.json", "/usr/share"),
    ("egl/egl_external_platform.d/09_nvidia_wayland2.json", "/usr/share"),
    ("egl/egl_external_platform.d/20_nvidia_xcb.json", "/usr/share"),
    ("egl/egl_external_platform.d/20_nvidia_xlib.json", "/usr/share"),
    ("nvidia/nvoptix.bin", "/usr/share"),
    ("OpenCL/vendors/nvidia.icd", "/etc"),
    ("vulkan/icd.d/nvidia_icd.json", "/etc"),
    ("vulkan/icd.d/nvidia_icd.x86_64.json", "/etc"),
    ("vulkan/icd.d/nvidia_icd.aarch64.json", "/etc"),
    ("vulkan/icd.d/nvidia_layers.json", "/etc"),
    ("vulkan/implicit_layer.d/nvidia_layers.json", "/etc"),
)

# Names by which programs open a library, even if the host has no such link.
_NAMES = {
    "cuda": ("libcuda.so.1", "libcuda.so"),
    "cudadebugger": ("libcudadebugger.so.1",),
    "nvidia-ml": ("libnvidia-ml.so.1",),
    "nvidia-ptxjitcompiler": ("libnvidia-ptxjitcompiler.so.1",),
    "nvidia-opencl": ("libnvidia-opencl.so.1",),
    "nvidia-encode": ("libnvidia-encode.so.1",),
    "nvidia-opticalflow": ("libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"),
    "nvidia-vulkan-producer": ("libnvidia-vulkan-producer.so",),
    "nvidia-allocator": ("gbm/nvidia-drm_gbm.so",),
    "nvcuvid": ("libnvcuvid.so.1",),
    "GLX_nvidia": ("libGLX_indirect.so.0",),
}
_LIBRARY = re.compile(r"lib(?P<stem>.+)\.so\.(?P<version>\d[\d.]*)")
# Libraries of the driver with separate version numbers.
_OTHER_VERSION = re.compile(r"nvidia-egl-(gbm|wayland2?|xcb|xlib)|nvidia-nvvm70")
# Files that CUDA requires, and how to create them.
_NEEDED_NODES = (
    ("/dev/nvidiactl", "Load the kernel module nvidia; `nvidia-modprobe -c 0` makes the node."),
    ("/dev/nvidia-uvm", "Load the kernel module nvidia-uvm; `nvidia-modprobe -c 0 -u` makes the node."),
)
_NEEDED_LIBRARIES = ("libcuda.so", "libnvidia-ml.so")


def watched_paths(driver_version: str) -> tuple[str, ...]:
    """Return the paths whose change can change the result of ``driver_edits``."""
    return (*CONTROL_NODES, *SOCKETS, *LIBRARY_FOLDERS, *PROGRAM_FOLDERS, f"{FIRMWARE_FOLDER}/{driver_version}")


def driver_edits(system: System, driver_version: str) -> ContainerEdits:
    """Return the container edits that all GPUs of the host share, for the files that exist now.

    Libraries keep their path. Links to them (``libcuda.so.1``) become mounts too, so that images with the same library
    directory need no hook. Missing optional files are left out. Raises BackendUnavailable, with the name of the file,
    if a file that CUDA needs is missing.
    """
    check_nodes(system)
    libraries = _libraries(system, driver_version)
    mounts = [Mount(host, inside, FILE_OPTIONS) for host, inside in libraries]
    check_libraries(mounts, driver_version)
    for program in PROGRAMS:
        found = _first(system, (f"{folder}/{program}" for folder in PROGRAM_FOLDERS))
        if found is not None:
            mounts.append(Mount(found, found, FILE_OPTIONS))
    firmware = f"{FIRMWARE_FOLDER}/{driver_version}"
    mounts.extend(
        Mount(f"{firmware}/{name}", f"{firmware}/{name}", FILE_OPTIONS)
        for name in system.list_directory(firmware)
        if name.startswith(("gsp", "ucodes")) and name.endswith(".bin")
    )
    for name, inside in CONFIGURATION:
        found = _first(system, (f"{folder}/{name}" for folder in CONFIGURATION_FOLDERS))
        if found is not None:
            mounts.append(Mount(found, f"{inside}/{name}", FILE_OPTIONS))
    mounts.extend(Mount(socket, socket, SOCKET_OPTIONS) for socket in SOCKETS if system.is_socket(socket))
    return ContainerEdits(
        env=("NVIDIA_VISIBLE_DEVICES=void",),
        device_nodes=tuple(node(system, path) for path in CONTROL_NODES if system.device_number(path)),
        mounts=tuple(mounts),
        hooks=_cache_hook(system, sorted({host.rpartition("/")[0] for host, _inside in libraries})),
    )


def hook_program(system: System) -> str | None:
    """Return the toolkit's program whose hook updates the container's library cache; None if none is installed."""
    return _first(system, (path for path, _command in HOOK_PROGRAMS))


def create_uvm_nodes(system: System) -> None:
    """Create the device nodes of the loaded kernel module nvidia-uvm, or replace those with other numbers.

    Neither the kernel module nor a boot creates them. The first program that runs `nvidia-modprobe -u`, such as CUDA on
    the host, does. Numbers and mode are those of NVIDIA/nvidia-modprobe (nvidia-modprobe-utils.c). Errors are logged.
    """
    major = character_major(system, "nvidia-uvm")
    if major is None:
        return
    text = text_or_empty(system, "/proc/driver/nvidia/params")
    parameters = dict(re.findall(r"^(\w+): (\d+)$", text, re.MULTILINE))
    if parameters.get("ModifyDeviceFiles") == "0":
        return  # the administrator of the host creates them
    if {parameters.get(name, "0") for name in ("DeviceFileUID", "DeviceFileGID")} != {"0"}:
        return  # only nvidia-modprobe sets their owner: the driver has no right to
    mode = int(parameters.get("DeviceFileMode", 0o666)) & 0o777
    for minor, path in enumerate(UVM_NODES):
        found = system.device_number(path)
        if found is not None and (found.major, found.minor) == (major, minor):
            continue
        try:
            if found is not None:
                system.remove(path)
            if system.make_character_device(path, major, minor, mode):
                LOG.info("%s is created", path)
        except OSError as error:
            LOG.warning("%s is not created: %s", path, error)


def check_nodes(system: System) -> None:
    """Raise BackendUnavailable, with its name, if a device node that CUDA needs is missing."""
    for path, remedy in _NEEDED_NODES:
        if system.device_number(path) is None:
            raise BackendUnavailable(
                f"{path} is no device node of this machine, and no container can use CUDA without it",
                hint=remedy,
                code="driver-incomplete",
            )


def check_libraries(mounts: Iterable[Mount], driver_version: str) -> None:
    """Raise BackendUnavailable, with its name, if a library of this driver version that CUDA needs is missing."""
    there = {mount.host_path.rpartition("/")[2] for mount in mounts}
    for name in _NEEDED_LIBRARIES:
        if f"{name}.{driver_version}" not in there:
            raise BackendUnavailable(
                f"{name}.{driver_version} of the loaded NVIDIA driver was not found in {', '.join(LIBRARY_FOLDERS)}",
                hint="Install the driver's user space in the version of the loaded kernel module.",
                code="driver-incomplete",
            )


def _first(system: System, paths: Iterable[str]) -> str | None:
    return next((path for path in paths if system.exists(path)), None)


def _libraries(system: System, driver_version: str) -> list[tuple[str, str]]:
    """Return pairs of the host file and the container path: each library, then every link to it."""
    folders: dict[str, tuple[str, ...]] = {}
    for folder in LIBRARY_FOLDERS:
        real_folder = system.real_path(folder)
        if real_folder not in folders and system.exists(folder):
            folders[real_folder] = system.list_directory(real_folder)
    stems: dict[str, str] = {}
    for folder, names in folders.items():
        for name in names:
            match = _LIBRARY.fullmatch(name)
            path = f"{folder}/{name}"
            if match is None or system.is_link(path):
                continue
            stem, version = match.groups()
            if version == driver_version or _OTHER_VERSION.fullmatch(stem):
                stems[path] = stem
    links: dict[str, list[str]] = {path: [] for path in stems}
    beginnings = tuple(f"lib{stem}.so" for stem in set(stems.values()))
    for folder, names in folders.items():
        for name in names:
            path = f"{folder}/{name}"
            if name.startswith(beginnings) and system.is_link(path):
                target = system.real_path(path)
                if target in links:
                    links[target].append(path)
    found: list[tuple[str, str]] = []
    for path, stem in stems.items():
        inside = links[path]
        # A name without a link is created next to the library and each link to it. One existing link is enough.
        there = {link.rpartition("/")[2] for link in inside}
        beside = dict.fromkeys(each.rpartition("/")[0] for each in (path, *inside))
        made = [f"{folder}/{name}" for name in _NAMES.get(stem, ()) if name not in there for folder in beside]
        found.extend((path, each) for each in (path, *inside, *made))
    return found


def _cache_hook(system: System, folders: list[str]) -> tuple[Hook, ...]:
    path = hook_program(system)
    if path is None:
        return ()
    arguments = [part for folder in folders for part in ("--folder", folder)]
    return (Hook("createContainer", path, (*dict(HOOK_PROGRAMS)[path], "update-ldcache", *arguments)),)
