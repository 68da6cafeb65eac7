# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pass whole devices through to virtual machines: bind them to their VFIO driver for the time of a claim.

The module works for every PCI device: it finds the users of a device node and the other members of its IOMMU group, and
switches drivers. Source: the kernel's ABI documents of sysfs (sysfs-bus-pci, sysfs-kernel-iommu_groups) and of VFIO. To
release a device, its own driver and vfio-pci wait in the kernel, without a time limit, until no process has the device
open. The wait cannot be canceled, so no process may use the device when a switch begins.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AcceleratorError, InUse, NotFound, NotPermitted, Unsupported
from ..model import Process
from . import pci
from .cdi import ContainerEdits, DeviceNode
from .kubelet_pods import located
from .system import DeviceNumber, System
from .vfio_drivers import VFIO_PCI, best_driver, is_vfio

DRIVER = VFIO_PCI
#: Drivers other than VFIO whose devices a group can contain: they start no memory accesses.
HARMLESS_DRIVERS = ("pci-stub", "pcieport")
LEGACY, IOMMUFD = "legacy", "iommufd"
CONTROL_NODE, IOMMU_NODE = "/dev/vfio/vfio", "/dev/iommu"

#: The maximum time, in seconds, for the kernel to bind a device to a driver or unbind it.
SWITCH_SECONDS = 15.0
POLL_SECONDS = 0.02
#: The maximum time, in seconds, for processes to close a device after its persistence mode was switched off.
FREE_SECONDS = 60.0
FREE_POLL_SECONDS = 0.5
_BRIDGE = "0x0604"
_CAP_SYS_PTRACE = 19
_VFIO_DEVICE = re.compile(r"vfio\d+")


@dataclass(frozen=True)
class Handover:
    """One device to pass through: its PCI address, and the driver to restore.

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


def handover_of(values: Mapping[str, Any]) -> Handover:
    """Parse the result of ``to_dict``. Raises ValueError."""
    try:
        found = Handover(**values)
        valid = pci.normalise_bus_id(found.address) == found.address and isinstance(found.former, str)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a handover cannot be read: {error}") from error
    known = isinstance(found.driver, str) and is_vfio(found.driver) and "/" not in found.driver
    if not valid or not known or found.interface not in (LEGACY, IOMMUFD) or not isinstance(found.api_device, bool):
        raise ValueError(f"a handover cannot be read: {values!r}")
    return found


def wanted_interface(system: System, preferred: bool) -> str:
    """Return how a container accesses its devices: iommufd if it is preferred and the kernel supports it."""
    return IOMMUFD if preferred and system.device_number(IOMMU_NODE) is not None else LEGACY


def refuse(system: System, address: str) -> None:
    """Raise an error if a device cannot be passed through, or if its IOMMU group has other members.

    Raises Unsupported or InUse, which names the obstacles.
    """
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


def refuse_users(system: System, paths: Iterable[str], what: str, *, but: str = "", seconds: float = 0.0) -> None:
    """Raise InUse, which names the processes, while any process has one of these device nodes open.

    Processes with the name ``but`` are ignored. ``seconds`` is the maximum wait until no process has one open.
    """
    numbers = {path: number for path in paths if (number := system.device_number(path)) is not None}
    until = time.monotonic() + seconds
    while found := [each for each in users(system, set(numbers.values())) if not but or each.name != but]:
        if time.monotonic() < until:
            time.sleep(FREE_POLL_SECONDS)
            continue
        found = list(located(system, found))
        raise InUse(
            f"{what} is in use: {', '.join(numbers)} {'is' if len(numbers) == 1 else 'are'} open in {', '.join(map(str, found))}",
            pids=[process.pid for process in found],
            hint="End these processes; a monitor that keeps devices open has to let go of this one.",
        )


def refuse_blind(system: System, what: str) -> None:
    """Raise NotPermitted, which names the capabilities and the remedy, if this process could not see a device's users.

    Source: capabilities(7), proc_pid_fd(5). To read another user's open files, a process needs CAP_SYS_PTRACE. Their
    directory in /proc is readable only for that user, and for root with CAP_DAC_READ_SEARCH. A /proc that is mounted
    with hidepid hides such processes, so the capability is required even if all visible processes can be read.
    """
    why = "" if _may_trace(system) else "this process has no CAP_SYS_PTRACE"
    if not why:
        unseen = [pid for pid in system.list_directory("/proc") if pid.isdigit() and not _may_look_into(system, pid)]
        if not unseen:
            return
        why = f"process {unseen[0]} ({_command(system, int(unseen[0]))}) keeps its open files to itself"
    raise NotPermitted(
        f"{what} is not passed through to a virtual machine: its users cannot be found, because {why}",
        hint="Give the driver CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH: the role dra_driver does so if the layout has passthrough "
        "(in a pod, if dra_driver_pod_passthrough is true). A security module that denies it must allow it.",
    )


def _may_trace(system: System) -> bool:
    """Return whether this process has CAP_SYS_PTRACE; True if the kernel does not report it."""
    try:
        status = system.read_text("/proc/self/status")
    except OSError:
        return True
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is None or bool(int(found[1], 16) >> _CAP_SYS_PTRACE & 1)


def _may_look_into(system: System, pid: str) -> bool:
    """Return whether a process's open files can be read. A process that has ended has none."""
    folder = system.path(f"/proc/{pid}/fd")
    try:
        for descriptor in os.listdir(folder):  # noqa: PTH208  names alone, no objects
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # closed in the meantime
                os.readlink(f"{folder}/{descriptor}")  # noqa: PTH115  every open file of the machine: no objects
                break  # the kernel allows them all or none
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def users(system: System, numbers: Iterable[DeviceNumber]) -> tuple[Process, ...]:
    """Return the processes, other than this one, that have a device with one of these numbers open.

    Only the numbers count, because a container has its own device nodes. Processes that this one cannot read are
    ignored.
    """
    wanted = {(number.major, number.minor) for number in numbers}
    own = _own_number(system)
    found = sorted(
        int(name)
        for name in (system.list_directory("/proc") if wanted else ())
        if name.isdigit() and name != own and _has_open(system, name, wanted)
    )
    return tuple(Process(pid, _command(system, pid)) for pid in found)


def holders(system: System, paths: Iterable[str]) -> tuple[Process, ...]:
    """Return the other processes that have one of these device nodes open, with their pods, units, or containers.

    A process whose open files this one may not read is not found.
    """
    numbers = {number for path in paths if (number := system.device_number(path)) is not None}
    return located(system, users(system, numbers))


def users_of_file(system: System, path: str) -> tuple[int, ...]:
    """Return the processes that have a file open, under any path in a container; empty if the file does not exist."""
    try:
        wanted = system.path(path).stat()
    except OSError:
        return ()
    found = []
    for name in system.list_directory("/proc"):
        for descriptor in system.list_directory(f"/proc/{name}/fd") if name.isdigit() else ():
            with contextlib.suppress(OSError):
                there = system.path(f"/proc/{name}/fd/{descriptor}").stat()
                if (there.st_dev, there.st_ino) == (wanted.st_dev, wanted.st_ino):
                    found.append(int(name))
                    break
    return tuple(sorted(found))


def _own_number(system: System) -> str:
    """Return this process's PID in the given /proc. In a pod it differs from the PID that the process sees."""
    try:
        return system.path("/proc/self").readlink().name
    except OSError:
        return str(os.getpid())


def _has_open(system: System, pid: str, wanted: set[tuple[int, int]]) -> bool:
    folder = system.path(f"/proc/{pid}/fd")
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208  names alone, no objects
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            found = os.stat(f"{folder}/{descriptor}")  # noqa: PTH116  every open file of the machine: no objects
        except OSError:
            continue
        if found.st_rdev and (os.major(found.st_rdev), os.minor(found.st_rdev)) in wanted:
            return True
    return False


def _command(system: System, pid: int) -> str:
    try:
        return system.read_text(f"/proc/{pid}/comm").strip()
    except OSError:
        return ""


def is_given(system: System, handover: Handover) -> bool:
    """Return whether a device is bound to its VFIO driver at this moment."""
    return pci.driver_of(system, handover.address) == handover.driver


def give(system: System, handover: Handover) -> None:
    """Bind a device, which no process has open, to its VFIO driver.

    If this fails, restore its own driver and raise the error.
    """
    overridden = pci.override_of(system, handover.address) == handover.driver
    if is_given(system, handover) and overridden:
        return
    try:
        if not overridden:  # also if a previous take_back was interrupted after its first write
            _write(system, f"{_device(handover.address)}/driver_override", handover.driver)
        _switch(system, handover.address, handover.driver)
        _await(lambda: _missing_node(system, handover), f"the nodes of {handover.address}")
    except BaseException:
        take_back(system, handover)
        raise


def take_back(system: System, handover: Handover) -> None:
    """Bind a device to its previous driver, unless it is bound to it. Raises AcceleratorError.

    If that driver is not loaded, the device stays without a driver, and the kernel binds it when the driver is loaded.
    Raises InUse, which names the processes, while a virtual machine has it open.
    """
    address = handover.address
    if not system.exists(_device(address)):
        raise NotFound(f"PCI device {address} is not there", hint="Look for it in the kernel log; rescan the PCI bus.")
    if is_given(system, handover):
        refuse_users(system, _own_nodes(system, handover), f"Device {address}")
    if pci.override_of(system, address) == handover.driver:
        _write(system, f"{_device(address)}/driver_override", "")
    if pci.driver_of(system, address) != handover.former:
        _switch(system, address, handover.former if system.exists(f"{pci.DRIVERS}/{handover.former}") else "")


def edits(system: System, handover: Handover) -> ContainerEdits:
    """Return the edits with which a container accesses a device on its VFIO driver.

    Raises NotFound if a node is missing.
    """
    paths = [*_own_nodes(system, handover), CONTROL_NODE]  # programs check it to detect VFIO
    if handover.interface == IOMMUFD and handover.api_device:
        paths.append(IOMMU_NODE)
    return ContainerEdits(device_nodes=tuple(_node(system, path) for path in paths))


def _node(system: System, path: str) -> DeviceNode:
    number = system.device_number(path)
    if number is None:
        raise NotFound(f"{path} is no device node", hint="Look for vfio in the kernel log.")
    return DeviceNode(path, type=number.type, major=number.major, minor=number.minor, permissions="rw")


def _own_nodes(system: System, handover: Handover) -> tuple[str, ...]:
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
    missing = [path for path in _own_nodes(system, handover) if system.device_number(path) is None]
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

    def unbound() -> str:
        found = pci.driver_of(system, address)
        return "" if found == driver else f"it is bound to {found or 'no driver'}"

    _await(unbound, f"{address} to be bound to {driver}")


def _await(missing: Callable[[], str], what: str) -> None:
    """Wait until nothing is missing. Raises AcceleratorError, which names the missing item."""
    deadline = time.monotonic() + SWITCH_SECONDS
    while found := missing():
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
