# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What every container with an NPU needs of the driver, and what the driver's files tell of it.

Facts: the lists of Ascend/mind-cluster (component/ascend-docker-runtime/build/scripts/base.list). Only where the driver was
installed, its version and which of those files there are is read from the machine.
"""

from __future__ import annotations

import re
import threading

from ..cdi import ContainerEdits, DeviceNode, Mount
from ..errors import BackendUnavailable, NotFound
from ..model import Device, Partition
from ..system import Stamp, System
from .tables import key_values

INSTALL_INFO = "/etc/ascend_install.info"
_DEFAULT_FOLDER = "/usr/local/Ascend"
_FOLDER = re.compile(r"/[A-Za-z0-9._/+-]*")
#: Control nodes that all products have, and those that some have.
MANAGER = "/dev/davinci_manager"
CONTROL_NODES = ("/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist")
#: A chip that is a computer by itself (310B) has a manager of its own for containers, which is the manager inside, and these nodes. Their
#: names are so plain that they count only where that manager and the first of them are.
SOC_MANAGER = "/dev/davinci_manager_docker"
SOC_NODES = tuple(
    f"/dev/{name}"
    for name in (
        *("svm0", "ts_aisle", "upgrade", "sys", "vdec", "vpc", "pngd", "venc", "dvpp_cmdlist"),
        *("log_drv", "acodec", "ai", "ao", "vo", "hdmi"),
    )
)
#: Folders of the nodes of the unified bus (950): one node for each of its devices.
BUS_FOLDERS = ("/dev/uburma", "/dev/ummu")
PROGRAM = "npu-smi"
PROGRAM_FOLDERS = ("/usr/local/bin", "/usr/local/sbin")
LIBRARIES = ("driver/lib64/driver", "driver/lib64/common")
#: Below the folder of the installation.
_OF_INSTALLATION = ("driver/lib64", "driver/include", "driver/version.info", "driver/topo")
_OF_MACHINE = ("/usr/local/dcmi", "/var/queue_schedule", INSTALL_INFO, "/etc/hccl_rootinfo.json")
MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
#: Where Huawei's container runtime says what it brings into containers, wherever it is installed.
RUNTIME_LISTS = "/etc/ascend-docker-runtime.d"
VISIBLE, OPTIONS = "ASCEND_VISIBLE_DEVICES", "ASCEND_RUNTIME_OPTIONS"
#: Has Huawei's container runtime add nothing of its own, and tells programs that look for it what they look for.
_ENVIRONMENT = (f"{VISIBLE}=void", "ASCEND_DOCKER_RUNTIME=True")


def install_folder(system: System) -> str:
    """Return the folder that the driver was installed in."""
    told = key_values(_says(system, INSTALL_INFO).replace("=", ":")).get("driver_install_path_param", "")
    return told.rstrip("/") if _FOLDER.fullmatch(told) and told.strip("/") else _DEFAULT_FOLDER


def version_of(system: System, what: str = "driver") -> str:
    """Return the version of the driver, or of the ``firmware``, that is installed; empty where no file tells."""
    said = key_values(_says(system, f"{install_folder(system)}/{what}/version.info").replace("=", ":"))
    return said.get("version", "")


def program(system: System) -> str:
    """Return where npu-smi is, in this process's own view; its bare name where it is in none of its places."""
    there = (f"{folder}/{PROGRAM}" for folder in PROGRAM_FOLDERS)
    return next((str(system.path(path)) for path in there if system.exists(path)), PROGRAM)


def library_path(system: System) -> str:
    """Return the folders in which the vendor's programs look for its libraries, in this process's own view."""
    folder = install_folder(system)
    return ":".join(str(system.path(f"{folder}/{each}")) for each in LIBRARIES)


class CommonEdits:
    """The container edits that all chips share, made anew when what they were made from has changed. Safe for threads."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._lock = threading.Lock()
        self._known: tuple[tuple[str, ...], tuple[Stamp, ...], ContainerEdits] | None = None

    def current(self) -> ContainerEdits:
        """Return the edits that fit what is on the disk. Raises BackendUnavailable, naming it, when something is missing."""
        with self._lock:
            known = self._known
            if known is not None and self._system.fingerprint(known[0]) == known[1]:
                return known[2]
            paths = _paths(self._system)
            seen = self._system.fingerprint(paths)
            edits = driver_edits(self._system)
            self._known = (paths, seen, edits)
            return edits


def driver_edits(system: System) -> ContainerEdits:
    """Return what all chips of the machine need in a container. What is optional and not there is left out.

    The search path of libraries is the image's own: images that are made for these chips have set it, and to set it here would
    take what they have added. Raises BackendUnavailable, naming it, when something is not there that no program can do without.
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
            hint=f"Install the driver of the NPUs; where it is installed {INSTALL_INFO} tells.",
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
    return ContainerEdits(env=_ENVIRONMENT, device_nodes=tuple(nodes), mounts=tuple(mounts))


def device_edits(system: System, device: Device, partition: Partition | None) -> ContainerEdits:
    """Return what one chip, or one slice of it, needs in a container. Raises NotFound where its node is not there.

    Inside, a slice's node has the name that a chip's has.
    """
    if partition is None:
        return ContainerEdits(device_nodes=(node(system, f"/dev/davinci{device.minor}"),))
    number = partition.instance_id
    return ContainerEdits(device_nodes=(node(system, slice_node(number), f"/dev/davinci{number}"),))


def runtime_edits(system: System) -> ContainerEdits:
    """Return what all chips of the machine need where Huawei's container runtime brings them in: that it is there, and nothing else.

    Raises BackendUnavailable where it is not installed.
    """
    if not system.exists(RUNTIME_LISTS):
        raise BackendUnavailable(
            f"Containers are to get NPUs by ascend-docker-runtime, and {RUNTIME_LISTS} is not there",
            hint="Install it, as the role ascend_runtime does; or leave this vendor out of vendor_runtimes.",
            code="runtime-missing",
        )
    return ContainerEdits(lists=((VISIBLE, ()),))


def runtime_device_edits(system: System, device: Device, partition: Partition | None) -> ContainerEdits:
    """Return by which words Huawei's container runtime knows one chip, or one slice of it. Raises NotFound where its node is not there.

    ASCEND_VNPU_SPECS, which has it make a slice by itself, is for nobody who makes slices: that one would come on top.
    """
    number = device.minor if partition is None else partition.instance_id
    node(system, f"/dev/davinci{number}" if partition is None else slice_node(number))
    options = "" if partition is None else "VIRTUAL"
    return ContainerEdits(env=(f"{OPTIONS}={options}",), lists=((VISIBLE, (str(number),)),))


def slice_node(number: int) -> str:
    """Return the path of the node of a slice on the host."""
    return f"/dev/vdavinci{number}"


def node(system: System, path: str, inside: str = "") -> DeviceNode:
    """Return a node as it is on the host, to be read and written but not made anew. Raises NotFound."""
    number = system.device_number(path)
    if number is None:
        raise NotFound(f"{path} is no device node of this machine", hint="Look at the driver's log in the kernel log.")
    return DeviceNode(
        inside or path,
        host_path=path if inside else "",
        type=number.type,
        major=number.major,
        minor=number.minor,
        permissions="rw",
    )


def _mounted(folder: str) -> tuple[str, ...]:
    return (*(f"{folder}/{each}" for each in _OF_INSTALLATION), *_OF_MACHINE)


def _paths(system: System) -> tuple[str, ...]:
    """Return the paths where something that the edits would take can come or go."""
    folder = install_folder(system)
    tools = (f"{each}/{PROGRAM}" for each in PROGRAM_FOLDERS)
    control = dict.fromkeys((MANAGER, *CONTROL_NODES, SOC_MANAGER, *SOC_NODES, *BUS_FOLDERS))
    return (*control, INSTALL_INFO, f"{folder}/{LIBRARIES[0]}", *_mounted(folder), *tools)


def _says(system: System, path: str) -> str:
    try:
        return system.read_text(path)
    except OSError:
        return ""
