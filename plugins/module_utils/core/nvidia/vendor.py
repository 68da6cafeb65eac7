# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What NVIDIA's things are called, and the labels of a Node with GPUs: those of gpu-feature-discovery, by the same names."""

from __future__ import annotations

from types import MappingProxyType

from ..model import Device
from ..vendor import Exporter, VendorFacts
from .node_labels import DOMAIN, GPU, NAMES, labels, partition_resource

__all__ = ("FACTS", "labels", "resource_name")

FACTS = VendorFacts(
    word="nvidia",
    title="NVIDIA",
    devices="GPUs",
    driver_name="gpu.nvidia.com",
    cdi_kind="k8s.gpu.nvidia.com/claim",
    domain=DOMAIN,
    labels=NAMES,
    extended_resources=MappingProxyType({"gpu.nvidia.com": GPU}),
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
    return partition_resource(profile) if profile else FACTS.extended_resources[FACTS.driver_name]
