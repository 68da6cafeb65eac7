# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the kernel's GPUs and the loaded driver without NVML, from the driver's files and from sysfs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...discovery.scan import DeviceName
from ...host import pci
from ...host.system import System
from ..host_texts import text_or_empty

_INFORMATION = "/proc/driver/nvidia/gpus"
_VERSION = "/proc/driver/nvidia/version"
_MODULES = "/proc/modules"
_MODULE = "/sys/module/nvidia"
_PCI = "/sys/bus/pci/devices"
_VENDOR = "0x10de"
_DISPLAY = "0x03"  # class of VGA and 3D controllers
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class KernelGpu:
    """A GPU in the kernel's files. ``uuid`` and ``product`` are "" if unknown."""

    address: str
    uuid: str = ""
    product: str = ""

    def describe(self, index: int) -> str:
        """Return the GPU's known names as text."""
        known = ", ".join(each for each in (self.uuid, self.address) if each)
        return f"{self.product or 'GPU'} {index} ({known})"


def kernel_gpus(system: System) -> tuple[KernelGpu, ...]:
    """Return the kernel's GPUs, ordered by PCI address, which is also NVML's order."""
    found: dict[str, KernelGpu] = {}
    for name in system.list_directory(_INFORMATION):
        values = _fields(text_or_empty(system, f"{_INFORMATION}/{name}/information"))
        if values.get("GPU Excluded") == "Yes":
            continue
        try:
            address = pci.normalize_address(name)
        except ValueError:
            continue
        uuid = _UUID.fullmatch(values.get("GPU UUID", ""))
        found[address] = KernelGpu(address, uuid.group() if uuid else "", values.get("Model", ""))
    for name in () if found else gpus_on_the_bus(system):
        found[name] = KernelGpu(name)
    return tuple(found[address] for address in sorted(found))


def bound_gpus(system: System) -> frozenset[str]:
    """Return the PCI addresses of the GPUs that are bound to NVIDIA's driver, in the driver's spelling."""
    return frozenset(system.list_directory(_INFORMATION))


def driver_instance(system: System) -> tuple[str, ...]:
    """Return values that differ after another version of the driver was loaded, or the driver was loaded again; empty without a driver.

    The module's directory in sysfs gets a new inode each time that the module is loaded (Linux, fs/kernfs/dir.c). Its
    address in /proc/modules is 0 for processes without CAP_SYSLOG (kernel/kallsyms.c), such as the driver.
    """
    version = text_or_empty(system, _VERSION)
    lines = (line.split() for line in text_or_empty(system, _MODULES).splitlines() if line.startswith("nvidia "))
    # Only the size of the module's line is used. Its use count and users change all the time.
    sizes = tuple(word for words in lines for word in words[1:2])
    return (version, *sizes, str(system.inode(_MODULE))) if version else ()


def gpus_on_the_bus(system: System) -> tuple[str, ...]:
    """Return the PCI addresses of all GPUs, with any kernel driver, sorted."""
    return tuple(
        name
        for name in system.list_directory(_PCI)
        if text_or_empty(system, f"{_PCI}/{name}/vendor") == _VENDOR
        and text_or_empty(system, f"{_PCI}/{name}/class")[:4] == _DISPLAY
    )


def name_unread_gpus(system: System, known: Collection[str], indices: Sequence[int]) -> Mapping[int, DeviceName]:
    """Return the names of the GPUs at these indices, which NVML did not identify.

    The names are those of the kernel's GPUs without the ``known`` addresses.

    If the numbers differ, the name is only the index, because a wrong name would be worse.
    """
    unread = [gpu for gpu in kernel_gpus(system) if gpu.address not in known]
    if len(unread) != len(indices):
        return {index: DeviceName(f"GPU {index}") for index in indices}
    return {index: DeviceName(gpu.describe(index), gpu.uuid) for index, gpu in zip(indices, unread)}


def _fields(text: str) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}
