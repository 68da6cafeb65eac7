# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pass whole devices through to virtual machines: bind them to their VFIO driver for the time of a claim.

The module works for every PCI device: it finds the users of a device node and the other members of its IOMMU group, and
switches drivers. Source: the kernel's ABI documents of sysfs (sysfs-bus-pci, sysfs-kernel-iommu_groups) and of VFIO. To
release a device, its own driver and vfio-pci wait in the kernel, without a time limit, until no process has the device
open. The wait cannot be canceled, so no process may use the device when a switch begins.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AcceleratorError, InUse, NotFound, Unsupported
from . import pci
from .cdi import ContainerEdits, DeviceNode
from .device_users import require_unused
from .system import System
from .vfio_drivers import VFIO_PCI, best_driver, is_vfio

DRIVER = VFIO_PCI
#: Drivers other than VFIO whose devices a group can contain: they start no memory accesses.
HARMLESS_DRIVERS = ("pci-stub", "pcieport")
LEGACY, IOMMUFD = "legacy", "iommufd"
CONTROL_NODE, IOMMU_NODE = "/dev/vfio/vfio", "/dev/iommu"

#: The maximum time, in seconds, for the kernel to bind a device to a driver or unbind it.
SWITCH_SECONDS = 15.0
POLL_SECONDS = 0.02
_BRIDGE = "0x0604"
_VFIO_DEVICE = re.compile(r"vfio\d+")


@dataclass(frozen=True)
class Handover:
    """One device to pass through: its PCI address, and the previous driver (``former``), which is restored later.

    ``interface`` is how a program in the container accesses it: legacy or iommufd. ``api_device`` says that the
    container also gets the interface's own device node. ``driver`` is the device's VFIO driver.
    """

    address: str
    former: str
    interface: str = LEGACY
    api_device: bool = False
    driver: str = DRIVER

    def to_dict(self) -> dict[str, Any]:
        """Return the values as a mapping. vfio-pci is omitted, because the previous release assumes it."""
        return {name: value for name, value in vars(self).items() if (name, value) != ("driver", DRIVER)}


def parse_handover(values: Mapping[str, Any]) -> Handover:
    """Parse the result of ``to_dict``. Raises ValueError."""
    try:
        found = Handover(**values)
        valid = pci.normalize_address(found.address) == found.address and isinstance(found.former, str)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a handover cannot be read: {error}") from error
    known = isinstance(found.driver, str) and is_vfio(found.driver) and "/" not in found.driver
    if not valid or not known or found.interface not in (LEGACY, IOMMUFD) or not isinstance(found.api_device, bool):
        raise ValueError(f"a handover cannot be read: {values!r}")
    return found


def choose_interface(system: System, prefer_iommufd: bool) -> str:
    """Return how a container accesses its devices: iommufd if the caller prefers it and the kernel supports it."""
    return IOMMUFD if prefer_iommufd and system.device_number(IOMMU_NODE) is not None else LEGACY


def require_passthrough(system: System, address: str) -> None:
    """Raise Unsupported or InUse, which names the obstacles, unless a device can be passed through."""
    driver = best_driver(system, address)
    if not system.exists(f"{pci.DRIVERS}/{driver}"):
        own = "" if driver == DRIVER else f", which this device needs in place of {DRIVER},"
        raise Unsupported(
            f"Device {address} cannot be passed through: the driver {driver}{own} is not loaded",
            hint=f"Load it: `modprobe {driver}`. The dra_driver role does so for {DRIVER} where the layout has passthrough.",
        )
    group = pci.iommu_group(system, address)
    if group is None:
        raise Unsupported(
            f"Device {address} cannot be passed through: it is in no IOMMU group",
            hint="Switch the IOMMU on in the firmware, and in the kernel's command line where that leaves it off (intel_iommu=on).",
        )
    others = [
        f"{other} ({driver or 'no driver'})"
        for other in pci.group_members(system, group)
        if other != address
        and (driver := pci.driver_of(system, other)) not in HARMLESS_DRIVERS
        and not is_vfio(driver)
        and not pci.class_of(system, other).startswith(_BRIDGE)
    ]
    if others:
        raise InUse(
            f"Device {address} cannot be passed through: its IOMMU group {group} holds {', '.join(others)} as well",
            hint=f"A group goes to one virtual machine as a whole. Bind the others to {DRIVER}, or switch ACS on in the firmware.",
        )
    virtual = pci.virtual_functions(system, address)
    if virtual:
        raise InUse(
            f"Device {address} cannot be passed through: {virtual} virtual functions of it are switched on",
            hint="Write 0 to its sriov_numvfs.",
        )


def is_bound_to_vfio(system: System, handover: Handover) -> bool:
    """Return whether a device is bound to its VFIO driver at this moment."""
    return pci.driver_of(system, handover.address) == handover.driver


def bind_to_vfio(system: System, handover: Handover) -> None:
    """Bind a device, which no process has open, to its VFIO driver.

    If this fails, restore its own driver and raise the error.
    """
    overridden = pci.override_of(system, handover.address) == handover.driver
    if is_bound_to_vfio(system, handover) and overridden:
        return
    try:
        if not overridden:  # also if a previous restore_driver ended after its first write
            _write(system, f"{_device(handover.address)}/driver_override", handover.driver)
        _switch(system, handover.address, handover.driver)
        _await(lambda: _missing_node(system, handover), f"the nodes of {handover.address}")
    except BaseException:
        restore_driver(system, handover)
        raise


def restore_driver(system: System, handover: Handover) -> None:
    """Bind a device to its previous driver, unless it is bound to it. Raises AcceleratorError.

    If that driver is not loaded, the device stays without a driver, and the kernel binds it when the driver is loaded.
    Raises InUse, which names the processes, while a virtual machine has it open.
    """
    address = handover.address
    if not system.exists(_device(address)):
        raise NotFound(f"PCI device {address} is not there", hint="Look for it in the kernel log; rescan the PCI bus.")
    if is_bound_to_vfio(system, handover):
        require_unused(system, _vfio_node_paths(system, handover), f"Device {address}")
    if pci.override_of(system, address) == handover.driver:
        _write(system, f"{_device(address)}/driver_override", "")
    if pci.driver_of(system, address) != handover.former:
        _switch(system, address, handover.former if system.exists(f"{pci.DRIVERS}/{handover.former}") else "")


def container_edits(system: System, handover: Handover) -> ContainerEdits:
    """Return the edits with which a container accesses a device on its VFIO driver.

    Raises NotFound if a node is missing.
    """
    paths = [*_vfio_node_paths(system, handover), CONTROL_NODE]  # programs check it to detect VFIO
    if handover.interface == IOMMUFD and handover.api_device:
        paths.append(IOMMU_NODE)
    return ContainerEdits(device_nodes=tuple(_device_node(system, path) for path in paths))


def _device_node(system: System, path: str) -> DeviceNode:
    number = system.device_number(path)
    if number is None:
        raise NotFound(f"{path} is no device node", hint="Look for vfio in the kernel log.")
    return DeviceNode(path, type=number.type, major=number.major, minor=number.minor, permissions="rw")


def _vfio_node_paths(system: System, handover: Handover) -> tuple[str, ...]:
    if handover.interface == IOMMUFD:
        names = [
            name
            for name in system.list_directory(f"{_device(handover.address)}/vfio-dev")
            if _VFIO_DEVICE.fullmatch(name)
        ]
        return tuple(f"/dev/vfio/devices/{name}" for name in names) or ("/dev/vfio/devices/vfio?",)
    group = pci.iommu_group(system, handover.address)
    return (f"/dev/vfio/{group}",)


def _missing_node(system: System, handover: Handover) -> str:
    missing = [path for path in _vfio_node_paths(system, handover) if system.device_number(path) is None]
    return f"{', '.join(missing)} is not there" if missing else ""


def _switch(system: System, address: str, driver: str) -> None:
    """Bind a device to a driver; "" only unbinds it."""
    present = pci.driver_of(system, address)
    if present == driver:
        return
    if present:
        _write(system, f"{pci.DRIVERS}/{present}/unbind", address)
        _await(
            lambda: pci.driver_of(system, address) and f"it is still bound to {present}",
            f"{address} to leave {present}",
        )
    if not driver:
        return
    _write(system, f"{pci.DRIVERS}/{driver}/bind", address)

    def missing_binding() -> str:
        found = pci.driver_of(system, address)
        return "" if found == driver else f"it is bound to {found or 'no driver'}"

    _await(missing_binding, f"{address} to be bound to {driver}")


def _await(find_missing: Callable[[], str], what: str) -> None:
    """Wait until nothing is missing. Raises AcceleratorError, which names the missing item."""
    deadline = time.monotonic() + SWITCH_SECONDS
    while found := find_missing():
        if time.monotonic() >= deadline:
            raise AcceleratorError(
                f"Waited {SWITCH_SECONDS:g} s for {what}: {found}",
                hint="Check the kernel log. The kernel does not release a device that a process has open.",
                code="driver-switch",
            )
        time.sleep(POLL_SECONDS)


def _device(address: str) -> str:
    return f"{pci.DEVICES}/{address}"


def _write(system: System, path: str, text: str) -> None:
    """Write to sysfs on a separate thread, because the kernel may never return from the write.

    Raises AcceleratorError.
    """
    failed: list[OSError] = []

    def write() -> None:
        try:
            system.put(path, text)
        except OSError as error:
            failed.append(error)

    writer = threading.Thread(target=write, name=f"write {path}", daemon=True)
    writer.start()
    writer.join(SWITCH_SECONDS)
    if writer.is_alive() or failed:
        why = failed[0].strerror if failed else f"the kernel did not complete the write within {SWITCH_SECONDS:g} s"
        raise AcceleratorError(
            f"{text or 'nothing'} cannot be written to {path}: {why}",
            hint="Check the kernel log. The write requires root permissions and a file system that is not read-only.",
            code="driver-switch",
        )
