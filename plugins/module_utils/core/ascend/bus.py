# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Which chips the kernel shows on the PCI bus, without asking the vendor's library: also where there is no driver at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .. import pci
from ..looking import Name
from ..system import System
from .driver_files import MANAGER, version_of
from .families import CLASS, VENDOR_ID, family_of

_FOREIGN = "vfio-pci"


@dataclass(frozen=True)
class BusChip:
    """A chip as the kernel shows it; ``driver`` is empty for one that has none."""

    address: str
    device_id: int
    driver: str = ""

    def describe(self) -> str:
        """Name the chip for a person."""
        return f"NPU of the family {family_of(self.device_id).word} at {self.address}"


class Bus:
    """The PCI bus, looked at again and again: what a device is is read when its address comes, for most are no chips."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._known: dict[str, int | None] = {}

    def chips(self) -> tuple[BusChip, ...]:
        """Return the chips in the order of their addresses.

        Those that belong to virtual machines, and chips' functions for slices, are none.
        """
        there = self._system.list_directory(pci.DEVICES)
        known = self._known
        self._known = known = {
            address: known[address] if address in known else _chip_id(self._system, address) for address in there
        }
        mine = {address: device_id for address, device_id in known.items() if device_id is not None}
        found = (
            BusChip(address, device_id, pci.driver_of(self._system, address)) for address, device_id in mine.items()
        )
        return tuple(chip for chip in found if chip.driver != _FOREIGN)

    def seen(self) -> frozenset[str]:
        """Return what tells whether chips or their driver have come or gone: each chip's address with its driver."""
        return frozenset(f"{chip.address} {chip.driver}".strip() for chip in self.chips())


def chips(system: System) -> tuple[BusChip, ...]:
    """Return the chips as a single look at the bus shows them."""
    return Bus(system).chips()


def loaded(system: System) -> tuple[object, ...]:
    """Return what tells one loaded driver from another: its version, and whether its control node is there."""
    return (version_of(system), *system.fingerprint((MANAGER,)))


def describe(system: System) -> str:
    """Say which chips there are, for whoever cannot reach them."""
    there = chips(system)
    return f"on the PCI bus are {len(there)} ({', '.join(chip.describe() for chip in there)})" if there else ""


def unnamed(system: System, known: Collection[str], indices: Sequence[int]) -> Mapping[int, Name]:
    """Return which chip is behind each index that nothing was read of, given the addresses of all others.

    Nothing is returned where that does not come out even, for a wrong name would be worse than none.
    """
    left = [chip for chip in chips(system) if chip.address not in known]
    if len(left) != len(indices):
        return {index: Name(f"NPU {index}") for index in indices}
    return {index: Name(chip.describe()) for index, chip in zip(indices, left)}


def _chip_id(system: System, address: str) -> int | None:
    """Return the device id of a chip; None for whatever is none."""
    device_id = _number(system, address, "device")
    if _number(system, address, "vendor") != VENDOR_ID or system.is_link(f"{pci.DEVICES}/{address}/physfn"):
        return None
    return device_id if pci.class_of(system, address).startswith(CLASS) else None


def _number(system: System, address: str, name: str) -> int | None:
    try:
        return int(system.read_text(f"{pci.DEVICES}/{address}/{name}").strip(), 16)
    except (OSError, ValueError):
        return None
