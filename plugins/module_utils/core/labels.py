# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the labels of a Node can say of its devices, whoever made them. Which labels there are besides is each vendor's.

Facts: kubernetes-sigs/node-feature-discovery, its documentation of the feature labels and of the source pci.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from . import pci
from .model import Device
from .system import System

LONGEST_VALUE = 63
#: How labels speak of partitions: not at all, as if each were a device, by their profiles beside the devices, or by what is there.
NO_PARTITIONS, SINGLE, MIXED, AUTO = "none", "single", "mixed", "auto"
STRATEGIES = (NO_PARTITIONS, SINGLE, MIXED, AUTO)
#: What the names of labels about devices on the bus are made of, in this order. The first and the last are what NFD takes by itself.
BUS_FIELDS = ("class", "vendor", "device")
FEATURES = "feature.node.kubernetes.io"
#: The labels of ``bus_labels``, as a regular expression.
BUS_LABEL = r"feature\.node\.kubernetes\.io/pci-[0-9a-f]{4}(?:_[0-9a-f]{4}){0,2}\.(?:present|sriov\.capable)"
MACHINE_PRODUCT = "/sys/class/dmi/id/product_name"
_NOT_IN_VALUES = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Seat:
    """What the machine shows of one device: the class on its bus (``0x030200``), and whether it could have virtual functions."""

    bus_class: str = ""
    can_be_virtual: bool = False


@dataclass(frozen=True)
class MachineFacts:
    """What labels say of the machine: its type as the firmware has it, empty where that is not told, and its devices by address."""

    product: str = ""
    seats: Mapping[str, Seat] = field(default_factory=dict)


#: Of a machine that was not looked at.
UNKNOWN_MACHINE = MachineFacts()


def read_machine(system: System, devices: Iterable[Device]) -> MachineFacts:
    """Return what sysfs shows of the machine and of these devices. Asks no device and no library."""
    try:
        product = system.read_text(MACHINE_PRODUCT).strip()
    except OSError:
        product = ""  # virtual and small machines have no such table
    return MachineFacts(
        product=product,
        seats={
            each.pci_address: Seat(
                pci.class_of(system, each.pci_address), pci.most_virtual_functions(system, each.pci_address) > 0
            )
            for each in devices
        },
    )


def bus_labels(devices: Iterable[Device], machine: MachineFacts, fields: Sequence[str]) -> dict[str, str]:
    """Return what NFD's source ``pci`` would say of these devices, its labels named by these fields. Pure.

    A device whose class the machine does not show is left out.
    """
    found: dict[str, str] = {}
    for each in devices:
        seat = machine.seats.get(each.pci_address, Seat())
        bus_class = re.fullmatch(r"0x([0-9a-f]{4})[0-9a-f]{2}", seat.bus_class)
        if bus_class is None or not fields:
            continue
        words = {
            "class": bus_class.group(1),
            "vendor": f"{each.pci_device_id & 0xFFFF:04x}",
            "device": f"{each.pci_device_id >> 16:04x}",
        }
        name = f"{FEATURES}/pci-{'_'.join(words[word] for word in BUS_FIELDS if word in fields)}"
        found[f"{name}.present"] = "true"
        if seat.can_be_virtual:
            found[f"{name}.sriov.capable"] = "true"
    return found


def value_of(text: str) -> str:
    """Return a text as the value of a label: what may not be in one becomes a dash, and what is too long is cut."""
    return _NOT_IN_VALUES.sub("-", text.strip())[:LONGEST_VALUE].strip("-_.")


def agreed(values: Iterable[object]) -> str:
    """Return the value of a label that all devices agree on; nothing where one says something else, or nothing.

    A label speaks for the whole Node, so it is left out where it would be true of some devices alone.
    """
    said = {value_of(str(value)) if value is not None else "" for value in values}
    return said.pop() if len(said) == 1 else ""


def written(found: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that have a value, in the order of their names."""
    return {name: found[name] for name in sorted(found) if found[name]}
