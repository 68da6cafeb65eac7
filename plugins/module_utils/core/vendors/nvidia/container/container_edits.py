# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The container edits for one GPU or one MIG device: its device nodes and its capability nodes.

Facts: NVIDIA/nvidia-container-toolkit (pkg/nvcdi), NVIDIA/nvidia-modprobe for the numbers of the capability nodes.
"""

from __future__ import annotations

import re

from ....errors import NotFound
from ....host.cdi import ContainerEdits, DeviceNode
from ....host.system import DeviceNumber, System
from ....model import Device, Partition
from ...host_texts import text_or_empty

#: Makes NVIDIA's container runtime add no device.
NOTHING = ContainerEdits(env=("NVIDIA_VISIBLE_DEVICES=void",))

_CAPABILITY_MONITOR = 2
_CAPABILITY_FIRST_INSTANCE = 3  # minors of /dev/nvidia-caps: 1 config, 2 monitor, then 135 for each GPU
_CAPABILITIES_OF_GPU = 135
_CAPABILITIES_OF_INSTANCE = 9


class Capabilities:
    """The device numbers of capability nodes.

    Each is read once, because it stays the same while the kernel module is loaded.

    Facts: once loaded, the module lists all possible capabilities with their minors in
    /proc/driver/nvidia-caps/mig-minors.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._major: int | None = None
        self._minors: dict[str, int] = {}

    def major(self) -> int:
        """Return the major number of the capability nodes. Raises NotFound if the kernel module is not loaded."""
        if self._major is None:
            self._major = character_major(self._system, "nvidia-caps")
        if self._major is None:
            raise NotFound(
                "/proc/devices has no entry for nvidia-caps",
                hint="The NVIDIA kernel module must be loaded on this machine.",
            )
        return self._major

    def node(self, file: str, fallback: int) -> DeviceNode:
        """Return the node of a capability, by its file in /proc, or with the minor ``fallback`` if that cannot be read.

        Raises NotFound if the kernel module is not loaded.
        """
        minor = self._minors.get(file)
        if minor is None:
            minor = _access_minor(self._system, file)
            if minor is not None:
                self._minors[file] = minor
        number = fallback if minor is None else minor
        return DeviceNode(
            f"/dev/nvidia-caps/nvidia-cap{number}", type="c", major=self.major(), minor=number, permissions="r"
        )


def device_edits(
    system: System,
    device: Device,
    partition: Partition | None,
    capabilities: Capabilities | None = None,
    *,
    monitoring: bool = False,
) -> ContainerEdits:
    """Return the container edits for one GPU, or for one of its MIG devices.

    With ``monitoring``, a GPU with MIG support includes the node of mig/monitor. Its holder can list all GPU instances
    and compute instances, but does not use any.

    ``capabilities`` are cached device numbers; without them the numbers are read. Raises NotFound if the device's
    numbers are unknown, or if a partition has no compute instance.
    """
    numbers = capabilities or Capabilities(system)
    nodes = [_gpu_node(system, device)]
    has_graphics = partition is None or "+gfx" in partition.profile
    if partition is not None:
        nodes.extend(_capability_nodes(device, partition, numbers))
    if has_graphics:
        nodes.extend(_render_nodes(system, device))
    if monitoring and device.partitioning.supported:
        nodes.append(numbers.node("/proc/driver/nvidia/capabilities/mig/monitor", _CAPABILITY_MONITOR))
    return ContainerEdits(device_nodes=tuple(nodes))


def capability_minors(device_minor: int, instance_id: int, compute_instance_id: int) -> tuple[int, int]:
    """Return the minors of the capability nodes of a GPU instance and a compute instance, computed by the driver's rule."""
    instance = (
        _CAPABILITY_FIRST_INSTANCE + _CAPABILITIES_OF_GPU * device_minor + _CAPABILITIES_OF_INSTANCE * instance_id
    )
    return instance, instance + 1 + compute_instance_id


def character_major(system: System, *names: str) -> int | None:
    """Return the major number of a character device driver from /proc/devices, by the first of its names that is found."""
    characters = text_or_empty(system, "/proc/devices").partition("Block devices:")[0]
    for name in names:
        found = re.search(rf"^ *(\d+) +{re.escape(name)} *$", characters, re.MULTILINE)
        if found:
            return int(found.group(1))
    return None


def _gpu_node(system: System, device: Device) -> DeviceNode:
    path = f"/dev/nvidia{device.minor}"
    number = system.device_number(path)
    if number is not None:
        return _same_device_node(path, number)
    major = character_major(system, "nvidia", "nvidia-frontend")
    if major is None:
        raise NotFound(
            f"{path} is not there and /proc/devices has no entry for nvidia",
            hint="Load the NVIDIA kernel module; `nvidia-modprobe -c 0 -u` makes the nodes.",
        )
    return DeviceNode(path, type="c", major=major, minor=device.minor, permissions="rw")


def _capability_nodes(device: Device, partition: Partition, numbers: Capabilities) -> list[DeviceNode]:
    if partition.compute_instance_id is None:
        raise NotFound(f"The partition {partition.describe()} of GPU {device.uuid} has no compute instance")
    computed = capability_minors(device.minor, partition.instance_id, partition.compute_instance_id)
    instance = f"/proc/driver/nvidia/capabilities/gpu{device.minor}/mig/gi{partition.instance_id}"
    files = (f"{instance}/access", f"{instance}/ci{partition.compute_instance_id}/access")
    return [numbers.node(file, fallback) for file, fallback in zip(files, computed)]


def _access_minor(system: System, path: str) -> int | None:
    found = re.search(r"DeviceFileMinor:\s*(\d+)", text_or_empty(system, path))
    return int(found.group(1)) if found else None


def _render_nodes(system: System, device: Device) -> list[DeviceNode]:
    names = system.list_directory(f"/sys/bus/pci/devices/{device.pci_address}/drm")
    paths = [f"/dev/dri/{name}" for name in names if re.fullmatch(r"(card|renderD)\d+", name)]
    return [node(system, path) for path in paths if system.device_number(path)]


def node(system: System, path: str) -> DeviceNode:
    """Return the device node of the host with read and write access, but not mknod. Raises NotFound."""
    number = system.device_number(path)
    if number is None:
        raise NotFound(f"{path} is no device node")
    return _same_device_node(path, number)


def _same_device_node(path: str, number: DeviceNumber) -> DeviceNode:
    return DeviceNode(path, type=number.type, major=number.major, minor=number.minor, permissions="rw")
