# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The published attributes of a GPU and its partitions, other than capacities: model, location, and addressing mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ...model import AttributeValue, Version
from .nvml import Nvml

_STANDARD = "resource.kubernetes.io/"
_BRANDS: Mapping[int, str] = MappingProxyType(
    {
        1: "Quadro",
        2: "Tesla",
        3: "NVS",
        4: "Grid",
        5: "GeForce",
        6: "Titan",
        7: "NvidiaVApps",
        8: "NvidiaVPC",
        9: "NvidiaVCS",
        10: "NvidiaVWS",
        11: "NvidiaCloudGaming",
        12: "QuadroRTX",
        13: "NvidiaRTX",
        14: "Nvidia",
        15: "GeForceRTX",
        16: "TitanRTX",
    }
)
_ADDRESSING_MODES: Mapping[int, str] = MappingProxyType({0: "None", 1: "HMM", 2: "ATS"})


@dataclass(frozen=True)
class FixedFacts:
    """The facts of a GPU from which its attributes are made. Without a known PCIe root or NUMA node, the value is None."""

    product: str
    compute_capability: tuple[int, int]
    pci_address: str
    pcie_root: str | None
    numa_node: int | None


def architecture(major: int, minor: int) -> str:
    """Return the architecture name of a CUDA compute capability."""
    if major == 7:
        return "Volta" if minor < 5 else "Turing"
    if major == 8:
        return "Ampere" if minor < 9 else "Ada Lovelace"
    names = {1: "Tesla", 2: "Fermi", 3: "Kepler", 5: "Maxwell", 6: "Pascal", 9: "Hopper", 10: "Blackwell"}
    return names.get(major, "Blackwell" if major in (11, 12) else "Unknown")


def read_attributes(nvml: Nvml, handle: Any, facts: FixedFacts, doing: str) -> dict[str, AttributeValue]:
    """Return the attributes that do not change while NVML is open, except the versions of the driver. Raises AcceleratorError."""
    major, minor = facts.compute_capability
    attributes: dict[str, AttributeValue] = {
        "productName": facts.product,
        "brand": _BRANDS.get(nvml.optional("nvmlDeviceGetBrand", handle, default=0, doing=doing), "Unknown"),
        "architecture": architecture(major, minor),
        "cudaComputeCapability": Version(f"{major}.{minor}.0"),
        f"{_STANDARD}pciBusID": facts.pci_address,
    }
    if facts.pcie_root is not None:
        attributes[f"{_STANDARD}pcieRoot"] = facts.pcie_root
    if facts.numa_node is not None:
        attributes[f"{_STANDARD}numaNode"] = facts.numa_node
    mode = nvml.optional("nvmlDeviceGetAddressingMode", handle, doing=doing)
    if mode in _ADDRESSING_MODES:
        attributes["addressingMode"] = _ADDRESSING_MODES[mode]
    return attributes
