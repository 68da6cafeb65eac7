# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the vendor-independent Node labels for devices. The vendor packages define further labels.

Source: kubernetes-sigs/node-feature-discovery, the documentation of the feature labels and of the source pci.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..host import pci
from ..host.system import System
from ..model import Device

LONGEST_VALUE = 63
#: How labels describe partitions: not at all, as devices, by profile in addition to the devices, or depending on the
#: current state.
NO_PARTITIONS, SINGLE, MIXED, AUTO = "none", "single", "mixed", "auto"
STRATEGIES = (NO_PARTITIONS, SINGLE, MIXED, AUTO)
#: The parts of the names of labels for PCI devices, in order. The default of NFD is class and vendor.
BUS_FIELDS = ("class", "vendor", "device")
FEATURES = "feature.node.kubernetes.io"
#: The labels of ``bus_labels``, as a regular expression.
BUS_LABEL = r"feature\.node\.kubernetes\.io/pci-[0-9a-f]{4}(?:_[0-9a-f]{4}){0,2}\.(?:present|sriov\.capable)"
MACHINE_PRODUCT = "/sys/class/dmi/id/product_name"
_NOT_IN_VALUES = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class BusProperties:
    """The properties of one device on its bus: its class (``0x030200``), and whether it supports virtual functions."""

    bus_class: str = ""
    can_be_virtual: bool = False


@dataclass(frozen=True)
class MachineFacts:
    """The properties of the node for labels: its product name (empty if unknown), and its devices by PCI address."""

    product: str = ""
    bus_properties: Mapping[str, BusProperties] = field(default_factory=dict)


#: The value for a node that was not read.
UNKNOWN_MACHINE = MachineFacts()


def read_machine(system: System, devices: Iterable[Device]) -> MachineFacts:
    """Return the properties of the node and of these devices from sysfs, without access to a device or vendor library."""
    try:
        product = system.read_text(MACHINE_PRODUCT).strip()
    except OSError:
        product = ""  # virtual and small machines have no such file
    return MachineFacts(
        product=product,
        bus_properties={
            each.pci_address: BusProperties(
                pci.class_of(system, each.pci_address), pci.most_virtual_functions(system, each.pci_address) > 0
            )
            for each in devices
        },
    )


def bus_labels(devices: Iterable[Device], machine: MachineFacts, fields: Sequence[str]) -> dict[str, str]:
    """Return the labels that NFD's source ``pci`` would create for these devices, with these fields in their names.

    No side effects. Devices with an unknown class are omitted.
    """
    found: dict[str, str] = {}
    for each in devices:
        properties = machine.bus_properties.get(each.pci_address, BusProperties())
        bus_class = re.fullmatch(r"0x([0-9a-f]{4})[0-9a-f]{2}", properties.bus_class)
        if bus_class is None or not fields:
            continue
        words = {
            "class": bus_class.group(1),
            "vendor": f"{each.pci_device_id & 0xFFFF:04x}",
            "device": f"{each.pci_device_id >> 16:04x}",
        }
        name = f"{FEATURES}/pci-{'_'.join(words[word] for word in BUS_FIELDS if word in fields)}"
        found[f"{name}.present"] = "true"
        if properties.can_be_virtual:
            found[f"{name}.sriov.capable"] = "true"
    return found


def value_of(text: str) -> str:
    """Return a text as a label value: invalid characters are replaced by a dash, and long texts are truncated."""
    return _NOT_IN_VALUES.sub("-", text.strip())[:LONGEST_VALUE].strip("-_.")


def common_value(values: Iterable[object]) -> str:
    """Return the label value that is equal for all devices; empty if they differ or one of them has no value.

    A label describes the whole Node, so it is omitted if it applies only to some devices.
    """
    label_values = {value_of(str(value)) if value is not None else "" for value in values}
    return label_values.pop() if len(label_values) == 1 else ""


def drop_empty_labels(found: Mapping[str, str]) -> dict[str, str]:
    """Return the labels without those that have an empty value, sorted by name."""
    return {name: found[name] for name in sorted(found) if found[name]}
