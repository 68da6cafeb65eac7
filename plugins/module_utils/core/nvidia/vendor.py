# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What NVIDIA's things are called, and the labels of a Node with GPUs: those of gpu-feature-discovery, by the same names."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from ..labels import agreed, written
from ..model import Device, Version
from ..vendor import Exporter, VendorFacts

_DOMAIN = "nvidia.com"
_COUNT, _PRODUCT, _MEMORY, _FAMILY = (f"{_DOMAIN}/gpu.{name}" for name in ("count", "product", "memory", "family"))
_MAJOR, _MINOR = f"{_DOMAIN}/gpu.compute.major", f"{_DOMAIN}/gpu.compute.minor"
_MIG_CAPABLE = f"{_DOMAIN}/mig.capable"
_MEBIBYTE = 1024 * 1024

FACTS = VendorFacts(
    word="nvidia",
    title="NVIDIA",
    devices="GPUs",
    driver_name="gpu.nvidia.com",
    cdi_kind="k8s.gpu.nvidia.com/claim",
    domain=_DOMAIN,
    labels=(_COUNT, _PRODUCT, _MEMORY, _FAMILY, _MAJOR, _MINOR, _MIG_CAPABLE),
    extended_resources=MappingProxyType({"gpu.nvidia.com": "nvidia.com/gpu"}),
    device_plugins=("nvidia-",),
    kernel_module="nvidia",
    control_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
    device_nodes=("/dev/nvidia[0-9]*", "/dev/nvidia-caps/nvidia-cap[0-9]*"),
    layout_unit="dra-accelerators-layout.service",
    exporter=Exporter("dcgm-exporter", 9400, ("DCGM_FI_",)),
    manager_units=("nvidia-mig-manager.service",),
    manager_labels=("nvidia.com/mig.config",),
)


def resource_name(device: Device, profile: str | None) -> str:  # noqa: ARG001  all GPUs are one resource
    """Return what pods ask for to get a whole GPU, or a MIG device of a profile: the names of NVIDIA's device plugin (strategy mixed)."""
    return f"{_DOMAIN}/mig-{profile.replace('+', '.')}" if profile else FACTS.extended_resources[FACTS.driver_name]


def labels(devices: Sequence[Device]) -> dict[str, str]:
    """Return the labels of a Node with these GPUs. What is not the same for all of them is not among them."""
    if not devices:
        return {}
    capabilities = [each.attributes.get("cudaComputeCapability") for each in devices]
    versions = [each.text.split(".") if isinstance(each, Version) else ["", ""] for each in capabilities]
    families = [str(each.attributes.get("architecture", "")).lower() for each in devices]
    return written(
        {
            _COUNT: str(len(devices)),
            _PRODUCT: agreed(each.product for each in devices),
            _MEMORY: agreed(each.memory_bytes // _MEBIBYTE for each in devices),
            _FAMILY: agreed(families),
            _MAJOR: agreed(each[0] for each in versions),
            _MINOR: agreed(each[1] for each in versions),
            _MIG_CAPABLE: agreed(str(each.partitioning.supported).lower() for each in devices),
        }
    )
