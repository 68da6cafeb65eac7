# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Which NVSwitches a machine has, and whether its GPUs have joined the fabric that these make. No driver is asked for the first.

Facts: up to the generation of Hopper a switch is a bridge of NVIDIA's on the PCI bus (class 0680), as NVIDIA's own library of PCI ids has it. Later
ones show on no bus. They are managed through InfiniBand adapters on the baseboard, whose vital product data have the word SW_MNG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Joining:
    """How far a GPU is on its way into the fabric: NVML's state, and its result once that is COMPLETED."""

    state: int
    status: int = 0

    @property
    def is_well(self) -> bool:
        """Whether it has joined, or is one that does not tell."""
        return self.state == NOT_SUPPORTED or (self.state == COMPLETED and not self.status)

    def describe(self) -> str:
        """Say it of a GPU, in words that follow its name."""
        if self.state == COMPLETED:
            return f"could not join ({self.status})" if self.status else "has joined"
        return _WORDS.get(self.state, "does not tell")


def read_query(text: str) -> dict[str, Joining]:
    """Read what ``nvidia-smi -q`` says of each GPU's fabric, by the GPUs' UUIDs. A status in words that is no success counts as -1."""
    found: dict[str, Joining] = {}
    uuid = section = ""
    for line in text.splitlines():
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon:
            section = name
        elif name == "GPU UUID":
            uuid, section = value, ""
            found[uuid] = Joining(NOT_SUPPORTED)
        elif uuid and section == "Fabric" and name == "State":
            found[uuid] = Joining(STATES.get(value, NOT_SUPPORTED))
        elif uuid and section == "Fabric" and name == "Status" and found[uuid].state == COMPLETED:
            found[uuid] = Joining(COMPLETED, 0 if value == "Success" else -1)
    return found


def not_joined(answers: Mapping[str, Joining]) -> list[str]:
    """Return a sentence for each GPU that has not joined the fabric, or not well."""
    return [f"{uuid} {each.describe()}" for uuid, each in sorted(answers.items()) if not each.is_well]
