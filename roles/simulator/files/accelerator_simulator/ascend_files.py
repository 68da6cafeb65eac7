# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The files that the NPU driver shows: those of its installation, and device nodes."""

from __future__ import annotations

from .description import Settings
from .entries import File, Node, Tree
from .hardware import NPU_DRIVER, Machine
from .host import Majors, Module

PCI_DRIVER = NPU_DRIVER
# Owner of the driver: a user, and a group with the same name
OWNER = "HwHiAiUser"
INSTALLED = "/usr/local/Ascend"
VERSION_FILE = f"{INSTALLED}/driver/version.info"
# Which of several builds of the driver is installed
FEATURES_FILE = f"{INSTALLED}/driver/script/feature.conf"
INSTALLATION_FILE = "/etc/ascend_install.info"
NETWORK_FILE = "/etc/hccn.conf"
# Names and sizes are chosen
KERNEL_MODULES: tuple[Module, ...] = (
    ("drv_pcie_host", 237568, ("drv_devmng_host", "drv_devmm_host")),
    ("drv_devmng_host", 528384, ("drv_devmm_host",)),
    ("drv_devmm_host", 614400, ()),
)
# Device nodes that every program needs in addition to its chip's. Chips of the second interface have no devmm_svm
CONTROL_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc", "dvpp_cmdlist")
# Mode of chip and vNPU nodes: opening a chip's node sets owner and mode of new nodes to its own
NODE_MODE = 0o660
SECOND_INTERFACE_LACKS = ("devmm_svm", "dvpp_cmdlist")
# Nodes of the unified bus in subdirectories, which these have instead. Their number and names are chosen
SECOND_INTERFACE_BUS = (("uburma", "udma0"), ("uburma", "udma1"), ("ummu", "ummu0"))


def installation_files(machine: Machine, settings: Settings) -> Tree:
    """Return the files of the driver installation that programs read to identify it, and the addresses of network
    ports.
    """
    installation = (
        ("UserName", OWNER),
        ("UserGroup", OWNER),
        ("Driver_Install_Type", "full"),
        ("Driver_Install_Path_Param", INSTALLED),
        ("Driver_Install_Mode", "normal"),
        ("Driver_Install_For_All", "no"),
        ("Driver_Install_Status", "complete"),
    )
    version = settings.ascend_driver_version
    tree: Tree = {
        VERSION_FILE: File(f"Version={version}\npackage_version={version}\n".encode()),
        FEATURES_FILE: File(f"FEATURE_HD_CONNECT_IS_UB={'y' if machine.is_on_unified_bus else 'n'}\n".encode(), 0o440),
        INSTALLATION_FILE: File("".join("{}={}\n".format(*pair) for pair in installation).encode(), 0o644),
    }
    # The installer creates the file even for chips without ports.
    ports = sorted((npu.physical, npu.ip) for _device, npu in machine.chips if npu.ip)
    lines = [f"address_{physical}={ip}\nnetmask_{physical}=255.255.255.0\n" for physical, ip in ports]
    tree[NETWORK_FILE] = File("".join(lines).encode(), 0o640)
    return tree


def chip_node(physical: int, majors: Majors) -> tuple[str, Node]:
    """Return the path and the node of a chip."""
    return f"/dev/davinci{physical}", Node(majors.by_name["devdrv-cdev"], physical, NODE_MODE, OWNER)


def device_nodes(machine: Machine, majors: Majors) -> Tree:
    """Return one node per chip, and the driver's own nodes. Nodes of vNPUs are created and removed with the vNPUs."""
    tree: Tree = dict(chip_node(npu.physical, majors) for _device, npu in machine.chips)
    lacking = SECOND_INTERFACE_LACKS if machine.ascend.get("interface") == 2 else ()
    for name in CONTROL_NODES:
        if name not in lacking:
            tree[f"/dev/{name}"] = Node(majors.by_name[name], 0, 0o660, OWNER)
    if machine.ascend.get("interface") == 2:
        for minor, (folder, name) in enumerate(SECOND_INTERFACE_BUS):
            tree[f"/dev/{folder}/{name}"] = Node(majors.by_name[folder], minor, 0o660, OWNER)
    return tree


def characters(majors: Majors) -> list[tuple[int, str]]:
    """Return the driver's lines in /proc/devices."""
    return [(number, name) for name, number in majors.of("ascend").items()]
