# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Which NVSwitches a machine has, and whether its GPUs have joined the fabric that these make. No driver is asked for the first.

Facts: up to the generation of Hopper a switch is a bridge of NVIDIA's on the PCI bus (class 0680), as NVIDIA's own library of PCI ids has it. Later
ones show on no bus. They are managed through InfiniBand adapters on the baseboard, whose vital product data have the word SW_MNG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..system import System

_PCI, _INFINIBAND = "/sys/bus/pci/devices", "/sys/class/infiniband"
_VENDOR, _BRIDGE = "0x10de", "0x0680"
_MANAGES = b"SW_MNG"

# NVML_GPU_FABRIC_STATE_…
NOT_SUPPORTED, NOT_STARTED, IN_PROGRESS, COMPLETED = 0, 1, 2, 3
#: As nvidia-smi says them.
STATES: Mapping[str, int] = {"Not Started": NOT_STARTED, "In Progress": IN_PROGRESS, "Completed": COMPLETED}
_WORDS = {NOT_STARTED: "has not begun to join", IN_PROGRESS: "is still joining"}


@dataclass(frozen=True)
class Switches:
    """The switches of a machine: addresses of those on the PCI bus, and names of the adapters through which others are managed."""

    on_bus: tuple[str, ...] = ()
    managed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.on_bus or self.managed)

    def describe(self) -> str:
        """Name them for a person."""
        found = [
            *([f"{len(self.on_bus)} NVSwitches on the PCI bus ({', '.join(self.on_bus)})"] if self.on_bus else []),
            *([f"NVSwitches that are managed through {', '.join(self.managed)}"] if self.managed else []),
        ]
        return " and ".join(found) or "no NVSwitch"


def switches(system: System) -> Switches:
    """Return the switches of a machine, whichever driver is loaded. A virtual machine without any of its own has none."""
    on_bus = tuple(
        address
        for address in system.list_directory(_PCI)
        if _says(system, f"{_PCI}/{address}/vendor") == _VENDOR
        and _says(system, f"{_PCI}/{address}/class").startswith(_BRIDGE)
    )
    managed = tuple(name for name in system.list_directory(_INFINIBAND) if _manages(system, name))
    return Switches(on_bus, managed)


def _says(system: System, path: str) -> str:
    try:
        return system.read_text(path).strip()
    except OSError:
        return ""  # it has gone, or is going


def _manages(system: System, name: str) -> bool:
    try:
        return _MANAGES in system.read_bytes(f"{_INFINIBAND}/{name}/device/vpd")
    except OSError:
        return False  # it has no such data, or does not give them out


# NVML_GPU_FABRIC_HEALTH_SUMMARY_…; 0 where the GPU, its driver or the call does not tell.
NO_SUMMARY, HEALTHY, UNHEALTHY, LIMITED = 0, 1, 2, 3
SUMMARIES: Mapping[str, int] = {"Healthy": HEALTHY, "Unhealthy": UNHEALTHY, "Limited Capacity": LIMITED}
BANDWIDTH = "its bandwidth is degraded"
_RECOVERY, _ROUTES = "its routes are being recovered", "its routes are unhealthy"
_ACCESS, _PLACE = "accesses that timed out are being recovered", "it is not configured as its place wants it"
# NVML_GPU_FABRIC_HEALTH_MASK_…: at which bit two are, in which 1 says that it is so and 2 that it is not.
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
# What nvidia-smi says of the same, and where it says so of no fault.
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
    """Read NVML's mask of a GPU's health in its fabric: what is wrong, in words. Parts that are 0 do not tell."""
    place = mask >> _PLACE_SHIFT & _PLACE_BITS
    return (
        *(words for shift, words in _MASKED.items() if mask >> shift & 0x3 == 1),
        *([f"{_PLACE} ({_PLACES.get(place, place)})"] if place > _PLACE_WELL else []),
    )


@dataclass(frozen=True)
class Joining:
    """How far a GPU is on its way into the fabric: NVML's state, and its result, summary and faults once that is COMPLETED."""

    state: int
    status: int = 0
    summary: int = NO_SUMMARY
    faults: tuple[str, ...] = ()

    @property
    def has_joined(self) -> bool:
        """Whether it is in the fabric, well or not."""
        return self.state == COMPLETED and not self.status

    @property
    def is_well(self) -> bool:
        """Whether it has joined and is healthy there, or is one that does not tell. Degraded bandwidth is no ill health, and is said all the same."""
        if self.state == NOT_SUPPORTED:
            return True
        if not self.has_joined or self.summary == UNHEALTHY:
            return False
        # Where there is no summary it is what the faults would make it.
        return self.summary != NO_SUMMARY or all(fault == BANDWIDTH for fault in self.faults)

    @property
    def is_limited(self) -> bool:
        """Whether it has joined, works, and gives less than it could."""
        return self.has_joined and self.is_well and (self.summary == LIMITED or bool(self.faults))

    def describe(self) -> str:
        """Say it of a GPU, in words that follow its name."""
        if self.state == COMPLETED and self.status:
            return f"could not join ({self.status})"
        if not self.has_joined:
            return _WORDS.get(self.state, "does not tell")
        kind = "with limited capacity" if self.is_limited else "" if self.is_well else "and is unhealthy"
        return " ".join(["has joined", *([kind] if kind else [])]) + (
            f": {', '.join(self.faults)}" if kind and self.faults else ""
        )


def read_query(text: str) -> dict[str, Joining]:
    """Read what ``nvidia-smi -q`` says of each GPU's fabric, by the GPUs' UUIDs. A status in words that is no success counts as -1."""
    found: dict[str, Joining] = {}
    uuid = section = ""
    for line in text.splitlines():
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon:
            section = f"{section} {name}" if section == "Fabric" and name == "Health" else name
        elif name == "GPU UUID":
            uuid, section = value, ""
            found[uuid] = Joining(NOT_SUPPORTED)
        elif uuid and section == "Fabric" and name == "State":
            found[uuid] = Joining(STATES.get(value, NOT_SUPPORTED))
        elif uuid and section == "Fabric" and name == "Status" and found[uuid].state == COMPLETED:
            found[uuid] = Joining(COMPLETED, 0 if value == "Success" else -1)
        elif uuid and section == "Fabric Health" and found[uuid].state == COMPLETED:
            found[uuid] = _with_row(found[uuid], name, value)
    return found


def _with_row(joining: Joining, name: str, value: str) -> Joining:
    """Return what is known of a GPU with one row of its health."""
    if name == "Summary":
        return replace(joining, summary=SUMMARIES.get(value, NO_SUMMARY))
    fault = _ROWS.get(name, "")
    if fault == _PLACE and value not in _NO_FAULT:
        return replace(joining, faults=(*joining.faults, f"{fault} ({value})"))
    return replace(joining, faults=(*joining.faults, fault)) if fault and value in _AT_FAULT else joining


def not_joined(answers: Mapping[str, Joining]) -> list[str]:
    """Return a sentence for each GPU that has not joined the fabric, or not well."""
    return [f"{uuid} {each.describe()}" for uuid, each in sorted(answers.items()) if not each.is_well]
