# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The files that a machine shows in /proc, /sys, and /dev, as values. No function here accesses a disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import ascend_files, nvidia_files
from .description import Settings
from .entries import File, Link, Node, Tree, relative, text
from .hardware import Catalogue, Device, Machine, address_key
from .host import Majors, Module, Surroundings, merge_proc_devices, merge_proc_modules
from .pciconfig import LINK_SPEEDS, configuration_space, place_bars, resource_file

PORT_TYPES = {"root-port": 4, "switch-upstream": 5, "switch-downstream": 6}
DRIVERS_SHOWN = ("nvidia", "devdrv_device_driver", "mlx5_core", "nvidia-nvswitch", "snd_hda_intel")
ACCELERATORS = ("gpu", "npu")
VFIO_DRIVER = "vfio-pci"
MISCELLANEOUS_MAJOR, VFIO_MINOR, IOMMU_MINOR = 10, 196, 122


def cpu_numbers(cpus: str) -> list[int]:
    """Return ``0-2,8`` as [0, 1, 2, 8]."""
    numbers: list[int] = []
    for part in cpus.split(","):
        first, _dash, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def cpu_mask(cpus: str) -> str:
    """Return a CPU list as the kernel's mask: 32-bit words, highest first, separated by commas."""
    bits = sum(1 << number for number in cpu_numbers(cpus))
    words: list[str] = []
    while True:
        words.insert(0, f"{bits & 4294967295:08x}")
        bits >>= 32
        if not bits:
            return ",".join(words)


def sysfs_path(device: Device) -> str:
    """Return the real path of the function: /sys/devices/pcidddd:bb/…/address."""
    return "/sys/devices/" + "/".join(device.path)


def _subordinates(machine: Machine) -> dict[str, tuple[int, int, int]]:
    """Return for each bridge its primary, secondary, and highest subordinate bus."""
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
        here + "/" + name: text(value, mode)
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
    tree[here + "/subsystem"] = relative(here + "/subsystem", "/sys/bus/pci")
    tree["/sys/bus/pci/devices/" + device.address] = relative("/sys/bus/pci/devices/x", here)
    for name in ("remove", "rescan") + (("reset",) if device.kind in ACCELERATORS else ()):
        tree[here + "/" + name] = File(b"", 0o200)
    if device.kind in ACCELERATORS:
        tree[here + "/reset_method"] = text("flr bus", 0o644)
    if bridge:
        tree[here + "/secondary_bus_number"] = text(buses[1])
        tree[here + "/subordinate_bus_number"] = text(buses[2])
    if driver in DRIVERS_SHOWN:
        folder = "/sys/bus/pci/drivers/" + driver
        tree[here + "/driver"] = relative(here + "/driver", folder)
        tree[f"{folder}/{device.address}"] = relative(folder + "/x", here)
        for name in ("bind", "unbind", "new_id", "remove_id"):
            tree[f"{folder}/{name}"] = File(b"", 0o200)
    if device.interface:
        net = f"{here}/net/{device.interface}"
        octets = (2, *address_key(device.address)[1:], address_key(device.address)[0] & 255, device.numa)
        tree[net + "/address"] = text(":".join(f"{octet:02x}" for octet in octets))
        tree[net + "/operstate"] = text("up")
        tree[net + "/device"] = relative(net + "/device", here)
    if device.rdma:
        name = f"{here}/infiniband/{device.rdma}"
        tree[name + "/node_type"] = text("1: CA")
        tree[name + "/device"] = relative(name + "/device", here)
    if group is not None:
        folder = f"/sys/kernel/iommu_groups/{int(group)}"
        tree[here + "/iommu_group"] = relative(here + "/iommu_group", folder)
        tree[f"{folder}/devices/{device.address}"] = relative(folder + "/devices/x", here)
        tree[folder + "/type"] = text("DMA-FQ", 0o644)
        tree[folder + "/reserved_regions"] = File(b"0x00000000fee00000 0x00000000feefffff msi\n")
    return tree


def sys_tree(machine: Machine, catalogue: Catalogue, settings: Settings, around: Surroundings) -> Tree:
    """Return the tree under /sys: the PCI devices, drivers, modules, and IOMMU groups."""
    tree: Tree = {}
    buses = _subordinates(machine)
    groups: dict[str, int] = {}
    for root, node in machine.roots:
        cpus, here = machine.numa_node(node).cpus, "/sys/devices/" + root
        tree[f"{here}/pci_bus/{root[3:]}/cpulistaffinity"] = text(cpus)
        tree[f"{here}/pci_bus/{root[3:]}/cpuaffinity"] = text(cpu_mask(cpus))
        tree[here + "/power/control"] = text("auto", 0o644)
    for position, device in enumerate(machine.devices):
        if device.kind == "npu" and machine.is_on_unified_bus:
            continue
        pci, driver = catalogue.pci(device)
        if driver in nvidia_files.PCI_DRIVERS and not settings.driver_version:
            driver = ""
        # Functions of one slot share a group, because traffic between them does not pass the IOMMU.
        grouped = device.kind in (*ACCELERATORS, "nic", "audio")
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
    for vendor, version in (("nvidia", settings.driver_version), ("ascend", settings.ascend_driver_version)):
        if vendor in machine.vendors and version:
            tree.update(_module_tree(vendor, version))
    if around.vfio:
        tree["/sys/bus/pci/drivers_probe"] = File(b"", 0o200)
        for name in ("bind", "unbind", "new_id", "remove_id"):
            tree[f"/sys/bus/pci/drivers/{VFIO_DRIVER}/{name}"] = File(b"", 0o200)
        tree["/sys/module/vfio_pci/initstate"] = text("live")
    return tree


def _module_tree(vendor: str, version: str) -> Tree:
    """Return the directories of a driver's modules. The first module binds to devices."""
    shows = {"nvidia": nvidia_files, "ascend": ascend_files}[vendor]
    tree: Tree = {}
    for name, size, users in shows.KERNEL_MODULES:
        here = "/sys/module/" + name
        tree.update(
            {
                here + "/version": text(version),
                here + "/initstate": text("live"),
                here + "/coresize": text(size),
                here + "/refcnt": text(len(users)),
                here + "/taint": text("OE"),
            }
        )
    first = shows.KERNEL_MODULES[0][0]
    tree[f"/sys/module/{first}/drivers/pci:{shows.PCI_DRIVER}"] = Link(f"../../../bus/pci/drivers/{shows.PCI_DRIVER}")
    tree[f"/sys/bus/pci/drivers/{shows.PCI_DRIVER}/module"] = Link(f"../../../../module/{first}")
    return tree


def device_nodes(machine: Machine, majors: Majors, vfio: bool = True, gpus: bool = True) -> Tree:
    """Return the tree under /dev. ``gpus`` is whether NVIDIA's driver is loaded."""
    tree: Tree = {}
    if machine.gpus and gpus:
        tree.update(nvidia_files.device_nodes(machine, majors))
    if machine.npus:
        tree.update(ascend_files.device_nodes(machine, majors))
    if vfio:
        tree["/dev/vfio/vfio"] = Node(MISCELLANEOUS_MAJOR, VFIO_MINOR)
        tree["/dev/iommu"] = Node(MISCELLANEOUS_MAJOR, IOMMU_MINOR, 0o600)
    # systemd's device rules for containers name devices by /dev/char
    links = {
        f"/dev/char/{int(node.major)}:{int(node.minor)}": Link("../" + path[len("/dev/") :])
        for path, node in tree.items()
        if isinstance(node, Node)
    }
    if machine.gpus and gpus:
        # The links to UVM nodes exist before another program creates the nodes.
        for path, minor in nvidia_files.UVM_NODES.items():
            links[f"/dev/char/{majors.by_name['nvidia-uvm']}:{minor}"] = Link("../" + path[len("/dev/") :])
    tree.update(links)
    return tree


def proc_tree(machine: Machine, majors: Majors, around: Surroundings, gpus: bool = True) -> Tree:
    """Return the kernel's files under /proc with the drivers' lines. ``gpus`` is whether NVIDIA's driver is loaded."""
    characters = [(number, name) for name, number in majors.of("vfio").items()]
    modules: list[Module] = []
    if machine.gpus and gpus:
        characters = nvidia_files.characters(machine, majors) + characters
        modules += nvidia_files.KERNEL_MODULES
    if machine.npus:
        characters += ascend_files.characters(majors)
        modules += ascend_files.KERNEL_MODULES
    tree: Tree = {"/proc/devices": File(merge_proc_devices(around.proc_devices, characters).encode())}
    if around.proc_modules is not None:
        tree["/proc/modules"] = File(merge_proc_modules(around.proc_modules, modules).encode())
    return tree


def whole_tree(
    machine: Machine, catalogue: Catalogue, settings: Settings, majors: Majors, around: Surroundings
) -> Tree:
    """Return the trees of /proc, /sys, and /dev, and the files of the drivers' installations."""
    gpus = bool(settings.driver_version)
    tree = proc_tree(machine, majors, around, gpus)
    if machine.gpus and gpus:
        tree.update(nvidia_files.proc_tree(machine, catalogue, settings))
    if machine.npus:
        tree.update(ascend_files.installation_files(machine, settings))
    tree.update(sys_tree(machine, catalogue, settings, around))
    tree.update(device_nodes(machine, majors, around.vfio, gpus))
    return tree
