# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the chips on the PCI bus from the kernel's files, without the vendor's library or driver.

Chips on the unified bus (950) have no PCI functions. They are found by the device nodes of the installed driver. A file
shows whether the driver is built for this bus (`feature_ub.conf` of hicann/driver).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...discovery.scan import DeviceName
from ...host import pci
from ...host.system import System
from ..host_texts import text_or_empty
from .driver_files import MANAGER, install_folder, version_of
from .families import CLASS, UNIFIED_BUS_ID, VENDOR_ID, family_of

_FOREIGN = "vfio-pci"
_FEATURES, _IS_ON_UNIFIED_BUS = "driver/script/feature.conf", "FEATURE_HD_CONNECT_IS_UB=y"
_NODE = re.compile(r"davinci\d{1,3}")


@dataclass(frozen=True)
class BusChip:
    """A chip in the kernel's files. ``driver`` is "" for a chip without a driver.

    ``address`` is the PCI address, or the device node of a chip on the unified bus.
    """

    address: str
    device_id: int
    driver: str = ""

    def describe(self) -> str:
        """Return the chip's family and address as text."""
        return f"NPU of the family {family_of(self.device_id).word} at {self.address}"


class Bus:
    """The PCI bus. The type of a device is read once when its address appears, because most devices are not chips."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._known: dict[str, int | None] = {}

    def chips(self) -> tuple[BusChip, ...]:
        """Return the chips, ordered by address.

        Chips that are passed through to virtual machines, and virtual functions for vNPUs, are left out.
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
        return tuple(chip for chip in found if chip.driver != _FOREIGN) if mine else _on_unified_bus(self._system)

    def chips_with_drivers(self) -> frozenset[str]:
        """Return each chip's address with its driver, so that a caller detects changes."""
        return frozenset(f"{chip.address} {chip.driver}".strip() for chip in self.chips())


def chips(system: System) -> tuple[BusChip, ...]:
    """Return the chips that are on the bus now."""
    return Bus(system).chips()


def driver_instance(system: System) -> tuple[object, ...]:
    """Return values that change with the loaded driver: its version, and the state of its control node."""
    return (version_of(system), *system.fingerprint((MANAGER,)))


def describe(system: System) -> str:
    """Return the chips on the bus as text, for errors; "" without chips."""
    there = chips(system)
    if not there:
        return ""
    where = "unified" if there[0].address.startswith("/") else "PCI"
    return f"on the {where} bus are {len(there)} ({', '.join(chip.describe() for chip in there)})"


def name_unread_chips(system: System, known: Collection[str], indices: Sequence[int]) -> Mapping[int, DeviceName]:
    """Return names for the indices of chips without facts, from the chips without the ``known`` addresses.

    If the numbers differ, the name is only the index, because a wrong name would be worse.
    """
    unread = [chip for chip in chips(system) if chip.address not in known]
    if len(unread) != len(indices):
        return {index: DeviceName(f"NPU {index}") for index in indices}
    return {index: DeviceName(chip.describe()) for index, chip in zip(indices, unread)}


def has_unified_bus_driver(system: System) -> bool:
    """Return whether the installed driver is for chips on the unified bus."""
    return _IS_ON_UNIFIED_BUS in text_or_empty(system, f"{install_folder(system)}/{_FEATURES}").split()


def _on_unified_bus(system: System) -> tuple[BusChip, ...]:
    if not has_unified_bus_driver(system):
        return ()
    names = sorted(filter(_NODE.fullmatch, system.list_directory("/dev")), key=lambda name: int(name[len("davinci") :]))
    return tuple(BusChip(f"/dev/{name}", UNIFIED_BUS_ID) for name in names)


def _chip_id(system: System, address: str) -> int | None:
    """Return the device ID of a chip; None for other devices."""
    device_id = _number(system, address, "device")
    if _number(system, address, "vendor") != VENDOR_ID or system.is_link(f"{pci.DEVICES}/{address}/physfn"):
        return None
    return device_id if pci.class_of(system, address).startswith(CLASS) else None


def _number(system: System, address: str, name: str) -> int | None:
    try:
        return int(text_or_empty(system, f"{pci.DEVICES}/{address}/{name}"), 16)
    except ValueError:
        return None
