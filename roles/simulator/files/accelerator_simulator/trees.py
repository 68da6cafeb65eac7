# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The files that a machine shows: /proc, /sys and /dev, as a value. Nothing here touches a disk."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from .description import Settings, gpu_uuid
from .hardware import Catalogue, Device, Machine, address_key
from .pciconfig import LINK_SPEEDS, configuration_space, place_bars, resource_file

NVIDIA_MAJOR = 195
CONTROL_MINOR, MODESET_MINOR = 255, 254
MIG_CONFIG_MINOR, MIG_MONITOR_MINOR = 1, 2
# nvidia-modprobe's numbering: 32 GPUs, 15 GPU instances each, 8 compute instances in each of those
CAPABILITY_GPUS, CAPABILITY_GPU_INSTANCES, CAPABILITY_COMPUTE_INSTANCES = 32, 15, 8
PORT_TYPES = {"root-port": 4, "switch-upstream": 5, "switch-downstream": 6}
DRIVERS_SHOWN = ("nvidia", "mlx5_core", "nvidia-nvswitch", "snd_hda_intel")
VFIO_DRIVER = "vfio-pci"
MISCELLANEOUS_MAJOR, VFIO_MINOR, IOMMU_MINOR = 10, 196, 122
KERNEL_MODULES = (
    ("nvidia", 14381056, ("nvidia_uvm", "nvidia_modeset")),
    ("nvidia_modeset", 1830912, ("nvidia_drm",)),
    ("nvidia_drm", 135168, ()),
    ("nvidia_uvm", 2166784, ()),
)
MODULE_PARAMETERS = (
    ("ResmanDebugLevel", "4294967295"),
    ("RmLogonRC", "1"),
    ("ModifyDeviceFiles", "1"),
    ("DeviceFileUID", "0"),
    ("DeviceFileGID", "0"),
    ("DeviceFileMode", "438"),
    ("InitializeSystemMemoryAllocations", "1"),
    ("UsePageAttributeTable", "4294967295"),
    ("EnableMSI", "1"),
    ("EnablePCIeGen3", "0"),
    ("EnablePCIERelaxedOrderingMode", "0"),
    ("MemoryPoolSize", "0"),
    ("EnableStreamMemOPs", "0"),
    ("EnableUserNUMAManagement", "1"),
    ("NvLinkDisable", "0"),
    ("RmProfilingAdminOnly", "1"),
    ("PreserveVideoMemoryAllocations", "0"),
    ("EnableS0ixPowerManagement", "0"),
    ("DynamicPowerManagement", "3"),
    ("RegisterPCIDriver", "1"),
    ("EnableResizableBar", "0"),
    ("EnableDbgBreakpoint", "0"),
    ("EnableNonblockingOpen", "1"),
    ("ImexChannelCount", "2048"),
    ("CreateImexChannel0", "0"),
)


@dataclass(frozen=True)
class File:
    """A regular file."""

    content: bytes
    mode: int = 0o444


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True)
class Directory:
    """A directory that would otherwise be empty."""

    mode: int = 0o755


@dataclass(frozen=True)
class Node:
    """A character device."""

    major: int
    minor: int
    mode: int = 0o666


Entry = Union[File, Link, Directory, Node]
Tree = dict[str, Entry]


@dataclass(frozen=True)
class Surroundings:
    """What the host shows already and the trees have to fit: its /proc files and the first free IOMMU group.

    ``vfio`` says that it has no VFIO of its own, which the machine's would be in the way of.
    """

    proc_devices: str = "Character devices:\n\nBlock devices:\n"
    proc_modules: str | None = ""
    iommu_base: int = 0
    vfio: bool = True


@dataclass(frozen=True)
class Majors:
    """Major numbers of the driver's character devices; only 195 is fixed."""

    nvidia: int = NVIDIA_MAJOR
    by_name: Mapping[str, int] = field(default_factory=dict)


def choose_majors(proc_devices: str, previous: Mapping[str, int] | None = None) -> Majors:
    """Majors that the host uses for nothing else: its own drivers must never answer for ours.

    From 236 downward for what a driver registers early, from 510 downward for UVM, as dynamic allocation gives them.
    Those of a ``previous`` boot come first, so that a machine stays the same over reboots.
    """
    taken = {int(number) for number in re.findall(r"^\s*(\d+) ", proc_devices, re.MULTILINE)} | {NVIDIA_MAJOR}
    by_name: dict[str, int] = {}
    for name, start in (
        ("nvidia-caps", 236),
        ("nvidia-nvswitch", 235),
        ("nvidia-caps-imex-channels", 234),
        ("nvidia-uvm", 510),
        ("vfio", 233),
        ("vfio-dev", 232),
    ):
        number = (previous or {}).get(name, start)
        number = start if number in taken else number
        while number in taken:
            number -= 1
        taken.add(number)
        by_name[name] = number
    return Majors(by_name=by_name)


def merge_proc_devices(original: str, majors: Majors, nvswitches: bool) -> str:
    """/proc/devices with the driver's lines among the character devices, in the order of the numbers."""
    characters, blank, blocks = original.partition("\n\n")
    lines = [line for line in characters.splitlines()[1:] if line.strip()]
    ours = [(majors.nvidia, name) for name in ("nvidia", "nvidia-modeset", "nvidiactl")]
    ours += [(number, name) for name, number in majors.by_name.items() if nvswitches or name != "nvidia-nvswitch"]
    lines += [f"{number:3d} {name}" for number, name in ours]
    lines.sort(key=lambda line: int(line.split()[0]))
    return "\n".join(["Character devices:", *lines]) + (blank + blocks if blank else "\n\nBlock devices:\n")


def merge_proc_modules(original: str) -> str:
    """/proc/modules with the driver's modules first, as the last ones loaded stand there."""
    lines = [
        f"{name} {int(size)} {len(users)} {''.join(user + ',' for user in users) or '-'} Live 0x0000000000000000 (OE)"
        for name, size, users in KERNEL_MODULES
    ]
    return "\n".join(reversed(lines)) + "\n" + original


def cpu_numbers(cpus: str) -> list[int]:
    """``0-2,8`` as [0, 1, 2, 8]."""
    numbers: list[int] = []
    for part in cpus.split(","):
        first, _dash, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def cpu_mask(cpus: str) -> str:
    """A CPU list as the kernel's mask: 32-bit words, highest first, separated by commas."""
    bits = sum(1 << number for number in cpu_numbers(cpus))
    words: list[str] = []
    while True:
        words.insert(0, f"{bits & 4294967295:08x}")
        bits >>= 32
        if not bits:
            return ",".join(words)


def sysfs_path(device: Device) -> str:
    """Where the function really is: /sys/devices/pcidddd:bb/…/address."""
    return "/sys/devices/" + "/".join(device.path)


def _relative(path: str, target: str) -> Link:
    return Link(posixpath.relpath(target, posixpath.dirname(path)))


def _text(value: Any, mode: int = 0o444) -> File:
    return File((f"{value}\n").encode(), mode)


def capability(minor: int, mode: int) -> File:
    """One file of the capability tree: which device node stands for it, and with which mode."""
    return File(f"DeviceFileMinor: {int(minor)}\nDeviceFileMode: {int(mode)}\nDeviceFileModify: 1\n".encode())


def mig_minors() -> str:
    """/proc/driver/nvidia-caps/mig-minors: the fixed map of every capability that there can be."""
    lines = [f"config {int(MIG_CONFIG_MINOR)}", f"monitor {int(MIG_MONITOR_MINOR)}"]
    for gpu in range(CAPABILITY_GPUS):
        for instance in range(CAPABILITY_GPU_INSTANCES):
            minor = 3 + 135 * gpu + 9 * instance
            lines.append(f"gpu{int(gpu)}/gi{int(instance)}/access {int(minor)}")
            lines += [
                f"gpu{int(gpu)}/gi{int(instance)}/ci{int(compute)}/access {int(minor + 1 + compute)}"
                for compute in range(CAPABILITY_COMPUTE_INSTANCES)
            ]
    return "\n".join(lines) + "\n"


def proc_tree(machine: Machine, catalogue: Catalogue, settings: Settings, majors: Majors, around: Surroundings) -> Tree:
    """Everything under /proc."""
    driver, nvswitches = "/proc/driver/nvidia", [device for device in machine.devices if device.kind == "nvswitch"]
    tree: Tree = {
        "/proc/devices": File(merge_proc_devices(around.proc_devices, majors, bool(nvswitches)).encode()),
        driver + "/version": File(
            (
                f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {settings.driver_version}  Release Build\n"
                "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
            ).encode()
        ),
        driver + "/params": File("".join("{}: {}\n".format(*pair) for pair in MODULE_PARAMETERS).encode()),
        driver + "/registry": File(b'Binary: ""\n'),
        driver + "/capabilities/mig/config": capability(MIG_CONFIG_MINOR, 0o400),
        driver + "/capabilities/mig/monitor": capability(MIG_MONITOR_MINOR, 0o444),
        "/proc/driver/nvidia-caps/mig-minors": File(mig_minors().encode()),
    }
    if around.proc_modules is not None:
        tree["/proc/modules"] = File(merge_proc_modules(around.proc_modules).encode())
    for gpu in machine.gpus:
        board = catalogue.boards[gpu.board or ""]
        information = (
            ("Model:", board.name),
            ("IRQ:", 64 + (gpu.minor or 0)),
            ("GPU UUID:", gpu_uuid(settings.identity, gpu.address)),
            ("Video BIOS:", board.part["vbios"]),
            ("Bus Type:", "PCIe"),
            ("DMA Size:", "52 bits"),
            ("DMA Mask:", "0xfffffffffffff"),
            ("Bus Location:", gpu.address),
            ("Device Minor:", gpu.minor),
            ("GPU Firmware:", settings.driver_version),
            ("GPU Excluded:", "No"),
        )
        tree[f"{driver}/gpus/{gpu.address}/information"] = File(
            "".join(f"{key:<8}\t {value}\n" for key, value in information).encode()
        )
        if board.mig is not None:
            tree[f"{driver}/capabilities/gpu{int(gpu.minor or 0)}/mig"] = Directory(0o755)
    for switch in nvswitches:
        tree[f"/proc/driver/nvidia-nvswitch/devices/{switch.address}"] = File(b"BIOS Version: 96.10.6E.00.01\n")
    return tree


def _subordinates(machine: Machine) -> dict[str, tuple[int, int, int]]:
    """For each bridge its primary bus, the bus right below and the highest bus below."""
    result: dict[str, tuple[int, int, int]] = {}
    for bridge in machine.devices:
        below = [
            device
            for device in machine.devices
            if len(device.path) > len(bridge.path) and device.path[: len(bridge.path)] == bridge.path
        ]
        if below:
            children = [device for device in below if len(device.path) == len(bridge.path) + 1]
            buses = [address_key(device.address)[1] for device in below]
            result[bridge.address] = (address_key(bridge.address)[1], address_key(children[0].address)[1], max(buses))
    return result


def _device_tree(
    machine: Machine,
    device: Device,
    pci: Mapping[str, Any],
    driver: str,
    position: int,
    group: int | None,
    buses: tuple[int, int, int],
) -> Tree:
    here, bridge, cpus = sysfs_path(device), device.kind in PORT_TYPES, machine.numa_node(device.numa).cpus
    bars = place_bars(pci, position)
    generation, width = int(pci["max_link_generation"]), int(pci["max_link_width"])
    number = {
        key: int(str(pci[key]), 16)
        for key in ("vendor", "device", "class", "revision", "subsystem_vendor", "subsystem_device")
    }
    modalias = "pci:v{:08X}d{:08X}sv{:08X}sd{:08X}bc{:02X}sc{:02X}i{:02X}".format(
        *(number[key] for key in ("vendor", "device", "subsystem_vendor", "subsystem_device")),
        *number["class"].to_bytes(3, "big"),
    )
    uevent = (
        "{}PCI_CLASS={:X}\nPCI_ID={:04X}:{:04X}\nPCI_SUBSYS_ID={:04X}:{:04X}\nPCI_SLOT_NAME={}\nMODALIAS={}".format(
            f"DRIVER={driver}\n" if driver in DRIVERS_SHOWN else "",
            number["class"],
            number["vendor"],
            number["device"],
            number["subsystem_vendor"],
            number["subsystem_device"],
            device.address,
            modalias,
        )
    )
    tree: Tree = {
        here + "/" + name: _text(value, mode)
        for name, value, mode in (
            ("vendor", pci["vendor"], 0o444),
            ("device", pci["device"], 0o444),
            ("subsystem_vendor", pci["subsystem_vendor"], 0o444),
            ("subsystem_device", pci["subsystem_device"], 0o444),
            ("class", pci["class"], 0o444),
            ("revision", pci["revision"], 0o444),
            ("numa_node", device.numa, 0o644),
            ("local_cpulist", cpus, 0o444),
            ("local_cpus", cpu_mask(cpus), 0o444),
            ("current_link_speed", LINK_SPEEDS[generation], 0o444),
            ("max_link_speed", LINK_SPEEDS[generation], 0o444),
            ("current_link_width", width, 0o444),
            ("max_link_width", width, 0o444),
            ("enable", 1, 0o644),
            ("irq", 64 + position, 0o444),
            ("power_state", "D0", 0o444),
            ("dma_mask_bits", 52 if device.kind == "gpu" else 64, 0o444),
            ("broken_parity_status", 0, 0o644),
            ("driver_override", "(null)", 0o644),
            ("msi_bus", 1, 0o644),
            ("modalias", modalias, 0o444),
            ("uevent", uevent, 0o644),
            ("power/control", "on", 0o644),
            ("power/runtime_status", "active", 0o444),
        )
    }
    tree[here + "/resource"] = File(resource_file(bars).encode())
    tree[here + "/config"] = File(configuration_space(pci, bars, bridge, buses, PORT_TYPES.get(device.kind, 0)), 0o644)
    tree[here + "/subsystem"] = _relative(here + "/subsystem", "/sys/bus/pci")
    tree["/sys/bus/pci/devices/" + device.address] = _relative("/sys/bus/pci/devices/x", here)
    for name in ("remove", "rescan") + (("reset",) if device.kind == "gpu" else ()):
        tree[here + "/" + name] = File(b"", 0o200)
    if device.kind == "gpu":
        tree[here + "/reset_method"] = _text("flr bus", 0o644)
    if bridge:
        tree[here + "/secondary_bus_number"] = _text(buses[1])
        tree[here + "/subordinate_bus_number"] = _text(buses[2])
    if driver in DRIVERS_SHOWN:
        folder = "/sys/bus/pci/drivers/" + driver
        tree[here + "/driver"] = _relative(here + "/driver", folder)
        tree[f"{folder}/{device.address}"] = _relative(folder + "/x", here)
        for name in ("bind", "unbind", "new_id", "remove_id"):
            tree[f"{folder}/{name}"] = File(b"", 0o200)
    if device.interface:
        net = f"{here}/net/{device.interface}"
        octets = (2, *address_key(device.address)[1:], address_key(device.address)[0] & 255, device.numa)
        tree[net + "/address"] = _text(":".join(f"{octet:02x}" for octet in octets))
        tree[net + "/operstate"] = _text("up")
        tree[net + "/device"] = _relative(net + "/device", here)
    if device.rdma:
        name = f"{here}/infiniband/{device.rdma}"
        tree[name + "/node_type"] = _text("1: CA")
        tree[name + "/device"] = _relative(name + "/device", here)
    if group is not None:
        folder = f"/sys/kernel/iommu_groups/{int(group)}"
        tree[here + "/iommu_group"] = _relative(here + "/iommu_group", folder)
        tree[f"{folder}/devices/{device.address}"] = _relative(folder + "/devices/x", here)
        tree[folder + "/type"] = _text("DMA-FQ", 0o644)
        tree[folder + "/reserved_regions"] = File(b"0x00000000fee00000 0x00000000feefffff msi\n")
    return tree


def sys_tree(machine: Machine, catalogue: Catalogue, settings: Settings, around: Surroundings) -> Tree:
    """Everything under /sys: the PCI tree, the drivers' and modules' folders, IOMMU groups."""
    tree: Tree = {}
    buses = _subordinates(machine)
    groups: dict[str, int] = {}
    for root, node in machine.roots:
        cpus, here = machine.numa_node(node).cpus, "/sys/devices/" + root
        tree[f"{here}/pci_bus/{root[3:]}/cpulistaffinity"] = _text(cpus)
        tree[f"{here}/pci_bus/{root[3:]}/cpuaffinity"] = _text(cpu_mask(cpus))
        tree[here + "/power/control"] = _text("auto", 0o644)
    for position, device in enumerate(machine.devices):
        if device.board is not None:
            pci, driver = catalogue.boards[device.board].pci, "nvidia"
        else:
            component = catalogue.components[device.component or ""]
            pci, driver = component.pci, component.driver
        # Functions of one slot share a group: what goes from one to the other does not pass the IOMMU.
        grouped = device.kind in ("gpu", "nic", "audio")
        slot = device.address.partition(".")[0]
        if grouped and slot not in groups:
            groups[slot] = around.iommu_base + len(groups)
        tree.update(
            _device_tree(
                machine,
                device,
                pci,
                driver,
                position,
                groups[slot] if grouped else None,
                buses.get(device.address, (0, 0, 0)),
            )
        )
    for name, size, users in KERNEL_MODULES:
        here = "/sys/module/" + name
        tree.update(
            {
                here + "/version": _text(settings.driver_version),
                here + "/initstate": _text("live"),
                here + "/coresize": _text(size),
                here + "/refcnt": _text(len(users)),
                here + "/taint": _text("OE"),
            }
        )
    if around.vfio:
        tree["/sys/bus/pci/drivers_probe"] = File(b"", 0o200)
        for name in ("bind", "unbind", "new_id", "remove_id"):
            tree[f"/sys/bus/pci/drivers/{VFIO_DRIVER}/{name}"] = File(b"", 0o200)
        tree["/sys/module/vfio_pci/initstate"] = _text("live")
    tree["/sys/module/nvidia/drivers/pci:nvidia"] = Link("../../../bus/pci/drivers/nvidia")
    tree["/sys/bus/pci/drivers/nvidia/module"] = Link("../../../../module/nvidia")
    return tree


def device_nodes(machine: Machine, majors: Majors, vfio: bool = True) -> Tree:
    """Everything under /dev: one node for each GPU and the driver's own."""
    uvm, caps = majors.by_name["nvidia-uvm"], majors.by_name["nvidia-caps"]
    tree: Tree = {f"/dev/nvidia{gpu.minor or 0}": Node(majors.nvidia, gpu.minor or 0) for gpu in machine.gpus}
    tree.update(
        {
            "/dev/nvidiactl": Node(majors.nvidia, CONTROL_MINOR),
            "/dev/nvidia-modeset": Node(majors.nvidia, MODESET_MINOR),
            "/dev/nvidia-uvm": Node(uvm, 0),
            "/dev/nvidia-uvm-tools": Node(uvm, 1),
            f"/dev/nvidia-caps/nvidia-cap{int(MIG_CONFIG_MINOR)}": Node(caps, MIG_CONFIG_MINOR, 0o400),
            f"/dev/nvidia-caps/nvidia-cap{int(MIG_MONITOR_MINOR)}": Node(caps, MIG_MONITOR_MINOR, 0o444),
        }
    )
    switches = [device for device in machine.devices if device.kind == "nvswitch"]
    if switches:
        major = majors.by_name["nvidia-nvswitch"]
        tree["/dev/nvidia-nvswitchctl"] = Node(major, 255)
        tree.update({f"/dev/nvidia-nvswitch{int(number)}": Node(major, number) for number in range(len(switches))})
    if vfio:
        tree["/dev/vfio/vfio"] = Node(MISCELLANEOUS_MAJOR, VFIO_MINOR)
        tree["/dev/iommu"] = Node(MISCELLANEOUS_MAJOR, IOMMU_MINOR, 0o600)
    # systemd's device rules for containers name devices by /dev/char
    links = {
        f"/dev/char/{int(node.major)}:{int(node.minor)}": Link("../" + path[len("/dev/") :])
        for path, node in tree.items()
        if isinstance(node, Node)
    }
    tree.update(links)
    return tree


def whole_tree(
    machine: Machine, catalogue: Catalogue, settings: Settings, majors: Majors, around: Surroundings
) -> Tree:
    """/proc, /sys and /dev together."""
    tree = proc_tree(machine, catalogue, settings, majors, around)
    tree.update(sys_tree(machine, catalogue, settings, around))
    tree.update(device_nodes(machine, majors, around.vfio))
    return tree


def directories_above(paths: Iterable[str]) -> list[str]:
    """Every directory that the paths need, parents first."""
    found = set()
    for path in paths:
        parent = posixpath.dirname(path)
        while parent not in ("", "/"):
            found.add(parent)
            parent = posixpath.dirname(parent)
    return sorted(found)
