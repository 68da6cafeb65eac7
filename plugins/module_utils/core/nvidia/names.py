# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Which GPUs the kernel knows of, and which driver it has loaded, without asking NVML: from the driver's files and from sysfs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .. import pci
from ..looking import Name
from ..system import System

_INFORMATION = "/proc/driver/nvidia/gpus"
_VERSION = "/proc/driver/nvidia/version"
_MODULES = "/proc/modules"
_PCI = "/sys/bus/pci/devices"
_VENDOR = "0x10de"
_DISPLAY = "0x03"  # class of VGA and 3D controllers
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class KernelGpu:
    """A GPU as the kernel knows it; ``uuid`` and ``product`` are empty where it does not tell."""

    address: str
    uuid: str = ""
    product: str = ""

    def describe(self, index: int) -> str:
        """Name the GPU for a person, as far as that can be done."""
        known = ", ".join(each for each in (self.uuid, self.address) if each)
        return f"{self.product or 'GPU'} {index} ({known})"


def kernel_gpus(system: System) -> tuple[KernelGpu, ...]:
    """Return the GPUs that the kernel knows of, in the order of their PCI addresses, which is also NVML's."""
    found: dict[str, KernelGpu] = {}
    for name in system.list_directory(_INFORMATION):
        said = _fields(_says(system, f"{_INFORMATION}/{name}/information"))
        if said.get("GPU Excluded") == "Yes":
            continue
        try:
            address = pci.normalise_bus_id(name)
        except ValueError:
            continue
        uuid = _UUID.fullmatch(said.get("GPU UUID", ""))
        found[address] = KernelGpu(address, uuid.group() if uuid else "", said.get("Model", ""))
    for name in () if found else gpus_on_the_bus(system):
        found[name] = KernelGpu(name)
    return tuple(found[address] for address in sorted(found))


def listed(system: System) -> frozenset[str]:
    """Return the PCI addresses of the GPUs that NVIDIA's driver has, as its folder spells them."""
    return frozenset(system.list_directory(_INFORMATION))


def loaded(system: System) -> tuple[str, ...]:
    """Return what tells one loaded driver from another, of another version or loaded again; nothing where none is loaded."""
    version = _says(system, _VERSION)
    lines = (line.split() for line in _says(system, _MODULES).splitlines() if line.startswith("nvidia "))
    # Of a module's line: its size and its address. How often it is used, and by whom, changes all the time.
    places = tuple(word for words in lines for word in (*words[1:2], *words[5:6]))
    return (version, *places) if version else ()


def gpus_on_the_bus(system: System) -> tuple[str, ...]:
    """Return the addresses of all GPUs, whichever drivers they are bound to, in order."""
    return tuple(
        name
        for name in system.list_directory(_PCI)
        if _says(system, f"{_PCI}/{name}/vendor") == _VENDOR and _says(system, f"{_PCI}/{name}/class")[:4] == _DISPLAY
    )


def called(system: System, known: Collection[str], indices: Sequence[int]) -> Mapping[int, Name]:
    """Return what the GPU behind each index is called that NVML told nothing about, given the addresses of all others.

    Only the index is said where that does not come out even, for a wrong name would be worse than none.
    """
    left = [gpu for gpu in kernel_gpus(system) if gpu.address not in known]
    if len(left) != len(indices):
        return {index: Name(f"GPU {index}") for index in indices}
    return {index: Name(gpu.describe(index), gpu.uuid) for index, gpu in zip(indices, left)}


def _says(system: System, path: str) -> str:
    try:
        return system.read_text(path).strip()
    except OSError:
        return ""


def _fields(text: str) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}
