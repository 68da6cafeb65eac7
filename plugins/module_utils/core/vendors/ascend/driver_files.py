# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The files of the driver that every container with an NPU needs, and the facts in the driver's files.

Facts: the lists of Ascend/mind-cluster (component/ascend-docker-runtime/build/scripts/base.list). The directory of the
installation, the version, and the existing files are read from the host.
"""

from __future__ import annotations

import re
import threading

from ...errors import BackendUnavailable, NotFound
from ...host.cdi import ContainerEdits, DeviceNode, Mount
from ...host.system import Stamp, System
from ...model import Device, Partition
from ..host_texts import text_or_empty
from .npu_smi.npu_smi_tables import key_values

INSTALL_INFO = "/etc/ascend_install.info"
_DEFAULT_FOLDER = "/usr/local/Ascend"
_FOLDER = re.compile(r"/[A-Za-z0-9._/+-]*")
#: The control node of all products, and those of some products.
MANAGER = "/dev/davinci_manager"
CONTROL_NODES = ("/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist")
#: A chip that is a complete computer (310B) has a separate manager node for containers, which has the usual name
#: inside, and these nodes. The names are generic, so they count only if that manager and the first of them exist.
SOC_MANAGER = "/dev/davinci_manager_docker"
SOC_NODES = tuple(
    f"/dev/{name}"
    for name in (
        *("svm0", "ts_aisle", "upgrade", "sys", "vdec", "vpc", "pngd", "venc", "dvpp_cmdlist"),
        *("log_drv", "acodec", "ai", "ao", "vo", "hdmi"),
    )
)
#: Directories of the nodes of the unified bus (950), with one node for each bus device.
BUS_FOLDERS = ("/dev/uburma", "/dev/ummu")
PROGRAM = "npu-smi"
PROGRAM_FOLDERS = ("/usr/local/bin", "/usr/local/sbin")
LIBRARIES = ("driver/lib64/driver", "driver/lib64/common")
#: Paths in the directory of the installation.
_OF_INSTALLATION = ("driver/lib64", "driver/include", "driver/version.info", "driver/topo")
_OF_MACHINE = ("/usr/local/dcmi", "/var/queue_schedule", INSTALL_INFO, "/etc/hccl_rootinfo.json")
#: The addresses of the chips' network ports, and the program that reads and sets them (in the directory of the
#: installation). The installation of the driver creates both. Public instructions for training and inference in
#: containers mount both.
NETWORK_FILE, _NETWORK_TOOL = "/etc/hccn.conf", "driver/tools/hccn_tool"
MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
#: The directory in which Huawei's container runtime lists what it adds to containers, wherever it is installed.
RUNTIME_LISTS = "/etc/ascend-docker-runtime.d"
VISIBLE, OPTIONS = "ASCEND_VISIBLE_DEVICES", "ASCEND_RUNTIME_OPTIONS"
#: Makes Huawei's container runtime add no device, and marks the container for programs that check for the runtime.
_ENVIRONMENT = (f"{VISIBLE}=void", "ASCEND_DOCKER_RUNTIME=True")


def install_folder(system: System) -> str:
    """Return the directory in which the driver is installed."""
    install_path = key_values(text_or_empty(system, INSTALL_INFO).replace("=", ":")).get(
        "driver_install_path_param", ""
    )
    return install_path.rstrip("/") if _FOLDER.fullmatch(install_path) and install_path.strip("/") else _DEFAULT_FOLDER


def version_of(system: System, what: str = "driver") -> str:
    """Return the installed version of the driver or of the ``firmware``; "" if no file has it."""
    said = key_values(text_or_empty(system, f"{install_folder(system)}/{what}/version.info").replace("=", ":"))
    return said.get("version", "")


def program(system: System) -> str:
    """Return the path of npu-smi for this process; its bare name if it is in none of its directories."""
    there = (f"{folder}/{PROGRAM}" for folder in PROGRAM_FOLDERS)
    return next((str(system.path(path)) for path in there if system.exists(path)), PROGRAM)


def library_path(system: System) -> str:
    """Return the library search path of the vendor's programs for this process."""
    folder = install_folder(system)
    return ":".join(str(system.path(f"{folder}/{each}")) for each in LIBRARIES)


class CommonEdits:
    """The container edits that all chips share, generated again after a change of their files. Safe for threads.

    With ``network_tools``, containers get the addresses of the network ports and the tool for them.
    """

    def __init__(self, system: System, *, network_tools: bool = False) -> None:
        self._system = system
        self._network_tools = network_tools
        self._lock = threading.Lock()
        self._known: tuple[tuple[str, ...], tuple[Stamp, ...], ContainerEdits] | None = None

    def current(self) -> ContainerEdits:
        """Return the edits for the files that exist now. Raises BackendUnavailable with the name of a missing file."""
        with self._lock:
            known = self._known
            if known is not None and self._system.fingerprint(known[0]) == known[1]:
                return known[2]
            paths = _paths(self._system)
            seen = self._system.fingerprint(paths)
            edits = driver_edits(self._system, network_tools=self._network_tools)
            self._known = (paths, seen, edits)
            return edits


def driver_edits(system: System, *, network_tools: bool = False) -> ContainerEdits:
    """Return the container edits that all chips of the host share. Missing optional files are left out.

    With ``network_tools``, the file and the tool of the network ports are required. The edits do not set the library
    search path. Images for these chips set it, and setting it here would remove their additions. Raises
    BackendUnavailable with the name of a missing required file.
    """
    folder = install_folder(system)
    is_soc = all(system.device_number(path) is not None for path in (SOC_MANAGER, SOC_NODES[0]))
    if system.device_number(MANAGER) is None and not is_soc:
        raise BackendUnavailable(
            f"{MANAGER} is no device node of this machine, and no container can use an NPU without it",
            hint="Load the driver of the NPUs; a new installation needs a restart of the machine.",
            code="driver-incomplete",
        )
    if not system.exists(f"{folder}/{LIBRARIES[0]}"):
        raise BackendUnavailable(
            f"{folder}/{LIBRARIES[0]}, the driver's libraries, is not there",
            hint=f"Install the driver of the NPUs. Its directory is in {INSTALL_INFO}.",
            code="driver-incomplete",
        )
    nodes = [node(system, SOC_MANAGER, MANAGER)] if is_soc else [node(system, MANAGER)]
    of_bus = (f"{folder}/{name}" for folder in BUS_FOLDERS for name in system.list_directory(folder))
    beside = (*(SOC_NODES if is_soc else CONTROL_NODES), *of_bus)
    nodes += [node(system, path) for path in beside if system.device_number(path) is not None]
    mounts = [Mount(path, path, MOUNT_OPTIONS) for path in _mounted(folder) if system.exists(path)]
    tool = next((f"{each}/{PROGRAM}" for each in PROGRAM_FOLDERS if system.exists(f"{each}/{PROGRAM}")), None)
    if tool is not None:
        mounts.append(Mount(system.real_path(tool), f"{PROGRAM_FOLDERS[0]}/{PROGRAM}", MOUNT_OPTIONS))
    mounts += _network_mounts(system, folder) if network_tools else ()
    return ContainerEdits(env=_ENVIRONMENT, device_nodes=tuple(nodes), mounts=tuple(mounts))


def device_edits(system: System, device: Device, partition: Partition | None) -> ContainerEdits:
    """Return the container edits for one chip or one vNPU. Raises NotFound if its node is missing.

    Inside the container, a vNPU's node has the name of a chip's node.
    """
    if partition is None:
        return ContainerEdits(device_nodes=(node(system, f"/dev/davinci{device.minor}"),))
    number = partition.instance_id
    return ContainerEdits(device_nodes=(node(system, slice_node(number), f"/dev/davinci{number}"),))


def runtime_edits(system: System) -> ContainerEdits:
    """Return the edits that all chips share with Huawei's container runtime, which adds the driver's files itself.

    Raises BackendUnavailable if the runtime is not installed.
    """
    if not system.exists(RUNTIME_LISTS):
        raise BackendUnavailable(
            f"Containers are to get NPUs by ascend-docker-runtime, and {RUNTIME_LISTS} is not there",
            hint="Install it, as the role ascend_runtime does; or leave this vendor out of vendor_runtimes.",
            code="runtime-missing",
        )
    return ContainerEdits(lists=((VISIBLE, ()),))


def runtime_device_edits(system: System, device: Device, partition: Partition | None) -> ContainerEdits:
    """Return the environment by which Huawei's container runtime selects one chip or one vNPU.

    Raises NotFound if its node is missing.

    ASCEND_VNPU_SPECS is not used, because it makes the runtime create a further vNPU.
    """
    number = device.minor if partition is None else partition.instance_id
    node(system, f"/dev/davinci{number}" if partition is None else slice_node(number))
    options = "" if partition is None else "VIRTUAL"
    return ContainerEdits(env=(f"{OPTIONS}={options}",), lists=((VISIBLE, (str(number),)),))


def slice_node(number: int) -> str:
    """Return the path of a vNPU's node on the host."""
    return f"/dev/vdavinci{number}"


def node(system: System, path: str, inside: str = "") -> DeviceNode:
    """Return a device node of the host with read and write access, but not mknod. Raises NotFound."""
    number = system.device_number(path)
    if number is None:
        raise NotFound(
            f"{path} is not a device node of this node", hint="Check the messages of the NPU driver in the kernel log."
        )
    return DeviceNode(
        inside or path,
        host_path=path if inside else "",
        type=number.type,
        major=number.major,
        minor=number.minor,
        permissions="rw",
    )


def _network_mounts(system: System, folder: str) -> list[Mount]:
    paths = (NETWORK_FILE, f"{folder}/{_NETWORK_TOOL}")
    missing = [path for path in paths if not system.exists(path)]
    if missing:
        raise BackendUnavailable(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing on the host, and network_tools requires them in containers",
            hint="Install the driver of the NPUs with its tools, or remove this vendor from network_tools (dra_driver_network_tools).",
            code="network-tools-missing",
        )
    return [Mount(path, path, MOUNT_OPTIONS) for path in paths]


def _mounted(folder: str) -> tuple[str, ...]:
    return (*(f"{folder}/{each}" for each in _OF_INSTALLATION), *_OF_MACHINE)


def _paths(system: System) -> tuple[str, ...]:
    """Return the paths whose change can change the edits."""
    folder = install_folder(system)
    tools = (f"{each}/{PROGRAM}" for each in PROGRAM_FOLDERS)
    control = dict.fromkeys((MANAGER, *CONTROL_NODES, SOC_MANAGER, *SOC_NODES, *BUS_FOLDERS))
    network = (NETWORK_FILE, f"{folder}/{_NETWORK_TOOL}")
    return (*control, INSTALL_INFO, f"{folder}/{LIBRARIES[0]}", *_mounted(folder), *tools, *network)
