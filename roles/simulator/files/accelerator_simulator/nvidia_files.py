# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The files that NVIDIA's driver shows: below /proc, and device nodes."""

from __future__ import annotations

from .description import Settings, gpu_uuid
from .entries import Directory, File, Node, Tree
from .hardware import Catalogue, Machine
from .host import NVIDIA_MAJOR, Majors, Module

PCI_DRIVER = "nvidia"
PCI_DRIVERS = (PCI_DRIVER, "nvidia-nvswitch")
CONTROL_MINOR, MODESET_MINOR = 255, 254
#: Minor numbers of nvidia-uvm. Neither the kernel module nor a boot creates the nodes: nvidia-modprobe -u or a
#: replacement does.
UVM_NODES = {"/dev/nvidia-uvm": 0, "/dev/nvidia-uvm-tools": 1}
MIG_CONFIG_MINOR, MIG_MONITOR_MINOR = 1, 2
# nvidia-modprobe's numbering: 32 GPUs, 15 GPU instances each, 8 compute instances in each of those
CAPABILITY_GPUS, CAPABILITY_GPU_INSTANCES, CAPABILITY_COMPUTE_INSTANCES = 32, 15, 8
KERNEL_MODULES: tuple[Module, ...] = (
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
    ("CoherentGPUMemoryMode", '""'),
)


def capability(minor: int, mode: int) -> File:
    """Return one file of the capability tree, with the minor and mode of its device node."""
    return File(f"DeviceFileMinor: {int(minor)}\nDeviceFileMode: {int(mode)}\nDeviceFileModify: 1\n".encode())


def mig_minors() -> str:
    """Return /proc/driver/nvidia-caps/mig-minors: the fixed map of every possible capability."""
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


def proc_tree(machine: Machine, catalogue: Catalogue, settings: Settings) -> Tree:
    """Return the driver's files under /proc about itself and its GPUs."""
    driver, nvswitches = "/proc/driver/nvidia", [device for device in machine.devices if device.kind == "nvswitch"]
    tree: Tree = {
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
        if gpu.memory_numa is not None:
            tree[f"{driver}/gpus/{gpu.address}/numa_status"] = File(
                f"Node: {gpu.memory_numa}\nStatus: online\n".encode()
            )
        if board.mig is not None:
            tree[f"{driver}/capabilities/gpu{int(gpu.minor or 0)}/mig"] = Directory(0o755)
    for switch in nvswitches:
        tree[f"/proc/driver/nvidia-nvswitch/devices/{switch.address}"] = File(b"BIOS Version: 96.10.6E.00.01\n")
    return tree


def device_nodes(machine: Machine, majors: Majors) -> Tree:
    """Return one node per GPU, and the driver's own nodes without those of nvidia-uvm."""
    caps = majors.by_name["nvidia-caps"]
    tree: Tree = {f"/dev/nvidia{gpu.minor or 0}": Node(NVIDIA_MAJOR, gpu.minor or 0) for gpu in machine.gpus}
    tree.update(
        {
            "/dev/nvidiactl": Node(NVIDIA_MAJOR, CONTROL_MINOR),
            "/dev/nvidia-modeset": Node(NVIDIA_MAJOR, MODESET_MINOR),
            f"/dev/nvidia-caps/nvidia-cap{int(MIG_CONFIG_MINOR)}": Node(caps, MIG_CONFIG_MINOR, 0o400),
            f"/dev/nvidia-caps/nvidia-cap{int(MIG_MONITOR_MINOR)}": Node(caps, MIG_MONITOR_MINOR, 0o444),
        }
    )
    switches = [device for device in machine.devices if device.kind == "nvswitch"]
    if switches:
        major = majors.by_name["nvidia-nvswitch"]
        tree["/dev/nvidia-nvswitchctl"] = Node(major, 255)
        tree.update({f"/dev/nvidia-nvswitch{int(number)}": Node(major, number) for number in range(len(switches))})
    return tree


def characters(machine: Machine, majors: Majors) -> list[tuple[int, str]]:
    """Return the driver's lines in /proc/devices."""
    switches = any(device.kind == "nvswitch" for device in machine.devices)
    ours = [(NVIDIA_MAJOR, name) for name in ("nvidia", "nvidia-modeset", "nvidiactl")]
    return ours + [
        (number, name) for name, number in majors.of("nvidia").items() if switches or name != "nvidia-nvswitch"
    ]
