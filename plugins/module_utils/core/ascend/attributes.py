# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What is published of every chip and its slices besides what they have to share out: who made it, where it is, how it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..model import AttributeValue, Version
from ..slices import LONGEST_STRING
from .families import Family
from .topology import Chip, Place
from .topology import attributes as attributes_of_place

_STANDARD = "resource.kubernetes.io/"


@dataclass(frozen=True)
class SuperPod:
    """Where a chip is in a super-pod: of which one, on which of its servers and in which rack, and its number in all of it."""

    pod: int
    server: int
    number: int
    rack: int | None = None


@dataclass(frozen=True)
class ChipFacts:
    """What does not change about a chip. Texts that are not told are empty, numbers None."""

    family: Family
    at: Chip
    uuid: str
    model: str = ""
    product: str = ""
    card_serial: str = ""
    driver_version: str = ""
    firmware_version: str = ""
    pci_address: str = ""
    pcie_root: str | None = None
    numa_node: int | None = None
    super_pod: SuperPod | None = None


def attributes(facts: ChipFacts, node: str, place: Place) -> Mapping[str, AttributeValue]:
    """Return the attributes of a chip on a node; what is not known is not among them.

    ``deviceType`` and ``physicId`` are those of Huawei's own driver. The names of the super-pod are those of the labels
    that go with them.
    """
    found: dict[str, AttributeValue] = {
        "deviceType": facts.family.device_type,
        "physicId": facts.at.physical_id,
        "vdie": facts.uuid.removeprefix("NPU-"),
        **attributes_of_place(node, facts.at, place, facts.card_serial),
    }
    texts = {
        "model": facts.model,
        "productName": facts.product,
        f"{_STANDARD}pciBusID": facts.pci_address,
        f"{_STANDARD}pcieRoot": facts.pcie_root or "",
    }
    found.update({name: _short(text) for name, text in texts.items() if text})
    for name, spelled in (("driverVersion", facts.driver_version), ("firmwareVersion", facts.firmware_version)):
        version = _version(spelled)
        if version is not None:
            found[name] = version
    if facts.numa_node is not None:
        found[f"{_STANDARD}numaNode"] = facts.numa_node
    if facts.super_pod is not None:
        found.update(superPodID=facts.super_pod.pod, serverID=facts.super_pod.server, sdid=facts.super_pod.number)
        if facts.super_pod.rack is not None:
            found["rackID"] = facts.super_pod.rack
    return MappingProxyType(found)


def _short(text: str) -> str:
    """Cut a text to the bytes that the API server takes."""
    return text.encode()[:LONGEST_STRING].decode(errors="ignore")


def _version(spelled: str) -> Version | None:
    """Read a version such as ``24.1.rc1`` or ``25.0.RC1.1``: a candidate is one of that release and before it."""
    numbers, found, candidate = spelled.lower().partition(".rc")
    try:
        version = Version.coerce(numbers)
        return Version(f"{version}-rc.{'.'.join(str(int(n)) for n in candidate.split('.'))}") if found else version
    except ValueError:
        return None
