# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the driver of NPUs shows of itself: files of its installation, device nodes."""

from __future__ import annotations

from .description import Settings
from .entries import File, Node, Tree
from .hardware import NPU_DRIVER, Machine
from .host import Majors, Module

PCI_DRIVER = NPU_DRIVER
# Whom the driver belongs to: a user, and a group of the same name
OWNER = "HwHiAiUser"
INSTALLED = "/usr/local/Ascend"
VERSION_FILE = f"{INSTALLED}/driver/version.info"
INSTALLATION_FILE = "/etc/ascend_install.info"
NETWORK_FILE = "/etc/hccn.conf"
# Names and sizes are chosen
KERNEL_MODULES: tuple[Module, ...] = (
    ("drv_pcie_host", 237568, ("drv_devmng_host", "drv_devmm_host")),
    ("drv_devmng_host", 528384, ("drv_devmm_host",)),
    ("drv_devmm_host", 614400, ()),
)
# Nodes that every program needs, besides that of its chip; chips of the second interface have no devmm_svm
CONTROL_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc", "dvpp_cmdlist")
# As the library makes them
SLICE_NODE_MODE = 0o666
SECOND_INTERFACE_LACKS = ("devmm_svm", "dvpp_cmdlist")
# Of the unified bus that these have instead, in folders of their own; how many there are and what they are called is chosen
SECOND_INTERFACE_BUS = (("uburma", "udma0"), ("uburma", "udma1"), ("ummu", "ummu0"))


def installation_files(machine: Machine, settings: Settings) -> Tree:
    """What the installation of the driver leaves behind for those who ask which one it was; the addresses of network ports."""
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
        INSTALLATION_FILE: File("".join("{}={}\n".format(*pair) for pair in installation).encode(), 0o644),
    }
    ports = sorted((npu.physical, npu.ip) for _device, npu in machine.chips if npu.ip)
    if ports:
        lines = [f"address_{physical}={ip}\nnetmask_{physical}=255.255.255.0\n" for physical, ip in ports]
        tree[NETWORK_FILE] = File("".join(lines).encode(), 0o644)
    return tree


def chip_node(physical: int, majors: Majors) -> tuple[str, Node]:
    """The node of a chip, and where it is."""
    return f"/dev/davinci{physical}", Node(majors.by_name["devdrv-cdev"], physical, 0o660, OWNER)


def device_nodes(machine: Machine, majors: Majors) -> Tree:
    """One node for each chip, and those of the driver itself. Slices' come and go with the slices."""
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
    """The driver's lines in /proc/devices."""
    return [(number, name) for name, number in majors.of("ascend").items()]
