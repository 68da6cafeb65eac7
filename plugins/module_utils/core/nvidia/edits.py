# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a container needs for one GPU or one MIG device: its device nodes and its capability nodes.

Facts: NVIDIA/nvidia-container-toolkit (pkg/nvcdi), NVIDIA/nvidia-modprobe for the numbers of the capability nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from ..cdi import ContainerEdits, DeviceNode
from ..errors import NotFound
from ..model import Device, Partition
from ..system import DeviceNumber, System

#: Has NVIDIA's container runtime add nothing of its own.
NOTHING = ContainerEdits(env=("NVIDIA_VISIBLE_DEVICES=void",))

_CAPABILITY_MONITOR = 2
_CAPABILITY_FIRST_INSTANCE = 3  # minors of /dev/nvidia-caps: 1 config, 2 monitor, then 135 for each GPU
_CAPABILITIES_OF_GPU = 135
_CAPABILITIES_OF_INSTANCE = 9


def device_edits(
    system: System,
    device: Device,
    partition: Partition | None,
    monitoring: bool = False,
    capability_major: Callable[[], int | None] | None = None,
) -> ContainerEdits:
    """Return what one GPU, or one MIG device of it, needs in a container.

    With ``monitoring`` the node of mig/monitor is among it where GPUs can be partitioned: whoever has it may list all GPU
    instances and compute instances, and holds none of them.

    ``capability_major`` tells the major number of the capabilities' nodes, for whoever knows it already; else it is looked up.

    Raises NotFound when the device's numbers cannot be told, or when a partition has no compute instance.
    """
    major = partial(_major, capability_major or partial(read_capability_major, system))
    nodes = [_gpu_node(system, device)]
    graphics = partition is None or "+gfx" in partition.profile
    if partition is not None:
        nodes.extend(_capability_nodes(system, device, partition, major))
    if graphics:
        nodes.extend(_render_nodes(system, device))
    if monitoring and device.partitioning.supported:
        monitor = ("/proc/driver/nvidia/capabilities/mig/monitor", _CAPABILITY_MONITOR)
        nodes.append(_capability_node(system, major(), *monitor))
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
    characters = text.partition("Block devices:")[0]
    for name in names:
        found = re.search(rf"^ *(\d+) +{re.escape(name)} *$", characters, re.MULTILINE)
        if found:
            return int(found.group(1))
    return None


def _gpu_node(system: System, device: Device) -> DeviceNode:
    path = f"/dev/nvidia{device.minor}"
    number = system.device_number(path)
    if number is not None:
        return _as_it_is(path, number)
    major = character_major(system, "nvidia", "nvidia-frontend")
    if major is None:
        raise NotFound(
            f"{path} is not there and /proc/devices has no entry for nvidia",
            hint="Load the NVIDIA kernel module; `nvidia-modprobe -c 0 -u` makes the nodes.",
        )
    return DeviceNode(path, type="c", major=major, minor=device.minor, permissions="rw")


def _capability_nodes(
    system: System, device: Device, partition: Partition, major: Callable[[], int]
) -> list[DeviceNode]:
    if partition.compute_instance_id is None:
        raise NotFound(f"The partition {partition.describe()} of GPU {device.uuid} has no compute instance")
    computed = capability_minors(device.minor, partition.instance_id, partition.compute_instance_id)
    instance = f"/proc/driver/nvidia/capabilities/gpu{device.minor}/mig/gi{partition.instance_id}"
    files = (f"{instance}/access", f"{instance}/ci{partition.compute_instance_id}/access")
    number = major()
    return [_capability_node(system, number, file, fallback) for file, fallback in zip(files, computed)]


def read_capability_major(system: System) -> int | None:
    """Return the major number of the capabilities' nodes; None where the kernel module is not loaded."""
    return character_major(system, "nvidia-caps")


def _major(read: Callable[[], int | None]) -> int:
    major = read()
    if major is None:
        raise NotFound(
            "/proc/devices has no entry for nvidia-caps",
            hint="The NVIDIA kernel module must be loaded on this machine.",
        )
    return major


def _capability_node(system: System, major: int, file: str, fallback: int) -> DeviceNode:
    """The node of one capability, by its file in /proc, or by the driver's own rule where that cannot be read."""
    minor = _access_minor(system, file)
    number = fallback if minor is None else minor
    return DeviceNode(f"/dev/nvidia-caps/nvidia-cap{number}", type="c", major=major, minor=number, permissions="r")


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
    return [node(system, path) for path in paths if system.device_number(path)]


def node(system: System, path: str) -> DeviceNode:
    """Return a node as it is on the host, to be read and written but not made anew. Raises NotFound."""
    number = system.device_number(path)
    if number is None:
        raise NotFound(f"{path} is no device node")
    return _as_it_is(path, number)


def _as_it_is(path: str, number: DeviceNumber) -> DeviceNode:
    return DeviceNode(path, type=number.type, major=number.major, minor=number.minor, permissions="rw")
