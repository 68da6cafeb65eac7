# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the NVSwitches of a host, and read whether its GPUs have joined the NVSwitch fabric.

The switches are found without a driver. Facts: up to Hopper, a switch is an NVIDIA bridge on the PCI bus (class 0680),
according to NVIDIA's library of PCI IDs. Later switches are on no bus. They are managed through InfiniBand adapters on
the baseboard, whose vital product data contain SW_MNG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ....host.system import System
from ...host_texts import text_or_empty

_PCI, _INFINIBAND = "/sys/bus/pci/devices", "/sys/class/infiniband"
_VENDOR, _BRIDGE = "0x10de", "0x0680"
_MANAGES = b"SW_MNG"

# NVML_GPU_FABRIC_STATE_…
NOT_SUPPORTED, NOT_STARTED, IN_PROGRESS, COMPLETED = 0, 1, 2, 3
#: The spelling of nvidia-smi.
STATES: Mapping[str, int] = {"Not Started": NOT_STARTED, "In Progress": IN_PROGRESS, "Completed": COMPLETED}
_WORDS = {NOT_STARTED: "has not begun to join", IN_PROGRESS: "is still joining"}


@dataclass(frozen=True)
class Switches:
    """The switches of a host: addresses of those on the PCI bus, and names of the adapters that manage others."""

    on_bus: tuple[str, ...] = ()
    managed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.on_bus or self.managed)

    def describe(self) -> str:
        """Return the switches as text."""
        found = [
            *([f"{len(self.on_bus)} NVSwitches on the PCI bus ({', '.join(self.on_bus)})"] if self.on_bus else []),
            *([f"NVSwitches that are managed through {', '.join(self.managed)}"] if self.managed else []),
        ]
        return " and ".join(found) or "no NVSwitch"


def switches(system: System) -> Switches:
    """Return the switches of a host, with any driver. A virtual machine without switches has none."""
    on_bus = tuple(
        address
        for address in system.list_directory(_PCI)
        if text_or_empty(system, f"{_PCI}/{address}/vendor") == _VENDOR
        and text_or_empty(system, f"{_PCI}/{address}/class").startswith(_BRIDGE)
    )
    managed = tuple(name for name in system.list_directory(_INFINIBAND) if _manages_switches(system, name))
    return Switches(on_bus, managed)


def _manages_switches(system: System, name: str) -> bool:
    try:
        return _MANAGES in system.read_bytes(f"{_INFINIBAND}/{name}/device/vpd")
    except OSError:
        return False  # it has no such data, or they cannot be read


# NVML_GPU_FABRIC_HEALTH_SUMMARY_…; 0 if the GPU, its driver, or the call does not report it.
NO_SUMMARY, HEALTHY, UNHEALTHY, LIMITED = 0, 1, 2, 3
SUMMARIES: Mapping[str, int] = {"Healthy": HEALTHY, "Unhealthy": UNHEALTHY, "Limited Capacity": LIMITED}
BANDWIDTH = "its bandwidth is degraded"
_RECOVERY, _ROUTES = "its routes are being recovered", "its routes are unhealthy"
_ACCESS, _PLACE = "accesses that timed out are being recovered", "it is not configured as its place wants it"
# NVML_GPU_FABRIC_HEALTH_MASK_…: the position of each field of two bits, in which 1 means true and 2 false.
_MASKED: Mapping[int, str] = {0: BANDWIDTH, 2: _RECOVERY, 4: _ROUTES, 6: _ACCESS}
_PLACE_SHIFT, _PLACE_BITS, _PLACE_WELL = 8, 0xF, 1
_PLACES: Mapping[int, str] = {
    2: "wrong system GUID",
    3: "wrong serial number of the chassis",
    4: "in no partition",
    5: "too few NVLinks",
    6: "firmware that does not fit",
    7: "invalid location",
    8: "invalid state",
}
# The rows of nvidia-smi for the same fields, and their values with and without a fault.
_ROWS: Mapping[str, str] = {
    "Bandwidth": BANDWIDTH,
    "Route Recovery in progress": _RECOVERY,
    "Route Unhealthy": _ROUTES,
    "Access Timeout Recovery": _ACCESS,
    "Incorrect Configuration": _PLACE,
}
_AT_FAULT = ("Degraded", "True")
_NO_FAULT = ("", "N/A", "None", "Not Supported")


def faults_of(mask: int) -> tuple[str, ...]:
    """Return the faults in NVML's mask of a GPU's fabric health, as text. Parts that are 0 are not reported."""
    place = mask >> _PLACE_SHIFT & _PLACE_BITS
    return (
        *(words for shift, words in _MASKED.items() if mask >> shift & 0x3 == 1),
        *([f"{_PLACE} ({_PLACES.get(place, place)})"] if place > _PLACE_WELL else []),
    )


@dataclass(frozen=True)
class FabricJoinState:
    """The state of a GPU in the fabric: NVML's state, and for COMPLETED its result, summary, and faults."""

    state: int
    status: int = 0
    summary: int = NO_SUMMARY
    faults: tuple[str, ...] = ()

    @property
    def has_joined(self) -> bool:
        """Return whether the GPU is in the fabric, healthy or not."""
        return self.state == COMPLETED and not self.status

    @property
    def is_well(self) -> bool:
        """Return whether the GPU has joined and is healthy, or does not support the query.

        Degraded bandwidth counts as healthy.
        """
        if self.state == NOT_SUPPORTED:
            return True
        if not self.has_joined or self.summary == UNHEALTHY:
            return False
        # Without a summary the faults decide.
        return self.summary != NO_SUMMARY or all(fault == BANDWIDTH for fault in self.faults)

    @property
    def is_limited(self) -> bool:
        """Return whether the GPU has joined and works, but with limited capacity."""
        return self.has_joined and self.is_well and (self.summary == LIMITED or bool(self.faults))

    def describe(self) -> str:
        """Return the state as text that follows the name of the GPU."""
        if self.state == COMPLETED and self.status:
            return f"could not join ({self.status})"
        if not self.has_joined:
            return _WORDS.get(self.state, "does not report its state")
        kind = "with limited capacity" if self.is_limited else "" if self.is_well else "and is unhealthy"
        return " ".join(["has joined", *([kind] if kind else [])]) + (
            f": {', '.join(self.faults)}" if kind and self.faults else ""
        )


def read_query(text: str) -> dict[str, FabricJoinState]:
    """Return the fabric state of each GPU in the output of ``nvidia-smi -q``, by UUID.

    A status other than success counts as -1.
    """
    found: dict[str, FabricJoinState] = {}
    uuid = section = ""
    for line in text.splitlines():
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon:
            section = f"{section} {name}" if section == "Fabric" and name == "Health" else name
        elif name == "GPU UUID":
            uuid, section = value, ""
            found[uuid] = FabricJoinState(NOT_SUPPORTED)
        elif uuid and section == "Fabric" and name == "State":
            found[uuid] = FabricJoinState(STATES.get(value, NOT_SUPPORTED))
        elif uuid and section == "Fabric" and name == "Status" and found[uuid].state == COMPLETED:
            found[uuid] = FabricJoinState(COMPLETED, 0 if value == "Success" else -1)
        elif uuid and section == "Fabric Health" and found[uuid].state == COMPLETED:
            found[uuid] = _with_row(found[uuid], name, value)
    return found


def _with_row(joining: FabricJoinState, name: str, value: str) -> FabricJoinState:
    """Return the state with one row of the health section added."""
    if name == "Summary":
        return replace(joining, summary=SUMMARIES.get(value, NO_SUMMARY))
    fault = _ROWS.get(name, "")
    if fault == _PLACE and value not in _NO_FAULT:
        return replace(joining, faults=(*joining.faults, f"{fault} ({value})"))
    return replace(joining, faults=(*joining.faults, fault)) if fault and value in _AT_FAULT else joining


def not_joined(answers: Mapping[str, FabricJoinState]) -> list[str]:
    """Return a sentence for each GPU that has not joined the fabric, or that is unhealthy there."""
    return [f"{uuid} {each.describe()}" for uuid, each in sorted(answers.items()) if not each.is_well]
