# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA's names of drivers, files, and resources, and the meaning of its extended resources."""

from __future__ import annotations

import re
from types import MappingProxyType

from ...dra.extended_resources import DEVICE, PARTITION, SHARED, Meaning, attribute_in, class_of, selector
from ...model import Device
from ..vendor_facts import Exporter, VendorFacts
from .node_labels import DOMAIN, GPU, NAMES, PROFILE_NAMES, labels, partition_resource

__all__ = ("FACTS", "labels", "resource_meaning", "resource_name")

FACTS = VendorFacts(
    word="nvidia",
    title="NVIDIA",
    devices="GPUs",
    driver_name="gpu.nvidia.com",
    cdi_kind="k8s.gpu.nvidia.com/claim",
    domain=DOMAIN,
    labels=NAMES,
    label_patterns=(PROFILE_NAMES,),
    extended_resources=MappingProxyType({"gpu.nvidia.com": GPU}),
    device_plugins=("nvidia-",),
    kernel_module="nvidia",
    control_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
    device_nodes=("/dev/nvidia[0-9]*", "/dev/nvidia-caps/nvidia-cap[0-9]*"),
    # Minor numbers 1 and 2 are the capabilities mig/config and mig/monitor (MIG user guide, "Device Nodes and Capabilities").
    library_device_nodes=("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/nvidia-caps/nvidia-cap[12]"),
    # nvidia-frontend or nvidia (195), nvidia-uvm, nvidia-caps, nvidia-caps-imex-channels, nvidia-nvswitch, nvidia-nvlink
    character_drivers=("nvidia", "nvidia-*", "nvidiactl"),
    layout_unit="dra-accelerators-layout.service",
    exporter=Exporter("dcgm-exporter", 9400, ("DCGM_FI_",)),
    manager_units=("nvidia-mig-manager.service",),
    manager_labels=("nvidia.com/mig.config",),
    plugin_switches=("nvidia.com/gpu.deploy.device-plugin",),
    replica_labels=("nvidia.com/gpu.replicas",),
    links="NVLink",
    persistence_daemon="nvidia-persiste",
)


def resource_name(device: Device, profile: str | None) -> str:  # noqa: ARG001  all GPUs are one resource
    """Return the extended resource name of a whole GPU, or of a MIG device with a profile (NVIDIA's device plugin, strategy mixed)."""
    return partition_resource(profile) if profile else FACTS.extended_resources[FACTS.driver_name]


_SHARED = ".shared"
_PARTITION = re.compile(r"mig-((?:\d+c\.)?\d+g\.\d+gb)((?:[.-][a-z]+)*)")


def resource_meaning(resource: str) -> Meaning | None:
    """Return the meaning of a resource of NVIDIA's device plugin; None for other resources.

    Other plugins of the vendor use the same domain, such as those for network adapters.
    """
    domain, _slash, name = resource.partition("/")
    if domain != DOMAIN:
        return None
    if name.endswith(_SHARED):
        whole = resource_meaning(resource[: -len(_SHARED)])
        return whole and Meaning(resource, FACTS.word, FACTS.driver_name, SHARED, of=whole.resource)
    driver = FACTS.driver_name
    if resource == GPU:
        is_gpu = selector(driver, attribute_in(driver, "type", ("gpu",)))
        return Meaning(resource, FACTS.word, driver, DEVICE, driver, is_gpu)
    found = _PARTITION.fullmatch(name)
    if found is None:
        return None
    size, more = found.groups()
    # The plugin replaces the plus by a dot: 1g.10gb+me.all is mig-1g.10gb.me.all.
    profile = f"{size}+{more[1:]}" if more.startswith(".") else f"{size}{more}"
    is_mig = (attribute_in(driver, "type", ("mig",)), attribute_in(driver, "profile", (profile,)))
    return Meaning(resource, FACTS.word, driver, PARTITION, class_of(resource), selector(driver, *is_mig))
