# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The published attributes of a chip and its vNPUs, other than capacities: model, location, and topology."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...dra.resource_slices import LONGEST_STRING
from ...model import AttributeValue, Version
from ...texts import cut_bytes
from .families import Family
from .topology import Chip, Place
from .topology import attributes as attributes_of_place

_STANDARD = "resource.kubernetes.io/"
_FIRST_UNKNOWN = 1 << 31
#: The types of super-pods whose servers are in racks, in the numbering of the newest generation: one-dimensional and
#: two-dimensional meshes.
_KINDS_WITH_RACKS = frozenset({1, 2})


@dataclass(frozen=True)
class SuperPod:
    """The location of a chip in a super-pod: the ID of the super-pod, its server and rack, and the chip's number in the super-pod.

    Unknown values are None. Generations differ in what they report, and npu-smi reports less than the library.
    """

    pod: int
    server: int | None = None
    number: int | None = None
    rack: int | None = None


@dataclass(frozen=True)
class ChipFacts:
    """The fixed facts of a chip. Unknown strings are "", unknown numbers None."""

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


def super_pod(
    family: Family,
    pod: int | None,
    server: int | None = None,
    number: int | None = None,
    chassis: int | None = None,
    kind: int | None = None,
) -> SuperPod | None:
    """Return the location of a chip from the values that its driver reports; None for a chip outside a super-pod.

    Numbers are unsigned. The driver reports an unknown number as one that would be negative if it was signed. A chassis
    is a rack if the generation has racks and the ``kind`` of the super-pod, if known, is one with racks.
    """
    known = _known(pod)
    if known is None:
        return None
    has_racks = family.has_racks and (kind is None or kind in _KINDS_WITH_RACKS)
    return SuperPod(known, _known(server), number, _known(chassis) if has_racks else None)


def attributes(facts: ChipFacts, node: str, place: Place) -> Mapping[str, AttributeValue]:
    """Return the attributes of a chip on a node, without unknown ones.

    ``deviceType`` and ``physicId`` are those of Huawei's driver. The names for super-pods are those of the
    corresponding labels.
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
    found.update({name: cut_bytes(text, LONGEST_STRING) for name, text in texts.items() if text})
    for name, spelled in (("driverVersion", facts.driver_version), ("firmwareVersion", facts.firmware_version)):
        version = _version(spelled)
        if version is not None:
            found[name] = version
    if facts.numa_node is not None:
        found[f"{_STANDARD}numaNode"] = facts.numa_node
    if facts.super_pod is not None:
        pod = facts.super_pod
        pod_facts = {"superPodID": pod.pod, "serverID": pod.server, "sdid": pod.number, "rackID": pod.rack}
        found.update({name: number for name, number in pod_facts.items() if number is not None})
    return MappingProxyType(found)


def _known(number: int | None) -> int | None:
    return number if number is not None and 0 <= number < _FIRST_UNKNOWN else None


def _version(spelled: str) -> Version | None:
    """Return a version such as ``24.1.rc1`` or ``25.0.RC1.1``, a candidate as a pre-release; None for an invalid one."""
    numbers, found, candidate = spelled.lower().partition(".rc")
    try:
        version = Version.coerce(numbers)
        return Version(f"{version}-rc.{'.'.join(str(int(n)) for n in candidate.split('.'))}") if found else version
    except ValueError:
        return None
