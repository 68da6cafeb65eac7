# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Ascend's names of drivers, files, and resources, and the labels of a Node with NPUs, as Huawei's device plugin writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from types import MappingProxyType

from ...dra.extended_resources import DEVICE, PARTITION, Meaning, attribute_in, class_of, selector
from ...dra.node_labels import common_value, drop_empty_labels
from ...model import Device
from ..vendor_facts import Exporter, Fabric, VendorFacts
from .driver_files import CONTROL_NODES, MANAGER
from .families import FAMILIES, GIBIBYTE, family_of
from .names import CDI_KIND, DRIVER_NAME, VENDOR

_DOMAIN = "huawei.com"
CHIP_NAME, CHIP_MEMORY = f"{_DOMAIN}/npu.chip.name", f"{_DOMAIN}/npu.chip.memory"
OLD_CHIP_NAME = "node.kubernetes.io/npu.chip.name"
SUPER_POD, SERVER, RACK = (f"{_DOMAIN}/topotree.{name}" for name in ("superpodid", "serverid", "rackid"))

FACTS = VendorFacts(
    word=VENDOR,
    title="Ascend",
    devices="NPUs",
    driver_name=DRIVER_NAME,
    cdi_kind=CDI_KIND,
    domain=_DOMAIN,
    labels=(CHIP_NAME, CHIP_MEMORY, OLD_CHIP_NAME, SUPER_POD, SERVER, RACK),
    extended_resources=MappingProxyType({"ascend-310p": f"{_DOMAIN}/Ascend310P", "ascend-910": f"{_DOMAIN}/Ascend910"}),
    device_plugins=("Ascend", "npu", "davinci"),
    kernel_module="drv_davinci_intf_host",
    control_nodes=(MANAGER, *CONTROL_NODES),
    device_nodes=("/dev/davinci[0-9]*", "/dev/vdavinci[0-9]*"),
    library_device_nodes=(MANAGER, "/dev/davinci[0-9]*"),
    # Huawei's device plugin uses [v]devdrv-cdev for the devices of NPUs and of vNPUs.
    character_drivers=(
        "devdrv-cdev",
        "vdevdrv-cdev",
        "davinci*",
        "vdavinci",
        "devmm_svm",
        "hisi_hdc",
        "dvpp_cmdlist",
        "uburma",
        "ummu",
    ),
    layout_unit="dra-accelerators-layout-ascend.service",
    exporter=Exporter("npu-exporter", 8082, ("npu_chip_", "machine_npu_", "container_npu_", "vnpu_pod_")),
    fabric=Fabric("npu", "superPodID", "serverID", "rackID", SUPER_POD),
    link_groups=MappingProxyType({"hccsRing": "HCCS ring", "cardID": "card", "superPodID": "super-pod"}),
)


# A template such as vir02_1c or vir04_3c_ndvpp has the number of AI cores, then amounts, then an optional decoder part.
# The resource names of the device plugin have other names for the units of the amounts and for the decoder part.
_TEMPLATE_CORES = re.compile(r"vir(\d+)")
_UNIT_NAMES = {"c": "cpu", "g": "g"}
_DECODER_NAMES = {"m": "dvpp", "dvpp": "dvpp", "nm": "ndvpp", "ndvpp": "ndvpp"}


def resource_name(device: Device, profile: str | None) -> str:
    """Return the extended resource name of a whole NPU, or of a vNPU with a template, as in Huawei's device plugin.

    A template ``vir05_1c_8g`` of a 910 is ``huawei.com/Ascend910-5c.1cpu.8g``. For a template in another
    form, the resource name is the chip name and the template's name with hyphens instead of underscores.
    """
    whole = f"{_DOMAIN}/{family_of(device.pci_device_id).device_type}"
    if profile is None:
        return whole
    first, *others = profile.lower().replace("-", "_").split("_")
    cores = _TEMPLATE_CORES.fullmatch(first)
    words = [_DECODER_NAMES.get(each) or f"{each[:-1]}{_UNIT_NAMES.get(each[-1:], each[-1:])}" for each in others]
    return (
        f"{whole}-{'.'.join([f'{int(cores.group(1))}c', *words])}" if cores else f"{whole}-{profile.replace('_', '-')}"
    )


#: Whether the chips of a device type support vNPUs.
_VNPU_SUPPORT = {each.device_type: each.supports_vnpus for each in FAMILIES.values()}
_VNPU_SIZE = re.compile(r"(\d+)c((?:\.[a-z0-9]+)*)")
_SIZE_PART = re.compile(r"(\d+)(cpu|g)|n?dvpp")


def resource_meaning(resource: str) -> Meaning | None:
    """Return the meaning of a resource of Huawei's device plugin; None for other resources.

    A vNPU is identified by its template, which the resource spells differently: ``Ascend310P-2c.1cpu`` is ``vir02_1c``.
    """
    domain, _slash, name = resource.partition("/")
    kind, _dash, size = name.partition("-")
    if domain != _DOMAIN or kind not in _VNPU_SUPPORT:
        return None
    type_condition = attribute_in(DRIVER_NAME, "deviceType", (kind,))
    if not size:
        own = {each: known for known, each in FACTS.extended_resources.items()}.get(resource)
        npu_selector = selector(DRIVER_NAME, attribute_in(DRIVER_NAME, "type", ("npu",)), type_condition)
        return Meaning(resource, VENDOR, DRIVER_NAME, DEVICE, own or f"whole-{class_of(resource)}", npu_selector)
    templates = _templates(size) if _VNPU_SUPPORT[kind] else ()
    if not templates:
        return None
    vnpu_conditions = (
        attribute_in(DRIVER_NAME, "type", ("vnpu",)),
        type_condition,
        attribute_in(DRIVER_NAME, "template", templates),
    )
    return Meaning(
        resource, VENDOR, DRIVER_NAME, PARTITION, class_of(resource), selector(DRIVER_NAME, *vnpu_conditions)
    )


def _templates(size: str) -> tuple[str, ...]:
    """Return the possible templates for the suffix of a resource name; empty if it is not a vNPU size."""
    found = _VNPU_SIZE.fullmatch(size)
    words = found.group(2).split(".")[1:] if found else []
    if found is None or not all(_SIZE_PART.fullmatch(word) for word in words):
        return ()
    alternatives: list[tuple[str, ...]] = []
    for word in words:
        amount = _SIZE_PART.fullmatch(word)
        if amount is not None and amount.group(1):
            alternatives.append((f"{amount.group(1)}{'c' if amount.group(2) == 'cpu' else 'g'}",))
        else:
            # Chips differ in the spelling of the decoder.
            alternatives.append(tuple(short for short, long in _DECODER_NAMES.items() if long == word))
    return tuple("_".join((f"vir{int(found.group(1)):02}", *each)) for each in product(*alternatives))


def labels(devices: Sequence[Device]) -> dict[str, str]:
    """Return the labels of a Node with these NPUs. Values that differ between the NPUs are left out.

    Only chips with HBM have a memory label. If the super-pod is known, there are labels for it, for the server, and for
    the rack if there is one. Schedulers and affinities use these labels. Claims use the attributes of devices, with equal
    values.
    """
    if not devices:
        return {}
    name = common_value(each.attributes.get("model") for each in devices)
    return drop_empty_labels(
        {
            CHIP_NAME: name,
            OLD_CHIP_NAME: name,
            CHIP_MEMORY: common_value(_memory(each) for each in devices),
            SUPER_POD: common_value(each.attributes.get("superPodID") for each in devices),
            SERVER: common_value(each.attributes.get("serverID") for each in devices),
            RACK: common_value(each.attributes.get("rackID") for each in devices),
        }
    )


def _memory(device: Device) -> str:
    return f"{device.memory_bytes // GIBIBYTE}G" if family_of(device.pci_device_id).has_hbm else ""
